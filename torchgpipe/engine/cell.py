"""The cell: one micro-batch in one partition, a function from tensors to tensors.

::

    batch ──┬─▶ value ──▶ layers ──▶ value ──┬──▶ batch
            │              │  ▲              │
    skips ──┴─▶ tracker ───┘  └── tracker ───┴──▶ skips

A cell does not know its neighbours. The run (:mod:`torchgpipe.engine.run`) brings the tensors and
passes the results on to other cells. Therefore cells may run in any order.

An error keeps its type and its traceback, which leads into the layer. The traceback does not show
the cell, so the error gains a note (PEP 678)::

    RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)
    in partition 1 on cuda:1, micro-batch 0 of 4, layer '3'

If the pipeline causes the error, another note names the fix (:class:`Remedy`). Such errors are
detected by PyTorch's message and by the place, because a layer may raise the same message by
itself.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, default_generator, nn

from torchgpipe.base.context import ThreadState, context
from torchgpipe.base.errors import add_note, changed_input
from torchgpipe.base.locks import Lock
from torchgpipe.base.structure import (
    Arguments,
    Kind,
    Repeated,
    Tensors,
    Value,
    annotated,
    bare,
    call,
    flatten,
    once,
)
from torchgpipe.engine.checkpoint.observation import LayerRecorder, Observed
from torchgpipe.engine.checkpoint.offload import Offload
from torchgpipe.engine.checkpoint.random import (
    Drawing,
    DrawMonitor,
    Draws,
    Recorder,
    generators_of,
)
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.checkpoint.samples import compare_pending
from torchgpipe.engine.checkpoint.selection import Scopes, Selection
from torchgpipe.engine.checkpoint.state import Layers
from torchgpipe.engine.partition import Partition, compiled
from torchgpipe.engine.policy import MARK, PartitionPolicy
from torchgpipe.engine.streams import AbstractStream, CPUStream
from torchgpipe.skip.transfer import Key, SkipTracker, arrive, leave, use_skip_tracker


class Sequential(nn.Sequential):
    """The layers of a partition. The first layer may take several arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the first layer with the arguments, and each other layer with the last result."""
        is_first = True
        value: Any = None
        # `_failing_layer` reads the variable `module` of this frame.
        for module in self:
            if is_first:
                value = module(*args, **kwargs)
            else:
                value = module(value)
            is_first = False
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers together, with the arguments of :func:`torch.compile`."""
        self.forward = compiled(self, *args, **kwargs)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not compiled, as for every module of PyTorch.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != 'forward'}


@dataclass(slots=True, eq=False)
class Cell:
    """The computation of a cell, in the first pass and in its recomputation.

    A graph may own it through a recomputation, so it owns no tensor of a graph.
    """

    _partition: Partition
    #: The function to call, which is the layers of the partition, or includes them.
    _function: Callable[..., Any]
    _i: int
    _m: int
    #: Reconstructs the input from the batch.
    input_kind: Kind
    #: After the call, reconstructs the output from the batch.
    kind: Kind = bare
    #: The skips from other partitions, which follow the batch, each with its kind.
    popped: dict[Key, Kind] = field(default_factory=dict)
    #: The skips from other partitions that are ``None``.
    absent: list[Key] = field(default_factory=list)
    #: The skips that follow the output, after the call, each with its kind.
    stashed: dict[Key, Kind] = field(default_factory=dict)
    _is_first_pass: bool = True

    def __str__(self) -> str:
        return _place(self._partition, self._i, self._m)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the layers, and return the output and after it the skips.

        Args:
            tensors: The batch and the skips. Skips are removed from the list, so that they live no
                longer than the layers need them.
        """
        partition = self._partition
        tracker = None
        if partition.has_skips:
            # This removes the skips from the list.
            tracker = arrive(self.popped, self.absent, tensors)
        value: Any = self.input_kind(tensors)
        end_of_observation = None
        if partition.observer is not None:
            skips = [] if tracker is None else [*tracker.tensors.values()]
            end_of_observation = partition.observer.cell(
                self._i, self._m, partition.j, value, skips
            )

        outside = context.skips
        context.skips = tracker
        grad = torch.is_grad_enabled()
        try:
            # Inlined, not by `call`: each Python call counts here.
            if type(value) is Arguments:
                value = self._function(*value.args, **value.kwargs)
            else:
                value = self._function(value)
            if torch.is_grad_enabled() is not grad:
                raise left_grad_mode(grad)
        except Exception as error:
            add_culprit(error, partition, self._i, self._m)
            raise
        finally:
            context.skips = outside

        if type(value) is Tensor and not value.__dict__:  # as mostly
            output = [value]
            self.kind = bare
        else:
            output = [*self._tensors_of(value)]
        self._is_first_pass = False
        if end_of_observation is not None:
            end_of_observation(value)
        if tracker is not None:
            for key, skip in leave(tracker, partition.outgoing).items():
                output.append(skip)
                self.stashed[key] = annotated([skip], bare)
        return output

    def _tensors_of(self, value: Any) -> Sequence[Tensor]:
        """Return the tensors of the layers' result, in the first pass with all of its kind."""
        try:
            if self._is_first_pass:
                output, self.kind = result_of(value)
                return output
            output = flatten(value)[0]
        except TypeError as error:
            last = next(reversed(self._partition.layers._modules))
            add_culprit(error, self._partition, self._i, self._m, last)
            raise
        # Repeated as in the first pass, even if other tensors are the same object in this one.
        if isinstance(self.kind, Repeated):
            return self.kind.collect(output)
        return output


