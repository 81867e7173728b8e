"""Let a recorder see what a forward does: functions are replaced while it runs.

::

    self.layer(x)           nn.Module.__call__          a call of a leaf is recorded, others run
    self.weight             nn.Module.__getattr__       a value that stands for the parameter
    self.training           a value in its place        so that it is read anew in each call
    self.loss = y           nn.Module.__setattr__       refused
    random.random()         random.random, …            refused
    with torch.no_grad():   no_grad.__enter__, …        refused, or the module stays whole
    torch.arange(T)         torch.arange, …             PyTorch would ask for a number, not a value
    len(x), math.sqrt(T)    len, math.sqrt, …           so would Python
    Swish.apply(x)          Function.apply              PyTorch would ask for a tensor
    swish(x)                type(Function)              refused: Swish.apply, by another name
    isinstance(x, Tensor)   isinstance                  the truth of the tensor, not of the value

[Note: What is replaced for the whole process]
A name is looked up in a module or a class, which all threads have in common, or in ``builtins``;
Python has no place for one thread's own. A value can't do without: ``len`` makes a number of what
``__len__`` gives, ``math.sqrt`` of ``__float__``, and ``torch.zeros(n, 2)`` is refused before a
``TorchFunctionMode`` is asked. PyTorch's C++ would believe a ``__class__`` that says Tensor, and
read a value's memory as one's, so ``isinstance`` has to answer. So a replacement does what the
original does, for other threads, for what runs within a leaf, and once the recording is over for
who has kept it: see `Seat`. It has the name of the original, and that of a class is one.
While a step is computed, the functions of PyTorch and Python are put back, as it may import a
module that keeps them, such as PyTorch's compiler.
"""
import builtins
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.overrides import is_tensor_method_or_property

from torchgpipe.sequential.runtime import apply
from torchgpipe.sequential.watchers import Follower, Seat, Watcher

__all__ = ['followed', 'one_at_a_time', 'watched']

# What makes something of numbers, and would not take values for them.
_MAKERS = ('arange', 'as_tensor', 'empty', 'eye', 'finfo', 'full', 'iinfo', 'linspace', 'logspace',
           'normal', 'ones', 'rand', 'randint', 'randn', 'randperm', 'scalar_tensor', 'tensor',
           'tril_indices', 'triu_indices', 'zeros')
_OF_NUMBERS = ('ceil', 'cos', 'exp', 'floor', 'isqrt', 'log', 'log10', 'log2', 'pow', 'sin',
               'sqrt')
_DRAWERS = ('betavariate', 'choice', 'choices', 'expovariate', 'gauss', 'getrandbits',
            'normalvariate', 'randint', 'random', 'randrange', 'sample', 'shuffle', 'triangular',
            'uniform')


_MODES = (torch.autocast, torch.enable_grad, torch.inference_mode, torch.no_grad)

#: Two threads would put back what the other one has replaced, or see what it draws.
one_at_a_time = threading.RLock()


#: An object, the name of its attribute, and what makes another one of that.
_Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see which modules this thread calls, and what it reads of them."""
    seat = Seat(watcher)
    with _replaced(_of_modules(seat)):
        try:
            yield
        finally:
            seat.leave()


@contextmanager
def followed(follower: Follower) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let a follower see what this thread does; give what puts functions back for a time."""
    # PyTorch keeps lists of its functions, which it makes when they are first asked for; it must
    # not find these here in them.
    is_tensor_method_or_property(torch.add)
    seat = Seat(follower)
    with _replaced([*_of_modules(seat), *_others(seat)]) as put_back:
        try:
            yield put_back
        finally:
            seat.leave()


