"""Recomputation: repeat a checkpointed call, and pass its tensors to the first pass's graph.

[Note: Samples of other devices] To look at a number on another device than the CPU is to wait for
that device. So samples are copied to the CPU without waiting, and compared when they have come,
which is noticed by an event. If they differ, the next forward pass raises::

    forward          sample ── copy ──▶ a
    recomputation    sample ── copy ──▶ b, then an event
    next forward     if the event has happened: compare a and b

See [Note: How checkpointing works] in :mod:`torchgpipe.engine.checkpoint`.

[Note: Ownership of a recomputation]
Nodes of PyTorch's own are invisible to Python's garbage collector, so no cycle may lead through
the graph. An arrow is a strong reference::

    Recompute, Checkpoint, layers' nodes ──▶ Recomputation ──▶ input ──▶ earlier nodes

So the input can be recomputed from as long as any hollow node lives, even if only a gradient of a
gradient still refers to it; and it is freed when Checkpoint has run for the last time. With it
goes all else that a recomputation needs.

[Note: Lifetime of a recomputed tensor]
    run ──keep──▶ RecomputedTensors.tensors[k] ──take──▶ the node that saved it ──▶ freed
Each backward pass has a fill of its own, since several threads may go through a graph that is
retained. A node of PyTorch's own unpacks a tensor exactly once. A `torch.autograd.Function`
unpacks all its tensors whenever its author says `ctx.saved_tensors`, so these stay until another
node's turn. What no node asked for is dropped at the end of the pass.

[Note: Saved by compiled code]
``torch.compile`` keeps several codes for a layer and chooses by the input, the newest ones first.
So where a recomputation runs, there may be a code that was not there in the first pass, as for
another size of micro-batches. What a code saves, and in which order, is up to the compiler; and it
is the code of the first pass whose backward will take it. Only the values tell.
"""
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.context import ThreadState, context
from torchgpipe.base.errors import add_note, changed_input, nested, other_path
from torchgpipe.base.private import (APPLY, Hooks, PythonNode, at_end_of_backward, backward_pass,
                                     compiled_code, current_node, retains_graph, uncompiled,
                                     unseen, versions)
from torchgpipe.base.structure import Kind, Tensors, check_nested, once
from torchgpipe.engine.checkpoint.random import Draws
from torchgpipe.engine.checkpoint.results import Results
from torchgpipe.engine.checkpoint.state import CellState, run_on
from torchgpipe.engine.offload import Offload
from torchgpipe.engine.streams import AbstractStream, Checkpoint, use_stream

__all__ = ['PendingComparison', 'Recomputation', 'RecomputedTensors', 'Sample', 'Saved', 'agree',
           'compare', 'compare_pending', 'elements_of', 'keep']

#: How many elements of an output are compared, about.
NUMBER = 64

DIFFERENCE = 'its output has other values'


class Sample(NamedTuple):
    """Type, shape and some elements of a tensor; no elements where they can't be looked at."""

    dtype: torch.dtype
    shape: torch.Size
    elements: Tensor | None


class PendingComparison(NamedTuple):
    """Two samples that are still on their way from another device."""

    now: Tensor
    before: Tensor
    #: Whether they have come.
    is_there: Callable[[], bool]


def keep(output: Sequence[Tensor]) -> list[Sample]:
    """Take samples of the tensors that a first pass gave, which outlive these."""
    with unseen():
        found = []
        for x in output:
            if x.is_nested:
                x = _values(x)
            elements = elements_of(x)
            found.append(Sample(x.dtype, x.shape, elements if elements is None else
                                elements.clone() if _is_here(x) else _to_host(elements)))
        return found


def _values(x: Tensor) -> Tensor:
    """Return the elements of a nested tensor, whose own shape is another one in each pass."""
    check_nested(x)
    return x.detach().values()


