"""Failures: when a rank raises, dies or hangs, all other ranks end with an error that names it.

Each rank has a :class:`Monitor`, a thread with a link to the first rank (:mod:`.links`)::

    rank 0    waits ─────────────────── failure ──▶ named error, or exit status 70
    rank 1    raises ── 'raised' ──▶ rank 0 │
    rank 2    waits ◀──── 'failure' ────────┘ ────▶ named error, or exit status 70

=====================  =======================================================================
failure of a rank      noticed by
=====================  =======================================================================
it raises              its message, sent before the error leaves the step
its process ends       its link is closed, at once
its host is lost       its link: no answer of the kernel for ``UNREACHABLE`` seconds
it is stuck            the ranks that wait for it for ``timeout``: all tell where they are
=====================  =======================================================================

If the backend reports a closed connection, the main thread raises an error that names the rank. A
main thread that is still stuck after a grace period cannot be woken, so its process ends.

:func:`whereabouts` returns the position of a thread: its layer and line, and whether it waits for
other ranks. The monitor reads it from the frames, so it costs the main thread nothing.
"""

import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.base.context import uncollected
from torchgpipe.base.errors import add_note
from torchgpipe.distributed.agreement import NotBegun
from torchgpipe.distributed.links import MeetingPoint, RankLink, Unreachable
from torchgpipe.engine.cell import Sequential
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import Item, Message, Receive
from torchgpipe.shard.world import parse_timeout

# The position of a thread.

#: Modules that wait for other ranks if they have the innermost frame, and modules in these that
#: compute on shards.
_WAITING = ('torch.distributed.', 'torchgpipe.distributed.', 'torchgpipe.shard.')
_COMPUTING = ('torch.distributed.tensor',)

#: Modules that only pass calls on.
_PASSING = (
    'torch._ops',
    'torch._library',
    'torch.autograd',
    'torch.overrides',
    'torch.utils',
    'contextlib',
)

#: Packages whose lines do not help a reader: PyTorch, and Python's locks and connections.
_UNHELPFUL = {'torch', *sys.stdlib_module_names}


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
        if not decided and not module.startswith(_PASSING):
            decided = True
            waits = module.startswith(_WAITING) and not module.startswith(_COMPUTING)
        if not line and module.partition('.')[0] not in _UNHELPFUL:
            line = _line(frame)
        if layer and not name and frame.f_code is Sequential.forward.__code__:
            name = _layer(frame)
    return Whereabouts(waits, name + (line or _line(frames[0])))


def _frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost one first.

    Before Python 3.12, a garbage collection may begin in each of these calls, where Python makes
    the object of a frame. Meanwhile the thread may go on and leave that frame, whose memory then
    belongs to others: the object would crash the process. And ``_current_frames`` holds a lock
    that a thread needs to end, so a finalizer that joins such a thread, such as a monitor's, would
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
    if partition is None or layer is None:
        return ''
    for name, module in partition._modules.items():
        if module is layer:
            return f"layer '{name}', "
    return ''


# Descriptions.

_KINDS = {
    'F': 'forward',
    'R': 'recomputation',
    'B': 'backward',
    'I': 'backward to inputs',
    'W': 'backward to weights',
    'UNSHARD': 'gather of the parameters',
    'RESHARD': 'freeing of the parameters',
    'REDUCE_GRAD': 'reduction of the gradients',
}

#: An error may have the text of a whole traceback in it.
_LONGEST = 4000


def names_of(mesh: DeviceMesh) -> dict[int, str]:
    """Return the name of each rank of a mesh, for errors: its number and its place.

    >>> import torch
    >>> from torchgpipe.distributed import init_mesh
    >>> names_of(init_mesh(device_type='cpu'))
    {0: 'rank 0 (data 0, pipe 0, tensor 0)'}
    >>> torch.distributed.destroy_process_group()
    """
    axes = mesh.mesh_dim_names or ()
    names = {}
    for place in (mesh.mesh >= 0).nonzero().tolist():
        rank = int(mesh.mesh[tuple(place)])
        where = ', '.join(f'{axis} {index}' for axis, index in zip(axes, place))
        names[rank] = f'rank {rank} ({where})'
    return names


