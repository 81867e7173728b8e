"""Partitions: their modules and tensors, and the engine's state between forward passes.

One module may stand in several places, and so may one parameter or one buffer. PyTorch tells that
by identity, and so does this package.
"""
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.context import layer_lock, new_lock, step_lock, together
from torchgpipe.base.devices import is_cpu, memory_key
from torchgpipe.base.structure import Slot
from torchgpipe.engine.checkpoint.recomputation import PendingComparison
from torchgpipe.engine.checkpoint.state import Observed
from torchgpipe.engine.streams import Observer, no_context, observers
from torchgpipe.engine.workers import Workers, device_key
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout

__all__ = ['Engine', 'Partition', 'holder_of', 'is_pipeline', 'modules_of', 'named_slots',
           'only_computes', 'shared_modules', 'shared_slots', 'tensor_of']


def is_pipeline(module: nn.Module) -> bool:
    """Tell a module that runs its layers itself, on workers and with locks of its own."""
    return '_engine' in module.__dict__


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all within, but for what pipelines among them run.

    >>> [type(module).__name__ for module in modules_of(nn.Sequential(nn.ReLU()))]
    ['Sequential', 'ReLU']
    """
    seen, queue = {module}, [module]
    while queue:
        found = queue.pop()
        yield found
        if not is_pipeline(found):
            new = [child for child in found.children() if child not in seen]
            seen.update(new)
            queue += reversed(new)


def holder_of(slot: Slot) -> Any:
    """Return the dictionary in which a module has a parameter or a buffer."""
    module, name = slot
    return module._parameters if name in module._parameters else module._buffers


def tensor_of(slot: Slot) -> Any:
    """Return the parameter or the buffer there, if there is one."""
    holder, name = holder_of(slot), slot[1]
    return holder[name] if name in holder else None


def named_slots(module: nn.Module, prefix: str = '') -> Iterator[tuple[str, Slot, Tensor]]:
    """Yield the parameters and buffers of a module and of all within, each wherever it stands.

    >>> [name for name, _, _ in named_slots(nn.Sequential(nn.Linear(2, 2)), 'model')]
    ['model.0.weight', 'model.0.bias']
    """
    for path, owner in module.named_modules(prefix=prefix):
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield f'{path}.{name}' if path else name, (owner, name), tensor


def shared_modules(partitions: Sequence[nn.Module]) -> dict[nn.Module, tuple[int, ...]]:
    """Tell in which partitions each module stands, if in more than one.

    >>> a = nn.ReLU()
    >>> shared_modules([nn.Sequential(a), nn.Sequential(nn.ReLU()), nn.Sequential(a)])
    {ReLU(): (0, 2)}
    """
    where: dict[nn.Module, list[int]] = {}
    for j, partition in enumerate(partitions):
        for module in modules_of(partition):
            where.setdefault(module, []).append(j)
    return {module: tuple(js) for module, js in where.items() if len(js) > 1}


def shared_slots(partitions: Sequence[nn.Module]) -> list[dict[Slot, bool]]:
    """Give for each partition where it has parameters and buffers that an earlier one has, too.

    Returns:
        For each of these places, whether another module has the same, in any partition.
    """
    owners: dict[int, tuple[Tensor, int, set[nn.Module]]] = {}
    found: list[list[tuple[Slot, Tensor]]] = [[] for _ in partitions]
    for j, partition in enumerate(partitions):
        for module in modules_of(partition):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    _, first, modules = owners.setdefault(id(tensor), (tensor, j, set()))
                    modules.add(module)
                    if first < j:
                        found[j].append(((module, name), tensor))
    return [{slot: len(owners[id(tensor)][2]) > 1 for slot, tensor in each} for each in found]


def only_computes(module: nn.Module) -> bool:
    """Return whether a module is known not to change by being called.

    So are layers of PyTorch's own that have no buffers, unless they write to a parameter, or a
    hook does so, as that of a lazy layer. Of all others it is not known.
    """
    return (type(module).__module__.startswith('torch.nn.modules.')
            and 'forward' not in module.__dict__
            and not module._buffers and not module._forward_pre_hooks
            and getattr(module, 'max_norm', None) is None)


# --- the engine's state
# ----------------------------------------------------------------------------------


class Partition:
    """One partition.

    Args:
        j: Its index.
        layers: Its layers.
        device: Where they are.
        skip_layout: Where skips come from and go to.
    """

    def __init__(self, j: int, layers: nn.Sequential, device: torch.device, skip_layout: SkipLayout
                 ) -> None:
        self.j = j
        self.layers = layers
        self.device = device
        #: Who is told of each run of the layers, if anyone.
        self.observer: Observer | None = None
        #: The worker that runs it.
        self.worker = device_key(device)
        self.memory = memory_key(device)
        #: Skips that come in and go out, with the partition at the other end.
        self.incoming = skip_layout.incoming(j)
        self.outgoing = skip_layout.outgoing(j)
        self.has_skips = bool(self.incoming or self.outgoing)
        #: Whether the batch comes from another memory.
        self.moves = False
        #: Whether anything comes from another memory, or goes to one.
        self.arrives = False
        self.departs = False
        #: Held by whoever runs it: see :mod:`torchgpipe.base.context`.
        self.lock: AbstractContextManager[Any] = no_context
        #: Held by whoever gives its modules other attributes, as for a recomputation: no other
        #: partition runs any of them meanwhile.
        self.lock_alone: AbstractContextManager[Any] = no_context
        #: Whether a module of it is in another partition, too.
        self.shares_modules = False
        #: Whether there is another pipeline in it.
        self.has_pipeline = any(map(is_pipeline, layers.modules()))
        #: Whether it has a module that communicates: [Note: Collectives] of
        #: :mod:`torchgpipe.base.context`.
        self.communicates = any(
            getattr(module, 'communicates', False) is True for module in modules_of(layers))
        #: Whether cells run one after the other, since it communicates, or shares a module with
        #: others that may change.
        self.serialized = self.communicates
        #: Where it has parameters and buffers that an earlier partition has, too; and whether
        #: another module has them.
        self.shared: dict[Slot, bool] = {}
        #: Outputs that could not be compared yet with those of their recomputation.
        self.pending: deque[PendingComparison] = deque()
        #: What its layers were seen to do, by mode.
        self.observed: defaultdict[tuple[bool, ...], Observed] = defaultdict(Observed)


class Engine:
    """Partitions, and the threads and streams that run them.

    Args:
        partitions: One after the other.
        devices: One per partition; all on the CPU by default.
        skip_layout: Which skips go from which partition to which; looked up if missing.
    """

    def __init__(self, partitions: Iterable[nn.Sequential],
                 devices: Sequence[torch.device] | None = None,
                 skip_layout: SkipLayout | None = None) -> None:
        layers = list(partitions)
        self.skip_layout = inspect_skip_layout(layers) if skip_layout is None else skip_layout
        self.partitions = [
            Partition(j, each, device, self.skip_layout) for j, (each, device)
            in enumerate(zip(layers, devices or [torch.device('cpu')] * len(layers)))]
        self.has_skips = any(partition.has_skips for partition in self.partitions)
        self.workers = Workers()
        #: Whether the loss of a step was seen to draw random numbers; ``None`` if not known yet.
        self.loss_draws: bool | None = None
        #: And whether the backward of any cell was, as that of an `autograd.Function` may.
        self.backward_draws: bool | None = None
        #: Held by a forward pass or a step: see :mod:`torchgpipe.base.context`.
        self.lock = new_lock()
        #: Held in a step by all that draws from the generator of the CPU, or may put it back.
        self.generator_lock = new_lock()
        #: Who is told of actions, if anyone.
        self.observer: Observer | None = None
        #: On one device nothing can run at the same time, so a thread would only make its caller
        #: wait, and cost as much as several small layers.
        self.one_worker = len({partition.worker for partition in self.partitions}) <= 1
        #: How many workers share the cores of the CPU.
        self.cpu_workers = len({partition.worker for partition in self.partitions
                                if is_cpu(partition.device)})
        #: Whether what they share has to be copied, and autograd may run nodes in several threads.
        self.several_memories = len({partition.memory for partition in self.partitions}) > 1
        for j, partition in enumerate(self.partitions):
            partition.moves = j > 0 and self.apart(j - 1, j)
        for j, partition in enumerate(self.partitions):
            partition.arrives = partition.moves or any(
                self.apart(prev_j, j) for prev_j, _ in partition.incoming)
            partition.departs = any(next.moves for next in self.partitions[j + 1:j + 2]) or any(
                self.apart(j, next_j) for next_j, _ in partition.outgoing)
        for partition, slots in zip(self.partitions, shared_slots(layers)):
            partition.shared = slots
        #: Whether some partitions on different workers share parameters or buffers.
        self.shares = not self.one_worker and any(each.shared for each in self.partitions)
        shared = shared_modules(layers)
        #: The modules in several partitions that may change when they are called.
        self.changing = [module for module in shared if not only_computes(module)]
        self._lock(shared)

    @cached_property
    def step_lock(self) -> AbstractContextManager[Any]:
        """The lock of a step: see :mod:`torchgpipe.base.context`."""
        return step_lock(module for partition in self.partitions
                         for module in partition.layers.modules() if module._parameters)

    @cached_property
    def communicating_worker(self) -> Hashable:
        """The worker that communicates with other processes in a step, or may do so for the loss.

        Raises:
            RuntimeError: There are several.
        """
        found = [partition for partition in self.partitions if partition.communicates]
        if len({partition.worker for partition in found}) > 1:
            names = ', '.join(f'{partition.j} on {partition.device}' for partition in found)
            raise RuntimeError(
                f'partitions {names} communicate with other processes, and each worker goes '
                'through its actions of a step by itself: the ranks would not come to their '
                'collectives in the same order. Put these partitions on one device; or use the '
                'plain call, model(input) and loss.backward(), which runs one cell after the '
                'other')
        return (found or self.partitions)[-1].worker

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Tell somebody what is done within the context.

        Raises:
            RuntimeError: Somebody else is told already.
        """
        if self.observer is not None:
            raise RuntimeError('this model is being recorded already; end one recording before '
                               'the next one begins')
        observers.append(observer)
        self._tell(observer)
        try:
            yield
        finally:
            self._tell(None)
            observers.remove(observer)

    def _tell(self, observer: Observer | None) -> None:
        self.observer = observer
        for partition in self.partitions:
            partition.observer = observer

    def _lock(self, shared: dict[nn.Module, tuple[int, ...]]) -> None:
        """Let no two partitions run a module at the same time, unless it only computes.

        If it does but may have copies in some of them, it does not matter which one comes first.
        """
        alone: dict[tuple[int, ...], list[nn.Module]] = {}
        for module, js in shared.items():
            changes = not only_computes(module)
            if changes or self.several_memories and module._parameters:
                alone.setdefault(js, []).append(module)
            for j in js:
                self.partitions[j].shares_modules = True
                self.partitions[j].serialized |= changes
        for partition in self.partitions:
            own = [layer for layer in partition.layers if layer not in shared]
            partition.lock = together(layer_lock(own or [partition.layers]), *(
                layer_lock(modules) for js, modules in alone.items() if partition.j in js))
        for partition in self.partitions:
            beside = {j for js in shared.values() if partition.j in js for j in js}
            partition.lock_alone = together(
                partition.lock, *(self.partitions[j].lock for j in beside), *(
                    layer_lock([module]) for module, js in shared.items() if partition.j in js))

    def apart(self, j: int, k: int) -> bool:
        """Return whether two partitions are in different memories."""
        return bool(self.partitions[j].memory != self.partitions[k].memory)