@contextmanager
def _replaced(replacements: Sequence[_Replacement]
              ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    with one_at_a_time:
        owns = [(owner, name, vars(owner).get(name, _INHERITED))
                for owner, name, _ in replacements]
        others = [(owner, name, _named(make(getattr(owner, name)), owner, name))
                  for owner, name, make in replacements]

        @contextmanager
        def put_back() -> Iterator[None]:
            # To do so with an attribute of a class with many derived ones takes long.
            _set(owns, ModuleType)
            try:
                yield
            finally:
                _set(others, ModuleType)

        try:
            _set(others)
            yield put_back
        finally:
            _set(owns)


def _named(function: Any, owner: Any, name: str) -> Any:
    """Let a function of a module be found by its name, as a pickle would."""
    if isinstance(owner, ModuleType):
        function.__module__ = owner.__name__
        function.__name__ = function.__qualname__ = name
    return function


_INHERITED = object()


def _set(attributes: Iterable[tuple[Any, str, Any]], kind: type = object) -> None:
    for owner, name, value in attributes:
        if isinstance(owner, kind):
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _of_modules(seat: Seat[Any]) -> list[_Replacement]:
    def call(own: Any) -> Any:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watcher = seat.taken()
            if watcher:
                return watcher.called(module, own, args, kwargs)
            return own(module, *args, **kwargs)
        return run

    def read(own: Any) -> Any:
        def run(module: nn.Module, name: str) -> Any:
            found = own(module, name)
            watcher = seat.taken()
            return watcher.read(module, name, found) if watcher else found
        return run

    def listing(own: Any) -> Any:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in own(module, *args, **kwargs):
                watcher = seat.taken()
                yield name, watcher.listed(module, name, tensor) if watcher else tensor
        return run

    return [(nn.Module, '__call__', call), (nn.Module, '__getattr__', read),
            (nn.Module, 'named_parameters', listing), (nn.Module, 'named_buffers', listing)]


def _others(seat: Seat[Follower]) -> Iterator[_Replacement]:
    def write(own: Any) -> Any:
        def run(module: nn.Module, name: str, value: Any) -> None:
            watcher = seat.taken()
            if watcher:
                watcher.written(module, name)
            own(module, name, value)
        return run

    def maker(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            watcher = seat.taken()
            return watcher.made(own, args, kwargs) if watcher else own(*args, **kwargs)
        return _as_class(own, run) if isinstance(own, type) else run

    def entrance(own: Any) -> Any:
        def run(mode: Any, *args: Any, **kwargs: Any) -> Any:
            watcher = seat.taken()
            if watcher:
                watcher.entered()
            return own(mode, *args, **kwargs)
        return run

    def drawer(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            watcher = seat.taken()
            if watcher:
                watcher.drew()
            return own(*args, **kwargs)
        return run

    def of_values(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            watcher = seat.taken() if any(isinstance(x, fx.Proxy) for x in args) else None
            return watcher.made(own, args, kwargs) if watcher else own(*args, **kwargs)
        return run

    def applying(_: Any) -> Any:
        def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
            watcher = seat.taken()
            if watcher:
                return watcher.made(apply, (cls, *args), kwargs)
            return apply(cls, *args, **kwargs)
        return classmethod(run)

    def asked(own: Any) -> Any:
        def run(cls: Any, name: str) -> Any:
            # Whoever applies one, asks for this first.
            watcher = seat.taken() if name == 'setup_context' else None
            if watcher:
                watcher.applied(cls)
            return own(cls, name)
        return run

    def instance(own: Any) -> Any:
        def run(value: Any, classes: Any) -> bool:
            if own(value, classes):
                return True
            watcher = seat.taken() if own(value, fx.Proxy) else None
            return watcher is not None and watcher.is_a(value, classes)
        return run

    yield builtins, 'len', of_values
    yield builtins, 'isinstance', instance
    for name in _OF_NUMBERS:
        yield math, name, of_values
    yield Function, 'apply', applying
    yield type(Function), '__getattribute__', asked
    yield nn.Module, '__setattr__', write
    for name in _MAKERS:
        yield torch, name, maker
    for name in _DRAWERS:
        yield random, name, drawer
    for mode in _MODES:
        yield mode, '__enter__', entrance
    yield torch.autocast, '__init__', entrance  # It would not take x.device.type, a value.


def _as_class(own: type, call: Callable[..., Any]) -> type:
    """Return a class that is called in a way of its own, and is another one in all else."""
    class Like(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, own)

        def __getattr__(cls, name: str) -> Any:
            return getattr(own, name)

    return Like(own.__name__, (), {})