def describe(item: Item | None) -> str:
    """Describe an item in the row of a rank.

    >>> describe(Action(1, 'F', 0))
    'forward of stage 1, micro-batch 0'
    """
    if item is None:
        return ''
    if isinstance(item, Message):
        stage, kind, i = item.action
        verb = 'receive' if isinstance(item, Receive) else 'send'
        return (
            f'{verb} of the result of {_KINDS[kind]} of stage {stage} for stage {item.stage}, '
            f'micro-batch {i}'
        )
    text = f'{_KINDS[item.kind]} of stage {item.stage}'
    if isinstance(item, Action):
        text += f', micro-batch {item.micro_batch}'
    return text


def text_of(error: BaseException) -> str:
    """Return an error as the last lines of its traceback, with its notes."""
    lines = traceback.format_exception_only(type(error), error)
    if sys.version_info < (3, 11):
        lines += [*getattr(error, '__notes__', ())]
    return '\n'.join(line.rstrip() for line in lines)[:_LONGEST]


#: Words in errors of a connection to another rank, where these do not have their own type.
_BACKENDS = ('gloo', 'NCCL')


def is_from_others(error: BaseException) -> bool:
    """Return whether an error only reports that another rank, or the connection, has failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (dist.DistError, NotBegun)):
            return True
        names_backend = any(name in str(cause) for name in _BACKENDS)
        if isinstance(cause, RuntimeError) and names_backend:
            return _raised_in(cause).startswith(_WAITING)
        cause = cause.__cause__
    return False


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that raised an error, or called the code that did."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return ''
    return str(last.tb_frame.f_globals.get('__name__', ''))


# The state of a rank, and the failures of others.


class RankProgress:
    """The progress of a rank's main thread, which writes it; the monitor reads it."""

    def __init__(self) -> None:
        #: The number of runs (steps, calls, …) with the current one, and of items in all of them.
        self.run = 0
        self.count = 0
        self.thread = 0
        self.inside = False
        self.task = ''
        self.item: Item | None = None
        #: The run of its last own error, and the error.
        self.raised = 0, ''
        #: Whether it has raised an error that results from others, and waits for their names.
        self.asks = False

    def begin(self, task: str) -> None:
        """Begin a run."""
        self.task = task
        self.item = None
        self.thread = threading.get_ident()
        self.run += 1
        self.inside = True

    def end(self) -> None:
        """End the run."""
        self.inside = False
        self.item = None
        self.asks = False

    @property
    def text(self) -> str:
        """The task and its item."""
        return ': '.join(filter(None, [self.task, describe(self.item)]))


class State(NamedTuple):
    """The state of a rank, when it was asked."""

    run: int
    #: The number of items in all runs.
    items: int
    #: ``'outside'`` of runs, ``'computes'``, ``'waits'``, or ``'asks'`` after an error.
    state: str
    #: The task, and the position of the main thread.
    text: str
    where: str
    #: How long it has been there.
    seconds: float

    def __str__(self) -> str:
        verb = 'waits' if self.state == 'asks' else self.state
        if verb == 'outside':
            place = f'is outside of steps and calls, {self.where}'
        else:
            place = f'{verb} in ' + ', '.join(filter(None, [self.text, self.where]))
        return f'{place}, for {self.seconds:.1f} s'


class Failure(NamedTuple):
    """The failure of a rank, which ends the runs of others that need it."""

    #: The rank.
    rank: int
    text: str
    #: The runs that it ends.
    first: float = 0
    last: float = inf
    #: Whether the rank has told it itself, so that no other failure is its cause.
    is_cause: bool = False


#: The exit status of a process that cannot be woken.
EXIT = 70

#: How long a rank looks for the failed rank, and lets its main thread end by itself, in seconds.
GRACE = 5.0

#: How long a rank may take to tell its state, in seconds. Its layer may hold Python's lock.
ANSWER = 3.0

#: How long a rank that knows of an ended process waits for an error that has caused it, in
#: seconds.
CAUSE = 1.5

#: How long the first rank waits for the ends of others, in seconds.
_LEAVE = 2.0


