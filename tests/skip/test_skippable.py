"""Skippable classes: their types, their behaviour, and errors in them."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchgpipe
from tests.devices import devices
from tests.helpers import assert_same, call
from tests.skip.layers import Pop, Stash, StashLinear, popping, stashing
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from torchgpipe.skip.transfer import SkipTracker, use_skip_tracker


class Base(nn.Module):
    """A base with a parameter."""

    def __init__(self, width, *, bias=True):
        super().__init__()
        self.fc = nn.Linear(width, width, bias)

    def double(self):
        """Override nn.Module's method by this class's own."""
        return 'doubled'


class Plain(Base):
    """Documented."""

    def forward(self, input):
        """Stash and pop."""
        yield stash('a', self.fc(input))
        b = yield pop('b')
        return input + b


Called = skippable(stash=['a'], pop=['b'])(Plain)


@skippable(stash=['a'])
class Decorated(Base):
    """Documented too."""

    def forward(self, input):
        """Stash."""
        yield stash('a', input)
        return self.fc(input)


@pytest.fixture(autouse=True)
def tracker():
    """Yield a tracker of the test's own."""
    tracker = SkipTracker()
    with use_skip_tracker(tracker):
        yield tracker


def test_a_decorated_class_keeps_its_attributes():
    layer = Decorated(3, bias=False)
    assert Decorated.__name__ == Decorated.__qualname__ == 'Decorated'
    assert Decorated.__doc__ == 'Documented too.' and Decorated.__module__ == __name__
    assert issubclass(Decorated, Base) and issubclass(Decorated, Skippable)
    assert isinstance(layer, Decorated) and isinstance(layer, Base)
    assert str(inspect.signature(Decorated)) == '(width, *, bias=True)'
    assert layer.fc.bias is None and layer.double() == 'doubled'
    assert layer.module is layer
    assert Decorated.forward.__doc__ == 'Stash.'


def test_a_call_leaves_the_class_alone():
    assert Called is not Plain and issubclass(Called, Plain) and not issubclass(Plain, Skippable)
    assert isinstance(Called(3), Plain) and inspect.isgeneratorfunction(Plain.forward)
    assert skippable(stash=['a'], pop=['b'])(Plain) is Called
    assert skippable(stash=['a'], pop=['c'])(Plain) is not Called


def test_another_class_of_the_same_base_and_skips_is_not_taken_for_the_decorated_one():
    class Stashes(Skippable):
        stashable_names = frozenset(['a'])

    class Sub(Stashes):
        pass

    decorated = skippable(stash=['a'])(Stashes)
    assert decorated is not Sub and decorated.__name__ == 'Stashes'


def test_zero_argument_super_and_subclasses():
    class Sub(Decorated):
        def forward(self, input):
            return super().forward(input) * 2

    layer = Sub(3)
    x = torch.rand(2, 3)
    assert torch.equal(layer(x), layer.fc(x) * 2)


def test_copies_and_pickles():
    for cls in [Decorated, Called, StashLinear]:
        namespace = Namespace()
        layer = cls(3).isolate(namespace)
        for clone in (
            copy.deepcopy(layer),
            copy.copy(layer),
            pickle.loads(pickle.dumps(layer)),
            pickle.loads(pickle.dumps(layer, 0)),
        ):
            assert type(clone) is cls
            assert list(clone.stashable()) == list(layer.stashable())
            assert list(clone.stashable())[0][0] == namespace
            assert torch.equal(clone.fc.weight, layer.fc.weight)


@devices
def test_a_pickled_pipeline_still_knows_its_skips(devices):
    model = nn.Sequential(Stash().isolate(Namespace()), nn.Linear(4, 4), Pop())
    model[2].isolate(model[0].namespaces['skip'])
    x = torch.rand(4, 4)
    expected = model(x)
    gpipe = GPipe(model, [1, 1, 1], devices=devices(3), chunks=2)
    for clone in (copy.deepcopy(gpipe), pickle.loads(pickle.dumps(gpipe))):
        assert_same([call(clone, x)], [expected], 1e-6)


def test_names_have_the_level_of_0_0_7():
    model = nn.Sequential(nn.Linear(3, 3), Decorated(3))
    names = ['0.weight', '0.bias', '1.module.fc.weight', '1.module.fc.bias']
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
    assert '1.module.fc' in dict(model.named_modules())
    assert model.get_parameter('1.module.fc.weight') is model[1].fc.weight
    assert model.get_submodule('1.module.fc') is model[1].fc


