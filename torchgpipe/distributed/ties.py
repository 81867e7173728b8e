"""Tied tensors in stages of several ranks, such as the weight of embedding and head.

Each rank has its own copy, which starts with the value in the first stage. In each step, it gets
the sum of all gradients, so all copies stay equal to a single tensor::

    stage 0, rank 0      gradient ◀── gradient of rank 3
                           └─ sum ──▶ rank 3
    stage 3, rank 3      gradient ──▶ rank 0,  sum ◀── rank 0
"""
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.distributed.layers import Tie
from torchgpipe.distributed.replicas import Gradients, like, local
from torchgpipe.distributed.tensor import layout_of, split_apart
from torchgpipe.shard.failures import gathered

__all__ = ['Ties']


class Ties:
    """The parameters and buffers of this rank that other ranks also have.

    Buffers are only compared: a layer that changes one makes ranks differ.

    Args:
        layers: The layers of this rank, by their names in the whole model.
        ties: The stages and names of each.
        ranks: The rank of each stage.
        group: The ranks of the pipeline.

    Attributes:
        names: The names of this rank's copies, each with the name in the first stage.
    """

    def __init__(self, layers: Mapping[str, nn.Module], ties: Sequence[Tie], ranks: Sequence[int],
                 group: dist.ProcessGroup | None) -> None:
        self._group = group
        #: The modules and names by which this rank has them, and all ranks that do.
        self._ties: list[tuple[nn.Module, str, list[int]]] = []
        #: By the name in the first stage, the name on this rank and the layout here.
        self._layouts: dict[str, tuple[str, str]] = {}
        self.names: dict[str, str] = {}
        #: The places of parameters and buffers, their names in the first stage, and how many
        #: other ranks have them, or -1 on all but the first.
        self._slots: list[tuple[nn.Module, str, str, int]] = []
        self._known: list[Any] = []
        for tie in ties:
            own = [name for j, name in tie if ranks[j] == dist.get_rank()]
            owners = [*dict.fromkeys(ranks[j] for j, _ in tie)]
            if own and len(owners) > 1:
                path, _, name = own[0].rpartition('.')
                layer, _, rest = path.partition('.')
                module, first = layers[layer].get_submodule(rest), tie[0][1]
                x = getattr(module, name)
                others = len(owners) - 1 if owners[0] == dist.get_rank() else -1
                self._slots.append((module, name, first, others))
                if isinstance(x, nn.Parameter):
                    self._ties.append((module, name, owners))
                    self._layouts[first] = own[0], layout_of(x)
                    self.names.update(dict.fromkeys(own, first))

    @property
    def shared(self) -> dict[int, tuple[str, int]]:
        """The name and the number of other ranks of each tensor, by its number: `comparison`."""
        return {id(getattr(module, name, None)): (first, others)
                for module, name, first, others in self._slots}

    def remember(self) -> None:
        """Record the parameters with which the model is made."""
        self._known = [module._parameters[name] for module, name, _ in self._ties]

    def check(self) -> None:
        """Check that the parameters are the same as when the model was made.

        Raises:
            ValueError: A parameter was replaced, so it may not be tied any more.
        """
        for (module, name, ranks), x in zip(self._ties, self._known):
            if module._parameters.get(name) is not x:
                raise ValueError(f"'{name}' of a {type(module).__name__}, which stages on ranks "
                                 f'{ranks} share, was replaced after this model was made: change '
                                 'its values in place, or replace it in the module before')

    @torch.no_grad()
    def spread(self, device: torch.device) -> None:
        """Copy the values in the first stage to all copies.

        Args:
            device: The device of this rank, from which it sends; parameters may be on the host.

        Raises:
            ValueError: The copies are split in different ways.
        """
        self._check_layouts()
        for module, name, (first, *others) in self._ties:
            x = local(module._parameters[name])  # type: ignore[arg-type]
            if dist.get_rank() == first:
                for rank in others:
                    dist.send(x.contiguous().to(device), rank, self._group)
            else:
                value = torch.empty_like(x, device=device, memory_format=torch.contiguous_format)
                dist.recv(value, first, self._group)
                x.copy_(value)

    def _check_layouts(self) -> None:
        if self._group is None:
            return
        found: list[dict[str, tuple[str, str]]] = gathered(self._layouts, self._group)
        for first in dict.fromkeys(key for each in found for key in each):
            layouts = dict(each[first] for each in found if first in each)
            if len({*layouts.values()}) > 1:
                raise split_apart(layouts)

    def together(self, gradients: Gradients) -> Gradients:
        """Return gradients, summed over all ranks for parameters that other ranks have.

        Raises:
            RuntimeError: A parameter is frozen on some of them.
        """
        own = {id(module._parameters[name]) for module, name, _ in self._ties}
        grads = {id(x): grad for x, grad in gradients if id(x) in own}
        found = [(x, grad) for x, grad in gradients if id(x) not in own]
        for module, name, ranks in self._ties:
            x = module._parameters[name]
            assert x is not None
            grad, there, learning = self._sum(x, grads.get(id(x)), ranks)
            if 0 < learning < len(ranks):
                raise RuntimeError(
                    f"'{name}' of a {type(module).__name__}, which stages on ranks {ranks} share, "
                    f'requires grad on {learning} of them; freeze it on all, or on none')
            if there:
                found.append((x, grad))
        return found

    def _sum(self, x: Tensor, grad: Tensor | None, ranks: Sequence[int]
             ) -> tuple[Tensor, int, int]:
        """Return the sum of ranks' gradients, the number of gradients, and of trained copies.

        Gradients are added up in the order of ranks, and the first rank sends the sum to all.
        """
        result = like(x, grad)
        said = local(result).new_tensor([grad is not None, x.requires_grad])
        total, (first, *others) = torch.cat([local(result).reshape(-1), said]), ranks
        if dist.get_rank() == first:
            for rank in others:
                part = torch.empty_like(total)
                dist.recv(part, rank, self._group)
                total += part
            for rank in others:
                dist.send(total, rank, self._group)
        else:
            dist.send(total, first, self._group)
            dist.recv(total, first, self._group)
        local(result).copy_(total[:-2].view_as(local(result)))
        there, learning = total[-2:].tolist()
        return result, int(there), int(learning)

    @property
    def copies(self) -> set[int]:
        """The numbers of this rank's parameters that the rank of an earlier stage has."""
        return {id(module._parameters[name]) for module, name, ranks in self._ties
                if ranks[0] != dist.get_rank()}
