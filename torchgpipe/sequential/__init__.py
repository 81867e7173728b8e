"""Sequential models from modules of any form."""
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchgpipe.sequential.check import check
from torchgpipe.sequential.convert import convert
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.leaves import Leaf
from torchgpipe.sequential.names import original_names
from torchgpipe.sequential.value import UNKNOWN

__all__ = ['ConversionError', 'original_names', 'to_sequential']


def to_sequential(module: nn.Module, sample: Any = None, *, leaves: Iterable[Leaf] = (),
                  batch_dim: Any = 0, check_sample: bool = True) -> nn.Sequential:
    """Make a sequential module of a module of any form.
    """
    converted = convert(module, UNKNOWN if sample is None else sample, leaves)
    if check_sample and sample is not None:
        check(module, converted, sample, batch_dim)
    return converted
