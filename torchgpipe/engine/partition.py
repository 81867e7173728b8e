"""Partitions: their modules, tensors and compiled layers, and the engine's state between passes.

One module, parameter or buffer may be in several places. This package detects it by identity, as
PyTorch does.

Autograd has a thread for each accelerator, and gives all of them the same copy of the caller's
context variables. Compiled code enters this copy in backward, which two threads cannot do
concurrently ("cannot enter context"). In a pipeline, two threads would do so.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import CPU, is_cpu, memory_key
from torchgpipe.base.locks import Lock, layer_lock, new_lock, step_lock, together
from torchgpipe.base.private import compiled_codes, is_compiled, is_compiled_module, own_context
from torchgpipe.base.structure import Slot
from torchgpipe.engine.checkpoint.observation import Observed
from torchgpipe.engine.checkpoint.random import Drawing
from torchgpipe.engine.checkpoint.samples import PendingComparison
from torchgpipe.engine.observer import Observer, observers
from torchgpipe.engine.streams import no_context
from torchgpipe.engine.workers import Workers, device_key
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout


def is_pipeline(module: nn.Module) -> bool:
    """Return whether a module runs its layers itself, with its own workers and locks."""
    return '_engine' in module.__dict__


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules within, except the layers of pipelines among them.

    >>> [type(module).__name__ for module in modules_of(nn.Sequential(nn.ReLU()))]
    ['Sequential', 'ReLU']
    """
    seen = {module}
    queue = [module]
    while queue:
        current = queue.pop()
        yield current
        if not is_pipeline(current):
            children = [child for child in current.children() if child not in seen]
            seen.update(children)
            queue += reversed(children)


def all_modules(root: nn.Module) -> list[nn.Module]:
    """Return a module and all modules within, in the order of ``root.modules()``.

    That has a generator for each level, so it takes several times as long, in each step.

    >>> [type(module).__name__ for module in all_modules(nn.Sequential(nn.ReLU()))]
    ['Sequential', 'ReLU']
    """
    modules: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is not None and module not in modules:
            modules[module] = None
            stack += reversed(module._modules.values())
    return [*modules]


def holder_of(slot: Slot) -> Any:
    """Return the module's dictionary that contains a parameter or a buffer."""
    module, name = slot
    return module._parameters if name in module._parameters else module._buffers


def tensor_of(slot: Slot) -> Any:
    """Return the parameter or the buffer at a slot; ``None`` if it does not exist."""
    return holder_of(slot).get(slot[1])


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module, without other modules in it, by name."""
    items = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in items if tensor is not None]


def named_slots(
    module: nn.Module,
    prefix: str = '',
) -> Iterator[tuple[str, Slot, Tensor]]:
    """Yield the parameters and buffers of a module and all modules within, at each place.

    >>> [name for name, _, _ in named_slots(nn.Sequential(nn.Linear(2, 2)), 'model')]
    ['model.0.weight', 'model.0.bias']
    """
    for path, owner in module.named_modules(prefix=prefix):
        if path:
            path += '.'
        for name, tensor in tensors_of(owner):
            yield path + name, (owner, name), tensor


def shared_in(layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for prefix, layer in layers.items():
        for full, _, x in named_slots(layer, prefix):
            names.setdefault(id(x), []).append(full)
    shared = []
    for places in names.values():
        if len(places) > 1:
            shared.append(places)
    return shared


def parameters_by_name(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module, once each, in the order of their names.

    The order is the same on all ranks, even if a module registers its parameters in the order of
    a set, which differs between processes.

    >>> [x.dim() for x in parameters_by_name(nn.Linear(2, 2))]  # bias, weight
    [1, 2]
    """
    named = sorted(module.named_parameters(remove_duplicate=False), key=itemgetter(0))
    return [*dict.fromkeys(x for _, x in named)]


