"""Layers that keep state: buffers, attributes, containers, hooks, writes, and generators.

Each maps a tensor of shape ``(batch, 4)`` to another one.
"""

import datetime
import math
from collections import deque
from decimal import Decimal
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.zoo.computing import CPU_ONLY, NO_HOOKS, ONE_TYPE, SEVERAL_SAMPLES
from tests.zoo.entry import Entry
from tests.zoo.nested import RECOMPUTED

STATEFUL = {}

#: A write that the backward of an earlier micro-batch notices, if nothing is recomputed.
NEVER = frozenset({'never'})


def add(**options):
    """Return a decorator that adds a layer: a class, or a function of a layer and a tensor."""

    def decorate(layer):
        if isinstance(layer, type):
            make = layer
        else:

            def make():
                return OfFunction(layer)

        STATEFUL[layer.__name__] = Entry(make, **options)
        return layer

    return decorate


class OfFunction(nn.Module):
    """A layer that is a function; its state is in attributes of this module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer('memory', torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.function(self, x)


class Scale(torch.autograd.Function):
    """Pass a tensor on; only its gradient depends on the factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def scale_gradient(layer, x, number):
    """Return a tensor whose gradient, but not whose value, depends on a number."""
    factor = torch.as_tensor(number, dtype=x.dtype, device=x.device)
    return Scale.apply(layer.linear(x), factor)


# --- buffers


@add(refused=NEVER, lacks=ONE_TYPE)
def moving_average(layer, x):
    """A buffer that moves in place, and is read."""
    with torch.no_grad():
        layer.memory.lerp_(x.mean(0), 0.5)
    return x + layer.memory * layer.linear(x)


@add(refused=NEVER, lacks=ONE_TYPE)
def buffer_of_a_linear_layer(layer, x):
    """A buffer that moves in place, as the input of a layer."""
    with torch.no_grad():
        layer.memory.lerp_(x.mean(0), 0.5)
    return x * layer.linear(layer.memory)


@add()
def buffer_in_place(layer, x):
    """A buffer that changes in place, of which a copy is read."""
    layer.memory.mul_(0.9)
    return layer.linear(x) * layer.memory.clone()


@add()
def buffer_behind_its_version(layer, x):
    """A buffer that changes without a new version."""
    layer.memory.data.mul_(0.9)
    return layer.linear(x) * layer.memory.clone()


@add()
def buffer_that_changes_its_sign(layer, x):
    """A buffer that has an earlier value again, without a new version."""
    layer.memory.data.neg_()
    return layer.linear(x).sin() * layer.memory.clone()


def buffer_that_grows(size):
    """Return a function that makes a layer with room for so many numbers."""

    class Grows(nn.Module):
        """A layer that resizes a buffer in its first forward, as observers per channel do."""

        def __init__(self):
            super().__init__()
            self.register_buffer('seen', torch.ones(size))

        def forward(self, x):
            if len(self.seen) != 4:
                self.seen.resize_(4).zero_()
            self.seen.add_(x.detach().mean(0))
            return x.sin() * self.seen.clone()

    return Grows


for size in (0, 1):
    STATEFUL[f'buffer that grows from {size}'] = Entry(buffer_that_grows(size))


@add()
def rebound_buffer(layer, x):
    """A new buffer in each call."""
    layer.memory = layer.memory * 0.5 + x.detach().mean(0)
    return layer.linear(x * layer.memory.tanh())


@add()
def view_of_a_buffer(layer, x):
    """A buffer that changes through a view of it."""
    if not hasattr(layer, 'part'):
        layer.register_buffer('part', layer.memory[1:3])
    layer.part += 1
    return layer.linear(x) * layer.memory.sum()


@add()
def buffer_of_the_first_call(layer, x):
    """A buffer that the first call registers, and later calls change."""
    if not hasattr(layer, 'late'):
        layer.register_buffer('late', x.new_ones(1))
    layer.late += 1
    return layer.linear(x) * layer.late.clone()


@add()
def buffer_from_the_fifth_call_on(layer, x):
    """A buffer that no call writes to at first."""
    if layer.calls >= 5:
        layer.memory.mul_(0.9)
    return layer.linear(x).sin() * layer.memory.clone()


