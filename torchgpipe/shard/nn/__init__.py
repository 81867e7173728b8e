"""Sharded layers.

Terms of this folder:

capacity
    An expert's largest share of all choices, in multiples of an even share.
column, row parallel
    A linear layer whose outputs, or whose inputs, are split over the group.
expert
    A module that processes only the tokens that are routed to it.
"""

from torchgpipe.shard.nn import functional, init
from torchgpipe.shard.nn.experts import Experts
from torchgpipe.shard.nn.linear import ParallelEmbedding, ParallelLinear
from torchgpipe.shard.nn.loss import ParallelCrossEntropyLoss
from torchgpipe.shard.nn.module import ParallelDropout, ParallelModule, RegisterParallelDim

__all__ = [
    'Experts',
    'ParallelCrossEntropyLoss',
    'ParallelDropout',
    'ParallelEmbedding',
    'ParallelLinear',
    'ParallelModule',
    'RegisterParallelDim',
    'functional',
    'init',
]
