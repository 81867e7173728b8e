"""Checkpointing: keep a cell's input, compute its activations again in backward.

[Note: How checkpointing works]
The cell runs once, in grad mode, so its autograd graph is the one that the unwrapped model
would have, only hollow: each tensor that a node would save is replaced by its number, through
saved-tensor hooks, and freed. In backward the cell runs once more, to make these tensors again::

    forward     x ──▶ [ layers, hollow ] ──▶ y ──Checkpoint──▶ (Wait) ──▶ Join ──▶ y'
                                                                Recompute ──┘
    backward    1. Join runs as soon as the gradient is on its way.
                2. Recompute runs the cell again; the tensors it saves fill the hollow graph.
                3. Wait lets the compute stream wait for the gradient: only after the recomputation
                   has been queued, so the two overlap.
                4. Checkpoint finds the graph filled (or fills it, where autograd was asked for
                   some gradients only and left Recompute out).
                5. The layers' own nodes run; each takes its tensors out and so frees them.

Since gradients flow through the layers' own graph, a parameter's gradient is complete, and
its hooks are called, once per backward and not once per micro-batch; `torch.autograd.grad`
works; and a recomputation that took another path than the first pass is found out.
This is the non-reentrant variant of Chen et al., "Training Deep Nets with Sublinear Memory Cost"
(2016), with the recomputation split off as in Kim et al., "torchgpipe" (2020).

[Note: Who owns a recomputation]
Nodes of PyTorch's own are invisible to Python's garbage collector, so no cycle may lead through
the graph. An arrow is a strong reference::

    Checkpoint, layers' nodes ──▶ _Recomputation ──▶ Recompute ──▶ input ──▶ earlier nodes
                                        ▲ ─ ─ ─ weak ─ ─ ─ ┘

So the input can be recomputed from as long as any hollow node lives, even if only a gradient of a
gradient still refers to it; and autograd frees it when Recompute has run for the last time.

[Note: Lifetime of a recomputed tensor]
    fill ──keep──▶ tensors[k] ──unpack──▶ the node that saved it ──▶ freed
A node of PyTorch's own unpacks a tensor exactly once. A `torch.autograd.Function` unpacks all
its tensors whenever its author says `ctx.saved_tensors`, so these stay until another node's turn.
What no node asked for is dropped at the end of backward.
"""
import threading
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.aliases import Function, TensorOrTensors
from torchgpipe.ambient import Ambient, Hooks, checkpoint_state
from torchgpipe.dependency import join
from torchgpipe.microbatch import Batch
from torchgpipe.phony import get_phony
from torchgpipe.randomness import RandomState
from torchgpipe.snapshot import Snapshot
from torchgpipe.stream import current_stream, no_context, use_stream

__all__ = ['Checkpoint', 'Checkpointing', 'Recompute', 'checkpoint', 'enable_checkpointing',
           'enable_recomputing', 'is_checkpointing', 'is_recomputing']


def is_checkpointing() -> bool:
    """Tell whether this thread is in the first pass over a checkpointed micro-batch.

    >>> is_checkpointing()
    False
    """
    return checkpoint_state.checkpointing


def is_recomputing() -> bool:
    """Tell whether this thread is in a recomputation during backward.

    A layer with a side effect (a counter, running statistics) asks this to have it once only.

    >>> is_recomputing()
    False
    """
    return checkpoint_state.recomputing


@contextmanager
def enable_checkpointing() -> Iterator[None]:
    """Make :func:`is_checkpointing` true within the context."""
    before = checkpoint_state.checkpointing
    checkpoint_state.checkpointing = True
    try:
        yield
    finally:
        checkpoint_state.checkpointing = before


@contextmanager
def enable_recomputing() -> Iterator[None]:
    """Make :func:`is_recomputing` true within the context."""
    before = checkpoint_state.checkpointing, checkpoint_state.recomputing
    checkpoint_state.checkpointing, checkpoint_state.recomputing = False, True
    try:
        yield
    finally:
        checkpoint_state.checkpointing, checkpoint_state.recomputing = before


def checkpoint(function: Function, input: TensorOrTensors) -> TensorOrTensors:
    """Call a function with checkpointing: :class:`Checkpointing` in one step."""
    batch = Batch(input)
    checkpointing = Checkpointing(function, batch)
    batch = checkpointing.checkpoint()
    checkpointing.recompute(batch)
    return batch.value


