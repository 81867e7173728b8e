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
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torchgpipe.distributed.comparison import digests
from torchgpipe.distributed.mesh import Axis
from torchgpipe.engine.checkpoint.snapshot import own_memory
from torchgpipe.engine.leaves import Give, give
from torchgpipe.engine.places import named_slots

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
        if self.shards:
            fully_shard(self, **{'mesh': axis.mesh, **policies}, reshard_after_forward=False,
                        ignored_params={*self._spread})
            assert isinstance(self, FSDPModule)
            self.set_gradient_divide_factor(1.)  # a sum
            self.set_force_sum_reduction_for_comms(True)  # not NCCL's product with 1 and sum
        #: Where there are parts of parameters.
        self._sharded = [(name, module, key)
                         for name, (module, key), x in named_slots(self.stages)
                         if self.shards and isinstance(x, nn.Parameter)
                         and x not in self._spread]
        #: Whether other ranks have copies of some parameters in other stages.
        self.tied = False

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
            gradients, sharded = step(), self._unsharded()
            for x, grad in gradients:
                _check_dense(x, grad)
            for x in sharded:
                if not x.requires_grad:
                    own_memory(x)  # A recomputation has a copy on write; FSDP resizes the memory.
            others_than = {*map(id, sharded)}
            whole = [x for x in self.parameters() if x.requires_grad and id(x) not in others_than
                     and x not in self._spread]
            return self._together(self._completed(gradients, sharded), [*whole, *others],
                                  [*sharded, *self._spread])

        self(torch.zeros((), requires_grad=True), run).backward()

    def _unsharded(self) -> list[nn.Parameter]:
        """Return the parameters that FSDP has gathered for a step."""
        return [*{id(x): x for _, module, key in self._sharded
                  if (x := module._parameters.get(key)) is not None}.values()]

    def check(self) -> None:
        """See that the parameters of which this rank has parts are those that FSDP knows.

        Raises:
            ValueError: They are not.
        """
        for name, module, key in self._sharded:
            x = module._parameters.get(key)
            name = name.partition('.')[2]
            if x is not None and x._backward_hooks:
                raise ValueError(f"'{name}' has a hook, which FSDP2 does not call with "
                                 "data='shard': change x.grad after the step, or use "
                                 "data='replicate'")
            if not isinstance(x, DTensor):
                raise ValueError(f"'{name}' was replaced after this model was made, but with "
                                 "data='shard' ranks have parts of the first one: change its "
                                 'values in place, or replace it before')

    def versions(self, looks: bool) -> list[Any]:
        """Return how often gathered parameters were written to, for :meth:`check_versions`.

        Args:
            looks: Whether to look at values, too, as ``x.data`` has no version.
        """
        found = self._unsharded()
        return [(x._version, number) for x, number in zip(
            found, digests(map(local, found)) if looks else [0] * len(found))]

    def check_versions(self, before: list[Any], looks: bool) -> None:
        """See that layers have not written to gathered parameters, which are not kept.

        Raises:
            RuntimeError: One has.
        """
        for x, now, version in zip(self._unsharded(), self.versions(looks), before):
            if now != version:
                raise RuntimeError(f"a layer has changed '{self.name_of(x)}' in its forward, as "
                                   "an embedding with max_norm does, but with data='shard' the "
                                   "whole parameter is there for one step only: data='replicate', "
                                   'or change it between steps')

    @contextmanager
    def beside(self, parameters: Sequence[Tensor]) -> Iterator[Callable[[], Gradients]]:
        """Let parameters get the gradients that are not their leaves' in a place of their own.

        A layer or a loss may use a parameter that it has no place for: in a closure, in a list. A
        function returns these gradients. Where this rank has no copies elsewhere, nothing changes.

        Args:
            parameters: Those of this rank that require grad.
        """
        if self._axis.group is None and not self.tied:
            yield list
            return
        before = [(x, x.grad) for x in parameters]
        for x in parameters:
            x.grad = None
        try:
            yield partial(self._beside, parameters)
        finally:
            for x, grad in before:
                x.grad = grad

    def _beside(self, parameters: Sequence[Tensor]) -> Gradients:
        found = [(x, x.grad) for x in {id(x): x for x in parameters}.values()
                 if x.grad is not None]
        for x, _ in found:
            if x._backward_hooks or x._post_accumulate_grad_hooks:
                name = self.name_of(x)
                raise RuntimeError(f"'{name}' has a hook, and is used in a closure or a list, so "
                                   'that the hook would see parts of its gradient: let the layer '
                                   'or loss_fn that uses it have it as a parameter')
        return found

    def name_of(self, x: Tensor) -> str:
        """Return the name of a parameter of this rank, for errors."""
        return next((name.split('.', 2)[2] for name, each in self.named_parameters()
                     if each is x), 'a parameter of loss_fn')

    def _completed(self, gradients: Gradients, sharded: Sequence[Tensor]) -> Gradients:
        """Return gradients, with zeros for those that other replicas have and this one has not."""
        group, there = self._axis.group, {id(x) for x, _ in gradients}
        if group is None or not sharded:
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
        if self.pending.keys() - kept.keys():
            raise RuntimeError('a gradient waits from a step within no_sync(), but its parameter '
                               'does not require grad any more, or is of another loss: freeze '
                               'parameters, and take other losses, after the step that adds '
                               'gradients up')
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
    _check_dense(x, grad)
    if isinstance(grad, DTensor) and isinstance(x, DTensor):
        grad = grad.redistribute(placements=x.placements)
    return grad.clone(memory_format=torch.preserve_format)


def _check_dense(x: Tensor, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise RuntimeError(f'the gradient of a parameter of shape {tuple(x.shape)} is sparse, but '
                           'ranks add up dense ones: nn.Embedding(…, sparse=False)')


@torch.no_grad()
def take_first(module: nn.Module, axis: Axis) -> None:
    """Let parameters and buffers be those of the first rank of an axis."""
    if axis.group is not None:
        for x in (*module.parameters(), *module.buffers()):
            if is_lazy(x) or x.layout is not torch.strided:
                continue  # They are compared.
            value = x.contiguous()
            # Backends do not know all types.
            dist.broadcast(value.view(-1).view(torch.uint8), axis.ranks[0], axis.group)
            if not x.equal(value):  # One that is expanded cannot be written to.
                x.copy_(value)


def split_axes(x: Tensor) -> set[str]:
    """Return the axes of a mesh along which ranks have other parts of a tensor."""
    return {name for name, placement in zip(x.device_mesh.mesh_dim_names or (), x.placements)
            if not placement.is_replicate()} if isinstance(x, DTensor) else set()


def local(x: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
