"""Checkpointing of any function, with the interface of torchgpipe 0.0.7.

See [Note: How checkpointing works] in :mod:`torchgpipe.engine.checkpoint`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from torchgpipe.base.context import ThreadState, context, is_checkpointing, is_recomputing
from torchgpipe.base.structure import Function, Kind, Value
from torchgpipe.engine.backward_order import Checkpoint, Recompute, find_grad, get_phony, join
from torchgpipe.engine.cell import result_of
from torchgpipe.engine.checkpoint.random import Draws, Recorder, generators_of
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.streams import current_stream
from torchgpipe.legacy.pipeline import Batch

__all__ = [
    'Checkpoint',
    'Checkpointing',
    'Recompute',
    'checkpoint',
    'enable_checkpointing',
    'enable_recomputing',
    'is_checkpointing',
    'is_recomputing',
]


@contextmanager
def _phase(checkpointing: bool, recomputing: bool) -> Iterator[None]:
    before = context.checkpointing, context.recomputing
    context.checkpointing = checkpointing
    context.recomputing = recomputing
    try:
        yield
    finally:
        context.checkpointing, context.recomputing = before


def enable_checkpointing() -> AbstractContextManager[None]:
    """Make :func:`torchgpipe.is_checkpointing` true within the context.

    >>> with enable_checkpointing():
    ...     is_checkpointing(), is_recomputing()
    (True, False)
    """
    return _phase(True, context.recomputing)


def enable_recomputing() -> AbstractContextManager[None]:
    """Make :func:`torchgpipe.is_recomputing` true within the context.

    >>> with enable_recomputing():
    ...     is_checkpointing(), is_recomputing()
    (False, True)
    """
    return _phase(False, True)


def checkpoint(function: Function, input: Value) -> Value:
    """Call a function with checkpointing: :class:`Checkpointing` in one step.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    >>> import torch
    >>> x = torch.rand(2, 3, requires_grad=True)
    >>> checkpoint(torch.exp, x).sum().backward()
    >>> torch.equal(x.grad, x.exp())
    True

    Args:
        function: The function to call, now and again in backward.
        input: A tensor or a tuple of tensors, of any shapes.

    Returns:
        The function's result.
    """
    batch = Batch(input)
    checkpointing = Checkpointing(function, batch)
    batch = checkpointing.checkpoint()
    checkpointing.recompute(batch)
    return batch.value


class Checkpointing:
    """One checkpointed call of a function on a batch: [Note: How checkpointing works].

    The two halves are separate so that a ``Wait`` can be between them.

    >>> import torch
    >>> checkpointing = Checkpointing(torch.tanh, Batch(torch.rand(2, 3, requires_grad=True)))
    >>> output = checkpointing.checkpoint()
    >>> checkpointing.recompute(output)
    >>> output.tensor.sum().backward()

    Args:
        function: The function to call twice.
        batch: Its input.
    """

    __slots__ = ('_batch', '_function', '_recomputation')

    def __init__(self, function: Function, batch: Batch) -> None:
        self._function = function
        self._batch = batch
        self._recomputation: Recomputation | None = None

    def checkpoint(self) -> Batch:
        """Run the function, and add ``Checkpoint`` to its output.

        Returns:
            The function's output. It requires grad even if nothing in it did.
        """
        if not torch.is_grad_enabled():
            with enable_checkpointing():
                return self._batch.call(self._function)
        device = self._batch.device
        call = _FunctionCall(self._function, self._batch.kind)
        self._recomputation = Recomputation(
            call,
            ThreadState.capture(),
            Draws(generators_of(device), Recorder()),
            None,
            current_stream(device),
            None,
        )
        output = self._recomputation.first_pass([*self._batch])
        self._recomputation.mark(output, [get_phony(device, requires_grad=True)], always=True)
        return Batch.of(tuple(output), call.kind)

    def recompute(self, batch: Batch) -> None:
        """Add ``Recompute`` to the batch that :meth:`checkpoint` returned, in place.

        Args:
            batch: That batch, or the result of a ``Wait`` on it.
        """
        if self._recomputation is not None and torch.is_grad_enabled():
            output = [*batch]
            k = find_grad(output)
            if k is not None:
                output[k] = join(
                    output[k],
                    Recompute.apply(  # type: ignore[no-untyped-call]
                        get_phony(output[k].device, requires_grad=True), self._recomputation
                    ),
                )
                batch[:] = output


class _FunctionCall:
    """A function from value to value as a function from tensors to tensors; a graph owns it."""

    def __init__(self, function: Function, kind: Kind) -> None:
        self._function = function
        self._input_kind = self.kind = kind

    def __str__(self) -> str:
        return str(self._function)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        output, self.kind = result_of(self._function(self._input_kind(tensors)))
        return [*output]
