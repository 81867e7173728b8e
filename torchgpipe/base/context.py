"""The context of a thread: its cell and skips, its state in other threads, and its locks.

::

    mini-batch     ├─ micro-batch 0 ─┼─ micro-batch 1 ─┼─ … ─┤ end of forward: at_end
    partition 0       layer(x0)         layer(x1)
    partition 1                         …

[Note: Collectives] Ranks have to come to their collectives in the same order. Workers that run
beside each other come to theirs in any order::

    rank 0    worker 0    collective of partition 0 ──────────────────────▶ waits for rank 1
              worker 1                      collective of partition 1

    rank 1    worker 0                      collective of partition 0
              worker 1    collective of partition 1 ──────────────────────▶ waits for rank 0

So a module that communicates says so, ``communicates = True``, and the engine keeps an order.
Where it keeps none, the context says so, and who is about to communicate looks there first.

PyTorch keeps much of what decides a result in thread-local variables: grad mode, autocast,
saved-tensor hooks, modes, and more. A worker is another thread, and a recomputation happens in
backward, later and often in yet another thread. :class:`ThreadState` carries that state to both::

    caller      ThreadState.capture() ──┐
    worker                              ├──▶ state.run(cells)
    backward                            └──▶ state.rerun(cell)

What may run beside what: a layer works in one thread at a time. A cell holds the locks of its
layers from its start to its end, and so does a recomputation. So any number of threads may run and
train the same model, or models that share layers; their cells are serialized. But a layer that
only computes may run in several partitions of one memory at a time.

A step puts other parameters into its layers for as long as it runs. So steps exclude each other,
of whichever models, if they have layers in common; and a step excludes forward passes of the same
model. A plain call of another model with the same layers is for the user to keep apart.

A child process has the thread that forked and none of the others, so a lock that another one held
would never be released there.
"""
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.devices import autocast_types
from torchgpipe.base.private import (DISPATCH_MODES, FUNCTION_MODES, DeviceContext, Hooks,
                                     allows_mutation, innermost_hooks, is_transformed, proxy_mode,
                                     tree_leaves, tree_map_only)

__all__ = ['MicroBatch', 'MiniBatch', 'ThreadState', 'check_order', 'context', 'generator_lock',
           'is_checkpointing', 'is_recomputing', 'layer_lock', 'new_lock', 'step_lock', 'together']

T = TypeVar('T')


