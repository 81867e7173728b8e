"""Ranks pair tensors by their names, even where modules register them in other orders."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import batch
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import shard as ts
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.sequential import to_sequential

NAMES = ['sliding', 'full', 'other']


class Shuffled(nn.Module):
    """A layer that registers its tensors in another order on each rank, as from a set.

    Args:
        turn: By how many places the order is turned.
    """

    def __init__(self, turn):
        super().__init__()
        for name in [*NAMES[turn:], *NAMES[:turn]]:
            number = NAMES.index(name)
            generator = torch.Generator().manual_seed(number)
            value = torch.randn(6, 6, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))
            self.register_buffer(f'{name}_table', value[0] + number)

    def forward(self, x):
        y = (x @ self.sliding).tanh() + self.sliding_table
        y = (y @ self.full).sin() * self.full_table
        return y @ self.other - self.other_table


class SumOfSquares(Shuffled):
    """A loss with parameters."""

    def forward(self, output, target):
        return F.mse_loss(super().forward(output), target)


def turn():
    """Return a number for the order of this rank."""
    return dist.get_rank() % len(NAMES)


def layers(turn, tied):
    """Return three layers, of which the last one may have the first one's weight."""
    found = nn.Sequential(Shuffled(turn), nn.Linear(6, 6).double(), Shuffled(turn))
    with torch.no_grad():
        found[1].weight.copy_(torch.eye(6))
        found[1].bias.zero_()
    if tied:
        found[2].full = found[0].sliding
        found[2].other = found[0].full
    return found


