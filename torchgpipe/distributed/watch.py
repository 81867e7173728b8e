"""A watch: when a rank raises, dies or hangs, all other ranks end with an error that names it.

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
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.base.errors import add_note
from torchgpipe.distributed.records import doing, text_of
from torchgpipe.distributed.watcher import GRACE, Own, Watcher
from torchgpipe.distributed.whereabouts import is_from_others
from torchgpipe.schedule import Action
from torchgpipe.schedule.lowering import Message

__all__ = ['Watch', 'watched']

#: How long a rank waits by default, as in ``torch.distributed``.
_LIMIT = timedelta(minutes=30)

#: The longest wait for a thread that is in a call of the store, in seconds.
_LAST_CALL = 10.

P = ParamSpec('P')
T = TypeVar('T')


class Watch:
    """The watch of one rank over its model.

    Args:
        mesh: The ranks of the model.
        timeout: How long a rank may wait for others.
    """

    def __init__(self, mesh: DeviceMesh, timeout: timedelta | None = None) -> None:
        self._depth = 0
        self._limit, self._failed = (timeout or _LIMIT).total_seconds(), False
        self._own = own = Own()
        self._watcher: Watcher | None = None
        if mesh.size() > 1 and mesh.get_coordinate() is not None:
            self._watcher = watcher = Watcher(own, mesh, self._limit)
            thread = threading.Thread(target=watcher.loop, name='torchgpipe watch', daemon=True)
            thread.start()
            # Also at exit: a thread must not be in a call of the store when Python ends.
            weakref.finalize(self, _stop, watcher, thread, os.getpid())

    def at(self, now: Action | Message | None) -> None:
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

        Args:
            what: The task, for errors.

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
        own, name = self._own, self._watcher.name
        at = own.what + ''.join(f': {each}' for each in [doing(own.now)] if each)
        add_note(error, f'on {name}, in {at}')
        if not is_from_others(error):
            self._watcher.tell(text_of(error))
            return
        found = self._watcher.tell('')
        if found:
            raise RuntimeError(f'{at}, ended on {name}, as {found}') from error


def watched(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that runs a method of a model under its watch.

    Args:
        what: The task of the method, for errors.
    """
    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            model: Any = args[0]
            with model._watch.run(what):
                return method(*args, **kwargs)
        return run
    return decorate


def _stop(watcher: Watcher, thread: threading.Thread, process: int) -> None:
    # A forked child does not have the thread, and may have a lock that is never released.
    if process == os.getpid():
        watcher.stop()
        if thread is not threading.current_thread():
            thread.join(_LAST_CALL)