class MiniBatch:
    """A mini-batch on its way through the outermost pipeline."""

    def __init__(self) -> None:
        #: Where replicas have other parts of it: returns what each of them has of a tensor.
        self.gather: Callable[[Tensor], Sequence[Tensor]] | None = None
        self._at_end: list[tuple[Callable[[], None], AbstractContextManager[Any]]] = []
        self._values: dict[Hashable, object] = {}

    def value(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what a layer keeps for as long as this mini-batch is on its way."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]  # type: ignore[return-value]

    def at_end(self, function: Callable[[], None], lock: AbstractContextManager[Any]) -> None:
        """Call a function when all micro-batches have come through, and not if one fails.

        Args:
            function: The function.
            lock: To be held meanwhile.
        """
        self._at_end.append((function, lock))

    def end(self) -> None:
        """Call what is to be called."""
        for function, lock in self._at_end:
            with lock:
                function()


class MicroBatch(NamedTuple):
    """Micro-batch ``i`` of ``m`` in partition ``j``.

    ``cell`` is a number that no other cell has, for layers that are called twice in one. ``lock``
    is the lock of the partition's layers. ``losses`` sees what losses divide by, if that matters.
    """

    i: int
    m: int
    j: int
    cell: int
    mini_batch: MiniBatch
    lock: AbstractContextManager[Any]
    losses: Any = None


class _Context(threading.local):

    def __init__(self) -> None:
        # Each thread has its own, which is what compiled code looks at again when it is called.
        #: The cell that this thread works for; ``None`` outside of a pipeline.
        self.micro_batch: MicroBatch | None = None
        #: Whether it is in the first pass over a checkpointed cell, or in a recomputation.
        self.checkpointing = False
        self.recomputing = False
        #: Whether a layer has asked for that. Then it deals with its own attributes.
        self.asked = False
        #: Where layers stash skips, and pop them: a :class:`~torchgpipe.skip.tracker.SkipTracker`.
        self.skips: Any = None
        #: The ids of the :class:`~torchgpipe.engine.workers.Workers` that wait for this thread, so
        #: that it must not wait for them.
        self.workers: frozenset[int] = frozenset()
        #: Says why ranks would not meet where they would not: [Note: Collectives].
        self.no_order: Callable[[], str] | None = None


#: Where the calling thread is.
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

    A layer with a side effect asks this to have it once only. Its attributes are left as it sets
    them then; those of layers in partitions where no one asks are put back, as buffers always are.

    >>> is_recomputing()
    False
    """
    context.asked = True
    return context.recomputing


def check_order() -> None:
    """See that ranks come to a collective of the calling thread in the same order.

    Raises:
        RuntimeError: They need not. The message says what to do.
    """
    if context.no_order is not None:
        raise RuntimeError(context.no_order())


class _Autocast(NamedTuple):
    """Autocast as one thread sees it: ``(enabled, dtype)`` per device type, and the weight cache.
    """

    devices: tuple[tuple[bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def capture() -> '_Autocast':
        types = autocast_types(torch.accelerator.current_accelerator())
        devices = tuple([(torch.is_autocast_enabled(type), torch.get_autocast_dtype(type))
                         for type in types])
        return _Autocast(devices, torch.is_autocast_cache_enabled())

    def set(self) -> None:
        """Set this thread's flags, without the nesting count that ``torch.autocast`` keeps.

        PyTorch's cache of cast weights is shared by all threads, and whoever leaves the outermost
        ``torch.autocast`` empties it. A worker that only sets flags shares the caller's casts and
        leaves the emptying to the caller: one cast per weight, not one per micro-batch.
        """
        types = autocast_types(torch.accelerator.current_accelerator())
        for type, (enabled, dtype) in zip(types, self.devices):
            torch.set_autocast_enabled(type, enabled)
            torch.set_autocast_dtype(type, dtype)
        torch.set_autocast_cache_enabled(self.cache)

    def enter(self, stack: ExitStack) -> None:
        """Do as ``torch.autocast`` does, which empties the cache when it is left."""
        stack.callback(_Autocast.capture().leave)
        torch.autocast_increment_nesting()
        self.set()

    def leave(self) -> None:
        """Go back to these flags."""
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.set()


class _FreshThread(threading.local):
    """Autocast as each thread finds it when it first asks, for a worker before its first task."""

    def __init__(self) -> None:
        self.autocast = _Autocast.capture()


_fresh_thread = _FreshThread()


class ThreadState(NamedTuple):
    """A snapshot of the calling thread's state."""

    grad: bool
    inference: bool
    autocast: _Autocast
    #: The innermost ``(pack, unpack)`` of ``torch.autograd.graph.saved_tensors_hooks``.
    hooks: Hooks | None
    variables: contextvars.Context
    #: Intra-op threads. OpenMP gives each thread a number of its own.
    num_threads: int
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    checkpointing: bool
    recomputing: bool
    workers: frozenset[int]
    #: Whether a transform of `torch.func` is at work.
    transformed: bool
    #: Whether a thread that does nothing else is in this state, but for grad mode and autocast.
    plain: bool
    #: Whether cells have to run in a certain order, since the user's code sees what they do. Hooks
    #: may count what they pack, as ``torch.utils.checkpoint`` does, and modes may do anything.
    is_serialized: bool

    @staticmethod
    def capture() -> 'ThreadState':
        """Take a snapshot of the calling thread's state."""
        inference = torch.is_inference_mode_enabled()
        hooks = innermost_hooks()
        function, dispatch = FUNCTION_MODES.read(), DISPATCH_MODES.read()
        here = context.checkpointing, context.recomputing, context.workers
        return ThreadState(
            torch.is_grad_enabled(), inference, _Autocast.capture(), hooks, _variables(),
            torch.get_num_threads(), function, dispatch, *here, is_transformed(),
            plain=not any((inference, hooks, function, dispatch, *here)),
            is_serialized=bool(hooks or dispatch or not all([
                isinstance(mode, DeviceContext) for mode in function])))

    def hooks_of_recomputation(self) -> Hooks | None:
        """Return the hooks for what a recomputation saves: those of the user, if there are any.

        Those of a checkpoint around all of this have counted what the first pass saves; what a
        recomputation saves belongs to the inner one.
        """
        inner = self.hooks and getattr(self.hooks[0], '__module__', None) in _CHECKPOINTS
        return None if inner else self.hooks

    def check(self, threads: bool) -> None:
        """Refuse contexts that follow a computation in a way that does not reach all of it here.

        Args:
            threads: Whether cells run in other threads, or will run again in backward.
        """
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if is_traced or (self.dispatch_modes and proxy_mode() is not None):
            raise RuntimeError(
                'a GPipe cannot be traced (torch.jit.trace, make_fx, torch.export): a trace '
                'would hold for one batch size, and miss what runs in other threads. Trace the '
                'sequential module that was wrapped')
        if threads and self.transformed:
            raise RuntimeError(
                'a transform of torch.func (grad, vmap, jvp, …) does not reach the threads of a '
                'GPipe, nor its recomputations: the result would be wrong. Transform the '
                'sequential module that was wrapped; or put all partitions on one device, with '
                "checkpoint='never'")
        if self.grad and self.dispatch_modes and allows_mutation():
            raise RuntimeError(
                'a GPipe cannot be called in torch.autograd.graph.'
                'allow_mutation_on_saved_tensors(): that one knows a saved tensor by the address '
                'where it begins, so it misses micro-batches, which are parts of a tensor, and '
                'takes one for another that had the address before; gradients would be wrong. '
                'Change a copy, as y = y.mul(2) for y.mul_(2); it takes no more memory than the '
                'copy made there')

    def repair(self) -> None:
        """Put the calling thread back into this state.

        A KeyboardInterrupt can hit a context manager when it has taken effect and before it counts
        as entered, so that it is never left. Hooks and modes that stay behind would spoil all that
        the thread does from then on.
        """
        while (top := innermost_hooks()) is not None and top != self.hooks:
            # Leave a context that was not entered.
            saved_tensors_hooks(Tensor.detach, Tensor.detach).__exit__()
        for stack, modes in ((FUNCTION_MODES, self.function_modes),
                             (DISPATCH_MODES, self.dispatch_modes)):
            if stack.read() != modes:
                stack.write(modes)
        context.checkpointing, context.recomputing = self.checkpointing, self.recomputing
        # It has it, but threads that are new to PyTorch begin with the number that was set last,
        # and that was a worker's.
        torch.set_num_threads(self.num_threads)

    def run(self, function: Callable[[], T], num_threads: int) -> T:
        """Run a function in this state on a worker thread, with so many intra-op threads.

        Context variables that the function sets stay with that call: one
        :class:`contextvars.Context` can't be entered by two threads at once.
        """
        return self.variables.copy().run(self._run, function, num_threads)

    def _run(self, function: Callable[[], T], num_threads: int) -> T:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if self.plain and self.autocast == _fresh_thread.autocast:
            with torch.set_grad_enabled(self.grad):
                return function()
        return self._run_within(function)

    def _run_within(self, function: Callable[[], T]) -> T:
        autocast = _Autocast.capture()
        state = context.checkpointing, context.recomputing, context.workers
        with ExitStack() as stack:
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
                context.workers |= self.workers
                return function()
            finally:
                if autocast != self.autocast:
                    autocast.set()
                context.checkpointing, context.recomputing, context.workers = state

    def run_backward(self, function: Callable[[], T]) -> T:
        """Run backward with the context variables, and without autocast, which it does not want.
        """
        # Between their cells, workers are not in autocast.
        if not any([enabled for enabled, _ in self.autocast.devices]):
            return self.variables.copy().run(function)
        autocast = _Autocast.capture()
        _Autocast(tuple((False, dtype) for _, dtype in autocast.devices), autocast.cache).set()
        try:
            return self.variables.copy().run(function)
        finally:
            autocast.set()

    def rerun(self, function: Callable[[], T], num_threads: int) -> T:
        """Run a function in this state again, in backward, with so many intra-op threads.

        Grad mode, saved-tensor hooks and the pass belong to the recomputation, which sets them
        itself.
        """
        return self.variables.copy().run(self._rerun, function, num_threads)

    def _rerun(self, function: Callable[[], T], num_threads: int) -> T:
        number = torch.get_num_threads()
        same_modes = FUNCTION_MODES.len() + DISPATCH_MODES.len() == 0 and not (
            self.function_modes or self.dispatch_modes)
        autocast = _Autocast.capture()
        if same_modes and number == num_threads and autocast == self.autocast:
            return function()
        with ExitStack() as stack:
            if autocast != self.autocast:
                self.autocast.enter(stack)
            if not same_modes:
                self._enter_modes(stack)
            if number != num_threads:
                # Another number of threads adds in another order, and layers that normalise few
                # values make much of the difference.
                stack.callback(torch.set_num_threads, number)
                torch.set_num_threads(num_threads)
            return function()

    def _enter_modes(self, stack: ExitStack) -> None:
        for modes, own in ((FUNCTION_MODES, self.function_modes),
                           (DISPATCH_MODES, self.dispatch_modes)):
            stack.callback(modes.write, modes.read())
            modes.write(own)


def _variables() -> contextvars.Context:
    """Copy the context variables, without graphs: a graph will own this copy.

    A variable may hold an output of the step before, and that one's graph its own copy, and so on.
    """
    variables = contextvars.copy_context()
    for variable, value in variables.items():
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(value)):
            variables.run(variable.set, tree_map_only(Tensor, Tensor.detach, value))
    return variables


