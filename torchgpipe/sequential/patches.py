"""Observe a forward: functions are replaced while it runs.

:func:`watched` replaces methods of modules. :func:`followed` replaces functions of PyTorch and
Python as well::

    self.layer(x)           nn.Module.__call__          a call of a leaf is recorded, others run
    self.weight             nn.Module.__getattr__       a value that stands for the parameter
    self.training           a value in its place        so that each call reads it again
    self.loss = y           nn.Module.__setattr__       refused
    random.random()         random.random, …            refused
    with torch.no_grad():   no_grad.__enter__, …        refused, or the module becomes a leaf
    is_autocast_enabled()   torch.is_autocast_…, …      asked again in each call
    torch.arange(T)         torch.arange, …             PyTorch would ask for a number, not a value
    len(x), math.sqrt(T)    len, math.sqrt, …           so would Python
    Swish.apply(x)          Function.apply              PyTorch would ask for a tensor
    swish(x)                type(Function)              refused: Swish.apply, by another name
    isinstance(x, Tensor)   isinstance                  the truth of the tensor, not of the value

[Note: Process-wide replacements]
Names are looked up in modules, classes or ``builtins``, which all threads share. Python has no
names for a single thread. A value needs the replacements. For example, ``len`` converts the result
of ``__len__`` to a number, and ``math.sqrt`` the result of ``__float__``. ``torch.zeros(n, 2)``
raises before it asks a ``TorchFunctionMode``. ``isinstance`` is replaced, because a ``__class__``
that claims to be Tensor would make PyTorch's C++ read a value's memory as a tensor's.

A replacement therefore behaves like the original for other threads, within a leaf, and after the
recording for code that still holds it: see `_OfThread`. It has the name of the original, and the
replacement of a class is a class. While a step is computed, the functions of PyTorch and Python
are restored. The step may import a module that keeps them, such as PyTorch's compiler.
"""

import builtins
import math
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.overrides import is_tensor_method_or_property

from torchgpipe.sequential.operations import apply
from torchgpipe.sequential.refusals import is_of_others

# Functions that take numbers, and would not accept values instead.
_MAKERS = (
    'arange',
    'as_tensor',
    'empty',
    'eye',
    'finfo',
    'full',
    'iinfo',
    'linspace',
    'logspace',
    'normal',
    'ones',
    'rand',
    'randint',
    'randn',
    'randperm',
    'scalar_tensor',
    'tensor',
    'tril_indices',
    'triu_indices',
    'zeros',
)
_OF_NUMBERS = (
    'ceil',
    'cos',
    'exp',
    'floor',
    'isqrt',
    'log',
    'log10',
    'log2',
    'pow',
    'sin',
    'sqrt',
)
_DRAWERS = (
    'betavariate',
    'choice',
    'choices',
    'expovariate',
    'gauss',
    'getrandbits',
    'normalvariate',
    'randint',
    'random',
    'randrange',
    'sample',
    'shuffle',
    'triangular',
    'uniform',
)
_OF_AUTOCAST = (
    'get_autocast_cpu_dtype',
    'get_autocast_dtype',
    'get_autocast_gpu_dtype',
    'is_autocast_cpu_enabled',
    'is_autocast_enabled',
)
_MODES = (torch.autocast, torch.enable_grad, torch.inference_mode, torch.no_grad)

#: Two threads would restore each other's replacements, or detect each other's random numbers.
one_at_a_time = threading.RLock()


