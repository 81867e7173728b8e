"""Balances: the number of layers in each partition.

- :func:`balance_by_time` makes partitions equally fast, :func:`balance_by_size` equally large.
- :func:`profile` measures the layers once. :meth:`Profile.balance` then returns the fastest
  balance for any number of partitions, micro-batches and memory limits, with predictions.
"""

import sys
from math import inf
from typing import Any

from torch import nn

from torchgpipe.base.devices import Device
from torchgpipe.base.structure import Value
from torchgpipe.engine.microbatches import cut
from torchgpipe.engine.split import verify_module
from torchgpipe.plan import balance as blockpartition  # noqa: F401  # the name in 0.0.7
from torchgpipe.plan.balance import Balance, Profile, check_partitions, edges_for, even_cuts
from torchgpipe.plan.costs import LayerProfile, OperationProfile, SkipProfile, TieProfile
from torchgpipe.plan.profile import layerwise_sandbox, profile, profile_bytes

__all__ = [
    'Balance',
    'LayerProfile',
    'OperationProfile',
    'Profile',
    'SkipProfile',
    'TieProfile',
    'balance_by_size',
    'balance_by_time',
    'profile',
]

# torchgpipe 0.0.7 had a module with the name of the function. Importing it would replace the
# function here, if the module were not in `sys.modules` already.
sys.modules[f'{__name__}.profile'] = sys.modules[layerwise_sandbox.__module__]
profile.layerwise_sandbox = layerwise_sandbox  # type: ignore[attr-defined]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    batch_dim: Any = 0,
) -> list[int]:
    """Balance a sequential module by the time of forward and backward.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> len(balance_by_time(2, model, torch.rand(16, 8), timeout=0.01, device='cpu'))
    2

    Args:
        partitions: Number of partitions.
        module: The model. It does not change.
        sample: A mini-batch, as the model would be called with one: a tensor of shape
            ``(batch, …)``, a structure of such, or :class:`~torchgpipe.Arguments`.
        timeout: Approximate time in seconds.
        device: The device to measure on, one layer at a time; by default the accelerator.
        batch_dim: The batch dimension: see :class:`~torchgpipe.GPipe`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError: The module is not sequential, or the sample is not made of tensors.
        ValueError: There are fewer layers than partitions, a parameter already has a gradient, or
            the device or the sample is invalid.
    """
    verify_module(module)
    check_partitions(module, partitions)
    costs = profile(module, sample, device=device, timeout=timeout, batch_dim=batch_dim)
    return _cut(costs, [x.forward_seconds + x.backward_seconds for x in costs.layers], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Value,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    batch_dim: Any = 0,
) -> list[int]:
    """Balance a sequential module by memory: parameters, and activations of one micro-batch.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> balance_by_size(2, model, torch.rand(16, 8), device='cpu')
    [1, 2]

    Args:
        partitions: Number of partitions.
        module: The model. It does not change.
        input: A mini-batch, as the model would be called with one: a tensor of shape
            ``(batch, …)``, a structure of such, or :class:`~torchgpipe.Arguments`.
        chunks: Number of micro-batches.
        param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
            relative to the parameter: SGD 2–3, Adam 4–5, Adadelta 4, Adagrad 3, RMSprop 3–5.
        device: The device to run the layers on, one at a time; by default the accelerator. On
            ``'meta'`` they take no memory.
        batch_dim: The batch dimension: see :class:`~torchgpipe.GPipe`.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError: The module is not sequential, or the input is not made of tensors.
        ValueError: There are fewer layers than partitions, a parameter already has a gradient, or
            the device, the input, ``chunks`` or ``param_scale`` is invalid.
    """
    verify_module(module)
    check_partitions(module, partitions)
    if not chunks >= 1:
        raise ValueError(f'number of chunks must be a positive integer, but got {chunks}')
    if not 0 <= param_scale < inf:
        raise ValueError(f'param_scale must be zero or more, but is {param_scale}')
    batches, sizes, _ = cut(input, chunks, batch_dim, layers=module)
    costs = profile_bytes(module, batches[0], sizes[0], device)
    return _cut(
        costs,
        [
            x.activation_bytes
            + x.frozen_bytes
            + x.buffer_bytes
            + (x.parameter_bytes - x.frozen_bytes) * param_scale
            for x in costs.layers
        ],
        partitions,
    )


def _cut(measured: Profile, costs: list[float], partitions: int) -> list[int]:
    # Without checkpoints, cuts at other edges may work.
    return even_cuts(costs, edges_for(measured, partitions, 'never'), partitions)
