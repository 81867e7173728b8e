"""Failures: name the ranks that did not take part in a collective.

When a rank raises, the others wait for it in their next collective. As soon as its process ends,
those that are connected with it there get an error which names an address, and the rest wait for
them in turn. So each rank that fails leaves a note in the group's store, and each that waits for
long looks for such notes. Who has left none after a while is the one that all had waited for::

    rank 0    collective ── fails ── note ─┐
    rank 1    raises, ends                 ├─▶ 0, 2, 3 have left a note: it was 1
    rank 2    collective ── fails ── note ─┤
    rank 3    collective ── waits ── note ─┘

On accelerators a collective is only put into a queue. There NCCL's watchdog ends a process whose
collective does not come to its end.
"""
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchgpipe.context import check_order

__all__ = ['complete']

#: For so long a rank waits for the others before it looks for their notes.
LOOK = timedelta(seconds=0.5)

#: For so long it waits for the notes of the others, which look for its own that often.
GRACE = timedelta(seconds=5)

#: How many collectives of a group have failed on this rank. A failure that all had in common, and
#: went on from, is none of the next one's.
_failures: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def complete(start: Callable[[], Any], group: ProcessGroup, on_cpu: bool) -> None:
    """Start a collective and see it through.

    Args:
        start: Starts it, and gives the work under way.
        group: The ranks that take part.
        on_cpu: Whether its tensors are on the CPU.

    Raises:
        RuntimeError: It failed, and the message names the ranks that were not there; or this is a
            cell of a pipeline whose collectives have no order.
    """
    check_order()
    work = start()
    try:
        if on_cpu:
            _wait(work, group)
        else:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(_message(group)) from error


def _wait(work: Any, group: ProcessGroup) -> None:
    """Wait for what is under way, but not for what can not come to its end any more."""
    while True:
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            if work.is_completed() or group.get_group_store().check([_note(group)]):
                raise


def _note(group: ProcessGroup) -> str:
    return f'torchgpipe.shard/failed/{_failures.get(group, 0)}'


def _message(group: ProcessGroup) -> str:
    store, ranks = group.get_group_store(), dist.get_process_group_ranks(group)
    note = _note(group)
    store.set(f'{note}/{group.rank()}', '')
    store.set(note, '')
    _failures[group] = _failures.get(group, 0) + 1
    missing: list[int] = []
    for i, rank in enumerate(ranks):
        try:
            store.wait([f'{note}/{i}'], timedelta(0) if missing else GRACE)
        except RuntimeError:
            missing.append(rank)
    where = f'a collective of the group of ranks {ranks} failed on rank {ranks[group.rank()]}'
    if not missing:
        return f'{where}, and on all others, for the reason above'
    names = ('rank ' if len(missing) == 1 else 'ranks ') + ', '.join(map(str, missing))
    return (f'{where}: {names} did not take part. There, an error was raised before, or the '
            'process was ended, or other layers were called: look at what it has printed. '
            'TORCH_DISTRIBUTED_DEBUG=DETAIL lets ranks compare what they are about to do')
