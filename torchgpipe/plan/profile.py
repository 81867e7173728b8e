"""Measure the time and memory of each layer of a sequential module, one layer at a time.

:func:`profile` holds only one layer on the device at a time. Therefore a device can profile a
model that does not fit on it. :class:`Measurement` runs a copy of the layer several times, on the
outputs and skips of the previous layers, which :class:`Flow` holds::

    warm-up      forward, backward     not counted: kernels are chosen, lazy layers get their shape
    memory       forward               which of the tensors that it makes autograd saves
    time         forward, backward     repeated; medians
    split        forward, backward     in turn with these, with a split backward; medians

All phases but the split run with the sample and with a quarter of it. The two times determine the
part of a layer's time that does not shrink with the batch. This part is spent once per
micro-batch.

[Note: Ownership of an activation]
A tensor that autograd saves in forward counts if the graph of the results holds it. The leaves of
this graph count as well, unless they are parameters or buffers. The output is a special case: this
layer, a later layer, or no layer may save it. So its memory is tracked from layer to layer, and
counts for the layer that made it.
"""

import copy
import math
import random
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import UninitializedBuffer

from torchgpipe.base.devices import (
    CPU,
    Device,
    accelerator,
    has_data,
    is_cpu,
    rng_states,
    set_rng_states,
    synchronize,
)
from torchgpipe.base.errors import add_note
from torchgpipe.base.locks import generator_lock
from torchgpipe.base.private import InternalMode, tree_leaves, versions
from torchgpipe.base.structure import Value, call, flatten, is_plain, size_of
from torchgpipe.engine.backward_order import get_phony, graph_leaves, join
from torchgpipe.engine.checkpoint.random import operation_of
from torchgpipe.engine.checkpoint.swaps import substituted
from torchgpipe.engine.gradients import DeferredWork, Leaves, edge_of
from torchgpipe.engine.microbatches import Chunk, cut
from torchgpipe.engine.partition import has_compiled
from torchgpipe.engine.split import verify_module
from torchgpipe.engine.streams import use_device
from torchgpipe.plan.balance import Profile
from torchgpipe.plan.costs import LayerProfile, OperationProfile, SkipProfile, TieProfile
from torchgpipe.plan.progress import progress
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.skip.transfer import Key, SkipTracker, use_skip_tracker

__all__ = ['Flow', 'Measurement', 'as_a_worker', 'layerwise_sandbox', 'profile', 'profile_bytes']


@dataclass
class ResultMemory:
    """The memory of a layer's result, the layer that made it, and whether autograd keeps it."""

    maker: int | None
    bytes: int
    kept: bool = False


@dataclass
class LayerInput:
    """A tensor between layers: a copy, so that a layer may change its input."""

    tensor: Tensor
    requires_grad: bool
    memory: ResultMemory

    def fresh(self) -> Tensor:
        """Return a copy of the tensor as a layer's input, without earlier history."""
        tensor = self.tensor.clone()
        if not self.requires_grad:
            return tensor
        return join(tensor, get_phony(tensor.device, requires_grad=True))