class Watcher(Protocol):
    """Handles a forward's calls of modules and reads of attributes, and returns the results."""

    @property
    def watches(self) -> bool: ...

    def called(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...

    def read(self, module: nn.Module, name: str, found: Any) -> Any: ...


class Follower(Watcher, Protocol):
    """Observes everything that a forward does, before it happens."""

    def written(self, module: nn.Module, name: str, value: object) -> None: ...

    def made(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def is_a(self, value: Any, classes: Any) -> bool: ...

    def entered(self) -> None: ...

    def drew(self) -> None: ...

    def applied(self, function: type) -> None: ...


TWatcher = TypeVar('TWatcher', bound=Watcher)


class _OfThread(Generic[TWatcher]):
    """Returns the watcher, if it is called in the watched thread while the watcher watches."""

    def __init__(self, watcher: TWatcher) -> None:
        self.watcher: TWatcher | None = watcher
        self._thread = threading.get_ident()

    def __call__(self) -> TWatcher | None:
        watcher = self.watcher
        here = watcher is not None and self._thread == threading.get_ident()
        return watcher if here and watcher.watches else None  # type: ignore[union-attr]


#: An object, the name of its attribute, and a function that makes the replacement.
_Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Notify a watcher of the modules that this thread calls, and of reads of attributes."""
    current = _OfThread(watcher)
    with _replaced(_of_modules(current)):
        try:
            yield
        finally:
            current.watcher = None


@contextmanager
def followed(follower: Follower) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Notify a follower of this thread's actions, and yield a context with original functions."""
    # PyTorch makes lists of its functions when they are first needed. The replacements must not
    # be in them.
    is_tensor_method_or_property(torch.add)
    current = _OfThread(follower)
    with _replaced([*_of_modules(current), *_of_functions(current)]) as put_back:
        try:
            yield put_back
        finally:
            current.watcher = None


@contextmanager
def _replaced(
    replacements: Sequence[_Replacement],
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    with one_at_a_time:
        owns = [
            (owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in replacements
        ]
        others = [
            (owner, name, _named(make(getattr(owner, name)), owner, name))
            for owner, name, make in replacements
        ]

        # It is slow to restore attributes of a class that has many derived classes.
        originals_in_modules = [x for x in owns if isinstance(x[0], ModuleType)]
        replacements_in_modules = [x for x in others if isinstance(x[0], ModuleType)]

        @contextmanager
        def put_back() -> Iterator[None]:
            _set(originals_in_modules)
            try:
                yield
            finally:
                _set(replacements_in_modules)

        try:
            _set(others)
            yield put_back
        finally:
            _set(owns)


def _named(function: Any, owner: Any, name: str) -> Any:
    """Set the name of a module's function, by which a pickle finds it."""
    if isinstance(owner, ModuleType):
        function.__module__ = owner.__name__
        function.__name__ = function.__qualname__ = name
    return function


_INHERITED = object()


def _set(attributes: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        if value is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _before(current: _OfThread[Any], tell: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that makes replacements which notify the watcher first."""

    def make(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            watcher = current()
            if watcher:
                tell(watcher, *args)
            return own(*args, **kwargs)

        return run

    return make


def _instead(
    current: _OfThread[Any], call: Callable[..., Any], of_values: bool = False
) -> Callable[[Any], Any]:
    """Return a function that makes replacements which pass the original to the watcher.

    With ``of_values``, they do so only if an argument is a value.
    """

    def make(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            concerns = not of_values or any(isinstance(x, fx.Proxy) for x in args)
            watcher = current() if concerns else None
            if watcher:
                return call(watcher, own, args, kwargs)
            return own(*args, **kwargs)

        return _as_class(own, run) if isinstance(own, type) else run

    return make


def _of_modules(current: _OfThread[Any]) -> list[_Replacement]:
    def read(own: Any) -> Any:
        def run(module: nn.Module, name: str) -> Any:
            found = own(module, name)
            watcher = current()
            if watcher:
                return watcher.read(module, name, found)
            return found

        return run

    def listing(own: Any) -> Any:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in own(module, *args, **kwargs):
                watcher = current()
                yield name, watcher.read(module, name, tensor) if watcher else tensor

        return run

    call = _instead(
        current, lambda watcher, own, args, kwargs: watcher.called(args[0], own, args[1:], kwargs)
    )
    return [
        (nn.Module, '__call__', call),
        (nn.Module, '__getattr__', read),
        (nn.Module, 'named_parameters', listing),
        (nn.Module, 'named_buffers', listing),
    ]


def _of_functions(current: _OfThread[Follower]) -> Iterator[_Replacement]:
    def made(watcher: Follower, own: Any, args: Any, kwargs: Any) -> Any:
        return watcher.made(own, args, kwargs)

    def instance(own: Any) -> Any:
        def run(value: Any, classes: Any) -> bool:
            if own(value, classes):
                return True
            watcher = current() if own(value, fx.Proxy) else None
            return watcher is not None and watcher.is_a(value, classes)

        return run

    def asked(own: Any) -> Any:
        recorded = _instead(current, made)(own)

        def run(*args: Any) -> Any:
            # PyTorch and this package ask as well, which does not affect the results.
            return (own if is_of_others(sys._getframe(1)) else recorded)(*args)

        return run

    yield builtins, 'isinstance', instance
    for owner, name in ((builtins, 'len'), *((math, name) for name in _OF_NUMBERS)):
        yield owner, name, _instead(current, made, of_values=True)
    # A value has __call__, like all values of torch.fx.
    yield (
        builtins,
        'callable',
        _instead(current, lambda _, own, args, kwargs: own(args[0]._example), of_values=True),
    )
    yield torch, '_check_with', _instead(current, _check_with, of_values=True)
    for name in _MAKERS:
        yield torch, name, _instead(current, made)
    for name in _OF_AUTOCAST:
        yield torch, name, asked
    yield Function, 'apply', lambda _: classmethod(_instead(current, made)(apply))
    # `apply` reads `setup_context` first.
    yield (
        type(Function),
        '__getattribute__',
        _before(
            current,
            lambda watcher, function, name: (
                watcher.applied(function) if name == 'setup_context' else None
            ),
        ),
    )
    yield (
        nn.Module,
        '__setattr__',
        _before(
            current, lambda watcher, module, name, value: watcher.written(module, name, value)
        ),
    )
    for name in _DRAWERS:
        yield random, name, _before(current, lambda watcher, *_: watcher.drew())
    # torch.autocast would not accept x.device.type, which is a value.
    for mode, name in (*((mode, '__enter__') for mode in _MODES), (torch.autocast, '__init__')):
        yield mode, name, _before(current, lambda watcher, *_: watcher.entered())


def _check_with(_: object, own: Any, args: Any, kwargs: Any) -> Any:
    """Convert the condition to a bool, because PyTorch does not accept a value."""
    error, condition, *others = args
    return own(error, bool(condition), *others, **kwargs)


def _as_class(own: type, call: Callable[..., Any]) -> type:
    """Return a class that behaves like another one, except when it is called."""

    class Like(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, own)

        def __getattr__(cls, name: str) -> Any:
            return getattr(own, name)

    return Like(own.__name__, (), {})
