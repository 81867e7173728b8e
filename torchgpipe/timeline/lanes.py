"""Lanes: the actions of each device over time, and the share of time in which it works."""
from collections.abc import Iterable
from typing import NamedTuple

from torchgpipe.base.text import duration
from torchgpipe.schedule.schedule import Action, Timed

__all__ = ['Copied', 'Lanes']


class Copied(NamedTuple):
    """A copy of a micro-batch's tensor from the device of one lane to another lane's device."""

    source: int
    target: int
    micro_batch: int
    start: float
    end: float


class Lanes:
    """The numbers of a :class:`~torchgpipe.timeline.Timeline`; see there for arguments."""

    def __init__(self, actions: Iterable[Timed], devices: Iterable[object] | None = None,
                 copies: Iterable[Copied] = ()) -> None:
        actions = tuple(actions)
        lanes = 1 + max((timed.device for timed in actions), default=-1)
        self.devices = (tuple(f'device {lane}' for lane in range(lanes)) if devices is None
                        else tuple(map(str, devices)))
        self.fill(actions, copies)
        if lanes > len(self.devices):
            raise ValueError(f'there is an action in lane {lanes - 1}, but only '
                             f'{len(self.devices)} devices are named: {list(self.devices)}')

    def fill(self, actions: Iterable[Timed], copies: Iterable[Copied] = ()) -> None:
        """Replace the actions and copies, as a recording does at its end."""
        self.actions = tuple(sorted(actions, key=lambda timed: (timed.start, timed.end)))
        self.copies = tuple(sorted(copies, key=lambda copied: copied.start))
        stages = {(timed.device, timed.action.stage) for timed in self.actions}
        self._names_stages = len(stages) > len({lane for lane, _ in stages})

    @property
    def start(self) -> float:
        """The start of the first action, in seconds."""
        return min((timed.start for timed in self.actions), default=0.)

    @property
    def seconds(self) -> float:
        """The time from the start of the first action to the end of the last one."""
        return max((timed.end for timed in self.actions), default=0.) - self.start

    @property
    def utilisations(self) -> tuple[float, ...]:
        """The part of the time for which each lane works, from 0 to 1."""
        spans: list[list[tuple[float, float]]] = [[] for _ in self.devices]
        for timed in self.actions:
            spans[timed.device].append((timed.start, timed.end))
        whole = self.seconds or 1.
        return tuple(_union(each) / whole for each in spans)

    @property
    def utilisation(self) -> float:
        """The part of the time of all lanes for which they work, from 0 to 1."""
        return sum(self.utilisations) / max(1, len(self.devices))

    @property
    def bubble(self) -> float:
        """The part of the time of all lanes for which they do not work, from 0 to 1."""
        return 1 - self.utilisation

    def label(self, action: Action) -> str:
        """Return the short form of an action: ``F3``; ``2F3`` if a lane has several stages."""
        return str(action) if self._names_stages else f'{action.kind}{action.micro_batch}'

    def summary(self) -> str:
        """Return the numbers in a line."""
        return f'{duration(self.seconds)}, bubble {100 * self.bubble:.1f} %'


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time in any of the spans, which are sorted by their starts."""
    total, until = 0., float('-inf')
    for start, end in spans:
        total += max(0., end - max(start, until))
        until = max(until, end)
    return total