@dataclass(eq=False)
class Cells:
    """The cells of one partition in one forward pass. Only one thread at a time runs them."""

    _partition: Partition
    _recomputed: Collection[int]
    _state: ThreadState
    _one_worker: bool
    #: The context in which a recomputation has the layers.
    _held: Lock
    #: The compute stream.
    _stream: AbstractStream
    #: Copies tensors to the host and back, unless the partition is on the CPU.
    _host_stream: AbstractStream = CPUStream
    #: Whether inputs of checkpointed cells and large kept results wait in host memory.
    _offloads: bool = False
    #: The results that checkpointed cells keep.
    _policy: PartitionPolicy = PartitionPolicy()
    #: Detects after the forward pass whether layers drew that were not known to draw.
    monitor: DrawMonitor | None = None
    #: The observed behaviour of the layers; ``None`` where it does not matter.
    observed: Observed | None = None
    #: The layers in the state that the first checkpointed cell finds.
    _kept_layers: Layers | None = None
    #: The draws of cells without a generator to save.
    _no_draws: Draws | None = None

    def __post_init__(self) -> None:
        partition = self._partition
        if partition.pending:
            compare_earlier(partition)
        self._modules: list[nn.Module] = []
        self._trainable = False
        #: Where checkpointed cells keep results of operations, if they do.
        self.scopes: Scopes | None = None
        if not self._state.grad:
            self._recomputed = ()  # Without a backward, there is nothing to recompute.
        if self._recomputed or not self._one_worker:
            self._modules = [*partition.layers.modules()]
        if self._recomputed:
            self._trainable = any(x.requires_grad for x in partition.layers.parameters())
            marked = []
            for module in self._modules:
                if MARK in module.__dict__:
                    marked.append(module)
            if marked or any(self._policy):
                self.scopes = Scopes.of(partition.layers, marked, self._policy)
        if self._recomputed or not self._one_worker:
            mode = tuple([module.training for module in self._modules])
            self.observed = partition.observed[mode]

    @property
    def draws(self) -> Drawing:
        """Whether they draw from a random generator that other cells also draw from."""
        return Drawing.UNKNOWN if self.observed is None else self.observed.draws

    def watch_draws(self) -> None:
        """Record a draw during these cells, whose layers were not known to draw."""
        assert self.observed is not None
        self.observed.watch_draws()

    def run(
        self,
        i: int,
        cell: Cell,
        tensors: list[Tensor],
    ) -> tuple[list[Tensor], Recomputation | None]:
        """Run the cell of micro-batch ``i``.

        Returns:
            The output, and the recomputation that backward runs first if the cell is checkpointed.
        """
        observed = self.observed
        if observed is None:
            return cell(tensors), None
        is_checkpointed = i in self._recomputed
        if is_checkpointed and not self._trainable:
            # A cell without anything to train has no graph, so there is no memory to save.
            is_checkpointed = any(x.requires_grad for x in tensors)
        if is_checkpointed:
            return self._checkpoint(cell, tensors, observed)
        if observed.draws is not Drawing.UNKNOWN:
            return cell(tensors), None
        recorder = Recorder()
        output = recorder.run(partial(cell, tensors))
        observed.learn(recorder)
        return output, None

    def _checkpoint(
        self,
        cell: Cell,
        tensors: list[Tensor],
        observed: Observed,
    ) -> tuple[list[Tensor], Recomputation]:
        """Run the first pass of a checkpointed cell."""
        if self._kept_layers is None or self._kept_layers.is_stale:
            self._modules = [*self._partition.layers.modules()]
            self._kept_layers = Layers(self._modules, observed, self._held)
        # The mode of the watch makes each operation slower, so later cells run without it.
        watch = None
        if not observed.watched or observed.draws is Drawing.UNKNOWN:
            watch = LayerRecorder(self._modules)
        state = self._kept_layers.find(watch)
        # If other cells draw, each cell that does not draw has its own monitor.
        monitor = self.monitor
        if monitor is None and watch is None and observed.draws is Drawing.NO:
            monitor = DrawMonitor()

        draws = self._draws(observed, watch, monitor)
        selection = None
        if self.scopes is not None:
            selection = Selection(
                self.scopes,
                draws,
                self._stream,
                self._host_stream,
                self._offloads,
                self._partition.is_last,
            )
        offload = None
        if self._offloads and self._host_stream is not CPUStream:
            offload = Offload(self._host_stream)
        error_of_change = changed_input
        # To find the layer, the layers run by themselves, which they cannot with skips.
        if not cell.popped:
            error_of_change = partial(blame, self._partition, cell.input_kind)
        recomputation = Recomputation(
            cell,
            self._state,
            draws,
            state,
            self._stream,
            selection,
            error_of_change,
            self._partition.pending,
            offload,
        )

        output = recomputation.first_pass(tensors)
        self._kept_layers.end(state, watch)
        if watch is not None:
            observed.learn(watch)
        elif monitor is not None and monitor is not self.monitor and monitor.check():
            observed.watch_draws()
        return output, recomputation

    def _draws(
        self,
        observed: Observed,
        watch: LayerRecorder | None,
        monitor: DrawMonitor | None,
    ) -> Draws:
        generators: list[Any] = [*generators_of(self._partition.device)]
        if watch is not None:
            watch.generators.update(observed.generators)
            return Draws([*generators, *watch.generators.values()], watch)
        generators += observed.generators.values()
        if observed.draws is Drawing.YES:
            return Draws([*generators, default_generator])
        if generators:
            return Draws(generators, None, monitor)
        if self._no_draws is None or self._no_draws.monitor is not monitor:
            self._no_draws = Draws((), None, monitor)
        return self._no_draws


