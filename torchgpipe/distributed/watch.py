"""A watch: when a rank raises, dies or hangs, all other ranks end with an error that names it.

:func:`whereabouts` returns the position of a thread: its layer and line, and whether it waits for
other ranks. Another thread reads it from the frames, so it costs the thread nothing.

On each rank, a thread writes the rank's state to the store of ``torch.distributed`` each second.
It reads the other states only when a rank has failed, or its own rank waits for long::

    rank 0    waits ───────────────────────────── named error, or exit status 70
    rank 1    raises ── record: what, where ──┐      ▲
    store     0 waits, 1 raised, 2 waits ◀────┘ ─────┤
    rank 2    waits ───────────────────────────── named error, or exit status 70

If the backend reports a closed connection, the main thread raises an error that names the rank. A
main thread that is still stuck after a grace period cannot be woken, so its process ends.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.base.context import uncollected
from torchgpipe.base.errors import add_note
from torchgpipe.distributed.agreement import NotBegun
from torchgpipe.distributed.reports import Board, Record, blame, doing, names_of, text_of
from torchgpipe.engine.cell import Sequential
from torchgpipe.schedule.messages import Item
from torchgpipe.shard.world import parse_timeout

#: Modules that wait for other ranks if they have the innermost frame, and modules in these that
#: compute on shards.
_WAITING = ('torch.distributed.', 'torchgpipe.distributed.', 'torchgpipe.shard.')
_COMPUTING = ('torch.distributed.tensor',)

#: Modules that only pass calls on.
_PASSED = (
    'torch._ops',
    'torch._library',
    'torch.autograd',
    'torch.overrides',
    'torch.utils',
    'contextlib',
)

#: Packages whose lines do not help a reader: PyTorch, and Python's locks and connections.
_UNSAID = {'torch', *sys.stdlib_module_names}

#: Words in errors of a connection to another rank, where these do not have their own type.
_BACKENDS = ('gloo', 'NCCL')


class Whereabouts(NamedTuple):
    """Where a thread is."""

    waits: bool
    text: str


def whereabouts(thread: int, layer: bool = False) -> Whereabouts:
    """Return where a thread is.

    Args:
        layer: Whether to look for the layer. This keeps the locals of a frame alive until the
            frame ends, so it is for threads that are stuck.
    """
    if not thread:  # It has begun nothing yet.
        return Whereabouts(False, '')
    try:
        return _whereabouts(thread, layer)
    except Exception:  # In Python 3.11, a frame of a running thread can become another object.
        return Whereabouts(False, 'a line that could not be read')


def _whereabouts(thread: int, layer: bool) -> Whereabouts:
    """Return where a thread is, or raise any error if its frames change meanwhile."""
    frames = _frames(thread)
    if not frames:
        return Whereabouts(False, 'no line, as its thread has ended')

    waits = False
    line = ''
    name = ''
    decided = False
    for frame in frames:
        module = str(frame.f_globals.get('__name__', ''))
        if not decided and not module.startswith(_PASSED):
            decided = True
            waits = module.startswith(_WAITING) and not module.startswith(_COMPUTING)
        if not line and module.partition('.')[0] not in _UNSAID:
            line = _line(frame)
        if layer and not name and frame.f_code is Sequential.forward.__code__:
            name = _layer(frame)
    return Whereabouts(waits, name + (line or _line(frames[0])))


def _frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost one first.

    Before Python 3.12, a garbage collection may begin in each of these calls, where Python makes
    the object of a frame. Meanwhile the thread may go on and leave that frame, whose memory then
    belongs to others: the object would crash the process. And ``_current_frames`` holds a lock
    that a thread needs to end, so a finalizer that joins such a thread, such as a watch's, would
    deadlock.
    """
    frames = []
    with uncollected():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f'{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}'


def _layer(frame: FrameType) -> str:
    with uncollected():  # As in `_frames`.
        variables = frame.f_locals
    partition = variables.get('self')
    layer = variables.get('module')
    names = (
        []
        if partition is None or layer is None
        else [name for name, each in partition._modules.items() if each is layer]
    )
    return f"layer '{names[0]}', " if names else ''