def shared_modules(partitions: Sequence[nn.Module]) -> dict[nn.Module, tuple[int, ...]]:
    """Return the modules in more than one partition, each with its partitions.

    >>> a = nn.ReLU()
    >>> shared_modules([nn.Sequential(a), nn.Sequential(nn.ReLU()), nn.Sequential(a)])
    {ReLU(): (0, 2)}
    """
    places: dict[nn.Module, list[int]] = {}
    for j, partition in enumerate(partitions):
        for module in modules_of(partition):
            places.setdefault(module, []).append(j)
    return {module: tuple(js) for module, js in places.items() if len(js) > 1}


def shared_slots(partitions: Sequence[nn.Module]) -> list[dict[Slot, bool]]:
    """Return the slots of each partition whose tensors are also in an earlier partition.

    Returns:
        For each of these slots, whether another module has the same tensor, in any partition.
    """
    # By the tensor's id: its first partition, and all modules that have it.
    owners: dict[int, tuple[int, set[nn.Module]]] = {}
    shared: list[dict[Slot, Tensor]] = [{} for _ in partitions]
    for j, partition in enumerate(partitions):
        for module in modules_of(partition):
            for name, tensor in tensors_of(module):
                first_j, modules = owners.setdefault(id(tensor), (j, set()))
                modules.add(module)
                if first_j < j:
                    shared[j][module, name] = tensor

    ties: list[dict[Slot, bool]] = []
    for slots in shared:
        is_tied = {}
        for slot, tensor in slots.items():
            _, modules = owners[id(tensor)]
            is_tied[slot] = len(modules) > 1
        ties.append(is_tied)
    return ties


def only_computes(module: nn.Module) -> bool:
    """Return whether a module is known not to change when it is called.

    This holds for PyTorch's layers without buffers, unless they write to a parameter or have a
    forward pre-hook, such as a lazy layer. For all other modules it is not known.
    """
    return (
        type(module).__module__.startswith('torch.nn.modules.')
        and 'forward' not in module.__dict__
        and not module._buffers
        and not module._forward_pre_hooks
        and getattr(module, 'max_norm', None) is None
    )


# Compiled layers.


def has_compiled(partition: nn.Module) -> bool:
    """Return whether a partition is compiled, or a layer in it."""
    return 'forward' in partition.__dict__ or any(map(is_compiled_module, partition.modules()))


def part_contexts(
    inputs: Iterable[Any],
    outputs: Iterable[Tensor],
) -> None:
    """Give each compiled node its own context."""
    if not compiled_codes():
        return
    visited = {None, *inputs}
    nodes: list[Any] = [y.grad_fn for y in outputs]
    while nodes:
        node = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        if is_compiled(node):
            node.register_prehook(own_context)
        nodes += [next_node for next_node, _ in node.next_functions]


