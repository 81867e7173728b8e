"""The order of a step: actions of workers that may not run concurrently or in another order."""
from collections.abc import Sequence

from torchgpipe.engine.checkpoint.attributes import are_same, state_of
from torchgpipe.engine.partition import Engine
from torchgpipe.schedule.action import Action

__all__ = ['Unordered', 'beside']


def beside(j: int) -> str:
    """Say why a collective in partition ``j`` is refused."""
    return (f'partition {j} communicates with other processes, or the loss does, while other '
            'workers may do so beside it: the ranks would not come to their collectives in the '
            'same order. Let modules that do so say it, communicates = True, and put them into '
            'partitions on one device, that of the last one if the loss does so, too; or use the '
            'plain call, model(input) and loss.backward()')


class Unordered:
    """Layers that run in another order than one micro-batch after the other, as they are now.

    Args:
        engine: The partitions.
        rows: Those of the schedule.
    """

    def __init__(self, engine: Engine, rows: Sequence[Sequence[Action]]) -> None:
        modules = [*engine.changing]
        for j, partition in enumerate(engine.partitions):
            order = [action.micro_batch for row in rows for action in row
                     if action.kind == 'F' and action.stage == j]
            if order != sorted(order):
                modules += partition.layers.modules()
        self._before = [(module, state_of(module)) for module in modules]

    def check(self) -> None:
        """See that none has changed since.

        Raises:
            RuntimeError: Some have.
        """
        names = sorted({type(module).__name__ for module, before in self._before
                        if not are_same(before, state_of(module))})
        if names:
            raise RuntimeError(
                f'layers that change when they are called ({", ".join(names)}) run in another '
                'order here than in the model: they stand in several partitions, or the schedule '
                "takes micro-batches in another order. Use schedule='1f1b' or 'gpipe', put all "
                'places of a layer into one partition, or give each place a layer of its own')