def compare_earlier(partition: Partition) -> None:
    """Compare the outputs that are available by now with the outputs of their first pass.

    Raises:
        RuntimeError: They differ. The layers are watched from now on.
    """
    try:
        compare_pending(partition.pending, partition.j)
    except RuntimeError:
        for observed in partition.observed.values():
            observed.watch_again()
        raise


def result_of(value: Any) -> tuple[Tensors, Kind]:
    """Return the tensors of a layer's result, and the kind that reconstructs the value.

    A tensor in several places is passed on once.

    >>> import torch
    >>> x = torch.ones(2)
    >>> tensors, kind = result_of({'x': x, 'y': x})
    >>> len(tensors), kind(tensors)['x'] is kind(tensors)['y']
    (1, True)
    """
    tensors, kind = flatten(value)
    kind = annotated(tensors, kind)
    if len(tensors) == 1:
        return tensors, kind
    return once(tensors, kind)


# The source of an error: its cell and layer, and the fix of errors caused by a pipeline.


class Remedy(NamedTuple):
    """The fix of an error that the pipeline causes."""

    #: A part of PyTorch's message.
    message: str
    #: Whether the error results from the pipeline, in partition ``j`` and one of ``m``
    #: micro-batches.
    applies: Callable[[int, int], bool]
    note: str


