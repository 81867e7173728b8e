"""State is kept by the use that layers make of it: as references, or copies if they change it."""

import copy
import datetime
from decimal import Decimal

import pytest
import torch
from torch import nn

from benchmarks.harness.live import LiveTensors
from tests.devices import devices
from tests.engine.checkpoint.layers import Layer, compare_modes, doubles, move_attributes
from tests.helpers import assert_same, call, gradients
from torchgpipe import GPipe
from torchgpipe.engine.checkpoint import observation, state
from torchgpipe.schedule.generators import SPLIT


def loss_of(output, target):
    """Return a mean over samples."""
    return (output - target).square().mean()


class Adapters(nn.Module):
    """A layer with two adapters, which have no effect on the output yet."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down = nn.ModuleList([nn.Linear(4, 2) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(2, 4) for _ in range(2)])
        for layer in self.up:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.active = self.config = None
        self.part = self.up[0]

    def forward(self, x):
        """Apply the active one."""
        return self.base(x) + self.part(self.down[self.config[self.active]](x))

    def choose(self, k):
        """Switch an attribute, another dictionary and a child."""
        self.active = k
        self.config = {k: k}
        self.part = self.up[k]


class Rounded(nn.Module):
    """A softmax whose output is rounded, so that only gradients depend on the temperature."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = 1.0

    def forward(self, x):
        """Round, with the gradient of the softmax."""
        soft = (self.linear(x) / self.temperature).softmax(-1)
        hard = (soft == soft.max(1, keepdim=True).values).to(x)
        return hard - soft.detach() + soft

    def choose(self, k):
        """Switch the temperature."""
        self.temperature = (1.0, 0.3)[k]


@devices
@pytest.mark.parametrize('layer', [Adapters, Rounded])
def test_an_attribute_that_the_user_switches_between_two_forwards(devices, layer):
    """In v0.21, the gradients were silently computed with the attribute of the second one."""
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Tanh(), layer()).double()
    gpipe = GPipe(
        copy.deepcopy(model), [2, 2], devices=devices(2), chunks=3, checkpoint='except_last'
    )
    for _ in range(2):
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        for net in (model, gpipe):
            net.zero_grad()
            outputs = []
            for k in range(2):
                for part in net.modules():
                    if isinstance(part, layer):
                        part.choose(k)
                outputs.append(call(net, x).cpu())
            (loss_of(outputs[0], target) + loss_of(outputs[1], -target)).backward()
        assert_same(gradients(gpipe), gradients(model))


