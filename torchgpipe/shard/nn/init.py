"""Initial values: each rank gets its shard of the values of a single process.

A random number depends on all that were drawn before it. So each rank draws those of the full
tensor, a block at a time, and keeps its own. How a method of ``torch.nn.init`` sets values is
found out on a tensor of the full shape without memory: which operations it calls in place, in
which order.
"""
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.private import DispatchMode, on_cpu_without_memory
from torchgpipe.shard import sizes
from torchgpipe.shard.draws import same_draws
from torchgpipe.shard.parameter import global_shape
from torchgpipe.shard.tags import storage_dim
from torchgpipe.shard.world import needed_by

__all__ = ['shard_init_helper_']

#: So many random numbers are drawn at a time, or up to twice as many.
BLOCK = 1 << 16

#: Operations that draw, on the CPU, the same numbers in blocks as at once. `normal_` draws them by
#: sixteens, and the last sixteen once more: so a block is a multiple of that, the last one larger.
_DRAWING = ('uniform_', 'normal_')

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def shard_init_helper_(init_method: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> Tensor:
    """Set initial values of a sharded parameter: this rank's shard of what one process would draw.

    All ranks of all groups have to call it, as replicas have the same values. They draw from the
    state of the first rank's generator. Where the others' are in the same state, they all are
    afterwards where they would be in one process; a rank whose own was in another state finds it
    as it was. Without parallel groups, a parameter that is full gets values as any other.

    Methods that draw by ``uniform_`` or ``normal_`` and change each value by itself, such as
    ``kaiming_uniform_``, ``xavier_normal_`` and ``constant_``, never have the full tensor in
    memory. For others, such as ``orthogonal_`` and ``trunc_normal_``, each rank makes it.

    Numbers are drawn on the CPU, and copied to where the parameter is: what a layer has that is
    made there and moved. On the meta device, and where there are no elements, nothing is done.

    Args:
        init_method: One of ``torch.nn.init``, or another that sets a tensor in place.
        tensor: A parameter of a sharded layer, or of a plain one, of which each rank has all.
        kwargs: What the method is called with beside the tensor.

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


def _set(shard: Tensor, init_method: Callable[..., Any], shape: Sequence[int], dim: int | None,
         kwargs: dict[str, Any]) -> None:
    """Set this rank's shard of what a method sets in a tensor of some shape."""
    size = 1 if dim is None else shape[dim]
    begin, length = (0, 1) if dim is None else sizes.own(size)
    calls = _calls(init_method, shape, shard.dtype, kwargs)
    if calls is None:
        full = torch.empty(shape, dtype=shard.dtype, device='cpu')
        init_method(full, **kwargs)
        shard.copy_(full if dim is None else full.narrow(dim, begin, length))
        return
    # In memory, the full tensor is made of rows, and this rank has the same elements of each.
    row = prod(shape[dim or 0:])
    element = row // size
    mine = range(begin * element, (begin + length) * element)
    for operation, args, rest in calls:
        if _name(operation) in _DRAWING:
            _draw(shard, prod(shape), row, mine, lambda x: operation(x, *args, **rest))
        else:
            operation(shard, *args, **rest)


def _draw(shard: Tensor, number: int, row: int, mine: range,
          draw: Callable[[Tensor], Any]) -> None:
    """Draw all numbers, block by block, and keep those that lie within a range of each row."""
    kept = shard.view(-1)
    starts = [k * BLOCK for k in range(max(number // BLOCK, 1))]
    for start, stop in zip(starts, [*starts[1:], number]):
        block = torch.empty(stop - start, dtype=shard.dtype, device='cpu')
        draw(block)
        for found in _within(block, start % row, row, mine):
            kept[:found.numel()].view(found.shape).copy_(found)
            kept = kept[found.numel():]


def _within(block: Tensor, first: int, row: int, mine: range) -> Iterator[Tensor]:
    """Return those elements of a block that lie within a range of each row, in their order.

    The block begins somewhere in a row, goes on with whole rows, and ends with a part of one.
    """
    head, rest = block.tensor_split([row - first])
    yield head[max(mine.start - first, 0):max(mine.stop - first, 0)]
    rows, tail = rest.tensor_split([len(rest) // row * row])
    yield rows.view(-1, row)[:, mine.start:mine.stop]
    yield tail[mine.start:mine.stop]


# --- what a method does
# -----------------------------------------------------------------------------


def _calls(init_method: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype,
           kwargs: dict[str, Any]) -> list[_Call] | None:
    """Return the operations that a method calls, each in place on the full tensor, if any.

    Those are the ones that draw in blocks as at once, and those that change each value by itself.
    """
    recorder = _Recorder(shape, dtype)
    try:
        tensor = recorder.full()
        with recorder:
            init_method(tensor, **kwargs)
    except Exception:
        return None  # If it is an error, it will be raised again where there are values.
    return recorder.calls


class _Recorder(DispatchMode):
    """Write down the operations on a full tensor, which has no values."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.dtype = torch.Size(shape), dtype
        self.calls: list[_Call] = []

    def full(self) -> Tensor:
        """Return that tensor. It is not on the meta device, which methods leave as it is."""
        return on_cpu_without_memory(_Full, self.shape, self.dtype)

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        first, *rest = *args, *kwargs.values()  # raises, too, where there is nothing
        if not isinstance(first, _Full) or any(isinstance(each, Tensor) for each in rest):
            raise NotImplementedError(operation)
        if _name(operation) == 'detach':
            return self.full()
        if not _is_by_value(operation):
            raise NotImplementedError(operation)
        self.calls.append((operation, args[1:], kwargs))
        return first


class _Full(Tensor):
    """A tensor without values; the recorder sees what is called on it first."""

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
        name.endswith('_') and torch.Tag.pointwise in operation.tags
        and torch.Tag.nondeterministic_seeded not in operation.tags)
