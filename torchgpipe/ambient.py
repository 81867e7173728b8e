"""The thread-local state around a forward pass, captured once and entered again elsewhere.

PyTorch keeps much of what decides a result in thread-local variables: grad mode, autocast,
saved-tensor hooks, and more. A worker is another thread, and a recomputation happens in backward,
later and often in yet another thread. :class:`Ambient` carries that state to both::

    caller      Ambient.capture() ──┐
    worker                          ├──▶ ambient.run(cells)
    backward                        └──▶ ambient.rerun(cell)
"""
import contextvars
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple, TypeVar

import torch

from torchgpipe.passes import pass_state

__all__ = ['Ambient', 'Hooks', 'drop_hooks_above', 'innermost_hooks']

T = TypeVar('T')

#: Pack and unpack.
Hooks = Tuple[Callable[..., Any], Callable[..., Any]]

_AUTOCAST_TYPES = tuple(type for type in ('cpu', 'cuda', 'xpu', 'mps')
                        if torch.amp.is_autocast_available(type))


class _Autocast(NamedTuple):
    """Autocast as one thread sees it: ``(enabled, dtype)`` per device type, and the weight cache.
    """

    devices: Tuple[Tuple[bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def capture() -> '_Autocast':
        devices = tuple([(torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
                         for type in _AUTOCAST_TYPES])
        return _Autocast(devices, torch.is_autocast_cache_enabled())

    def set(self) -> None:
        """Set this thread's flags, without the nesting count that ``torch.autocast`` keeps.

        PyTorch's cache of cast weights is shared by all threads, and whoever leaves the outermost
        ``torch.autocast`` empties it. A worker that only sets flags shares the caller's casts and
        leaves the emptying to the caller: one cast per weight, not one per micro-batch.
        """
        for type, (enabled, dtype) in zip(_AUTOCAST_TYPES, self.devices):
            torch.set_autocast_enabled(type, enabled)
            torch.set_autocast_dtype(type, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Be a region of ``torch.autocast``, which empties the cache when it is left."""
        before = _Autocast.capture()
        torch.autocast_increment_nesting()
        self.set()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            before.set()


class _FreshThread(threading.local):
    """Autocast as each thread finds it when it first asks, for a worker before its first task."""

    def __init__(self) -> None:
        self.autocast = _Autocast.capture()


_fresh_thread = _FreshThread()


class Ambient(NamedTuple):
    """A snapshot of the calling thread's state."""

    grad: bool
    inference: bool
    autocast: _Autocast
    #: The innermost ``(pack, unpack)`` of ``torch.autograd.graph.saved_tensors_hooks``.
    hooks: Optional[Hooks]
    context: contextvars.Context
    #: OpenMP gives each thread its own number of threads, so a change must follow to the workers.
    num_threads: int
    #: Of ``torch.device(…)`` as a context and ``torch.set_default_device``, if set.
    device: Optional[torch.device]
    checkpointing: bool
    recomputing: bool
    #: Whether a thread that does nothing else is in this state, but for grad mode and autocast.
    plain: bool

    @staticmethod
    def capture() -> 'Ambient':
        """Take a snapshot of the calling thread's state."""
        inference = torch.is_inference_mode_enabled()
        hooks = innermost_hooks()
        device = _default_device()
        passes = pass_state.checkpointing, pass_state.recomputing
        return Ambient(torch.is_grad_enabled(), inference, _Autocast.capture(), hooks,
                       contextvars.copy_context(), torch.get_num_threads(), device, *passes,
                       plain=not any((inference, hooks, device, *passes)))

    def repair(self) -> None:
        """Put the calling thread back into this state: see :func:`drop_hooks_above`."""
        drop_hooks_above(self.hooks)
        pass_state.checkpointing, pass_state.recomputing = self.checkpointing, self.recomputing

    def run(self, function: Callable[[], T]) -> T:
        """Run a function in this state on a worker thread.

        Context variables that the function sets stay with that call: one
        :class:`contextvars.Context` can't be entered by two threads at once.
        """
        return self.context.copy().run(self._run, function)

    def _run(self, function: Callable[[], T]) -> T:
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if self.plain and self.autocast == _fresh_thread.autocast:
            with torch.set_grad_enabled(self.grad):
                return function()
        with self._entered():
            return function()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        autocast = _Autocast.capture()
        state = pass_state.checkpointing, pass_state.recomputing
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device is not None:
                stack.enter_context(self.device)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            try:
                if autocast != self.autocast:
                    self.autocast.set()
                pass_state.checkpointing = self.checkpointing
                pass_state.recomputing = self.recomputing
                yield
            finally:
                if autocast != self.autocast:
                    autocast.set()
                pass_state.checkpointing, pass_state.recomputing = state

    def rerun(self, function: Callable[[], T]) -> T:
        """Run a function in this state again, in backward.

        Grad mode, saved-tensor hooks and the pass belong to the recomputation, which sets them
        itself.
        """
        return self.context.copy().run(self._rerun, function)

    def _rerun(self, function: Callable[[], T]) -> T:
        device, number = _default_device(), torch.get_num_threads()
        if device == self.device and number == self.num_threads and \
                _Autocast.capture() == self.autocast:
            return function()
        with ExitStack() as stack:
            if _Autocast.capture() != self.autocast:
                stack.enter_context(self.autocast.region())
            if device != self.device:
                stack.enter_context(self.device or torch.device('cpu'))
            if number != self.num_threads:
                # Another number of threads adds in another order, and layers that normalise few
                # values make much of the difference.
                stack.callback(torch.set_num_threads, number)
                torch.set_num_threads(self.num_threads)
            return function()


def innermost_hooks() -> Optional[Hooks]:
    """Give this thread's saved-tensor hooks that are in force, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def drop_hooks_above(hooks: Optional[Hooks]) -> None:
    """Let these saved-tensor hooks be in force again.

    A KeyboardInterrupt can hit a context manager when it has taken effect and before it counts as
    entered, so that it is never left. Hooks that stay behind would spoil all that the thread does
    from then on.
    """
    while (top := innermost_hooks()) is not None and top != hooks:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _default_device() -> Optional[torch.device]:
    # Asked only where some mode is on, for the answer takes as long as a small layer.
    return torch.get_default_device() if torch._C._is_torch_function_mode_enabled() else None
