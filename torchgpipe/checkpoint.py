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
"""
from typing import Optional

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.aliases import Function, TensorOrTensors
from torchgpipe.ambient import Ambient
from torchgpipe.dependency import join
from torchgpipe.microbatch import Batch
from torchgpipe.passes import (enable_checkpointing, enable_recomputing, is_checkpointing,
                               is_recomputing)
from torchgpipe.phony import get_phony
from torchgpipe.recompute import Checkpoint, Recomputation, Recompute
from torchgpipe.snapshot import Snapshot

__all__ = ['Checkpoint', 'Checkpointing', 'Recompute', 'checkpoint', 'enable_checkpointing',
           'enable_recomputing', 'is_checkpointing', 'is_recomputing']


def checkpoint(function: Function, input: TensorOrTensors) -> TensorOrTensors:
    """Call a function with checkpointing: :class:`Checkpointing` in one step.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    >>> import torch
    >>> x = torch.rand(2, 3, requires_grad=True)
    >>> checkpoint(torch.exp, x).sum().backward()
    >>> torch.equal(x.grad, x.exp())
    True

    Args:
        function: What to call, now and again in backward.
        input: A tensor or a tuple of tensors, of any shapes.

    Returns:
        What the function returns.
    """
    batch = Batch(input)
    checkpointing = Checkpointing(function, batch)
    batch = checkpointing.checkpoint()
    checkpointing.recompute(batch)
    return batch.value


class Checkpointing:
    """One checkpointed call of a function on a batch: [Note: How checkpointing works].

    The two halves are apart so that a ``Wait`` can stand between them.

    >>> import torch
    >>> checkpointing = Checkpointing(torch.tanh, Batch(torch.rand(2, 3, requires_grad=True)))
    >>> output = checkpointing.checkpoint()
    >>> checkpointing.recompute(output)
    >>> output.tensor.sum().backward()

    Args:
        function: What to call, twice.
        batch: What to call it with.
        ambient: The thread's state, if the caller has it at hand.
        snapshot: What the function is made of, if it changes.
        quiet: Whether the function is known not to draw from the CPU's random generator.
        device: Where it runs, if not where the batch is.
    """

    __slots__ = ('_ambient', '_batch', '_device', '_function', '_quiet', '_recomputation',
                 '_snapshot')

    def __init__(self, function: Function, batch: Batch, *, ambient: Optional[Ambient] = None,
                 snapshot: Optional[Snapshot] = None, quiet: bool = False,
                 device: Optional[torch.device] = None) -> None:
        self._function = function
        self._batch = batch
        self._ambient = ambient
        self._snapshot = snapshot
        self._quiet = quiet
        self._device = device
        self._recomputation: Optional[Recomputation] = None

    def checkpoint(self, always: bool = True) -> Batch:
        """Run the function, and hang ``Checkpoint`` on its output.

        Args:
            always: Whether to do so, and so make it require grad, if nothing in it does.

        Returns:
            What the function gave.
        """
        function, batch = self._function, self._batch
        if not torch.is_grad_enabled():
            with enable_checkpointing():
                return batch.call(function)

        self._recomputation = recomputation = Recomputation(
            function, batch, self._ambient or Ambient.capture(), self._snapshot, self._quiet,
            self._device or batch.device)
        with enable_checkpointing(), \
                saved_tensors_hooks(recomputation.number, recomputation.unpack):
            output = batch.call(function)
        recomputation.settle(output)

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
        """Hang ``Recompute`` on the batch that :meth:`checkpoint` gave, in place.

        Args:
            batch: That batch, or what a ``Wait`` has made of it.
        """
        if self._recomputation is None or not torch.is_grad_enabled():
            return
        k = batch.find_grad()
        if k is None:
            return
        phony = get_phony(batch[k].device, requires_grad=True)
        batch[k] = join(batch[k], self._recomputation.hand_over(phony))
