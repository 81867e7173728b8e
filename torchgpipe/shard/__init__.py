"""Tensor-sharded layers: layers too large for one device, split over the processes of a group."""
from torchgpipe.shard import distributed, nn
from torchgpipe.shard.checkpoint import load_checkpoint, save_checkpoint
from torchgpipe.shard.ddp import register_ddp_gathered_features, register_ddp_parameters_to_ignore
from torchgpipe.shard.draws import draws
from torchgpipe.shard.gradients import GradScaler, average_gradients, clip_grad_norm_
from torchgpipe.shard.parameter import dtensor
from torchgpipe.shard.sizes import slice
from torchgpipe.shard.state import (collect_optimizer_state_dict, collect_state_dict,
                                    relocate_optimizer_state_dict, relocate_state_dict)
from torchgpipe.shard.tags import (_ORDER_ATTR, _PARALLEL_DIM, get_parallel_dim,
                                   register_parallel_attribute, register_parallel_dim,
                                   set_attribute)

__all__ = ['GradScaler', '_ORDER_ATTR', '_PARALLEL_DIM', 'average_gradients', 'clip_grad_norm_',
           'collect_optimizer_state_dict', 'collect_state_dict', 'distributed', 'draws', 'dtensor',
           'get_parallel_dim', 'load_checkpoint', 'nn', 'register_ddp_gathered_features',
           'register_ddp_parameters_to_ignore', 'register_parallel_attribute',
           'register_parallel_dim', 'relocate_optimizer_state_dict', 'relocate_state_dict',
           'save_checkpoint', 'set_attribute', 'slice']
