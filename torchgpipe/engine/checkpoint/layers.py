"""The layers of a partition, as the cells of one forward pass find them all."""
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from torchgpipe.aliases import Slot
from torchgpipe.engine.checkpoint.observed import Observed, Watch
from torchgpipe.engine.checkpoint.results import MARK
from torchgpipe.engine.checkpoint.snapshot import (Memories, Snapshot, copy_of, copy_on_write,
                                                   with_grad)
from torchgpipe.private import HOOKS

__all__ = ['Layers', 'SlotTensor']

#: Where a tensor is, and the tensor.
SlotTensor = tuple[Slot, Tensor]


class Layers:
    """The layers of a partition, for all cells of a forward pass.

    Args:
        partition: The layers.
        observed: What they were seen to do so far, by mode.
        lock: Held by whoever runs them.
    """

    def __init__(self, partition: nn.Module, observed: dict[tuple[bool, ...], Observed],
                 lock: AbstractContextManager[Any]) -> None:
        self.lock = lock
        self.modules = list(partition.modules())
        #: Those that are kept out of recomputation.
        self.no_recompute = [module for module in self.modules if MARK in module.__dict__]
        self._training = [module.training for module in self.modules]
        mode = tuple(self._training)
        if mode not in observed:
            observed[mode] = Observed()
        self.observed = observed[mode]
        #: The values that cells keep.
        self.kept: dict[Slot, Snapshot] = {}
        self._split: tuple[int, list[SlotTensor], list[SlotTensor]] = -1, [], []

    @cached_property
    def plain(self) -> list[tuple[nn.Module, bool]]:
        """All modules but those of TorchScript, whose attributes are not Python's; their modes."""
        return [(module, mode) for module, mode in zip(self.modules, self._training)
                if not isinstance(module, ScriptModule)]

    @cached_property
    def scripts(self) -> list[tuple[nn.Module, bool]]:
        """Those of TorchScript, and their modes."""
        return [(module, mode) for module, mode in zip(self.modules, self._training)
                if isinstance(module, ScriptModule)]

    @cached_property
    def _own_parameters(self) -> dict[nn.Module, dict[str, tuple[Tensor, bool]]]:
        """The parameters of each module in this forward pass, and whether they require grad.

        Afterwards `torch.func.functional_call` takes back what it gave, and others are frozen.
        """
        return {module: {name: (parameter, parameter.requires_grad)
                         for name, parameter in module._parameters.items()
                         if parameter is not None and not is_lazy(parameter)}
                for module in self.modules}

    def parameters_of(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a module as they were in this forward pass."""
        return {name: parameter if parameter.requires_grad is requires_grad
                else with_grad(parameter, requires_grad)
                for name, (parameter, requires_grad) in self._own_parameters[module].items()}

    @cached_property
    def hooks(self) -> dict[nn.Module, dict[str, Any]]:
        """The hooks of modules when a first cell has ended."""
        # Not dicts, as the handle of a hook refers to what holds it weakly.
        return {module: {name: module.__dict__[name].copy() for name in HOOKS}
                for module, _ in self.plain}

    @cached_property
    def _parameters(self) -> list[SlotTensor]:
        return [((module, name), parameter) for module, own in self._own_parameters.items()
                for name, (parameter, _) in own.items()]

    def watch(self) -> Watch:
        """Return what watches the first cell."""
        return Watch(self.modules)

    def parameters(self) -> tuple[list[SlotTensor], list[SlotTensor]]:
        """Return the parameters that are kept, and those that are told by their version."""
        written = self.observed.written
        if self._split[0] != len(written):
            kept = [(slot, x) for slot, x in self._parameters
                    if not x.requires_grad or slot in written]
            told = [(slot, x) for slot, x in self._parameters
                    if x.requires_grad and slot not in written]
            self._split = len(written), kept, told
        return self._split[1:]

    def keep(self, slot: Slot, tensor: Tensor, memories: Memories, at_once: bool
             ) -> Snapshot | None:
        """Keep the value of a tensor; cells that find the same value share a copy.

        Args:
            slot: Where it is.
            tensor: The tensor.
            memories: Copies that were made for this cell.
            at_once: Whether to copy it even if that can't be on write.
        """
        kept = self.kept.get(slot)
        if kept is None or not kept.is_still(tensor):
            value = (copy_of if at_once else copy_on_write)(tensor, memories)
            if value is None:
                return None
            kept = self.kept[slot] = Snapshot(tensor, value)
        return kept

    def name(self, slot: Slot) -> str:
        """Name a parameter or a buffer."""
        prefix = next(name for name, module in self.modules[0].named_modules()
                      if module is slot[0])
        kind = 'parameter' if slot[1] in slot[0]._parameters else 'buffer'
        return f"{kind} '{prefix}.{slot[1]}'"
