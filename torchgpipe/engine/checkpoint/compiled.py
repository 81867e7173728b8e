"""Compiled layers: whether other compiled code has saved the same tensors for backward.

``torch.compile`` keeps several codes for a layer and chooses by the input, the newest ones first.
So where a recomputation runs, there may be a code that was not there in the first pass, as for
another size of micro-batches. What a code saves, and in which order, is up to the compiler; and it
is the code of the first pass whose backward will take it. Only the values tell.
"""
from typing import NamedTuple

from torch import Tensor

from torchgpipe.engine.checkpoint.samples import agree, elements_of
from torchgpipe.errors import other_path

__all__ = ['Saved', 'check_code']


class Saved(NamedTuple):
    """What compiled code has saved in a first pass: which code, and some elements."""

    code: object
    elements: Tensor | None

    @staticmethod
    def of(code: object, tensor: Tensor) -> 'Saved':
        """Take note of a tensor."""
        elements = elements_of(tensor, every=True)
        # On its device, since it will hardly ever be looked at.
        return Saved(code, None if elements is None else elements.clone())


def check_code(k: int, first: Saved | None, code: object | None, tensor: Tensor) -> None:
    """Compare saved tensor ``k`` of a recomputation with that of the first pass.

    Args:
        k: Its number.
        first: What compiled code saved there, if it was compiled code.
        code: The compiled code that saves it now, if any.
        tensor: What it saves.

    Raises:
        RuntimeError: Another code has saved something else.
    """
    if code is (None if first is None else first.code):
        return
    now = elements_of(tensor, every=True)
    if first is None or first.elements is None or now is None or not agree(now, first.elements):
        raise other_path(
            f'saved tensor {k} is another one, saved by other compiled code, which torch.compile '
            'has made since, or has chosen for another reason. Call the model again, with all its '
            'code compiled by now')
