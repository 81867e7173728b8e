"""The partitions and names of modules, parameters and buffers.

One module may stand in several places, and so may one parameter or one buffer. PyTorch tells that
by identity, and so does this package.
"""
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torchgpipe.aliases import Slot

__all__ = ['holder_of', 'is_pipeline', 'modules_of', 'named_slots', 'only_computes',
           'shared_modules', 'shared_slots', 'tensor_of']


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
