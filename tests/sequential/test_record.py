"""Forwards that can be recorded give the same results. Others raise an error that names the
line."""

import builtins
import copy
import math
import pickle
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.base.structure import call, flatten_nested
from torchgpipe.sequential import ConversionError, to_sequential


class Model(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Parameter(torch.randn(6))
        self.register_buffer('mask', torch.arange(6) > 2)
        self.register_buffer('count', torch.zeros(()))
        self.seen = []
        self.function = function

    def forward(self, x, *args, **kwargs):
        return self.b(self.function(self, self.a(x), *args, **kwargs))


class Inner(nn.Module):
    """A submodule with a function for its forward."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.function(self, x) * self.weight


def sample():
    torch.manual_seed(0)
    return torch.randn(4, 6)


def check(model, x, *others, **options):
    """Convert; compare with the model in both modes, also for other inputs."""
    layers = to_sequential(model, x, **options)
    for value in (x, *others):
        for mode in (True, False):
            model.train(mode)
            layers.train(mode)
            results = []
            for each in (model, layers):
                model.zero_grad()
                torch.manual_seed(1)
                output = each(value)
                output.square().sum().backward()
                results.append([output, *(p.grad for p in model.parameters())])
            for a, b in zip(*results):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)
    return layers


def in_a_pipeline(layers, x):
    """Compare layers in a pipeline with themselves, in evaluation mode."""
    expected = layers.eval()(x)
    pipe = GPipe(layers, [1, len(layers) - 1], devices=['cpu:0', 'cpu:1'], chunks=2).eval()
    assert torch.allclose(pipe(x), expected, atol=1e-6)


Pair = namedtuple('Pair', 'x y')


@dataclass
class Both:
    x: torch.Tensor
    n: int


def halves(m, x):
    a, b = x.chunk(2, -1)
    return torch.cat([b, a], -1)


def written_in_place(m, x):
    y = x * 1
    same = y
    y += 1
    y[:, 0] = 0
    y.mul_(2)
    return same + y


def counted(m, x):
    n = x.shape[1]
    before = n
    n += 1
    return x * n + before


def listed(m, x):
    return x + sum(p.sum() for name, p in m.named_parameters() if name == 'table')


def packed(m, x):
    pair = Pair(x, {'y': [x * 2]})
    both = Both(pair.x, 3)
    return both.x * both.n + pair.y['y'][0]


def looped(m, x):
    for k in range(x.shape[1] // 2):
        x = x + k
    return x


def made(m, x):
    rows = torch.arange(len(x), device=x.device, dtype=x.dtype).unsqueeze(1)
    return (
        x
        + rows * 0
        + torch.zeros(x.shape)
        + torch.full((x.size(0), 6), 0.5)
        + torch.tensor([1.0, x.shape[1]]).sum()
        + torch.finfo(x.dtype).eps
        + math.sqrt(x.shape[1])
    )


def resized(m, x):
    return F.interpolate(x[:, None], size=2 * x.shape[-1], mode='linear')[:, 0, : x.shape[-1]]


def types_asked(m, x):
    assert isinstance(x, torch.Tensor) and isinstance(x.shape, tuple) and isinstance(len(x), int)
    assert x.dim() == 2 and 6 in x.shape and x.shape[-1:] == (6,) and not hasattr(x, 'nothing')
    return x


def numbers_first(m, x):
    """PyTorch looks for a number in the first argument before it looks for a tensor."""
    return torch.pow(x, 3.0) + torch.remainder(x, 2) + torch.where(x > 0, 1.0, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


class Thrice(Doubled):
    @classmethod
    def apply(cls, x):
        return super().apply(x, 2) * 1.5


def with_its_own_backward(m, x):
    return Doubled.apply(x, 2)


def with_its_own_apply(m, x):
    return Thrice.apply(x)


def plain_modules(m, x):
    return nn.Softmax(dim=-1)(x)


def masked(m, x):
    return x.masked_fill(m.mask, 0) + torch.where(m.mask, m.table, x)


def nothing_returned(m, x):
    m.count.add_(1)
    return x + m.count


def dropped(m, x):
    return F.dropout(x, 0.5, m.training)


def drawn(m, x):
    return x * torch.rand(1) + torch.randn_like(x)


def test_common_forward_methods():
    for function in [
        halves,
        written_in_place,
        counted,
        listed,
        packed,
        looped,
        made,
        resized,
        types_asked,
        numbers_first,
        with_its_own_backward,
        with_its_own_apply,
        plain_modules,
        masked,
        dropped,
        drawn,
    ]:
        layers = check(Model(function), sample(), torch.randn(7, 6))
        assert len(layers) == 2, function
        if function is not drawn:  # which draws others for micro-batches
            in_a_pipeline(layers, sample())


def test_buffers_are_written_to_once_in_each_run():
    model, x = Model(nothing_returned), sample()
    layers = to_sequential(model, x)
    assert model.count == 0
    expected = copy.deepcopy(model)(x)
    assert torch.equal(layers(x), expected) and model.count == 1


def by_elements(m, x):
    if x.sum() > 0:  # this line
        x = x * 2
    return x


def by_an_element(m, x):
    for _ in range(int(x.abs().sum().item())):  # this line
        x = x * 2
    return x


def by_a_draw(m, x):
    return x * 2 if random.random() > 0.5 else x  # this line


def set_aside(m, x):
    m.last = x  # this line
    return x


def without_gradients(m, x):
    with torch.no_grad():  # this line
        return x * 2


def in_another_precision(m, x):
    with torch.autocast('cpu', dtype=torch.bfloat16):  # this line
        return ((x[:, None] @ x[:, :, None])[:, 0] * x).float()


def by_the_mode(m, x):
    return x if m.training else x * 2  # this line


def given_to_numpy(m, x):
    return x + torch.from_numpy(numpy.asarray(x.detach()))  # this line


def from_a_foreign_layer(m, x):
    return nn.Linear(6, 6)(x)  # this line


FOREIGN = nn.Linear(6, 6).requires_grad_(False)


def from_a_layer_elsewhere(m, x):
    return FOREIGN(x)  # this line


def in_a_mode_that_is_set(m, x):
    torch.set_grad_enabled(False)
    try:
        return x * 2  # this line
    finally:
        torch.set_grad_enabled(True)


def by_an_attribute(m, x):
    x.mine = 3  # this line
    return x


WRONG = [
    by_elements,
    by_an_element,
    by_a_draw,
    set_aside,
    without_gradients,
    in_another_precision,
    by_the_mode,
    given_to_numpy,
    from_a_foreign_layer,
    from_a_layer_elsewhere,
    in_a_mode_that_is_set,
    by_an_attribute,
]


def test_code_that_cannot_be_followed_is_named_by_its_line():
    for function in WRONG:
        model = Model(function)
        state, known = copy.deepcopy(model.state_dict()), dict(model.__dict__)
        with pytest.raises(ConversionError, match=r'Model cannot be converted') as caught:
            to_sequential(model, sample())
        message = str(caught.value)
        assert 'test_record.py, line' in message and f'in {function.__name__}' in message
        assert '# this line' in message and 'write that part of the model' in message, function
        assert {**model.__dict__} == known and all(
            torch.equal(x, state[name]) for name, x in model.state_dict().items()
        ), function


@pytest.mark.parametrize('function', WRONG, ids=lambda f: f.__name__)
def test_a_leaf_may_do_anything(function):
    """A module that goes by the mode, or changes modes, is one by itself."""
    model = nn.Sequential(nn.Linear(6, 6), Inner(function), nn.Linear(6, 6))
    by_itself = function in (
        by_the_mode,
        without_gradients,
        in_another_precision,
        in_a_mode_that_is_set,
    )
    if not by_itself:
        with pytest.raises(ConversionError, match=r"leaves=\['1'\]"):
            to_sequential(model, sample())
    if function is from_a_foreign_layer:
        return  # Each call has other weights.
    layers = to_sequential(
        model,
        sample(),
        leaves=() if by_itself else ['1'],
        check_sample=function not in (by_an_element, by_a_draw),
    )
    assert [type(x).__name__ for x in layers.modules()].count('Inner') == 1
    for mode in (True, False):
        model.train(mode)
        layers.train(mode)
        random.seed(0)
        expected = model(sample())
        random.seed(0)
        assert torch.equal(layers(sample()), expected)


def test_a_training_mode_that_makes_no_difference_makes_no_leaf():
    for inner in [False, True]:

        def function(m, x):
            a, b = x.chunk(2, -1)
            x = torch.cat([b + torch.ones(3) if m.training and m.weight is None else b, a], -1)
            return Both(x, 2 if m.training else 2).x

        model = nn.Sequential(nn.Linear(6, 6), Inner(function), nn.Linear(6, 6))
        if not inner:
            model = Model(function)
            model.weight = model.table
        layers = check(model, sample(), torch.randn(7, 6))
        assert 'Inner' not in [type(x).__name__ for x in layers.modules()], inner


def test_a_difference_that_follows_two_modes_is_of_the_last_one():
    def harmless(m, x):
        return x * (2 if m.training else 2)

    class Other(Inner):
        pass

    model = nn.Sequential(
        nn.Linear(6, 6), Inner(harmless), nn.Linear(6, 6), Other(by_the_mode), Inner(harmless)
    )
    layers = to_sequential(model, sample())
    names = [type(x).__name__ for x in layers.modules()]
    assert names.count('Other') == 1 and 'Inner' not in names


def test_a_module_that_can_be_followed_in_one_mode_only_is_a_leaf():
    for training in [True, False]:

        class Cached(Inner):
            def __init__(self):
                super().__init__(lambda m, x: x if m.training else x + m.once())
                self.cache = {}

            def once(self):
                if 'table' not in self.cache:
                    self.cache['table'] = torch.arange(6.0)
                return self.cache['table']

        model = nn.Sequential(nn.Linear(6, 6), Cached(), nn.Linear(6, 6)).train(training)
        layers = check(model, sample())
        assert 'Cached' in [type(x).__name__ for x in layers.modules()], training


def test_draws_that_a_forward_hides_are_noticed():
    rand = torch.rand
    with pytest.raises(ConversionError, match='draws random numbers of PyTorch'):
        to_sequential(Model(lambda m, x: x + rand(1)), sample())


def test_tensors_kept_in_a_list_are_noticed():
    model = Model(lambda m, x: m.seen.append(x) or x)
    with pytest.raises(ConversionError, match="changes what is in the attribute 'seen'"):
        to_sequential(model, sample())
    assert model.seen == []


def set_once(m, x):
    if m.last is None:
        m.last = torch.arange(6.0)
    return x + m.last


def filled_once(m, x):
    if not m.cache:
        m.cache[6] = torch.arange(6.0)
    return x + m.cache[6]


def test_a_cache_that_the_first_call_fills_is_filled_before():
    """It may come of the sample, and be other for another one."""
    for function in [set_once, filled_once]:
        for inner in [False, True]:
            model = nn.Sequential(nn.Linear(6, 6), Inner(function)) if inner else Model(function)
            held = model[1] if inner else model
            held.last, held.cache = None, {}
            with pytest.raises(
                ConversionError,
                match='Way out: if only its first call does that, as for '
                'a cache, call the model once before. Otherwise '
                '.*leaf',
            ):
                to_sequential(model, sample())
            model(sample())
            assert 'constant' in str(
                [name for name, _ in check(model, sample()).named_buffers()]
            ), (function, inner)


def test_a_flag_that_the_first_call_sets_is_set_before():
    """An example is the flag of BigBird for short texts."""
    for before, after in [('sparse', 'full'), (False, True)]:

        def flag_once(m, x):
            if m.flag == before:
                m.flag = after
            return x * 2 if m.flag == after else x

        model = Model(flag_once)
        model.flag = before
        with pytest.raises(ConversionError, match='call the model once before'):
            to_sequential(model, sample())
        assert model.flag == before
        model(sample())
        check(model, sample())


def test_code_that_changes_state_is_called_only_once():
    for function in [
        lambda m, x: setattr(m, 'number', m.number + 1) or x,
        lambda m, x: setattr(m, 'count', m.count + 1) or x,
        lambda m, x: m.seen.append(1) or x,
    ]:
        model = Model(function)
        model.number, model.seen = 0, [1]
        with pytest.raises(ConversionError, match='attribute') as caught:
            to_sequential(model, sample())
        assert 'once before' not in str(caught.value), function


class Cache:
    def __init__(self, held):
        self.held = held


def test_an_object_that_a_leaf_changes_is_noticed():
    class Reader(nn.Linear):
        def forward(self, x, cache, change=False):
            if change:
                cache.held['x'].append(x)
            return super().forward(x) * len(cache.held['x'])

    def forward(m, x, change):
        return m.reader(x, Cache({'x': [1, 2]}), change=change)

    for change in (False, True):
        model = Model(lambda m, x: forward(m, x, change))
        model.reader = Reader(6, 6)
        if change:
            with pytest.raises(ConversionError, match=r'\(Cache\) that is changed there'):
                to_sequential(model, sample())
        else:
            check(model, sample())


def test_an_error_of_the_model_is_its_own():
    with pytest.raises(RuntimeError, match='mat1 and mat2'):
        to_sequential(Model(halves), torch.randn(4, 5))


def test_guards_of_the_program_are_checked_in_each_run():
    def by_size(m, x, scale=1):
        return x * 2 if x.shape[1] > 3 and scale == 1 else x

    class Any(nn.Module):
        def forward(self, x, scale=1):
            return by_size(self, x, scale)

    layers = to_sequential(Any(), torch.randn(4, 6))
    assert torch.equal(layers(torch.ones(9, 4)), torch.full((9, 4), 2.0))
    with pytest.raises(ValueError, match=r'shape\[1\] > 3 was True; it is False now .*by_size'):
        layers(torch.ones(4, 2))
    with pytest.raises(
        ValueError,
        match='called with arguments like those of the sample.*; the '
        r"sample was without 'scale': .*Arguments\(…, scale=…",
    ):
        layers(torch.ones(4, 6), scale=2)
    assert torch.equal(layers(torch.ones(4, 6), scale=1), torch.full((4, 6), 2.0))
    with pytest.raises(TypeError, match='unexpected keyword'):
        layers(torch.ones(4, 6), other=2)


def test_the_number_of_parts_is_checked():
    class Steps(nn.Module):
        def forward(self, x):
            total = 0
            for step in x.unbind(1):
                total = total + step
            return total

    layers = to_sequential(Steps(), torch.randn(4, 6))
    with pytest.raises(ValueError, match='the form of a value'):
        layers(torch.randn(4, 7))


def test_a_program_for_one_batch_size_is_found_out():
    def by_batch(m, x):
        return torch.stack([x[i] for i in range(x.shape[0])])

    with pytest.raises(ConversionError, match='cannot be cut into micro-batches'):
        to_sequential(Model(by_batch), sample())
    one = to_sequential(Model(by_batch), sample()[:1])  # of which there is no half
    with pytest.raises(ValueError, match=r'shape\[0\] was 1; it is 4 now'):
        one(sample())


class Called(nn.Module):
    """A module with typical arguments of models."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, mask=None, *, extra=None, scale=2):
        x = self.a(x)
        if mask is not None:
            x = x * mask
        if extra is not None:
            x = x + extra['y'][0]
        return {'out': self.b(x) * scale, 'n': scale}


def test_arguments():
    for arguments in [
        Arguments(torch.randn(4, 6)),
        Arguments(torch.randn(4, 6), torch.ones(4, 1)),
        Arguments(torch.randn(4, 6), extra={'y': (torch.randn(4, 6), None)}),
        Arguments(torch.randn(4, 6), mask=torch.ones(4, 1), scale=3),
        Arguments(torch.randn(4, 6), NoChunk(torch.ones(1, 6))),
    ]:
        model = Called()
        layers = to_sequential(model, arguments)
        args = [x.value if isinstance(x, NoChunk) else x for x in arguments.args]
        expected = model(*args, **arguments.kwargs)
        found = layers(*args, **arguments.kwargs)
        assert torch.equal(found['out'], expected['out']) and found['n'] == expected['n']
        pipe = GPipe(layers, [1, 1], devices=['cpu', 'cpu'], chunks=2)
        found = pipe(*arguments.args, **arguments.kwargs)
        assert torch.allclose(found['out'], expected['out'], atol=1e-6), arguments


class Scored(nn.Module):
    """A model with a loss in it, as of language."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids, labels=None, others=()):
        logits = self.head(self.words(ids))
        for other in (labels, *others):
            ids = ids + other
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), ids


def test_each_place_of_a_sample_is_an_argument_of_its_own():
    """In v0.8.0, a tensor at two places was one: later the first place's went to both."""
    for sample in [
        lambda x: Arguments(x, labels=x),
        lambda x: Arguments(x, x, [x, x]),
        lambda x: Arguments(x, x.view(4, 3), [x[:], x.detach()]),
        lambda x: Arguments(x, NoChunk(x), (NoChunk(x), x)),
    ]:
        model, x = Scored(), torch.randint(9, (4, 3))
        arguments = sample(x)
        layers = to_sequential(model, arguments, check_sample=False)
        tensors, structure = flatten_nested(arguments)
        others = structure([torch.randint(9, (4, 3)) for _ in tensors])
        for found, expected in zip(call(layers, others), call(model, others)):
            assert torch.equal(found, expected), sample
        to_sequential(model, Arguments(x, labels=x))


def test_arguments_go_by_name_for_the_batch_dimension():
    class Masked(Called):
        def forward(self, x, mask):
            return self.b(self.a(x) * mask.t())

    x, mask = torch.randn(4, 6), torch.rand(6, 4)
    layers = to_sequential(Masked(), Arguments(x, mask), batch_dim={'mask': 1})
    pipe = GPipe(layers, [1, 1], devices=['cpu', 'cpu'], chunks=2, batch_dim={'mask': 1})
    assert torch.allclose(pipe(x, mask), layers(x, mask))
    with pytest.raises(TypeError, match='missing a required argument'):
        pipe(x)


def test_without_a_sample():
    layers = to_sequential(Model(halves))
    assert len(layers) == 2
    model = Model(made)
    assert torch.equal(to_sequential(model)(sample()), model(sample()))
    for function, what in [
        (lambda m, x: x if x.shape[1] > 2 else x * 2, 'goes by'),
        (types_asked, 'asks for the type'),
        (lambda m, x: [y for y in x][0], 'goes through'),
    ]:
        with pytest.raises(ConversionError, match=f'{what}.*not known without a sample'):
            to_sequential(Model(function))
    with pytest.raises(ValueError, match='converted without a sample'):
        to_sequential(Called())(torch.randn(4, 6), scale=3)


def test_nothing_stays_replaced():
    """Also after an error, and others threads never see it."""
    before = (
        builtins.len,
        builtins.isinstance,
        torch.arange,
        random.random,
        nn.Module.__call__,
        nn.Module.__getattr__,
        nn.Module.__setattr__,
        torch.autograd.Function.__dict__['apply'],
        type(torch.autograd.Function).__getattribute__,
    )
    for function in (made, by_elements):
        try:
            to_sequential(Model(function), sample())
        except ConversionError:
            pass
        assert before == (
            builtins.len,
            builtins.isinstance,
            torch.arange,
            random.random,
            nn.Module.__call__,
            nn.Module.__getattr__,
            nn.Module.__setattr__,
            torch.autograd.Function.__dict__['apply'],
            type(torch.autograd.Function).__getattribute__,
        )
    assert '__getattribute__' not in vars(type(torch.autograd.Function))


def test_nothing_is_found_in_the_lists_that_pytorch_makes():
    """They are made when they are first asked for, as when a step is recorded."""
    for listing in vars(torch.overrides).values():
        if hasattr(listing, 'cache_clear'):
            listing.cache_clear()
    to_sequential(Model(resized), sample())
    assert torch.arange in torch.overrides.get_ignored_functions()


def test_a_conversion_changes_nothing():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), Inner(by_the_mode))
    model[1].eval()
    state, x = copy.deepcopy(model.state_dict()), sample()
    kept, generator = x.clone(), torch.get_rng_state()
    layers = to_sequential(model, x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model] == [True, False, True, True]
    (norm,) = (m for m in layers.modules() if isinstance(m, nn.BatchNorm1d))
    assert layers.training and not norm.training
    assert all(p.grad is None for p in model.parameters())
    mine = {id(p) for p in model.parameters()}
    assert {id(p) for p in layers.parameters()} == mine


def test_copies_and_pickles():
    model = Called()
    arguments = Arguments(sample(), extra={'y': (sample(), None)})
    layers = to_sequential(model, arguments)
    expected = model(*arguments.args, **arguments.kwargs)['out']
    for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        found = other(*arguments.args, **arguments.kwargs)['out']
        assert torch.equal(found, expected)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
    assert torch.equal(layers(*arguments.args, **arguments.kwargs)['out'], expected)


def test_numbers_that_a_graph_does_not_have_are_found_out():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.calls = nn.Linear(6, 6), [0]

        def forward(self, x):
            return self.a(x) * (2 if torch.is_grad_enabled() else 3)

    with pytest.raises(ConversionError, match='other numbers than the model in evaluation:'):
        to_sequential(Hidden(), sample())


def test_constants_move_with_the_layers():
    table = torch.arange(6.0)
    layers = to_sequential(Model(lambda m, x: x + table), sample())
    assert [name for name, _ in layers.named_buffers() if 'constant' in name]
    assert not [name for name in layers.state_dict() if 'constant' in name]
    assert layers.double()(sample().double()).dtype == torch.float64


def test_other_things_than_modules():
    with pytest.raises(TypeError, match='a module is converted, not function'):
        to_sequential(halves, sample())
