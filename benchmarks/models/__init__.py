"""Models of the published benchmarks, each a flat sequential module with skips."""
from benchmarks.models.amoebanetd import amoebanetd
from benchmarks.models.resnet101 import resnet101
from benchmarks.models.unet import unet

__all__ = ['amoebanetd', 'resnet101', 'unet']
