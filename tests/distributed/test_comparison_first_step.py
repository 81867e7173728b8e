"""Differences that the first step makes are detected before it gives gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

from tests.distributed.models import batch
from tests.shard.processes import run
from torchgpipe import shard as ts
from torchgpipe.distributed import DistributedGPipe, init_mesh


def world_of(axes):
    return axes.get('data', 1) * axes.get('pipe', 1) * axes.get('tensor', 1)


# --- layers that change tensors that ranks share
# ----------------------------------------------------------------------------------


class Moves(nn.Module):
    """A layer that moves a buffer by its own samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.mean += 0.1 * (x.mean(0) - self.mean)
        return x - self.mean


def moving_buffer():
    return nn.Sequential(Moves(), nn.Linear(6, 6)).double()


def moving_statistics():
    norm = nn.InstanceNorm1d(6, track_running_stats=True)
    return nn.Sequential(
        nn.Unflatten(1, (6, 1)), nn.Upsample(scale_factor=2), norm, nn.Flatten(), nn.Linear(12, 6)
    ).double()


class Words(nn.Module):
    """An embedding with a largest norm, of rounded inputs."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x + self.table(x.detach()[:, 0].abs().ceil().long().clamp(max=5))


def tied_table():
    table = nn.Embedding(6, 6, max_norm=0.5)
    return nn.Sequential(Words(table), nn.Linear(6, 6), nn.Linear(6, 6), Words(table)).double()


def first_step(make, axes):
    """Take a step; return the error, and whether there are gradients."""
    torch.manual_seed(0)
    mesh, module = init_mesh(**axes), make()
    half = len(module) // 2
    balance = [half, len(module) - half] if 'pipe' in axes else [len(module)]
    model = DistributedGPipe(module, balance, mesh=mesh, chunks=2)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')
    x, target = (part.chunk(replicas)[replica] for part in batch(0, 8))
    try:
        model.step(x, target, F.mse_loss)
    except RuntimeError as error:
        return str(error), any(x.grad is not None for x in model.parameters())


@pytest.mark.parametrize(
    'make, name, axes',
    [
        (moving_buffer, '0.mean', {'data': 2, 'pipe': 2}),
        (moving_statistics, '2.running_mean', {'data': 2}),
        (tied_table, '0.table.weight', {'pipe': 2}),
    ],
)
def test_in_v0_22_the_first_step_gave_gradients_of_layers_that_make_ranks_differ(make, name, axes):
    for text, has_gradients in run(world_of(axes), first_step, make, axes):
        assert f"'{name}'" in text and 'should be the same on ranks' in text
        assert not has_gradients


# --- parameters of heads, beside layers that are split
# ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of four heads of two features, with a parameter that heads share.

    Args:
        kind: ``'norm'`` of each head, ``'temperature'``, or ``'mqa'`` with one head of keys.
        copies: Whether it uses these parameters as copies of the group.
    """

    def __init__(self, kind, copies):
        super().__init__()
        self.kind, self.copies = kind, copies
        width = 2 if kind == 'mqa' else 8
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, width), nn.Linear(8, width)
        self.o = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(2) if kind == 'norm' else nn.Identity()
        self.temperature = nn.Parameter(torch.ones(())) if kind == 'temperature' else None

    def copy(self, x):
        """Return a tensor whose gradient is the sum over the ranks of the group."""
        return ts.distributed.copy(x) if self.copies else x

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)) for layer in (self.q, self.k, self.v))
        if self.kind == 'mqa':
            k, v = self.copy(k).expand_as(q), self.copy(v).expand_as(q)
        if self.temperature is not None:
            q = q * self.copy(self.temperature)
        heads = [part.transpose(1, 2) for part in (self.norm(q), k, v)]
        return self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def trained(kind, axes, copies, norm=None):
    """Take four steps; return the losses, or the text of an error of the first step."""
    mesh = init_mesh(**axes)
    if copies:
        ts.distributed.init_process_group(mesh=mesh['data', 'tensor'])
    torch.manual_seed(0)
    module = nn.Sequential(Attention(kind, copies), nn.Linear(8, 8)).double()
    split = ['q'] if kind == 'mqa' else ['q', 'k', 'v']
    plan = {f'0.{name}': ColwiseParallel() for name in split} | {'0.o': RowwiseParallel()}
    if norm is not None:
        plan['0.norm'] = norm
    model = DistributedGPipe(
        module,
        [1, 1] if 'pipe' in axes else [2],
        mesh=mesh,
        chunks=2,
        tensor_plan=plan if 'tensor' in axes else {},
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    generator = torch.Generator().manual_seed(1)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')
    losses = []
    for _ in range(4):
        pair = torch.randn(2, 8, 3, 8, generator=generator, dtype=torch.float64)
        x, target = (part.chunk(replicas)[replica] for part in pair)
        try:
            losses.append(model.step(x, target, F.mse_loss).item())
        except RuntimeError as error:
            assert not losses and all(x.grad is None for x in model.parameters())
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    if copies:
        ts.distributed.destroy_process_group()
    return losses


@pytest.mark.parametrize(
    'kind, name, axes',
    [
        ('norm', '0.norm.bias', {'tensor': 2}),
        ('temperature', '0.temperature', {'tensor': 2, 'data': 2}),
        ('mqa', '0.k.bias', {'tensor': 2, 'pipe': 2}),
    ],
)
def test_in_v0_22_a_part_of_a_gradient_was_taken_for_the_whole(kind, name, axes):
    for text in run(world_of(axes), trained, kind, axes, False):
        assert f"the gradient of '{name}'" in text
        assert 'SequenceParallel(sequence_dim=2, use_local_output=True)' in text
        assert 'torchgpipe.shard.distributed.copy(parameter)' in text


@pytest.mark.parametrize(
    'kind, norm, axes',
    [
        (
            'norm',
            SequenceParallel(sequence_dim=2, use_local_output=True),
            {'tensor': 2, 'data': 2},
        ),
        ('temperature', None, {'tensor': 2, 'pipe': 2}),
        ('mqa', None, {'tensor': 2}),
    ],
)
def test_the_ways_out_of_a_part_of_a_gradient(kind, norm, axes):
    """The last layer of a stage may be split: its collective has ended when it is sent."""
    (expected,) = run(1, trained, kind, {}, False)
    for losses in run(world_of(axes), trained, kind, axes, norm is None, norm):
        assert losses == pytest.approx(expected, rel=1e-10)
