"""Initial values of sharded parameters."""
from torchgpipe.shard.initial import shard_init_helper_

__all__ = ['shard_init_helper_']