class _SavedTensor:
    """A tensor that autograd saves; it lives as long as the graph that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # An output would refer to its own graph.

    def unpack(self) -> Tensor:
        return self.tensor


class OperationTimes(InternalMode):
    """A mode that records the time and the results of operations by name.

    They are the operations whose results :func:`~torchgpipe.engine.policy.keep_everything` keeps.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        #: The memories of the results.
        self._results: defaultdict[str, list[Any]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        properties = operation_of(func)
        if not properties.makes_tensors or properties.takes_options:
            return func(*args, **kwargs)
        name = str(func)
        synchronize([self._device])
        start = time.perf_counter()
        output = func(*args, **kwargs)
        synchronize([self._device])
        self.seconds[name] += time.perf_counter() - start
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and is_plain(x):
                self._results[name].append(x.untyped_storage())
        return output

    def profiles(self, saved: Collection[Any], output: Collection[Any]) -> list[OperationProfile]:
        """Return the sizes of the results.

        Args:
            saved: The memories that autograd saves.
            output: The memories of the layer's output.
        """
        profiles = []
        for name, results in self._results.items():
            size = saved_size = 0
            is_output = False
            for result in results:
                size += result.nbytes()
                if result in saved:
                    saved_size += result.nbytes()
                if result in output:
                    is_output = True
            profiles.append(OperationProfile(name, 0.0, size, saved_size, is_output))
        return profiles


class Flow:
    """The tensors that go from layer to layer: the batch and stashed skips."""

    def __init__(self, sample: Chunk, device: torch.device, size: int) -> None:
        with torch.inference_mode(False):
            self.values = [
                LayerInput(
                    x.detach().to(device).clone(), x.requires_grad, ResultMemory(None, size_of(x))
                )
                for x in sample.tensors
            ]
        self.device = device
        self.size = size
        self.kind = sample.kind
        self.stashed: dict[Key, tuple[int, LayerInput | None]] = {}
        self.skips: list[SkipProfile] = []


class Measurement:
    """One layer under measurement, with one flow."""

    def __init__(self, flow: Flow, index: int) -> None:
        self.flow = flow
        self.index = index
        self.seconds: list[tuple[float, float]] = []
        self.split_seconds: list[tuple[float, float]] = []
        self.memories: list[ResultMemory] = []
        #: By operation, the times of its calls in one forward.
        self.operation_seconds: defaultdict[str, list[float]] = defaultdict(list)

    def start(self, module: nn.Module) -> None:
        """Take the results of the previous layers as inputs."""
        self.module: Any = module
        self.inputs = self.flow.values
        self.kind = self.flow.kind
        declared = module if isinstance(module, DeclaresSkips) else None
        self.stashes: list[Key] = [*declared.stashable()] if declared else []
        poppable: list[Key] = [*declared.poppable()] if declared else []
        self.pops = {key: self.flow.stashed.pop(key) for key in poppable}

    def stop(self) -> None:
        """Record sizes, which a lazy layer does not know earlier, and release the layer."""
        parameters = list(self.module.parameters())
        self.parameter_bytes = sum(map(size_of, parameters))
        self.frozen_bytes = sum(size_of(x) for x in parameters if not x.requires_grad)
        self.trainable_parameters = sum(x.numel() for x in parameters if x.requires_grad)
        self.buffer_bytes = sum(map(size_of, self.module.buffers()))
        del self.module, self.inputs, self.pops

    def _start(self) -> tuple[Chunk, SkipTracker]:
        tensors = tuple(value.fresh() for value in self.inputs)
        tracker = SkipTracker()
        for key, (_, value) in self.pops.items():
            tracker.tensors[key] = None if value is None else value.fresh()
        return Chunk(tensors, self.kind), tracker

    def _forward(self, input: Chunk, tracker: SkipTracker) -> Chunk:
        with use_skip_tracker(tracker):
            return Chunk(*flatten(call(self.module, input.value)))

    def _results(self, output: Chunk, tracker: SkipTracker) -> list[Tensor]:
        """Return the layer's outputs and the skips that it stashed."""
        stashed = [tracker.tensors[key] for key in self.stashes]
        return [*output.tensors, *(x for x in stashed if x is not None)]

    def train(self) -> tuple[float, float]:
        """Run forward and backward, and return their times."""
        input, tracker = self._start()
        device = self.flow.device
        synchronize([device])
        start = time.perf_counter()
        output = self._forward(input, tracker)
        synchronize([device])
        forward = time.perf_counter() - start
        return forward, self._backward(output, tracker)

    def _backward(
        self, output: Chunk, tracker: SkipTracker, deferred: DeferredWork | None = None
    ) -> float:
        results = [x for x in self._results(output, tracker) if x.requires_grad]
        roots = [edge_of(x, own_node=True) for x in results]
        grads = [torch.ones_like(x) for x in results]
        if deferred is not None:
            for root in roots:
                root.node.register_prehook(deferred.begin)
        synchronize([self.flow.device])
        start = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, grads)
        synchronize([self.flow.device])
        return time.perf_counter() - start if roots else 0.0

    def train_split(self) -> bool:
        """Run forward and a split backward; record its times, and return whether it can split."""
        input, tracker = self._start()
        deferred = DeferredWork()
        work = deferred.work = []
        leaves = Leaves().swaps(
            self.module.modules(), {}, None if has_compiled(self.module) else deferred
        )
        with substituted(leaves):
            output = self._forward(input, tracker)
        first = self._backward(output, tracker, deferred)
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
        """Run forward, detect the memory that autograd saves, and pass the results on."""
        saved: list[weakref.ref[_SavedTensor]] = []

        def pack(x: Tensor) -> _SavedTensor:
            saved.append(weakref.ref(holder := _SavedTensor(x)))
            return holder

        try:
            with saved_tensors_hooks(pack, _SavedTensor.unpack):
                self._watch(saved)
        except RuntimeError as error:
            if 'saved tensor hooks' not in str(error):
                raise
            self._watch([])  # Transforms of `torch.func` refuse hooks.

    def _watch(self, saved: list['weakref.ref[_SavedTensor]']) -> None:
        input, tracker = self._start()
        given: list[tuple[Any, LayerInput]] = [
            *zip(input.tensors, self.inputs),
            *((tracker.tensors[key], value) for key, (_, value) in self.pops.items() if value),
        ]
        known = {x.untyped_storage(): value.memory for x, value in given}
        own = {
            x.untyped_storage()
            for x in (*self.module.parameters(), *self.module.buffers())
            if x.layout is torch.strided
        }
        before = versions([x for x, _ in given])
        results = OperationTimes(self.flow.device)
        output = results.run(partial(self._forward, input, tracker))
        # A change in the sample's memory binds all layers up to this one to layer 0.
        changed = [
            value.memory.maker or 0
            for (x, value), version in zip(given, before)
            if versions([x]) != [version]
        ]
        self.changes = min(changed, default=None)
        self._forward_results(output, tracker, known, own)
        nodes = [x.grad_fn for x in self._results(output, tracker) if x.grad_fn]
        kept = [x.tensor for each in saved if (x := each())]
        alive = {
            x.untyped_storage() for x in (*kept, *graph_leaves(nodes)) if x.layout is torch.strided
        }
        for memory in (known[storage] for storage in alive & known.keys()):
            memory.kept = True
        self._inner_bytes = sum(x.nbytes() for x in alive - known.keys() - own)
        memories = set()
        for result in filter(is_plain, output.tensors):
            memories.add(result.untyped_storage())
        self.operations = results.profiles(alive, memories)

    def time_operations(self) -> None:
        """Run forward, and add the times of its operations."""
        input, tracker = self._start()
        times = OperationTimes(self.flow.device)
        times.run(partial(self._forward, input, tracker))
        for name, seconds in times.seconds.items():
            self.operation_seconds[name].append(seconds)

    def _forward_results(
        self, output: Chunk, tracker: SkipTracker, known: dict[Any, ResultMemory], own: set[Any]
    ) -> None:
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
        self.flow.skips += [
            SkipProfile(source, self.index, size_of(skip.tensor))
            for source, skip in self.pops.values()
            if skip is not None
        ]

    def activation_bytes(self) -> int:
        """Return the bytes that this layer made and autograd keeps, after later layers ran."""
        return self._inner_bytes + sum(memory.bytes for memory in self.memories if memory.kept)


