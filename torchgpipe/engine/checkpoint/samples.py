"""Some elements of what a pass gave, to see whether another pass gives the same."""
import torch
from torch import Tensor

from torchgpipe.engine.batch import Batch
from torchgpipe.errors import other_path
from torchgpipe.private import unseen

__all__ = ['compare', 'keep', 'samples_of']

#: How many elements of an output are compared, about.
NUMBER = 64


#: Type, shape and some elements of a tensor; ``None`` for those that can't be looked at.
Sample = tuple[torch.dtype, torch.Size, Tensor | None]


def samples_of(output: Batch) -> list[Sample]:
    """Take samples of the tensors that a pass gave; they share the memory of these."""
    with unseen():
        return [(x.dtype, x.shape, _elements(x)) for x in map(Tensor.detach, output)]


def keep(samples: list[Sample]) -> list[Sample]:
    """Copy samples, so that they outlive the tensors and change no more."""
    with unseen():
        return [(dtype, shape, None if x is None else x.clone()) for dtype, shape, x in samples]


def _elements(x: Tensor) -> Tensor | None:
    # On another device than the CPU, to look at a number is to wait for it.
    if not x.is_cpu or x.layout is not torch.strided:
        return None
    if x.is_complex():
        x = torch.view_as_real(x)
    elif not x.is_floating_point():
        return None
    number = x.numel()
    return x if number <= NUMBER else x.flatten()[::number // NUMBER]


def compare(now: list[Sample], before: list[Sample]) -> None:
    """Raise :exc:`RuntimeError` if a recomputation gave something else than its first pass."""
    if len(now) != len(before):
        raise other_path(f'it gave {len(now)} tensors, the first pass {len(before)}')
    for k, ((dtype, shape, a), (old_dtype, old_shape, b)) in enumerate(zip(now, before)):
        if dtype != old_dtype or shape != old_shape:
            raise other_path(f'its output {k} is {dtype} of shape {tuple(shape)}, that of the '
                             f'first pass {old_dtype} of shape {tuple(old_shape)}')
        if a is not None and b is not None and not _agree(a, b):
            raise other_path('its output has other values')


def _agree(a: Tensor, b: Tensor) -> bool:
    with unseen():
        if torch.equal(a, b):
            return True
        # A kernel may add in another order, as where memory lies at another address.
        tolerance = torch.finfo(b.dtype).eps ** 0.5
        scale = b.abs().nan_to_num(0, 0, 0).max().item()
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
