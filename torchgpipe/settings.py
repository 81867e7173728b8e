"""How a model is to be wrapped and run, as data: what a plan says and a pipeline takes."""
from dataclasses import dataclass

__all__ = ['Settings']


@dataclass(frozen=True)
class Settings:
    """What ``GPipe(module, settings)`` takes in place of a balance, devices and the rest."""

    #: The name of a schedule, or ``'plain call'``.
    schedule: str
    #: The number of layers in each partition.
    balance: tuple[int, ...]
    #: Of each partition.
    devices: tuple[str, ...]
    #: The number of micro-batches.
    chunks: int
    #: For all partitions.
    checkpoint: str
    #: Names and bytes of parameters of the layers that it is for.
    layers: tuple[tuple[str, int], ...]
