"""Values that a forward keeps after it ends: caches are filled before, and others are named."""

import functools
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential.test_record import Inner, Model, check, halves, sample
from torchgpipe.sequential import ConversionError, to_sequential
from torchgpipe.sequential.effects import UNKNOWN, UnknownValue
from torchgpipe.sequential.operations import StepTracer

TABLES = {}
HELD = SimpleNamespace(values=[])
ANY = {}


@functools.lru_cache
def bounded(width):
    return torch.linspace(0, 1, width)


@functools.cache
def unbounded(width):
    return torch.linspace(0, 1, width)


def kept_table(width):
    if width not in TABLES:
        TABLES[width] = torch.linspace(0, 1, width)
    return TABLES[width]


def holds_values(thing):
    return any(isinstance(each, UnknownValue) for each in thing)


@pytest.fixture(autouse=True)
def empty_caches():
    TABLES.clear()
    ANY.clear()
    Kept.last = None
    HELD.values = []
    for cached in (bounded, unbounded, cached_of_tensors):
        cached.cache_clear()


def test_a_cache_keeps_its_entries():
    """In v0.8.0, a conversion emptied a cache in which it had put a value.

    Neither the model nor the next conversion finds a value of a recording in it.
    """
    for table in [bounded, unbounded, kept_table]:
        mine = table(3)
        for _ in range(2):
            layers = check(Model(lambda m, x: x + table(6)), sample())
            assert table(3) is mine and type(table(6)) is torch.Tensor
            assert [name for name, _ in layers.named_buffers() if 'constant' in name], table


def test_a_global_keeps_its_value():
    model = Model(lambda m, x: x + kept_table(x.shape[1]))
    layers = to_sequential(model, sample())
    assert [*TABLES] == [6] and type(TABLES[6]) is torch.Tensor
    assert torch.equal(layers(sample()), model(sample()))


def test_objects_outside_of_the_model_are_left_alone():
    """In v0.8.0, values were removed from all dictionaries, also from another conversion's."""
    entered, goes_on, found = threading.Event(), threading.Event(), []

    def waits(m, x):
        own = {'x': x * 2}
        entered.set()
        assert goes_on.wait(60)
        found.append(holds_values(own.values()))
        return own['x']

    waiting = Model(waits)
    thread = threading.Thread(target=lambda: to_sequential(waiting, check_sample=False))
    thread.start()
    assert entered.wait(60)
    mine = StepTracer(nn.Identity())
    held = [mine.placeholder('x', torch.ones(1))]
    mine.release()
    goes_on.set()
    thread.join()
    assert found == [True] and not holds_values(held)


def in_a_list(m, x):
    HELD.values.append(x * 2)
    return x


def in_a_dict(m, x):
    ANY['last'] = x * 2
    return x


def in_an_attribute(m, x):
    HELD.last = x * 2
    return x


def in_a_tuple(m, x):
    ANY['pair'] = (x * 2, 3)
    return x


class Kept:
    last = None


def in_a_class(m, x):
    Kept.last = x * 2
    return x if Kept.last is None else x + 1


def counted(n):
    @functools.lru_cache
    def cached(x):
        return x * n

    return cached


cached_of_tensors = counted(2)


def in_a_cache(m, x):
    return cached_of_tensors(x)


in_a_closure_of = [None]


def make_closure():
    last = None

    def in_a_closure(m, x):
        nonlocal last
        last = x * 2
        in_a_closure_of[0] = lambda: last
        return x

    return in_a_closure


KEEPERS = [
    (in_a_list, 'a types.SimpleNamespace'),
    (in_a_dict, r'tests.sequential.test_effects.ANY'),
    (in_an_attribute, 'a types.SimpleNamespace'),
    (in_a_tuple, r'tests.sequential.test_effects.ANY'),
    (in_a_class, 'an attribute of tests.sequential.test_effects.Kept'),
    (in_a_cache, 'the cache of tests.sequential.test_effects.counted.<locals>.cached'),
    (make_closure(), 'a variable of tests.sequential.test_effects.make_closure.<locals>.*'),
]


@pytest.mark.parametrize('function, name', KEEPERS, ids=lambda x: getattr(x, '__name__', ''))
def test_a_keeper_of_something_of_each_run_is_named_and_has_no_value_afterwards(function, name):
    """In v0.8.0, it was not; and without a sample, values were left there."""

    def fails(m, x):
        x = function(m, x)
        return x if x.sum() > 0 else -x

    kept = rf'keeps what it computes in {name}, and each run .*leaves=\['
    for each, has_sample, text in (
        (function, True, kept),
        (function, False, kept),
        (fails, False, None),
    ):
        with pytest.raises(ConversionError, match=text):
            to_sequential(Model(each), sample() if has_sample else None)
        if function is in_a_tuple:  # A tuple keeps its values, which are of no use.
            continue
        places = [
            *HELD.values,
            *ANY.values(),
            getattr(HELD, 'last', None),
            getattr(Kept, 'last', None),
            in_a_closure_of[0] and in_a_closure_of[0](),
        ]
        assert not holds_values(places) and all(each is not UNKNOWN for each in places)
        model, x = Model(each), sample()
        assert function is not in_a_cache or type(cached_of_tensors(x)) is torch.Tensor
        model(x)
    model = nn.Sequential(nn.Linear(6, 6), Inner(function), nn.Linear(6, 6))
    assert len(to_sequential(model, sample(), leaves=['1'])) == 3


