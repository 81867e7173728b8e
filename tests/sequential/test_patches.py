"""Functions replaced while a forward is recorded, and threads for which they are not replaced."""

import builtins
import gc
import math
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.helpers import Call
from torchgpipe.sequential import ConversionError, from_stages, to_sequential
from torchgpipe.sequential.effects import UnknownValue
from torchgpipe.sequential.record import ForwardTracer


class Model(nn.Module):
    """A function of a module and of a linear layer's output."""

    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(6, 6), function
        self.register_buffer('table', torch.rand(6))

    def forward(self, x):
        return self.function(self, self.first(x))


def assert_same(function, *sizes):
    """Compare a model with its converted layers, for batches of some sizes."""
    model = Model(function)
    layers = to_sequential(model, torch.rand(4, 6), check_sample=False)  # It may go into numbers.
    for size in sizes or (7, 1):
        x = torch.rand(size, 6)
        results = []
        for each in (model, layers):
            torch.manual_seed(0)
            results.append(each(x))
        assert torch.equal(*results)


MAKERS = {
    'arange': [6],
    'as_tensor': [[1.5] * 6],
    'empty': [6],
    'eye': [6],
    'full': [(6,), 2.0],
    'linspace': [0, 1, 6],
    'logspace': [0, 1, 6],
    'ones': [6],
    'rand': [6],
    'randint': [9, (6,)],
    'randn': [6],
    'randperm': [6],
    'scalar_tensor': [2.0],
    'tensor': [[1.5] * 6],
    'tril_indices': [3, 3],
    'triu_indices': [3, 3],
    'zeros': [6],
}


def test_tensors_are_made_anew_in_each_run():
    """Also on the device of another one."""
    for name in MAKERS:
        for has_device in (False, True):

            def function(m, x):
                options = {'device': x.device} if has_device else {}
                made = getattr(torch, name)(*MAKERS[name], **options)
                if name == 'empty':
                    made.zero_()
                made += x.shape[0]
                return x + made.sum()

            assert_same(function)


NUMBERS = {
    'arange': lambda n: [n],
    'as_tensor': lambda n: [n],
    'empty': lambda n: [n],
    'eye': lambda n: [n],
    'full': lambda n: [(n,), n],
    'linspace': lambda n: [0, n, n],
    'logspace': lambda n: [0, 1, n],
    'normal': lambda n: [0.0, 1.0, (n,)],
    'ones': lambda n: [n],
    'rand': lambda n: [n],
    'randint': lambda n: [n, (n,)],
    'randn': lambda n: [n],
    'randperm': lambda n: [n],
    'scalar_tensor': lambda n: [n],
    'tensor': lambda n: [n],
    'tril_indices': lambda n: [n, n],
    'triu_indices': lambda n: [n, n],
    'zeros': lambda n: [n],
}


def test_tensors_are_made_of_the_batch_size_of_each_run():
    for name in NUMBERS:

        def function(m, x):
            made = getattr(torch, name)(*NUMBERS[name](x.shape[0]))
            if name in ('empty', 'normal', 'rand', 'randint', 'randn'):
                made = torch.zeros_like(made)
            return x + made.double().sum().float() + sum(made.shape)

        model = Model(function)
        layers = to_sequential(model, torch.rand(4, 6), check_sample=False)
        x = torch.rand(7, 6)
        assert torch.equal(layers(x), model(x)), name


def test_limits_of_numbers_follow_the_type_of_each_run():
    for name in ['finfo', 'iinfo']:

        def function(m, x):
            y = x if name == 'finfo' else x.long() + torch.zeros((), dtype=torch.int)
            return x * 0 + getattr(torch, name)(y.dtype).max / 2

        assert_same(function)
        if name == 'finfo':
            layers = to_sequential(Model(function), torch.rand(4, 6)).double()
            assert layers(torch.rand(4, 6).double()).mean() > torch.finfo(torch.float).max, name


def test_functions_of_the_batch_size():
    for name in ['ceil', 'cos', 'exp', 'floor', 'isqrt', 'log', 'log10', 'log2', 'sin', 'sqrt']:
        assert_same(lambda m, x: x + getattr(math, name)(x.shape[0]))
    assert_same(lambda m, x: x + math.pow(x.shape[0], 0.5))
    assert_same(lambda m, x: x + math.prod(x.shape))


def test_a_random_number_is_refused_where_it_is_drawn():
    for name, args in [
        ('betavariate', (1, 1)),
        ('choice', ('ab',)),
        ('choices', ('ab',)),
        ('expovariate', (1,)),
        ('gauss', (0, 1)),
        ('getrandbits', (3,)),
        ('normalvariate', (0, 1)),
        ('randint', (0, 1)),
        ('random', ()),
        ('randrange', (3,)),
        ('sample', ('ab', 1)),
        ('shuffle', ([1, 2],)),
        ('triangular', ()),
        ('uniform', (0, 1)),
    ]:

        def function(m, x):
            getattr(random, name)(*args)  # this line
            return x * 2

        with pytest.raises(ConversionError, match=r"(?s)of Python's\n\n.*# this line"):
            to_sequential(Model(function), torch.rand(4, 6))


