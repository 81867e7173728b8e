"""Random numbers: what a cell drew in its first pass, so that a recomputation draws the same.

A recomputation must get the numbers of the first pass. On the CPU all threads share one random
generator: to move it back would give another thread the same numbers again, and a draw of that
thread would spoil the recomputation. Instead, a dispatch mode records the state of the generator
around each random operation of the first pass, and in the recomputation gives the operation a
generator of its own, in that state::

    first pass       op ─────▶ default generator, or one that the layer owns
                                    │ state before and after
    recomputation    op ─────▶ another generator, in the state before; it ends in the state after

The first pass draws from where it would draw without a pipeline. So a seed gives the numbers that
it gives there, and layers may seed, save and restore states as they like, for instance for a
recomputation of their own (``torch.utils.checkpoint``). It also means that partitions which draw
from the CPU's generator take turns: see the note "Order of draws" of the pipeline.

The generator of another device serves one worker only, and many of its kernels take no other.
There the state of the whole cell is kept, and the generator is moved back.

A mode costs about 10 µs for each operation, so layers that were seen to draw nothing run without.
Should they begin to, the state of the CPU's generator tells.

[Note: Draws of other threads] Another thread may draw between the look at the state and the
operation. So each random operation is tried at once as a recomputation will run it, on copies and
with a generator in the state before. If that one ends in the state after, nobody drew in between.
Otherwise the operation runs again, and what it drew at first is used by nobody.
"""
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpipe.engine.checkpoint.operations import Operation, operation_of
from torchgpipe.errors import other_path
from torchgpipe.locks import new_lock
from torchgpipe.private import DISPATCH_MODES, TorchDispatchMode, tree_leaves, unseen

__all__ = ['Draws', 'Position', 'Recorder', 'Witness']

T = TypeVar('T')

#: How often a random operation is run again because another thread drew meanwhile.
ATTEMPTS = 100

_cpu = torch.default_generator

# PyTorch guards a generator with a mutex, which it takes while it holds the GIL; making the tensor
# for the state may start Python's garbage collector, which may let go of the GIL. Two threads
# could then wait for each other for ever. Who waits for a lock of Python's own lets go of the GIL.
# Reentrant, since what the collector frees may draw.
_lock = new_lock()


def _state(generator: torch.Generator = _cpu) -> Tensor:
    """Give a copy of a generator's state."""
    with _lock:
        return generator.get_state()


def _same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two states are one."""
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


@cache
def _import_compiler() -> None:
    """Import what PyTorch imports when a mode is called for the first time.

    That leaves a cycle (in ``torch.fx.wrap``) that refers to all frames below it, and so to their
    tensors. A thread of its own has none.
    """
    thread = threading.Thread(target=import_module, args=['torch._dynamo'])
    thread.start()
    thread.join()


class _Mode(TorchDispatchMode):
    """A mode that tells a cell's calls apart, and under which compiled layers stay compiled."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        _import_compiler()
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


