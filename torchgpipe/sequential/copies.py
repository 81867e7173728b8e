"""Copies of a model to try things with: they have its parameters, and all else for themselves."""
import copy
from typing import Any, TypeVar

from torch import Tensor, nn

from torchgpipe.sequential.errors import ConversionError
from torchgpipe.structure import flatten_nested

__all__ = ['copied', 'copied_value']

TModule = TypeVar('TModule', bound=nn.Module)


def copied(module: TModule) -> TModule:
    """Copy a module, but for its parameters, and for tensors that belong to a graph.

    Raises:
        ConversionError: It can not be copied.
    """
    memo: dict[int, Any] = {id(x): x for x in module.parameters()}
    for each in module.modules():
        memo.update((id(x), x) for x in vars(each).values()
                    if isinstance(x, Tensor) and not x.is_leaf)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConversionError(
            f'{type(module).__name__} can not be converted: it can not be copied, to be tried out '
            f'without a change of it ({type(error).__name__}: {error}). Convert it before it was '
            'called, or without what keeps it from being copied') from error


def copied_value(value: Any) -> Any:
    """Copy the tensors of a value, without their graph; one that is there twice is so again."""
    tensors, structure = flatten_nested(value)
    copies = {id(x): x.detach().clone() for x in tensors}
    return structure([copies[id(x)] for x in tensors])
