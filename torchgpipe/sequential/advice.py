"""Advice for a module that is not sequential: would :func:`to_sequential` make it so?"""
from torch import nn

from torchgpipe.sequential.convert import convert
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.value import UNKNOWN

__all__ = ['not_sequential']


def not_sequential(module: object) -> TypeError:
    """Say that a module is not sequential, and whether it can be made so."""
    rule = f'module must be nn.Sequential to be partitioned, but got {type(module).__name__}'
    if not isinstance(module, nn.Module):
        return TypeError(rule)
    way = 'torchgpipe.sequential.to_sequential(module, sample)'
    try:
        layers = len(convert(module, UNKNOWN, ()))
    except ConversionError as error:
        return TypeError(f'{rule}; {way} may make it one: it knows more by a sample. Without one '
                         f'it stops here:\n\n{error}')
    except Exception as error:
        return TypeError(f'{rule}; {way} may make it one, if it can be followed: {error}')
    return TypeError(f'{rule}; {way} would make it one, of {layers} layers')