def test_listed_buffers_are_the_ones_of_each_run():
    model = Model(lambda m, x: x + sum(2 * b for _, b in m.named_buffers()) + sum(m.buffers()))
    layers, x = to_sequential(model, torch.rand(4, 6)), torch.rand(4, 6)
    model.table.add_(1)
    assert torch.equal(layers(x), model(x))


def test_other_threads_keep_the_functions_of_python():
    def counted():
        return int(torch.arange(3).sum()) + len(nn.LayerNorm(2)(torch.ones(4, 2)))

    def function(m, x):
        with ThreadPoolExecutor(1) as pool:
            return x * pool.submit(counted).result()

    assert_same(function)


def recorders():
    gc.collect()
    return sum(type(each) is ForwardTracer for each in gc.get_objects())


def test_other_threads_do_not_see_replaced_functions():
    """In v0.8.0, ``torch.finfo`` was no class for them, and functions could not be pickled by
    name. References to these functions kept the recording alive.
    """
    results, kept = [], []

    def look():
        kept.extend([len, isinstance, math.sqrt, torch.arange, torch.finfo, random.random])
        limits = torch.finfo(torch.float)
        results.append(
            (
                len([1, 2]),
                isinstance(1, int),
                math.sqrt(4),
                torch.arange(2).tolist(),
                isinstance(limits, torch.finfo),
                limits.eps,
                isinstance(torch.finfo, type),
                Twice.apply(torch.ones(1)).item(),
                twice(torch.ones(1)).item(),
                [pickle.loads(pickle.dumps(each)) is each for each in kept[:5]],
            )
        )
        with torch.no_grad():
            module = nn.LayerNorm(2)  # It draws nothing.
        module.mine = [*module.named_parameters()][0][1] is module.weight
        results.append(module.mine and type(module(torch.ones(1, 2))) is torch.Tensor)

    def function(m, x):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return x * 2

    before, state = recorders(), random.getstate()
    to_sequential(Model(function))
    found, replaced = results[:], kept[:]
    del results[:], kept[:]
    look()
    assert found == results and random.getstate() == state
    assert all(a is not b for a, b in zip(replaced, kept))  # as they have the names of one thread
    value = UnknownValue(torch.fx.Graph().placeholder('x'), None)
    assert replaced[0]([1]) == 1 and not replaced[1](value, torch.Tensor)
    assert recorders() == before


# --- functions with a backward of their own
# -------------------------------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Reversed(torch.autograd.Function):
    """It does nothing to be recorded."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return -grad


twice, reversed_, set_up = Twice.apply, Reversed.apply, SetUp.apply


def test_a_function_that_is_applied_by_a_name_of_its_own():
    """In v0.8.0, its forward was recorded: the backward was lost, or an error spoke of a mode."""
    for has_sample in [True, False]:
        for cls, function in [(Twice, twice), (Reversed, reversed_), (SetUp, set_up)]:
            sample = torch.rand(4, 6) if has_sample else None
            with pytest.raises(
                ConversionError,
                match=rf'(?s)calls {cls.__name__}\.apply by a name.*test_'
                rf'patches.py, line.*Way out: call it .* {cls.__name__}\.apply\(',
            ):
                to_sequential(Model(lambda m, x: function(x)), sample)
            layers = to_sequential(
                nn.Sequential(nn.Linear(6, 6), Call(function)),
                torch.rand(4, 6),
                leaves=[Call],
            )
            called = to_sequential(Model(lambda m, x: cls.apply(x)), sample)
            for each in (layers, called):
                x = torch.rand(4, 6)
                first = next(each.parameters())
                each(x).sum().backward()
                assert torch.allclose(
                    first.grad, (x * (5 if cls is Twice else -1)).sum(0).expand(6, 6)
                )


def test_a_leaf_may_trace_functions_itself():
    def traced(x):
        assert not isinstance(x, torch.Tensor)
        with pytest.raises(RuntimeError, match="'len' is not supported"):
            len(x)
        return x + 1

    class Traced(nn.Module):
        def forward(self, x):
            return torch.fx.symbolic_trace(traced)(x)

    model = nn.Sequential(nn.Linear(6, 6), Traced())
    layers, x = to_sequential(model, torch.rand(4, 6), leaves=[Traced]), torch.rand(4, 6)
    assert torch.equal(layers(x), model(x))


def functions_now():
    """Return some of the replaced functions."""
    return (torch.arange, torch.finfo, builtins.len, builtins.isinstance, math.sqrt, random.random)


def test_imports_within_a_step_get_the_functions_of_pytorch_and_python():
    """A module keeps the functions it imports. PyTorch's compiler checks the type of
    ``torch.finfo``."""
    seen = []

    class Importing(nn.Linear):
        def forward(self, x):
            seen.append(functions_now())
            return super().forward(x)

    def stage(m, x):
        seen.append(functions_now())
        return m.get_submodule('0')(x)

    model = nn.Sequential(Importing(6, 6))
    to_sequential(model, torch.rand(4, 6))
    from_stages(model, [stage], torch.rand(4, 6))
    assert set(seen) == {functions_now()}
