"""torch.distributed.checkpoint: names are the model's, for any balance."""

from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.tools.models import assert_equal, plain, sgd, train, wrapped
from tests.tools.rows import works


@works(
    '`torch.distributed.checkpoint`',
    '`get_state_dict` of model and optimizer, `save`, '
    '`load`, `set_state_dict`; into another balance, or without a pipeline',
)
def test_save_and_load(tmp_path):
    model = wrapped()
    optimizer = sgd(model)
    train(model, optimizer)
    state = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer)))
    checkpoint.save(state, checkpoint_id=tmp_path)
    twice = plain()
    again = sgd(twice)
    train(twice, again), train(twice, again)
    for other in (plain(), wrapped(), wrapped([1, 2, 1])):
        own = sgd(other)
        state = dict(zip(('model', 'optimizer'), get_state_dict(other, own)))
        checkpoint.load(state, checkpoint_id=tmp_path)
        set_state_dict(
            other, own, model_state_dict=state['model'], optim_state_dict=state['optimizer']
        )
        assert_equal(other, model)
        train(other, own)
        assert_equal(other, twice)