def losses_of(model, loss=F.mse_loss, lr=0.1):
    """Take two steps, with the samples of this replica if there are several; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(2):
        x, target = batch(step, 8)
        if isinstance(model, DistributedGPipe):
            data = model._rank.mesh.data
            x, target = (part.chunk(data.size)[data.rank] for part in (x, target))
            value = model.step(x, target, loss)
        else:
            value = loss(model(x), target)
            value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(axes, tied, loss=None, **options):
    """Take two steps; return the losses, and all parameters of the first stage by name."""
    loss = (loss or (lambda turn: F.mse_loss))(turn())
    model = DistributedGPipe(
        layers(turn(), tied), [2, 1], mesh=init_mesh(**axes), chunks=2, **options
    )
    losses = losses_of(model, loss)
    values = {name: x.detach().sum().item() for name, x in model.named_parameters()}
    return losses, values


def plain(tied, loss=None):
    """Return the same for one process."""
    model, loss = layers(0, tied), (loss or (lambda turn: F.mse_loss))(0)
    losses = losses_of(model, loss)
    return losses, {
        name: x.sum().item() for name, x in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize(
    'axes, tied, loss',
    [
        ({'data': 3}, False, SumOfSquares),
        ({'pipe': 2}, True, SumOfSquares),
        ({'data': 2, 'pipe': 2}, True, None),
    ],
)
def test_in_v0_22_tensors_registered_in_other_orders_were_exchanged(axes, tied, loss):
    losses, values = plain(tied, loss)
    world = axes.get('data', 1) * axes.get('pipe', 1)
    for found, own in run(world, trained, axes, tied, loss):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in own.items():
            assert value == pytest.approx(values[name], rel=1e-10), name


def test_fsdp_which_exchanges_in_the_order_of_registration_is_refused_other_orders():
    for result in outcomes(2, sharded, turn):
        assert isinstance(result, Failure)
        assert "'0.sliding' of rank 0 has the place of '0.full' of rank 1" in result.text
        assert 'loop over a list or sorted(…)' in result.text


def test_the_way_out_for_fsdp_is_one_order():
    losses, _ = plain(False)
    assert run(2, sharded, int) == [pytest.approx(losses, rel=1e-12)] * 2


def sharded(turn):
    model = DistributedGPipe(layers(turn(), False), [2, 1], mesh=init_mesh(data=2), data='shard')
    return losses_of(model)


class Sized(nn.Module):
    """A layer whose tensors have other forms on other ranks.

    Args:
        kind: Registers a tensor.
        size: Its size.
    """

    def __init__(self, kind, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        kind(self, torch.full((size,), float(dist.get_rank())))

    def reset_parameters(self):
        """Set initial values."""
        for x in (*self.parameters(), *self.buffers()):
            x.data.fill_(1.0)

    def forward(self, x):
        return x * self.weight


def saved(module, x):
    module.register_buffer('table', x)


def cached(module, x):
    module.register_buffer('table', x, persistent=False)


def learned(module, x):
    module.table = nn.Parameter(x)


def wrap_sized(kind, on_meta):
    with torch.device('meta' if on_meta else 'cpu'):
        module = nn.Sequential(Sized(kind, 2 + dist.get_rank()))
    model = DistributedGPipe(module, [1], mesh=init_mesh(data=2))
    return model.get_buffer('0.table').tolist()


@pytest.mark.parametrize('kind, on_meta', [(saved, False), (learned, True)])
def test_in_v0_22_tensors_of_other_sizes_aborted_the_process(kind, on_meta):
    for result in outcomes(2, wrap_sized, kind, on_meta):
        assert isinstance(result, Failure)
        assert "'0.table'" in result.text or "'table'" in result.text
        assert 'the same module on all ranks' in result.text


def test_caches_may_have_other_sizes():
    assert run(2, wrap_sized, cached, False) == [[0.0, 0.0], [1.0, 1.0, 1.0]]


# --- models whose forward loops over a set
# ----------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A model that computes tables for the kinds of its layers, as Gemma 3 and ModernBERT do.

    Args:
        kinds: The order in which it computes them: in those models, the order of a set.
    """

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.embed = nn.Linear(6, 6)
        self.sizes = nn.ParameterDict({'full': torch.rand(6), 'sliding': torch.rand(6)})
        self.register_buffer('full', torch.rand(6), persistent=False)
        self.register_buffer('sliding', torch.rand(6), persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.constants = {'full': torch.arange(6.0), 'sliding': torch.arange(6.0, 12)}
        self.double()

    def forward(self, x):
        x = self.embed(x)
        tables = {}
        for kind in self.kinds:
            scale = x.mean(-1, keepdim=True) + getattr(self, kind)
            tables[kind] = (scale.cos() * self.sizes[kind], scale.sin(), self.constants[kind])
        for k, block in enumerate(self.blocks):
            cosine, sine, constant = tables['full' if k in (1, 3) else 'sliding']
            x = block(x * cosine + sine).tanh() + constant
        return x


KINDS = ['full', 'sliding']


def trained_by_kinds(axes):
    """Take two steps of a model whose order of kinds differs between ranks; return the losses."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    layers = to_sequential(Blocks(KINDS if rank % 3 == 0 else KINDS[::-1]), batch(0, 4)[0])
    model = DistributedGPipe(layers, [2, len(layers) - 2], mesh=init_mesh(**axes), chunks=2)
    return losses_of(model, lr=0.01)


def test_in_v0_22_a_forward_over_a_set_exchanged_buffers():
    torch.manual_seed(0)
    losses = losses_of(Blocks(KINDS), lr=0.01)
    for found in run(4, trained_by_kinds, {'data': 2, 'pipe': 2}):
        assert found == pytest.approx(losses, rel=1e-12)


# --- gradients that a loop of the user averages
# ----------------------------------------------------------------------------------


def averaged():
    dist.barrier()
    ts.distributed.init_process_group(1)
    model = layers(turn(), False)
    x, target = (part.chunk(2)[dist.get_rank()] for part in batch(0, 8))
    F.mse_loss(model(x), target).backward()
    ts.average_gradients(model)
    ts.distributed.destroy_process_group()
    return {name: x.grad.sum().item() for name, x in model.named_parameters()}


def test_gradients_are_averaged_by_name():
    model, (x, target) = layers(0, False), batch(0, 8)
    F.mse_loss(model(x), target).backward()
    expected = {name: x.grad.sum().item() for name, x in model.named_parameters()}
    for found in run(2, averaged):
        assert found == pytest.approx(expected, rel=1e-10)


class Counts(nn.Linear):
    """A layer with an extra state that is no tensor."""

    def get_extra_state(self):
        return {'count': 3}

    def set_extra_state(self, state):
        pass


def replaced_by_layers():
    """Replace a layer by one with an extra state; then one of two layers that is refused."""
    layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()
    model = DistributedGPipe(layers, [3], mesh=init_mesh(data=2), chunks=2)
    model.set_submodule('0', Counts(6, 6).double())
    first = losses_of(model)

    before = dict(model._modules)
    model._modules['1'] = nn.Linear(6, 6).double().requires_grad_(False)
    model._modules['2'] = None
    with pytest.raises(ValueError, match="layer '2' is None"):
        model.partitions
    model._modules.update(before)
    model.set_submodule('2', nn.Tanh())
    losses_of(model)
    return (
        first,
        model.get_parameter('1.weight').requires_grad,
        model._rank.layers['1'] is before['1'],
    )


def test_in_v0_28_a_replacement_that_was_refused_replaced_the_layers_before_it():
    for first, learns, is_same in run(2, replaced_by_layers):
        assert len(first) == 2 and learns and is_same