@dataclass
class Inquiry:
    """The search for the rank that blocks others, when these have waited for long."""

    run: int
    #: When to ask all ranks for their states, and until when to wait for these.
    start: float
    end: float
    states: dict[int, State] | None = None


class Monitor:
    """The thread that watches other ranks.

    Args:
        names: The names of all ranks, for errors.
        rank: This rank.
        limit: How long a rank may wait, in seconds.
    """

    def __init__(
        self,
        progress: RankProgress,
        names: Mapping[int, str],
        rank: int,
        limit: float,
        point: MeetingPoint,
    ) -> None:
        self._progress = progress
        self._names = names
        self._rank = rank
        self._first = next(iter(names))
        self._limit = limit
        self._period = min(1.0, limit / 10)
        self._point = point
        self._selector = selectors.DefaultSelector()
        #: The links to others: of the first rank to all, and of all to the first one.
        self._links: dict[int, RankLink] = {}
        self._hosts = {rank: point.host}
        #: The ranks that are not linked yet.
        self._absent = {*names} - {rank} if self.is_first else {self._first}
        #: A main thread that writes to one wakes the monitor, which waits for the other.
        self._wake_end, self._bell = socket.socketpair()
        self._failures: list[Failure] = []
        #: The time of the last one.
        self._failed_at = 0.0
        self._inquiry: Inquiry | None = None
        #: The run and the count of items when this rank has last told its state.
        self._told_progress: Any = None
        self._stops = False
        self._made = time.monotonic()
        self._sent_run = 0
        #: The position of the main thread when it was last seen, and since when it is there.
        self._seen: Any = None
        self._since = 0.0
        self._where = Whereabouts(False, '')
        #: The progress of the main thread since it is stuck because of a failure, and since when.
        self._stuck: Any = None
        self._stuck_since = 0.0
        #: The progress with which this rank has asked for the rank that blocks it.
        self._asked: Any = None
        #: Set when this rank is linked, when its error is told, and when it has an answer.
        self.linked = threading.Event()
        self._told = threading.Event()
        self._answered = threading.Event()
        self._reported: set[str] = set()
        self._selector.register(self._wake_end, selectors.EVENT_READ, self._stop_ringing)
        if not self.is_first:
            self._selector.register(point, selectors.EVENT_READ, self._accept)

    @property
    def is_first(self) -> bool:
        """Whether all other ranks have a link to this one."""
        return self._rank == self._first

    # Calls of the main thread.

    def wake(self) -> None:
        """Let the monitor look at the progress now."""
        with suppress(OSError):
            self._bell.send(b'.')

    def tell(self, error: str) -> None:
        """Tell the others an error of the main thread, whose process may end now."""
        self._told.clear()
        self._progress.raised = self._progress.run, error
        self.wake()
        self._told.wait(GRACE)

    def ask(self) -> str:
        """Return the failures of other ranks that have caused an error of the main thread."""
        self._answered.clear()
        self._progress.asks = True
        self.wake()
        self._answered.wait(2 * GRACE + ANSWER)
        return self._text_of_failures()

    def stop(self) -> None:
        """End the loop."""
        self._stops = True
        self.wake()

    # The loop.

    def loop(self) -> None:
        """Watch the main thread and the other ranks, until this rank ends."""
        while not self._stops:
            # Ranks that have just made the model are linked soon, before they may fail.
            is_new = self._absent and time.monotonic() < self._made + GRACE
            self._serve(0.01 if is_new else self._period)
            self._attempt(self._turn)
        self._attempt(self._leave)
        for link in self._links.values():
            link.close()
        self._point.close()
        self._wake_end.close()
        self._bell.close()
        self._selector.close()

    def _serve(self, seconds: float) -> None:
        """Take connections and messages for some time, or until some have come."""
        if self.is_first:
            self._attempt(self._connect)
        for key, _ in self._selector.select(seconds):
            self._attempt(key.data)

    def _attempt(self, task: Callable[[], None]) -> None:
        """Run a task. An error is reported, but the loop continues to watch the ranks."""
        try:
            task()
        except Exception as error:
            text = text_of(error)
            if text not in self._reported:
                self._reported.add(text)
                self._print(f'the watch of {self._names[self._rank]} continues after {text}')

    def _print(self, text: str) -> None:
        with suppress(Exception):  # The process may have no stderr.
            print(f'torchgpipe: {text}', file=sys.stderr, flush=True)

    def _stop_ringing(self) -> None:
        self._wake_end.recv(1 << 12)

    def _turn(self) -> None:
        """Look at the progress of this rank, and act on failures of others."""
        now = time.monotonic()
        self._see(now)
        self._tell_error()
        failures = self._current_failures()
        if not failures:
            self._stuck = None
            self._ask_if_late(now)
        elif not self._progress.asks:
            self._end_if_stuck(failures, now)
        elif any(failure.is_cause for failure in failures) or now - self._failed_at > CAUSE:
            self._answered.set()
        if self._inquiry is not None:
            self._inquire(self._inquiry, now)

    def _see(self, now: float) -> None:
        """Record where the main thread is."""
        progress = self._progress
        is_long = now - self._since > self._period
        self._where = whereabouts(progress.thread, progress.inside and is_long)
        # The layer is looked for later, so it is no part of the position.
        line = self._where.text.rpartition(', ')[2]
        seen = progress.run, progress.count, progress.inside, self._where.waits, line
        if seen != self._seen:
            self._seen = seen
            self._since = now

    def _state(self, now: float) -> State:
        progress = self._progress
        state = 'outside'
        if progress.asks:
            state = 'asks'
        elif progress.inside:
            state = 'waits' if self._where.waits else 'computes'
        text = progress.text if progress.inside else ''
        seconds = now - self._since
        return State(progress.run, progress.count, state, text, self._where.text, seconds)

    def _tell_error(self) -> None:
        """Tell the others of an error that this rank has raised."""
        run, text = self._progress.raised
        if run <= self._sent_run or (self._absent and not self.is_first):
            return
        self._sent_run = run
        name = self._names[self._rank]
        failure = Failure(self._rank, f'{name} raised {text}', last=run, is_cause=True)
        self._send_first('failure', *failure)
        self._told.set()

    def _current_failures(self) -> list[Failure]:
        """Return the failures that end the current run, except an error of this rank."""
        run = self._progress.run
        failures = []
        for failure in self._failures:
            is_own_error = failure.rank == self._rank and failure.is_cause
            if failure.first <= run <= failure.last and not is_own_error:
                failures.append(failure)
        return failures

    def _text_of_failures(self) -> str:
        """Return the failures that end the current run; if there are causes, only these."""
        failures = self._current_failures()
        causes = [failure for failure in failures if failure.is_cause]
        return '; and '.join(dict.fromkeys(failure.text for failure in causes or failures))

    def _ask_if_late(self, now: float) -> None:
        """Ask for the rank that blocks this one, if it has waited for too long, or has failed."""
        progress = self._progress
        limits = int((now - self._since) / self._limit)
        waits = progress.inside and self._where.waits and limits > 0
        key = progress.run, progress.count, progress.asks, limits
        if (waits or progress.asks) and key != self._asked:
            self._asked = key
            # Others may still tell the cause of an error.
            delay = GRACE if progress.asks else 0.0
            self._send_first('asks', progress.run, delay)

    def _end_if_stuck(self, failures: Sequence[Failure], now: float) -> None:
        """End this process, if its main thread is stuck because of failures."""
        progress = self._progress
        stuck = None
        is_blamed = any(failure.rank == self._rank for failure in failures)
        if progress.inside and (self._where.waits or is_blamed):
            stuck = progress.run, progress.count
        if stuck != self._stuck:
            self._stuck = stuck
            self._stuck_since = now
        elif stuck is not None and now - self._stuck_since >= GRACE:
            state = self._state(now)
            self._print(
                f'{self._names[self._rank]} is stuck in {state.text}, {state.where}, for '
                f'{state.seconds:.1f} s; its process ends, as {self._text_of_failures()}'
            )
            os._exit(EXIT)

    def _leave(self) -> None:
        """Tell the others that this rank has ended; the first one waits for their ends."""
        deadline = time.monotonic() + _LEAVE
        while self._absent and time.monotonic() < deadline:
            self._serve(0.02)
        self._tell_error()
        for link in self._links.values():
            link.send('left', self._progress.run)
        while self.is_first and self._links and time.monotonic() < deadline:
            self._serve(0.02)

    # Messages.

    def _connect(self) -> None:
        """Connect the first rank with the ones that have come since."""
        for rank in sorted(self._absent):
            result = self._point.connect(rank)
            if result is None:
                continue
            link, self._hosts[rank] = result
            self._add(rank, link)
            for failure in self._failures:
                link.send('failure', *failure)
            if not self._absent:
                for other in self._links.values():
                    other.send('hosts', self._hosts)

    def _accept(self) -> None:
        """Take the connection of the first rank."""
        link = self._point.accept()
        if link is not None:
            self._selector.unregister(self._point)
            self._add(self._first, link)

    def _add(self, rank: int, link: RankLink) -> None:
        self._absent.discard(rank)
        self._links[rank] = link
        if not self._absent:
            self.linked.set()
        self._selector.register(link, selectors.EVENT_READ, lambda: self._receive(rank))

    def _receive(self, rank: int) -> None:
        """Take the messages of a rank, or its loss."""
        try:
            messages = self._links[rank].receive()
        except (EOFError, Unreachable) as error:
            self._selector.unregister(self._links[rank])
            self._links.pop(rank).close()
            self._lose(rank, error)
            return
        for kind, *arguments in messages:
            self._TAKE[kind](self, rank, *arguments)

    def _send_first(self, kind: str, *arguments: Any) -> None:
        """Send a message to the first rank, which may be this one."""
        if self.is_first:
            self._TAKE[kind](self, self._rank, *arguments)
        elif self._first in self._links:
            self._links[self._first].send(kind, *arguments)

    def _take_failure(self, rank: int, *failure: Any) -> None:
        """Take a failure, and tell all other ranks of it."""
        new = Failure(*failure)
        progress = self._progress.run, self._progress.count
        # The result of an inquiry is void for a rank that has gone on since it told its state.
        if new.first < new.last or progress == self._told_progress:
            self._failures.append(new)
            self._failed_at = time.monotonic()
        if self.is_first:
            for other, link in self._links.items():
                if other != rank:
                    link.send('failure', *failure)

    def _take_left(self, rank: int, run: int) -> None:
        """Take the regular end of a rank, which takes no part in later runs."""
        name = self._names[rank]
        text = f'{name} has ended, and takes no part in later steps and calls'
        errors = [failure for failure in self._failures if failure.rank == rank]
        if errors:
            text += f', after {errors[-1].text}'
        self._selector.unregister(self._links[rank])
        self._links.pop(rank).close()
        self._take_failure(rank, rank, text, run + 1, inf)

    def _take_hosts(self, rank: int, hosts: Mapping[str, str]) -> None:
        self._hosts = {int(number): host for number, host in hosts.items()}

    def _lose(self, rank: int, error: Exception | None) -> None:
        """Take the loss of a rank, and with its host the loss of all ranks there."""
        if not isinstance(error, Unreachable):
            text = f'{self._names[rank]} is gone: its process has ended'
            self._take_failure(rank, rank, text, 0, inf)
            return
        host = self._hosts.get(rank, 'of unknown address')
        names = []
        for other in self._names:
            if other == rank or self._hosts.get(other) == host:
                names.append(self._names[other])
        text = (
            f'{", ".join(names)} cannot be reached: their host {host}, or the network to it, '
            f'is lost ({error})'
        )
        self._take_failure(rank, rank, text, 0, inf)

    # The search for a rank that blocks others, by the first rank.

    def _take_asks(self, rank: int, run: int, delay: float) -> None:
        if self._inquiry is None:
            start = time.monotonic() + delay
            self._inquiry = Inquiry(run, start, start + ANSWER)

    def _take_where(self, rank: int) -> None:
        """Tell this rank's state."""
        state = self._state(time.monotonic())
        self._told_progress = state.run, state.items
        self._send_first('state', *state)

    def _take_state(self, rank: int, *state: Any) -> None:
        if self._inquiry is not None and self._inquiry.states is not None:
            self._inquiry.states[rank] = State(*state)

    def _inquire(self, inquiry: Inquiry, now: float) -> None:
        """Ask all ranks for their states, and name the one that blocks the others."""
        if now < inquiry.start:
            return
        if inquiry.states is None:
            inquiry.states = {}
            self._take_where(self._rank)
            for link in self._links.values():
                link.send('where')
        if len(inquiry.states) <= len(self._links) and now < inquiry.end:
            return
        self._inquiry = None
        blamed = blame(inquiry.states, self._names, inquiry.run)
        for rank, reason in blamed.items():
            text = f'{self._names[rank]} {reason}'
            self._take_failure(self._rank, rank, text, inquiry.run, inquiry.run)

    _TAKE: Mapping[str, Callable[..., None]] = {
        'failure': _take_failure,
        'left': _take_left,
        'hosts': _take_hosts,
        'asks': _take_asks,
        'where': _take_where,
        'state': _take_state,
    }


