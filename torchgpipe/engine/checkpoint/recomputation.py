"""Recomputation: repeat a checkpointed call, and pass its tensors to the first pass's graph.

See [Note: How checkpointing works] in :mod:`torchgpipe.engine.checkpoint`.

[Note: Ownership of a recomputation]
PyTorch's own nodes are invisible to Python's garbage collector, so no cycle may lead through the
graph (rule 6). An arrow is a strong reference::

    Recompute, Checkpoint, layers' nodes ──▶ Recomputation ──▶ input ──▶ earlier nodes

So a recomputation is possible as long as any hollow node lives, even if only a gradient of a
gradient still refers to it. The last run frees the input, the function and the state for another
run (rule 7). What remains of the :class:`Recomputation` has no tensor with a graph.

[Note: Lifetime of a recomputed tensor]
    run ──keep──▶ RecomputedTensors.tensors[k] ──take──▶ the node that saved it ──▶ freed
Each backward pass has its own fill. So several threads may run through a retained graph. A layer
may run a nested pass within it, such as the solver of an equilibrium model, often many times. If
the nested pass retains the graph, it reads the tensors of the outer pass, and leaves them there.
PyTorch's own nodes unpack a tensor exactly once. A `torch.autograd.Function` unpacks all its
tensors at each access of `ctx.saved_tensors`, so these stay until another node's turn. Tensors
that no node unpacked are dropped at the end of the pass.

[Note: Saved by compiled code]
``torch.compile`` keeps several codes for a layer and chooses by the input, the newest ones first.
So a recomputation may run a code that did not exist in the first pass, such as for another size of
micro-batches. The compiler decides which tensors a code saves, and in which order. But the
backward of the first pass's code uses them. Only the values show whether they are the same.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from sys import _getframe
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.context import ThreadState, context
from torchgpipe.base.errors import add_note, changed_input, nested, other_path
from torchgpipe.base.private import (
    APPLY,
    Hooks,
    PythonNode,
    at_end_of_backward,
    backward_pass,
    compiled_code,
    current_node,
    retains_graph,
    uncompiled,
    versions,
)
from torchgpipe.base.structure import Kind, Tensors, check_nested, once
from torchgpipe.engine.backward_order import Checkpoint
from torchgpipe.engine.checkpoint.offload import Offload
from torchgpipe.engine.checkpoint.random import Draws
from torchgpipe.engine.checkpoint.samples import (
    PendingComparison,
    agree,
    compare,
    elements_of,
    samples_of,
)
from torchgpipe.engine.checkpoint.selection import Selection
from torchgpipe.engine.checkpoint.state import CellState, run_on
from torchgpipe.engine.streams import AbstractStream, CPUStream, use_stream

# The tensors of one backward pass.


class Saved(NamedTuple):
    """A tensor that compiled code saved in a first pass: the code, and some elements."""

    code: object
    elements: Tensor | None

    @staticmethod
    def of(code: object, tensor: Tensor) -> 'Saved':
        """Record a tensor."""
        elements = elements_of(tensor, every=True)
        if elements is not None:
            # On its device, because it will rarely be read.
            elements = elements.clone()
        return Saved(code, elements)


@dataclass(slots=True, eq=False)
class RecomputedTensors:
    """The tensors of one recomputation, for the nodes of one backward pass."""

    #: By number, a fingerprint of the tensor that the first pass would have saved.
    _saved: list[int]
    _compiled: dict[int, Saved]
    _hooks: Hooks | None
    #: The number of tensors saved so far.
    number: int = 0
    #: The Python node that unpacks its tensors now, and these tensors.
    _node: weakref.ref[Any] | None = None
    _unpacked: dict[int, Tensor] = field(default_factory=dict)
    #: The packed tensors that no node has taken yet, and their versions.
    _tensors: dict[int, tuple[Any, int | None]] = field(default_factory=dict)

    @uncompiled
    def keep(self, tensor: Tensor) -> int:
        """Pack hook of the recomputation: keep the tensor under its number."""
        k = self.number
        self.number += 1
        fingerprint = hash((tensor.shape, tensor.dtype))
        if k < len(self._saved) and self._saved[k] != fingerprint:
            if tensor.is_nested:
                raise nested()
            raise other_path(
                f'saved tensor {k} is now {tensor.dtype} of shape '
                f'{tuple(tensor.shape)}, which it was not'
            )
        code = None
        frame = _getframe(1)
        if APPLY is None or frame.f_code is APPLY:
            code = compiled_code(frame)
        if code is not None or k in self._compiled:
            _check_code(k, self._compiled.get(k), code, tensor)
        # Detached, so that the recomputation's own graph does not live as long as its tensors.
        alias = tensor.detach()
        if self._hooks is None:
            self._tensors[k] = alias, alias._version
        else:
            pack, _ = self._hooks
            self._tensors[k] = pack(alias), None
        return k

    def take(
        self,
        k: int,
        release: bool = True,
    ) -> Tensor | None:
        """Return a tensor; ``None`` if it was released before."""
        node = current_node()
        if self._node is not None and self._node() is not node:
            self._node = None
            self._unpacked = {}
        if k in self._unpacked:
            return self._unpacked[k]
        if k not in self._tensors:
            return None
        tensor: Tensor
        if release:
            tensor, version = self._tensors.pop(k)
        else:
            tensor, version = self._tensors[k]
        if self._hooks is not None:
            _, unpack = self._hooks
            tensor = unpack(tensor)
        # PyTorch checks no versions behind hooks, so it is done in this place.
        elif tensor._version != version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an '
                f'inplace operation: {tensor.dtype} of shape {tuple(tensor.shape)} is at version '
                f'{tensor._version}; expected version {version} instead'
            )
        # Such a node unpacks all its tensors at each access of `ctx.saved_tensors`.
        if release and isinstance(node, PythonNode):
            self._node = weakref.ref(node)
            self._unpacked[k] = tensor
        return tensor


def _check_code(
    k: int,
    first: Saved | None,
    code: object | None,
    tensor: Tensor,
) -> None:
    """Compare saved tensor ``k`` with the first pass: [Note: Saved by compiled code].

    Raises:
        RuntimeError: Another code has saved another tensor.
    """
    if first is not None:
        if code is first.code:
            return
        now = elements_of(tensor, every=True)
        if first.elements is not None and now is not None and agree(now, first.elements):
            return
    if first is not None or code is not None:
        raise other_path(
            f'saved tensor {k} is another one, saved by other compiled code, which torch.compile '
            'has made since, or has chosen for another reason. Call the model again, with all its '
            'code compiled by now'
        )


# The call, and its repetition.


#: The checkpointed function, which is called again.
Call = Callable[[list[Tensor]], list[Tensor]]

AGAIN = (
    'All outputs of a checkpointed micro-batch come of one recomputation, which has ended. '
    'Add up the losses and go back once, or say backward(retain_graph=True) for all but the '
    "last; in a layer of a step, use checkpoint='never'."
)


class Life(Enum):
    """The life of a recomputation."""

    #: The first pass runs. Its graph is hollow, so no layer can ask for gradients in it.
    FIRST_PASS = 0
    #: The call can run again. It does in each backward pass, as long as these retain the graph.
    REPEATABLE = 1
    #: The last run has ended, and the data for another one are freed. The tensors of this run stay
    #: until their nodes take them.
    RELEASED = 2


@dataclass(eq=False, repr=False)
class Recomputation:
    """The recomputation of one checkpointed call, which all nodes of the call share."""

    _function: Call
    _state: ThreadState
    _draws: Draws
    #: The state of its layers at the start of the call.
    cell_state: CellState | None
    #: The stream on which it runs.
    _stream: AbstractStream
    #: The kept results of operations, if a policy keeps any.
    _selection: Selection | None
    #: Returns the error message about an input that the first pass changed.
    _blame: Callable[[Any], str] = changed_input
    #: Outputs that cannot be compared with the first pass yet.
    _pending: deque[PendingComparison] = field(default_factory=deque)
    _offload: Offload | None = None
    _life: Life = Life.FIRST_PASS
    #: Puts the inputs in their places, of which one input may have several.
    _spread: Kind = list
    #: The tensors of :meth:`prefetch`.
    _ahead: RecomputedTensors | None = None

    def __post_init__(self) -> None:
        #: By number of a saved tensor, a fingerprint.
        self._saved: list[int] = []
        self._compiled: dict[int, Saved] = {}
        #: The tensors of each backward pass, by its number.
        self._fills: dict[int, RecomputedTensors] = {}

    def first_pass(self, tensors: list[Tensor]) -> list[Tensor]:
        """Call the function for the first time. Its graph saves numbers in place of tensors."""
        # A skip may be a tensor of the batch. Then they are also one in the recomputation.
        input: Tensors = tuple(tensors)
        if len(input) > 1:
            input, self._spread = once(tensors, list)
        before = versions(input)
        hooks = saved_tensors_hooks(self._number, self._unpack)
        function = partial(self._function, tensors)
        if self._selection is not None:
            function = partial(self._selection.record, hooks, function)
        self._num_threads = torch.get_num_threads()

        outside = context.checkpointing
        context.checkpointing = True
        try:
            with hooks:
                output = self._draws.first_pass(function)
        finally:
            self._life = Life.REPEATABLE
            context.checkpointing = outside

        self._versions = versions(input)
        self._changed = self._versions != before
        self._samples = samples_of(output)
        self._keep_input(input)
        return output

    def _keep_input(self, input: Tensors) -> None:
        """Keep the input, packed by the user's hooks, or in host memory by an offload.

        An input that the first pass changed is kept as it is, because the recomputation raises.
        """
        self._input: Sequence[Any] = input
        self._requires_grad = [x.requires_grad for x in input]
        if self._changed:
            return
        if self._state.hooks is not None:
            pack, _ = self._state.hooks
            with torch.no_grad():
                self._input = [pack(x.detach()) for x in input]
        elif self._offload is not None:
            self._input = self._offload.store(input, self._stream)

    def mark(
        self,
        output: list[Tensor],
        phonies: Sequence[Tensor] = (),
        always: bool = False,
    ) -> Tensor | None:
        """Add a ``Checkpoint`` node to the output, in place.

        Args:
            output: The output of the first pass. Tensors that need no gradient stay out of the
                graph, as they do without checkpointing.
            phonies: Phonies of nodes that run after this one in backward.
            always: Whether to make the output require grad if no tensor in it does.

        Returns:
            A phony for the node that runs before; ``None`` if no tensor requires grad.
        """
        ks = [k for k, y in enumerate(output) if y.requires_grad]
        if always and not ks:
            ks = [k for k, y in enumerate(output) if y.is_floating_point()]
        if not ks:
            return None
        tensors = [*phonies, *[output[k] for k in ks]]
        *marked, phony = Checkpoint.apply(  # type: ignore[no-untyped-call]
            self, len(phonies), *tensors
        )
        for k, y in zip(ks, marked):
            output[k] = y
        return phony  # type: ignore[no-any-return]

    @uncompiled
    def _number(self, tensor: Tensor) -> int:
        """Pack hook of the first pass: keep a number and a fingerprint, not the tensor."""
        # An integer, because other objects that Python nodes save are traversed by Python's
        # garbage collector.
        if tensor.is_nested:
            check_nested(tensor)
        saved = self._saved
        k = len(saved)
        saved.append(hash((tensor.shape, tensor.dtype)))
        frame = _getframe(1)
        # [Note: Saved by compiled code]
        if APPLY is None or frame.f_code is APPLY:
            code = compiled_code(frame)
            if code is not None:
                self._compiled[k] = Saved.of(code, tensor)
        return k

    def recompute(self, node: Any) -> None:
        """Run again for this backward pass. If it is the last one, release the data for a run."""
        if backward_pass() not in self._fills:
            if self._life is Life.RELEASED:
                _raise_again(node)
            self._refill(is_last=not retains_graph())
        if self._life is Life.REPEATABLE and not retains_graph():
            self.forget()

    def _refill(self, is_last: bool = False) -> RecomputedTensors:
        """Give the pass new tensors, and drop the rest at its end."""
        fill = self._run_again(is_last)
        number = backward_pass()
        self._fills[number] = fill
        if number != -1:  # Outside of a backward pass, such as for a user who reads saved tensors.
            remove: Callable[..., Any] = self._fills.pop
            at_end_of_backward(partial(remove, number, None))
        return fill

    def prefetch(self) -> None:
        """Run again before the only backward pass that will need it, and release all other data.

        The caller then calls :meth:`drop` after this pass.
        """
        if self._life is Life.REPEATABLE:
            monitor = self._draws.monitor
            # In a step, the pass that the monitor watches has not ended yet. On the CPU, the
            # output of the recomputation is compared at once, and shows a draw as well.
            if monitor is not None and self._stream is not CPUStream:
                monitor.check()
            self._ahead = self._run_again(is_last=True)
            self.forget()

    def drop(self) -> None:
        """Drop the tensors of :meth:`prefetch` that no node unpacked."""
        self._ahead = None

    @uncompiled
    def _run_again(self, is_last: bool) -> RecomputedTensors:
        """Run the function again, and keep the tensors that its nodes save."""
        if self._life is Life.RELEASED:
            _raise_again()
        hooks = None
        if self._state.hooks is not None:
            hooks = self._state.hooks_of_recomputation()
        if hooks is not None and self._selection is not None:
            hooks = self._selection.hooks_aside(hooks)
        fill = RecomputedTensors(self._saved, self._compiled, hooks)
        try:
            # `Recompute` belongs to a copy stream. The nodes that take the tensors belong to this
            # stream.
            with use_stream(self._stream):
                leaves = []
                for x, requires_grad in zip(self._take_input(), self._requires_grad):
                    leaves.append(x.detach().requires_grad_(requires_grad))
                output = self._repeat_call(leaves, fill, is_last)
                if fill.number != len(self._saved):
                    raise other_path(
                        f'it saved {fill.number} tensors for backward, the first '
                        f'pass {len(self._saved)}'
                    )
                self._pending.extend(compare(output, self._samples))
                if self._selection is not None:
                    self._pending.extend(self._selection.pending)
        except Exception as error:
            if self.cell_state is not None:
                # The watch may have missed a change, so the next first pass is watched again.
                self.cell_state.layers.observed.watch_again()
            add_note(error, f'in the recomputation of {self._function}')
            raise
        return fill

    def _take_input(self) -> Sequence[Tensor]:
        """Return the input."""
        if self._changed:
            return self._input
        if self._state.hooks is not None:
            # As PyTorch, which does not check versions behind hooks of the user.
            _, unpack = self._state.hooks
            return [unpack(x) for x in self._input]
        watched = self._input
        if self._offload is not None:
            watched = self._offload.aliases
        now = versions(watched)
        if now != self._versions:
            raise RuntimeError(
                'the input of a checkpointed micro-batch has been modified by an inplace '
                f'operation between forward and backward (it is at versions {now}; expected '
                f'versions {self._versions}). Change a copy instead'
            )
        if self._offload is not None:
            return self._offload.fetch(tuple(self._input), self._stream)
        return self._input

    def _repeat_call(
        self,
        leaves: list[Tensor],
        fill: RecomputedTensors,
        is_last: bool,
    ) -> list[Tensor]:
        input = self._spread(leaves)
        function: Callable[[], list[Tensor]] = partial(self._function, input)
        hooks = saved_tensors_hooks(fill.keep, _refuse_gradient)
        if self._selection is not None:
            function = partial(self._selection.replay, hooks, function, is_last)
        draws = self._draws
        if draws.states or (draws.monitor is not None and draws.monitor.drawn):
            function = partial(draws.replay, function)
        if self.cell_state is not None:
            function = partial(run_on, self.cell_state, function)
        # A Ctrl-C may come before the hooks count as entered. They stay active then, until
        # autograd restores the thread at the end of the backward pass.
        was_checkpointing = context.checkpointing
        was_recomputing = context.recomputing
        context.checkpointing = False
        context.recomputing = True
        try:
            with torch.enable_grad(), hooks:
                output = self._state.rerun(function, self._num_threads)
        except Exception:
            # A changed input cannot be recomputed. It runs all the same, because PyTorch's "a leaf
            # Variable that requires grad …" is in the context of the error, and shows the line.
            if self._changed:
                raise RuntimeError(self._blame(self._spread(leaves)))  # noqa: B904
            raise
        finally:
            context.checkpointing = was_checkpointing
            context.recomputing = was_recomputing
        if self._changed:
            raise RuntimeError(self._blame(self._spread(leaves)))
        return output

    def forget(self) -> None:
        """Release the data for another run: [Note: Ownership of a recomputation]."""
        # Rule 6: No reference cycle passes through the autograd graph, because Python's garbage
        # collector cannot see it.
        # Rule 7: The graph owns the input of a checkpointed cell, and the last recomputation frees
        # it. The node that saved a recomputed tensor frees that tensor.
        self._life = Life.RELEASED
        del self._function, self._draws, self.cell_state, self._state
        del self._blame, self._selection, self._input

    def _unpack(self, k: int) -> Tensor:
        """Unpack hook of the first pass: [Note: Lifetime of a recomputed tensor]."""
        # This pass has run the cell again, and no other pass reads its tensors.
        fill = self._fills.get(backward_pass())
        if fill is not None:
            tensor = fill.take(k)
            if tensor is not None:
                return tensor

        # `prefetch` or a pass around this one has run the cell. A nested pass leaves the tensors
        # there, if it retains the graph.
        release = not retains_graph()
        for fill in (self._ahead, *self._fills.values()):
            if fill is not None:
                tensor = fill.take(k, release)
                if tensor is not None:
                    return tensor

        if self._life is Life.FIRST_PASS:
            _refuse_gradient(k)
        # This pass does not lead through `Checkpoint`, such as for a gradient of a gradient.
        tensor = self._refill().take(k)
        assert tensor is not None
        return tensor


def _raise_again(node: Any = None) -> None:
    """Raise PyTorch's error about a freed graph, by reading the tensors of a freed node if any."""
    try:
        if node is not None:
            node.saved_tensors  # raises PyTorch's own error
        raise RuntimeError('Trying to backward through the graph a second time')
    except RuntimeError as error:
        add_note(error, AGAIN)
        raise


def _refuse_gradient(k: int) -> NoReturn:
    raise RuntimeError(
        'a layer asked for gradients within its own forward, from which checkpointing has taken '
        "the tensors; use checkpoint='never' for such a model"
    )