class Checkpointing:
    """One checkpointed call of a function on a batch: [Note: How checkpointing works].

    The two halves are apart so that a ``Wait`` can stand between them.

    Args:
        function: What to call, twice.
        batch: What to call it with.
        ambient: The thread's state, if the caller has it at hand.
        snapshot: What the function is made of, if it changes.
        quiet: Whether the function is known not to draw from the CPU's random generator.
    """

    __slots__ = ('_ambient', '_batch', '_function', '_quiet', '_recomputation', '_snapshot')

    def __init__(self, function: Function, batch: Batch, *, ambient: Optional[Ambient] = None,
                 snapshot: Optional[Snapshot] = None, quiet: bool = False) -> None:
        self._function = function
        self._batch = batch
        self._ambient = ambient
        self._snapshot = snapshot
        self._quiet = quiet
        self._recomputation: Optional[_Recomputation] = None

    def checkpoint(self, always: bool = True) -> Batch:
        """Run the function, and hang ``Checkpoint`` on its output.

        Args:
            always: Whether to do so, and so make it require grad, if nothing in it does.
        """
        function, batch = self._function, self._batch
        if not torch.is_grad_enabled():
            with enable_checkpointing():
                return batch.call(function)

        self._recomputation = recomputation = _Recomputation(
            function, batch, self._ambient or Ambient.capture(), self._snapshot, self._quiet)
        with enable_checkpointing(), self._snapshot.taken() if self._snapshot else no_context, \
                saved_tensors_hooks(recomputation.number, recomputation.unpack):
            output = batch.call(function)
        recomputation.settle()

        # Outputs that need no gradient stay out of the graph, as they do without checkpointing.
        tensors = list(output)
        where = [k for k, y in enumerate(tensors) if y.requires_grad]
        if always and not where:
            where = [k for k, y in enumerate(tensors) if y.is_floating_point()]
        if where:
            phony = get_phony(tensors[where[0]].device, requires_grad=True)
            marked = Checkpoint.apply(  # type: ignore[no-untyped-call]
                phony, recomputation, *[tensors[k] for k in where])
            for k, y in zip(where, marked):
                output[k] = y
        return output

    def recompute(self, batch: Batch) -> None:
        """Hang ``Recompute`` on the batch that :meth:`checkpoint` gave, in place."""
        if self._recomputation is None or not torch.is_grad_enabled():
            return
        k = batch.find_grad()
        if k is None:
            return
        phony = get_phony(batch[k].device, requires_grad=True)
        batch[k] = join(batch[k], self._recomputation.hand_over(phony))


