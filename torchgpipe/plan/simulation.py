"""What a step by a schedule is predicted to take: the time of each action, and the memory."""
from dataclasses import dataclass
from functools import cached_property

from torchgpipe.plan.costs import Costs
from torchgpipe.plan.memory import Line, bytes_over_time
from torchgpipe.schedule import Timed

__all__ = ['Simulation']


@dataclass(frozen=True)
class Simulation:
    """A step as it is predicted; :func:`simulate` makes it.

    >>> from torchgpipe.plan import StageCosts, simulate
    >>> from torchgpipe.schedule import make
    >>> stage = StageCosts(forward=1.0, backward=2.0, activation_bytes=8.0)
    >>> simulation = simulate(make('1f1b', devices=2, micro_batches=4), Costs([stage] * 2))
    >>> simulation.seconds, round(simulation.bubble, 2), simulation.peak_bytes
    (15.0, 0.2, (16.0, 8.0))
    """

    #: When each action starts and ends, row after row of the schedule.
    actions: tuple[Timed, ...]
    #: What the stages cost.
    costs: Costs
    #: The number of devices, rows of the schedule.
    devices: int

    @cached_property
    def seconds(self) -> float:
        """The time of the step."""
        return max(timed.end for timed in self.actions)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For how many seconds each device has something to do."""
        busy = [0.0] * self.devices
        for timed in self.actions:
            busy[timed.device] += timed.end - timed.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The part of the devices' time in which they have nothing to do, from 0 to 1."""
        return 1 - sum(self.busy) / (self.devices * self.seconds) if self.seconds else 0.0

    @property
    def bubble_rate(self) -> float:
        """The bubble as Qi et al., "Zero Bubble Pipeline Parallelism" (2023), count it.

        It is the part of a device's time from its first start to its last end that is no work, for
        the device where that time is longest; the work is that of the device that has most of it.
        """
        spans: dict[int, tuple[float, float]] = {}
        for timed in self.actions:
            start, _ = spans.get(timed.device, (timed.start, 0.0))
            spans[timed.device] = start, timed.end
        cost = max(end - start for start, end in spans.values())
        return 1 - max(self.busy) / cost if cost else 0.0

    @cached_property
    def bytes(self) -> tuple[Line, ...]:
        """What each device holds over time, as pairs of a second and bytes from then on."""
        return bytes_over_time(self.actions, self.costs, self.devices)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each device holds at a time."""
        return tuple(max(bytes for _, bytes in line) for line in self.bytes)
