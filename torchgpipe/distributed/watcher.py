"""The thread of a watch: it reports its rank's state, and finds a rank that blocks others."""
import os
import sys
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.distributed.board import Board
from torchgpipe.distributed.records import Record, blame, doing, names_of
from torchgpipe.distributed.whereabouts import Whereabouts, whereabouts
from torchgpipe.schedule import Action
from torchgpipe.schedule.lowering import Message

__all__ = ['EXIT', 'GRACE', 'Own', 'Watcher']

#: The exit status of a process that cannot be woken.
EXIT = 70

#: How long a rank looks for the failed rank, and lets its main thread end by itself, in seconds.
GRACE = 5.

#: How long a rank may be silent, in seconds, once the backend has reported a lost rank, or others
#: have waited for as long as they may. Then it is lost. A layer may hold Python's lock for longer.
SILENCE = 3.

#: How long a process that hosts the store waits for the last records of others, in seconds.
_LEAVE = 2.


class Own:
    """The state of a rank's main thread, which writes it; the thread of the watch reads it."""

    def __init__(self) -> None:
        self.run = self.count = self.thread = 0
        self.inside = False
        self.what = ''
        self.now: Action | Message | None = None
        #: The text of its error, empty if the error results from other ranks; ``None`` if there
        #: is none.
        self.error: str | None = None
        #: The run of its last own error, and the error.
        self.raised = 0, ''
        #: The failure of other ranks.
        self.found = ''

    def begin(self, what: str) -> None:
        """Begin a run."""
        self.what, self.now, self.error, self.found = what, None, None, ''
        self.thread = threading.get_ident()
        self.run += 1
        self.inside = True

    def end(self) -> None:
        """End the run."""
        self.inside, self.now = False, None


