"""Random numbers of a cell's first pass, repeated in its recomputation.

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
"""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpipe.engine.checkpoint.random_operations import (Call, Draw, DrawMonitor, Mode,
                                                            Recorder, Replayer, disturbed, same)
from torchgpipe.engine.stream import rng_state

__all__ = ['Draws', 'Position']

T = TypeVar('T')


class Draws:
    """The random numbers of one cell.

    Args:
        device: Where it runs.
        recorder: Records its first pass; ``None`` if its layers were seen not to draw.
        monitor: Tells after a first pass that is not recorded whether anyone drew.
    """

    __slots__ = ('_after', '_before', '_device', '_draws', '_mode', '_moved', '_random',
                 '_recorder', '_monitor')

    #: Whether there may be something to repeat.
    drawn = True

    def __init__(self, device: torch.device, recorder: Recorder | None,
                 monitor: DrawMonitor | None = None) -> None:
        self._device = device
        self._recorder = recorder
        self._monitor = monitor
        self._draws: dict[Call, Draw] = {}
        self._random: set[Any] = set()
        #: What counts the calls of the present pass.
        self._mode: Mode | None = None
        #: Whether it has moved the generator of the device.
        self._moved = False

    def first_pass(self, function: Callable[[], T]) -> T:
        """Run the cell for the first time."""
        recorder, self._recorder = self._recorder, None
        self._mode = recorder
        self._before = rng_state(self._device)
        if recorder is None:
            output = function()
        else:
            output = recorder.run(function)
            self._draws, self._random = recorder.draws, recorder.random
        self._mode = None
        self._after = rng_state(self._device)
        return output

    def replay(self, function: Callable[[], T]) -> T:
        """Run the cell again, on the numbers that it drew."""
        if self._draws or (self._monitor is not None and self._monitor.drawn):
            self._mode = Replayer(self._draws, self._random)
            function = partial(self._mode.run, function)
        before, after = self._before, self._after
        if before is None or after is None or same(before, after):
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
        if not same(end, before) and not same(end, after):
            raise disturbed()
        return output

    def position(self) -> 'Position':
        """Tell how far the present pass has come."""
        calls = {} if self._mode is None else self._mode.calls.copy()
        return Position(calls, rng_state(self._device))

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