@devices
@pytest.mark.parametrize('wrapped', [False, True])
def test_a_state_dict_with_or_without_the_level_loads(devices, wrapped):
    plain = nn.Sequential(Base(3), nn.BatchNorm1d(3))
    model = nn.Sequential(Decorated(3), nn.BatchNorm1d(3), popping('a')())
    if wrapped:
        model = GPipe(model, [3], devices=devices(1))
    for state in (
        plain.state_dict(),
        {key.replace('0.fc', '0.module.fc'): x for key, x in plain.state_dict().items()},
        {
            'partitions.0.' + key.replace('0.fc', '0.module.fc'): x
            for key, x in plain.state_dict().items()
        }
        if wrapped
        else plain.state_dict(),
    ):
        nn.init.zeros_(model[0].fc.weight)
        assert str(model.load_state_dict(state)) == '<All keys matched successfully>'
        assert_same([model[0].fc.weight], [plain[0].fc.weight], 0)
    with pytest.raises(RuntimeError, match='0.more'):
        model.load_state_dict({**state, '0.module.more': torch.zeros(1)})
    assert str(model.state_dict()._metadata).count('version') >= 3


def test_a_layer_with_a_child_called_module():
    @skippable(stash=['a'])
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.module.module = nn.Linear(2, 2)

        def forward(self, input):
            yield stash('a', input)
            return self.module(input)

    layer = Wrapper()
    assert isinstance(layer.module, nn.Linear)
    state = copy.deepcopy(layer.state_dict())
    assert list(state) == [
        'module.module.weight',
        'module.module.bias',
        'module.module.module.weight',
        'module.module.module.bias',
    ]
    for given in (state, {key[len('module.') :]: x for key, x in state.items()}):
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        layer.load_state_dict(given)
        assert all(torch.equal(x, state[key]) for key, x in layer.state_dict().items())


def test_repr():
    assert repr(Stash()) == '@skippable(Stash())'


def test_a_stash_and_its_pop(tracker):
    x = torch.rand(2)
    assert torch.equal(Stash()(x), x) and len(tracker.tensors) == 1
    assert torch.equal(Pop()(x), 2 * x) and not tracker.tensors


def test_none_can_be_stashed():
    @skippable(stash=['skip'])
    class StashNone(nn.Module):
        def forward(self, input):
            yield stash('skip', None)
            return input

    assert nn.Sequential(StashNone(), Pop())(torch.ones(1)).item() == 1


def forward_of(stashes=(), pops=()):
    """Declare names, and give a decorator that makes a layer of a forward."""

    def make(forward):
        cls = type('Layer', (nn.Module,), {'forward': forward})
        return skippable(stashes, pops)(cls)()

    return make


def test_declared_but_not_used():
    @forward_of(stashes=['foo'])
    def not_stashed(self, input):
        return input

    @forward_of(pops=['foo'])
    def not_popped(self, input):
        return input
        yield

    with pytest.raises(RuntimeError, match="^'foo' must be stashed but have not$"):
        not_stashed(torch.ones(1))
    with pytest.raises(RuntimeError, match="^'foo' must be popped but have not$"):
        not_popped(torch.ones(1))


def test_used_but_not_declared():
    @forward_of()
    def stashes(self, input):
        yield stash('foo', input)
        return input

    @forward_of()
    def pops(self, input):
        yield pop('foo')
        return input

    with pytest.raises(RuntimeError, match="^'foo' has not been declared as stashable$"):
        stashes(torch.ones(1))
    with pytest.raises(RuntimeError, match="^'foo' has not been declared as poppable$"):
        pops(torch.ones(1))


def test_popped_but_not_stashed():
    with pytest.raises(RuntimeError, match="^'skip' has not been stashed$") as error:
        Pop()(torch.ones(1))
    assert error.value.__cause__ is None


def test_twice_in_one_forward():
    @forward_of(stashes=['foo'])
    def stashes(self, input):
        yield stash('foo', input)
        yield stash('foo', input)

    @forward_of(pops=['skip'])
    def pops(self, input):
        yield pop('skip')
        yield pop('skip')

    with pytest.raises(RuntimeError, match="'foo' has already been stashed"):
        stashes(torch.ones(1))
    with pytest.raises(RuntimeError, match="'skip' has already been popped"):
        nn.Sequential(Stash(), pops)(torch.ones(1))


def test_something_else_is_yielded_or_stashed():
    @forward_of()
    def yields(self, input):
        yield input

    @forward_of(stashes=['foo'])
    def stashes(self, input):
        yield stash('foo', 'text')

    with pytest.raises(TypeError, match=r'yields stash.* or pop'):
        yields(torch.ones(1))
    with pytest.raises(TypeError, match="'foo' must be a tensor or None.*, but is str"):
        stashes(torch.ones(1))