class Scale(torch.autograd.Function):
    """Pass a tensor on; only its gradient depends on the factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def scale_by(number):
    """Return the function of a layer that scales its gradient by a number of its state."""

    def forward(layer, x):
        factor = torch.as_tensor(float(number(layer)), dtype=x.dtype, device=x.device)
        return Scale.apply(x * 2, factor)

    return forward


def next_tuple(layer):
    """Count in a tuple."""
    layer.count = layer.count[0] + 1, layer.count
    return layer.count[0]


def next_decimal(layer):
    """Count in a decimal number."""
    layer.count += Decimal('0.1')
    return layer.count


def next_day(layer):
    """Count in a date."""
    layer.count += datetime.timedelta(days=1)
    return layer.count.day


def next_nested(layer):
    """Count in tensors within containers, in place."""
    layer.tracker['load']['values'] += 1
    layer.history[0].add_(2)
    layer.pair[0].mul_(1.5)
    layer.pair[1].append(3)
    return (layer.tracker['load']['values'] + layer.history[0] * layer.pair[0]).sum() + len(
        layer.pair[1]
    )


def next_lazy(layer):
    """Count in a tensor that the first call makes."""
    if layer.count is None:
        layer.count = torch.ones(4)
    else:
        layer.count.data.add_(1)
    return layer.count.sum()


#: Layers whose gradient, but not their output, depends on their state.
COUNTING = {
    'tuple': lambda: Layer(scale_by(next_tuple), count=(1,)),
    'decimal': lambda: Layer(scale_by(next_decimal), count=Decimal(1)),
    'date': lambda: Layer(scale_by(next_day), count=datetime.date(2026, 1, 1)),
    'nested': lambda: Layer(
        scale_by(next_nested),
        tracker={'load': {'values': doubles(3)}},
        history=[doubles(1)],
        pair=(doubles(1), []),
    ),
    'lazy': lambda: Layer(scale_by(next_lazy), count=None),
}


@devices
@pytest.mark.parametrize('name', COUNTING)
def test_state_on_which_only_the_gradient_depends(devices, name):
    """In v0.21, some of it was silently wrong."""
    compare_modes(
        lambda: nn.Sequential(
            nn.Linear(4, 4).double(), COUNTING[name](), nn.Linear(4, 4).double(), COUNTING[name]()
        ),
        devices,
    )


@devices
@pytest.mark.parametrize('schedule', ['1f1b', *SPLIT])
@pytest.mark.parametrize('name', COUNTING)
def test_such_state_in_a_step(devices, schedule, name):
    results = []
    for options in (
        {'schedule': '1f1b', 'mode': 'never'},
        {'schedule': schedule, 'mode': 'except_last'},
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4).double(), COUNTING[name](), COUNTING[name]())
        gpipe = GPipe(model, [1, 2], devices=devices(1) * 2, chunks=3, checkpoint=options['mode'])
        for _ in range(2):
            x = torch.randn(7, 4, dtype=torch.double, device=devices.first)
            gpipe.step(x, x, loss_of, schedule=options['schedule'])
        results.append(gradients(gpipe))
    assert_same(*results)


class Recurrent(nn.Module):
    """A recurrent cell that keeps its state, with or without its graph, in a tuple."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.state = None

    def forward(self, x):
        """Start from the last state of the first sample."""
        state = None
        if self.state is not None:
            state = tuple([part[:1].expand(len(x), 4).contiguous() for part in self.state])
        h, c = self.cell(x, state)
        self.state = h.detach(), c.detach()
        return h


@devices
def test_a_recurrent_state_in_a_tuple(devices):
    """In v0.21, "took another path", also for one micro-batch."""
    for chunks in (1, 3):
        compare_modes(
            lambda: nn.Sequential(nn.Linear(4, 4), Recurrent(), Recurrent()).double(),
            devices,
            chunks=chunks,
        )


class Masked(nn.Linear):
    """A layer with a large tensor as an attribute, and one that it changes if asked."""

    def __init__(self):
        super().__init__(4, 4)
        self.mask = torch.ones(1 << 18)
        self.changes = False

    def forward(self, x):
        """Apply the mask."""
        if self.changes:
            self.mask.mul_(0.5)
        return super().forward(x) * self.mask[:4].to(x).clone()


@devices
def test_a_large_attribute_is_copied_only_if_it_is_written_to(devices):
    """In v0.21, each cell copied it."""
    gpipe = GPipe(nn.Sequential(Masked()), [1], devices=devices(1), chunks=8, checkpoint='always')
    move_attributes(gpipe)
    x = torch.rand(8, 4, device=devices.first)
    for _ in range(2):
        with LiveTensors().watched() as live:
            output = gpipe(x)
        assert live.peak < gpipe[0].mask.nbytes
        output.sum().backward()

    gpipe[0].changes = True
    with pytest.raises(RuntimeError, match="attribute '0.mask' was written to by its layer"):
        gpipe(x).sum().backward()
    for _ in range(2):
        gpipe[0].mask.fill_(1)
        gpipe.zero_grad()
        gpipe(x).sum().backward()
        expected = (x.t() @ (0.5 ** torch.arange(1, 9, device=x.device))[:, None]).expand(4, 4)
        assert_same([gpipe[0].weight.grad], [expected.t()], 1e-6)


