"""Sharded layers."""
from torchgpipe.shard.nn import functional, init
from torchgpipe.shard.nn.embedding import ParallelEmbedding
from torchgpipe.shard.nn.experts import Experts
from torchgpipe.shard.nn.linear import ParallelLinear
from torchgpipe.shard.nn.loss import ParallelCrossEntropyLoss
from torchgpipe.shard.nn.module import ParallelDropout, ParallelModule, RegisterParallelDim

__all__ = ['Experts', 'ParallelCrossEntropyLoss', 'ParallelDropout', 'ParallelEmbedding',
           'ParallelLinear', 'ParallelModule', 'RegisterParallelDim', 'functional', 'init']