@add(lacks=CPU_ONLY)
def written_rows(layer, x):
    """A codebook: rows of a buffer are written by an index."""
    if not hasattr(layer, 'codes'):
        layer.register_buffer('codes', torch.zeros(3, 4, dtype=x.dtype, device=x.device))
    with torch.no_grad():
        layer.codes[layer.calls % 3] = x[0]
        near = torch.cdist(x, layer.codes).argmin(1)
    return layer.linear(x) + layer.codes[near]


@add(lacks=SEVERAL_SAMPLES)
class BatchNorm(nn.BatchNorm1d):
    """A batch normalization, whose kernel writes to its buffers."""

    def __init__(self):
        super().__init__(4)


@add(lacks=ONE_TYPE | SEVERAL_SAMPLES)
def own_batch_norm(layer, x):
    """Normalise with running statistics of the layer, without an nn.BatchNorm."""
    if not hasattr(layer, 'mean'):
        layer.register_buffer('mean', x.new_zeros(4))
    y = F.batch_norm(x, layer.mean, layer.memory, training=True, momentum=0.3)
    return layer.linear(y) + layer.mean.detach().clone()


@add(lacks=SEVERAL_SAMPLES)
def skipped_norm(layer, x):
    """A normalization that every third call skips."""
    if not hasattr(layer, 'norm'):
        layer.norm = nn.BatchNorm1d(4, momentum=None, dtype=x.dtype, device=x.device)
    return layer.linear(x + 1 if layer.calls % 3 == 0 else layer.norm(x))


@add(lacks=CPU_ONLY)
class SpectralNorm(nn.Module):
    """A parametrization that moves a buffer in forward."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.linear(x) + self.linear(x * 2)


@add(lacks=CPU_ONLY)
class FakeQuantization(nn.Module):
    """Statistics of quantization that a fused kernel moves, which does not count versions."""

    def __init__(self):
        super().__init__()
        self.register_buffer('on', torch.ones(1, dtype=torch.long))
        self.low = nn.Buffer(torch.tensor(math.inf, dtype=torch.float))
        self.high = nn.Buffer(torch.tensor(-math.inf, dtype=torch.float))
        self.scale = nn.Buffer(torch.ones(1, dtype=torch.float))
        self.zero = nn.Buffer(torch.zeros(1, dtype=torch.int))

    def forward(self, x):
        statistics = (self.low, self.high, self.scale, self.zero)
        y = torch.fused_moving_avg_obs_fake_quant(
            x.float(), self.on, self.on, *statistics, 0.01, 0, 255, -1
        )
        return y.to(x.dtype)


@add(lacks=CPU_ONLY)
class SparseBuffer(nn.Module):
    """A sparse buffer that is another tensor in each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer('matrix', torch.eye(4).to_sparse())

    def forward(self, x):
        self.matrix = self.matrix * 0.9
        return (self.matrix @ self.linear(x).T).T


class Counter(nn.Module):
    """A layer with a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer('count', torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x / self.count.clone()


@add()
class SharedBuffer(nn.Module):
    """Two layers that share a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Counter(), Counter()
        self.second.count = self.first.count

    def forward(self, x):
        return self.second(self.first(x))


# --- attributes


@add()
def count(layer, x):
    """A number that counts the calls."""
    return layer.linear(x) * (1 + layer.calls / 8)


@add()
def every_other_call(layer, x):
    """Another path in every other call."""
    return layer.linear(x) if layer.calls % 2 else x * 1.5


@add()
def pair(layer, x):
    """A tuple of tensors, as the state of a recurrent layer."""
    h, c = getattr(layer, 'state', (x.detach().mean(0) * 0, 1))
    y = layer.linear(x) + h
    layer.state = y.detach().mean(0), c + 1
    return y * (1 + 1 / c)


@add()
def kept_tensor(layer, x):
    """A tensor as an attribute, kept from the first call."""
    if not hasattr(layer, 'first'):
        layer.first = x.detach()[:1].clone()
    return layer.linear(x * layer.first)


@add()
def tensor_of_the_last_call(layer, x):
    """A tensor as an attribute, which each call replaces."""
    last = getattr(layer, 'last', 1.0)
    layer.last = x.detach().mean(0)
    return layer.linear(x) + last


