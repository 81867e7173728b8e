"""Attributes of tensors, such as ``y.scale = 2``, between partitions, micro-batches and ranks."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

from tests.devices import devices
from tests.engine.steps import placed
from tests.equivalence import loss_of as square
from tests.helpers import assert_same, gradients, in_partitions, micro_batches, on_first
from tests.shard.processes import run
from torchgpipe import GPipe, NoChunk, no_recompute
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.skip import pop, skippable, stash

SCHEDULES = [None, 'gpipe', '1f1b', 'zb-h1', 'zb-v']


class Scaling(nn.Linear):
    """Return tensors whose attributes are factors for the next layer."""

    def forward(self, value):
        x, y = value
        factor = getattr(x, 'factor', 1.0)
        x = super().forward(x * factor)
        y = y * getattr(y, 'options', {'factor': 1.0})['factor']
        x.factor = factor + 0.5
        y.options = {'factor': factor, 'name': 'y'}
        return x, y


class First(nn.Linear):
    """The first layer, which may get an attribute with its input."""

    def forward(self, x):
        y = super().forward(x * getattr(x, 'factor', 1.0))
        y.factor = 2.0
        return y, x * 1


class Last(nn.Linear):
    """Return a single tensor with an attribute, which the loss reads."""

    def forward(self, value):
        x, y = value
        y = super().forward(x * x.factor + y * y.options['factor'])
        y.factor = 3.0
        return y


def model():
    """Return four layers that read attributes of tensors."""
    return nn.Sequential(First(4, 4), Scaling(4, 4), Scaling(4, 4), Last(4, 4)).double()


def loss_of(output, target):
    """Return a mean over samples that reads an attribute of the output."""
    return (output * output.factor - target * getattr(target, 'factor', 1.0)).square().mean()


def with_factor(x, factor):
    """Return a tensor with an attribute."""
    x.factor = factor
    return x


def expected_of(net, x, target, loss_fn=loss_of):
    """Run the unwrapped model on each of three micro-batches."""
    for part, label in zip(micro_batches(x, 3), micro_batches(target, 3)):
        part, label = with_factor(part, 0.7), with_factor(label, 0.3)
        (loss_fn(net(part), label) * len(part) / len(x)).backward()


@devices
def test_attributes_are_passed_on(devices):
    """Before, they were lost, except in the plain call without checkpoints on one worker."""
    for schedule in SCHEDULES:
        net = model()
        gpipe = GPipe(
            copy.deepcopy(net),
            [1] * 4,
            devices=placed(devices(4), schedule),
            chunks=3,
            checkpoint='except_last',
        )
        for _ in range(2):
            x, target = torch.randn(2, 7, 4, dtype=torch.double)
            expected_of(net, x, target)
            x = with_factor(on_first(gpipe, x), 0.7)
            target = with_factor(target.to(gpipe.devices[-1]), 0.3)
            if schedule is None:
                output = gpipe(x)
                assert output.factor == 3.0
                loss_of(output, target).backward()
            else:
                gpipe.step(x, target, loss_of, schedule=schedule)
            assert_same(gradients(gpipe), gradients(net), 1e-10)


@devices
def test_results_of_layers_that_are_kept_out_of_recomputation_have_attributes(devices):
    net = model()
    gpipe = GPipe(copy.deepcopy(net), [1, 3], devices=devices(2), chunks=3, checkpoint='always')
    no_recompute(gpipe[1])
    x, target = torch.randn(2, 7, 4, dtype=torch.double)
    expected_of(net, x, target)
    x = with_factor(on_first(gpipe, x), 0.7)
    gpipe.step(x, with_factor(target.to(gpipe.devices[-1]), 0.3), loss_of)
    assert_same(gradients(gpipe), gradients(net), 1e-10)


class Growing(nn.Module):
    """Count its calls, in an attribute of its output."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return with_factor(x * 1, float(self.calls))


class Multiply(nn.Module):
    """Multiply by an attribute."""

    def forward(self, x):
        return x * x.factor


