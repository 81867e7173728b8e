"""Values in a recording, and side effects of a forward that a graph would lack.

A :class:`TracedValue` replaces a tensor or a number while a forward is recorded::

    B, T = x.shape               two values, 4 and 7 for the sample; neither is concretized yet
    y = x.view(B * T, -1)        recorded: any batch size and length will do
    if T > 5:                    concretized: the graph gets a guard that T > 5 is true again
    check(ok, f'got {T}')        a message, which is only shown: it has the text for the sample

A tensor cannot be concretized, because another tensor could take another path of the program.

A model is recorded in a copy (:func:`copied`), which shares the model's parameters. Side effects
that a graph would not repeat are detected. These are changes of modes, random numbers
(:class:`GeneratorStates`), changes of objects (:func:`ids_within`), and values that an object
holds after the recording (:func:`held_beyond`). Each run would store another value there.

The model runs once before it is recorded. A function that caches a table in its first call then
has the table, which becomes a constant of the graph.
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
from torchgpipe.base.structure import flatten_nested, is_plain, storage_id, view_of
from torchgpipe.engine.checkpoint.observation import LayerRecorder
from torchgpipe.sequential.refusals import ConversionError, makes_a_message

#: The example of a value if there is no sample.
UNKNOWN: Any = object()


class UnknownValue(fx.Proxy):
    """A value without an example, because there is no sample."""

    _example = UNKNOWN

    tracer: Any

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy('call_function', operator.setitem, (self, key, value), {})


class TracedValue(UnknownValue):
    """A value that a forward computes, in a recording."""

    def __init__(self, node: fx.Node, tracer: Any, example: Any) -> None:
        super().__init__(node, tracer)
        self._example = example

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') and name.endswith('__'):
            raise AttributeError(name)
        if callable(getattr(self._example, name)):
            return lambda *args, **kwargs: self.tracer.create_proxy(
                'call_method', name, (self, *args), kwargs
            )
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

    # Code that looks up a number or reads its text may depend on it.

    def __hash__(self) -> int:
        if self.tracer.is_tensor(self):
            return id(self)
        return hash(self._itself())

    def __str__(self) -> str:
        if self.tracer.is_tensor(self):
            return repr(self)
        return str(self._shown())

    def __format__(self, spec: str) -> str:
        if self.tracer.is_tensor(self):
            return repr(self)
        return format(self._shown(), spec)

    def _shown(self) -> Any:
        if makes_a_message(sys._getframe(2)):
            return self._example
        return self._itself()

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
        # Numbers are not changed in place, so `n += 1` is recorded as `n + 1`.
        function = getattr(operator, 'i' + name if self.tracer.is_tensor(self) else _PLAIN[name])
        return self.tracer.create_proxy('call_function', function, (self, other), {})

    return method


# torch.fx would record `x += y` as `x + y`, which does not change other references to x.
_PLAIN = {'and': 'and_', 'or': 'or_'}
for _operation in (
    'add',
    'sub',
    'mul',
    'truediv',
    'floordiv',
    'mod',
    'pow',
    'and',
    'or',
    'xor',
    'lshift',
    'rshift',
    'matmul',
):
    _PLAIN.setdefault(_operation, _operation)
    setattr(UnknownValue, f'__i{_operation}__', _in_place(_operation))


T = TypeVar('T')
TModule = TypeVar('TModule', bound=nn.Module)


def copied(module: TModule) -> TModule:
    """Return a copy of a module, which shares its parameters and tensors that belong to a graph.

    Raises:
        ConversionError: The module cannot be copied.
    """
    memo: dict[int, Any] = {id(x): x for x in module.parameters()}
    for each in module.modules():
        for x in vars(each).values():
            if isinstance(x, Tensor) and not x.is_leaf:
                memo[id(x)] = x
            elif type(x) in (dict, OrderedDict) and not x:  # Most attributes are empty hooks.
                memo[id(x)] = type(x)()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConversionError(
            f'{type(module).__name__} cannot be converted: it cannot be copied, to be tried out '
            f'without a change of it ({type(error).__name__}: {error}). Convert it before it was '
            'called, or without what keeps it from being copied'
        ) from error


def untouched(module: nn.Module, function: Callable[[], T]) -> T:
    """Call a function, and then restore the parameters of a module that it has written to.

    A copy of a module shares its parameters, and some layers write to them in forward.
    """
    recorder = LayerRecorder(module.modules())
    try:
        return recorder.run(function)
    finally:
        for x in module.parameters():
            copy = recorder.copies.get(storage_id(x)) if is_plain(x) else None
            if copy is not None:
                x.data.copy_(view_of(copy, x))


def copied_value(value: Any) -> Any:
    """Return a value with copies of its tensors, without their graph, and without marks.

    A tensor that occurs twice has one copy, which occurs twice.
    """
    tensors, structure = flatten_nested(value)
    copies = {id(x): x.detach().clone() for x in tensors}
    return structure([copies[id(x)] for x in tensors])


def modes_now() -> tuple[Any, ...]:
    """Return the modes that a forward may change, and that a layer would not repeat."""
    kinds = autocast_types(torch.accelerator.current_accelerator())
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )


class GeneratorStates:
    """Restores generators after each step, and detects that a forward has used them by itself."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate(), _position_of_numpy()

    def check(self, refuse: Callable[[str], Any], pythons: bool = True) -> None:
        """Refuse a forward that has drawn numbers; the check of Python's generators is slow."""
        what = 'it draws random numbers of {}, here or before'
        if not torch.equal(torch.get_rng_state(), self._torch):
            refuse(what.format('PyTorch, by a function that is imported by its own name'))
        if pythons and self._python != (random.getstate(), _position_of_numpy()):
            refuse(
                what.format('Python or NumPy') + ', as SpecAugment of Hugging Face does, but '
                'with model.config.apply_spec_augment = False'
            )

    @contextmanager
    def restored(self, pythons: bool) -> Iterator[None]:
        """Restore PyTorch's generator after a step, and Python's if its state is known."""
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
    """Return a function's result without grad mode, or in grad mode if it needs gradients.

    The function's argument is whether it runs in grad mode.
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
    """Draw from a seed, and restore the generators of PyTorch and Python afterwards."""
    python = random.getstate()
    try:
        with forked_rng():
            # These differ from the numbers in the recording, and so may change its path.
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(python)


def has_values(thing: Any) -> bool:
    """Return whether an object holds values of a recording."""
    return any(isinstance(each, fx.Proxy) for each in _within(thing))


def ids_within(thing: Any) -> list[int]:
    """Return the ids of all objects that an object holds.

    These are attributes, contents of containers, and objects that a function is bound to.

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
        if isinstance(each, fx.Proxy):  # It refers to the recording.
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
        'to_sequential(model, sample, leaves=[…])'
    )