@add()
def tensor_in_place(layer, x):
    """A tensor as an attribute, which changes in place."""
    if not hasattr(layer, 'average'):
        layer.average = x.new_ones(4)
    layer.average.mul_(0.9)
    return layer.linear(x) * layer.average.clone()


@add()
def namespace(layer, x):
    """An attribute of an object."""
    scale = layer.config.scale if hasattr(layer, 'config') else 1.0
    layer.config = SimpleNamespace(scale=scale + 0.5)
    return layer.linear(x) * layer.config.scale


@add()
def attribute_of_a_child(layer, x):
    """An attribute of another module."""
    layer.linear.scale = getattr(layer.linear, 'scale', 0) + 1
    return layer.linear(x) / layer.linear.scale


@add()
def attribute_of_a_tensor(layer, x):
    """An attribute of the tensor that is passed on."""
    y = layer.linear(x) * getattr(x, 'scale', 1.0)
    y.scale = 1 + layer.calls / 4
    return y


@add(lacks=CPU_ONLY)
class Recurrent(nn.Module):
    """A recurrent cell that keeps its state in a tuple."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.state = None

    def forward(self, x):
        state = None
        if self.state is not None:
            state = tuple([part[:1].expand(len(x), 4).contiguous() for part in self.state])
        h, c = self.cell(x, state)
        self.state = h.detach(), c.detach()
        return h


# --- state on which only the gradient depends


@add()
def gradient_by_a_number(layer, x):
    """A number that grows."""
    return scale_gradient(layer, x, float(layer.calls))


@add()
def gradient_by_a_tuple(layer, x):
    """A nested tuple."""
    layer.state = (getattr(layer, 'state', (0,))[0] + 1, 'other')
    return scale_gradient(layer, x, float(layer.state[0]))


@add()
def gradient_by_a_decimal(layer, x):
    """A decimal number."""
    layer.state = getattr(layer, 'state', Decimal(1)) + Decimal('0.1')
    return scale_gradient(layer, x, float(layer.state))


@add()
def gradient_by_a_date(layer, x):
    """A date."""
    day = getattr(layer, 'state', datetime.date(2026, 1, 1))
    layer.state = day + datetime.timedelta(days=1)
    return scale_gradient(layer, x, float(layer.state.day))


@add()
def gradient_by_nested_tensors(layer, x):
    """Tensors within containers, changed in place."""
    if not hasattr(layer, 'tracker'):
        layer.tracker = {'load': {'values': torch.ones(3)}}
        layer.history = [torch.ones(1)]
        layer.both = (torch.ones(1), [])
    layer.tracker['load']['values'] += 1
    layer.history[0].add_(2)
    layer.both[0].mul_(1.5)
    layer.both[1].append(3)
    total = (layer.tracker['load']['values'] + layer.history[0] * layer.both[0]).sum()
    return scale_gradient(layer, x, float(total) + len(layer.both[1]))


@add()
def gradient_by_a_list_of_the_first_call(layer, x):
    """A list that the first call makes, and each call changes."""
    if not hasattr(layer, 'made'):
        layer.made = {'counts': [0]}
    layer.made['counts'][0] += 1
    return scale_gradient(layer, x, float(layer.made['counts'][0]))


@add()
def gradient_by_a_lazy_tensor(layer, x):
    """A tensor that the first call makes, and later calls change behind its version."""
    if not hasattr(layer, 'count'):
        layer.count = torch.ones(4)
    else:
        layer.count.data.add_(1)
    return scale_gradient(layer, x, float(layer.count.sum()))


# --- containers


@add()
def nested_tensors_in_place(layer, x):
    """Tensors in nested containers that are changed in place."""
    if not hasattr(layer, 'tracker'):
        layer.tracker = {'load': {'values': x.detach().mean(0) * 0}, 'list': [x.detach()[0] * 0]}
    layer.tracker['load']['values'] += x.detach().mean(0)
    layer.tracker['list'][0] += 1
    return layer.linear(x) * layer.tracker['load']['values'].tanh() + layer.tracker['list'][0]


@add()
def queue(layer, x):
    """A queue of the last means."""
    layer.last = getattr(layer, 'last', None) or deque(maxlen=2)
    layer.last.append(x.detach().mean(0))
    return layer.linear(x) + sum(layer.last)


@add()
def growing_list(layer, x):
    """A list that grows."""
    layer.seen = getattr(layer, 'seen', [])
    layer.seen.append(float(x.detach().mean()))
    return layer.linear(x) * (1 + math.tanh(sum(layer.seen)))


@add()
def list_for_some_inputs(layer, x):
    """A list that grows for some inputs; no other attribute changes."""
    layer.calls -= 1
    layer.marks = getattr(layer, 'marks', [])
    mark = float(x.detach()[0, 0])
    if mark > 0:
        layer.marks.append(mark)
    return layer.linear(x) * (1 + sum(layer.marks))


@add()
def table_that_changes(layer, x):
    """A dictionary whose value is replaced."""
    layer.table = getattr(layer, 'table', {'mean': 0.0})
    before = layer.table['mean']
    layer.table['mean'] = x.detach().mean()
    return layer.linear(x) + before


@add()
def cache(layer, x):
    """A table that is made once for each size."""
    layer.tables = getattr(layer, 'tables', {})
    if len(x) not in layer.tables:
        layer.tables[len(x)] = torch.linspace(0, 1, len(x), dtype=x.dtype, device=x.device)
    return layer.linear(x) + layer.tables[len(x)][:, None]


def log_made_in_call(number):
    """Return a function that changes a container in every third call, from a call on."""

    def log(layer, x):
        if layer.calls == number:
            layer.log = {'calls': []}
        if layer.calls % 3 == 0 and hasattr(layer, 'log'):
            layer.log['calls'].append(layer.calls)
        return layer.linear(x) * (1 + len(layer.log['calls']) if layer.calls > 5 else 1)

    log.__name__ = f'log_of_call_{number}'
    return log


for number in (1, 2, 5):
    add()(log_made_in_call(number))


@add()
class SharedList(nn.Module):
    """Two layers that append to one list."""

    def __init__(self):
        super().__init__()
        log = []
        self.first, self.second = Appending(log), Appending(log)

    def forward(self, x):
        return self.second(self.first(x))


class Appending(nn.Module):
    """Append the number of items to a list."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.log.append(len(self.log) % 3)
        return self.linear(x) * (1 + sum(self.log) / 4)


