"""Replicas: what the gradients of several ranks become, once in a step.

::

    'replicate'    each rank has all parameters of its stages
                   step ──▶ gradients, side by side in one tensor ──▶ sum over replicas ──▶ .grad
    'shard'        each rank has a part of them (ZeRO; FSDP2 of PyTorch)
                   gather ──▶ step ──▶ gradients ──▶ sum over replicas, and scatter ──▶ .grad
    experts        each rank has some, which see the samples of all replicas
                   step ──▶ gradients, which are those of all replicas ──▶ .grad

Losses are weighted by what the whole mini-batch counts, so replicas are summed, and it does not
matter how many samples each has.

[Note: FSDP sees one call] FSDP gathers parameters when its module is called, and reduces gradients
when backward has come through it. A step calls layers once for each micro-batch, and goes back in
between. So all of it happens within one call of a module around them, whose output leads back to
the gradients that the step has found.
"""
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchgpipe.distributed.mesh import Axis
from torchgpipe.engine.leaves import Give, give

__all__ = ['DATA', 'Gradients', 'Replicas', 'like', 'local', 'split_axes', 'take_first']

#: Pairs of a tensor and its gradient.
Gradients = list[tuple[Tensor, Tensor]]

#: What ranks along the data axis may do with parameters.
DATA = ('replicate', 'shard')


