"""Export on meshes: folders and streams of whole tensors, by the names of the model."""

import errno

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.distributed.test_layers import MESHES, Block
from tests.model.test_export import files_of, load_folder
from tests.shard.processes import outcomes, run
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.model.export import NewFolder, TensorFile


def model():
    """Return a model with a weight in its first and its last layer, and a buffer."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(10, 10, bias=False),
        Block(10),
        nn.BatchNorm1d(10),
        Block(10),
        nn.Linear(10, 10),
    )
    layers[4].weight = layers[0].weight
    return layers


PLAN = {'*.up': ColwiseParallel(), '*.down': RowwiseParallel()}


def on_mesh(axes, data, **options):
    """Return the model on a mesh, with the values of a process that has it whole."""
    stages = axes.get('pipe', 1)
    balance = {1: [5], 2: [3, 2], 4: [2, 1, 1, 1]}[options.pop('stages', stages)]
    plan = PLAN if 'tensor' in axes else None
    return DistributedGPipe(
        model(), balance, mesh=init_mesh(**axes), data=data, tensor_plan=plan, **options
    )


def ranks_of(axes):
    ranks = 1
    for size in axes.values():
        ranks *= size
    return ranks


def saved(folder, axes, data, size, options):
    """Save a model on a mesh; return the tensors of its stream on the ranks that ask."""
    module = on_mesh(axes, data, **options)
    module.save_pretrained(folder, max_shard_size=size)
    asks = torch.distributed.get_rank() % 3 == 1
    tensors = {name: x.clone() for name, x in module.named_tensors(full=asks)}
    everything = {name: x.clone() for name, x in module.named_tensors()}
    assert [*everything] == ([*tensors] if asks else [*everything])
    return tensors, everything


@pytest.mark.parametrize('size', ['50GB', 2000])
@pytest.mark.parametrize(
    ('axes', 'data', 'options'),
    [
        *[(axes, data, {}) for axes, data in MESHES],
        ({'data': 2}, 'shard', {'offload_policy': CPUOffloadPolicy()}),
        ({'pipe': 2}, 'replicate', {'stages': 4}),
    ],
)
def test_a_folder_and_a_stream_have_each_tensor_once(tmp_path, axes, data, options, size):
    folder = tmp_path / 'model'
    ranks = ranks_of(axes)
    results = run(ranks, saved, folder, axes, data, size, options)
    expected = model().state_dict()
    del expected['4.weight']
    everything = [load_folder(folder), *[stream for _, stream in results]]
    everything += [asked for rank, (asked, _) in enumerate(results) if rank % 3 == 1]
    for tensors in everything:
        assert tensors.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(tensors[name], x)
    assert all(not asked for rank, (asked, _) in enumerate(results) if rank % 3 != 1)
    assert files_of(tmp_path) == ['model']
    if size == '50GB':
        stages = axes.get('pipe', 1)
        assert len([*folder.glob('*.safetensors')]) == stages
    again = GPipe(model(), [5], devices=['cpu'], weights=folder)
    assert torch.equal(again[4].weight, expected['0.weight'])


def failing(folder, case):
    """Save twice, the second time with a failure on the last rank."""
    module = on_mesh({'pipe': 2}, 'replicate')
    module.save_pretrained(folder)
    rank = torch.distributed.get_rank()
    if case == 'full disk' and rank == 1:
        TensorFile.write = refuse
    if case == 'other folder':
        folder = folder / 'within' if rank else folder
    if case == 'no shared folder':
        NewFolder.begin = lambda self: None
    if case == 'a file':
        folder = folder / 'config.json'
        folder.touch()
    module.save_pretrained(folder)


def refuse(self, name, tensor):
    raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize(
    ('case', 'text'),
    [
        ('full disk', 'No space left on device'),
        ('other folder', 'has other settings on rank 1'),
        ('no shared folder', 'all ranks need a folder on a file system that they share'),
        ('a file', 'is a file: name a folder for the model'),
    ],
)
def test_a_failure_is_raised_on_all_ranks_and_changes_nothing(tmp_path, case, text):
    for outcome in outcomes(2, failing, tmp_path / 'model', case, timeout=30):
        assert text in outcome.text
    assert files_of(tmp_path) == ['model']
    assert load_folder(tmp_path / 'model').keys() == {*model().state_dict()} - {'4.weight'}


class Stateful(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        pass


def streaming(case):
    """Take a stream of tensors, which fails on the last rank."""
    layers = nn.Sequential(nn.Linear(10, 10), Stateful(10, 10) if case == 'state' else Block(10))
    module = DistributedGPipe(layers, [1, 1], mesh=init_mesh(pipe=2))
    rank = torch.distributed.get_rank()
    number = 0
    for _ in module.named_tensors():
        number += 1
        if case == 'break' and rank and number == 3:
            break
        if case == 'raise' and rank and number == 3:
            raise ValueError('the engine is full')
    if case == 'end':
        return number
    module.step(torch.ones(2, 10), torch.ones(2, 10), nn.functional.mse_loss)
    return None


@pytest.mark.parametrize(
    ('case', 'text'),
    [
        ('state', "'1._extra_state' is a int, but files of safetensors have tensors"),
        ('break', 'is gone: its process has ended'),
        ('raise', 'the engine is full'),
    ],
)
def test_a_stream_that_fails_on_one_rank_ends_all(case, text):
    """The watch ends a rank that waits in a collective, and prints the reason."""
    texts = [outcome.text for outcome in outcomes(2, streaming, case, timeout=30)]
    assert 'exit code 70' in texts[0] or text in texts[0]
    assert text in texts[1]


def test_a_stream_to_its_end():
    assert run(2, streaming, 'end') == [8, 8]