REMEDIES = [
    Remedy(
        'modified inplace',
        lambda j, m: j == 0 and m > 1,
        'The micro-batches are views of one tensor, the input of the model. If that requires '
        'grad, PyTorch lets no layer change a view of it in place: use a layer that is not in '
        'place first (inplace=False), or chunks=1.',
    ),
    Remedy(
        'more than 1 value per channel',
        lambda j, m: m > 1,
        'The layer normalises each micro-batch by itself, and this one is too small. Use fewer '
        'chunks, or a larger batch; leave a small one at the end of an epoch out '
        '(drop_last=True).',
    ),
    Remedy(
        'saved tensor hooks',
        lambda j, m: context.checkpointing,
        'The partition is checkpointed, which is done by such hooks: use '
        "checkpoint='never' with layers that transform functions.",
    ),
    Remedy(
        'mixed torch.Tensor and DTensor',
        lambda j, m: True,
        "A parameter is a DTensor where ranks have parts of it (data='shard', tensor_plan). A "
        'layer has whole parameters of its own stage only, so a layer that uses a parameter of '
        'another one has to have it as a parameter as well.',
    ),
    Remedy(
        'same device',
        lambda j, m: True,
        'The input of the model belongs on the first device, model.devices[0]. What a layer '
        'keeps comes to its device with it if it is a parameter or a buffer '
        '(register_buffer).',
    ),
]


def add_culprit(
    error: Exception,
    partition: Partition,
    i: int,
    m: int,
    layer: str | None = None,
) -> None:
    """Add the source to an error that a partition's layers or their result raised."""
    note = f'in {_place(partition, i, m)}'
    layer = layer or _failing_layer(partition.layers, error.__traceback__)
    if layer is not None:
        note += f", layer '{layer}'"
    add_note(error, note)
    for remedy in REMEDIES:
        if remedy.message in str(error) and remedy.applies(partition.j, m):
            add_note(error, remedy.note)


def _place(
    partition: Partition,
    i: int,
    m: int,
) -> str:
    return f'partition {partition.j} on {partition.device}, micro-batch {i} of {m}'


def left_grad_mode(grad: bool) -> RuntimeError:
    """Restore the grad mode that layers left changed, and return the error to raise."""
    torch.set_grad_enabled(grad)
    return RuntimeError(
        f'the layers of a partition left grad mode {"off" if grad else "on"}, as '
        'torch.set_grad_enabled does. What runs after them, and in which thread, '
        'is not what comes after them in the model. Use it as a context: with '
        'torch.set_grad_enabled(…): …'
    )


def blame(
    partition: Partition,
    kind: Kind,
    tensors: Sequence[Tensor],
) -> str:
    """Return an error message that names the layer which changed a checkpointed cell's input.

    If the input requires grad, autograd raises. Otherwise a recomputation would start from the
    input as the first pass changed it.
    """
    layer = _changing_layer(partition.layers, kind(tensors))
    name = 'a layer'
    if layer is not None:
        name = f"layer '{layer}'"
    return (
        f'{name} of partition {partition.j} on {partition.device} changed the input of the '
        'partition in place, and the partition is checkpointed: its recomputation started '
        'from the changed input, so gradients would be wrong. Use an operation that is '
        'not in place there (inplace=False), let the partition begin with another layer, '
        "or use checkpoint='never'."
    )


def _failing_layer(
    partition: nn.Module,
    traceback: TracebackType | None,
) -> str | None:
    """Find the layer that was running, in the frames of the error. It costs nothing otherwise."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == 'forward' and frame.f_locals.get('self') is partition:
            return _name(partition, frame.f_locals.get('module'))
        traceback = traceback.tb_next
    return None


def _name(partition: nn.Module, layer: Any) -> str | None:
    # One layer may be in several places, and the frame does not say in which one it was running.
    names = [name for name, child in partition._modules.items() if child is layer]
    return "' or '".join(names) if names else None


def _changing_layer(partition: nn.Sequential, value: Value) -> str | None:
    """Find the layer that changes the partition's input in place: run the layers on a copy."""
    tensors, kind = flatten(value)
    tensors = tuple([x.detach().clone() for x in tensors])
    output = kind(tensors)
    with torch.no_grad(), use_skip_tracker(SkipTracker()):
        for name, layer in partition._modules.items():
            try:
                output = call(layer, output)
            except RuntimeError:  # It does not run by itself.
                return None
            if any(x._version for x in tensors):  # The version of a clone begins at 0.
                return name
    return None
