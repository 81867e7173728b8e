"""Measure what each layer of a sequential module costs, one layer at a time on the device.

So a model that is larger than the device can be profiled on it. A layer is a copy; it sees
what the layers before gave, with their skips, and runs several times::

    warm-up      forward, backward     not counted: kernels are chosen, lazy layers get their shape
    memory       forward               which of the tensors that it makes stay alive, see below
    time         forward, backward     again and again; medians

[Note: Who keeps an activation]
After a forward only its graph is kept, all other references are dropped, and what is still alive
is what autograd keeps for backward. The output is a case of its own: it may be kept by this layer,
by the next one or a later one, or by none. So its memory is followed until it has died or is found
to be kept, and counts for the layer that made it. For that, inputs are made such that the graph
does not hold on to them by itself, as it would hold on to leaves.
"""
import copy
import time
import weakref
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from torchgpipe.aliases import TensorOrTensors
from torchgpipe.balance.costs import LayerProfile, Profile, SkipProfile
from torchgpipe.balance.live import LiveTensors
from torchgpipe.dependency import join
from torchgpipe.microbatch import Batch, check, scatter, versions
from torchgpipe.notes import add_note
from torchgpipe.partition import verify_module
from torchgpipe.phony import get_phony
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker

__all__ = ['layerwise_sandbox', 'profile', 'profile_bytes']

Device = Union[torch.device, int, str]

#: How often a layer is timed at least.
REPEATS = 3


def profile(module: nn.Sequential, sample: TensorOrTensors, *, device: Device = 'cuda',
            timeout: float = 1.0) -> Profile:
    """Measure time and memory of each layer of a sequential module.

    The module itself is left as it is: its mode, buffers, gradients, hooks, the device that it is
    on; so is the random state.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> costs = profile(model, torch.rand(16, 8), device='cpu', timeout=0.01)
    >>> [(layer.name, layer.parameter_bytes, layer.output_bytes) for layer in costs.layers]
    [('0', 288, 512), ('1', 0, 512), ('2', 72, 128)]
    >>> costs.balance(2, chunks=4) in ([1, 2], [2, 1])
    True

    Args:
        module: The model.
        sample: A mini-batch, a tensor of shape ``(batch, …)`` or a tuple of such.
        device: Where to measure.
        timeout: Seconds to spend, about; each layer runs a few times in any case. More make
            better medians.

    Returns:
        What each layer costs, for the whole sample.

    Raises:
        TypeError: The module is not sequential, or the sample is not made of tensors.
        ValueError: A parameter already has a gradient, or the device or the sample will not do.
    """
    if not timeout >= 0:
        raise ValueError(f'timeout must be a number of seconds, zero or more, but is {timeout}')
    resolved = _take_device(device)
    if resolved.type == 'meta':
        raise ValueError("nothing runs on 'meta', so there is no time to measure; there is only "
                         "balance_by_size(…, device='meta')")
    return _profile(module, sample, resolved, timeout)