def is_from_others(error: BaseException) -> bool:
    """Return whether an error only reports that another rank, or the connection, has failed."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, (dist.DistError, NotBegun)) or (
            isinstance(each, RuntimeError)
            and any(name in str(each) for name in _BACKENDS)
            and _raised_in(each).startswith(_WAITING)
        ):
            return True
        each = each.__cause__
    return False


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that raised an error, or called the code that did."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return ''
    return str(last.tb_frame.f_globals.get('__name__', ''))


#: The exit status of a process that cannot be woken.
EXIT = 70

#: How long a rank looks for the failed rank, and lets its main thread end by itself, in seconds.
GRACE = 5.0

#: How long a rank may be silent, in seconds, once the backend has reported a lost rank, or others
#: have waited for as long as they may. Then it is lost. A layer may hold Python's lock for longer.
SILENCE = 3.0

#: How long a process that hosts the store waits for the last records of others, in seconds.
_LEAVE = 2.0


class Own:
    """The state of a rank's main thread, which writes it; the thread of the watch reads it."""

    def __init__(self) -> None:
        self.run = self.count = self.thread = 0
        self.inside = False
        self.what = ''
        self.now: Item | None = None
        #: The text of its error, empty if the error results from other ranks; ``None`` if there
        #: is none.
        self.error: str | None = None
        #: The run of its last own error, and the error.
        self.raised = 0, ''
        #: The failure of other ranks.
        self.found = ''

    def begin(self, what: str) -> None:
        """Begin a run."""
        self.what = what
        self.now = None
        self.error = None
        self.found = ''
        self.thread = threading.get_ident()
        self.run += 1
        self.inside = True

    def end(self) -> None:
        """End the run."""
        self.inside = False
        self.now = None


class WatchThread:
    """The work of a watch's thread.

    Args:
        limit: How long a rank may wait, in seconds.
    """

    def __init__(self, own: Own, mesh: DeviceMesh, limit: float) -> None:
        self._own = own
        self._limit = limit
        self._names = names_of(mesh)
        self.name = self._names[dist.get_rank()]
        self._period = min(1.0, limit / 10)
        self._board = Board(self._names)
        self._wake = threading.Event()
        self._answered = threading.Event()
        self._stops = False
        self._beat = self._cleared = 0
        #: The last seen position of the main thread, without and with its line; and the times
        #: since when it has been there.
        self._mark: Any = None
        self._line: Any = None
        self._since = self._line_since = 0.0
        #: The time since when the main thread has asked for the failed rank.
        self._asked = 0.0
        self._where = Whereabouts(False, '')
        #: By rank, its last beat, and the time when that was first seen.
        self._beats: dict[int, tuple[int, float]] = {}
        #: The failed ranks.
        self._found = ''
        #: The time since which the main thread has been stuck because of them.
        self._found_at = 0.0
        #: The errors of turns that were reported.
        self._reported: set[str] = set()

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
            self._attempt(self.turn)
            self._wake.wait(min(self._period, 0.1) if self._asked else self._period)
            self._wake.clear()
        self._attempt(self._leave)

    def _attempt(self, task: Callable[[float], None]) -> None:
        """Run a task now. An error is reported, but the loop continues to watch the ranks."""
        try:
            task(time.monotonic())
        except Exception as error:
            with suppress(Exception):  # The process may have no stderr.
                text = text_of(error)
                if text not in self._reported:
                    self._reported.add(text)
                    print(
                        f'torchgpipe: the watch of {self.name} continues after {text}',
                        file=sys.stderr,
                        flush=True,
                    )

    def _leave(self, now: float) -> None:
        """Publish the last record of this rank."""
        if not self._board.gone:
            lasts = _LEAVE if self._own.error is None else 0.0
            self._board.leave(self._record(now, 'ended'), lasts)

    def turn(self, now: float) -> None:
        """Do one turn of the loop, at some time."""
        asks = self._own.error is not None and not self._answered.is_set()
        self._asked = (self._asked or now) if asks else 0.0
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
            self._mark = mark
            self._since = now
            self._found = ''
            if own.error is None:
                own.found = ''
        self._where = whereabouts(own.thread, own.inside and now - self._since > self._period)
        line = mark, self._where
        if line != self._line:
            self._line = line
            self._line_since = now

    def _say(self, now: float, news: bool = False) -> int:
        """Publish the state of the rank, and return the number of news so far.

        Args:
            news: Whether the others have to read it. If the rank has failed, they always have to.
        """
        if self._board.gone:
            return 0
        own = self._own
        asks = own.error is not None and not self._answered.is_set()
        if own.error is not None:
            state = 'failed'
        elif not own.inside:
            state = 'outside'
        elif self._where.waits:
            state = 'waits'
        else:
            state = 'computes'
        return self._board.say(self._record(now, state), news or asks)

    def _record(self, now: float, state: str) -> Record:
        own = self._own
        self._beat += 1
        since = self._line_since if state == 'waits' else self._since
        text = ': '.join(filter(None, [own.what, doing(own.now)])) if own.inside else ''
        return Record(
            self._beat,
            own.run,
            state,
            now - since,
            text,
            self._where.text,
            own.raised[1],
            own.raised[0],
            own.found,
        )

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
        waited = now - self._line_since if self._where.waits else 0.0
        if news == self._cleared and waited < self._limit and not self._board.gone:
            self._beats.clear()
            return
        found, is_sure = self._blame(now, waited >= self._limit + SILENCE)
        if not found:
            self._cleared = news
            self._found = ''
            self._own.found = ''
        elif not self._found:
            self._found = found
            self._found_at = now
            if is_sure:  # The rank that is stuck may not look itself.
                self._own.found = found
                self._say(now, True)
        elif now - self._found_at >= GRACE:
            self._end(now)

    def _blame(self, now: float, late: bool) -> tuple[str, bool]:
        """Return the ranks that block the main thread, and whether the result is certain."""
        records = {} if self._board.gone else self._board.read()
        if self._board.gone:
            return self._found or (
                'the store of torch.distributed has gone with the process that had it: that of '
                f'{self._names.get(0, "rank 0")}, or torchrun'
            ), False
        lost = []
        for rank, each in records.items():
            beat = 0 if each is None else each.beat
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
            elif each is not None and now - self._beats[rank][1] >= SILENCE:
                lost.append(rank)
        found, is_sure = blame(records, self._own.run, lost, late)
        if not is_sure:
            ((rank, text),) = found
            return f'{self._names[rank]} has found that {text}', False
        return '; and '.join(f'{self._names[rank]} {text}' for rank, text in found), True

    def _end(self, now: float) -> None:
        with suppress(Exception):  # The process may have no stderr.
            what = ': '.join(filter(None, [self._own.what, doing(self._own.now)]))
            print(
                f'torchgpipe: {self.name} is stuck in {what}, {self._where.text}, for '
                f'{now - self._line_since:.1f} s; its process ends, as {self._found}',
                file=sys.stderr,
                flush=True,
            )
        os._exit(EXIT)