def blame(states: Mapping[int, State], ranks: Iterable[int], run: int) -> dict[int, str]:
    """Return the ranks that block the others in a run, each with a description.

    Args:
        states: The states of the ranks that have told theirs.
        ranks: All ranks.
    """
    blamed = {}
    for rank in ranks:
        state = states.get(rank)
        if state is None:
            blamed[rank] = (
                'does not answer: it has not made this model, is stopped, or a layer holds '
                "Python's lock"
            )
        elif state.state == 'computes':
            blamed[rank] = f'does not wait, but {state}'
        elif state.run < run and state.state == 'outside':
            blamed[rank] = f'is not where the others are, but {state}'
    if blamed:
        return blamed
    return {rank: str(state) for rank, state in states.items() if state.state == 'waits'}


#: How long a rank waits by default, as in ``torch.distributed``, in seconds.
_LIMIT = 1800.0

#: The longest wait for the end of a monitor, in seconds.
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
        self._progress = RankProgress()
        self._monitor: Monitor | None = None
        self._name = ''
        if mesh is not None and mesh.size() > 1 and mesh.get_coordinate() is not None:
            names = names_of(mesh)
            rank = dist.get_rank()
            self._name = names[rank]
            point = MeetingPoint([*names], rank)
            self._monitor = Monitor(self._progress, names, rank, self._limit, point)
            thread = threading.Thread(
                target=self._monitor.loop, name='torchgpipe watch', daemon=True
            )
            thread.start()
            # Also at exit, so that the others know that this process has not been killed. In
            # processes of `multiprocessing`, `weakref.finalize` would not run then.
            Finalize(self, _stop, (self._monitor, thread), exitpriority=1)
            self._monitor.linked.wait(1.0)

    def at(self, item: Item | None) -> None:
        """Record the next action or message of a step."""
        self._progress.item = item
        self._progress.count += 1

    def patience(self) -> float:
        """Return how long to wait for files of other ranks, in seconds; less after a failure."""
        return GRACE if self._failed else self._limit

    @contextmanager
    def run(self, task: str) -> Iterator[None]:
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
            self._progress.begin(task)
            try:
                yield
            except BaseException as error:
                self._fail(error)
                raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._progress.end()

    def _fail(self, error: BaseException) -> None:
        """Report an error to the others; if it results from another rank, find that rank."""
        self._failed = True
        if self._monitor is None:
            return
        task = self._progress.text
        add_note(error, f'on {self._name}, in {task}')
        if not is_from_others(error):
            self._monitor.tell(text_of(error))
            return
        text = self._monitor.ask()
        if text:
            raise RuntimeError(f'{task}, ended on {self._name}, as {text}') from error


def watched(task: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that runs a method of a model under its watch."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            model: Any = args[0]
            with model._watch.run(task):
                return method(*args, **kwargs)

        return run

    return decorate


def _stop(monitor: Monitor, thread: threading.Thread) -> None:
    monitor.stop()
    if thread is not threading.current_thread():
        thread.join(_LAST_CALL)
