"""Train ResNet-101 on ImageNet, or on any folder of images laid out alike."""

from benchmarks.experiments.accuracy.commands import COMMANDS

__all__ = ['COMMANDS']
