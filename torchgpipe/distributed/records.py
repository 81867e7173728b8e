"""Records: each rank's report, and the search for the failed rank in all reports."""
import json
import sys
import traceback
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.schedule import Action
from torchgpipe.schedule.lowering import Message, Receive

__all__ = ['Record', 'blame', 'doing', 'names_of', 'text_of']

_KINDS = {'F': 'forward', 'R': 'recomputation', 'B': 'backward', 'I': 'backward to inputs',
          'W': 'backward to weights'}

#: An error may have the text of a whole traceback in it.
_LONGEST = 4000


class Record(NamedTuple):
    """What a rank says of itself.

    Args:
        beat: How often it has said something.
        run: How many steps, calls and the like it has begun, with the one in which it is.
        state: ``'outside'`` of these, ``'computes'``, ``'waits'``, ``'failed'``; or ``'ended'``,
            if its process or its model has.
        seconds: For how long that has been so.
        text: What it does.
        where: In which layer and line.
        error: What it has raised last. It stays there when the rank goes on after that, as others
            may look for it later.
        raised_in: In which run that was.
        found: What it has found out about others in this run.
    """

    beat: int = 0
    run: int = 0
    state: str = 'outside'
    seconds: float = 0.
    text: str = ''
    where: str = ''
    error: str = ''
    raised_in: int = 0
    found: str = ''

    def pack(self) -> str:
        """Return it as text."""
        return json.dumps(self)

    @classmethod
    def parse(cls, text: bytes) -> 'Record':
        """Read it."""
        return cls(*json.loads(text))


def names_of(mesh: DeviceMesh) -> dict[int, str]:
    """Return what errors call each rank of a mesh: by its number and its place.

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


def doing(now: Action | Message | None) -> str:
    """Say what a rank does.

    >>> doing(Action(1, 'F', 0))
    'forward of stage 1, micro-batch 0'
    """
    if isinstance(now, Message):
        (stage, kind, i), verb = now.action, 'receive' if isinstance(now, Receive) else 'send'
        return (f'{verb} of what {_KINDS[kind]} of stage {stage} has for stage {now.stage}, '
                f'micro-batch {i}')
    if isinstance(now, Action):
        return f'{_KINDS[now.kind]} of stage {now.stage}, micro-batch {now.micro_batch}'
    return ''


def text_of(error: BaseException) -> str:
    """Return an error as the last lines of its traceback, with its notes."""
    lines = traceback.format_exception_only(type(error), error)
    if sys.version_info < (3, 11):
        lines += [*getattr(error, '__notes__', ())]
    return '\n'.join(line.rstrip() for line in lines)[:_LONGEST]


def blame(records: Mapping[int, Record | None], run: int, lost: Collection[int] = (),
          late: bool = False) -> tuple[list[tuple[int, str]], bool]:
    """Return the ranks that others wait for in vain, each with what is to be said of it.

    Args:
        records: What ranks have said last, without the one that asks; ``None`` if nothing yet.
        run: The number of the run in which that one is.
        lost: Those that have said nothing for long.
        late: Whether that one has waited for as long as it may.

    Returns:
        They, and whether it is sure; it is not where another rank has found it out. That rank is
        the one named then, and the text is its own.
    """
    there = {rank: each for rank, each in records.items() if each is not None}
    raised = [(rank, f'raised {each.error}') for rank, each in there.items()
              if each.error and each.raised_in >= run]
    if raised:
        return raised, True
    for rank, each in there.items():
        if each.found and each.run >= run:
            return [(rank, each.found)], False
    gone = [(rank, _gone(each)) for rank, each in there.items()
            if each.state == 'ended' and each.run < run
            or rank in lost and each.state not in ('failed', 'ended')]
    if gone or not late:
        return gone, True
    busy = [(rank, _busy(each)) for rank, each in records.items() if _is_late(each, run)]
    return busy or [(rank, _state(each)) for rank, each in there.items()
                    if each.state == 'waits'], True


def _is_late(record: Record | None, run: int) -> bool:
    """Return whether a rank does not wait, though it should be where others wait for it."""
    if record is None or record.state == 'computes':
        return True
    return record.run < run and record.state in ('outside', 'failed')


def _has_raised(record: Record) -> bool:
    """Return whether a rank has raised something in the run in which it is."""
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
        record.state, 'is outside of steps and calls')
    place = ', '.join(filter(None, [record.text, record.where]))
    return f"{doing}{', ' if place and not record.text else ''}{place}, for {record.seconds:.1f} s"