class Recorder(_Mode):
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
            before = _state(generator)
            output = func(*args, **kwargs)
            after = _state(generator)
            if _same(before, after):
                return output
            self.draws[call] = draw = Draw(before, after, generator.device)
            with unseen():
                copies = {id(x): y.clone() for x, y in zip(written, found)}
                end = _run_at(draw, operation, func, *_replaced((args, kwargs), copies))[1]
                if _same(end, after):
                    return output
                for x, y in zip(written, found):
                    x.copy_(y)
        raise _disturbed()

    def _look(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        """Run any other operation, and look whether it draws."""
        call = self.number(func)
        before = _state()
        output = func(*args, **kwargs)
        after = _state()
        if not _same(before, after):
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


class Replayer(_Mode):
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
        if not _same(end, draw.after):
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
        before = _state(generator)
        output = func(*args, **kwargs)
    if not _same(before, _state(generator)):
        raise other_path('it drew random numbers where the first pass drew none')
    return output


def _is_on_cpu(args: Any, kwargs: Any) -> bool:
    """Tell whether a random operation works on the CPU, and so draws from its generator."""
    devices = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    device = kwargs.get('device') or torch.device('cpu')
    return all(x.type == 'cpu' for x in (*devices, device))


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
    if not _same(end, draw.before) and not _same(end, draw.after):
        raise _disturbed()
    return output


def _disturbed() -> RuntimeError:
    return RuntimeError(
        'another thread drew from the random generator of a checkpointed micro-batch in the '
        'middle of its random operations, so they can not be repeated. Give that thread a '
        "torch.Generator of its own, or use checkpoint='never'.")


class Witness:
    """Whether someone drew from the CPU's generator while cells ran that were not recorded.

    It may have been these, which had not been seen to draw before, or another thread.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._before = _state()

    def look(self) -> bool:
        """Look whether the generator is where it was, and remember."""
        self.drawn = not _same(self._before, _state())
        return self.drawn


class Draws:
    """The random numbers of one cell.

    Args:
        device: Where it runs.
        recorder: Records its first pass; ``None`` if its layers were seen not to draw.
        witness: Tells after the first pass whether anyone drew. By default one that looks at the
            end of this cell.
    """

    __slots__ = ('_after', '_before', '_device', '_draws', '_mode', '_moved', '_random',
                 '_recorder', '_witness')

    def __init__(self, device: torch.device, recorder: Recorder | None,
                 witness: Witness | None = None) -> None:
        self._device = device
        self._recorder = recorder
        self._witness = witness
        self._draws: dict[Call, Draw] = {}
        self._random: set[Any] = set()
        #: What counts the calls of the present pass.
        self._mode: _Mode | None = None
        #: Whether it has moved the generator of the device.
        self._moved = False

    def first_pass(self, function: Callable[[], T]) -> T:
        """Run the cell for the first time."""
        recorder, self._recorder = self._recorder, None
        self._mode = recorder
        self._before = _device_state(self._device)
        if recorder is not None:
            output = recorder.run(function)
            self._draws, self._random = recorder.draws, recorder.random
        elif self._witness is not None:
            output = function()
        else:
            self._witness = Witness()
            output = function()
            self._witness.look()
        self._mode = None
        self._after = _device_state(self._device)
        return output

    @property
    def suspect(self) -> bool:
        """Whether someone drew in a first pass that was not recorded."""
        return self._witness is not None and self._witness.drawn

    def replay(self, function: Callable[[], T]) -> T:
        """Run the cell again, on the numbers that it drew."""
        self._mode = None
        if self._draws or self.suspect:
            self._mode = Replayer(self._draws, self._random)
            function = partial(self._mode.run, function)
        before, after = self._before, self._after
        if before is None or after is None or _same(before, after):
            return function()
        return self._with_device_moved(before, after, function)

    def _with_device_moved(self, before: Tensor, after: Tensor, function: Callable[[], T]) -> T:
        module = torch.get_device_module(self._device)
        now = module.get_rng_state(self._device)
        module.set_rng_state(before, self._device)
        self._moved = True
        try:
            output = function()
            end = module.get_rng_state(self._device)
        finally:
            self._moved = False
            module.set_rng_state(now, self._device)
        # Layers may well draw in their first pass only.
        if not _same(end, before) and not _same(end, after):
            raise _disturbed()
        return output

    def position(self) -> 'Position':
        """Tell how far the present pass has come."""
        calls = {} if self._mode is None else self._mode.calls.copy()
        return Position(calls, _device_state(self._device))

    def go_to(self, position: 'Position') -> None:
        """Go on from where the first pass was, without what it drew on the way there."""
        if self._mode is not None:
            self._mode.calls = position.calls.copy()
        if self._moved:
            torch.get_device_module(self._device).set_rng_state(position.state, self._device)


class Position(NamedTuple):
    """A point in a pass over a cell: calls that came before, and the state of the device."""

    calls: dict[Any, int]
    state: Tensor | None


def _device_state(device: torch.device) -> Tensor | None:
    """Give the state of a device's own generator."""
    if device.type in ('cpu', 'meta'):
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state
