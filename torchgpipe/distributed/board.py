"""A board in the store of ``torch.distributed``: short messages of each rank to the others.

It has its own connection because a connection is locked while a call on it waits.
"""
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torchgpipe.distributed.records import Record

__all__ = ['Board']

#: How many boards were made with a default group, by their ranks.
_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()

#: How long a call waits for the store.
_TIMEOUT = timedelta(seconds=5)


class Board:
    """The records of all ranks. It never raises, because the store ends with its process.

    Args:
        ranks: The ranks. All of them create boards in the same order.

    Attributes:
        gone: Whether there is no store any more.
        goes_with_us: Whether this process hosts the store.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = tuple(ranks)
        self._rank = dist.get_rank()
        self._known: set[int] = set()
        self.gone = False
        world: Any = dist.group.WORLD
        base = store = world.get_group_store()
        while isinstance(base, dist.PrefixStore):  # type: ignore[attr-defined]
            base = base.underlying_store
        self.goes_with_us = (
            isinstance(base, dist.TCPStore) and self._rank == 0  # type: ignore[attr-defined]
            and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True')
        made = _made.setdefault(world, Counter())
        made[self._ranks] += 1
        name = zlib.crc32(repr(self._ranks).encode())
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f'torchgpipe.watch/{name}/{made[self._ranks]}', store.clone())
        self._store.set_timeout(_TIMEOUT)

    def say(self, record: Record, news: bool) -> int:
        """Publish the record of this rank.

        Args:
            record: The record.
            news: Whether the other ranks have to read it.

        Returns:
            The number of news so far.
        """
        try:
            self._store.set(str(self._rank), record.pack())
            return int(self._store.add('news', int(news)))
        except Exception:  # Whichever it is, there is no store any more.
            self.gone = True
            return 0

    def leave(self, record: Record, lasts: float) -> None:
        """Publish the last record of this rank.

        Args:
            record: The record.
            lasts: How long a process that hosts the store waits for the other ranks to leave, in
                seconds. PyTorch warns about calls on a store that has ended.
        """
        self.say(record, True)
        deadline = time.monotonic() + lasts * self.goes_with_us
        try:
            left = 1
            while self._store.add('left', left) < len(self._ranks) \
                    and time.monotonic() < deadline:
                left = 0
                time.sleep(.02)
        except Exception:  # Whichever it is, there is no store any more.
            self.gone = True

    def read(self) -> dict[int, Record | None]:
        """Return the last record of each other rank; ``None`` if there is none yet."""
        others = [rank for rank in self._ranks if rank != self._rank]
        try:
            self._known |= {rank for rank in others
                            if rank not in self._known and self._store.check([str(rank)])}
            there = [rank for rank in others if rank in self._known]
            said = self._store.multi_get([*map(str, there)]) if there else []
        except Exception:  # Whichever it is, there is no store any more.
            self.gone = True
            return {}
        found = dict(zip(there, map(Record.parse, said)))
        return {rank: found.get(rank) for rank in others}