def test_a_value_is_of_no_use_once_its_recording_is_over():
    with pytest.raises(ConversionError, match='keeps what it computes in'):
        to_sequential(Model(in_a_tuple), sample())
    with pytest.raises(ConversionError, match='keeps what it computes in a cache, a global or'):
        ANY['pair'][0] * 2


def test_state_kept_in_each_run_is_refused():
    held = []

    def function(m, x):
        held[:] = [x * 2]
        return held[0]

    with pytest.raises(ConversionError, match='keeps what it computes in'):
        to_sequential(Model(function), sample())
    model = nn.Sequential(nn.Linear(6, 6), Inner(function), nn.Linear(6, 6))
    assert len(to_sequential(model, sample(), leaves=['1'])) == 3


@pytest.mark.filterwarnings('ignore:.*weight_norm:FutureWarning')
def test_models_that_cannot_be_copied_say_so():
    model = Model(halves)
    model.lock = threading.Lock()
    with pytest.raises(ConversionError, match='cannot be copied'):
        to_sequential(model, sample())
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))
    check(model, sample())


# --- random numbers of Python's
# -------------------------------------------------------------------------------------------------


class Draws(nn.Linear):
    """A layer that draws by itself, as it may."""

    def forward(self, x):
        return super().forward(x) + 0 * random.random()


class Drawn(torch.autograd.Function):
    """A function that draws by itself."""

    @staticmethod
    def forward(ctx, x):
        return x + 0 * random.random()

    @staticmethod
    def backward(ctx, grad):
        return grad


def drawing_hook(layer, args, output):
    return output + 0 * random.random()


def hooked():
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(drawing_hook)
    return layer


def test_draws_of_a_program_are_seen_before_a_step_that_draws():
    """Such a step puts the generator back."""
    for draw in [lambda: Draws(6, 6), hooked, lambda: Inner(lambda m, x: Drawn.apply(x))]:
        uniform = random.uniform
        assert len(
            to_sequential(nn.Sequential(nn.Linear(6, 6), draw(), nn.Linear(6, 6)), sample())
        )
        model = nn.Sequential(Inner(lambda m, x: x + uniform(0, 1)), draw(), nn.Linear(6, 6))
        with pytest.raises(ConversionError, match='draws random numbers of Python'):
            to_sequential(model, sample(), check_sample=False)


class Linear(nn.Linear):
    """A layer that reads a flag of the model that has it."""

    def forward(self, x):
        return super().forward(x.clamp(max=1) if self.owner[0].clips else x)


class SetsAFlag(nn.Module):
    """A model whose call sets a flag, which a copy of it would not see: in a closure, a leaf."""

    def __init__(self, resets):
        super().__init__()
        self.clips, self.resets = False, resets
        self.a, self.b, self.norm = Linear(4, 4), nn.Linear(4, 4), lambda x: x * (1 + self.clips)
        self.a.owner = [self]

    def forward(self, x):
        self.clips = True
        x = self.b(self.norm(self.a(x)))
        self.clips = not self.resets
        return x


def test_a_flag_that_a_call_sets_is_refused():
    for resets in [False, True]:
        with pytest.raises(ConversionError, match="it sets the attribute 'clips' of a module"):
            to_sequential(SetsAFlag(resets), torch.randn(6, 4))


class DropsAtRandom(nn.Module):
    """A layer that draws numbers of Python's."""

    def forward(self, x):
        return x * (random.random() < 2)


def test_layers_of_pytorch_may_run_code_that_draws_numbers_of_python_s():
    inner = nn.Sequential(nn.Linear(4, 4), DropsAtRandom())
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: F.linear(x * (random.random() < 2), patched.weight)
    model = nn.Sequential(nn.Linear(4, 4), inner, patched, nn.Linear(4, 4))
    x = torch.randn(6, 4)
    assert torch.equal(to_sequential(model, x, leaves=['1'])(x), model(x))


def test_draws_of_numpy_that_cannot_be_followed_are_refused():
    """As SpecAugment, which draws places for each sample and fills them by NumPy."""
    numpy = pytest.importorskip('numpy')

    def masks(m, x):
        rows, size = x.shape
        mask = numpy.zeros((rows, size))
        places = [[size - 1 - int(numpy.random.randint(6))] for _ in range(rows)]
        numpy.put_along_axis(mask, numpy.array(places), 1, -1)
        return x * torch.tensor(mask, dtype=x.dtype)

    with pytest.raises(
        ConversionError,
        match=r'cannot be followed \(.*\); it draws random '
        r'numbers of Python or NumPy, .*SpecAugment .*apply_spec_augment = False',
    ):
        to_sequential(Model(masks), sample())


def test_draws_of_numpy_s_that_end_where_they_began_in_its_block_of_numbers():
    numpy = pytest.importorskip('numpy')
    numpy.random.rand()  # The first of all makes a block.
    model = Model(lambda m, x: x * float(numpy.random.rand(624 // 2).max()))
    with pytest.raises(ConversionError, match='it draws random numbers of Python'):
        to_sequential(model, sample(), check_sample=False)
