"""Train ResNet-101 on ImageNet, or on any folder of images laid out alike."""
from benchmarks.experiments.accuracy.images import open_folders
from benchmarks.experiments.accuracy.progress import refuse_to_overwrite
from benchmarks.experiments.accuracy.train import measure

__all__ = ['measure', 'open_folders', 'refuse_to_overwrite']
