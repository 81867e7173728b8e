"""Further state of a training, and optimizers with names: saved, and loaded elsewhere."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, StepLR

from tests.distributed.models import MODELS, batch
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh, load_checkpoint, save_checkpoint


class Loader:
    """A loader that knows where it is."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        """Return where it is."""
        return {'at': self.at, 'order': torch.arange(3) + self.at}

    def load_state_dict(self, state):
        """Go there."""
        self.at = state['at']


def training(axes, data='replicate'):
    """Return a model on a mesh with an optimizer by names and a scheduler; and its replica."""
    with torch.device('meta'):
        module = MODELS['perceptron']()
    mesh = init_mesh(**axes)
    model = DistributedGPipe(module, [4, 4], mesh=mesh, chunks=2, data=data)
    optimizer = torch.optim.AdamW(model.named_parameters(), 0.1)
    return model, optimizer, StepLR(optimizer, 1, 0.5), mesh.get_local_rank('data')


def stepped(model, optimizer, scheduler, part):
    """Take a step of a training; return the loss."""
    optimizer.zero_grad()
    loss = model.step(*map(part, batch(0, 4)), F.mse_loss)
    optimizer.step()
    scheduler.step()
    return loss.item()


def saved(folder, axes):
    """Save after two steps, and return the loss of the third."""
    model, optimizer, scheduler, replica = training(axes)
    data = axes.get('data', 1)

    def part(x):
        return x.chunk(data)[replica]

    for _ in range(2):
        stepped(model, optimizer, scheduler, part)
    model.save(
        folder,
        optimizer,
        extra={'scheduler': scheduler, 'step': 2, 'loader': Loader(7 + replica), 'none': None},
    )
    return stepped(model, optimizer, scheduler, part)


def loaded(folder, axes, names):
    """Load; return the extra state, and the loss of the next step."""
    model, optimizer, scheduler, replica = training(axes)
    loader = Loader()
    objects = {'scheduler': scheduler, 'loader': loader}
    found = model.load(folder, optimizer, extra={name: objects[name] for name in names})
    data = axes.get('data', 1)
    loss = stepped(model, optimizer, scheduler, lambda x: x.chunk(data)[replica])
    return found.get('step'), loader.at, scheduler.get_last_lr(), loss


@pytest.mark.slow
@pytest.mark.parametrize('axes', [{'pipe': 2}, {'data': 2}])
def test_a_training_goes_on_with_all_that_belongs_to_it(tmp_path, axes):
    losses = run(2, saved, tmp_path / 'c', axes)
    found = run(2, loaded, tmp_path / 'c', axes, ['scheduler', 'loader'])
    for rank, (step, at, rate, loss) in enumerate(found):
        assert (step, rate) == (2, [0.1 * 0.5**3])
        assert at == 7 + (rank if 'data' in axes else 0)
        assert loss == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.slow
def test_an_optimizer_by_names_goes_on_elsewhere(tmp_path):
    """On the other mesh, and in one process, where groups have other names in them."""
    loss, _ = run(2, saved, tmp_path / 'c', {'pipe': 2})
    for step, _, _, again in run(2, loaded, tmp_path / 'c', {'data': 2}, ['scheduler']):
        assert step == 2 and again == pytest.approx(loss, rel=1e-12)
    model = GPipe(MODELS['perceptron'](), [8], devices=['cpu'], chunks=2)
    optimizer = torch.optim.AdamW(model.named_parameters(), 0.1)
    scheduler = StepLR(optimizer, 1, 0.5)
    found = load_checkpoint(tmp_path / 'c', model, optimizer, {'scheduler': scheduler})
    assert found['step'] == 2 and found['none'] is None and found['loader']['at'] == 7
    assert stepped(model, optimizer, scheduler, lambda x: x) == pytest.approx(loss, rel=1e-12)
    assert optimizer.param_groups[0]['param_names'] == [*dict(model.named_parameters())]


@pytest.mark.slow
def test_states_of_replicas_need_as_many_of_them(tmp_path):
    run(2, saved, tmp_path / 'c', {'data': 2})
    with pytest.raises(RuntimeError, match="extra 'loader' is another one for each of 2 replicas"):
        run(1, loaded, tmp_path / 'c', {}, ['loader'])
    assert run(1, loaded, tmp_path / 'c', {}, ['scheduler'])[0][:2] == (2, 0)


def different():
    """Save other values on ranks of one replica; and other names."""
    model, *_ = training({'pipe': 2})
    rank = torch.distributed.get_rank()
    found = []
    for extra in ({'a': rank}, {f'a{rank}': 1}, {'a.b': 1}):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            model.save('nowhere', extra=extra)
        found.append(str(caught.value))
    return found


def test_ranks_of_a_replica_save_the_same():
    for values, names, dot in run(2, different):
        assert "other values of extra 'a'" in values
        assert 'the same names' in names
        assert 'without a dot' in dot


def test_one_process(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    save_checkpoint(tmp_path / 'c', model, optimizer, {'scheduler': scheduler, 'epoch': 3})
    other = LambdaLR(torch.optim.SGD(model.parameters(), 0.1), lambda step: 0.5**step)
    assert load_checkpoint(tmp_path / 'c', model, extra={'scheduler': other})['epoch'] == 3
    assert other.last_epoch == 1
    with pytest.raises(ValueError, match="no extra 'loader'; it has .'epoch', 'scheduler'"):
        load_checkpoint(tmp_path / 'c', model, extra={'loader': Loader()})


class Odd:
    """A set, whose elements are in the order in which they were added."""

    def __init__(self, order):
        self.numbers = set()
        for k in order:
            self.numbers.add(k)

    def state_dict(self):
        """Return them."""
        return {'numbers': self.numbers}


def odd(folder):
    """Save values of any kind, which are the same on both replicas."""
    model, *_ = training({'data': 2})
    order = (0, 8) if torch.distributed.get_rank() else (8, 0)
    model.save(
        folder,
        extra={
            'odd': Odd(order),
            'nan': torch.tensor(float('nan')),
            'sparse': torch.eye(2).to_sparse(),
        },
    )


def test_values_of_any_kind(tmp_path):
    """One process finds them, since they belong to no replica."""
    assert [*Odd((0, 8)).numbers] != [*Odd((8, 0)).numbers]
    run(2, odd, tmp_path / 'c')
    found = load_checkpoint(tmp_path / 'c', MODELS['perceptron']())
    assert found['odd']['numbers'] == {0, 8} and found['nan'].isnan() and found['sparse'].is_sparse


def replaced(folder):
    """Replace a layer by others on each replica; save, and copy, before a step."""
    rank = torch.distributed.get_rank()
    model = DistributedGPipe(nn.Sequential(nn.Linear(2, 2)), [1], mesh=init_mesh(data=2))
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, 1.0 + rank)
    model.set_submodule('0', layer)
    model.save(folder)
    model.set_submodule('0', nn.Linear(2, 2 + rank))
    with pytest.raises(RuntimeError, match='layers of other shapes'):
        model.step(torch.ones(2, 2), torch.ones(2, 2), F.mse_loss)
    model.load_state_dict(model.state_dict())
    return layer.weight.sum().item()


def test_a_replaced_layer_is_saved_with_the_values_of_the_first_replica(tmp_path):
    assert run(2, replaced, tmp_path / 'c') == [4.0, 4.0]
    model = nn.Sequential(nn.Linear(2, 2))
    load_checkpoint(tmp_path / 'c', model)
    assert model[0].weight.eq(1).all()


def pending():
    """Copy a model within an accumulation; give the gradients of both after the last step."""
    model = DistributedGPipe(nn.Sequential(nn.Linear(2, 2)), [1], mesh=init_mesh())
    batch = torch.ones(2, 2), torch.zeros(2, 2)
    with model.no_sync():
        model.step(*batch, F.mse_loss)
    new = copy.deepcopy(model)
    for each in (model, new):
        each.step(*batch, F.mse_loss)
    return [each[0].bias.grad for each in (model, new)]


def test_a_copy_has_the_gradients_that_wait():
    ((one, two),) = run(1, pending)
    torch.testing.assert_close(one, two)


# --- schedulers of optimizers whose ranks have other groups
# ----------------------------------------------------------------------------------


def by_decay(model, keeps_empty):
    """Return an optimizer with a group that decays, and one that does not."""
    decays = {'params': [x for x in model.parameters() if x.dim() > 1], 'weight_decay': 0.1}
    others = {'params': [x for x in model.parameters() if x.dim() < 2], 'lr': 0.05}
    groups = [group for group in (decays, others) if keeps_empty or group['params']]
    return torch.optim.AdamW(groups, 0.1, weight_decay=0.0)


def by_layer(model, keeps_empty):
    """Return an optimizer with a group for each layer."""
    groups = []
    for number in range(4):
        params = [x for name, x in model.named_parameters() if name.startswith(f'{number}.')]
        if params or keeps_empty:
            groups.append({'params': params, 'lr': 0.1 / (number + 1)})
    return torch.optim.AdamW(groups, 0.1)


def grouped(make, axes, keeps_empty, folder, loads):
    """Load a checkpoint or take two steps; take a step, and return its loss and the rates."""
    torch.manual_seed(0)
    mesh = init_mesh(**axes)
    module = nn.Sequential(
        nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 6)
    ).double()
    model = DistributedGPipe(module, [2, 2], mesh=mesh)
    optimizer = make(model, keeps_empty)
    scheduler = StepLR(optimizer, 1, 0.5)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')

    def part(x):
        return x.chunk(replicas)[replica]

    if loads:
        model.load(folder, optimizer, extra={'scheduler': scheduler})
    else:
        for _ in range(2):
            stepped(model, optimizer, scheduler, part)
        model.save(folder, optimizer, extra={'scheduler': scheduler})
    loss = stepped(model, optimizer, scheduler, part)
    rates = {
        name: group['lr']
        for group in optimizer.param_groups
        for name, x in model.named_parameters()
        if any(x is y for y in group['params'])
    }
    return loss, rates


def test_in_v0_22_a_scheduler_of_other_groups_was_loaded(tmp_path):
    """All ranks raise when it is loaded, before anything changes."""
    path = tmp_path / 'checkpoint'
    run(2, grouped, by_decay, {'data': 2}, False, path, False)
    for result in outcomes(2, grouped, by_decay, {'pipe': 2}, False, path, True):
        assert isinstance(result, Failure)
        assert "extra 'scheduler' has" in result.text and "{'params': []}" in result.text


def test_ranks_with_other_groups_get_the_way_out(tmp_path):
    for make in (by_decay, by_layer):
        for result in outcomes(2, grouped, make, {'pipe': 2}, False, tmp_path / 'model', False):
            assert isinstance(result, Failure)
            assert "also those without parameters there, {'params': []}" in result.text


@pytest.mark.parametrize(
    'make, saves, loads',
    [
        (by_decay, {'data': 2}, {'pipe': 2}),
        (by_layer, {'pipe': 2}, {'data': 2}),
        (by_layer, {'pipe': 2}, {}),
    ],
)
def test_empty_groups_let_a_scheduler_go_on_elsewhere(make, saves, loads, tmp_path):
    path = tmp_path / 'checkpoint'
    first = run(2, grouped, make, saves, True, path, False)
    later = run(2 if loads else 1, grouped, make, loads, True, path, True)
    rates = {name: rate for _, own in first for name, rate in own.items()}
    for loss, own in later:
        assert loss == pytest.approx(first[0][0], rel=1e-12)
        assert own == {name: rates[name] for name in own}
    assert {name for _, own in later for name in own} == {*rates}