class Replicas(nn.Module):
    """The stages of a rank, which other ranks have, too.

    Args:
        stages: The stages.
        axis: The ranks that have them.
        data: One of :data:`DATA`.
        policies: ``mp_policy``, ``offload_policy`` of FSDP2, and the ``mesh`` of the axis, which
            is there for one replica, too, where one of them is.
    """

    def __init__(self, stages: Iterable[nn.Module], axis: Axis, data: str,
                 policies: Mapping[str, Any]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._axis = axis
        #: Whether steps put the gradients of replicas together.
        self.syncs = True
        #: Otherwise, what they have left, by the number of a parameter.
        self.pending: dict[int, Tensor] = {}
        self.shards = data == 'shard' and (axis.group is not None or bool(policies))
        self.precision: MixedPrecisionPolicy = policies.get('mp_policy') or MixedPrecisionPolicy()
        #: Those that are spread over replicas, as experts are: their gradients are complete.
        self._spread: dict[nn.Parameter, None] = dict.fromkeys(
            x for x in self.parameters() if axis.name in split_axes(x))
        #: Frozen ones stay whole: recomputation keeps their values as they were in forward, in
        #: memory that FSDP would take away.
        self._whole: dict[nn.Parameter, None] = dict.fromkeys(
            x for x in self.parameters() if not x.requires_grad and x not in self._spread)
        if self.shards:
            if self.precision.param_dtype is not None and self._whole:
                raise ValueError('mp_policy casts parameters that are spread over replicas, and '
                                 f'{len(self._whole)} are frozen, which stay whole: cast the '
                                 'module itself, or freeze them after the model is made')
            fully_shard(self, **{'mesh': axis.mesh, **policies}, reshard_after_forward=False,
                        ignored_params={*self._whole, *self._spread})
            assert isinstance(self, FSDPModule)
            self.set_gradient_divide_factor(1.)  # a sum
            self.set_force_sum_reduction_for_comms(True)  # not NCCL's product with 1 and sum

    def forward(self, phony: Tensor, step: Callable[[], Gradients]) -> Tensor:
        """Run a step, and return what leads back to its gradients: [Note: FSDP sees one call]."""
        gradients = step()
        if not gradients:
            return phony * 1
        return Give.apply(  # type: ignore[no-any-return, no-untyped-call]
            [grad for _, grad in gradients], *(x for x, _ in gradients))

    def run(self, step: Callable[[], Gradients], others: Sequence[Tensor] = ()) -> None:
        """Run a step, and add its gradients to those of parameters, the replicas' together.

        Args:
            step: Gives the gradients of this rank.
            others: Parameters that are in none of the stages, but in those of a loss.
        """
        if not self.shards:
            own = [x for x in self.parameters() if x.requires_grad and x not in self._spread]
            give(self._together(step(), [*own, *others], [*self._spread]))
            return

        def run() -> Gradients:
            # FSDP reduces those that it is in charge of, and has them whole here.
            gradients, others_than = step(), {*map(id, (*self._whole, *self._spread))}
            sharded = [x for x in self.parameters() if id(x) not in others_than]
            learning = [x for x in self._whole if x.requires_grad]
            return self._together(self._completed(gradients, sharded), [*learning, *others],
                                  [*sharded, *self._spread])

        self(torch.zeros((), requires_grad=True), run).backward()

    def _completed(self, gradients: Gradients, sharded: Sequence[Tensor]) -> Gradients:
        """Return gradients, with zeros for those that other replicas have and this one has not."""
        group, there = self._axis.group, {id(x) for x, _ in gradients}
        if group is None:
            return gradients
        flags = torch.tensor([id(x) in there for x in sharded], device=sharded[0].device)
        anywhere = torch.stack(_gathered(group, flags.to(torch.uint8))).amax(0).tolist()
        return gradients + [(x, torch.zeros_like(x)) for x, found in zip(sharded, anywhere)
                            if found and id(x) not in there]

    @property
    def gather(self) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """What returns what each replica has of a tensor; ``None`` if there are no others."""
        group = self._axis.group
        return None if group is None else partial(_gathered, group)

    def evaluate(self, run: Callable[[], Gradients]) -> None:
        """Run something that finds no gradients."""
        with torch.no_grad():
            if self.shards:
                assert isinstance(self, FSDPModule)
                self(torch.zeros(()), run)
                self.reshard()
            else:
                run()

    def _together(self, gradients: Gradients, parameters: Iterable[Tensor],
                  sharded: Sequence[Tensor] = ()) -> Gradients:
        """Return the gradients of some parameters from all replicas; or keep them for later.

        Args:
            gradients: Those of this rank.
            parameters: The parameters, which others have, too.
            sharded: Those whose gradients are complete, or FSDP puts together.
        """
        if self._axis.group is None and self.syncs and not self.pending:
            return gradients
        summed = {id(x): x for x in parameters}  # One may stand in a loss and in the model.
        kept = {**summed, **{id(x): x for x in sharded}}
        found = [(x, grad) for x, grad in gradients if id(x) not in kept]
        for x, grad in gradients:
            if id(x) in kept:
                before = self.pending.get(id(x))
                self.pending[id(x)] = grad if before is None else before + grad
        if not self.syncs:
            return found
        own, self.pending = self.pending, {}
        group = self._axis.group
        local_only = kept.values() if group is None else sharded
        found += [(x, own[id(x)]) for x in local_only if id(x) in own]
        return found if group is None else found + [*_summed([*summed.values()], own, group)]

    def forget(self) -> None:
        """Let go of gradients that were kept for a later step."""
        self.pending = {}


def _summed(parameters: Sequence[Tensor], found: dict[int, Tensor], group: dist.ProcessGroup
            ) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters with the sums of their gradients, of those that have one anywhere.

    Args:
        parameters: Those of this rank, as on all others.
        found: Their gradients here, by number.
        group: The replicas.
    """
    def kind(x: Tensor) -> str:
        return str(x.dtype)

    for _, each in groupby(sorted(parameters, key=kind), kind):
        same = [*each]
        grads = [like(x, found.get(id(x))) for x in same]
        there = [float(id(x) in found) for x in same]
        flat = torch.cat([*(local(grad).reshape(-1) for grad in grads),
                          local(grads[0]).new_tensor(there)])
        dist.all_reduce(flat, group=group)
        *sums, counts = flat.split([*(local(grad).numel() for grad in grads), len(same)])
        for x, grad, total, count in zip(same, grads, sums, counts.tolist()):
            if count:
                local(grad).copy_(total.view_as(local(grad)))
                yield x, grad


def _gathered(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x, group)
    return found


def like(x: Tensor, grad: Tensor | None) -> Tensor:
    """Return the gradient of a parameter, laid out as that is; zeros if there is none."""
    if grad is None:
        return torch.zeros_like(x)
    if isinstance(grad, DTensor) and isinstance(x, DTensor):
        grad = grad.redistribute(placements=x.placements)
    return grad.clone(memory_format=torch.preserve_format)


@torch.no_grad()
def take_first(module: nn.Module, axis: Axis) -> None:
    """Let parameters and buffers be those of the first rank of an axis."""
    if axis.group is not None:
        for x in (*module.parameters(), *module.buffers()):
            value = x.contiguous()
            dist.broadcast(value, axis.ranks[0], axis.group)
            x.copy_(value)


def split_axes(x: Tensor) -> set[str]:
    """Return the axes of a mesh along which ranks have other parts of a tensor."""
    return {name for name, placement in zip(x.device_mesh.mesh_dim_names or (), x.placements)
            if not placement.is_replicate()} if isinstance(x, DTensor) else set()


def local(x: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
