"""Measure the time and memory of one layer, with the output of the preceding layers as input.

[Note: Ownership of an activation]
What autograd saves in a forward counts as far as the graph of the results has it, and so do the
leaves of that graph, unless they lie in parameters or buffers. The output is a case of its own: it
may be saved by this layer, by the next one or a later one, or by none. So its memory is followed
from layer to layer, and counts for the layer that made it.
"""
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.devices import synchronize
from torchgpipe.base.structure import call, flatten, size_of, versions
from torchgpipe.engine.checkpoint.state import substituted
from torchgpipe.engine.compiled import has_compiled
from torchgpipe.engine.gradients import DeferredWork, Leaves
from torchgpipe.engine.microbatches import Batch
from torchgpipe.engine.streams import get_phony, graph_leaves, join
from torchgpipe.predict.blocks import SkipProfile
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.skip.tracker import Key, SkipTracker, use_skip_tracker

__all__ = ['Flow', 'Measurement']


@dataclass
class ResultMemory:
    """The memory of what a layer gave: which layer made it, if any, and who keeps it."""

    maker: int | None
    bytes: int
    kept: bool = False


@dataclass
class LayerInput:
    """A tensor between layers: a copy, so that a layer may change what it gets."""

    tensor: Tensor
    requires_grad: bool
    memory: ResultMemory

    def fresh(self) -> Tensor:
        """Return a tensor to run a layer with, whose graph ends here."""
        tensor = self.tensor.clone()
        if not self.requires_grad:
            return tensor
        return join(tensor, get_phony(tensor.device, requires_grad=True))


