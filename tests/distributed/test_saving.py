"""Saving and loading: interrupted, in the background, into the wrong place, of another model."""
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_state_dict,
                                                     set_state_dict)

from tests.devices import cpu_only
from tests.distributed.models import batch, full, perceptron
from tests.distributed.saving import World, adam, fresh, made, steps
from tests.shard.processes import Failure, outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh, load_checkpoint, save_checkpoint

pytestmark = cpu_only('processes meet by gloo')


def values(model):
    return {name: full(x) for name, x in model.state_dict().items()}


def same(one, another):
    assert one.keys() >= another.keys()
    for name, x in another.items():
        torch.testing.assert_close(one[name], x, rtol=0, atol=0)


# --- interrupted
# -----------------------------------------------------------------------------------------


def interrupted(folder, event):
    """Save, take a step, and save again, which fails on one rank while it writes."""
    world = World('pipe')
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    world.save(folder, optimizer)
    before = values(world.model)
    steps(world, optimizer, range(1, 2))
    write_data = FileSystemWriter.write_data

    def fails(writer, plan, planner):
        write_data(writer, plan, planner)
        if event == 'kill':
            os._exit(1)
        raise OSError('no space left')

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = fails
    for options in ({}, {'wait': False}):
        with pytest.raises(RuntimeError, match=r'failed on ranks \[1\]: OSError: no space left'):
            saving = world.save(folder, optimizer, **options)
            saving.result()
    FileSystemWriter.write_data = write_data
    world.load(folder, optimizer)
    same(before, values(world.model))
    world.save(folder, optimizer)
    return before


def test_a_save_that_fails_leaves_the_last_one(tmp_path):
    ranks = run(2, interrupted, str(tmp_path / 'model'), 'raise')
    other = fresh()
    load_checkpoint(tmp_path / 'model', other)
    for before in ranks:
        same(values(other), before)
    assert os.listdir(tmp_path) == ['model']


def test_a_rank_that_is_killed_leaves_the_last_one(tmp_path):
    assert all(isinstance(each, Failure) for each in outcomes(
        2, interrupted, str(tmp_path / 'model'), 'kill'))
    model = fresh()
    world, optimizer = World('plain'), None
    load_checkpoint(tmp_path / 'model', model)
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    for name, x in world.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], x)
    save_checkpoint(tmp_path / 'model', model)
    assert os.listdir(tmp_path) == ['model']


def test_between_two_names(tmp_path):
    """Whatever of the two renamings was the last one: what is left is loaded, and saved over."""
    made('plain', tmp_path / 'model')
    expected = fresh()
    load_checkpoint(tmp_path / 'model', expected)
    (tmp_path / 'model').rename(tmp_path / 'model.before')
    shutil.copytree(tmp_path / 'model.before', tmp_path / 'model.saving')
    model = fresh()
    load_checkpoint(tmp_path / 'model', model)
    same(values(model), values(expected))
    save_checkpoint(tmp_path / 'model', fresh())
    assert os.listdir(tmp_path) == ['model']
    shutil.copytree(tmp_path / 'model', tmp_path / 'model.before')
    save_checkpoint(tmp_path / 'model', model)
    assert os.listdir(tmp_path) == ['model']
    load_checkpoint(tmp_path / 'model', model)
    same(values(model), values(expected))


# --- in the background
# -----------------------------------------------------------------------------------


def behind(folder, layout):
    """Train on while a checkpoint is written, and load it."""
    world = World(layout)
    optimizer = adam(world.model)
    losses = steps(world, optimizer, range(2))
    saving = world.save(folder, optimizer, wait=False)
    before = values(world.model)
    went_on = steps(world, optimizer, range(2, 4))
    saving.result()
    assert saving.done()
    world.save(folder + '2', optimizer, wait=False)
    world.save(folder + '2', wait=False)  # It waits for the one before.
    world.load(folder, optimizer)
    same(before, values(world.model))
    assert steps(world, optimizer, range(2, 4)) == pytest.approx(went_on, rel=1e-12)
    return losses


@pytest.mark.parametrize('layout', ['shard', 'tensor'])
def test_training_goes_on_while_a_checkpoint_is_written(layout, tmp_path):
    run(4, behind, str(tmp_path / 'model'), layout)
    assert sorted(os.listdir(tmp_path)) == ['model', 'model2']


# --- what is refused
# -------------------------------------------------------------------------------------


def refused(function, *args):
    """Give what is raised."""
    with pytest.raises(Exception) as found:
        function(*args)
    return f'{found.type.__name__}: {found.value}'


def refused_folders(folder):
    world = World('pipe')
    own = f'{folder}/{dist.get_rank()}'
    found = [refused(world.load, f'{folder}/{name}') for name in ('nowhere', 'empty', 'broken')]
    return [*found, refused(world.save, f'{folder}/notes'), refused(world.save, own),
            refused(world.load, own)]