@devices
def test_a_large_attribute_that_the_user_writes_to_before_backward(devices):
    gpipe = GPipe(nn.Sequential(Masked()), [1], devices=devices(1), chunks=2, checkpoint='always')
    move_attributes(gpipe)
    for _ in range(2):
        output = gpipe(torch.rand(8, 4, device=devices.first))
        gpipe[0].mask.add_(1)
        with pytest.raises(RuntimeError, match="attribute '0.mask' has been modified by an inp"):
            output.sum().backward()


@devices
def test_large_buffers_are_not_copied_in_the_first_pass(devices):
    """In v0.21, they were, such as the integer weights of a quantized model."""

    class Quantized(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer('codes', torch.ones(1 << 20, dtype=torch.int8))

        def forward(self, x):
            return super().forward(x) * self.codes[:4].to(x.dtype)

    gpipe = GPipe(
        nn.Sequential(Quantized()), [1], devices=devices(1), chunks=4, checkpoint='always'
    )
    with LiveTensors().watched() as live:
        output = gpipe(torch.rand(8, 4, device=devices.first))
    assert live.peak < gpipe[0].codes.nbytes
    output.sum().backward()


def count(layer, x):
    """Count the calls."""
    layer.calls += 1
    return x * layer.calls


@devices
def test_cells_copy_no_value_that_is_not_written_to(devices, monkeypatch):
    """In v0.21, a layer that set an attribute had all of its containers and tensors copied."""
    words = {str(k): [k] for k in range(100)}
    layer = Layer(
        count,
        {'running': doubles(4), 'constant': doubles(4)},
        calls=0,
        words=words,
        table=doubles(4),
        log=[],
    )
    norm = nn.BatchNorm1d(4).double()
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4).double(), layer, norm),
        [3],
        devices=devices(1),
        chunks=4,
        checkpoint='always',
    )
    move_attributes(gpipe)
    x = torch.rand(8, 4, dtype=torch.double, device=devices.first)
    gpipe(x).sum().backward()

    tensors, containers = [], []
    copy_of, copy_of_value = state.copy_of, state.copy_of_value
    monkeypatch.setattr(
        state, 'copy_of', lambda x, memories: (tensors.append(x), copy_of(x, memories))[1]
    )
    monkeypatch.setattr(
        state,
        'copy_of_value',
        lambda value, *args: (containers.append(value), copy_of_value(value, *args))[1],
    )
    output = gpipe(x)
    # The small ones once in a pass, and the statistics in each cell.
    assert [x.numel() for x in tensors] == [4] * 2 + [1] + [4] * 3 + ([4] * 2 + [1]) * 3
    assert not any(isinstance(value, (dict, list)) for value in containers)
    output.sum().backward()
    assert layer.words is words and observation.tensors_in(words) == []


def count_in_a_new_list(layer, x):
    """Count the calls in a list that the first call makes; only the gradient depends on it."""
    if not layer.made:
        layer.made = {'counts': [0]}
    layer.made['counts'][0] += 1
    factor = torch.as_tensor(float(layer.made['counts'][0]), dtype=x.dtype, device=x.device)
    return Scale.apply(x * 2, factor)


@devices
def test_a_container_that_a_layer_makes_and_changes(devices):
    """In v0.21, gradients were silently computed with the list as it was by then."""
    compare_modes(
        lambda: nn.Sequential(nn.Linear(4, 4).double(), Layer(count_in_a_new_list, made=None)),
        devices,
    )


def make_table(size):
    """Return the function of a layer that makes a dictionary in the first call, and reads it."""

    def forward(layer, x):
        if layer.table is None:
            layer.table = {str(k): k for k in range(size)}
        return x * layer.table['2']

    return forward


