"""Tags: attributes of a tensor with the dimension that is split over the parallel group.

A tag is an attribute of one tensor object. The result of an operation on that tensor has no tag.
So the functions of this package tag their results, and never their inputs. If a tag was lost, the
autograd graph may still show that a tensor is a shard.
"""
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

__all__ = ['check_dim', 'get_parallel_dim', 'is_made_of_shards', 'is_split', 'is_tagged',
           'register_parallel_attribute', 'register_parallel_dim', 'set_attribute',
           'sharded_parameters', 'storage_dim', 'tagged_full', 'to_storage']

#: The attribute that holds the parallel dimension: None for a full tensor, or 0, 1, -1.
_PARALLEL_DIM = 'parallel_dim'

#: The attribute that holds the order of a weight: 0 for (out, in), 1 for (number, features).
_ORDER_ATTR = 'order_type'

#: The dimension in memory along which a weight is split, by its order and its parallel dimension.
_STORAGE = {0: {None: None, 0: 1, 1: 0, -1: 0}, 1: {None: None, 0: 0, 1: 1, -1: 1}}


def check_dim(dim: Any) -> int | None:
    """Return a parallel dimension; raise if it is not a valid one."""
    if dim not in _STORAGE[0] or isinstance(dim, bool):
        raise ValueError(f'a parallel dimension is None, 0, 1 or -1, not {dim!r}')
    given: int | None = dim
    return given


def register_parallel_dim(tensor: Tensor, dim: int | None = None) -> None:
    """Tag a tensor with its parallel dimension.

    For an activation, 1 and -1 mean that its last dimension is this rank's shard, and None means
    that it is full.

    Raises:
        ValueError: There is no such parallel dimension.
    """
    setattr(tensor, _PARALLEL_DIM, check_dim(dim))


def register_parallel_attribute(tensor: Tensor, dim: int | None = None, order_type: int = 0
                                ) -> None:
    """Tag a weight with its parallel dimension and its order.

    Args:
        tensor: This rank's shard of a weight.
        dim: Its parallel dimension. In order 0, 1 and -1 split the outputs, 0 the inputs. In order
            1, 0 splits the rows, 1 and -1 the columns.
        order_type: 0 for a bias, or a weight of shape (out, in), as in a linear layer; 1 for a
            weight of shape (number, features), as in an embedding.

    Raises:
        ValueError: There is no such parallel dimension, or no such order.
    """
    if order_type not in _STORAGE:
        raise ValueError(f'the order of a weight is 0, (out, in), or 1, (number, features), '
                         f'not {order_type!r}')
    register_parallel_dim(tensor, dim)
    setattr(tensor, _ORDER_ATTR, order_type)


def set_attribute(tensor: Tensor, dim: int | None = None, order_type: int = 0) -> None:
    """Tag a weight: an alias of :func:`ts.register_parallel_attribute`."""
    register_parallel_attribute(tensor, dim, order_type)


def get_parallel_dim(tensor: Tensor) -> int | None:
    """Return the parallel dimension of a tensor; None if it has no tag."""
    dim: int | None = getattr(tensor, _PARALLEL_DIM, None)
    return dim


def tagged_full(tensor: Tensor) -> Tensor:
    """Tag a new tensor as the same on all ranks, and return it."""
    register_parallel_dim(tensor, None)
    return tensor


def is_tagged(tensor: Tensor) -> bool:
    """Return whether a tensor has a tag."""
    return hasattr(tensor, _PARALLEL_DIM)


def is_split(tensor: Tensor) -> bool:
    """Return whether the last dimension of an activation is this rank's shard."""
    return get_parallel_dim(tensor) in (1, -1)


def storage_dim(parameter: Tensor) -> int | None:
    """Return the dimension in memory along which a weight is split, if it is."""
    return to_storage(get_parallel_dim(parameter), getattr(parameter, _ORDER_ATTR, 0))


def to_storage(dim: int | None, order: int) -> int | None:
    """Return the dimension in memory that a parallel dimension stands for."""
    return _STORAGE[order][dim]


def sharded_parameters(module: nn.Module, prefix: str = '') -> dict[str, nn.Parameter]:
    """Return the parameters of a module that are shards, by all of their names."""
    return {prefix + name: parameter
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if storage_dim(parameter) is not None}


def is_made_of_shards(tensor: Tensor) -> bool:
    """Return whether autograd has recorded that a tensor results from this rank's shards.

    It does if its graph leads to a parameter that is split, or to a function with `makes_shards`,
    which splits a full tensor. The search ends at other custom autograd functions, such as
    functions that join shards, because their effect is unknown.
    """
    waiting: list[Any] = [tensor.grad_fn]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, 'variable', None)
        if getattr(node, 'makes_shards', False) or (
                leaf is not None and storage_dim(leaf) is not None):
            return True
        if not isinstance(node, BackwardCFunction):
            waiting += [other for other, _ in node.next_functions]
    return False