#: The least number of times that a layer is timed.
REPEATS = 3

#: The smallest batch whose quarter is timed as well; batch normalization needs two samples.
SMALLEST = 8


def profile(
    module: nn.Sequential,
    sample: Value,
    *,
    device: Device | None = None,
    timeout: float = 1.0,
    batch_dim: Any = 0,
) -> Profile:
    """Measure time and memory of each layer of a sequential module.

    The module does not change: mode, buffers, gradients, hooks and device stay the same. Neither
    do the random states of PyTorch, Python and NumPy.

    Activations are tensors that autograd saves. Tensors that a ``Function`` keeps otherwise than
    by ``save_for_backward`` are not counted. Neither are tensors within a layer that uses a
    transform of ``torch.func``, which refuses saved-tensor hooks.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> costs = profile(model, torch.rand(16, 8), device='cpu', timeout=0.01)
    >>> [(layer.name, layer.parameter_bytes, layer.output_bytes) for layer in costs.layers]
    [('0', 288, 512), ('1', 0, 512), ('2', 72, 128)]
    >>> costs.balance(2, chunks=4) in ([1, 2], [2, 1])
    True

    Args:
        module: The model.
        sample: A mini-batch, as an input of the model: a tensor of shape ``(batch, …)``, a
            structure of such tensors, or :class:`~torchgpipe.Arguments`.
        device: The device to measure on, by default the accelerator.
        timeout: Approximate time in seconds. Each layer runs a few times in any case. More time
            gives better medians.
        batch_dim: The batch dimension: see :class:`~torchgpipe.GPipe`.

    Returns:
        Time and memory of each layer, for the whole sample.

    Raises:
        TypeError: The module is not sequential, or the sample is not made of tensors.
        ValueError: A parameter already has a gradient, or the device or the sample is invalid.
    """
    if not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError(f'timeout must be a number of seconds, zero or more, but is {timeout}')
    resolved = _take_device(device)
    if not has_data(resolved):
        raise ValueError(
            "nothing runs on 'meta', so there is no time to measure; there is only "
            "balance_by_size(…, device='meta')"
        )
    verify_module(module)
    samples = []
    for chunks in (1, 4):
        batches, sizes, _ = cut(sample, chunks, batch_dim, layers=module)
        samples.append((batches[0], sizes[0]))
        if sizes[0] < SMALLEST:
            break
    return _measure(module, samples, resolved, timeout)


