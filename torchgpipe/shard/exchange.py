"""The exchange of facts: a few numbers of each rank, which all ranks get.

Rows of numbers go up a tree of ranks, and the rows of all ranks come down::

    rank 1   ──┐                      ┌──▶ rank 1   ──┐                ┌──▶ rank 9
      …        ├──▶ rank 0 ── all ────┤      …        ├──▶ …, and all ─┤      …
    rank 8   ──┘    adds rows         └──▶ rank 8   ──┘                └──▶ rank 16

Each rank starts the receives of the next exchange at the end of this one. So a message arrives at
once, and no rank answers it. Where a process has one core, an answer may cost a time slice: the
thread of Gloo that reads it waits for a lock, and keeps the core from the thread with the lock.

The numbers are in the memory of the host, so no rank waits for its device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.base.devices import CPU

#: The most numbers of a rank.
WIDTH = 16

#: How many ranks send their rows to the same rank.
FAN = 8

#: The tag of the messages. Others in the group of all ranks have no tag, which is 0.
_TAG = 1 << 20


class _Message(NamedTuple):
    """A message in flight, whose tensor may not be used yet."""

    rows: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Wait until it has arrived, or was sent; return its rows."""
        self.work.wait()
        return self.rows


class _Place:
    """The place of this rank in the tree of a group, with the receives of its next exchange."""

    def __init__(self, group: ProcessGroup) -> None:
        rank = group.rank()
        first = FAN * rank + 1
        self._parents = [(rank - 1) // FAN] if rank else []
        self._children = range(first, min(first + FAN, group.size()))
        self._sends: list[_Message] = []
        self._start_receives(group)

    def exchange(self, numbers: Sequence[float], group: ProcessGroup) -> Tensor:
        """Return the rows of all ranks."""
        for send in self._sends:
            send.wait()
        self._sends = []

        rows = torch.zeros(group.size(), WIDTH, dtype=torch.float64)
        rows[group.rank(), : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        for receive in self._from_children:
            rows += receive.wait()  # Each rank has zeros in place of the rows of others.
        for parent in self._parents:
            self._send(rows, parent, group)
        for receive in self._from_parents:
            rows = receive.wait()
        for child in self._children:
            self._send(rows, child, group)

        self._start_receives(group)
        return rows

    def _send(self, rows: Tensor, rank: int, group: ProcessGroup) -> None:
        self._sends.append(_Message(rows, group.send([rows], rank, _TAG)))

    def _start_receives(self, group: ProcessGroup) -> None:
        self._from_children = [_receive(rank, group) for rank in self._children]
        self._from_parents = [_receive(rank, group) for rank in self._parents]


def _receive(rank: int, group: ProcessGroup) -> _Message:
    rows = torch.empty(group.size(), WIDTH, dtype=torch.float64)
    return _Message(rows, group.recv([rows], rank, _TAG))


#: The place of this rank in each group that has exchanged facts.
_places: WeakKeyDictionary[ProcessGroup, _Place] = WeakKeyDictionary()


def exchange(
    numbers: Sequence[float], group: ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Return the numbers of all ranks of a group. All of them call it, in the same order.

    Args:
        numbers: Up to ``WIDTH`` numbers that a float64 holds exactly.
        device: The device of collectives, for a group without a backend for the host.

    Returns:
        By rank, ``WIDTH`` numbers. The ones that a rank does not have are 0.
    """
    if not _has_host_backend(group):
        return _exchange_on_device(numbers, group, device)
    place = _places.pop(group, None) or _Place(group)
    rows: list[list[float]] = place.exchange(numbers, group).tolist()
    # Not after an error, when receives may be missing.
    _places[group] = place
    return rows


def _has_host_backend(group: ProcessGroup) -> bool:
    """Return whether a group has a backend for tensors in the memory of the host."""
    try:
        group._get_backend(CPU)
    except RuntimeError:  # as in a group of NCCL alone
        return False
    return True


def _exchange_on_device(
    numbers: Sequence[float], group: ProcessGroup, device: torch.device
) -> list[list[float]]:
    row = torch.zeros(WIDTH, dtype=torch.float64, device=device)
    row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    rows = row.new_empty(group.size(), WIDTH)
    dist.all_gather([*rows], row, group)
    return rows.tolist()
