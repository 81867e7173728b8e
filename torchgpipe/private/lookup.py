"""Look up a private name of PyTorch, which a release may lack."""
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

__all__ = ['TESTED', 'find', 'raise_missing']

#: The releases of PyTorch that the whole suite has passed on, oldest and newest.
TESTED = '2.11', '2.15'


def find(name: str, use: str = '', otherwise: Any = None) -> Any:
    """Return what PyTorch has under a private name.

    Args:
        name: The module, a colon, and the name in it.
        use: What needs it, for the error that is raised when that is used and PyTorch has no such
            name.
        otherwise: What takes its place then, if anything does.
    """
    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        return partial(raise_missing, name, use) if otherwise is None else otherwise


def raise_missing(name: str, use: str, *args: object, **kwargs: object) -> Any:
    raise NotImplementedError(
        f"{use} needs PyTorch's private {name.replace(':', '.')}, which torch {torch.__version__} "
        f'does not have; torchgpipe was tested with torch {TESTED[0]} to {TESTED[1]}. Install one '
        'of these, or a newer torchgpipe')
