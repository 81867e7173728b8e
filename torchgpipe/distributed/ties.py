"""Ties: parameters that stand in stages of several ranks, such as an embedding and its head.

Each rank has a copy of its own, which is that of the first stage at the beginning, and gets the
sum of all gradients in each step; so all copies stay what one would be::

    stage 0, rank 0      gradient ◀── gradient of rank 3
                           └─ sum ──▶ rank 3
    stage 3, rank 3      gradient ──▶ rank 0,  sum ◀── rank 0
"""
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.distributed.layers import Tie
from torchgpipe.distributed.replicas import Gradients, local

__all__ = ['Ties']


class Ties:
    """The parameters of this rank that others have, too.

    Args:
        model: What has the parameters of this rank, by their names in the whole model.
        ties: The stages and names of each.
        ranks: The rank of each stage.
        group: The ranks of the pipeline.

    Attributes:
        names: The names of this rank's copies, each with the name in the first stage.
    """

    def __init__(self, model: nn.Module, ties: Sequence[Tie], ranks: Sequence[int],
                 group: dist.ProcessGroup | None) -> None:
        self._group = group
        #: The modules and names by which this rank has them, and all ranks that do.
        self._ties: list[tuple[nn.Module, str, list[int]]] = []
        self.names: dict[str, str] = {}
        for tie in ties:
            own = [name for j, name in tie if ranks[j] == dist.get_rank()]
            owners = [*dict.fromkeys(ranks[j] for j, _ in tie)]
            if own and len(owners) > 1:
                path, _, name = own[0].rpartition('.')
                self._ties.append((model.get_submodule(path), name, owners))
                self.names.update(dict.fromkeys(own, tie[0][1]))

    @torch.no_grad()
    def spread(self) -> None:
        """Let all copies be that of the first stage."""
        for module, name, (first, *others) in self._ties:
            x = local(module._parameters[name])  # type: ignore[arg-type]
            if dist.get_rank() == first:
                for rank in others:
                    dist.send(x.contiguous(), rank, self._group)
            else:
                value = torch.empty_like(x, memory_format=torch.contiguous_format)
                dist.recv(value, first, self._group)
                x.copy_(value)

    def together(self, gradients: Gradients) -> Gradients:
        """Return gradients, of parameters that other ranks have the sum of all."""
        own = {id(x): (x, grad) for x, grad in gradients}
        for module, name, ranks in self._ties:
            x = module._parameters[name]
            assert x is not None
            if x.requires_grad:
                grad = own[id(x)][1] if id(x) in own else torch.zeros_like(x)
                own[id(x)] = x, self._sum(grad, ranks)
        return [*own.values()]

    def _sum(self, grad: Tensor, ranks: Sequence[int]) -> Tensor:
        """Return the sum of what ranks have; in their order, so that all have the same."""
        here, (first, *others) = local(grad).contiguous(), ranks
        if dist.get_rank() == first:
            total = here.clone()
            for rank in others:
                part = torch.empty_like(total)
                dist.recv(part, rank, self._group)
                total += part
            for rank in others:
                dist.send(total, rank, self._group)
        else:
            dist.send(here, first, self._group)
            total = torch.empty_like(here)
            dist.recv(total, first, self._group)
        result = grad.clone(memory_format=torch.contiguous_format)
        local(result).copy_(total)
        return result

    @property
    def copies(self) -> set[int]:
        """The numbers of the parameters of this rank that an earlier stage's rank has."""
        return {id(module._parameters[name]) for module, name, ranks in self._ties
                if ranks[0] != dist.get_rank()}