def profile_bytes(module: nn.Sequential, sample: TensorOrTensors, device: Device) -> Profile:
    """Measure memory only; on the ``meta`` device too, where there is none."""
    return _profile(module, sample, _take_device(device), None)


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Yield copies of a module's layers, in training mode, each on the device while it is used.

    Hooks are left out, apart from those by which PyTorch itself makes weights, such as
    :func:`torch.nn.utils.weight_norm`: those of users may keep what they see.
    """
    for layer in module.children():
        # Not even copied, since they may refer to anything.
        memo: Dict[int, Any] = {id(hook): hook for m in layer.modules() for hooks in _hooks(m)
                                for hook in hooks.values() if not _is_pytorchs(hook)}
        copied = copy.deepcopy(layer, memo)
        for m in copied.modules():
            for hooks in _hooks(m):
                for key in [key for key, hook in hooks.items() if not _is_pytorchs(hook)]:
                    del hooks[key]
        # Not `copied.to`, which a layer that is itself a pipeline denies to all devices.
        yield nn.Module.to(copied, device).train()


def _hooks(module: nn.Module) -> List[Dict[int, Any]]:
    return [module._forward_pre_hooks, module._forward_hooks,
            module._backward_pre_hooks, module._backward_hooks]


def _is_pytorchs(hook: Any) -> bool:
    name = getattr(hook, '__module__', None) or type(hook).__module__
    return name.partition('.')[0] == 'torch'


def _take_device(device: Device) -> torch.device:
    try:
        resolved = torch.device(device)
        return torch.empty(0, device=resolved).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {device!r} is not on this machine ({reason}); name one that "
                         "is, as in device='cpu'") from None


def _check(module: nn.Sequential, sample: TensorOrTensors, device: torch.device) -> int:
    """Check what is given; return the batch size."""
    verify_module(module)
    verify_skippables(module)
    check(sample)
    size = len(scatter(sample, 1)[0][0])
    if device.type != 'meta' and any(x.is_meta for x in Batch(sample)):
        raise ValueError(f"the sample is on 'meta', without data to run the layers on '{device}'")
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(f"some parameter already has gradient: '{name}'; profile before "
                             'training, or after module.zero_grad(set_to_none=True)')
    return size


def _profile(module: nn.Sequential, sample: TensorOrTensors, device: torch.device,
             timeout: Optional[float]) -> Profile:
    size = _check(module, sample, device)
    names = [name for name, _ in module.named_children()]
    flow = _Flow(sample, device)
    measured: List[_Layer] = []
    generators = [] if device.type in ('cpu', 'meta') else [device]
    with torch.random.fork_rng(generators, device_type=device.type if generators else 'cuda'), \
            torch.inference_mode(False), torch.enable_grad():
        sandbox = layerwise_sandbox(module, device)
        for index, name in enumerate(names):
            try:
                layer = _Layer(name, next(sandbox), flow, index)
                layer.run(None if timeout is None else timeout / len(names))
            except Exception as error:
                add_note(error, f"while layer '{name}' was profiled on {device}")
                raise
            layer.module = None  # and so off the device, before the next one is on it
            measured.append(layer)
    return Profile(tuple(layer.result() for layer in measured), tuple(flow.skips), size,
                   sum(_bytes(x) for x in Batch(sample)), str(device))


@dataclass
class _Memory:
    """The memory of what a layer gave: which layer made it, if any, and who keeps it."""

    maker: Optional[int]
    bytes: int
    kept: bool = False


@dataclass
class _Value:
    """A tensor between layers: a copy, so that a layer may change what it gets."""

    tensor: Tensor
    requires_grad: bool
    memory: _Memory

    def fresh(self) -> Tensor:
        """Give a tensor to run a layer with: [Note: Who keeps an activation]."""
        tensor = self.tensor.clone()
        if not self.requires_grad:
            return tensor
        return join(tensor, get_phony(tensor.device, requires_grad=True))


class _Flow:
    """What goes from layer to layer: the batch, and skips that have been stashed."""

    def __init__(self, sample: TensorOrTensors, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.values = [_Value(x.detach().to(device).clone(), x.requires_grad,
                                  _Memory(None, _bytes(x))) for x in Batch(sample)]
        self.device = device
        self.atomic = isinstance(sample, Tensor)
        self.stashed: Dict[Key, Tuple[int, Optional[_Value]]] = {}
        self.skips: List[SkipProfile] = []


@dataclass
class _Layer:
    """One layer under measurement."""

    name: str
    module: Optional[nn.Module]
    flow: _Flow
    index: int
    seconds: List[Tuple[float, float]] = field(default_factory=list)
    memories: List[_Memory] = field(default_factory=list)
    inner_bytes: int = 0
    changes: Optional[int] = None

    def run(self, budget: Optional[float]) -> None:
        """Go through the three phases, and pass on what the layer gives."""
        module = self.module
        assert module is not None
        self.inputs, self.atomic = self.flow.values, self.flow.atomic
        skips = isinstance(module, DeclaresSkips)
        self.stashes = list(module.stashable()) if skips else []  # type: ignore[operator]
        self.pops = {key: self.flow.stashed.pop(key)
                     for key in (module.poppable() if skips else ())}  # type: ignore[operator]
        self._train()
        self._watch()
        self._sizes(module)
        if budget is not None:
            self._time(budget)
        del self.inputs, self.pops

    def _start(self) -> Tuple[TensorOrTensors, SkipTracker]:
        tensors = tuple(value.fresh() for value in self.inputs)
        tracker = SkipTracker()
        for key, (_, value) in self.pops.items():
            tracker.tensors[key] = None if value is None else value.fresh()
        return tensors[0] if self.atomic else tensors, tracker

    def _forward(self, input: TensorOrTensors, tracker: SkipTracker) -> Any:
        with use_skip_tracker(tracker):
            return self.module(input)  # type: ignore[misc]

    def _results(self, output: Any, tracker: SkipTracker) -> List[Tensor]:
        """Give all that the layer gave: outputs, and what it stashed."""
        check(output)
        stashed = [tracker.tensors[key] for key in self.stashes]
        return [*Batch(output), *(x for x in stashed if x is not None)]

    def _train(self) -> Tuple[float, float]:
        """Run forward and backward, and take the time."""
        input, tracker = self._start()
        device = self.flow.device
        _synchronize(device)
        start = time.perf_counter()
        output = self._forward(input, tracker)
        _synchronize(device)
        forward = time.perf_counter() - start
        roots = [x for x in self._results(output, tracker) if x.requires_grad]
        grads = [torch.ones_like(x) for x in roots]
        _synchronize(device)
        start = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, grads)
        _synchronize(device)
        return forward, time.perf_counter() - start if roots else 0.0

    def _time(self, budget: float) -> None:
        end = time.perf_counter() + budget
        while len(self.seconds) < REPEATS or time.perf_counter() < end:
            self.seconds.append(self._train())

    def _watch(self) -> None:
        """Run forward; see which memory is kept, and hand on the results."""
        input, tracker = self._start()
        given: List[Tuple[Any, _Value]] = [*zip(Batch(input), self.inputs), *(
            (tracker.tensors[key], value) for key, (_, value) in self.pops.items() if value)]
        known = {_storage(x): value.memory for x, value in given}
        before = versions(x for x, _ in given)
        with LiveTensors().watched() as live:
            output = self._forward(input, tracker)
        changed = [value.memory.maker or 0 for (x, value), version in zip(given, before)
                   if versions([x]) != [version]]
        self.changes = min(changed, default=None)
        given.clear()
        self._hand_on(output, tracker, known, live)
        graph = [x.grad_fn for x in self._results(output, tracker)]
        references = [(weakref.ref(storage), memory) for storage, memory in known.items()]
        known.clear()
        del output, input, tracker
        self._see(graph, references, live)

    def _hand_on(self, output: Any, tracker: SkipTracker, known: Dict[Any, _Memory],
                 live: LiveTensors) -> None:
        def value(x: Tensor) -> _Value:
            storage = _storage(x)
            if storage not in known:
                made = live.knows(x)
                known[storage] = _Memory(self.index if made else None, storage.nbytes())
                self.memories += [known[storage]] if made else []
            return _Value(x.detach().clone(), x.requires_grad, known[storage])

        self.flow.values = [value(x) for x in Batch(output)]
        self.flow.atomic = isinstance(output, Tensor)
        self.output_bytes = sum(_bytes(x) for x in Batch(output))
        for key in self.stashes:
            tensor = tracker.tensors[key]
            self.flow.stashed[key] = self.index, None if tensor is None else value(tensor)
        self.flow.skips += [SkipProfile(source, self.index, _bytes(skip.tensor))
                            for source, skip in self.pops.values() if skip is not None]

    def _see(self, graph: List[Any], references: Iterable[Tuple[Any, _Memory]], live: LiveTensors
             ) -> None:
        """See what is alive now that only the graph is left."""
        outside = 0
        for reference, memory in references:
            alive = reference() is not None
            memory.kept |= alive
            outside += memory.bytes if alive and memory.maker == self.index else 0
        self.inner_bytes = live.now - outside
        graph.clear()

    def _sizes(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        self.parameter_bytes = sum(map(_bytes, parameters))
        self.frozen_bytes = sum(_bytes(x) for x in parameters if not x.requires_grad)
        self.buffer_bytes = sum(map(_bytes, module.buffers()))

    def result(self) -> LayerProfile:
        """Give the profile, once later layers have shown what they keep."""
        forward, backward = zip(*self.seconds) if self.seconds else ((0.0,), (0.0,))
        kept = sum(memory.bytes for memory in self.memories if memory.kept)
        return LayerProfile(self.name, median(forward), median(backward), self.parameter_bytes,
                            self.frozen_bytes, self.buffer_bytes, self.inner_bytes + kept,
                            self.output_bytes, self.changes)


def _synchronize(device: torch.device) -> None:
    if device.type not in ('cpu', 'meta'):
        torch.get_device_module(device).synchronize(device)


def _storage(x: Any) -> Any:
    return x.untyped_storage()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
