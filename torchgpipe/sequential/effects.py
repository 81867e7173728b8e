"""Values in a recording, and side effects of a forward that a graph would lack.

::

    B, T = x.shape               two values, 4 and 7 for the sample; neither is concretized yet
    y = x.view(B * T, -1)        recorded: any batch size and length will do
    if T > 5:                    concretized: the graph gets a guard that T > 5 is true again
    check(ok, f'got {T}')        a message, which nothing goes by: its text is that for the sample

A tensor cannot be concretized, as another one would be another way through the program.

A model runs in copies, which have its parameters and all else for themselves. What a graph would
not repeat is noticed: another mode, a random number that is drawn unseen, an object that changes,
and a value of the recording that somebody holds when it is over. Each run would hold another one.
A function with a cache, which makes a table when it is first asked for, has it already: the model
runs once before it is recorded, and what it has cached then are constants.
"""
import copy
import functools
import gc
import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from torchgpipe.base.devices import autocast_types, forked_rng
from torchgpipe.base.structure import flatten_nested
from torchgpipe.sequential.refusals import ConversionError, makes_a_message

__all__ = ['GeneratorStates', 'TracedValue', 'UNKNOWN', 'UnknownValue', 'copied', 'copied_value',
           'has_values', 'held_beyond', 'ids_within', 'modes_now', 'name_of_holder', 'release',
           'same_random_numbers', 'without_grad']

#: The example value where there is no sample.
UNKNOWN: Any = object()


class UnknownValue(fx.Proxy):
    """A value without an example, as there is no sample."""

    _example = UNKNOWN

    tracer: Any

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy('call_function', operator.setitem, (self, key, value), {})


class TracedValue(UnknownValue):
    """A value that a forward computes, as its recording sees it.

    Args:
        node: The node that gives it.
        tracer: Records what is done with it.
        example: The value for the sample.
    """

    def __init__(self, node: fx.Node, tracer: Any, example: Any) -> None:
        super().__init__(node, tracer)
        self._example = example

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') and name.endswith('__'):
            raise AttributeError(name)
        if callable(getattr(self._example, name)):
            return lambda *args, **kwargs: self.tracer.create_proxy(
                'call_method', name, (self, *args), kwargs)
        return self.tracer.create_proxy('call_function', getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ('node', 'tracer', '_example'):
            object.__setattr__(self, name, value)
        else:
            self.tracer.refuse(f'it sets the attribute {name!r} of a value')

    def __contains__(self, item: Any) -> bool:
        return bool(self.tracer.create_proxy('call_function', operator.contains, (self, item), {}))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[k] for k in range(len(self))])  # type: ignore[index]

    def __round__(self, *digits: int) -> Any:
        return self.tracer.create_proxy('call_function', round, (self, *digits), {})

    def __repr__(self) -> str:
        return f'<{self.node.name} of a recording>'

    # What looks a number up, or looks at its text, may go by it.

    def __hash__(self) -> int:
        return id(self) if self.tracer.is_tensor(self) else hash(self._itself())

    def __str__(self) -> str:
        return repr(self) if self.tracer.is_tensor(self) else str(self._shown())

    def __format__(self, spec: str) -> str:
        return repr(self) if self.tracer.is_tensor(self) else format(self._shown(), spec)

    def _shown(self) -> Any:
        return self._example if makes_a_message(sys._getframe(2)) else self._itself()

    def _itself(self) -> Any:
        return self.tracer.concretize(self, _unchanged)


def _concretizing(how: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self: self.tracer.concretize(self, how)


for _how in (bool, float, int, len, operator.index):
    setattr(TracedValue, f'__{_how.__name__}__', _concretizing(_how))


def _unchanged(example: Any) -> Any:
    return example


def _in_place(name: str) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        # A number is not changed in place, and a recorded `n += 1` would give its name another.
        function = getattr(operator, 'i' + name if self.tracer.is_tensor(self) else _PLAIN[name])
        return self.tracer.create_proxy('call_function', function, (self, other), {})

    return method


# In a recording of PyTorch's, `x += y` would be `x + y`, which another name of x does not see.
_PLAIN = {'and': 'and_', 'or': 'or_'}
for _operation in ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'and', 'or',
                   'xor', 'lshift', 'rshift', 'matmul'):
    _PLAIN.setdefault(_operation, _operation)
    setattr(UnknownValue, f'__i{_operation}__', _in_place(_operation))