# --- children that forward replaces


class Factor(nn.Module):
    """Scale the gradient by a number, which grows with each call."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        factor = torch.as_tensor(self.value, dtype=x.dtype, device=x.device)
        self.value += 1.0
        return Scale.apply(x * 2, factor)


class Replacing(nn.Module):
    """Call children, after a function has replaced some of them."""

    def __init__(self, replace):
        super().__init__()
        self.replace = replace
        self.linear = nn.Linear(4, 4)
        self.a, self.b = Factor(2.0), Factor(5.0)
        self.many = nn.ModuleList([Factor(3.0), Factor(7.0)])
        self.made = nn.ModuleDict()

    def forward(self, x):
        self.replace(self, x)
        x = self.linear(x)
        for child in (self.a, self.many[0], *self.made.values()):
            x = child(x).tanh()
        return x


def swap(layer, x):
    """Swap two children."""
    layer.a, layer.b = layer.b, layer.a


def derive(layer, x):
    """Make a child from the previous one."""
    layer.a = Factor(layer.a.value * 0.5)


def rotate(layer, x):
    """Rotate a list of children."""
    layer.many.append(layer.many.pop(0))


def make_on_demand(layer, x):
    """Make a child for each number of samples."""
    if str(len(x)) not in layer.made:
        layer.made[str(len(x))] = Factor(float(len(x)))


for replace in (swap, derive, rotate, make_on_demand):
    STATEFUL[f'children that forward replaces: {replace.__name__}'] = Entry(
        lambda replace=replace: Replacing(replace)
    )


# --- hooks


@add()
def hook_of_an_output(layer, x):
    """A hook that scales a gradient."""
    y = layer.linear(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 1.5)
    return y


@add()
def hook_of_a_weight(layer, x):
    """A hook that is registered once, and scales the gradient of a weight."""
    if layer.calls == 1 and layer.linear.weight.requires_grad:
        layer.linear.weight.register_hook(lambda grad: grad * 0.5)
    return layer.linear(x)


@add()
class ForwardHook(nn.Module):
    """A hook that changes the output of a layer, and counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = 0
        self.linear.register_forward_hook(Hook(self))

    def forward(self, x):
        return self.linear(x)


