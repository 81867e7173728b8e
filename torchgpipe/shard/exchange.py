"""The exchange of facts: a few numbers of each rank, which all ranks get.

Each rank adds its row to the rows of the ranks below it in a tree. The first rank has all rows,
which come down again::

    ranks 9 to 16 ── rows ──▶ rank 1 ──┐              ┌── all rows ──▶ rank 1 ──▶ ranks 9 to 16
                                …      ├──▶ rank 0 ───┤                  …
                              rank 8 ──┘              └── all rows ──▶ rank 8

Gloo sends a message when its receiver has told that it waits for it. Each rank starts the receives
of the next exchange at the end of this one, so it has told that long before. Otherwise a thread of
the sender would have to react to it, and wait for a lock. That takes a time slice of the system,
mostly 4 ms, where a process has one core.

The numbers are in the memory of the host, so no rank waits for its device. Groups without a
backend for the host, as of NCCL alone, exchange them on the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.base.devices import CPU
from torchgpipe.base.private import has_backend

#: The most numbers of a rank.
WIDTH = 16

#: How many ranks send their rows to the same rank.
FAN = 8


class _RowsInFlight(NamedTuple):
    """A message that is on its way, so that its tensor may not be used yet."""

    rows: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Wait until it has arrived, or was sent; return its rows."""
        self.work.wait()
        return self.rows


class _TreeNode:
    """This rank in the tree of a group, with the receives of its next exchange."""

    def __init__(self, group: ProcessGroup) -> None:
        rank = group.rank()
        first = FAN * rank + 1
        self._parents = [(rank - 1) // FAN] if rank else []
        self._children = range(first, min(first + FAN, group.size()))
        self._sends: list[_RowsInFlight] = []
        self._start_receives(group)

    def exchange(self, numbers: Sequence[float], group: ProcessGroup) -> Tensor:
        """Return the rows of all ranks."""
        for send in self._sends:
            send.wait()
        self._sends = []

        rows = torch.zeros(group.size(), WIDTH, dtype=torch.float64, device=CPU)
        rows[group.rank()] = _row(numbers, CPU)
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
        self._sends.append(_RowsInFlight(rows, group.send([rows], rank, 0)))

    def _start_receives(self, group: ProcessGroup) -> None:
        self._from_children = [_receive(rank, group) for rank in self._children]
        self._from_parents = [_receive(rank, group) for rank in self._parents]


def _receive(rank: int, group: ProcessGroup) -> _RowsInFlight:
    rows = torch.empty(group.size(), WIDTH, dtype=torch.float64, device=CPU)
    return _RowsInFlight(rows, group.recv([rows], rank, 0))


def _row(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return the numbers of this rank, and zeros in place of further ones."""
    if len(numbers) > WIDTH:
        raise ValueError(f'a rank has {len(numbers)} numbers, and at most {WIDTH} are exchanged')
    zeros = [0.0] * (WIDTH - len(numbers))
    return torch.tensor([*numbers, *zeros], dtype=torch.float64, device=device)


#: This rank in the tree of each group; ``None`` after an exchange that has failed, when messages
#: of it may still arrive.
_nodes: WeakKeyDictionary[ProcessGroup, _TreeNode | None] = WeakKeyDictionary()


def exchange(
    numbers: Sequence[float], group: ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Return the numbers of all ranks of a group, in which there are no other messages.

    All ranks call it, in the same order.

    Args:
        numbers: Up to ``WIDTH`` numbers that a float64 holds exactly.
        device: The device of collectives, for a group without a backend for the host.

    Returns:
        By rank, ``WIDTH`` numbers. The ones that a rank does not have are 0.

    Raises:
        RuntimeError: An earlier exchange in this group has failed.
    """
    if not has_backend(group, CPU):
        return _exchange_on_device(numbers, group, device)
    if group not in _nodes:
        _nodes[group] = _TreeNode(group)
    node = _nodes[group]
    if node is None:
        raise RuntimeError(
            'an exchange between these processes was interrupted or has failed, so they cannot go '
            'on together: end all of them, and start again from a checkpoint'
        )
    _nodes[group] = None
    rows: list[list[float]] = node.exchange(numbers, group).tolist()
    _nodes[group] = node
    return rows


def _exchange_on_device(
    numbers: Sequence[float], group: ProcessGroup, device: torch.device
) -> list[list[float]]:
    row = _row(numbers, device)
    rows = row.new_empty(group.size(), WIDTH)
    dist.all_gather([*rows], row, group)
    return rows.tolist()