@devices
@pytest.mark.parametrize('size, times', [(10, 1), (1000, 0)])
def test_a_small_container_is_copied_once_and_a_large_one_never(devices, monkeypatch, size, times):
    """As long as no layer is seen to change it."""
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), Layer(make_table(size), table=None)),
        [2],
        devices=devices(1),
        chunks=4,
        checkpoint='always',
    )
    x = torch.rand(8, 4, device=devices.first)
    containers = []
    copy_of_value = state.copy_of_value
    monkeypatch.setattr(
        state,
        'copy_of_value',
        lambda value, *args: (containers.append(value), copy_of_value(value, *args))[1],
    )
    for _ in range(2):
        gpipe(x).sum().backward()
    assert sum(value is gpipe[1].table for value in containers) == times


class Log(nn.Module):
    """Change a container in every third call, which no output shows at first."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        self.calls = 0
        self.log = None if made else {'calls': []}

    def forward(self, x):
        """Add the number of the call."""
        self.calls += 1
        if self.calls == self.made:
            self.log = {'calls': []}
        if self.calls % 3 == 0 and self.log is not None:
            self.log['calls'].append(self.calls)
        return x * (1 + len(self.log['calls']) if self.calls > 9 else 1)


@devices
@pytest.mark.parametrize('made', [0, 1, 2, 5])
@pytest.mark.parametrize('schedule', [None, '1f1b', 'zb-h1'])
def test_a_container_that_a_layer_begins_to_change_later(devices, made, schedule):
    """A recomputation neither sees the change nor repeats it."""
    model = nn.Sequential(nn.Linear(4, 4), Log(made), nn.Linear(4, 4), Log(made)).double()
    gpipe = GPipe(
        copy.deepcopy(model), [2, 2], devices=devices(2), chunks=4, checkpoint='except_last'
    )
    for _ in range(4):
        x = torch.randn(8, 4, dtype=torch.double)
        for net in (model, gpipe):
            net.zero_grad()
        for part in x.chunk(4):
            (loss_of(model(part), part) / 4).backward()
        x = x.to(gpipe.devices[0])
        target = x.to(gpipe.devices[-1])
        if schedule is None:
            loss_of(gpipe(x), target).backward()
        else:
            gpipe.step(x, target, loss_of, schedule=schedule)
        assert_same(gradients(gpipe), gradients(model))
        for k in (1, 3):
            assert (gpipe[k].calls, gpipe[k].log) == (model[k].calls, model[k].log)


class Marked(nn.Module):
    """Append to a list for inputs with a mark; no other attribute changes."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        """Append the mark."""
        if x[0, 0] > 0:
            self.log.append(float(x[0, 0]))
        return x * (1 + sum(self.log))


@devices
def test_a_container_is_the_only_state_that_changes(devices):
    """Then later cells do not share the state of the cell that changed it."""
    model = nn.Sequential(Marked(), nn.Linear(4, 4)).double()
    gpipe = GPipe(
        copy.deepcopy(model), [2], devices=devices(1), chunks=5, checkpoint='except_last'
    )
    x = torch.rand(5, 4, dtype=torch.double)
    x[:, 0] = torch.tensor([-1.0, -1.0, 2.0, 3.0, -1.0])
    for part in x.chunk(5):
        model(part).sum().backward()
    gpipe(x.to(gpipe.devices[0])).sum().backward()
    assert_same(gradients(gpipe), gradients(model))
    assert gpipe[0].log == model[0].log == [2.0, 3.0]


class Sharing(nn.Module):
    """Append to a list that another layer has, too."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def forward(self, x):
        """Append the number of items."""
        self.log.append(len(self.log))
        return x * (1 + sum(self.log))


@devices
def test_a_container_of_two_layers(devices):
    """In v0.21, a recomputation gave each of them a copy of its own."""

    def make():
        log = []
        return nn.Sequential(nn.Linear(4, 4), Sharing(log), Sharing(log)).double()

    compare_modes(make, devices)


def later(layer, x):
    """Write to a small buffer from the fifth call on."""
    layer.calls += 1
    if layer.calls >= 5:
        layer.scale.mul_(0.9)
    return x.sin() * layer.scale.clone()


