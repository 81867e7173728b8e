"""Models of the published tables, as flat sequential modules with skips; and stacks of layers."""

from benchmarks.models.amoebanetd import amoebanetd
from benchmarks.models.resnet101 import resnet101
from benchmarks.models.unet import unet

__all__ = ['amoebanetd', 'resnet101', 'unet']
