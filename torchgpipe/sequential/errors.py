"""Errors of a conversion: the line of the user's code, what is wrong with it, and the ways out."""
import linecache
import os
import sys
from collections.abc import Iterable
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

import torch
from torch import nn

import torchgpipe

__all__ = ['ConversionError', 'NeedsLeaf', 'is_of_others', 'is_of_torch', 'line_of',
           'line_of_error', 'refused']

_OTHERS = tuple(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
                for package in (torch, torchgpipe))


class ConversionError(ValueError):
    """A module can not be converted; the message says where, why, and what to do."""


class NeedsLeaf(Exception):
    """Modules of some classes, its arguments, have to be leaves: the recording starts again."""


def refused(root: nn.Module, why: str, line: str, inner: str | None, hint: str = '',
            more: str = '') -> ConversionError:
    """Return the error that a module can not be converted.

    Args:
        root: The model.
        why: What its forward does.
        line: Where it does.
        inner: The name of the innermost submodule that does, ``None`` for the model itself.
        hint: Another way out than the usual one, which is a leaf.
        more: One beside that.
    """
    if not hint and inner:
        hint = (f'name it as a leaf, to_sequential(model, sample, leaves=[{inner!r}]), which is '
                'called as one module; or write that part of it as a layer, a submodule, and name '
                'that')
    elif not hint:
        hint = ('write that part of the model as a layer, a submodule, and name it as a leaf: '
                'to_sequential(model, sample, leaves=[…])')
    module = root.get_submodule(inner or '')
    what = f"'{inner}' ({type(module).__name__})" if inner else type(module).__name__
    return ConversionError(
        f'{what} can not be converted: {why}\n\n{line}\n\nWay out: {hint}{more}')


def line_of() -> str:
    """Return the innermost line that runs now outside of PyTorch and of this package."""
    return _described(walk_stack(sys._getframe(1)))


def line_of_error(traceback: TracebackType | None) -> str:
    """Return the innermost line outside of PyTorch and of this package that raised an error."""
    return _described([*walk_tb(traceback)][::-1])


def is_of_torch(frame: FrameType) -> bool:
    """Return whether it is PyTorch's code that runs in a frame."""
    return frame.f_code.co_filename.startswith(_OTHERS[0])


def is_of_others(frame: FrameType) -> bool:
    """Return whether it is code of PyTorch or of this package that runs in a frame."""
    return os.path.abspath(frame.f_code.co_filename).startswith(_OTHERS)


def _described(lines: Iterable[tuple[FrameType, int]]) -> str:
    for frame, number in lines:
        if not is_of_others(frame):
            file = frame.f_code.co_filename
            text = linecache.getline(file, number, frame.f_globals).strip()
            return f'  {file}, line {number}, in {frame.f_code.co_name}\n    {text}'
    return '  (not in Python code outside of PyTorch)'
