"""Tensor-sharded layers: layers too large for one device, split over the processes of a group."""
from torchgpipe.shard import distributed, nn
from torchgpipe.shard.draws import draws
from torchgpipe.shard.parameter import dtensor
from torchgpipe.shard.sizes import slice
from torchgpipe.shard.tags import (_ORDER_ATTR, _PARALLEL_DIM, get_parallel_dim,
                                   register_parallel_attribute, register_parallel_dim,
                                   set_attribute)

__all__ = ['_ORDER_ATTR', '_PARALLEL_DIM', 'distributed', 'draws', 'dtensor', 'get_parallel_dim',
           'nn', 'register_parallel_attribute', 'register_parallel_dim', 'set_attribute', 'slice']
