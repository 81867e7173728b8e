"""The context of a thread: its cell and skips, and its state in other threads.

:data:`context` gives layers access to their micro-batch (:class:`MicroBatch`) and mini-batch
(:class:`MiniBatch`)::

    mini-batch     ├─ micro-batch 0 ─┼─ micro-batch 1 ─┼─ … ─┤ end of forward: at_end
    partition 0       layer(x0)         layer(x1)
    partition 1                         …

[Note: Collectives] Ranks have to reach their collectives in the same order. Concurrent
workers reach their collectives in any order::

    rank 0    worker 0    collective of partition 0 ──────────────────────▶ waits for rank 1
              worker 1                      collective of partition 1

    rank 1    worker 0                      collective of partition 0
              worker 1    collective of partition 1 ──────────────────────▶ waits for rank 0

So a module that communicates declares it by ``communicates = True``, and the engine keeps an
order. Otherwise ``context.no_order`` is set, and :func:`check_order` raises before a collective.

Results depend on thread-local variables of PyTorch: grad mode, autocast, saved-tensor hooks,
modes, and more. A worker is another thread. A recomputation runs in backward, later and often in a
third thread. :class:`ThreadState` transfers the state to both::

    caller      ThreadState.capture() ──┐
    worker                              ├──▶ state.run(cells)
    backward                            └──▶ state.rerun(cell)
"""

import contextvars
import gc
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.devices import autocast_types
from torchgpipe.base.locks import Lock, _open_all
from torchgpipe.base.private import (
    DISPATCH_MODES,
    FUNCTION_MODES,
    DeviceContext,
    Hooks,
    allows_mutation,
    innermost_hooks,
    is_transformed,
    proxy_mode,
    tree_leaves,
    tree_map_only,
)

T = TypeVar('T')


# The cell of a thread.


class MiniBatch:
    """A mini-batch during its forward pass through the outermost pipeline."""

    def __init__(self) -> None:
        #: Returns the parts of a tensor from all replicas, if replicas have other parts of the
        #: mini-batch.
        self.gather: Callable[[Tensor], Sequence[Tensor]] | None = None
        self._at_end: list[tuple[Callable[[], None], Lock]] = []
        self._values: dict[Hashable, object] = {}

    def value(
        self,
        key: Hashable,
        make: Callable[[], T],
    ) -> T:
        """Return a value that a layer keeps during the forward pass of this mini-batch."""
        # `setdefault` would call `make` for each layer that asks.
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]  # type: ignore[return-value]

    def at_end(
        self,
        function: Callable[[], None],
        lock: Lock,
    ) -> None:
        """Call a function under a lock when forward has ended, unless a micro-batch fails."""
        self._at_end.append((function, lock))

    def end(self) -> None:
        """Call all functions of :meth:`at_end`."""
        for function, lock in self._at_end:
            with lock:
                function()


class MicroBatch(NamedTuple):
    """Micro-batch ``i`` of ``m`` in partition ``j``.

    ``cell`` is a unique number of the cell, for layers that are called twice in one cell. ``lock``
    is the lock of the partition's layers. ``losses`` records the normalizers of losses, if needed.
    """

    i: int
    m: int
    j: int
    cell: int
    mini_batch: MiniBatch
    lock: Lock
    losses: Any = None


class _Context(threading.local):
    def __init__(self) -> None:
        # Each thread has its own instance, which compiled code checks again at each call.
        #: The cell that this thread runs; ``None`` outside of a pipeline.
        self.micro_batch: MicroBatch | None = None
        #: Whether the thread is in the first pass of a checkpointed cell, or in a recomputation.
        self.checkpointing = False
        self.recomputing = False
        #: Whether a layer has asked for the pass. Then it handles its own attributes.
        self.asked = False
        #: The :class:`~torchgpipe.skip.transfer.SkipTracker` in which layers stash and pop skips.
        self.skips: Any = None
        #: The ids of the :class:`~torchgpipe.engine.workers.Workers` that wait for this thread, so
        #: that it must not wait for them.
        self.workers: frozenset[int] = frozenset()
        #: Returns the error message for a collective without an order: [Note: Collectives].
        self.no_order: Callable[[], str] | None = None


