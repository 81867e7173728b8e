"""Initial values: each rank gets its shard of the values of a single process.

A random number depends on all numbers drawn before it. So each rank draws the numbers of the full
tensor, a block at a time, and keeps its own. A run of the ``torch.nn.init`` method on a tensor of
the full shape, without memory, records the operations that it calls in place, and their order.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.private import DispatchMode, on_cpu_without_memory
from torchgpipe.shard.collectives import same_draws
from torchgpipe.shard.parameter import global_shape, local_range, storage_dim
from torchgpipe.shard.world import needed_by

#: How many random numbers are drawn at a time; the last block has up to twice as many.
BLOCK = 1 << 16

#: Operations that draw, on the CPU, the same numbers in blocks as in one call. `normal_` draws 16
#: at a time, and the last 16 again. So a block is a multiple of 16, and the last one is larger.
_DRAWING = ('uniform_', 'normal_')

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def shard_init_helper_(init_method: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Tensor:
    """Set initial values of a sharded parameter: this rank's shard of one process's values.

    All ranks of all groups have to call it, because replicas have the same values. They draw from
    the state of the first rank's generator. Ranks whose generators are in the same state end in
    the same state as one process. On other ranks, the generator's state is restored. Without
    parallel groups, a full parameter gets values like any other parameter.

    Methods that draw by ``uniform_`` or ``normal_`` and change each value by itself, such as
    ``kaiming_uniform_``, ``xavier_normal_`` and ``constant_``, never have the full tensor in
    memory. For others, such as ``orthogonal_`` and ``trunc_normal_``, each rank makes it.

    Numbers are drawn on the CPU, and copied to the parameter's device. These are the values of a
    layer that is made on the CPU and moved. Tensors on the meta device, or without elements, stay
    as they are.

    Args:
        init_method: A method of ``torch.nn.init``, or another that sets a tensor in place.
        tensor: A parameter of a sharded layer; or of a plain layer, full on each rank.
        kwargs: Further arguments of the method.

    Returns:
        The tensor.
    """
    dim = storage_dim(tensor)
    world = needed_by(dim)
    if tensor.is_meta or 0 in global_shape(tensor):
        return tensor
    if world is None:
        init_method(tensor, **kwargs)
        return tensor
    generator = kwargs.get('generator') or torch.default_generator
    with torch.no_grad(), same_draws(world, generator, replicas=True):
        if tensor.is_cpu and (dim is None or world.tensor_size == 1):
            init_method(tensor, **kwargs)
        else:
            shard = tensor.cpu()  # itself, if it is there
            _set(shard, init_method, global_shape(tensor), dim, kwargs)
            tensor.copy_(shard)
    return tensor


def _set(
    shard: Tensor,
    init_method: Callable[..., Any],
    shape: Sequence[int],
    dim: int | None,
    kwargs: dict[str, Any],
) -> None:
    """Set this rank's shard of the values that a method sets in a tensor of some shape."""
    size = 1 if dim is None else shape[dim]
    begin, length = (0, 1) if dim is None else local_range(size)
    calls = _calls(init_method, shape, shard.dtype, kwargs)
    if calls is None:
        full = torch.empty(shape, dtype=shard.dtype, device='cpu')
        init_method(full, **kwargs)
        shard.copy_(full if dim is None else full.narrow(dim, begin, length))
        return
    # In memory, the full tensor consists of rows, and this rank has the same elements of each.
    row = prod(shape[dim or 0 :])
    element = row // size
    mine = range(begin * element, (begin + length) * element)
    for call in calls:
        operation, args, rest = call
        if _name(operation) in _DRAWING:
            _draw(shard, prod(shape), row, mine, call)
        else:
            operation(shard, *args, **rest)


def _draw(shard: Tensor, number: int, row: int, mine: range, call: _Call) -> None:
    """Draw all numbers, block by block, and keep the ones within a range of each row."""
    operation, args, rest = call
    kept = shard.view(-1)
    starts = [k * BLOCK for k in range(max(number // BLOCK, 1))]
    for start, stop in zip(starts, [*starts[1:], number]):
        block = torch.empty(stop - start, dtype=shard.dtype, device='cpu')
        operation(block, *args, **rest)
        for piece in _within(block, start % row, row, mine):
            kept[: piece.numel()].view(piece.shape).copy_(piece)
            kept = kept[piece.numel() :]


def _within(block: Tensor, first: int, row: int, mine: range) -> Iterator[Tensor]:
    """Yield the elements of a block within a range of each row, in order.

    The block begins with a part of a row, continues with whole rows, and ends with a part of one.
    """
    head, rest = block.tensor_split([row - first])
    yield head[max(mine.start - first, 0) : max(mine.stop - first, 0)]
    rows, tail = rest.tensor_split([len(rest) // row * row])
    yield rows.view(-1, row)[:, mine.start : mine.stop]
    yield tail[mine.start : mine.stop]


# --- the operations of a method
# -----------------------------------------------------------------------------


def _calls(
    init_method: Callable[..., Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    kwargs: dict[str, Any],
) -> list[_Call] | None:
    """Return the in-place operations of a method, if all of them work on shards; or None.

    Such operations draw the same numbers in blocks as in one call, or change each value by itself.
    """
    recorder = _OperationRecorder(shape, dtype)
    try:
        tensor = recorder.full()
        with recorder:
            init_method(tensor, **kwargs)
    except Exception:
        return None  # A real error will be raised again on a tensor with values.
    return recorder.calls


class _OperationRecorder(DispatchMode):
    """Record the operations on a full tensor, which has no values."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.calls: list[_Call] = []

    def full(self) -> Tensor:
        """Return that tensor. It is not on the meta device, where methods do nothing."""
        return on_cpu_without_memory(_Full, self.shape, self.dtype)

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first, *rest = *args, *kwargs.values()  # This also raises if there is no argument.
        if not isinstance(first, _Full) or any(isinstance(value, Tensor) for value in rest):
            raise NotImplementedError(operation)
        if _name(operation) == 'detach':
            return self.full()
        if not _is_by_value(operation):
            raise NotImplementedError(operation)
        self.calls.append((operation, args[1:], kwargs))
        return first


class _Full(Tensor):
    """A tensor without values; the recorder handles its operations first."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _name(operation: Any) -> str:
    name: str = operation.overloadpacket.__name__
    return name


def _is_by_value(operation: Any) -> bool:
    """Return whether an operation sets each value by itself, in place."""
    name = _name(operation)
    return name in (*_DRAWING, 'fill_', 'zero_') or (
        name.endswith('_')
        and torch.Tag.pointwise in operation.tags
        and torch.Tag.nondeterministic_seeded not in operation.tags
    )
