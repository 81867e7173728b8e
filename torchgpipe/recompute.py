"""Recomputation: run a checkpointed call again, and give its tensors to the first pass's graph.

See [Note: How checkpointing works] in :mod:`torchgpipe.checkpoint`.

[Note: Who owns a recomputation]
Nodes of PyTorch's own are invisible to Python's garbage collector, so no cycle may lead through
the graph. An arrow is a strong reference::

    Checkpoint, layers' nodes ──▶ Recomputation ──▶ Recompute ──▶ input ──▶ earlier nodes
                                        ▲ ─ ─ ─ weak ─ ─ ┘

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
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.aliases import Function
from torchgpipe.ambient import Ambient, Hooks, drop_hooks_above, innermost_hooks
from torchgpipe.microbatch import Batch, versions
from torchgpipe.passes import enable_recomputing
from torchgpipe.randomness import RandomState
from torchgpipe.snapshot import Snapshot
from torchgpipe.stream import current_stream, no_context, use_stream

__all__ = ['Checkpoint', 'Recomputation', 'Recompute']

#: How many elements of an output are compared, about.
SAMPLES = 64


class Recomputation:
    """What the nodes of one checkpointed call share: how to run it again, and what that gave."""

    __slots__ = ('_ambient', '_atomic', '_changed', '_function', '_held', '_holder', '_hooks',
                 '_input', '_next', '_passing', '_random', '_recompute', '_samples', '_saved',
                 '_snapshot', '_stream', '_tensors', '_thread', '_versions', 'filled',
                 '__weakref__')

    def __init__(self, function: Function, batch: Batch, ambient: Ambient,
                 snapshot: Optional[Snapshot], quiet: bool, device: torch.device) -> None:
        self._function = function
        self._atomic = batch.atomic
        self._input: Tuple[Tensor, ...] = tuple(batch)
        self._versions = versions(self._input)
        self._recompute: Optional[Tensor] = None
        self._saved: List[int] = []
        self._next = 0
        self._passing = True
        self._tensors: Dict[int, Tuple[Any, Optional[int]]] = {}
        self._holder: Callable[[], Any] = _gone
        self._held: Dict[int, Tensor] = {}
        self.filled = False
        self._changed = False
        self._ambient = ambient
        self._hooks = _users_hooks(ambient)
        self._thread = threading.get_ident()
        self._snapshot = snapshot
        self._stream = current_stream(device)
        self._random = RandomState(device, quiet)
        self._samples: List[Tensor] = []

    def settle(self, output: Batch) -> None:
        """Close the first pass."""
        self._passing = False
        self._random.settle()
        self._changed = versions(self._input) != self._versions
        self._samples = [sample.clone() for sample in _samples(output)]

    def number(self, tensor: Tensor) -> int:
        """Pack hook of the first pass: keep a number and a fingerprint, not the tensor."""
        self._check_thread()
        # An integer, since Python's garbage collector goes through whatever else a graph holds.
        self._saved.append(hash((tensor.shape, tensor.dtype)))
        return len(self._saved) - 1

    def hand_over(self, phony: Tensor) -> Tensor:
        """Leave the input with a ``Recompute`` node, which checks its version and frees it.

        An input that the first pass changed stays here: :meth:`fill` has to raise, and says more
        than the check of versions would.
        """
        kept = () if self._changed else self._input
        self._recompute = Recompute.apply(  # type: ignore[no-untyped-call]
            phony, weakref.ref(self), kept)
        if kept:
            self._input = ()
        return self._recompute

    def fill(self) -> None:
        """Run the function again and keep what its nodes save."""
        hooks = innermost_hooks()
        try:
            # Autograd may call this on another stream than the one whose nodes take the tensors.
            with use_stream(self._stream):
                self._fill()
        finally:
            drop_hooks_above(hooks)
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.drop)

    def _fill(self) -> None:
        node: Any = None if self._recompute is None else self._recompute.grad_fn
        # Where an earlier backward has freed the input, PyTorch raises its usual error here.
        input = self._input if node is None or self._changed else node.saved_tensors
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in input)
        self._next = 0
        self._passing = True
        self._thread = threading.get_ident()
        try:
            with self._random.restored(), enable_recomputing(), torch.enable_grad(), \
                    self._snapshot.restored() if self._snapshot else no_context, \
                    saved_tensors_hooks(self._keep, self.unpack):
                output = self._ambient.rerun(
                    lambda: self._function(leaves[0] if self._atomic else leaves))
        finally:
            self._passing = False
        if self._changed:
            raise RuntimeError('the input of a checkpointed micro-batch, or a skip tensor that it '
                               'popped, was changed in place; change a copy instead, or use '
                               "checkpoint='never'")
        if self._next != len(self._saved):
            raise RuntimeError(_other_path(f'it saved {self._next} tensors for backward, '
                                           f'the first pass {len(self._saved)}'))
        self._compare(_samples(Batch(output)))
        self.filled = True

    def _compare(self, samples: List[Tensor]) -> None:
        for now, before in zip(samples, self._samples):
            if torch.equal(now, before):
                continue
            # A kernel may add in another order, as where memory lies at another address.
            tolerance = torch.finfo(before.dtype).eps ** 0.5
            scale = before.abs().nan_to_num(0, 0, 0).max().item()
            if not torch.allclose(now, before, rtol=tolerance, atol=tolerance * scale,
                                  equal_nan=True):
                raise RuntimeError(_other_path('its output has other values'))

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
    return outer._hooks if isinstance(outer, Recomputation) else hooks


def _samples(output: Batch) -> List[Tensor]:
    """Take some elements of what a pass gave, to see whether another pass gives the same.

    Not on CUDA, where to look at a number is to wait for it.
    """
    return [_sample(x.detach()) for x in output
            if x.device.type == 'cpu' and x.is_floating_point()]


def _sample(x: Tensor) -> Tensor:
    number = x.numel()
    return x if number <= SAMPLES else x.flatten()[::number // SAMPLES]


def _gone() -> None:
    """Answer as a dead weak reference does."""


def _other_path(difference: str) -> str:
    return ('the recomputation of a checkpointed micro-batch took another path than its first '
            f'pass: {difference}. Gradients would be wrong. Let the layers do the same in both '
            "passes (torchgpipe.is_recomputing() tells them apart), or use checkpoint='never'.")


class Checkpoint(torch.autograd.Function):
    """Mark the output of a checkpointed call; in backward, see that its graph is filled.

    Takes ``(phony, recomputation, *output)`` and gives the output: step 4 of the note "How
    checkpointing works" in ``checkpoint.py``.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Recomputation,
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
    """Run a checkpointed call again, before its gradient is there.

    Takes ``(phony, recomputation, input)`` and gives a phony: step 2 of the note "How
    checkpointing works" in ``checkpoint.py``.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor,
                recomputation: Callable[[], Optional[Recomputation]], input: Tuple[Tensor, ...]
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