class Watcher:
    """The work of a watch's thread.

    Args:
        own: The state of the main thread.
        mesh: The ranks.
        limit: How long a rank may wait, in seconds.
    """

    def __init__(self, own: Own, mesh: DeviceMesh, limit: float) -> None:
        self._own, self._limit = own, limit
        self._names = names_of(mesh)
        self.name = self._names[dist.get_rank()]
        self._period = min(1., limit / 10)
        self._board = Board(self._names)
        self._wake, self._answered = threading.Event(), threading.Event()
        self._stops = False
        self._beat = self._cleared = 0
        #: The last seen position of the main thread, without and with its line; and the times
        #: since when it has been there.
        self._mark: Any = None
        self._line: Any = None
        self._since = self._line_since = 0.
        #: The time since when the main thread has asked for the failed rank.
        self._asked = 0.
        self._where = Whereabouts(False, '')
        #: By rank, its last beat, and the time when that was first seen.
        self._beats: dict[int, tuple[int, float]] = {}
        #: The failed ranks, and since when the main thread has been stuck because of them.
        self._found, self._found_at = '', 0.

    def tell(self, error: str) -> str:
        """Report an error of the main thread to others, and return the ranks that caused it.

        Args:
            error: The error; empty if it results from other ranks.
        """
        self._answered.clear()
        if error:
            self._own.raised = self._own.run, error
        self._own.error = error
        self._wake.set()
        self._answered.wait(2 * GRACE)
        found = self._own.found
        if self._board.goes_with_us:  # The others read it before this process may end.
            time.sleep(2 * self._period)
        return found

    def stop(self) -> None:
        """End the loop."""
        self._stops = True
        self._wake.set()

    def loop(self) -> None:
        """Publish the state of the main thread, and check the others, until the watch stops."""
        while not self._stops:
            self.turn(time.monotonic())
            self._wake.wait(min(self._period, .1) if self._asked else self._period)
            self._wake.clear()
        if not self._board.gone:
            lasts = _LEAVE if self._own.error is None else 0.
            self._board.leave(self._record(time.monotonic(), 'ended'), lasts)

    def turn(self, now: float) -> None:
        """Do one turn of the loop, at some time."""
        asks = self._own.error is not None and not self._answered.is_set()
        self._asked = (self._asked or now) if asks else 0.
        self._see(now)
        news = self._say(now)
        if asks and (self._own.error or self._find_for_main(now)):
            self._answered.set()
        elif not asks and self._own.inside:
            self._look(now, news)

    def _see(self, now: float) -> None:
        """Record where the main thread is."""
        own = self._own
        mark = own.run, own.count, own.inside
        if mark != self._mark:
            self._mark, self._since, self._found = mark, now, ''
            if own.error is None:
                own.found = ''
        self._where = whereabouts(own.thread, own.inside and now - self._since > self._period)
        line = mark, self._where
        if line != self._line:
            self._line, self._line_since = line, now

    def _say(self, now: float, news: bool = False) -> int:
        """Publish the state of the rank, and return the number of news so far.

        Args:
            now: The time.
            news: Whether the others have to read it. If the rank has failed, they always have to.
        """
        if self._board.gone:
            return 0
        own = self._own
        asks = own.error is not None and not self._answered.is_set()
        return self._board.say(self._record(
            now, 'failed' if own.error is not None else 'outside' if not own.inside else
            'waits' if self._where.waits else 'computes'), news or asks)

    def _record(self, now: float, state: str) -> Record:
        own = self._own
        self._beat += 1
        since = self._line_since if state == 'waits' else self._since
        text = ': '.join(filter(None, [own.what, doing(own.now)])) if own.inside else ''
        return Record(self._beat, own.run, state, now - since, text, self._where.text,
                      own.raised[1], own.raised[0], own.found)

    def _find_for_main(self, now: float) -> bool:
        """Find the ranks that caused an error of the main thread; return whether it is over."""
        late = now - self._asked >= GRACE
        found, is_sure = self._blame(now, late)
        self._own.found = found
        if found and is_sure:
            self._say(now)
        return bool(found) or late

    def _look(self, now: float, news: int) -> None:
        """Check the others; end the process if its main thread is stuck for good."""
        waited = now - self._line_since if self._where.waits else 0.
        if news == self._cleared and waited < self._limit and not self._board.gone:
            self._beats.clear()
            return
        found, is_sure = self._blame(now, waited >= self._limit + SILENCE)
        if not found:
            self._cleared, self._found, self._own.found = news, '', ''
        elif not self._found:
            self._found, self._found_at = found, now
            if is_sure:  # The rank that is stuck may not look itself.
                self._own.found = found
                self._say(now, True)
        elif now - self._found_at >= GRACE:
            self._end(now)

    def _blame(self, now: float, late: bool) -> tuple[str, bool]:
        """Return the ranks that block the main thread, and whether the result is certain.

        Args:
            now: The time.
            late: Whether the main thread has waited for long enough.
        """
        records = {} if self._board.gone else self._board.read()
        if self._board.gone:
            return self._found or (
                'the store of torch.distributed has gone with the process that had it: that of '
                f'{self._names.get(0, "rank 0")}, or torchrun'), False
        lost = []
        for rank, each in records.items():
            beat = 0 if each is None else each.beat
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
            elif each is not None and now - self._beats[rank][1] >= SILENCE:
                lost.append(rank)
        found, is_sure = blame(records, self._own.run, lost, late)
        if not is_sure:
            (rank, text), = found
            return f'{self._names[rank]} has found that {text}', False
        return '; and '.join(f'{self._names[rank]} {text}' for rank, text in found), True

    def _end(self, now: float) -> None:
        what = ': '.join(filter(None, [self._own.what, doing(self._own.now)]))
        print(f'torchgpipe: {self.name} is stuck in {what}, {self._where.text}, for '
              f'{now - self._line_since:.1f} s; its process ends, as {self._found}',
              file=sys.stderr, flush=True)
        os._exit(EXIT)
