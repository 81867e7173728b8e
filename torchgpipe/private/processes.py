"""Private names for training over several processes."""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpipe.private.lookup import find, raise_missing

__all__ = ['Scaler', 'active_ddp', 'ignore_in_ddp']

_UNSCALE_NAME = 'torch.amp:GradScaler._unscale_grads_'


class Scaler(torch.amp.GradScaler):
    """A scaler that lets :meth:`found` say where gradients are not finite.

    The public methods give no way to add what other processes found.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if find(_UNSCALE_NAME, otherwise=self) is self:
            raise_missing(_UNSCALE_NAME, 'a GradScaler for shards')
        super().__init__(*args, **kwargs)

    def found(self, where: dict[torch.device, Tensor], scale: Tensor
              ) -> dict[torch.device, Tensor]:
        """Return what was found on each device: 1 if some gradient is not finite, or 0."""
        return where

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor,
                        found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        where = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return self.found(where, found_inf)


_set_ignored = find(
    'torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model',
    'shards beside DistributedDataParallel')


def _ignored_in_ddp(module: torch.nn.Module) -> list[str]:
    return list(getattr(module, '_ddp_params_and_buffers_to_ignore', ()))


def ignore_in_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """Tell ``DistributedDataParallel`` to leave more parameters and buffers of a module alone.

    It has no argument for it.
    """
    _set_ignored(module, [*_ignored_in_ddp(module), *names])
    if not {*names} <= {*_ignored_in_ddp(module)}:
        raise_missing('torch.nn:Module._ddp_params_and_buffers_to_ignore',
                      'shards beside DistributedDataParallel')


#: Return the ``DistributedDataParallel`` whose forward pass runs, if one does. What is wrapped is
#: not told.
active_ddp: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = find(
    'torch.nn.parallel:DistributedDataParallel._get_active_ddp_module',
    'sharded layers, which DistributedDataParallel would overwrite,')
