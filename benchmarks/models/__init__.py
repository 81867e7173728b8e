"""Models of the benchmarks. Those that were published are flat sequential modules with skips."""
from benchmarks.models.amoebanetd import amoebanetd
from benchmarks.models.resnet101 import resnet101
from benchmarks.models.unet import unet

__all__ = ['amoebanetd', 'resnet101', 'unet']
