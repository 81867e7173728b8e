"""The empty tensor that carries an autograd edge and no data."""

import torch
from torch import Tensor

from torchgpipe.engine.stream import default_stream, use_stream

__all__ = ['get_phony']

# Filled once per device, never emptied, read-only afterwards.
_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Give the empty tensor of a device, always the same object for the same arguments.

    >>> import torch
    >>> get_phony(torch.device('cpu'), requires_grad=True).shape
    torch.Size([0])

    Args:
        device: Where the tensor lies.
        requires_grad: Whether an autograd function that takes it makes a node in the graph.

    Returns:
        A tensor of shape ``(0,)``. It is shared, so detach it before it becomes an output of an
        autograd function.
    """
    key = (device, requires_grad)
    phony = _phonies.get(key)
    if phony is None:
        # Neither the caller's inference mode nor its stream may stick to a tensor that outlives
        # the call.
        with torch.inference_mode(False), use_stream(default_stream(device)):
            phony = torch.empty(0, device=device, requires_grad=requires_grad)
        phony = _phonies.setdefault(key, phony)
    return phony