def test_wrong_arguments():
    for declared in ({'stash': 'foo'}, {'pop': 'foo'}):
        with pytest.raises(TypeError, match=r"iterables of names.*\['foo'\]"):
            skippable(**declared)
    for decorated in (lambda x: x, dict):
        with pytest.raises(TypeError, match='class of nn.Module'):
            skippable(stash=['foo'])(decorated)
    with pytest.raises(TypeError, match='Namespace or None'):
        Stash().isolate('ns')


def test_isolate_some_names_only():
    one, two = Namespace(), Namespace()
    layer = stashing('a', 'b')().isolate(one).isolate(two, only=['b', 'unknown'])
    assert list(layer.stashable()) == [(one, 'a'), (two, 'b')]
    assert layer.isolate(None) is layer and list(layer.stashable()) == [(None, 'a'), (None, 'b')]


def test_verify():
    for layers, problems in [
        ([Stash, Pop], []),
        ([Stash, nn.Identity], ["no module declared 'skip' as poppable but stashed"]),
        ([Pop], ["'0' declared 'skip' as poppable but it was not stashed"]),
        (
            [Stash, Stash, Pop],
            ["'1' redeclared 'skip' as stashable but not isolated by namespace"],
        ),
        ([Stash, Pop, Pop], ["'2' redeclared 'skip' as poppable but not isolated by namespace"]),
        (
            [Stash, Pop, Stash, Pop],
            [
                "'2' redeclared 'skip' as stashable but not isolated by namespace",
                "'3' redeclared 'skip' as poppable but not isolated by namespace",
            ],
        ),
        (
            [lambda: forward_of(['foo'], ['foo'])(None)],
            ["'0' declared 'foo' both as stashable and as poppable"],
        ),
        (
            [Pop, Stash],
            [
                "'0' declared 'skip' as poppable but it was not stashed",
            ],
        ),
        ([stashing('a', 'b'), popping('b')], ["no module declared 'a' as poppable but stashed"]),
    ]:
        model = nn.Sequential(*[layer() for layer in layers])
        if not problems:
            verify_skippables(model)
            continue
        with pytest.raises(TypeError) as error:
            verify_skippables(model)
        assert [line[2:] for line in str(error.value).splitlines() if line[:2] == '* '] == problems
        with pytest.raises(TypeError, match=problems[0]):
            GPipe(model, [len(model)], devices=['cpu'])


def test_verify_tells_namespaces_apart():
    one, two = Namespace(), Namespace()
    verify_skippables(
        nn.Sequential(
            Stash().isolate(one), Stash().isolate(two), Pop().isolate(one), Pop().isolate(two)
        )
    )
    with pytest.raises(TypeError):
        verify_skippables(nn.Sequential(Stash().isolate(one), Pop().isolate(two)))


TYPED = """
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.skip import Namespace, SkipGenerator, Skippable, pop, skippable, stash


@skippable(stash=['a'])
class Start(Skippable):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, input: Tensor) -> SkipGenerator:
        yield stash('a', input)
        return self.fc(input)


@skippable(pop=['a'])
class End(nn.Module):
    def forward(self, input: Tensor) -> SkipGenerator:
        a: Tensor = yield pop('a')
        return input + a


class Plain(nn.Module):
    def forward(self, input: Tensor) -> SkipGenerator:
        yield stash('b', None)
        return input


Called = skippable(stash=['b'])(Plain)
start: Start = Start(3).isolate(Namespace())
bias: Tensor = start.fc.bias
end: End = End()
called: Plain = Called()
model = GPipe(nn.Sequential(start, end), [1, 1], devices=['cpu', 'cpu'])
reveal_type(Start(3).isolate(None))
Start('wide')
"""


@pytest.mark.slow
def test_types(tmp_path):
    """User code needs no `type: ignore`, and a wrong argument is found."""
    path = tmp_path / 'typed.py'
    path.write_text(TYPED)
    root = Path(torchgpipe.__file__).parent.parent
    output = subprocess.run(
        [
            sys.executable,
            '-m',
            'mypy',
            '--strict',
            '--config-file=',
            '--follow-imports=silent',
            path.name,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, 'MYPYPATH': str(root)},
    ).stdout.splitlines()
    errors = [line for line in output if ': error:' in line]
    assert len(errors) == 1 and 'incompatible type "str"' in errors[0], output
    assert 'typed.Start' in '\n'.join(output)
