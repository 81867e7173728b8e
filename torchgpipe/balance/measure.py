"""Measure the time and memory of one layer, with the output of the preceding layers as input.

[Note: Ownership of an activation]
After a forward only its graph is kept, all other references are dropped, and what is still alive
is what autograd keeps for backward. The output is a case of its own: it may be kept by this layer,
by the next one or a later one, or by none. So its memory is followed until it has died or is found
to be kept, and counts for the layer that made it. For that, inputs are made such that the graph
does not hold on to them by itself, as it would hold on to leaves.
"""
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.balance.live import LiveTensors
from torchgpipe.devices import synchronize
from torchgpipe.engine.autograd import get_phony, join
from torchgpipe.engine.compiled import has_compiled
from torchgpipe.engine.leaves import Leaves
from torchgpipe.engine.memory import size_of, versions
from torchgpipe.engine.microbatches import Batch
from torchgpipe.engine.split_backward import DeferredWork
from torchgpipe.predict.blocks import SkipProfile
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.structure import call, flatten

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
        """Return a tensor to run a layer with: [Note: Ownership of an activation]."""
        tensor = self.tensor.clone()
        if not self.requires_grad:
            return tensor
        return join(tensor, get_phony(tensor.device, requires_grad=True))


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
        run = Leaves().within(self.module.modules(), self._forward, {},
                              None if has_compiled(self.module) else deferred)
        output = run(input, tracker)
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
        """Run forward; see which memory is kept, and forward the results."""
        input, tracker = self._start()
        given: list[tuple[Any, LayerInput]] = [*zip(input.tensors, self.inputs), *(
            (tracker.tensors[key], value) for key, (_, value) in self.pops.items() if value)]
        known = {x.untyped_storage(): value.memory for x, value in given}
        before = versions([x for x, _ in given])
        with LiveTensors().watched() as live:
            output = self._forward(input, tracker)
        # What lies in the memory of the sample binds all layers up to this one, as layer 0 would.
        changed = [value.memory.maker or 0 for (x, value), version in zip(given, before)
                   if versions([x]) != [version]]
        self.changes = min(changed, default=None)
        given.clear()
        self._forward_results(output, tracker, known, live)
        graph = [x.grad_fn for x in self._results(output, tracker)]
        references = [(weakref.ref(storage), memory) for storage, memory in known.items()]
        known.clear()
        del output, input, tracker
        self._see(graph, references, live)

    def _forward_results(self, output: Batch, tracker: SkipTracker,
                         known: dict[Any, ResultMemory], live: LiveTensors) -> None:
        def value(x: Tensor) -> LayerInput:
            storage = x.untyped_storage()
            if storage not in known:
                made = live.find(x) is not None
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

    def _see(self, graph: list[Any], references: Iterable[tuple[Any, ResultMemory]],
             live: LiveTensors) -> None:
        """See what is alive now that only the graph is left."""
        outside = 0
        for reference, memory in references:
            alive = reference() is not None
            memory.kept |= alive
            outside += memory.bytes if alive and memory.maker == self.index else 0
        self._inner_bytes = live.now - outside
        graph.clear()

    def activation_bytes(self) -> int:
        """Return what this layer made and autograd keeps, once later layers have shown theirs."""
        return self._inner_bytes + sum(memory.bytes for memory in self.memories if memory.kept)