T = TypeVar('T')
TModule = TypeVar('TModule', bound=nn.Module)


def copied(module: TModule) -> TModule:
    """Return a copy of a module, with its very parameters, and tensors that belong to a graph.

    Raises:
        ConversionError: It cannot be copied.
    """
    memo: dict[int, Any] = {id(x): x for x in module.parameters()}
    for each in module.modules():
        for x in vars(each).values():
            if isinstance(x, Tensor) and not x.is_leaf:
                memo[id(x)] = x
            elif type(x) in (dict, OrderedDict) and not x:  # No hooks: most of what there is.
                memo[id(x)] = type(x)()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConversionError(
            f'{type(module).__name__} cannot be converted: it cannot be copied, to be tried out '
            f'without a change of it ({type(error).__name__}: {error}). Convert it before it was '
            'called, or without what keeps it from being copied') from error


def copied_value(value: Any) -> Any:
    """Return a value with copies of its tensors, without their graph, and without marks.

    One that is there twice is so again.
    """
    tensors, structure = flatten_nested(value)
    copies = {id(x): x.detach().clone() for x in tensors}
    return structure([copies[id(x)] for x in tensors])


def modes_now() -> tuple[Any, ...]:
    """Return the modes that a part of a forward may be in, and a layer would not be."""
    kinds = autocast_types(torch.accelerator.current_accelerator())
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds))


class GeneratorStates:
    """Put generators back after each step, and see whether a forward has moved them by itself."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate(), _position_of_numpy()

    def check(self, refuse: Callable[[str], Any], pythons: bool = True) -> None:
        """Refuse a forward that has drawn numbers; to ask whether Python's takes long."""
        what = 'it draws random numbers of {}, here or before'
        if not torch.equal(torch.get_rng_state(), self._torch):
            refuse(what.format('PyTorch, by a function that is imported by its own name'))
        if pythons and self._python != (random.getstate(), _position_of_numpy()):
            refuse(what.format('Python or NumPy') + ', as SpecAugment of Hugging Face does, but '
                   'with model.config.apply_spec_augment = False')

    @contextmanager
    def restored(self, pythons: bool) -> Iterator[None]:
        """Let a step draw what it will, of Python's too if that is known to be where it was."""
        try:
            yield
        finally:
            torch.set_rng_state(self._torch)
            if pythons:
                random.setstate(self._python[0])
                self._python = self._python[0], _position_of_numpy()


def _position_of_numpy() -> Any:
    numpy = sys.modules.get('numpy')
    state = numpy.random.get_state(legacy=False)['state'] if numpy else None
    return state and (state['pos'], int(state['key'][0]))


def without_grad(function: Callable[[bool], T]) -> T:
    """Return what a function gives without grad mode; or in it, if it asks for gradients itself.

    The function gets whether it is the latter.
    """
    try:
        with torch.no_grad():
            return function(False)
    except RuntimeError as error:
        if 'require grad' not in str(error):  # "does not require grad", "doesn't require gradient"
            raise
    with torch.enable_grad():
        return function(True)


@contextmanager
def same_random_numbers(seed: int = 0) -> Iterator[None]:
    """Draw from a seed, and put the generators of PyTorch and Python back."""
    python = random.getstate()
    try:
        with forked_rng():
            # Other numbers than the recording has drawn, whose way they may change.
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(python)


def has_values(thing: Any) -> bool:
    """Return whether an object holds values of a recording."""
    return any(isinstance(each, fx.Proxy) for each in _within(thing))


