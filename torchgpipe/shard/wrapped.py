"""Shards in ``DistributedDataParallel``: see that it does not take them for copies of one tensor.

When it wraps a module, it gives all ranks the parameters of the first one, but for those that it
was told to leave alone. Shards of the same shape would be overwritten without a word.
"""
from weakref import WeakSet

import torch.distributed as dist
from torch import nn

from torchgpipe.private import active_ddp
from torchgpipe.shard.tags import storage_dim
from torchgpipe.shard.world import current

__all__ = ['check_wrapped']

_checked: WeakSet[nn.Module] = WeakSet()


def check_wrapped() -> None:
    """Look at the DDP whose forward pass this is, if it is one's, the first time.

    Raises:
        ValueError: Shards of several ranks are one parameter for it.
    """
    ddp = active_ddp()
    if ddp is None or ddp in _checked:
        return
    wrapped = {*dist.get_process_group_ranks(ddp.process_group)}
    taken = [name for name, parameter in ddp.module.named_parameters()
             if storage_dim(parameter) is not None and name not in ddp.parameters_to_ignore]
    if taken and len(wrapped & {*dist.get_process_group_ranks(current().tensor_group)}) > 1:
        raise ValueError(
            f'DistributedDataParallel has given all ranks the shards of one: {", ".join(taken)}. '
            'Make the model anew and call ts.register_ddp_parameters_to_ignore, before it is '
            'wrapped, with the very module that is wrapped; or wrap it with process_group='
            'ts.distributed.get_data_group()')
    _checked.add(ddp)
