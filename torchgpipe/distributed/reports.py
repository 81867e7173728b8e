"""Reports: each rank's state in the store, and the search for the failed rank in all reports.

A :class:`Board` has its own connection to the store, because a connection is locked while a call
on it waits.
"""

import json
import os
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import Item, Message, Receive

_KINDS = {
    'F': 'forward',
    'R': 'recomputation',
    'B': 'backward',
    'I': 'backward to inputs',
    'W': 'backward to weights',
}

_OF_UNITS = {
    'UNSHARD': 'gather of the parameters',
    'RESHARD': 'freeing of the parameters',
    'REDUCE_GRAD': 'reduction of the gradients',
}

#: An error may have the text of a whole traceback in it.
_LONGEST = 4000


class Record(NamedTuple):
    """The report of a rank.

    Args:
        beat: The number of its reports.
        run: The number of runs (steps, calls, …) that it has begun, with the current one.
        state: ``'outside'`` of runs, ``'computes'``, ``'waits'``, ``'failed'``; or ``'ended'``
            with its process or its model.
        seconds: How long it has been in that state.
        error: The last error that it raised. The error stays when the rank continues, because
            others may look for it later.
        raised_in: The run in which it raised the error.
        found: The failure of other ranks that it found in this run.
    """

    beat: int = 0
    run: int = 0
    state: str = 'outside'
    seconds: float = 0.0
    text: str = ''
    where: str = ''
    error: str = ''
    raised_in: int = 0
    found: str = ''

    def pack(self) -> str:
        """Return the record as text."""
        return json.dumps(self)

    @classmethod
    def parse(cls, text: bytes) -> 'Record':
        """Return the record that a text describes."""
        return cls(*json.loads(text))


def names_of(mesh: DeviceMesh) -> dict[int, str]:
    """Return the name of each rank of a mesh, for errors: its number and its place.

    >>> import torch
    >>> from torchgpipe.distributed import init_mesh
    >>> names_of(init_mesh(device_type='cpu'))
    {0: 'rank 0 (data 0, pipe 0, tensor 0)'}
    >>> torch.distributed.destroy_process_group()
    """
    axes = mesh.mesh_dim_names or ()
    found = {}
    for place in (mesh.mesh >= 0).nonzero().tolist():
        rank = int(mesh.mesh[tuple(place)])
        where = ', '.join(f'{axis} {number}' for axis, number in zip(axes, place))
        found[rank] = f'rank {rank} ({where})'
    return found


def doing(now: Item | None) -> str:
    """Describe an item in the row of a rank.

    >>> doing(Action(1, 'F', 0))
    'forward of stage 1, micro-batch 0'
    """
    if isinstance(now, Message):
        stage, kind, i = now.action
        verb = 'receive' if isinstance(now, Receive) else 'send'
        return (
            f'{verb} of what {_KINDS[kind]} of stage {stage} has for stage {now.stage}, '
            f'micro-batch {i}'
        )
    if isinstance(now, Action):
        return f'{_KINDS[now.kind]} of stage {now.stage}, micro-batch {now.micro_batch}'
    if now is None:
        return ''
    return f'{_OF_UNITS[now.kind]} of stage {now.stage}'


def text_of(error: BaseException) -> str:
    """Return an error as the last lines of its traceback, with its notes."""
    lines = traceback.format_exception_only(type(error), error)
    if sys.version_info < (3, 11):
        lines += [*getattr(error, '__notes__', ())]
    return '\n'.join(line.rstrip() for line in lines)[:_LONGEST]


def blame(
    records: Mapping[int, Record | None], run: int, lost: Collection[int] = (), late: bool = False
) -> tuple[list[tuple[int, str]], bool]:
    """Return the ranks that block the others, each with a description.

    Args:
        records: The last record of each other rank; ``None`` if there is none yet.
        lost: The ranks that have not reported for long.
        late: Whether the asking rank has waited for as long as it may.

    Returns:
        The ranks, and whether the result is certain. It is not if another rank has found it.
        Then that rank is returned, with the text in its record.
    """
    there = {rank: each for rank, each in records.items() if each is not None}
    raised = [
        (rank, f'raised {each.error}')
        for rank, each in there.items()
        if each.error and each.raised_in >= run
    ]
    if raised:
        return raised, True
    for rank, each in there.items():
        if each.found and each.run >= run:
            return [(rank, each.found)], False
    gone = [
        (rank, _gone(each))
        for rank, each in there.items()
        if each.state == 'ended'
        and each.run < run
        or rank in lost
        and each.state not in ('failed', 'ended')
    ]
    if gone or not late:
        return gone, True
    busy = [(rank, _busy(each)) for rank, each in records.items() if _is_late(each, run)]
    return busy or [
        (rank, _state(each)) for rank, each in there.items() if each.state == 'waits'
    ], True