def grow():
    """Return the losses of two ranks, each with the loss of one process."""
    layers = nn.Sequential(nn.Linear(2, 2), Growing(), Multiply())
    net = copy.deepcopy(layers)
    gpipe = DistributedGPipe(
        layers, [2, 1], mesh=init_mesh(pipe=2), chunks=2, checkpoint='except_last'
    )
    losses = []
    for _ in range(3):
        expected = torch.stack([net(x).mean() for x in torch.ones(4, 2).chunk(2)]).mean()
        loss = gpipe.step(torch.ones(4, 2), torch.ones(4), lambda y, t: y.mean())
        losses.append((loss.item(), expected.item()))
    return losses


def test_an_attribute_that_changes_has_a_header_each_time():
    for losses in run(2, grow):
        for loss, expected in losses:
            assert loss == pytest.approx(expected)


@skippable(stash=['skip'])
class Stash(nn.Linear):
    """Stash a tensor with an attribute, which is another number each time."""

    def forward(self, x):
        yield stash('skip', with_factor(x * 1, x.max().item()))
        return super().forward(x)


@skippable(pop=['skip'])
class Pop(nn.Linear):
    """Pop it, and read its attribute."""

    def forward(self, x):
        skip = yield pop('skip')
        return super().forward(x + skip * skip.factor)


def skips():
    """Return a model with a skip over its middle layer."""
    return nn.Sequential(Stash(4, 4), nn.Linear(4, 4), Pop(4, 4)).double()


def train(make, balance, schedule, loss_fn):
    """Train on this rank and in one process; return whether gradients are the same."""
    torch.manual_seed(0)
    layers = make()
    net = copy.deepcopy(layers)
    gpipe = DistributedGPipe(
        layers, balance, mesh=init_mesh(pipe=2), chunks=3, checkpoint='except_last'
    )
    for _ in range(3):
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        expected_of(net, x, target, loss_fn)
        gpipe.step(with_factor(x, 0.7), with_factor(target, 0.3), loss_fn, schedule=schedule)
    expected = dict(net.named_parameters())
    assert_same(
        [x.grad for _, x in gpipe.named_parameters()],
        [expected[name].grad for name, _ in gpipe.named_parameters()],
        1e-10,
    )
    return True


@pytest.mark.parametrize(
    'make, balance, schedule, loss_fn',
    [
        (model, [2, 2], '1f1b', loss_of),
        (model, [2, 2], 'zb-h1', loss_of),
        (skips, [2, 1], '1f1b', square),
    ],
)
def test_attributes_are_passed_on_to_ranks(make, balance, schedule, loss_fn):
    assert all(run(2, train, make, balance, schedule, loss_fn))


@devices
def test_skips_have_their_attributes(devices):
    for schedule in [None, '1f1b', 'zb-h1']:
        net = skips()
        gpipe = GPipe(
            copy.deepcopy(net), [1, 1, 1], devices=devices(3), chunks=3, checkpoint='except_last'
        )
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        expected_of(net, x, target, square)
        x, target = on_first(gpipe, x), target.to(gpipe.devices[-1])
        if schedule is None:
            square(gpipe(x), target).backward()
        else:
            gpipe.step(x, target, square, schedule=schedule)
        assert_same(gradients(gpipe), gradients(net), 1e-10)


class Appending(nn.Linear):
    """Append to a list that its input has as an attribute, and use it."""

    def forward(self, x):
        notes = getattr(x, 'notes', [1.0])
        y = super().forward(x * sum(notes))
        notes.append(0.5)
        y.notes = notes
        return y


@devices
def test_each_partition_has_containers_of_its_own(devices):
    """Otherwise a recomputation would append to the list of the next partition."""
    for schedule in SCHEDULES:
        net = nn.Sequential(*[Appending(4, 4) for _ in range(4)]).double()
        gpipe = GPipe(
            copy.deepcopy(net),
            [1] * 4,
            devices=placed(devices(4), schedule),
            chunks=3,
            checkpoint='except_last',
        )
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        expected_of(net, x, target, square)
        x, target = on_first(gpipe, x), target.to(gpipe.devices[-1])
        x.notes = [1.0]
        if schedule is None:
            square(gpipe(x), target).backward()
        else:
            gpipe.step(x, target, square, schedule=schedule)
        assert_same(gradients(gpipe), gradients(net), 1e-10)
        assert x.notes == [1.0]