def elements_of(x: Tensor, every: bool = False) -> Tensor | None:
    """Return some elements, in the memory of the tensor; ``None`` if they can't be looked at.

    Args:
        x: The tensor.
        every: Whether to look at one that can have no gradient, too.
    """
    x = x.detach()
    if x.is_meta or x.layout is not torch.strided:
        return None
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif not every and not x.is_floating_point():
        return None
    number = x.numel()
    return x if number <= NUMBER else x.flatten()[::number // NUMBER]


def _is_here(x: Tensor) -> bool:
    """Return whether the elements of a tensor can be looked at without waiting."""
    return x.is_cpu


def _to_host(elements: Tensor) -> Tensor:
    return elements.to('cpu', non_blocking=True)


def compare(output: Sequence[Tensor], before: list[Sample]) -> list[PendingComparison]:
    """Compare what a recomputation gave with what its first pass gave.

    Args:
        output: What it gave.
        before: What was kept of the first pass.

    Returns:
        What can't be compared yet: [Note: Samples of other devices].

    Raises:
        RuntimeError: They differ.
    """
    if len(output) != len(before):
        raise other_path(f'it gave {len(output)} tensors, the first pass {len(before)}')
    late = []
    with unseen():
        for k, (x, old) in enumerate(zip(output, before)):
            if x.is_nested:
                x = _values(x)
            if (x.dtype, x.shape) != (old.dtype, old.shape):
                raise other_path(f'its output {k} is {x.dtype} of shape {tuple(x.shape)}, that of '
                                 f'the first pass {old.dtype} of shape {tuple(old.shape)}')
            elements = elements_of(x)
            if elements is None or old.elements is None:
                continue
            if not _is_here(x):
                late.append(PendingComparison(_to_host(elements), old.elements, _event(x.device)))
            elif not (torch.equal(elements, old.elements) or agree(elements, old.elements)):
                raise other_path(DIFFERENCE)
    return late


def compare_pending(late: deque[PendingComparison], j: int) -> None:
    """Compare those samples of partition ``j`` that have come; the others stay.

    Raises:
        RuntimeError: They differ.
    """
    while late:
        try:
            pair = late.popleft()
        except IndexError:  # Another thread was faster.
            return
        if not pair.is_there():
            late.appendleft(pair)
            return
        with unseen():
            same = agree(pair.now, pair.before)
        if not same:
            late.clear()
            raise other_path(f'{DIFFERENCE}, in partition {j} and an earlier backward pass')


def _event(device: torch.device) -> Callable[[], bool]:
    """Return what tells whether all that was queued so far on the current stream is done."""
    return torch.accelerator.current_stream(device).record_event().query


def agree(a: Tensor, b: Tensor) -> bool:
    """Return whether elements are the same, but for rounding."""
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    # A kernel may add in another order, as where memory lies at another address.
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    scale = b.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# --- the tensors of one backward pass
# ----------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What compiled code has saved in a first pass: which code, and some elements."""

    code: object
    elements: Tensor | None

    @staticmethod
    def of(code: object, tensor: Tensor) -> 'Saved':
        """Take note of a tensor."""
        elements = elements_of(tensor, every=True)
        # On its device, since it will hardly ever be looked at.
        return Saved(code, None if elements is None else elements.clone())


class RecomputedTensors:
    """The tensors of one recomputation, for the nodes of one backward pass.

    Args:
        saved: Fingerprints of what the first pass saved.
        compiled: Those of compiled code.
        hooks: The user's saved-tensor hooks, if any.
    """

    __slots__ = ('_compiled', '_held', '_holder', '_hooks', '_saved', '_tensors', 'number')

    def __init__(self, saved: list[int], compiled: dict[int, Saved], hooks: Hooks | None) -> None:
        self._saved = saved
        self._compiled = compiled
        self._hooks = hooks
        #: How many have come.
        self.number = 0
        self._tensors: dict[int, tuple[Any, int | None]] = {}
        self._holder: Callable[[], Any] = _gone
        self._held: dict[int, Tensor] = {}

    @uncompiled
    def keep(self, tensor: Tensor) -> int:
        """Pack hook of the recomputation: keep the tensor under its number."""
        k = self.number
        self.number += 1
        if k < len(self._saved) and self._saved[k] != hash((tensor.shape, tensor.dtype)):
            if tensor.is_nested:
                raise nested()
            raise other_path(f'saved tensor {k} is now {tensor.dtype} of shape '
                             f'{tuple(tensor.shape)}, which it was not')
        frame = _getframe(1)
        code = compiled_code(frame) if APPLY is None or frame.f_code is APPLY else None
        if code is not None or k in self._compiled:
            _check_code(k, self._compiled.get(k), code, tensor)
        # Detached, lest the recomputation's own graph, of no use, live as long as its tensors.
        alias = tensor.detach()
        hooks = self._hooks
        self._tensors[k] = (alias, alias._version) if hooks is None else (hooks[0](alias), None)
        return k

    def take(self, k: int) -> Tensor | None:
        """Return a tensor, and let go of it; ``None`` if it was taken before."""
        node = current_node()
        if self._held and self._holder() is not node:
            self._held = {}
        if k in self._held:
            return self._held[k]
        if k not in self._tensors:
            return None
        tensor: Tensor
        tensor, version = self._tensors.pop(k)
        if self._hooks is not None:
            tensor = self._hooks[1](tensor)
        # PyTorch checks no versions behind hooks, so it is done here.
        elif tensor._version != version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an '
                f'inplace operation: {tensor.dtype} of shape {tuple(tensor.shape)} is at version '
                f'{tensor._version}; expected version {version} instead')
        if isinstance(node, PythonNode):
            self._holder = weakref.ref(node)
            self._held[k] = tensor
        return tensor