def ids_within(thing: Any) -> list[int]:
    """Return the ids of all that an object holds: attributes, and contents of containers; and what
    a function is bound to.

    >>> things = {'a': [1]}
    >>> before = ids_within(things)
    >>> things['a'].append(2)
    >>> ids_within(things) == before
    False
    """
    return [id(each) for each in _within(thing)]


def _within(thing: Any) -> Iterator[Any]:
    found: set[int] = set()
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found.add(id(each))
        yield each
        if isinstance(each, fx.Proxy):  # It knows the recording.
            continue
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += each
        elif isinstance(each, functools.partial):
            waiting += [each.func, each.args, each.keywords]
        elif isinstance(each, CellType) and each != CellType():  # An empty one has no contents.
            waiting.append(each.cell_contents)
        waiting += getattr(each, '__dict__', {}).values()
        waiting += [getattr(each, '__self__', None), getattr(each, '__closure__', None)]


_SOMEWHERE = 'a cache, a global or an object'


def held_beyond(where: str = _SOMEWHERE) -> ConversionError:
    """Return the error that a value is used after its recording is over, or held somewhere."""
    return ConversionError(
        f'the model cannot be converted: its forward keeps what it computes in {where}, and each '
        'run would do so again. Name the submodule that does as a leaf: '
        'to_sequential(model, sample, leaves=[…])')


def name_of_holder(values: list[Any]) -> str:
    """Return the name of what holds values: the nearest thing with one that leads to them."""
    inner, seen = values, {id(values)}
    for _ in range(5):
        seen |= {id(inner), *map(id, inner)}
        outer = [thing for thing in gc.get_referrers(*inner) if id(thing) not in seen]
        for thing in outer:
            name = _name(thing, inner)
            if name:
                return name
        inner = outer
    return _SOMEWHERE


def _name(thing: Any, inner: list[Any]) -> str:
    """Return the name of something that refers to other things, if it has one."""
    if type(thing) is functools._lru_cache_wrapper:
        return f'the cache of {_qualified(thing)}'
    if isinstance(thing, FunctionType):
        return f'a variable of {_qualified(thing)}'
    if isinstance(thing, type):
        return f'an attribute of {_qualified(thing)}'
    if type(thing) is dict and thing.get('__spec__', thing) is not thing:
        ids = {id(each) for each in inner}
        return f'{thing["__name__"]}.' + next(
            (str(key) for key, value in thing.items() if id(value) in ids), '…')
    return '' if type(thing).__module__ == 'builtins' else f'a {_qualified(type(thing))}'


def _qualified(thing: Any) -> str:
    return f'{thing.__module__}.{thing.__qualname__}'


def release(values: list[Any]) -> None:
    """Put examples in the place of values, as if the model had run by itself.

    Else a cache that was empty would have them for good, and the model would not run any more.
    Without a sample that is nothing. Sets, tuples and objects without a dictionary hold on.
    """
    own = {id(value) for value in values}
    for holder in gc.get_referrers(*values) if values else ():
        if type(holder) is functools._lru_cache_wrapper:
            holder.cache_clear()  # It has no other way to forget one.
        elif type(holder) is CellType:
            example = holder.cell_contents._example
            holder.cell_contents = None if example is UNKNOWN else example
        elif type(holder) is list and holder is not values:
            examples = [each._example if id(each) in own else each for each in holder]
            holder[:] = [each for each in examples if each is not UNKNOWN]
        else:
            _release(holder if type(holder) is dict else getattr(holder, '__dict__', {}), own)


def _release(names: Any, own: set[int]) -> None:
    if own.isdisjoint(map(id, chain(names.values(), names))):
        return  # To look for a class takes long.
    of_class = [each for each in gc.get_referrers(names) if isinstance(each, type)]
    for key, value in [*names.items()]:
        if id(value) not in own and id(key) not in own:
            continue
        if of_class:  # A class remembers what it has.
            delattr(of_class[0], key)
        else:
            del names[key]
        key, value = (x._example if id(x) in own else x for x in (key, value))
        if of_class and value is not UNKNOWN:
            setattr(of_class[0], key, value)
        elif key is not UNKNOWN and value is not UNKNOWN:
            names[key] = value