def compiled(
    layers: nn.Sequential,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function that calls layers in order, compiled together where possible."""

    def is_excluded(name: str) -> bool:
        return hasattr(getattr(layers._modules[name], 'forward', None), '_torchdynamo_disable')

    # PyTorch does not compile a loop if it cannot compile one of its layers.
    runs: list[Callable[..., Any]] = []
    for _, names in groupby(layers._modules, is_excluded):
        run = torch.compile(_own_code(_run), *args, **kwargs)
        runs.append(partial(run, layers, tuple(names)))
    return partial(_run_all, runs)


def _run(
    layers: nn.Sequential,
    names: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of some of the layers."""
    first, *rest = names
    value = layers._modules[first](*args, **kwargs)
    for name in rest:
        value = layers._modules[name](value)
    return value


def _own_code(function: Any) -> Callable[..., Any]:
    """Copy a function, because PyTorch limits how often it compiles the same code."""
    return FunctionType(function.__code__.replace(), function.__globals__)


def _run_all(
    runs: Sequence[Callable[..., Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    first, *rest = runs
    value = first(*args, **kwargs)
    for run in rest:
        value = run(value)
    return value


# The state of the engine.


class Partition:
    """One partition."""

    #: The observer of each run of the layers, if there is one.
    observer: Observer | None = None
    #: Whether the batch comes from another memory.
    moves = False
    #: Whether a batch or a skip comes from another memory, or goes to one.
    arrives = False
    departs = False
    #: Whether the loss or the output is behind it.
    is_last = False
    #: Whether another partition contains one of its modules.
    shares_modules = False
    #: Whether cells run one after the other, because the partition communicates, or shares a
    #: module that may change.
    serialized = False
    #: Held while the layers run: see :mod:`torchgpipe.base.locks`.
    lock: Lock = no_context
    #: Held while the modules have other attributes, such as in a recomputation. No other
    #: partition runs any of these modules meanwhile.
    lock_alone: Lock = no_context

    def __init__(
        self,
        j: int,
        layers: nn.Sequential,
        device: torch.device,
        skip_layout: SkipLayout,
    ) -> None:
        self.j = j
        self.layers = layers
        self.device = device
        #: The key of the worker that runs the partition.
        self.worker = device_key(device)
        self.memory = memory_key(device)
        #: Incoming and outgoing skips, each with the partition at the other end.
        self.incoming = skip_layout.incoming(j)
        self.outgoing = skip_layout.outgoing(j)
        self.has_skips = bool(self.incoming or self.outgoing)
        #: The slots whose parameter or buffer is also in an earlier partition, and whether another
        #: module has it.
        self.shared: dict[Slot, bool] = {}
        #: Outputs of recomputations that could not be compared with the first pass yet.
        self.pending: deque[PendingComparison] = deque()
        #: The observed behaviour of its layers, by mode.
        self.observed: defaultdict[tuple[bool, ...], Observed] = defaultdict(Observed)

    @cached_property
    def has_pipeline(self) -> bool:
        """Whether it contains another pipeline."""
        return any(map(is_pipeline, self.layers.modules()))

    @cached_property
    def communicates(self) -> bool:
        """Whether it has a module that communicates.

        See [Note: Collectives] of :mod:`torchgpipe.base.context`.
        """
        for module in modules_of(self.layers):
            if getattr(module, 'communicates', False) is True:
                return True
        return False


class Engine:
    """Partitions, and the threads and streams that run them.

    Args:
        devices: The device of each partition. By default, all are on the CPU.
        skip_layout: The source and destination partition of each skip. By default, it is found by
            inspection.
    """

    #: The observer of actions, if there is one.
    observer: Observer | None = None
    #: Whether the loss of a step draws.
    loss_draws = Drawing.UNKNOWN
    #: Whether the backward of any cell draws, such as in an `autograd.Function`.
    backward_draws = Drawing.UNKNOWN

    def __init__(
        self,
        partitions: Iterable[nn.Sequential],
        devices: Sequence[torch.device] | None = None,
        skip_layout: SkipLayout | None = None,
    ) -> None:
        layers = list(partitions)
        devices = devices or [CPU] * len(layers)
        layout = skip_layout or inspect_skip_layout(layers)
        self.partitions: list[Partition] = []
        for j, device in zip(range(len(layers)), devices):
            partition = Partition(j, layers[j], device, layout)
            partition.is_last = j == len(layers) - 1
            self.partitions.append(partition)
        self.workers = Workers()
        #: Held by a forward pass or a step: see :mod:`torchgpipe.base.locks`.
        self.lock = new_lock()
        #: Held in a step by actions that draw from the CPU's generator, or may restore its state.
        self.generator_lock = new_lock()

        self._set_boundaries()
        for partition, slots in zip(self.partitions, shared_slots(layers)):
            partition.shared = slots
        shared = shared_modules(layers)
        #: The modules that are in several partitions and may change when they are called.
        self.changing = [module for module in shared if not only_computes(module)]
        self._set_locks(shared)

    @cached_property
    def one_worker(self) -> bool:
        """Whether all partitions are on one device.

        Then no two cells can run concurrently, so a thread would only make its caller wait, and
        cost as much as several small layers.
        """
        return len({partition.worker for partition in self.partitions}) <= 1

    @cached_property
    def cpu_workers(self) -> int:
        """The number of workers that share the cores of the CPU."""
        return len({x.worker for x in self.partitions if is_cpu(x.device)})

    @cached_property
    def several_memories(self) -> bool:
        """Whether shared tensors have to be copied, and autograd may use several threads."""
        return len({partition.memory for partition in self.partitions}) > 1

    @cached_property
    def shares(self) -> bool:
        """Whether some partitions on different workers share parameters or buffers."""
        return not self.one_worker and any(partition.shared for partition in self.partitions)

    @cached_property
    def step_lock(self) -> Lock:
        """The lock of a step: see :mod:`torchgpipe.base.locks`."""
        modules = []
        for partition in self.partitions:
            modules += [module for module in partition.layers.modules() if module._parameters]
        return step_lock(modules)

    @cached_property
    def communicating_worker(self) -> Hashable:
        """The worker that communicates with other processes in a step, or may do so for the loss.

        Raises:
            RuntimeError: Several workers communicate.
        """
        communicating = [partition for partition in self.partitions if partition.communicates]
        if len({partition.worker for partition in communicating}) > 1:
            names = ', '.join(
                f'{partition.j} on {partition.device}' for partition in communicating
            )
            raise RuntimeError(
                f'partitions {names} communicate with other processes, and each worker goes '
                'through its actions of a step by itself: the ranks would not come to their '
                'collectives in the same order. Put these partitions on one device; or use the '
                'plain call, model(input) and loss.backward(), which runs one cell after the '
                'other'
            )
        return (communicating or self.partitions)[-1].worker

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Notify an observer of all actions, cells and copies within the context.

        Raises:
            RuntimeError: Another observer is active already.
        """
        if self.observer is not None:
            raise RuntimeError(
                'this model is being recorded already; end one recording before '
                'the next one begins'
            )
        observers.append(observer)
        self._set_observer(observer)
        try:
            yield
        finally:
            self._set_observer(None)
            observers.remove(observer)

    def _set_observer(self, observer: Observer | None) -> None:
        self.observer = observer
        for partition in self.partitions:
            partition.observer = observer

    def _set_boundaries(self) -> None:
        """Set which partitions exchange batches or skips with another memory."""
        for j, partition in enumerate(self.partitions):
            for prev_j, _ in partition.incoming:
                partition.arrives |= self.apart(prev_j, j)
            for next_j, _ in partition.outgoing:
                partition.departs |= self.apart(j, next_j)
            if j > 0 and self.apart(j - 1, j):
                partition.moves = True
                partition.arrives = True
                self.partitions[j - 1].departs = True

    def _set_locks(self, shared: dict[nn.Module, tuple[int, ...]]) -> None:
        """Set locks so that no two partitions run a module concurrently, unless it only computes.

        A module that only computes has a lock as well if partitions may have copies of its
        parameters. Then its cells need no order.
        """
        exclusive: dict[tuple[int, ...], list[nn.Module]] = {}
        for partition in self.partitions:
            partition.serialized = partition.communicates
        for module, js in shared.items():
            changes = not only_computes(module)
            if changes or self.several_memories and module._parameters:
                exclusive.setdefault(js, []).append(module)
            for j in js:
                self.partitions[j].shares_modules = True
                self.partitions[j].serialized |= changes

        for j, partition in enumerate(self.partitions):
            layers = [layer for layer in partition.layers if layer not in shared]
            locks = [layer_lock(layers or [partition.layers])]
            for js, modules in exclusive.items():
                if j in js:
                    locks.append(layer_lock(modules))
            partition.lock = together(*locks)

        # While a module has other attributes, none of the partitions that have it may run.
        for j, partition in enumerate(self.partitions):
            locks = [partition.lock]
            for module, js in shared.items():
                if j in js:
                    locks.append(layer_lock([module]))
                    locks += [self.partitions[other_j].lock for other_j in js]
            partition.lock_alone = together(*locks)

    def apart(self, j: int, k: int) -> bool:
        """Return whether two partitions are in different memories."""
        return bool(self.partitions[j].memory != self.partitions[k].memory)