def name_of_holder(values: list[Any]) -> str:
    """Return the name of the nearest named object that leads to values."""
    inner = values
    seen = {id(values)}
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
    """Return the name of an object that refers to other objects, if it has a name."""
    if type(thing) is functools._lru_cache_wrapper:
        return f'the cache of {_qualified(thing)}'
    if isinstance(thing, FunctionType):
        return f'a variable of {_qualified(thing)}'
    if isinstance(thing, type):
        return f'an attribute of {_qualified(thing)}'
    if type(thing) is dict and thing.get('__spec__', thing) is not thing:
        ids = {id(each) for each in inner}
        return f'{thing["__name__"]}.' + next(
            (str(key) for key, value in thing.items() if id(value) in ids), '…'
        )
    if type(thing).__module__ == 'builtins':
        return ''
    return f'a {_qualified(type(thing))}'


def _qualified(thing: Any) -> str:
    return f'{thing.__module__}.{thing.__qualname__}'


def release(values: list[Any]) -> None:
    """Replace values by their examples, as if the model had run without a recording.

    Otherwise, a cache that was empty would keep the values, and the model would not run any more.
    Without a sample, values are removed. Sets, tuples and objects without a dictionary keep them.
    """
    own = {id(value) for value in values}
    for holder in gc.get_referrers(*values) if values else ():
        if type(holder) is functools._lru_cache_wrapper:
            holder.cache_clear()  # It cannot remove a single entry.
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
        return  # The search for a class is slow.
    of_class = [each for each in gc.get_referrers(names) if isinstance(each, type)]
    for key, value in [*names.items()]:
        if id(value) not in own and id(key) not in own:
            continue
        if of_class:  # A class caches its attributes.
            delattr(of_class[0], key)
        else:
            del names[key]
        key, value = (x._example if id(x) in own else x for x in (key, value))
        if of_class and value is not UNKNOWN:
            setattr(of_class[0], key, value)
        elif key is not UNKNOWN and value is not UNKNOWN:
            names[key] = value