def _gone() -> None:
    """Answer as a dead weak reference does."""


def _check_code(k: int, first: Saved | None, code: object | None, tensor: Tensor) -> None:
    """Compare saved tensor ``k`` with that of the first pass: [Note: Saved by compiled code].

    Raises:
        RuntimeError: Another code has saved something else.
    """
    if code is (None if first is None else first.code):
        return
    now = elements_of(tensor, every=True)
    if first is None or first.elements is None or now is None or not agree(now, first.elements):
        raise other_path(
            f'saved tensor {k} is another one, saved by other compiled code, which torch.compile '
            'has made since, or has chosen for another reason. Call the model again, with all its '
            'code compiled by now')


# --- the call, and its repetition
# ----------------------------------------------------------------------------------


#: What is called again.
Call = Callable[[list[Tensor]], list[Tensor]]

AGAIN = ('All outputs of a checkpointed micro-batch come of one recomputation, which has ended. '
         'Add up the losses and go back once, or say backward(retain_graph=True) for all but the '
         'last.')


class Recomputation:
    """What the nodes of one checkpointed call share: how to run it again, and what that gave.

    Args:
        function: What is called, with a list of tensors; it gives another one.
        state: The state of the calling thread.
        draws: The random numbers that it draws.
        layers: What it is made of, as it finds that.
        stream: Where it runs.
        blame: Says who changed the input in place, given that.
        pending: Where to put outputs that can't be compared yet.
        results: Those of layers that are not to run again, if any.
        offload: Lets the input wait elsewhere, if it should.
    """

    __slots__ = ('_ahead', '_blame', '_changed', '_compiled', '_draws', '_fills', '_function',
                 '_input', '_num_threads', '_offload', '_open', '_pending', '_requires_grad',
                 '_results', '_samples', '_saved', '_spread', '_state', '_stream', '_versions',
                 'layers')

    def __init__(self, function: Call, state: ThreadState, draws: Draws,
                 layers: CellState | None, stream: AbstractStream,
                 blame: Callable[[Any], str] = changed_input,
                 pending: deque[PendingComparison] | None = None,
                 results: Results | None = None, offload: Offload | None = None) -> None:
        self._function: Call | None = function
        self._results = results
        self._offload = offload
        self._blame = blame
        self._pending: deque[PendingComparison] = deque() if pending is None else pending
        self._state = state
        self._draws = draws
        self.layers = layers
        self._stream = stream
        #: Puts inputs where they stood, of which one may be several.
        self._spread: Kind = list
        self._saved: list[int] = []
        self._compiled: dict[int, Saved] = {}
        self._fills: dict[int, RecomputedTensors] = {}
        self._ahead: RecomputedTensors | None = None

    def first_pass(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the function for the first time; its graph saves numbers in place of tensors.

        Args:
            tensors: What to call it with.

        Returns:
            The function's output.
        """
        # A skip may be a tensor of the batch: then it is one in the recomputation, too.
        input: Tensors = tuple(tensors)
        if len(input) > 1:
            input, self._spread = once(tensors, list)
        before = versions(input)
        hooks = saved_tensors_hooks(self._number, self._unpack)
        assert self._function is not None
        function = partial(self._function, tensors)
        if self._results is not None:
            function = partial(self._results.record, hooks, function)
        self._num_threads = torch.get_num_threads()
        before_this, context.checkpointing = context.checkpointing, True
        self._open = True
        try:
            with hooks:
                output = self._draws.first_pass(function)
        finally:
            self._open = False
            context.checkpointing = before_this
        self._versions = versions(input)
        self._changed = self._versions != before
        self._samples = keep(output)
        self._keep(input)
        return output

    def _keep(self, input: Tensors) -> None:
        """Keep the input, as hooks of the user's pack it or where an offload puts it.

        One that the first pass changed stays as it is: the recomputation has to raise.
        """
        self._input: Sequence[Any] = input
        self._requires_grad = [x.requires_grad for x in input]
        if self._changed:
            return
        if self._state.hooks is not None:
            with torch.no_grad():
                self._input = [self._state.hooks[0](x.detach()) for x in input]
        elif self._offload is not None:
            self._input = self._offload.store(input, self._stream)

    def mark(self, output: list[Tensor], before: Sequence[Tensor] = (), always: bool = False
             ) -> Tensor | None:
        """Hang ``Checkpoint`` on the output, in place.

        Args:
            output: The output of the first pass. Tensors that need no gradient stay out of the
                graph, as they do without checkpointing.
            before: Phonies of nodes that run after this one in backward.
            always: Whether to make the output require grad if nothing in it does.

        Returns:
            A phony for the node that runs before; ``None`` if nothing requires grad.
        """
        where = [k for k, y in enumerate(output) if y.requires_grad]
        if always and not where:
            where = [k for k, y in enumerate(output) if y.is_floating_point()]
        if not where:
            return None
        *marked, phony = Checkpoint.apply(  # type: ignore[no-untyped-call]
            self, len(before), *before, *[output[k] for k in where])
        for k, y in zip(where, marked):
            output[k] = y
        return phony  # type: ignore[no-any-return]

    @uncompiled
    def _number(self, tensor: Tensor) -> int:
        """Pack hook of the first pass: keep a number and a fingerprint, not the tensor."""
        # An integer, since Python's garbage collector goes through whatever else a graph holds.
        if tensor.is_nested:
            check_nested(tensor)
        saved = self._saved
        k = len(saved)
        saved.append(hash((tensor.shape, tensor.dtype)))
        frame = _getframe(1)
        if (APPLY is None or frame.f_code is APPLY) and (code := compiled_code(frame)) is not None:
            self._compiled[k] = Saved.of(code, tensor)
        return k

    def recompute(self, node: Any) -> None:
        """Run again for the present backward pass, and let go of the rest if it is the last one.

        Args:
            node: The node that asks for it.
        """
        if backward_pass() not in self._fills:
            if self._function is None:
                _raise_again(node)
            self._refill()
        if self._function is not None and not retains_graph():
            self.forget()

    def _refill(self) -> RecomputedTensors:
        """Let the pass have new ones, and drop at its end what no node asked for."""
        fill, self._ahead = self._ahead or self._run_again(), None
        number = backward_pass()
        self._fills[number] = fill
        if number != -1:
            drop: Callable[..., Any] = self._fills.pop
            at_end_of_backward(partial(drop, number, None))
        return fill

    def prefetch(self) -> None:
        """Run again before the one backward pass that will need it, and let go of the rest."""
        self._ahead = self._run_again()
        self.forget()

    @uncompiled
    def _run_again(self) -> RecomputedTensors:
        """Run the function again, and keep what its nodes save."""
        if self._function is None:
            _raise_again()
        fill = RecomputedTensors(
            self._saved, self._compiled,
            None if self._state.hooks is None else self._state.hooks_of_recomputation())
        try:
            # Autograd may call this on another stream than the one whose nodes take the tensors.
            with use_stream(self._stream):
                leaves = [x.detach().requires_grad_(requires_grad) for x, requires_grad
                          in zip(self._take_input(), self._requires_grad)]
                output = self._recompute(leaves, fill)
                if fill.number != len(self._saved):
                    raise other_path(f'it saved {fill.number} tensors for backward, the first '
                                     f'pass {len(self._saved)}')
                self._pending.extend(compare(output, self._samples))
        except Exception:
            if self.layers is not None:  # so that more was to be seen than was seen
                self.layers.layers.observed.watch_again()
            raise
        return fill

    def _take_input(self) -> Sequence[Tensor]:
        """Return the input."""
        if self._changed:
            return self._input
        if self._state.hooks is not None:
            return [self._state.hooks[1](x) for x in self._input]
        own = self._input if self._offload is None else self._offload.aliases
        if (now := versions(own)) != self._versions:
            raise RuntimeError(
                'the input of a checkpointed micro-batch has been modified by an inplace '
                f'operation between forward and backward (it is at versions {now}; expected '
                f'versions {self._versions}). Change a copy instead')
        if self._offload is not None:
            return self._offload.fetch(tuple(self._input), self._stream)
        return self._input

    def _recompute(self, leaves: list[Tensor], fill: RecomputedTensors) -> list[Tensor]:
        assert self._function is not None
        function: Callable[[], list[Tensor]] = partial(self._function, self._spread(leaves))
        if self._results is not None:
            function = partial(self._results.replay, function)
        draws = self._draws
        if draws.states or (draws.monitor is not None and draws.monitor.drawn):
            function = partial(draws.replay, function)
        if self.layers is not None:
            function = partial(run_on, self.layers, function)
        # What an interrupt leaves behind of these hooks is dropped by autograd when the backward
        # pass ends.
        outside = context.checkpointing, context.recomputing
        context.checkpointing, context.recomputing = False, True
        try:
            with torch.enable_grad(), saved_tensors_hooks(fill.keep, _own_gradient):
                output = self._state.rerun(function, self._num_threads)
        except Exception:
            # Most likely PyTorch's "a leaf Variable that requires grad …". It shows the line.
            if self._changed:
                raise RuntimeError(self._blame(self._spread(leaves)))
            raise
        finally:
            context.checkpointing, context.recomputing = outside
        if self._changed:
            raise RuntimeError(self._blame(self._spread(leaves)))
        return output

    def forget(self) -> None:
        """Release the data that another run would need: [Note: Ownership of a recomputation]."""
        self._function = None
        del self._draws, self.layers, self._state, self._blame, self._results, self._input

    def _unpack(self, k: int) -> Tensor:
        """Unpack hook of the first pass: [Note: Lifetime of a recomputed tensor]."""
        if self._open:
            _own_gradient(k)
        tensor = (self._fills.get(backward_pass()) or self._refill()).take(k)
        if tensor is None:
            tensor = self._refill().take(k)
            assert tensor is not None
        return tensor


def _raise_again(node: Any = None) -> None:
    """Raise as PyTorch does, by a node whose graph was freed if there is one."""
    try:
        if node is not None:
            node.saved_tensors
        raise RuntimeError('Trying to backward through the graph a second time')
    except RuntimeError as error:
        add_note(error, AGAIN)
        raise


def _own_gradient(k: int) -> Tensor:
    raise RuntimeError(
        'a layer asked for gradients within its own forward, from which checkpointing has taken '
        "the tensors; use checkpoint='never' for such a model")
