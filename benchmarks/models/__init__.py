"""Models of the benchmarks. Models of the published tables are flat sequential modules with skips.

Transformers are plain modules, with a function each that makes layers of them.
"""

from benchmarks.models.amoebanetd import amoebanetd
from benchmarks.models.resnet101 import resnet101
from benchmarks.models.unet import unet

__all__ = ['amoebanetd', 'resnet101', 'unet']
