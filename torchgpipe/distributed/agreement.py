"""Agreement of ranks: facts that they exchange, so that all start the same step, or raise.

An exchange is a collective of a few numbers. It also reports a rank that could not begin, such as
for a wrong input, so that no other rank waits for it::

    rank 0    facts ────────┐                       facts of all ranks, or the same error
    rank 1    an error ─────┼── all_gather ──▶      its error
    rank 2    facts ────────┘                       NotBegun: … could not begin on rank 1
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from torchgpipe.shard.collectives import gathered


class NotBegun(RuntimeError):
    """Another rank could not begin."""


class Facts(NamedTuple):
    """The facts of a rank about a task, in numbers that a float64 holds exactly."""

    #: A digest of the settings, which have to be the same on all ranks.
    settings: int = 0
    #: A digest of the state that ranks with the same stages share: modes, which parameters require
    #: grad, and which layers were replaced; or names and shapes of their tensors.
    state: int = 0
    #: A digest of the names of the tensors that ranks may share.
    names: int = 0


F = TypeVar('F', bound=tuple[Any, ...])


def digest(*values: object) -> int:
    """Return a number that is the same for values with the same ``repr``.

    Addresses in them, such as addresses of functions, do not count.
    """
    return zlib.crc32(re.sub(' at 0x[0-9a-f]+', '', repr(values)).encode())


def agree(
    task: str,
    function: Callable[[], F],
    default: F,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[int, F]:
    """Call a function on all ranks of a group, and return the facts of each rank.

    Args:
        function: Returns the facts of this rank; it does not communicate.
        default: The facts of a rank that raises.
        group: The ranks; ``None`` if there is only this one.

    Raises:
        ValueError: The function raised a ValueError on another rank.
        NotBegun: It raised another error there.
    """
    if group is None:
        return {dist.get_rank(): function()}
    error: BaseException | None = None
    facts = default
    try:
        facts = function()
    except BaseException as raised:  # Also an interrupt: the others would wait for this rank.
        error = raised

    local = torch.tensor([error is not None, *facts], dtype=torch.float64, device=device)
    rows = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(rows, local, group)
    numbers = torch.stack(rows).tolist()
    ranks = dist.get_process_group_ranks(group)
    if any(row[0] for row in numbers):
        failed = {rank for rank, row in zip(ranks, numbers) if row[0]}
        _raise_first(task, error, failed, group)
    return {rank: _parse(row[1:], default) for rank, row in zip(ranks, numbers)}


def _parse(row: Sequence[float], default: F) -> F:
    """Return the facts in a row of numbers, which have the types of the default."""
    values = []
    for value, number in zip(default, row):
        values.append(type(value)(number))
    return type(default)(*values)


def _raise_first(
    task: str, error: BaseException | None, failed: set[int], group: dist.ProcessGroup
) -> NoReturn:
    """Raise the error of this rank, or of the first one that failed."""
    text = str(error) if isinstance(error, ValueError) else None
    texts = gathered(text, group)
    if error is not None:
        raise error
    rank = min(failed)
    reason = texts[dist.get_process_group_ranks(group).index(rank)]
    if reason is None:
        raise NotBegun(
            f'{task} could not begin on rank {rank}, so it ended here, too; '
            'look at the error that rank has raised'
        )
    raise ValueError(f'{task} ended on rank {rank}, so it ended here, too: {reason}')


def check_settings(task: str, settings: Mapping[int, int]) -> None:
    """Check that all ranks have the same settings, given their digests.

    Raises:
        RuntimeError: They have different settings.
    """
    first = next(iter(settings))
    for rank, value in settings.items():
        if value != settings[first]:
            raise RuntimeError(
                f'{task} has other settings on rank {rank} than on rank '
                f'{first}; all ranks call it with the same ones'
            )
