"""Tensor-sharded layers: layers too large for one device, split over the processes of a group.

Terms of this folder:

group
    The ranks that have the shards of one layer.
layout
    The shape of the full tensor and the split dimension of a sharded parameter.
parallel dimension
    The dimension of a tensor that is split over a group; ``None`` for a full tensor.
replica
    One of the groups that train on different samples.
shard
    The part of a tensor on one rank: a separate tensor, not a view of the full one.
tag
    An attribute of a tensor with its parallel dimension.
world
    All ranks as a mesh of replicas and groups.
"""

from torchgpipe.shard import distributed, nn
from torchgpipe.shard.averaging import GradScaler, average_gradients
from torchgpipe.shard.clipping import clip_grad_norm_
from torchgpipe.shard.collectives import draws
from torchgpipe.shard.ddp import register_ddp_gathered_features, register_ddp_parameters_to_ignore
from torchgpipe.shard.parameter import (
    _ORDER_ATTR,
    _PARALLEL_DIM,
    dtensor,
    get_parallel_dim,
    register_parallel_attribute,
    register_parallel_dim,
    set_attribute,
    slice,
)
from torchgpipe.shard.saving import load_checkpoint, save_checkpoint
from torchgpipe.shard.state_dict import (
    collect_optimizer_state_dict,
    collect_state_dict,
    relocate_optimizer_state_dict,
    relocate_state_dict,
)

__all__ = [
    'GradScaler',
    '_ORDER_ATTR',
    '_PARALLEL_DIM',
    'average_gradients',
    'clip_grad_norm_',
    'collect_optimizer_state_dict',
    'collect_state_dict',
    'distributed',
    'draws',
    'dtensor',
    'get_parallel_dim',
    'load_checkpoint',
    'nn',
    'register_ddp_gathered_features',
    'register_ddp_parameters_to_ignore',
    'register_parallel_attribute',
    'register_parallel_dim',
    'relocate_optimizer_state_dict',
    'relocate_state_dict',
    'save_checkpoint',
    'set_attribute',
    'slice',
]
