"""Settings of a pipeline as data: the values of a plan, and the checkpointed micro-batches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

#: The axes of a mesh, by name, from the outermost one; one that a mesh lacks has size 1.
AXES = ('data', 'pipe', 'tensor')


def name_of(sizes: Iterable[int]) -> str:
    """Return the sizes of axes as a text.

    >>> name_of((2, 4, 1))
    'data 2 × pipe 4 × tensor 1'
    """
    return ' × '.join(f'{axis} {size}' for axis, size in zip(AXES, sizes))


def check_axes(axes: Any) -> None:
    """Check the axes of a mesh, from the outermost to the innermost.

    Raises:
        ValueError: They are not a sequence of all axes, the last of which is ``'tensor'``.
    """
    orders = AXES, ('pipe', 'data', 'tensor')
    if not isinstance(axes, Sequence) or tuple(axes) not in orders:
        raise ValueError(
            f'axes are {orders[0]} or {orders[1]}, because the ranks of a tensor axis send each '
            f'other most; but these are {axes!r}'
        )


#: A mode for all partitions, a mode for each, or a function from a partition's index to a mode.
Checkpoint = str | Sequence[str] | Callable[[int], str]


def parse_checkpoint(checkpoint: Any, n: int) -> Checkpoint:
    """Check the checkpoint option for ``n`` partitions, and return it.

    Raises:
        ValueError: A mode is unknown, or the number of modes is not ``n``.
    """
    if not (callable(checkpoint) or isinstance(checkpoint, (list, tuple))):
        checkpoint = str(checkpoint)
    checkpoint_stops(checkpoint, 1, n)
    return checkpoint  # type: ignore[no-any-return]


def checkpoint_stops(
    checkpoint: Checkpoint,
    m: int,
    n: int,
) -> tuple[int, ...]:
    """Return the number of checkpointed micro-batches in each partition, from the first one on.

    >>> checkpoint_stops('except_last', m=4, n=2)
    (3, 3)
    >>> checkpoint_stops(['always', 'never'], m=4, n=2)
    (4, 0)
    >>> checkpoint_stops(lambda j: 'always' if j > 0 else 'never', m=4, n=2)
    (0, 4)
    """
    modes: Sequence[str]
    if isinstance(checkpoint, str):
        modes = [checkpoint] * n
    elif callable(checkpoint):
        modes = [checkpoint(j) for j in range(n)]
    else:
        modes = checkpoint
    if len(modes) != n:
        raise ValueError(
            f'checkpoint has {len(modes)} modes for {n} partitions: {modes!r}; give '
            'one for each, or one for all of them'
        )

    stop_of = {'always': m, 'except_last': m - 1, 'never': 0}
    stops = []
    for mode in modes:
        if mode not in stop_of:
            raise ValueError(
                f"checkpoint is not one of 'always', 'except_last', or 'never': {mode!r}"
            )
        stops.append(stop_of[mode])
    return tuple(stops)


class LossOptions(NamedTuple):
    """The loss of a step or an evaluation: arguments of a pipeline's ``step``."""

    function: Callable[[Any, Any], Tensor]
    target: Any = None
    target_dim: Any = 0
    normalizer: Any = None
    scale: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Settings:
    """Settings for ``GPipe(module, settings)``, in place of a balance, devices and the rest."""

    #: The name of a schedule, ``'plain call'``, or ``'searched'``.
    schedule: str
    #: The number of layers in each partition.
    balance: tuple[int, ...]
    #: The device of each partition.
    devices: tuple[str, ...]
    #: The number of micro-batches.
    chunks: int
    #: The checkpoint mode of all partitions, or of each.
    checkpoint: str | tuple[str, ...]
    #: The name of each layer that it was made for, and the bytes of the layer's parameters; none
    #: if it is for sizes rather than a module.
    layers: tuple[tuple[str, int], ...]
    _: KW_ONLY
    #: The rows of a searched schedule, as CSV.
    order: str = ''
    #: By name of a layer, the operations whose results checkpointing keeps; or ``'products'``.
    keep: Mapping[str, tuple[str, ...]] | str = field(default_factory=dict, hash=False)
    #: The sizes of the axes of a mesh, by name; none for the devices of one process.
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: The axes of the mesh, from the outermost one.
    axes: tuple[str, ...] = AXES
    #: On a mesh, ``'replicate'`` or ``'shard'``: see
    #: :class:`~torchgpipe.distributed.DistributedGPipe`.
    data: str = 'replicate'