class _Recomputation:
    """What the nodes of one checkpointed call share: how to run it again, and what that gave."""

    __slots__ = ('_ambient', '_atomic', '_function', '_held', '_holder', '_hooks', '_input',
                 '_next', '_passing', '_recompute', '_saved', '_snapshot', '_stream', '_tensors',
                 '_random', '_thread', 'filled', '__weakref__')

    def __init__(self, function: Function, batch: Batch, ambient: Ambient,
                 snapshot: Optional[Snapshot], quiet: bool) -> None:
        self._function = function
        self._atomic = batch.atomic
        self._input: Tuple[Tensor, ...] = tuple(batch)
        self._recompute: Optional[Tensor] = None
        self._saved: List[int] = []
        self._next = 0
        self._passing = True
        self._tensors: Dict[int, Tuple[Any, Optional[int]]] = {}
        self._holder: Callable[[], Any] = _gone
        self._held: Dict[int, Tensor] = {}
        self.filled = False
        self._ambient = ambient
        self._hooks = _users_hooks(ambient)
        self._thread = threading.get_ident()
        self._snapshot = snapshot
        self._stream = current_stream(batch.device)
        self._random = RandomState(batch.device, quiet)

    def settle(self) -> None:
        """Close the first pass."""
        self._passing = False
        self._random.settle()

    def number(self, tensor: Tensor) -> int:
        """Pack hook of the first pass: keep a number and a fingerprint, not the tensor."""
        self._check_thread()
        # An integer, since Python's garbage collector goes through whatever else a graph holds.
        self._saved.append(hash((tensor.shape, tensor.dtype)))
        return len(self._saved) - 1

    def hand_over(self, phony: Tensor) -> Tensor:
        """Leave the input with a ``Recompute`` node, which checks its version and frees it."""
        self._recompute = Recompute.apply(  # type: ignore[no-untyped-call]
            phony, weakref.ref(self), self._input)
        self._input = ()
        return self._recompute

    def fill(self) -> None:
        """Run the function again and keep what its nodes save."""
        # Autograd may call this on another stream than the one whose nodes take the tensors.
        with use_stream(self._stream):
            self._fill()
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.drop)

    def _fill(self) -> None:
        node: Any = None if self._recompute is None else self._recompute.grad_fn
        # Where an earlier backward has freed the input, PyTorch raises its usual error here.
        input = self._input if node is None else node.saved_tensors
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in input)
        self._next = 0
        self._passing = True
        self._thread = threading.get_ident()
        with self._random.restored(), enable_recomputing(), torch.enable_grad(), \
                self._snapshot.restored() if self._snapshot else no_context, \
                saved_tensors_hooks(self._keep, self.unpack):
            self._ambient.rerun(lambda: self._function(leaves[0] if self._atomic else leaves))
        self._passing = False
        if self._next != len(self._saved):
            raise RuntimeError(_other_path(f'it saved {self._next} tensors for backward, '
                                           f'the first pass {len(self._saved)}'))
        self.filled = True

    def _keep(self, tensor: Tensor) -> int:
        """Pack hook of the recomputation: keep the tensor under its number."""
        self._check_thread()
        k = self._next
        self._next += 1
        if k < len(self._saved) and self._saved[k] != hash((tensor.shape, tensor.dtype)):
            raise RuntimeError(_other_path(f'saved tensor {k} is now {tensor.dtype} of shape '
                                           f'{tuple(tensor.shape)}, which it was not'))
        # Detached, lest the recomputation's own graph, of no use, live as long as its tensors.
        alias = tensor.detach()
        hooks = self._hooks
        self._tensors[k] = (alias, alias._version) if hooks is None else (hooks[0](alias), None)
        return k

    def unpack(self, k: int) -> Tensor:
        """Unpack hook of both passes: [Note: Lifetime of a recomputed tensor]."""
        node: Any = torch._C._current_autograd_node()
        if self._held and self._holder() is not node:
            self._held = {}
        if k in self._held:
            return self._held[k]
        if self._passing:
            raise RuntimeError(
                'a layer asked for gradients within its own forward, from which checkpointing '
                "has taken the tensors; use checkpoint='never' for such a model")
        if k not in self._tensors:
            self.fill()
        tensor = self._take(k)
        if isinstance(node, BackwardCFunction):
            self._holder = weakref.ref(node)
            self._held[k] = tensor
        return tensor

    def _take(self, k: int) -> Tensor:
        packed, version = self._tensors.pop(k)
        hooks = self._hooks
        if hooks is not None:
            return hooks[1](packed)  # type: ignore[no-any-return]
        tensor: Tensor = packed
        # PyTorch checks no versions behind hooks, so it is done here.
        if tensor._version != version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an '
                f'inplace operation: {tensor.dtype} of shape {tuple(tensor.shape)} is at version '
                f'{tensor._version}; expected version {version} instead')
        return tensor

    def _check_thread(self) -> None:
        # In the first pass and in the recomputation, tensors are told apart by their order.
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                'a checkpointed micro-batch saved tensors for backward from more than one thread, '
                'so their order may differ in the recomputation. If a layer is itself a GPipe on '
                "several devices, use checkpoint='never' for the outer one.")

    def drop(self) -> None:
        """Free what no node asked for."""
        self._tensors.clear()
        self._held = {}
        self.filled = False


def _users_hooks(ambient: Ambient) -> Optional[Hooks]:
    """Give the saved-tensor hooks of the user, beneath those of calls that this one is in."""
    hooks = ambient.hooks
    outer = getattr(hooks[0], '__self__', None) if hooks is not None else None
    return outer._hooks if isinstance(outer, _Recomputation) else hooks


def _gone() -> None:
    """Answer as a dead weak reference does."""


def _other_path(difference: str) -> str:
    return ('the recomputation of a checkpointed micro-batch took another path than its first '
            f'pass: {difference}. Gradients would be wrong. Let the layers do the same in both '
            "passes (torchgpipe.is_recomputing() tells them apart), or use checkpoint='never'.")


class Checkpoint(torch.autograd.Function):
    """Mark the output of a checkpointed call; in backward, see that its graph is filled."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: _Recomputation,
                *output: Tensor) -> Tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        return tuple(y.detach() for y in output)  # [Note: Identity without a view]

    @staticmethod
    def backward(ctx: Any, *grads: Optional[Tensor]
                 ) -> Tuple[Optional[Tensor], ...]:
        if not ctx.recomputation.filled:
            ctx.recomputation.fill()
        ctx.recomputation.filled = False  # The layers' nodes take the tensors from now on.
        return (None, None, *grads)


class Recompute(torch.autograd.Function):
    """Run a checkpointed call again, before its gradient is there."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor,
                recomputation: Callable[[], Optional[_Recomputation]], input: Tuple[Tensor, ...]
                ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation  # [Note: Who owns a recomputation]
        ctx.save_for_backward(*input)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, grad: Optional[Tensor]) -> Tuple[None, ...]:
        recomputation = ctx.recomputation()
        assert recomputation is not None, 'Checkpoint, which runs next, owns it'
        recomputation.fill()
        return None, None, None