class Hook:
    """A forward hook, which can be copied with its module."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, module, args, output):
        self.layer.count += 1
        return output * (1 + self.layer.count / 4)


@add()
class BackwardHook(nn.Module):
    """A hook that changes the gradient of an input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_full_backward_hook(double_input)

    def forward(self, x):
        return self.linear(x)


def double_input(module, grad_input, grad_output):
    """Double the gradient of the input."""
    return tuple(None if grad is None else grad * 2 for grad in grad_input)


# --- writes


@add(refused=NEVER)
class Clipped(nn.Linear):
    """A layer that clips its weight in forward."""

    def __init__(self, *shape, **options):
        super().__init__(*(shape or (4, 4)), **options)

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)[:, :4]


@add()
class Renormed(nn.Module):
    """An embedding that scales its rows in forward."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, x):
        return x + self.rows((x.detach().abs() * 3).long().clamp(0, 7)[:, 0])


@add()
class Initialised(nn.Module):
    """A layer that sets its parameter at the first input."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.is_new = True

    def forward(self, x):
        if self.is_new:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.is_new = False
        return x + self.shift


@add()
def output_in_place(layer, x):
    """Change an output in place."""
    y = layer.linear(x)
    y[:, :2].mul_(0.5)
    return y.tanh_()


@add(refused=RECOMPUTED, lacks=ONE_TYPE)
def weight_through_data(layer, x):
    """Scale a weight through ``data``, which PyTorch does not count."""
    layer.linear.weight.data = layer.linear.weight.data * 0.9
    return layer.linear(x)


@add(refused=NEVER)
def normalized_weight(layer, x):
    """Write a normalized weight."""
    with torch.no_grad():
        layer.linear.weight.copy_(F.normalize(layer.linear.weight, dim=1))
    return layer.linear(x)


@add()
def frozen_parameter(layer, x):
    """Write to a frozen parameter."""
    with torch.no_grad():
        layer.frozen.mul_(0.9)
    return layer.linear(x) * layer.frozen.clone()


@add()
def frozen_parameter_behind_its_version(layer, x):
    """Write to a frozen parameter without a new version."""
    layer.frozen.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return layer.linear(x) * layer.frozen.clone()


@add()
def copied_parameter(layer, x):
    """Write to a parameter of which a copy is read."""
    with torch.no_grad():
        layer.linear.bias.mul_(0.9)
    return x * layer.linear.bias.clone()


@add()
def parameter_behind_its_version(layer, x):
    """Write to a parameter without a new version, of which a copy is read."""
    layer.linear.bias.data.mul_(0.9)
    return x * layer.linear.bias.clone()


@add()
def weight_and_bias_of_other_shapes(layer, x):
    """A linear map with a bias of one row and a weight of one dimension."""
    y = F.linear(x, layer.linear.weight, layer.linear.bias[None])
    return y + F.linear(x, layer.linear.weight[0])[:, None]


# --- random numbers


@add(lacks=CPU_ONLY)
def own_generator(layer, x):
    """Draw from a generator of the layer."""
    if not hasattr(layer, 'generator'):
        layer.generator = torch.Generator(x.device).manual_seed(3)
    mask = torch.rand(x.shape, generator=layer.generator, dtype=x.dtype, device=x.device)
    return layer.linear(x) * mask


@add()
def generator_on_the_cpu(layer, x):
    """Draw from a generator of the layer on the CPU, wherever the layer is."""
    if not hasattr(layer, 'generator'):
        layer.generator = torch.Generator().manual_seed(1)
    mask = torch.rand(x.shape, generator=layer.generator, dtype=x.dtype)
    return layer.linear(x) * mask.to(x.device)


@add(draws=True)
def dropout(layer, x):
    """Draw from the generator of the device, before and after a linear layer."""
    return F.dropout(layer.linear(F.dropout(x, 0.3)), 0.4)


@add(draws=True, lacks=NO_HOOKS)
def random_rectifier(layer, x):
    """Draw slopes, and numbers of the layer's generator between them."""
    y = own_generator(layer, F.rrelu(x, training=True))
    return F.rrelu(y, training=True)
