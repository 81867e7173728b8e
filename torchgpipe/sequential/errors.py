"""Errors of a conversion: the line of the user's code, what is wrong with it, and the ways out."""
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import nn

import torchgpipe

__all__ = ['ConversionError', 'NeedsLeaf', 'is_of_torch', 'line_of', 'line_of_error', 'refused']

_OTHERS = tuple(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
                for package in (torch, torchgpipe))


class ConversionError(ValueError):
    """A module can not be converted; the message says where, why, and what to do."""


class NeedsLeaf(Exception):
    """Modules have to stay whole; the recording starts again with their classes among the leaves.

    Args:
        *classes: The classes.
    """

    def __init__(self, *classes: type) -> None:
        super().__init__(*classes)
        self.classes = classes


def refused(root: nn.Module, why: str, line: str, inner: str | None, hint: str = ''
            ) -> ConversionError:
    """Say that a module can not be converted.

    Args:
        root: The model.
        why: What its forward does.
        line: Where it does.
        inner: The name of the innermost submodule that does, ``None`` for the model itself.
        hint: Another way out.
    """
    if not hint and inner:
        hint = (f'name it as a leaf, to_sequential(model, sample, leaves=[{inner!r}]), and it '
                'stays whole; or write that part of it as a layer, a submodule, and name that')
    elif not hint:
        hint = ('write that part of the model as a layer, a submodule, and name it as a leaf: '
                'to_sequential(model, sample, leaves=[…])')
    module = root.get_submodule(inner or '')
    what = f"'{inner}' ({type(module).__name__})" if inner else type(module).__name__
    return ConversionError(f'{what} can not be converted: {why}\n\n{line}\n\nWay out: {hint}')


def line_of(frame: FrameType | None = None) -> str:
    """Give the innermost line that runs now outside of PyTorch and of this package."""
    frames = _outwards(frame or sys._getframe(1))
    return _described([(each, each.f_lineno) for each in frames])


def line_of_error(traceback: TracebackType | None) -> str:
    """Give the innermost line outside of PyTorch and of this package that an error came from."""
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _described(found[::-1])


def is_of_torch(frame: FrameType) -> bool:
    """Tell whether it is PyTorch's code that runs in a frame."""
    return frame.f_code.co_filename.startswith(_OTHERS[0])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _described(lines: list[tuple[FrameType, int]]) -> str:
    for frame, number in lines:
        file = frame.f_code.co_filename
        if not os.path.abspath(file).startswith(_OTHERS):
            text = linecache.getline(file, number, frame.f_globals).strip()
            return f'  {file}, line {number}, in {frame.f_code.co_name}\n    {text}'
    return '  (not in Python code outside of PyTorch)'