def _is_late(record: Record | None, run: int) -> bool:
    """Return whether a rank does not wait, although others wait for it."""
    if record is None or record.state == 'computes':
        return True
    return record.run < run and record.state in ('outside', 'failed')


def _has_raised(record: Record) -> bool:
    """Return whether a rank has raised an error in its current run."""
    return bool(record.error) and record.raised_in == record.run


def _gone(record: Record) -> str:
    if record.state == 'ended':
        why = f' after it had raised {record.error}' if _has_raised(record) else ''
        return f'has ended{why}, and takes no part in what others do'
    return f'is gone; its last sign of life was that it {_state(record)}'


def _busy(record: Record | None) -> str:
    if record is None:
        return 'has not made this model'
    if record.state == 'computes':
        return f'does not wait, but {_state(record)}'
    why = f', as it had raised {record.error}' if _has_raised(record) else ''
    return f'is not where the others are{why}, but {_state(record)}'


def _state(record: Record) -> str:
    doing = {'waits': 'waits in ', 'computes': 'computes in '}.get(
        record.state, 'is outside of steps and calls'
    )
    place = ', '.join(filter(None, [record.text, record.where]))
    return f'{doing}{", " if place and not record.text else ""}{place}, for {record.seconds:.1f} s'


#: How many boards were made with a default group, by their ranks.
_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()

#: How long a call waits for the store.
_TIMEOUT = timedelta(seconds=5)


class Board:
    """The records of all ranks. It never raises, because the store ends with its process.

    Args:
        ranks: The ranks. All of them create boards in the same order.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = tuple(ranks)
        self._rank = dist.get_rank()
        self._known: set[int] = set()
        #: Whether there is no store any more.
        self.gone = False
        world: Any = dist.group.WORLD
        base = store = world.get_group_store()
        while isinstance(base, dist.PrefixStore):  # type: ignore[attr-defined]
            base = base.underlying_store
        #: Whether this process hosts the store.
        self.goes_with_us = (
            isinstance(base, dist.TCPStore)  # type: ignore[attr-defined]
            and self._rank == 0
            and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
        )
        made = _made.setdefault(world, Counter())
        made[self._ranks] += 1
        name = zlib.crc32(repr(self._ranks).encode())
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f'torchgpipe.watch/{name}/{made[self._ranks]}', store.clone()
        )
        self._store.set_timeout(_TIMEOUT)

    def say(self, record: Record, news: bool) -> int:
        """Publish the record of this rank, and return the number of news so far."""
        try:
            self._store.set(str(self._rank), record.pack())
            return int(self._store.add('news', int(news)))
        except Exception:  # Whichever it is, there is no store any more.
            self.gone = True
            return 0

    def leave(self, record: Record, lasts: float) -> None:
        """Publish the last record of this rank.

        Args:
            lasts: How long a process that hosts the store waits for the other ranks to leave, in
                seconds. PyTorch warns about calls on a store that has ended.
        """
        self.say(record, True)
        deadline = time.monotonic() + lasts * self.goes_with_us
        try:
            left = 1
            while self._store.add('left', left) < len(self._ranks) and time.monotonic() < deadline:
                left = 0
                time.sleep(0.02)
        except Exception:  # Whichever it is, there is no store any more.
            self.gone = True

    def read(self) -> dict[int, Record | None]:
        """Return the last record of each other rank; ``None`` if there is none yet."""
        others = [rank for rank in self._ranks if rank != self._rank]
        try:
            self._known |= {
                rank
                for rank in others
                if rank not in self._known and self._store.check([str(rank)])
            }
            there = [rank for rank in others if rank in self._known]
            said = self._store.multi_get([*map(str, there)]) if there else []
        except Exception:  # Whichever it is, there is no store any more.
            self.gone = True
            return {}
        found = dict(zip(there, map(Record.parse, said)))
        return {rank: found.get(rank) for rank in others}
