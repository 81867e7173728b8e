"""Transport from rank to rank: any dense tensors, in any values, with their aliases."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.distributed.models import batch
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe, NoChunk
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.skip import pop, skippable, stash


class Do(nn.Module):
    """A layer that does something, and has a parameter."""

    def __init__(self, function=None):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value):
        return self.function(value, self.weight)


def square(output, target):
    """A loss."""
    return (output - target).square().mean()


def trained(model, inputs):
    """Take steps; return the losses, and the gradients of the layers."""
    found = []
    for x in inputs:
        value = model.step(x, torch.zeros(4, 3), square)
        found.append((value.item(), [layer.weight.grad.tolist() for layer in model.children()]))
    return found


def outcome(functions, *inputs):
    """Take steps with layers, one in each stage, on each rank."""
    layers, balance = nn.Sequential(*map(Do, functions)), [1] * len(functions)
    options = {'chunks': 2, 'checkpoint': 'never'}
    return trained(DistributedGPipe(layers, balance, mesh=init_mesh(pipe=2), **options), inputs)


def alone(functions, *inputs):
    """Take them in one process."""
    layers, balance = nn.Sequential(*map(Do, functions)), [1] * len(functions)
    devices = ['cpu'] * len(functions)
    return trained(GPipe(layers, balance, devices=devices, chunks=2, checkpoint='never'), inputs)


def check(layers, *inputs):
    """Check that two ranks have the results of one process."""
    first, second = run(2, outcome, layers, *inputs)
    for (loss, grads), (own, one), (other, two) in zip(alone(layers, *inputs), first, second):
        assert own == other == loss and one + two == grads


def make(x, weight):
    """Values of all kinds."""
    x = x * weight
    return {
        'complex': torch.complex(x, -x).conj(),
        'half': x.bfloat16(),
        'bool': x > 0,
        'none': None,
        'empty': x[:, :0],
        'turned': x.T,
        'wide': x[:, None].expand(-1, 2, -1),
        'int': x.long(),
        'text': ['a', (x.sum(),)],
        'number': x[0, 0].item(),
    }


def take(value, weight):
    """Use them."""
    assert value['none'] is None and value['text'][0] == 'a' and value['empty'].shape[1] == 0
    assert value['turned'].stride()[0] == 1 and value['bool'].dtype == torch.bool
    x = (value['complex'] * (1 + 2j)).real + value['half'].float() + value['turned'].T
    x = x + value['wide'].sum(1) + value['int'] + value['text'][1][0]
    return torch.where(value['bool'], x, -x) * weight * value['number']


def test_values_of_all_kinds():
    inputs = [torch.arange(12.0).view(4, 3) - 5, torch.arange(12.0).view(4, 3) * 2]
    check([make, take], *inputs)


def first_of(value, weight):
    """Pass the input on, with its first tensor multiplied by a weight."""
    leaves, spec = tree_flatten(value)
    return tree_unflatten([leaves[0] * weight, *leaves[1:]], spec)


def sum_of(value, weight):
    return sum(tree_leaves(value)) * weight


def test_inputs_that_differ_only_in_strides_nesting_or_sharing():
    x, y = torch.arange(24.0).view(2, 4, 3)
    check(
        [first_of, sum_of], x, x.T.contiguous().T, (x, NoChunk(y[:2])), (x, y), [x, y], x.double()
    )


def grow(x, weight):
    """Give a shape that hangs on values."""
    return (x * weight).repeat(1, 1 + int(x[0, 0]))


def shrink(x, weight):
    return x[:, :3] * weight


def test_shapes_that_hang_on_values_are_refused():
    first, second = outcomes(
        2, outcome, [grow, shrink], torch.zeros(4, 3), torch.ones(4, 3), timeout=20
    )
    assert isinstance(first, Failure) and 'Shapes that depend on values' in first.text
    assert isinstance(second, Failure)


def shared(value, weight):
    """Use a tensor that all micro-batches share."""
    x, table = value
    return x * weight + table, table * weight


def end(value, weight):
    return (value[0] + value[1]) * weight


def test_tensors_that_all_micro_batches_share():
    check([shared, end], (torch.ones(4, 3), NoChunk(torch.full((3,), 2.0))))


def forward_shared(value, weight):
    return value[0] * weight, value[1]


def change_shared(value, weight):
    value[1].add_(1)
    return (value[0] + value[1]) * weight


def twice(x, weight):
    """Give two tensors of one memory."""
    y = x * weight
    return y, y[:1]


def change_twice(value, weight):
    value[0].mul_(2)
    return value[0] * weight + value[1]


@pytest.mark.parametrize(
    'layers, x',
    [
        ([forward_shared, change_shared], (torch.ones(4, 3), NoChunk(torch.ones(3)))),
        ([twice, change_twice], torch.ones(4, 3)),
    ],
)
def test_in_place_changes_of_tensors_on_other_ranks_are_refused_as_between_devices(layers, x):
    _, second = outcomes(2, outcome, layers, x, timeout=20)
    assert isinstance(second, Failure) and 'in place' in second.text


@skippable(stash=['x'])
class Begin(Do):
    def forward(self, x):
        y = x * self.weight
        yield stash('x', y)
        return y


class ChangeBatch(Do):
    def forward(self, x):
        return x.mul_(2) * self.weight


@skippable(pop=['x'])
class End(Do):
    def forward(self, x):
        skip = yield pop('x')
        return (x + skip) * self.weight


class Pass(Do):
    def forward(self, x):
        return x.view_as(x)


def changed_skip(between, places):
    """Change the batch where its skip has been sent elsewhere."""
    layers = [Begin(), *(Pass() for _ in range(between)), ChangeBatch(), End()]
    model = DistributedGPipe(
        nn.Sequential(*layers),
        [1] * len(layers),
        places=places,
        mesh=init_mesh(pipe=max(places) + 1),
        chunks=2,
        checkpoint='never',
    )
    model.step(torch.ones(4, 3), torch.zeros(4, 3), square)


@pytest.mark.parametrize('between, places', [(0, [0, 1, 2]), (1, [0, 0, 1, 1])])
def test_a_skip_whose_memory_another_rank_changes_is_refused(between, places):
    _, second, *_ = outcomes(max(places) + 1, changed_skip, between, places, timeout=20)
    assert isinstance(second, Failure) and 'in place' in second.text


@skippable(stash=['x'])
class Sometimes(Do):
    def forward(self, x):
        y = x * self.weight
        yield stash('x', y if x.sum() > 0 else None)
        return y


@skippable(pop=['x'])
class EndOrNot(Do):
    def forward(self, x):
        skip = yield pop('x')
        return (x if skip is None else x + skip) * self.weight


def skipped(*inputs):
    """Take steps with a skip that has a message of its own."""
    model = DistributedGPipe(
        nn.Sequential(Sometimes(), Pass(), EndOrNot()),
        [1] * 3,
        mesh=init_mesh(pipe=2),
        places=[0, 0, 1],
        chunks=2,
    )
    for x in inputs:
        model.step(x, torch.zeros(4, 3), square)


def test_a_skip_that_is_none_in_a_later_step_is_refused():
    first, second = outcomes(2, skipped, torch.ones(4, 3), torch.zeros(4, 3), timeout=20)
    assert (
        'what stage 0 sends to stage 2 for micro-batch 0 is (nothing), but in an earlier step '
        'with equal inputs it was (torch.float32 (2, 3) with grad)'
    ) in first.text
    assert isinstance(second, Failure)


def shared_gradient():
    """Return the gradient of a tensor that all micro-batches share."""
    model = DistributedGPipe(
        nn.Sequential(Do(shared), Do(end)),
        [1, 1],
        mesh=init_mesh(pipe=2),
        chunks=2,
        checkpoint='never',
    )
    table = torch.full((3,), 2.0, requires_grad=True)
    model.step((torch.ones(4, 3), NoChunk(table)), torch.zeros(4, 3), square)
    return None if table.grad is None else table.grad.tolist()


def test_the_gradient_of_a_shared_tensor_is_the_sum_of_all():
    table = torch.full((3,), 2.0, requires_grad=True)
    gpipe = GPipe(nn.Sequential(Do(shared), Do(end)), [1, 1], devices=['cpu'] * 2, chunks=2)
    gpipe.step((torch.ones(4, 3), NoChunk(table)), torch.zeros(4, 3), square)
    assert run(2, shared_gradient) == [table.grad.tolist(), None]


class Aliases(nn.Linear):
    """A layer that registers its weight under a second name in its first forward."""

    def forward(self, x):
        if not hasattr(self, 'alias'):
            self.alias = self.weight
        return super().forward(x)


def aliased():
    """Take a step, and return whether both names have one parameter, and gradients."""
    layers = nn.Sequential(Aliases(6, 6, dtype=torch.float64), nn.Linear(6, 6).double())
    model = DistributedGPipe(layers, [1, 1], mesh=init_mesh(pipe=2), chunks=2)
    model.step(*batch(0, 4), F.mse_loss)
    for layer in model:
        if isinstance(layer, Aliases):
            return layer.alias is layer.weight, layer.weight.grad is not None
    return True, True


def test_in_v0_28_a_second_name_of_a_weight_kept_its_leaf_after_the_step():
    assert run(2, aliased) == [(True, True)] * 2
