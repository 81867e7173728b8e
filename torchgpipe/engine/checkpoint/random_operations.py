"""Random operations: recorded in a first pass, repeated with the same numbers in a recomputation.

See :mod:`torchgpipe.engine.checkpoint.draws` for why.

[Note: Draws of other threads] Another thread may draw between the look at the state and the
operation. So each random operation is tried at once as a recomputation will run it, on copies and
with a generator in the state before. If that one ends in the state after, nobody drew in between.
Otherwise the operation runs again, and what it drew at first is used by nobody.
"""
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpipe.devices import is_cpu
from torchgpipe.errors import other_path
from torchgpipe.locks import new_lock
from torchgpipe.private import DISPATCH_MODES, DispatchMode, schema_of, tree_leaves, unseen

__all__ = ['Call', 'Draw', 'DrawMonitor', 'Mode', 'Operation', 'Recorder', 'Replayer',
           'disturbed', 'operation_of', 'same', 'state_of']


# --- operations: draws and writes
# ----------------------------------------------------------------------------------


class Operation(NamedTuple):
    """What is known of an operation, as a dispatch mode sees it."""

    #: Whether it is PyTorch's own, and so says what it does.
    native: bool
    #: Whether it says that it draws random numbers.
    random: bool
    #: The place of its generator among its arguments, if it takes one.
    generator: int | None
    #: The operation that takes a generator as well, if this one does not.
    twin: Any
    #: Places and names of the arguments that it writes to.
    written: tuple[tuple[int, str], ...]

    @property
    def takes_generator(self) -> bool:
        """Whether the operation, or its twin, can be given a generator."""
        return self.generator is not None or self.twin is not None

    def generator_of(self, args: Any, kwargs: Any) -> torch.Generator | None:
        """Return the generator that a call was given."""
        if self.generator is None:
            return None
        given: torch.Generator | None = (
            args[self.generator] if self.generator < len(args) else kwargs.get('generator'))
        return given

    def call_with(self, generator: torch.Generator, func: Any, args: Any, kwargs: Any) -> Any:
        """Call with another generator."""
        if self.generator is None:
            return self.twin(*args, **kwargs, generator=generator)
        k = self.generator
        if k < len(args):
            return func(*args[:k], generator, *args[k + 1:], **kwargs)
        return func(*args, **{**kwargs, 'generator': generator})

    def written_by(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        """Yield the tensors that a call writes to."""
        for k, name in self.written:
            given = args[k] if k < len(args) else kwargs.get(name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))


@lru_cache(maxsize=None)
def operation_of(func: Any) -> Operation:
    """Return what is known of an operation."""
    schema = schema_of(func)
    if schema is None:
        return Operation(False, False, None, None, ())
    names = [argument.name for argument in schema.arguments]
    native = func.namespace in ('aten', 'prims')
    random = torch.Tag.nondeterministic_seeded in func.tags
    written = tuple((k, argument.name) for k, argument in enumerate(schema.arguments)
                    if argument.alias_info and argument.alias_info.is_write)
    if 'generator' in names:
        return Operation(native, random, names.index('generator'), None, written)
    twin = _twin(func, names) if random else None
    return Operation(native, random, None, twin, written)


def _twin(func: Any, names: list[str]) -> Any:
    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if {argument.name for argument in schema_of(overload).arguments} == {*names, 'generator'}:
            return overload
    return None


# --- record and repeat
# ----------------------------------------------------------------------------------


T = TypeVar('T')

#: How often a random operation is run again because another thread drew meanwhile.
ATTEMPTS = 100

_cpu = torch.default_generator

# PyTorch guards a generator with a mutex, which it takes while it holds the GIL; making the tensor
# for the state may start Python's garbage collector, which may let go of the GIL. Two threads
# could then wait for each other for ever. Who waits for a lock of Python's own lets go of the GIL.
# Reentrant, since what the collector frees may draw.
_lock = new_lock()


def state_of(generator: torch.Generator = _cpu) -> Tensor:
    """Return a copy of a generator's state."""
    with _lock:
        return generator.get_state()


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two states are one."""
    with unseen():
        return torch.equal(a.view(torch.int64), b.view(torch.int64))


def _at(state: Tensor, device: torch.device) -> torch.Generator:
    """Make a generator in some state."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


#: An operation, and how many times it was called before in the same cell.
Call = tuple[Any, int]


class Draw(NamedTuple):
    """What one random operation did to its generator."""

    before: Tensor
    after: Tensor
    device: torch.device


