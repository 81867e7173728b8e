"""What a model does in its first call only: converted without one, or refused, and never other."""
import copy
import random
from contextvars import ContextVar
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.devices import cpu_only
from torchgpipe import GPipe
from torchgpipe.sequential import ConversionError, to_sequential

pytestmark = cpu_only('what is recorded does not depend on devices')

#: What hooks hand their tensors to, while a call lasts, as in transformers.
collector = ContextVar('collector', default=None)


@dataclass
class Output:
    y: object
    states: object
    weights: object


class Attention(nn.Module):
    """One whose program goes by the training mode, so that it is a leaf, if it has dropout."""

    def __init__(self, p):
        super().__init__()
        self.linear, self.p = nn.Linear(6, 6), p

    def forward(self, x):
        weights = self.linear(x).softmax(-1)
        return x + F.dropout(weights, self.p if self.training else 0.0), weights


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.attention, self.out = Attention(p), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(self.attention(x)[0])


def install(module, key, index=None):
    def hook(module, args, output):
        found = collector.get()
        if found is not None:
            found[key].append(output if index is None else output[index])

    return module.register_forward_hook(hook)


class Captures(nn.Module):
    """A model that registers hooks in its first call, which collect what its blocks give."""

    def __init__(self, p=0.5):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(p), Block(p)), nn.Linear(6, 3)

    def forward(self, x):
        if not getattr(self, '_installed', False):
            for block in self.blocks:
                install(block, 'states')
                install(block.attention, 'weights', 1)
            self._installed = True
        token = collector.set({'states': [], 'weights': []})
        try:
            y = self.head(self.blocks(x))
        finally:
            found = collector.get()
            collector.reset(token)
        return Output(y, **{key: tuple(values) for key, values in found.items()})


def values(number=4):
    return torch.randn(number, 6, dtype=torch.float64)


def leaves_of(output):
    return output if isinstance(output, torch.Tensor) else torch.stack(
        [F.pad(x, (0, 6 - x.shape[1])) for x in (
            output.y, *output.states, *output.weights)])


def check(model, **options):
    """Convert a model; see that it gives the same as a model called first, or ever, each time."""
    layers = to_sequential(model.double(), values(), check_sample=False, **options)
    for first in (True, False):
        for mode in (True, False, True):
            plain = copy.deepcopy(model).train(mode)
            if not first:
                plain(values(2))
            for number in (4, 1, 7):
                x = values(number)
                found = []
                for each in (plain, layers.train(mode)):
                    torch.manual_seed(0)
                    found.append(leaves_of(each(x)))
                assert torch.equal(*found)
    return layers


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('p', [0.0, 0.5])
def test_hooks_that_a_first_call_registers(p, training):
    """In v0.9.0 these were refused, and with dropout of attention for a wrong reason."""
    model = Captures(p).train(training)
    layers = check(model)
    assert [each.kind for each in layers.wholes] == ['Attention'] * 2 * (p > 0)
    assert not hasattr(model, '_installed')
    pipeline = GPipe(layers.eval(), [2, len(layers) - 2], devices=['cpu:0', 'cpu:1'],
                     chunks=2)
    x = values()
    for _ in range(2):  # The second time, the model has its hooks on the leaves that layers have.
        assert torch.allclose(leaves_of(pipeline(x)), leaves_of(model.eval()(x)), rtol=1e-12)


def test_hooks_of_a_call_before_on_what_is_not_looked_into():
    model = Captures().double()
    model(values())
    with pytest.raises(ConversionError, match=r'(?s)\(Output\) with tensors.*Way out: if hooks '
                                              r'.* before its first call.*attn_pdrop=0'):
        to_sequential(model, values())
    model = Captures(0.0)
    model(torch.randn(2, 6))
    check(model)


class Model(nn.Module):
    """A model with a function between its layers."""

    def __init__(self, function, block=None):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function
        self.block = block or Block(0.0)
        self.last, self.calls, self.seen = None, 0, []

    def forward(self, x):
        return self.b(self.block(self.function(self, self.a(x))))

    def noted(self, module, args, output):
        return 2 * output


def flag(m, x):
    m.last = True
    return x


def lazy(m, x):
    if m.last is None:
        m.last = 2
    return x * m.last


def emptied(m, x):
    m.calls = 0
    return x


@pytest.mark.parametrize('function', [flag, lazy, emptied])
def test_flags_that_go_by_nothing(function):
    model = Model(function)
    check(model)
    assert model.last is None


def counted(m, x):
    m.calls += 1
    return x


def toggled(m, x):
    m.last = not m.last
    return x


def masked(m, x):
    if m.last is None:
        m.last = x > 0
    return x * m.last


def sized(m, x):
    if m.last is None:
        m.last = int(x.shape[0])
    return x * m.last


def measured(m, x):
    if m.last is None:
        m.last = len(x)
    return x * m.last


def shaped(m, x):
    if m.last is None:
        m.last = x.shape
    return x * m.last[0]


def averaged(m, x):
    m.last = 0.9 * (m.last or 0.0) + 0.1 * x.mean().item()
    return x * m.last


def averaged_once(m, x):
    if m.last is None:
        m.last = float(x.mean())
    return x * m.last


def listed(m, x):
    m.seen.append(x)
    return x + m.seen[0]


def drawn(m, x):
    if m.last is None:
        m.last = torch.randn(6)
    return x * m.last


def drawn_as_a_number(m, x):
    if m.last is None:
        m.last = random.random()
    return x * m.last