def test_folders_that_are_no_checkpoints(tmp_path):
    for name in ('empty', 'broken', 'notes'):
        (tmp_path / name).mkdir()
    (tmp_path / 'broken/.metadata').write_text('?')
    (tmp_path / 'notes/notes.txt').write_text('?')
    made('plain', tmp_path / '1')
    first, second = run(2, refused_folders, str(tmp_path))
    for nowhere, empty, broken, notes, other, missing in (first, second):
        assert re.match(r'FileNotFoundError: .*/nowhere is no checkpoint: it is not there; there '
                        r'are some at .*/1', nowhere)
        assert 'empty is no checkpoint: it has no .metadata, which is written last' in empty
        assert re.match(r'ValueError: .*/broken/.metadata can not be read', broken)
        assert 'other settings on rank 1' in other
    assert 'takes the place of the whole folder' in first[3] and 'notes.txt in it' in first[3]
    assert 'could not begin on rank 0' in second[3]
    assert first[5].startswith('FileNotFoundError') and 'on rank 0' in second[5]
    assert os.listdir(tmp_path / 'notes') == ['notes.txt'] and not (tmp_path / '0').exists()


def refused_models(folder):
    world = World('pipe')
    optimizer = torch.optim.SGD(world.model.parameters(), lr=1., momentum=.9)
    several = torch.optim.AdamW([x for name, x in world.model.named_parameters()
                                 if name != '0.up.bias'])
    found = [refused(world.load, f'{folder}/{name}') for name in ('names', 'sizes')]
    lost = f'{folder}/lost'
    return [*found, *(refused(world.load, f'{folder}/{name}', each) for name, each in (
        ('plain', optimizer), ('plain', several), ('values', optimizer))),
            refused(world.load, lost), refused(world.save, lost, adam(nn.Linear(2, 3)))]


def test_other_models(tmp_path):
    """Each rank raises the same, whatever part it has."""
    made('plain', tmp_path / 'plain')
    other = perceptron()
    other[7].upp = other[7].up
    del other[7].up
    save_checkpoint(tmp_path / 'names', other)
    other = perceptron()
    other[1].up = nn.Linear(6, 5, dtype=torch.float64)
    save_checkpoint(tmp_path / 'sizes', other)
    save_checkpoint(tmp_path / 'values', perceptron())
    save_checkpoint(tmp_path / 'lost', perceptron())
    next((tmp_path / 'lost').glob('*.distcp')).unlink()
    for found in run(2, refused_models, str(tmp_path)):
        expected = [
            r"ValueError: the checkpoint is of another model: it misses '7.up.weight' \(like "
            r"'7.upp.weight'\), .* the model does not have '7.upp.weight'",
            r"ValueError: .* of other sizes: in it '1.up.weight' is \(5, 6\), and not \(12, 6\)",
            r"ValueError: .* of another type: it has .*'betas'.*, but this one .*'momentum'",
            r"ValueError: .* of other parameters: the optimizer does not have '0.up.bias'",
            'ValueError: the checkpoint was saved without an optimizer',
            r'RuntimeError: loading a checkpoint failed on ranks \[.*FileNotFoundError',
            r'ValueError: 2 parameters of the optimizer are not in the model, with shapes']
        assert len(found) == len(expected)
        for text, pattern in zip(found, expected):
            assert re.match(pattern, text), text


# --- what is saved
# ---------------------------------------------------------------------------------------


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


def test_what_ranks_share_is_written_once(tmp_path):
    """And PyTorch alone reads it."""
    run(4, saved_several, str(tmp_path))
    made('plain', tmp_path / 'plain')

    def tensors(layout):
        return sum(item.length for item in dcp.FileSystemReader(
            tmp_path / layout).read_metadata().storage_data.values())

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
    set_state_dict(world.model, optimizer, model_state_dict=read['model'],
                   optim_state_dict=read['optimizer'], options=options)
    other = World('plain')
    own = adam(other.model)
    other.load(tmp_path / 'plain', own)
    assert steps(world, optimizer, range(2, 4)) == pytest.approx(
        steps(other, own, range(2, 4)), rel=1e-9)


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
    model = DistributedGPipe(module, [2, 2], mesh=init_mesh(data=2, pipe=2), chunks=2,
                             deferred_batch_norm=True)
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


#: One whose learning rate is a tensor, one with states before the first step, and two others; the
#: last one's states have other shapes than parameters, which PyTorch has for whole ones only.
OPTIMIZERS = {
    'radam': lambda model: torch.optim.RAdam(model.parameters(), torch.tensor(.02)),
    'adagrad': lambda model: torch.optim.Adagrad(model.parameters(), .02),
    'sgd': lambda model: torch.optim.SGD(model.parameters(), .02, momentum=.9),
    'adafactor': lambda model: torch.optim.Adafactor(model.parameters(), .02),
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
    model = DistributedGPipe(nn.Sequential(Extra(), Extra(x=torch.ones(2), n=3)), [1, 1],
                             mesh=mesh)
    model.save(folder)
    other = DistributedGPipe(nn.Sequential(Extra(), Extra(x=torch.zeros(2), n=0)), [1, 1],
                             mesh=mesh)
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
    optimizer = torch.optim.SGD([{'params': [model[0].weight], 'lr': 1.},
                                 {'params': [model[0].bias], 'lr': 2.}], momentum=.5)
    save_checkpoint(tmp_path, model, optimizer)
    other = torch.optim.SGD([{'params': [model[0].bias]}, {'params': [model[0].weight]}], lr=3.)
    load_checkpoint(tmp_path, model, other)
    assert [(group['lr'], group['momentum']) for group in other.param_groups] == [
        (2., .5), (1., .5)]
    with pytest.raises(ValueError, match="'0.weight' and '0.bias' in one group, .* the lr of the "
                                         'first is 1.0, and that of the second 2.0'):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