class Mode(DispatchMode):
    """A mode that tells a cell's calls apart, and under which compiled layers stay compiled."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: How often each operation was called.
        self.calls: dict[Any, int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def number(self, func: Any) -> Call:
        """Name a call."""
        number = self.calls.get(func, 0)
        self.calls[func] = number + 1
        return func, number

    def run(self, function: Callable[[], T]) -> T:
        """Run a function in this mode."""
        DISPATCH_MODES.push(self)
        try:
            return function()
        finally:
            DISPATCH_MODES.pop()


class Recorder(Mode):
    """Record the random operations of a first pass.

    Args:
        random: Operations that draw and do not say so. With ``None``, all that are not PyTorch's
            own are looked at, and those that do are found.
    """

    def __init__(self, random: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.draws: dict[Call, Draw] = {}
        self.random: set[Any] = set(random or ())
        self._all = random is None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation.takes_generator:
            return self._record(func, operation, args, kwargs)
        if operation.random or func in self.random or (self._all and not operation.native):
            return self._look(func, operation, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Run an operation that takes a generator: [Note: Draws of other threads]."""
        call = self.number(func)
        generator = operation.generator_of(args, kwargs) or _cpu
        written = list(operation.written_by(args, kwargs))
        for _ in range(ATTEMPTS):
            with unseen():
                found = [x.clone() for x in written]
            before = state_of(generator)
            output = func(*args, **kwargs)
            after = state_of(generator)
            if same(before, after):
                return output
            self.draws[call] = draw = Draw(before, after, generator.device)
            with unseen():
                copies = {id(x): y.clone() for x, y in zip(written, found)}
                end = _run_at(draw, operation, func, *_replaced((args, kwargs), copies))[1]
                if same(end, after):
                    return output
                for x, y in zip(written, found):
                    x.copy_(y)
        raise disturbed()

    def _look(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Run any other operation, and look whether it draws."""
        call = self.number(func)
        before = state_of()
        output = func(*args, **kwargs)
        after = state_of()
        if not same(before, after):
            self.draws[call] = Draw(before, after, _cpu.device)
            if not operation.random:
                self.random.add(func)
        return output


def _replaced(value: Any, copies: dict[int, Tensor]) -> Any:
    """Put copies in the place of tensors. (A function for any tree would leave cycles behind.)"""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(x, copies) for x in value)
    if isinstance(value, dict):
        return {name: _replaced(x, copies) for name, x in value.items()}
    return copies.get(id(value), value)


def _run_at(draw: Draw, operation: Operation, func: Any, args: Any, kwargs: Any
            ) -> tuple[Any, Tensor]:
    """Run an operation with a generator as it was; give the output and where that one ends."""
    generator = _at(draw.before, draw.device)
    output = operation.call_with(generator, func, args, kwargs)
    return output, generator.get_state()


class Replayer(Mode):
    """Let the random operations of a recomputation draw what those of the first pass drew.

    Args:
        draws: What a :class:`Recorder` has recorded.
        random: Operations that draw and do not say so.
    """

    def __init__(self, draws: dict[Call, Draw], random: set[Any]) -> None:
        super().__init__()
        self._draws = draws
        self._random = random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if not (operation.takes_generator or operation.random or func in self._random):
            return func(*args, **kwargs)
        draw = self._draws.get(self.number(func))
        if draw is None:
            return _without_drawing(operation, func, args, kwargs)
        if not operation.takes_generator:
            return _with_default_moved(draw, lambda: func(*args, **kwargs))
        output, end = _run_at(draw, operation, func, args, kwargs)
        if not same(end, draw.after):
            raise other_path('a random operation drew more or fewer numbers')
        return output


def _without_drawing(operation: Operation, func: Any, args: Any, kwargs: Any) -> Any:
    """Run what drew nothing in the first pass, and see that it does not draw now either."""
    given = operation.generator_of(args, kwargs)
    if not operation.random or (given is None and not _is_on_cpu(args, kwargs)):
        return func(*args, **kwargs)
    if given is None and operation.takes_generator:
        # Of its own, so that draws of other threads are not taken for its.
        generator = torch.Generator()
        before = generator.get_state()
        output = operation.call_with(generator, func, args, kwargs)
    else:
        generator = given or _cpu
        before = state_of(generator)
        output = func(*args, **kwargs)
    if not same(before, state_of(generator)):
        raise other_path('it drew random numbers where the first pass drew none')
    return output


def _is_on_cpu(args: Any, kwargs: Any) -> bool:
    """Return whether a random operation works on the CPU, and so draws from its generator."""
    devices = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    device = kwargs.get('device') or torch.device('cpu')
    return all(map(is_cpu, (*devices, device)))


def _with_default_moved(draw: Draw, function: Callable[[], T]) -> T:
    """Run an operation that takes no generator, with the default one moved back for that long."""
    with _lock:
        now = _cpu.get_state()
        _cpu.set_state(draw.before)
        try:
            output = function()
            end = _cpu.get_state()
        finally:
            _cpu.set_state(now)
    # Where it did not move at all, another thread had drawn during the first pass.
    if not same(end, draw.before) and not same(end, draw.after):
        raise disturbed()
    return output


def disturbed() -> RuntimeError:
    return RuntimeError(
        'another thread drew from the random generator of a checkpointed micro-batch in the '
        'middle of its random operations, so they cannot be repeated. Give that thread a '
        "torch.Generator of its own, or use checkpoint='never'.")


class DrawMonitor:
    """Whether someone drew from the CPU's generator while cells ran that were not recorded.

    It may have been these, which had not been seen to draw before, or another thread. To the cells
    it is their :class:`~torchgpipe.engine.checkpoint.draws.Draws`, if they record none.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._before = state_of()

    def first_pass(self, function: Callable[[], T]) -> T:
        """Run a cell for the first time."""
        return function()

    def replay(self, function: Callable[[], T]) -> T:
        """Run a cell again beside which someone drew, and see that it does not."""
        return Replayer({}, set()).run(function)

    def anyone_drew(self) -> bool:
        """Look whether the generator is where it was, and remember."""
        self.drawn = not same(self._before, state_of())
        return self.drawn
