"""What converted layers call, beside what the model's own code calls."""
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchgpipe.structure import Structure, flatten

__all__ = ['apply', 'expect', 'put_together', 'take_apart']


#: A method of Python or, from PyTorch 2.14 on, one of C++.
_apply: Any = vars(Function)['apply']


def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a function that has a backward of its own, past an ``apply`` of its own."""
    return _apply.__get__(None, function)(*args, **kwargs)


def expect(found: Any, expected: Any, what: str, where: str) -> None:
    """See that what the way through the program depends on is as it was for the sample.

    Raises:
        ValueError: It is not.
    """
    if found is not expected and found != expected:
        raise ValueError(
            f'the program of a converted model goes the way that it went with the sample, for '
            f'which {what} was {expected!r}; it is {found!r} now ({where}). Convert the model '
            'with a sample for which it is the same, or let a submodule with that line be a leaf: '
            'to_sequential(model, sample, leaves=[…])')


def take_apart(value: Any, expected: Any, where: str) -> tuple[Tensor, ...]:
    """Take the tensors out of a value that is put together as it was for the sample."""
    try:
        tensors, kind = flatten(value)
    except TypeError as error:
        raise ValueError(f'{error}, at {where}') from None
    # Tuples of tensors alone all have one kind, whatever their number.
    expect((kind, len(tensors)), expected, 'the form of a value', where)
    return tensors


def put_together(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Put a value together from what is in it."""
    return structure(tensors)