#: Where hooks of checkpoints come from.
_CHECKPOINTS = ('torch.utils.checkpoint', 'torchgpipe.engine.checkpoint.recomputation')


_locks: 'weakref.WeakSet[Any]' = weakref.WeakSet()

_of_steps: 'weakref.WeakKeyDictionary[nn.Module, Any]' = weakref.WeakKeyDictionary()

_of_layers: 'weakref.WeakKeyDictionary[nn.Module, Any]' = weakref.WeakKeyDictionary()


def new_lock() -> Any:
    """Make a reentrant lock."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_open_all)

_lock = new_lock()

#: Held by cells and recomputations that draw from the random generator of the CPU, which all
#: threads share. Who holds it takes no other lock.
generator_lock = new_lock()


def layer_lock(layers: Collection[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which no other thread runs any of these layers."""
    with _lock:
        for layer in layers:
            if layer not in _of_layers:
                _of_layers[layer] = new_lock()
        return together(*map(_of_layers.__getitem__, layers))


def step_lock(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which no other step has any of these modules."""
    with _lock:
        return together(*{_of_steps.setdefault(module, new_lock()) for module in modules})


def together(*contexts: Any) -> AbstractContextManager[Any]:
    """Return a context in which a thread holds all that it would hold in each of several."""
    locks = {lock for each in contexts for lock in getattr(each, 'locks', [each])}
    return locks.pop() if len(locks) == 1 else _Several(locks)


class _Several:
    """Several locks, always taken in one order, so that no two threads wait for each other."""

    def __init__(self, locks: Collection[Any]) -> None:
        self.locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        taken = []
        try:
            for lock in self.locks:
                lock.acquire()
                taken.append(lock)
        except BaseException:  # KeyboardInterrupt, while it waits
            for lock in taken:
                lock.release()
            raise

    def __exit__(self, *args: Any) -> None:
        for lock in self.locks:
            lock.release()