def of_numpy(m, x):
    if m.last is None:
        m.last = torch.from_numpy(__import__('numpy').ones(6))
    return x * m.last


def read_before(m, x):
    y = x if m.last is None else 2 * x
    m.last = True
    return y


def in_its_dictionary(m, x):
    vars(m)['calls'] = m.calls + 1
    return x * m.calls


def in_training(m, x):
    """Other numbers in evaluation, if there was a call in training before."""
    if m.training:
        m.last = True
        return x
    return x if m.last is None else 2 * x


def in_training_only(m, x):
    if m.training:
        m.last = True
    return x


def by_mode(m, x):
    if m.last is None:
        m.last = 2 if m.training else 3
    return x * m.last


def of_itself(m, x):
    m.training = False
    return x


def off(m, x):
    m.block = None
    return x


def hooked_again(m, x):
    m.block.register_forward_hook(lambda module, args, output: 2 * output)
    return x


def hooked_by_a_method(m, x):
    if m.last is None:
        m.block.register_forward_hook(m.noted)
        m.last = True
    return x


def hooked_by_a_count(m, x):
    if m.last is None:
        count = 0

        def hook(module, args, output):
            nonlocal count
            count += 1
            return output if count < 3 else 2 * output
        m.block.register_forward_hook(hook)
        m.last = True
    return x


def acts(module, output, scale):
    """Return another output in evaluation only, if the hook was registered in training."""
    return None if module.training or scale == 1 else scale * output


def hooked_by_mode(m, x):
    if m.last is None:
        scale = 2 if m.training else 1
        m.block.register_forward_hook(lambda module, args, output: acts(module, output, scale))
        m.last = True
    return x


def hooked_by_a_default(m, x):
    if m.last is None:
        def hook(module, args, output, scale=2 if m.training else 1):
            return acts(module, output, scale)
        m.block.register_forward_hook(hook)
        m.last = True
    return x


def hooked_by_a_keyword(m, x):
    if m.last is None:
        def hook(module, args, output, *, scale=2 if m.training else 1):
            return acts(module, output, scale)
        m.block.register_forward_hook(hook)
        m.last = True
    return x


@pytest.mark.parametrize('function', [
    counted, toggled, masked, sized, measured, shaped, averaged, averaged_once, listed, drawn,
    drawn_as_a_number, of_numpy, read_before, in_its_dictionary, in_training, in_training_only,
    by_mode, of_itself, off, hooked_again, hooked_by_a_method, hooked_by_a_count, hooked_by_mode,
    hooked_by_a_default, hooked_by_a_keyword])
@pytest.mark.parametrize('training', [True, False])
def test_what_may_be_another_one_in_later_calls(function, training):
    model = Model(function).double().train(training)
    with pytest.raises(ConversionError, match='it sets|it changes|a call changes|elements|draws|'
                                              'keeps|training mode'):
        to_sequential(model, values(), check_sample=False)


def test_a_flag_of_another_number_of_samples():
    """One sample would go another way, and leave something for all calls after that."""
    def single(m, x):
        if len(x) == 1:
            m.last = True
        return x if m.last is None else x * 1

    layers = to_sequential(Model(single).double(), values(), check_sample=False)
    layers(values(7))
    with pytest.raises(ValueError, match='goes the way'):
        layers(values(1))


def test_flags_for_leaf_modules():
    """Layers have the leaf modules of the model, to which nobody has called them."""
    class Scaled(Attention):
        scale = 1

        def forward(self, x):
            scale = self.others[0].last or 1 if self.others else self.scale
            return super().forward(x)[0] * scale

    def on_the_leaf(m, x):
        m.block.scale = 2
        return x

    for function, others in ((on_the_leaf, False), (lazy, True)):
        model = Model(function, Scaled(0.0)).double()
        model.block.others = [model] if others else []
        with pytest.raises(ConversionError, match="it sets the attribute '(scale|last)'"):
            to_sequential(model, values(), leaves=['block'], check_sample=False)


def on_a_leaf(hook, inner=False, before=False):
    def function(m, x):
        if m.last is None:
            m.last = True
            (m.block.out if inner else m.block).register_forward_hook(hook, prepend=before)
        return x

    return function


def nothing(module, args, output):
    pass


def doubled(module, args, output):
    return 2 * output


def doubled_in_place(module, args, output):
    output *= 2


def passed_by(module, args, output):
    return args[0]


@pytest.mark.parametrize('function', [
    on_a_leaf(doubled), on_a_leaf(passed_by), on_a_leaf(doubled_in_place),
    on_a_leaf(nothing, inner=True), on_a_leaf(nothing, before=True)],
    ids=['gives', 'input', 'in place', 'inner', 'before another'])
def test_hooks_on_a_leaf_that_would_act_there_too(function):
    """The layers have that leaf: as soon as the model itself is called, they have its hook."""
    model = Model(function).double()
    model.block.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ConversionError, match=r"registers a hook on 'block' \(Block\)"):
        to_sequential(model, values(), leaves=['block'], check_sample=False)


def test_hooks_on_a_leaf_behind_its_own():
    model = Model(on_a_leaf(nothing)).double()
    model.block.register_forward_hook(lambda module, args, output: output + 1)
    check(model, leaves=['block'])


def test_a_leaf_may_register_hooks_itself():
    class Own(Block):
        def forward(self, x):
            if not self.out._forward_hooks:
                self.out.register_forward_hook(doubled)
            return super().forward(x)

    check(Model(lambda m, x: x, Own(0.0)), leaves=['block'])
    check(Model(flag, Own(0.0)), leaves=['block'])