class _Saved:
    """A tensor that autograd saves; it lives as long as the graph that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # An output would refer to its own graph.

    def unpack(self) -> Tensor:
        return self.tensor


class Flow:
    """What goes from layer to layer: the batch, and skips that have been stashed."""

    def __init__(self, sample: Batch, device: torch.device, size: int) -> None:
        with torch.inference_mode(False):
            self.values = [LayerInput(x.detach().to(device).clone(), x.requires_grad,
                                      ResultMemory(None, size_of(x))) for x in sample.tensors]
        self.device = device
        self.size = size
        self.kind = sample.kind
        self.stashed: dict[Key, tuple[int, LayerInput | None]] = {}
        self.skips: list[SkipProfile] = []


class Measurement:
    """One layer under measurement, with one flow."""

    def __init__(self, flow: Flow, index: int) -> None:
        self.flow, self.index = flow, index
        self.seconds: list[tuple[float, float]] = []
        self.split_seconds: list[tuple[float, float]] = []
        self.memories: list[ResultMemory] = []

    def start(self, module: nn.Module) -> None:
        """Take what the layers before gave."""
        self.module: Any = module
        self.inputs, self.kind = self.flow.values, self.flow.kind
        declared = module if isinstance(module, DeclaresSkips) else None
        self.stashes: list[Key] = [*declared.stashable()] if declared else []
        poppable: list[Key] = [*declared.poppable()] if declared else []
        self.pops = {key: self.flow.stashed.pop(key) for key in poppable}

    def stop(self) -> None:
        """Note sizes, which a lazy layer does not know earlier, and let go of all the rest."""
        parameters = list(self.module.parameters())
        self.parameter_bytes = sum(map(size_of, parameters))
        self.frozen_bytes = sum(size_of(x) for x in parameters if not x.requires_grad)
        self.buffer_bytes = sum(map(size_of, self.module.buffers()))
        del self.module, self.inputs, self.pops

    def _start(self) -> tuple[Batch, SkipTracker]:
        tensors = tuple(value.fresh() for value in self.inputs)
        tracker = SkipTracker()
        for key, (_, value) in self.pops.items():
            tracker.tensors[key] = None if value is None else value.fresh()
        return Batch(tensors, self.kind), tracker

    def _forward(self, input: Batch, tracker: SkipTracker) -> Batch:
        with use_skip_tracker(tracker):
            return Batch(*flatten(call(self.module, input.value)))

    def _results(self, output: Batch, tracker: SkipTracker) -> list[Tensor]:
        """Return all that the layer gave: outputs, and what it stashed."""
        stashed = [tracker.tensors[key] for key in self.stashes]
        return [*output.tensors, *(x for x in stashed if x is not None)]

    def train(self) -> tuple[float, float]:
        """Run forward and backward, and take the time."""
        input, tracker = self._start()
        device = self.flow.device
        synchronize([device])
        start = time.perf_counter()
        output = self._forward(input, tracker)
        synchronize([device])
        forward = time.perf_counter() - start
        return forward, self._backward(output, tracker)

    def _backward(self, output: Batch, tracker: SkipTracker) -> float:
        roots = [x for x in self._results(output, tracker) if x.requires_grad]
        grads = [torch.ones_like(x) for x in roots]
        synchronize([self.flow.device])
        start = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, grads)
        synchronize([self.flow.device])
        return time.perf_counter() - start if roots else 0.0

    def train_split(self) -> bool:
        """Run forward and a backward that is split, and take the time of both parts.

        Returns:
            Whether it can be split.
        """
        input, tracker = self._start()
        deferred = DeferredWork()
        work = deferred.work = []
        leaves = Leaves().swaps(self.module.modules(), {},
                                None if has_compiled(self.module) else deferred)
        with substituted(leaves):
            output = self._forward(input, tracker)
        deferred.splits = True
        first = self._backward(output, tracker)
        if not work:
            return False
        start = time.perf_counter()
        with torch.no_grad():
            while work:
                work.pop()()
        synchronize([self.flow.device])
        self.split_seconds.append((first, time.perf_counter() - start))
        return True

    def watch(self) -> None:
        """Run forward; see which memory autograd saves, and forward the results."""
        saved: list[weakref.ref[_Saved]] = []

        def pack(x: Tensor) -> _Saved:
            saved.append(weakref.ref(holder := _Saved(x)))
            return holder

        try:
            with saved_tensors_hooks(pack, _Saved.unpack):
                self._watch(saved)
        except RuntimeError as error:
            if 'saved tensor hooks' not in str(error):
                raise
            self._watch([])  # Transforms of `torch.func` refuse hooks.

    def _watch(self, saved: list['weakref.ref[_Saved]']) -> None:
        input, tracker = self._start()
        given: list[tuple[Any, LayerInput]] = [*zip(input.tensors, self.inputs), *(
            (tracker.tensors[key], value) for key, (_, value) in self.pops.items() if value)]
        known = {x.untyped_storage(): value.memory for x, value in given}
        own = {x.untyped_storage() for x in (*self.module.parameters(), *self.module.buffers())
               if x.layout is torch.strided}
        before = versions([x for x, _ in given])
        output = self._forward(input, tracker)
        # What lies in the memory of the sample binds all layers up to this one, as layer 0 would.
        changed = [value.memory.maker or 0 for (x, value), version in zip(given, before)
                   if versions([x]) != [version]]
        self.changes = min(changed, default=None)
        self._forward_results(output, tracker, known, own)
        nodes = [x.grad_fn for x in self._results(output, tracker) if x.grad_fn]
        kept = [x.tensor for each in saved if (x := each())]
        alive = {x.untyped_storage() for x in (*kept, *graph_leaves(nodes))
                 if x.layout is torch.strided}
        for memory in (known[storage] for storage in alive & known.keys()):
            memory.kept = True
        self._inner_bytes = sum(x.nbytes() for x in alive - known.keys() - own)

    def _forward_results(self, output: Batch, tracker: SkipTracker,
                         known: dict[Any, ResultMemory], own: set[Any]) -> None:
        def value(x: Tensor) -> LayerInput:
            storage = x.untyped_storage()
            if storage not in known:
                made = storage not in own
                known[storage] = ResultMemory(self.index if made else None, storage.nbytes())
                self.memories += [known[storage]] if made else []
            return LayerInput(x.detach().clone(), x.requires_grad, known[storage])

        self.flow.values = [value(x) for x in output.tensors]
        self.flow.kind = output.kind
        self.output_bytes = sum(map(size_of, output.tensors))
        for key in self.stashes:
            tensor = tracker.tensors[key]
            self.flow.stashed[key] = self.index, None if tensor is None else value(tensor)
        self.flow.skips += [SkipProfile(source, self.index, size_of(skip.tensor))
                            for source, skip in self.pops.values() if skip is not None]

    def activation_bytes(self) -> int:
        """Return what this layer made and autograd keeps, once later layers have shown theirs."""
        return self._inner_bytes + sum(memory.bytes for memory in self.memories if memory.kept)
