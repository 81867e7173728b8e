"""Pipelines over processes: the same models and steps on a mesh of data × pipe × tensor.

It needs ``torch.distributed``, which ``import torchgpipe`` does not import.
"""
from torchgpipe.distributed.checkpoint import load_checkpoint, save_checkpoint
from torchgpipe.distributed.mesh import init_mesh
from torchgpipe.distributed.model import DistributedGPipe

__all__ = ['DistributedGPipe', 'init_mesh', 'load_checkpoint', 'save_checkpoint']