def profile_bytes(
    module: nn.Sequential, sample: Chunk, size: int, device: Device | None
) -> Profile:
    """Measure memory only, which is possible on the ``meta`` device as well."""
    return _measure(module, [(sample, size)], _take_device(device), None)


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Yield copies of a module's layers, in training mode, each on the device while it is used.

    The copies have no hooks of users, because these may keep the tensors that they get. Hooks by
    which PyTorch makes weights, such as :func:`torch.nn.utils.weight_norm`, are copied.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
    >>> [layer.training for layer in layerwise_sandbox(model, torch.device('cpu'))]
    [True, True]

    Args:
        module: The model. It does not change.
        device: The device of the copies.

    Yields:
        One copy per layer.
    """
    for layer in module:
        copied = _copy(layer)
        for m in copied.modules():
            for hooks in _hooks(m):
                for key in [key for key, hook in hooks.items() if not _is_pytorchs(hook)]:
                    del hooks[key]
        # Not `copied.to`, which a layer that is itself a pipeline denies to all devices.
        copied = nn.Module.to(copied, device)
        copied.train()
        yield copied


def _copy(layer: nn.Module) -> nn.Module:
    """Copy a layer deeply, including tensors that do not support deep copies."""
    memo: dict[int, Any] = {}
    for m in layer.modules():
        # Users' hooks are not even copied, because they may refer to anything.
        memo.update(
            (id(hook), hook)
            for hooks in _hooks(m)
            for hook in hooks.values()
            if not _is_pytorchs(hook)
        )
        # Weights that a hook made, and outputs that a layer keeps, have a graph.
        memo.update(
            (id(x), x.detach().clone())
            for x in m.__dict__.values()
            if isinstance(x, Tensor) and not x.is_leaf
        )
        memo.update(
            (id(x), _new_buffer(device=x.device, dtype=x.dtype))
            for x in m._buffers.values()
            if isinstance(x, UninitializedBuffer)
        )
    copied = copy.deepcopy(layer, memo)
    # The copy of a TorchScript module has parameters with a graph that leads to the module's own.
    for own, parameter in zip(layer.parameters(), copied.parameters()):
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_(own.requires_grad)
    return copied


_new_buffer: Any = UninitializedBuffer  # PyTorch's stub leaves its arguments out.


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


def _is_pytorchs(hook: Any) -> bool:
    name = getattr(hook, '__module__', None) or type(hook).__module__
    return name.partition('.')[0] == 'torch'


def _take_device(device: Device | None) -> torch.device:
    if device is None:
        device = accelerator()
    if device is None:
        raise ValueError(
            "there is no accelerator on this machine; name the device, as in device='cpu'"
        )
    try:
        resolved = torch.device(device)
        return torch.empty(0, device=resolved).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f'device {device!r} is not on this machine ({reason}); name one that '
            "is, as in device='cpu'"
        ) from None


def _check(module: nn.Sequential, sample: Chunk, device: torch.device) -> None:
    verify_skippables(module)
    if has_data(device) and any(x.is_meta for x in sample.tensors):
        raise ValueError(f"the sample is on 'meta', without data to run the layers on '{device}'")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                f"some parameter already has gradient: '{name}'; profile before "
                'training, or after module.zero_grad(set_to_none=True)'
            )


def _measure(
    module: nn.Sequential,
    samples: list[tuple[Chunk, int]],
    device: torch.device,
    timeout: float | None,
) -> Profile:
    sample, size = samples[0]
    _check(module, sample, device)
    names = list(module._modules)
    flows = [Flow(each, device, number) for each, number in samples]
    budget = None if timeout is None else timeout / max(1, len(names))
    measured: list[list[Measurement]] = []
    with (
        _random_states(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        use_device(device),
    ):
        sandbox = layerwise_sandbox(module, device)
        lines = names if timeout is None else progress(names, f'profile, about {timeout:g} s')
        for index, name in enumerate(lines):
            measured.append([Measurement(flow, index) for flow in flows])
            try:
                _run(next(sandbox), measured[-1], budget)
            except Exception as error:
                add_note(
                    error,
                    f"while layer '{name}' was profiled on {device} with "
                    f'{" and ".join(str(flow.size) for flow in flows)} samples',
                )
                raise
    return Profile(
        tuple(map(_result, names, measured)),
        tuple(flows[0].skips),
        size,
        sum(map(size_of, sample.tensors)),
        str(device),
        tuple(_ties(module)),
    )


def _ties(module: nn.Sequential) -> Iterator[TieProfile]:
    """Yield the parameters that several layers share."""
    layers_of: dict[nn.Parameter, list[int]] = defaultdict(list)
    for index, layer in enumerate(module):
        for parameter in layer.parameters():
            layers_of[parameter].append(index)
    for parameter, layers in layers_of.items():
        if len(layers) > 1:
            yield TieProfile(
                tuple(layers), size_of(parameter), parameter.numel(), not parameter.requires_grad
            )


def as_a_worker(devices: Sequence[str], measure: Callable[[], Profile]) -> Profile:
    """Measure as one of the workers of the CPU, all of which measure at the same time.

    Each has its part of the intra-op threads. They contend for memory, for units that cores share,
    and for Python's interpreter, as in a step::

        calling thread    layer 0 │ layer 1 │ …     ──▶ the result
        others            layer 0 │ layer 1 │ …         is ignored
    """
    threads = torch.get_num_threads()
    number = sum(map(is_cpu, devices))
    share = max(1, threads // max(1, number))
    others = number - 1
    with _random_states(CPU), ThreadPoolExecutor(max(1, others)) as pool:
        torch.set_num_threads(share)  # also of threads that begin later
        try:
            for _ in range(others if number == len(devices) else 0):
                pool.submit(measure)
            return measure()
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    """Restore the random states that a layer may draw from."""
    numpy: Any = sys.modules.get('numpy')
    with generator_lock:  # Two threads that ask for the state of one generator can deadlock.
        own = rng_states([device])
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        with generator_lock:
            set_rng_states([device], own)
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


def _run(module: nn.Module, layers: list[Measurement], budget: float | None) -> None:
    """Measure one layer in all phases, with each of the flows."""
    for layer in layers:
        layer.start(module)
        layer.train()
        layer.watch()
    if budget is not None:
        end = time.perf_counter() + budget
        splits = True
        while len(layers[0].seconds) < REPEATS or time.perf_counter() < end:
            for layer in layers:
                layer.seconds.append(layer.train())
            if len(layers[0].seconds) <= REPEATS:
                layers[0].time_operations()
            splits = splits and layers[0].train_split()
    for layer in layers:
        layer.stop()  # and so off the device, before the next one is on it
    torch.clear_autocast_cache()  # which would keep the layer's weights until autocast ends


def _result(name: str, layers: list[Measurement]) -> LayerProfile:
    """Make the profile of a layer, after later layers ran."""
    full = layers[0]
    forwards = []
    backwards = []
    for layer in layers:
        seconds = layer.seconds or [(0.0, 0.0)]
        forwards.append(median(times[0] for times in seconds))
        backwards.append(median(times[1] for times in seconds))
    forward, forward_overhead = _line(layers, forwards)
    backward, backward_overhead = _line(layers, backwards)
    return LayerProfile(
        name,
        forward,
        backward,
        full.parameter_bytes,
        full.frozen_bytes,
        full.buffer_bytes,
        full.activation_bytes(),
        full.output_bytes,
        full.changes,
        forward_overhead,
        backward_overhead,
        *_shares(full, backward),
        trainable_parameters=full.trainable_parameters,
        operations=_operations(full, forward),
    )


def _operations(layer: Measurement, forward: float) -> tuple[OperationProfile, ...]:
    """Return the operations of a layer, whose times are parts of its forward."""
    profiles = []
    total = 0.0
    for profile in layer.operations:
        seconds = median(layer.operation_seconds.get(profile.name, [0.0]))
        profiles.append(replace(profile, seconds=seconds))
        total += seconds
    if total > forward:
        for k, profile in enumerate(profiles):
            profiles[k] = replace(profile, seconds=profile.seconds * forward / total)
    return tuple(profiles)


def _shares(layer: Measurement, backward: float) -> tuple[float | None, float | None]:
    """Return the shares of a backward that I and W take; I takes all if it is not split."""
    if not layer.seconds:
        return None, None
    if not (layer.split_seconds and backward):
        return 1.0, 0.0
    first, second = (median(times) / backward for times in zip(*layer.split_seconds))
    return first, second


def _line(layers: list[Measurement], seconds: list[float]) -> tuple[float, float]:
    """Return the time of the whole sample, and the time at size zero by a linear fit."""
    if len(layers) == 1:
        return seconds[0], 0.0
    full, quarter = seconds
    size, quarter_size = [layer.flow.size for layer in layers]
    slope = (full - quarter) / (size - quarter_size)
    return full, min(max(0.0, quarter - slope * quarter_size), quarter)
