"""State is kept by the use that layers make of it: as references, or copies if they change it."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.harness.memory import LiveTensors
from tests.devices import devices
from tests.engine.checkpoint.layers import Layer, count, doubles, move_attributes
from tests.equivalence import loss_of
from tests.helpers import assert_same, call, gradients, in_partitions
from torchgpipe import GPipe
from torchgpipe.engine.checkpoint import observation, state


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


class Masked(nn.Linear):
    """A layer with a large tensor as an attribute, and one that it changes if asked."""

    def __init__(self):
        super().__init__(4, 4)
        self.mask = torch.ones(1 << 18)
        self.changes = False

    def forward(self, x):
        if self.changes:
            self.mask.mul_(0.5)
        return super().forward(x) * self.mask[:4].to(x).clone()


@devices
def test_a_large_attribute_is_copied_only_if_it_is_written_to(devices):
    """In v0.21, each cell copied it."""
    gpipe = in_partitions(devices, Masked(), chunks=8, checkpoint='always')
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
    gpipe = in_partitions(devices, Masked(), chunks=2, checkpoint='always')
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

    gpipe = in_partitions(devices, Quantized(), chunks=4, checkpoint='always')
    with LiveTensors().watched() as live:
        output = gpipe(torch.rand(8, 4, device=devices.first))
    assert live.peak < gpipe[0].codes.nbytes
    output.sum().backward()


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