#: How long a rank waits by default, as in ``torch.distributed``, in seconds.
_LIMIT = 1800.0

#: The longest wait for a thread that is in a call of the store, in seconds.
_LAST_CALL = 10.0

P = ParamSpec('P')
T = TypeVar('T')


class Watch:
    """The watch of one rank over its model.

    Args:
        mesh: The ranks of the model; ``None`` to watch no other rank.
        timeout: How long a rank may wait for others: seconds, or a ``timedelta``.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout: float | timedelta | None = None) -> None:
        self._depth = 0
        self._limit = _LIMIT if timeout is None else parse_timeout(timeout).total_seconds()
        self._failed = False
        self._own = own = Own()
        self._watcher: WatchThread | None = None
        if mesh is not None and mesh.size() > 1 and mesh.get_coordinate() is not None:
            self._watcher = watcher = WatchThread(own, mesh, self._limit)
            thread = threading.Thread(target=watcher.loop, name='torchgpipe watch', daemon=True)
            thread.start()
            # Also at exit: a thread must not be in a call of the store when Python ends.
            weakref.finalize(self, _stop, watcher, thread, os.getpid())

    def at(self, now: Item | None) -> None:
        """Record the next action or message of a step."""
        own = self._own
        own.now = now
        own.count += 1

    def patience(self) -> float:
        """Return how long to wait for files of other ranks, in seconds; less after a failure."""
        return GRACE if self._failed else self._limit

    @contextmanager
    def run(self, what: str) -> Iterator[None]:
        """Watch all ranks while they run a task together.

        Raises:
            RuntimeError: Another rank has failed; it is named.
        """
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            self._failed = False
            self._own.begin(what)
            try:
                yield
            except BaseException as error:
                self._fail(error)
                raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._own.end()

    def _fail(self, error: BaseException) -> None:
        """Report an error to the others; if it results from another rank, find that rank."""
        self._failed = True
        if self._watcher is None:
            return
        own = self._own
        name = self._watcher.name
        at = own.what + ''.join(f': {each}' for each in [doing(own.now)] if each)
        add_note(error, f'on {name}, in {at}')
        if not is_from_others(error):
            self._watcher.tell(text_of(error))
            return
        found = self._watcher.tell('')
        if found:
            raise RuntimeError(f'{at}, ended on {name}, as {found}') from error


def watched(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that runs a method of a model under its watch."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            model: Any = args[0]
            with model._watch.run(what):
                return method(*args, **kwargs)

        return run

    return decorate


def _stop(watcher: WatchThread, thread: threading.Thread, process: int) -> None:
    # A forked child does not have the thread, and may have a lock that is never released.
    if process == os.getpid():
        watcher.stop()
        if thread is not threading.current_thread():
            thread.join(_LAST_CALL)