@devices
def test_a_small_buffer_that_a_layer_begins_to_write_to(devices):
    compare_modes(
        lambda: nn.Sequential(
            nn.Linear(4, 4).double(), Layer(later, {'scale': doubles(1)}, calls=0)
        ),
        devices,
    )


def double_gradient(parameter):
    """Double a gradient that is complete."""
    parameter.grad.mul_(2)


class Registering(nn.Linear):
    """A layer that registers a hook on its weight at the first call."""

    def __init__(self, kind):
        super().__init__(4, 4)
        self.kind = kind
        self.is_new = True

    def forward(self, x):
        """Register the hook."""
        if self.is_new:
            self.is_new = False
            if self.kind == 'register_hook':
                self.weight.register_hook(lambda grad: grad * 2)
            else:
                self.weight.register_post_accumulate_grad_hook(double_gradient)
        return super().forward(x)


@devices
@pytest.mark.parametrize('schedule', [None, '1f1b', 'zb-h1', 'v-half'])
@pytest.mark.parametrize('kind', ['register_hook', 'register_post_accumulate_grad_hook'])
def test_a_hook_that_a_layer_registers_on_its_weight(devices, schedule, kind):
    """In v0.21, the recomputation registered it again, and the gradient was doubled twice."""
    model = nn.Sequential(*[Registering(kind) for _ in range(4)]).double()
    gpipe = GPipe(
        copy.deepcopy(model),
        [1] * 4,
        devices=devices(2) + devices(2)[::-1],
        chunks=3,
        checkpoint='except_last',
    )
    for _ in range(2):
        x = torch.randn(7, 4, dtype=torch.double)
        model.zero_grad()
        gpipe.zero_grad()
        loss_of(model(x), x).backward()
        y, target = x.to(gpipe.devices[0]), x.to(gpipe.devices[-1])
        if schedule is None:
            loss_of(gpipe(y), target).backward()
        else:
            gpipe.step(y, target, loss_of, schedule=schedule)
        assert_same(gradients(gpipe), gradients(model))


# --- children and parameters that forward replaces
# ----------------------------------------------------------------------------------


class Factor(nn.Module):
    """Scale the gradient by a tensor, which grows with each call."""

    def __init__(self, value):
        super().__init__()
        self.value = torch.as_tensor(value, dtype=torch.double)

    def forward(self, x):
        """Scale."""
        factor = self.value.to(x)
        self.value = self.value + 1
        return Scale.apply(x * 2, factor)


class Replacing(nn.Module):
    """Replace children in forward."""

    def __init__(self, replace):
        super().__init__()
        self.replace = replace
        self.a, self.b = Factor(2), Factor(5)
        self.many = nn.ModuleList([Factor(3), Factor(7)])
        self.made = nn.ModuleDict()

    def forward(self, x):
        """Replace some, and call all."""
        self.replace(self, x)
        for child in (self.a, self.many[0], *self.made.values()):
            x = child(x)
        return x


def swap(layer, x):
    """Swap two children."""
    layer.a, layer.b = layer.b, layer.a


def derive(layer, x):
    """Make a child from the previous one."""
    layer.a = Factor(layer.a.value * 0.5)


def rotate(layer, x):
    """Rotate a list."""
    layer.many.append(layer.many.pop(0))


def make_on_demand(layer, x):
    """Make a child for each number of samples."""
    if str(len(x)) not in layer.made:
        layer.made[str(len(x))] = Factor(len(x))


@devices
@pytest.mark.parametrize('replace', [swap, derive, rotate, make_on_demand])
def test_children_that_forward_replaces(devices, replace):
    """In v0.21, recomputations found those of the last cell, and gradients were silently wrong."""
    compare_modes(
        lambda: nn.Sequential(
            nn.Linear(4, 4), Replacing(replace), nn.Linear(4, 4), Replacing(replace)
        ).double(),
        devices,
        size=8,
    )
