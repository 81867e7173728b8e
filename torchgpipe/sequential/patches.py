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
    isinstance(x, Tensor)   isinstance                  the truth of the tensor, not of the value

Other threads, and what runs within a leaf, get what PyTorch has. While a step is computed, the
functions of PyTorch and Python are put back, as it may import a module that keeps them, such as
PyTorch's compiler. ``isinstance`` is replaced since PyTorch's C++ would believe a ``__class__``
that says Tensor, and read a value's memory as one's.
"""
import builtins
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.overrides import is_tensor_method_or_property

from torchgpipe.sequential.runtime import apply

__all__ = ['Follower', 'Watcher', 'followed', 'watched']

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

# Two threads would put back what the other one has replaced.
_one_at_a_time = threading.RLock()


class Watcher(Protocol):
    """Who is told which modules a forward calls, and what it reads of them."""

    @property
    def watches(self) -> bool:
        """Whether the forward runs now, and not a leaf."""

    def called(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> Any:
        """Call a module."""

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Give an attribute."""

    def listed(self, module: nn.Module, name: str, tensor: torch.Tensor) -> Any:
        """Give a parameter or a buffer."""


class Follower(Watcher, Protocol):
    """Who is told of what a forward does."""

    def written(self, module: nn.Module, name: str) -> None:
        """Say that an attribute is about to be set."""

    def made(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
             ) -> Any:
        """Call a function that makes a tensor, or describes a type of numbers."""

    def is_a(self, value: Any, classes: Any) -> bool:
        """Tell whether what a value stands for is an instance."""

    def entered(self) -> None:
        """Say that grad mode, inference mode or autocast is about to be set."""

    def drew(self) -> None:
        """Say that a random number of Python's is about to be drawn."""


#: An object, the name of its attribute, and what makes another one of that.
_Replacement = tuple[Any, str, Callable[[Any], Any]]


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see which modules this thread calls, and what it reads of them."""
    with _replaced(_of_modules(watcher, _watches(watcher))):
        yield


@contextmanager
def followed(follower: Follower) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let a follower see what this thread does; give what puts functions back for a time."""
    # PyTorch keeps lists of its functions, which it makes when they are first asked for; it must
    # not find these here in them.
    is_tensor_method_or_property(torch.add)
    watches = _watches(follower)
    with _replaced([*_of_modules(follower, watches), *_others(follower, watches)]) as put_back:
        yield put_back


def _watches(watcher: Watcher) -> Callable[[], bool]:
    mine = threading.get_ident()
    return lambda: watcher.watches and threading.get_ident() == mine


@contextmanager
def _replaced(replacements: Sequence[_Replacement]
              ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    with _one_at_a_time:
        owns = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
        others = [(owner, name, make(getattr(owner, name))) for owner, name, make in replacements]

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


def _set(attributes: Iterable[tuple[Any, str, Any]], kind: type = object) -> None:
    for owner, name, value in attributes:
        if isinstance(owner, kind):
            setattr(owner, name, value)


def _of_modules(watcher: Watcher, watches: Callable[[], bool]) -> list[_Replacement]:
    def call(own: Any) -> Any:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if watches():
                return watcher.called(module, own, args, kwargs)
            return own(module, *args, **kwargs)
        return run

    def read(own: Any) -> Any:
        def run(module: nn.Module, name: str) -> Any:
            found = own(module, name)
            return watcher.read(module, name, found) if watches() else found
        return run

    def listing(own: Any) -> Any:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in own(module, *args, **kwargs):
                yield name, watcher.listed(module, name, tensor) if watches() else tensor
        return run

    return [(nn.Module, '__call__', call), (nn.Module, '__getattr__', read),
            (nn.Module, 'named_parameters', listing), (nn.Module, 'named_buffers', listing)]


def _others(watcher: Follower, watches: Callable[[], bool]) -> Iterator[_Replacement]:
    def write(own: Any) -> Any:
        def run(module: nn.Module, name: str, value: Any) -> None:
            if watches():
                watcher.written(module, name)
            own(module, name, value)
        return run

    def maker(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return watcher.made(own, args, kwargs) if watches() else own(*args, **kwargs)
        return run

    def entrance(own: Any) -> Any:
        def run(mode: Any, *args: Any, **kwargs: Any) -> Any:
            if watches():
                watcher.entered()
            return own(mode, *args, **kwargs)
        return run

    def drawer(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if watches():
                watcher.drew()
            return own(*args, **kwargs)
        return run

    def of_values(own: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(x, fx.Proxy) for x in args) and watches():
                return watcher.made(own, args, kwargs)
            return own(*args, **kwargs)
        return run

    def applying(_: Any) -> Any:
        def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if watches():
                return watcher.made(apply, (cls, *args), kwargs)
            return apply(cls, *args, **kwargs)
        return classmethod(run)

    def instance(own: Any) -> Any:
        def run(value: Any, classes: Any) -> bool:
            return own(value, classes) or (own(value, fx.Proxy) and watches()
                                           and watcher.is_a(value, classes))
        return run

    yield builtins, 'len', of_values
    yield builtins, 'isinstance', instance
    for name in _OF_NUMBERS:
        yield math, name, of_values
    yield Function, 'apply', applying
    yield nn.Module, '__setattr__', write
    for name in _MAKERS:
        yield torch, name, maker
    for name in _DRAWERS:
        yield random, name, drawer
    for mode in _MODES:
        yield mode, '__enter__', entrance
    yield torch.autocast, '__init__', entrance  # It would not take x.device.type, a value.
