"""A plan: the settings of a pipeline, and its predicted time and memory."""
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import Any

from torchgpipe.base.devices import is_cpu
from torchgpipe.base.settings import Settings
from torchgpipe.base.text import format_bytes, table
from torchgpipe.predict.blocks import SkipProfile
from torchgpipe.predict.costs import Costs, Link, StageCosts
from torchgpipe.predict.simulate import Simulation, simulate
from torchgpipe.schedule import Schedule, make
from torchgpipe.schedule.generators import PLAIN_CALL, plain_call

__all__ = ['Plan', 'schedule_of']


@lru_cache(maxsize=64)
def schedule_of(name: str, devices: int, m: int, virtual: int, stops: tuple[int, ...] = ()
                ) -> Schedule:
    """Return a schedule, with recomputations."""
    if name == PLAIN_CALL:
        return plain_call(devices, m, stops)[0]
    schedule = make(name, devices, m, virtual)
    return schedule.recomputing(stops) if any(stops) else schedule


@dataclass(frozen=True)
class Plan(Settings):
    """How a model is to be run, and what that is predicted to take; :func:`plan` makes it.

    ``GPipe(module, plan)`` takes it as it is, and then ``model.step(…, schedule='auto')`` its
    schedule. ``print(plan)`` shows a table. Predictions are those of one training step, of all but
    the loss and the optimizer.
    """

    #: Samples in a mini-batch.
    batch_size: int
    #: Of the unwrapped model, on one device.
    sequential_seconds: float
    #: What the stages cost, for one micro-batch.
    costs: Costs
    #: The best plan for each other schedule, the fastest one first.
    runners_up: tuple['Plan', ...] = ()

    @cached_property
    def simulation(self) -> Simulation:
        """The step as it is predicted, with each action and memory over time."""
        m, n = min(self.chunks, self.batch_size), len({*self.devices})
        if self.schedule == PLAIN_CALL and all(map(is_cpu, self.devices)):
            schedule, pairs = plain_call(n, m, one_thread=True)
            return simulate(schedule, self.costs, pairs)
        return simulate(schedule_of(self.schedule, n, m, len(self.balance) // n,
                                    self.costs.stops), self.costs)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.simulation.seconds

    @property
    def speed_up(self) -> float:
        """How much faster than the unwrapped model on one device, if that could hold it."""
        return self.sequential_seconds / self.seconds if self.seconds else 1.0

    @property
    def bubble(self) -> float:
        """The part of the devices' time in which they wait, from 0 to 1."""
        return self.simulation.bubble

    @property
    def bytes(self) -> dict[str, int]:
        """The most bytes on each device at a time."""
        return {device: -int(-bytes // 1) for device, bytes in
                zip(dict.fromkeys(self.devices), self.simulation.peak_bytes)}

    def __str__(self) -> str:
        rows = [[each.schedule, each.chunks, each.checkpoint, len(each.balance),
                 f'{each.seconds * 1e3:.3f}', f'{each.bubble:.1%}', f'{each.speed_up:.2f}',
                 format_bytes(max(each.bytes.values()))] for each in (self, *self.runners_up)]
        header = ['schedule', 'chunks', 'checkpoint', 'partitions', 'step, ms', 'bubble',
                  'speed-up', 'most memory']
        own = table(['partition', 'device', 'layers'], [
            [str(j), device, number] for j, (device, number) in enumerate(
                zip(self.devices, self.balance))])
        return (f'{table(header, rows)}\n\n{own}\n\n{self.batch_size} samples by the first of '
                'these schedules')

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold: dictionaries, lists, strings and numbers."""
        return {'version': 1, **_unlimited(asdict(self), inf, None)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> 'Plan':
        """Read what :meth:`to_dict` gave, also after a way through JSON.

        Raises:
            ValueError: It is something else.
        """
        try:
            if data['version'] != 1:
                raise ValueError(f"its version is {data['version']!r}, not 1")
            return _plan(_unlimited(data, None, inf))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError('this is not a plan, as Plan.to_dict() writes it: '
                             f'{type(error).__name__}: {error}') from None


def _unlimited(data: Any, old: float | None, new: float | None) -> Any:
    """Write an unlimited bandwidth in another way: JSON has no infinity."""
    if isinstance(data, dict):
        return {key: new if key == 'bandwidth' and value == old else _unlimited(value, old, new)
                for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_unlimited(each, old, new) for each in data]
    return data


def _plan(data: dict[str, Any]) -> Plan:
    data.pop('version', None)
    costs = data['costs']
    links = costs['links']
    data['costs'] = Costs(
        tuple(StageCosts(**each) for each in costs['stages']),
        tuple(SkipProfile(**each) for each in costs['skips']),
        Link(**links) if isinstance(links, dict) else tuple(
            tuple(Link(**each) for each in row) for row in links))
    data['layers'] = tuple((str(name), int(size)) for name, size in data['layers'])
    data['runners_up'] = tuple(_plan(each) for each in data['runners_up'])
    for name in ('balance', 'devices'):
        data[name] = tuple(data[name])
    plan = Plan(**data)
    plan.simulation  # or what is wrong would only show later
    return plan
