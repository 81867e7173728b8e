"""The contents of a checkpoint: optimizers, generators, buffers, extra states; each of them
once."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from tests.distributed.models import batch
from tests.distributed.saving import World, adam, fresh, made, same, steps, values
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh, load_checkpoint, save_checkpoint


def drawn(folder):
    """Numbers that are drawn after saving, and after loading on this mesh and on another one."""
    torch.manual_seed(dist.get_rank())
    first, second = World('pipe'), World('pipe')
    torch.rand(3)
    first.save(folder)
    expected = torch.rand(3)
    second.load(folder)
    assert torch.equal(torch.rand(3), expected)
    other = DistributedGPipe(fresh(), [8], mesh=init_mesh(data=2))
    torch.manual_seed(5)
    other.load(folder)
    left = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), left)
    return expected.tolist()


@pytest.mark.slow
def test_random_state(tmp_path):
    one, another = run(2, drawn, str(tmp_path / 'model'))
    assert one != another
    model = fresh()
    save_checkpoint(tmp_path / 'one', model)
    expected = torch.rand(3)
    load_checkpoint(tmp_path / 'one', model)
    assert torch.equal(torch.rand(3), expected)


def saved_several(folder):
    for layout in ('replicate', 'shard'):
        made(layout, f'{folder}/{layout}')


@pytest.mark.slow
def test_shared_values_are_written_once(tmp_path):
    """And PyTorch alone reads it."""
    run(4, saved_several, str(tmp_path))
    made('plain', tmp_path / 'plain')

    def tensors(layout):
        return sum(
            item.length
            for item in dcp.FileSystemReader(tmp_path / layout)
            .read_metadata()
            .storage_data.values()
        )

    def size(layout):
        return sum(file.stat().st_size for file in Path(tmp_path / layout).glob('*.distcp'))

    for layout in ('replicate', 'shard'):
        assert size(layout) <= tensors(layout) < 2 * tensors('plain')
    world = World('plain')
    optimizer = adam(world.model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(world.model, optimizer, options=options)
    read = {'model': model_state, 'optimizer': optimizer_state}
    with pytest.warns(UserWarning, match='torch.distributed is disabled'):
        dcp.load(read, checkpoint_id=tmp_path / 'shard', no_dist=True)
    set_state_dict(
        world.model,
        optimizer,
        model_state_dict=read['model'],
        optim_state_dict=read['optimizer'],
        options=options,
    )
    other = World('plain')
    own = adam(other.model)
    other.load(tmp_path / 'plain', own)
    assert steps(world, optimizer, range(2, 4)) == pytest.approx(
        steps(other, own, range(2, 4)), rel=1e-9
    )


def some_layers():
    return nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh(), nn.Sigmoid())


def without_parameters(folder):
    """A rank without any, and an optimizer before its first step, which has no states."""
    model = DistributedGPipe(some_layers(), [1, 2], mesh=init_mesh(pipe=2))
    optimizer = adam(model) if [*model.parameters()] else None
    model.save(folder, optimizer)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    x, target = batch(0, 4)
    model.step(x, target, nn.functional.mse_loss)
    if optimizer is not None:
        optimizer.step()
    model.load(folder, optimizer)
    assert optimizer is None or not optimizer.state
    return values(model)


def test_a_rank_without_parameters(tmp_path):
    found = run(2, without_parameters, str(tmp_path))
    model = some_layers()
    optimizer = adam(model)
    load_checkpoint(tmp_path, model, optimizer)
    same(values(model), found[0])
    assert found[1] == {} and not optimizer.state


def normalized(folder):
    with torch.device('meta'):
        module = resnet_of_four()
    model = DistributedGPipe(
        module, [2, 2], mesh=init_mesh(data=2, pipe=2), chunks=2, deferred_batch_norm=True
    )
    x = batch(0, 8)[0].chunk(2)[dist.get_rank() // 2]
    model.step(x, x, nn.functional.mse_loss)
    model.save(folder)
    return values(model)


def resnet_of_four():
    def norm():
        return nn.BatchNorm1d(6, dtype=torch.float64)

    return nn.Sequential(norm(), nn.Linear(6, 6, dtype=torch.float64), norm(), nn.Tanh())


def test_running_statistics(tmp_path):
    found = run(4, normalized, str(tmp_path))
    model = resnet_of_four()
    load_checkpoint(tmp_path, model)
    for rank in found:
        same(values(model), rank)
    assert model[2].num_batches_tracked == 1 and model[2].running_mean.abs().sum() > 0


#: One whose learning rate is a tensor, one with states before the first step, and two others. The
#: last one's states have other shapes than parameters, which PyTorch supports for whole ones only.
OPTIMIZERS = {
    'radam': lambda model: torch.optim.RAdam(model.parameters(), torch.tensor(0.02)),
    'adagrad': lambda model: torch.optim.Adagrad(model.parameters(), 0.02),
    'sgd': lambda model: torch.optim.SGD(model.parameters(), 0.02, momentum=0.9),
    'adafactor': lambda model: torch.optim.Adafactor(model.parameters(), 0.02),
}


def saved_here(folder, name, layout):
    world = World(layout)
    optimizer = OPTIMIZERS[name](world.model)
    steps(world, optimizer, range(2))
    world.save(folder, optimizer)
    return steps(world, optimizer, range(2, 4))


def loaded_here(folder, name, layout):
    world = World(layout)
    optimizer = OPTIMIZERS[name](world.model)
    world.load(folder, optimizer)
    return steps(world, optimizer, range(2, 4))


@pytest.mark.slow
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_other_optimizers(name, tmp_path):
    first = 'replicate' if name == 'adafactor' else 'shard'
    found = run(4, saved_here, str(tmp_path), name, first)
    expected = pytest.approx(loaded_here(tmp_path, name, 'plain'), rel=1e-9)
    second = first if name == 'adafactor' else 'tensor'
    assert [*found, *run(4, loaded_here, str(tmp_path), name, second)] == [expected] * 8


class Extra(nn.Linear):
    """A layer with a state that is not of tensors alone."""

    def __init__(self, **state):
        super().__init__(6, 6, dtype=torch.float64)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def extra(folder):
    mesh = init_mesh(pipe=2)
    model = DistributedGPipe(
        nn.Sequential(Extra(), Extra(x=torch.ones(2), n=3)), [1, 1], mesh=mesh
    )
    model.save(folder)
    other = DistributedGPipe(
        nn.Sequential(Extra(), Extra(x=torch.zeros(2), n=0)), [1, 1], mesh=mesh
    )
    other.load(folder)
    return [layer.state for layer in other.children()]


def test_extra_states(tmp_path):
    (first,), (second,) = run(2, extra, str(tmp_path))
    assert first == {} and second['n'] == 3 and second['x'].tolist() == [1, 1]
    with pytest.raises(RuntimeError, match='loading a checkpoint failed .*_extra_state.y'):
        load_checkpoint(tmp_path, nn.Sequential(Extra(), Extra(y=1)))


def test_groups_of_other_options(tmp_path):
    """Each parameter keeps its options, wherever it goes; a group has one value of each."""
    model = some_layers()
    optimizer = torch.optim.SGD(
        [{'params': [model[0].weight], 'lr': 1.0}, {'params': [model[0].bias], 'lr': 2.0}],
        momentum=0.5,
    )
    save_checkpoint(tmp_path, model, optimizer)
    other = torch.optim.SGD(
        [{'params': [model[0].bias]}, {'params': [model[0].weight]}, {'params': []}], lr=3.0
    )
    load_checkpoint(tmp_path, model, other)
    assert [(group['lr'], group['momentum']) for group in other.param_groups] == [
        (2.0, 0.5),
        (1.0, 0.5),
        (3.0, 0),
    ]
    with pytest.raises(
        ValueError,
        match="'0.weight' and '0.bias' in one group, .* the lr of the "
        'first is 1.0, and of the second 2.0',
    ):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
