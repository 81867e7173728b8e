"""The scale of a loss in low precision, where a gradient may be infinite in one shard only."""
import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.private import Scaler
from torchgpipe.shard import world
from torchgpipe.shard.collectives import all_reduce

__all__ = ['GradScaler']


class GradScaler(Scaler):
    """:class:`torch.amp.GradScaler` for sharded layers: all ranks skip a step, or none does.

    A gradient that is not finite in one shard is found on one rank only. There the step would be
    left out and the scale made smaller; the others would take the step, and go on with another
    scale. So all ranks are asked, once for each optimizer and step. ::

        scaler = ts.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        ts.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        As those of :class:`torch.amp.GradScaler`.
    """

    def found(self, where: dict[torch.device, Tensor], scale: Tensor
              ) -> dict[torch.device, Tensor]:
        """Return what was found on any rank, in place of what was found on devices of this one."""
        here = world.current()
        any_found = torch.stack([
            torch.zeros_like(scale), *(found.to(scale) for found in where.values())]).amax(0)
        told = any_found.to(here.mesh.device_type)
        for group in (here.tensor_group, here.data_group):
            all_reduce(told, group, dist.ReduceOp.MAX)
        return {scale.device: told.to(scale.device)}