#: The context of the calling thread.
context = _Context()


def is_checkpointing() -> bool:
    """Return whether this thread is in the first pass over a checkpointed micro-batch.

    Another pass will follow in backward. Threads do not see each other's answers.

    >>> is_checkpointing()
    False
    """
    context.asked = True
    return context.checkpointing


def is_recomputing() -> bool:
    """Return whether this thread is in a recomputation during backward.

    A layer calls it to have a side effect only once. Then attributes that layers of its partition
    set are kept. If no layer calls it, they are restored after a recomputation. Buffers are always
    restored.

    >>> is_recomputing()
    False
    """
    context.asked = True
    return context.recomputing


def check_order() -> None:
    """Raise if ranks may reach a collective of the calling thread in different orders.

    Raises:
        RuntimeError: They may. The message names the fix.
    """
    # Rule 4: All ranks reach their collectives in the same order. Where the engine cannot keep
    # that order, it raises.
    if context.no_order is not None:
        raise RuntimeError(context.no_order())


# The state of a thread, for workers and recomputations.


class Autocast(NamedTuple):
    """Autocast of one thread: ``(enabled, dtype)`` per device type, and the weight cache."""

    devices: tuple[tuple[bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def capture() -> 'Autocast':
        """Return the autocast of the calling thread."""
        devices = []
        for type in autocast_types(torch.accelerator.current_accelerator()):
            enabled = torch.is_autocast_enabled(type)
            dtype = torch.get_autocast_dtype(type)
            devices.append((enabled, dtype))
        return Autocast(tuple(devices), torch.is_autocast_cache_enabled())

    def set(self) -> None:
        """Set this thread's flags, without the nesting count that ``torch.autocast`` keeps.

        All threads share PyTorch's cache of cast weights. A thread that leaves its outermost
        ``torch.autocast`` empties it. A worker that only sets flags shares the caller's casts, and
        the caller empties the cache: one cast per weight, not one per micro-batch.
        """
        types = autocast_types(torch.accelerator.current_accelerator())
        for type, (enabled, dtype) in zip(types, self.devices):
            torch.set_autocast_enabled(type, enabled)
            torch.set_autocast_dtype(type, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    def enter(self, stack: ExitStack) -> None:
        """Enter autocast as ``torch.autocast`` does, which empties the cache on exit."""
        stack.callback(Autocast.capture().leave)
        torch.autocast_increment_nesting()
        self.set()

    def leave(self) -> None:
        """Restore these flags."""
        # In backward within the user's own `torch.autocast`, the count is not zero, and the
        # user's casts stay in the cache.
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set()


class _FreshThread(threading.local):
    """Autocast of each thread at its first access. For a worker, it is before its first task."""

    def __init__(self) -> None:
        self.autocast = Autocast.capture()


_fresh_thread = _FreshThread()


class ThreadState(NamedTuple):
    """A snapshot of the calling thread's state."""

    grad: bool
    inference: bool
    autocast: Autocast
    #: The innermost ``(pack, unpack)`` of ``torch.autograd.graph.saved_tensors_hooks``.
    hooks: Hooks | None
    #: Without the graphs of their tensors: see :func:`_variables`.
    variables: contextvars.Context
    #: The number of intra-op threads. OpenMP keeps it for each thread.
    num_threads: int
    #: The stacks of both types of modes, bottom first.
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    #: The attributes of :data:`context` with these names.
    checkpointing: bool
    recomputing: bool
    workers: frozenset[int]
    #: Whether a transform of `torch.func` is active.
    transformed: bool
    #: Whether the state is a new thread's state, except grad mode and autocast.
    plain: bool
    #: Whether there are modes of the user, which may run any code at each operation.
    has_modes: bool
    #: Whether cells have to run in a certain order, because the user's code sees their operations.
    #: Hooks may count tensors, as ``torch.utils.checkpoint`` does, and modes may run any code.
    is_serialized: bool

    @staticmethod
    def capture() -> 'ThreadState':
        """Take a snapshot of the calling thread's state."""
        inference = torch.is_inference_mode_enabled()
        hooks = innermost_hooks()
        function_modes = FUNCTION_MODES.read()
        dispatch_modes = DISPATCH_MODES.read()

        has_modes = bool(dispatch_modes)
        for mode in function_modes:
            # The mode of `torch.set_default_device` does not run any code of the user.
            if not isinstance(mode, DeviceContext):
                has_modes = True

        return ThreadState(
            torch.is_grad_enabled(),
            inference,
            Autocast.capture(),
            hooks,
            _variables(),
            torch.get_num_threads(),
            function_modes,
            dispatch_modes,
            context.checkpointing,
            context.recomputing,
            context.workers,
            is_transformed(),
            plain=not (
                inference
                or hooks
                or function_modes
                or dispatch_modes
                or context.checkpointing
                or context.recomputing
                or context.workers
            ),
            has_modes=has_modes,
            is_serialized=bool(hooks or has_modes),
        )

    def hooks_of_recomputation(self) -> Hooks | None:
        """Return the user's hooks for the saved tensors of a recomputation, if there are any.

        Hooks of a checkpoint around the pipeline are excluded. They have counted the saved tensors
        of the first pass; a recomputation's tensors belong to the inner checkpoint.
        """
        if self.hooks is not None:
            pack, _ = self.hooks
            if getattr(pack, '__module__', None) in _CHECKPOINTS:
                return None
        return self.hooks

    def check(self, threads: bool) -> None:
        """Raise in contexts that do not cover the whole computation of a pipeline.

        ``threads`` is whether cells run in other threads, or run again in backward.
        """
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if is_traced or (self.dispatch_modes and proxy_mode() is not None):
            raise RuntimeError(
                'a GPipe cannot be traced (torch.jit.trace, make_fx, torch.export): a trace '
                'would hold for one batch size, and miss what runs in other threads. Trace the '
                'sequential module that was wrapped'
            )
        if threads and self.transformed:
            raise RuntimeError(
                'a transform of torch.func (grad, vmap, jvp, …) does not reach the threads of a '
                'GPipe, nor its recomputations: the result would be wrong. Transform the '
                'sequential module that was wrapped; or put all partitions on one device, with '
                "checkpoint='never'"
            )
        if self.grad and self.dispatch_modes and allows_mutation():
            raise RuntimeError(
                'a GPipe cannot be called in torch.autograd.graph.'
                'allow_mutation_on_saved_tensors(): that one knows a saved tensor by the address '
                'where it begins, so it misses micro-batches, which are parts of a tensor, and '
                'takes one for another that had the address before; gradients would be wrong. '
                'Change a copy, as y = y.mul(2) for y.mul_(2); it takes no more memory than the '
                'copy made there'
            )

    def repair(self) -> None:
        """Restore this state in the calling thread.

        A KeyboardInterrupt can hit a context manager after it took effect but before it counts as
        entered, so that it is never exited. Its hooks or modes would affect all later work of the
        thread.
        """
        hooks = innermost_hooks()
        while hooks is not None and hooks != self.hooks:
            # There is no public function that pops hooks. The exit of a context that was not
            # entered does, whichever hooks these are.
            saved_tensors_hooks(Tensor.detach, Tensor.detach).__exit__()
            hooks = innermost_hooks()

        if FUNCTION_MODES.read() != self.function_modes:
            FUNCTION_MODES.write(self.function_modes)
        if DISPATCH_MODES.read() != self.dispatch_modes:
            DISPATCH_MODES.write(self.dispatch_modes)

        context.checkpointing = self.checkpointing
        context.recomputing = self.recomputing
        # This thread has the number already. But threads that are new to PyTorch begin with the
        # number that was set last, which was a worker's.
        torch.set_num_threads(self.num_threads)

    def run(
        self,
        function: Callable[[], T],
        num_threads: int,
    ) -> T:
        """Run a function in this state on a worker thread, with ``num_threads`` intra-op threads.

        Context variables that the function sets are lost after the call, because two threads
        cannot enter one :class:`contextvars.Context` at once.
        """
        return self.variables.copy().run(self._run, function, num_threads)

    def _run(
        self,
        function: Callable[[], T],
        num_threads: int,
    ) -> T:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        # The usual case. To enter all contexts takes longer than a small layer.
        if self.plain and self.autocast == _fresh_thread.autocast:
            with torch.set_grad_enabled(self.grad):
                return function()
        return self._run_within(function)

    def _run_within(self, function: Callable[[], T]) -> T:
        autocast = Autocast.capture()
        checkpointing = context.checkpointing
        recomputing = context.recomputing
        workers = context.workers

        with ExitStack() as stack:
            # Grad mode comes after inference mode, which also sets it.
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self.hooks))
            self._enter_modes(stack)

            try:
                if autocast != self.autocast:
                    self.autocast.set()
                context.checkpointing = self.checkpointing
                context.recomputing = self.recomputing
                # The workers that wait for the caller now also wait for this thread.
                context.workers = workers | self.workers
                return function()
            finally:
                if autocast != self.autocast:
                    autocast.set()
                context.checkpointing = checkpointing
                context.recomputing = recomputing
                context.workers = workers

    def run_backward(self, function: Callable[[], T]) -> T:
        """Run backward with the context variables and modes, and without autocast."""
        # If the caller is not in autocast, this thread is not either. It is the caller's or a
        # worker's, and workers are not in autocast between their cells.
        has_autocast = True in [enabled for enabled, _ in self.autocast.devices]
        if not (self.function_modes or self.dispatch_modes or has_autocast):
            return self.variables.copy().run(function)

        autocast = Autocast.capture()
        disabled = tuple([(False, dtype) for _, dtype in autocast.devices])
        with ExitStack() as stack:
            stack.callback(autocast.set)
            self._enter_modes(stack)
            Autocast(disabled, autocast.cache).set()
            return self.variables.copy().run(function)

    def rerun(
        self,
        function: Callable[[], T],
        num_threads: int,
    ) -> T:
        """Run a function in this state again, in backward, with ``num_threads`` intra-op threads.

        The recomputation itself sets grad mode, saved-tensor hooks and the pass.
        """
        return self.variables.copy().run(self._rerun, function, num_threads)

    def _rerun(
        self,
        function: Callable[[], T],
        num_threads: int,
    ) -> T:
        number = torch.get_num_threads()
        has_modes = (
            FUNCTION_MODES.len()
            or DISPATCH_MODES.len()
            or self.function_modes
            or self.dispatch_modes
        )
        autocast = Autocast.capture()
        if not has_modes and number == num_threads and autocast == self.autocast:
            return function()

        with ExitStack() as stack:
            if autocast != self.autocast:
                self.autocast.enter(stack)
            if has_modes:
                self._enter_modes(stack)
            if number != num_threads:
                # Another number of threads adds in another order. Layers that normalise few values
                # amplify the difference.
                stack.callback(torch.set_num_threads, number)
                torch.set_num_threads(num_threads)
            return function()

    def _enter_modes(self, stack: ExitStack) -> None:
        stack.callback(FUNCTION_MODES.write, FUNCTION_MODES.read())
        FUNCTION_MODES.write(self.function_modes)
        stack.callback(DISPATCH_MODES.write, DISPATCH_MODES.read())
        DISPATCH_MODES.write(self.dispatch_modes)


def _variables() -> contextvars.Context:
    """Copy the context variables, with detached tensors, because a graph will own this copy.

    A variable may refer to an output of the previous step, whose graph owns another copy. Without
    detaching, this chain would continue through all steps.
    """
    variables = contextvars.copy_context()
    for variable, value in variables.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                detached = tree_map_only(Tensor, Tensor.detach, value)
                variables.run(variable.set, detached)
                break
    return variables


#: The modules that define hooks of checkpoints.
_CHECKPOINTS = ('torch.utils.checkpoint', 'torchgpipe.engine.checkpoint.recomputation')


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_open_all)


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
