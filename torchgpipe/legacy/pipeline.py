"""The pipeline of torchgpipe 0.0.7, which is made for each forward pass from its parts."""
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.edges import Pipeline as EnginePipeline
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.stream import AbstractStream
from torchgpipe.skip.layout import SkipLayout

__all__ = ['Pipeline', 'clock_cycles']


class Pipeline(EnginePipeline):
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    >>> from torchgpipe.microbatch import gather, scatter
    >>> batches = scatter(torch.ones(4, 2), chunks=2)
    >>> partitions = [nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]
    >>> Pipeline(batches, partitions).run()
    >>> gather(batches).shape
    torch.Size([4, 2])

    Args:
        batches: The micro-batches; :meth:`run` replaces each by its output.
        partitions: One after the other.
        devices: One per partition; all on the CPU by default.
        copy_streams: ``copy_streams[j][i]`` carries micro-batch ``i`` into or out of partition
            ``j``; made if missing.
        skip_layout: Which skips go from which partition to which; looked up in the layers if
            missing.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
    """

    def __init__(self, batches: list[Batch], partitions: Iterable[nn.Sequential],
                 devices: Sequence[torch.device] | None = None,
                 copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
                 skip_layout: SkipLayout | None = None, checkpoint_stop: int = 0) -> None:
        engine = Engine(partitions, devices, skip_layout)
        super().__init__(engine, batches, [checkpoint_stop] * len(engine.partitions), copy_streams)

    def run(self) -> None:
        """Run all cells, and end the threads; afterwards the batches hold the outputs."""
        try:
            super().run()
        finally:
            self._engine.workers.stop()


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, clock by clock, the cells ``(i, j)`` that run at the same time.

    These are micro-batches and partitions, if all cells take equally long.

    >>> list(clock_cycles(m=3, n=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Args:
        m: Number of micro-batches.
        n: Number of partitions.

    Yields:
        ``m + n - 1`` lists, partitions ascending within each (Huang et al., "GPipe", 2019).
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(n) if 0 <= k - j < m]