class Factor(nn.Module):
    """Multiply by the attribute of a table."""

    def forward(self, x, table):
        return x * table.factor + table


@devices
def test_shared_tensors_have_their_attributes(devices):
    net = nn.Sequential(Factor(), nn.Linear(4, 4)).double()
    gpipe = GPipe(
        copy.deepcopy(net), [1, 1], devices=devices(2), chunks=3, checkpoint='except_last'
    )
    x = torch.randn(7, 4, dtype=torch.double)
    table = with_factor(torch.randn(4, dtype=torch.double), 3)
    expected = net[1](net[0](x, table))
    x, table = on_first(gpipe, x), with_factor(on_first(gpipe, table), 3)
    assert_same([gpipe(x, NoChunk(table))], [expected], 1e-10)


class Setting(nn.Module):
    """Set an attribute of its output."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        y = x * 1
        y.extra = self.value(x)
        return y


@devices
def test_other_values_are_refused_by_name(devices):
    for value in [lambda x: x * 2, lambda x: {'mask': [x.detach()]}, lambda x: object()]:
        net = nn.Sequential(nn.Linear(2, 2), Setting(value), nn.Linear(2, 2))
        gpipe = GPipe(net, [2, 1], devices=devices(2), chunks=2, checkpoint='except_last')
        x = on_first(gpipe, torch.randn(4, 2))
        for call in (lambda: gpipe(x), lambda: gpipe.step(x, x.to(gpipe.devices[-1]), square)):
            with pytest.raises(
                TypeError, match="a tensor has the attribute 'extra', a "
            ) as raised:
                call()
            assert "layer '1'" in str(raised.value.__notes__)


@devices
def test_marks_of_the_compiler_are_not_passed_on(devices):
    """Such as those that it sets on outputs of a compiled layer, in sets."""

    class Marking(nn.Module):
        def forward(self, x):
            y = x * 1
            torch._dynamo.mark_dynamic(y, 0)
            assert '_dynamo_dynamic_indices' in y.__dict__
            return y

    gpipe = in_partitions(devices, Marking(), nn.Linear(4, 2), chunks=2, checkpoint='except_last')
    x = on_first(gpipe, torch.ones(4, 4))
    torch._dynamo.mark_dynamic(x, 0)
    assert gpipe(x).shape == (4, 2)


@devices
def test_an_input_with_other_values_is_refused(devices):
    gpipe = in_partitions(devices, nn.Linear(2, 2), chunks=2)
    x = on_first(gpipe, torch.ones(4, 2))
    with pytest.raises(TypeError, match="the attribute 'factor', a Tensor"):
        gpipe(with_factor(x, torch.ones(1)))


@devices
def test_outputs_whose_attributes_differ_are_refused(devices):
    gpipe = in_partitions(devices, nn.Linear(2, 2), Growing(), chunks=2)
    with pytest.raises(ValueError, match=r"values or attributes: .*\{'factor': 2.0\}"):
        gpipe(on_first(gpipe, torch.ones(4, 2)))


@devices
@pytest.mark.parametrize('schedule', ['1f1b', 'zb-h1'])
def test_parameters_that_layers_return_may_have_any_attributes(devices, schedule):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = with_factor(nn.Parameter(torch.randn(4, 4)), object())

        def forward(self, x):
            return x, self.weight

    class Product(nn.Module):
        def forward(self, value):
            x, weight = value
            return x @ weight

    net = nn.Sequential(Table(), Product())
    gpipe = GPipe(copy.deepcopy(net), [1, 1], devices=devices(2), chunks=2)
    x = torch.randn(4, 4)
    square(net(x), x).backward()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), square, schedule=schedule)
    assert_same(gradients(gpipe), gradients(net), 1e-5)
