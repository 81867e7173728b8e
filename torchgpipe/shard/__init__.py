"""Tensor-sharded layers: layers too large for one device, split over the processes of a group."""
from torchgpipe.shard import distributed, nn
from torchgpipe.shard.averaging import GradScaler, average_gradients, clip_grad_norm_
from torchgpipe.shard.ddp import register_ddp_gathered_features, register_ddp_parameters_to_ignore
from torchgpipe.shard.draws import draws
from torchgpipe.shard.parameter import (_ORDER_ATTR, _PARALLEL_DIM, dtensor, get_parallel_dim,
                                        register_parallel_attribute, register_parallel_dim,
                                        set_attribute)
from torchgpipe.shard.saving import load_checkpoint, save_checkpoint
from torchgpipe.shard.sizes import slice
from torchgpipe.shard.state_dict import (collect_optimizer_state_dict, collect_state_dict,
                                         relocate_optimizer_state_dict, relocate_state_dict)

__all__ = ['GradScaler', '_ORDER_ATTR', '_PARALLEL_DIM', 'average_gradients', 'clip_grad_norm_',
           'collect_optimizer_state_dict', 'collect_state_dict', 'distributed', 'draws', 'dtensor',
           'get_parallel_dim', 'load_checkpoint', 'nn', 'register_ddp_gathered_features',
           'register_ddp_parameters_to_ignore', 'register_parallel_attribute',
           'register_parallel_dim', 'relocate_optimizer_state_dict', 'relocate_state_dict',
           'save_checkpoint', 'set_attribute', 'slice']
