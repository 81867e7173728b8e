"""The layers of one rank: made here, of seeds, functions or weights."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.distributed.models import tied
from tests.shard.processes import outcomes, run
from tests.weights import BytesRead, save_sharded
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh


def layer(width):
    """Make a layer whose function draws its weight, and sets its bias."""
    made = nn.Linear(width, width)
    if not made.weight.is_meta:
        nn.init.normal_(made.weight)
        nn.init.constant_(made.bias, width)
    return made


def of_functions(axes, stages):
    """Give the values and names of layers that functions make."""
    functions = [lambda width=width: layer(width) for width in (2, 3, 4, 5)]
    model = DistributedGPipe(functions, [4 // stages] * stages, mesh=init_mesh(**axes), seed=3)
    return {name: x.detach() for name, x in model.named_parameters()}


def test_functions_make_the_same_layers_on_all_meshes():
    (expected,) = run(1, of_functions, {}, 1)
    first, second = run(2, of_functions, {'pipe': 2}, 2)
    assert [*first] == ['0.weight', '0.bias', '1.weight', '1.bias'] and len(second) == 4
    assert first['0.bias'].tolist() == [2, 2]
    for name, x in {**first, **second}.items():
        assert torch.equal(x, expected[name])


def of_weights(path, makes):
    """Give the values of layers that are read from a file."""
    if makes:
        module = [lambda: nn.Linear(2, 2), nn.ReLU, lambda: nn.Linear(2, 3)]
        balance = [2, 1]
    else:
        with torch.device('meta'):
            module = tied()
        balance = [4, 4]
    model = DistributedGPipe(module, balance, mesh=init_mesh(pipe=2), weights=path)
    return {name: x.detach() for name, x in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize('makes', [True, False])
def test_each_rank_reads_the_weights_of_its_own_layers(tmp_path, makes):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)) if makes else tied()
    torch.save(module.state_dict(), tmp_path / 'weights.pt')
    first, second = run(2, of_weights, tmp_path / 'weights.pt', makes)
    for name, x in module.state_dict().items():
        assert torch.equal((first if name in first else second)[name], x)
    assert not first.keys() & second.keys() and len(first | second) == len(module.state_dict())


WRONG = {
    'other names': ("missing ['0.bias', '2.weight', '2.bias'], unexpected ['7.weight']"),
    'other sizes': ("'0.weight' has shape (3, 2) in them, and (2, 2) in the module"),
    'no file': ('model-1.safetensors is missing, but model.safetensors.index.json names it'),
    'no weights': ('has no weights: no index'),
    'no folder': ('nowhere does not exist: weights are a file or a folder'),
    'damaged': ('model-0.safetensors is damaged'),
}


def wrong_weights(folder, case):
    """Save weights that do not fit a module, and return their path."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3))
    state = module.state_dict()
    if case == 'no folder':
        return folder / 'nowhere'
    if case == 'no weights':
        return folder
    if case == 'other names':
        state = {'0.weight': torch.ones(2, 2), '7.weight': torch.ones(1)}
    if case == 'other sizes':
        state['0.weight'] = torch.ones(3, 2)
    save_sharded(state, folder, 2)
    if case == 'no file':
        (folder / 'model-1.safetensors').unlink()
    if case == 'damaged':
        (folder / 'model-0.safetensors').write_bytes(b'damaged')
    return folder


@pytest.mark.parametrize('case', WRONG)
def test_weights_of_another_module_are_refused(tmp_path, case):
    """All ranks raise the same error, before any of them has read a value."""
    path = wrong_weights(tmp_path, case)
    for outcome in outcomes(2, of_weights, path, True, timeout=20):
        assert WRONG[case] in outcome.text
        assert 'rank 0, so it ended here' not in outcome.text


def test_ranks_with_weights_of_other_names_are_refused(tmp_path):
    def weights(rank):
        torch.save({'0.weight': torch.ones(2, 2), f'{rank}': torch.ones(1)}, tmp_path / f'{rank}')

    weights(0), weights(1)
    for outcome in outcomes(2, of_folders, tmp_path, timeout=20):
        assert 'the weights are not those of the module' in outcome.text


def of_folders(folder):
    """Read the weights of each rank from another file."""
    rank = init_mesh(pipe=2).get_rank()
    return of_weights(folder / str(rank), True)


class Block(nn.Module):
    """A block whose two linear layers can be split."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def blocks():
    return nn.Sequential(*[Block(10) for _ in range(4)])


#: How each of the tested meshes splits the model.
MESHES = [
    ({'pipe': 2}, 'replicate'),
    ({'data': 3}, 'shard'),
    ({'tensor': 2}, 'replicate'),
    ({'data': 2, 'tensor': 2}, 'shard'),
    ({'pipe': 2, 'tensor': 2}, 'replicate'),
]


def of_split_tensors(folder, axes, data):
    """Return the bytes that a rank reads and has, and the whole values of its parameters."""
    with torch.device('meta'):
        module = blocks()
    stages = axes.get('pipe', 1)
    plan = {'*.up': ColwiseParallel(), '*.down': RowwiseParallel()} if 'tensor' in axes else None
    with BytesRead() as read:
        model = DistributedGPipe(
            module,
            [4 // stages] * stages,
            mesh=init_mesh(**axes),
            weights=folder,
            data=data,
            tensor_plan=plan,
        )
    size = 0
    values = {}
    for name, x in model.named_parameters():
        is_split = isinstance(x, DTensor)
        size += (x.to_local() if is_split else x).nbytes
        values[name] = x.detach().full_tensor() if is_split else x.detach()
    return read.number, size, values


@pytest.mark.parametrize(('axes', 'data'), MESHES)
def test_each_rank_reads_only_its_parts_of_split_tensors(tmp_path, axes, data):
    module = blocks().double()  # They are cast when they are read.
    state = module.state_dict()
    save_sharded(state, tmp_path, 3)
    ranks = 1
    for size in axes.values():
        ranks *= size
    for number, size, values in run(ranks, of_split_tensors, tmp_path, axes, data):
        assert number == 2 * size
        for name, x in values.items():
            assert torch.equal(x, state[name].float())


def two_steps(model):
    """Return the loss of the second step of a model, on each replica's part of four samples."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        loss = model.step(torch.ones(2, 10), torch.zeros(2, 10), nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


def of_shards(folder, options):
    with torch.device('meta'):
        module = blocks()
    mesh = init_mesh(data=2)
    model = DistributedGPipe(module, [4], mesh=mesh, data='shard', weights=folder, **options)
    return two_steps(model)


@pytest.mark.parametrize('options', [{}, {'offload_policy': CPUOffloadPolicy()}], ids=str)
def test_shards_train_on_after_they_were_read(tmp_path, options):
    module = blocks()
    save_sharded(module.state_dict(), tmp_path, 2)
    expected = two_steps(GPipe(module, [4], devices=['cpu']))
    assert run(2, of_shards, tmp_path, options) == pytest.approx([expected] * 2, rel=1e-5)
