"""Compare a model with what it was converted to: what they give for a sample, in both modes.

Both run in copies, which have the parameters of the model itself, so gradients are of the same
ones, and neither buffers nor the state of layers change. A micro-batch of the sample goes through
both, too: a program that was recorded for one number of samples shows there.
"""
import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.distance import arbitrary_loss, default_tolerance, distance, typical_size
from torchgpipe.engine.scatter import cut, fit_rule
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.names import Converted, original_names
from torchgpipe.structure import call, flatten_nested, leaves_of, path_name

__all__ = ['check']

#: Tensors that come of a call, by what they are.
Record = dict[str, Tensor]


def check(module: nn.Module, converted: Converted, sample: Any, batch_dim: Any) -> None:
    """Raise what is different in a converted model.

    Raises:
        ConversionError: Outputs, gradients or buffers differ, which are named.
    """
    if any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        return  # There are no numbers to compare.
    tensors, kind = flatten_nested(sample)
    whole = kind(tensors)
    batches, _, _ = cut(sample, 2, fit_rule(batch_dim, sample, converted))
    half = batches[0].value if len(batches) > 1 else whole
    runs = [('in training', True, whole), ('in evaluation, for a half of the sample', False, half)]
    for title, training, value in runs:
        with _same_random_numbers():
            expected = _run(module, value, training)
        with _same_random_numbers():
            try:
                found = _run(converted, value, training)
            except ValueError as error:
                if value is whole:
                    raise
                raise ConversionError('the model can not be cut into micro-batches as it is, '
                                      f'since its program goes by their size: {error}') from error
        _compare(title, expected, found)


def _run(module: nn.Module, value: Any, training: bool) -> Record:
    shared = list(module.parameters())
    module = copy.deepcopy(module, {id(x): x for x in shared}).train(training)
    tensors, kind = flatten_nested(value)
    value = kind([x.detach().clone() for x in tensors])
    with torch.enable_grad() if training else torch.no_grad():
        output = call(module, value)
        record = {f'output{path_name(leaf.path)}': leaf.value for leaf in leaves_of(output)
                  if isinstance(leaf.value, Tensor)}
        loss = arbitrary_loss(output) if training else torch.zeros(())
    if loss.requires_grad:
        names = _originals(dict(module.named_parameters(remove_duplicate=False)), module)
        learning = {name: x for name, x in names.items() if x.requires_grad}
        grads = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
        record.update({f'gradient of {name}': grad for name, grad in zip(learning, grads)
                       if grad is not None})
    buffers = dict(module.named_buffers(remove_duplicate=False))
    record.update({f'buffer {name}': x for name, x in _originals(buffers, module).items()
                   if '_constant_' not in name})
    return {name: x.detach() for name, x in record.items()}


def _originals(tensors: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    return original_names(tensors) if isinstance(module, Converted) else tensors


def _compare(title: str, expected: Record, found: Record) -> None:
    different = []
    for kind in ('output', 'gradient', 'buffer'):
        typical = typical_size([x for name, x in expected.items() if name.startswith(kind)])
        for name in (name for name in {**expected, **found} if name.startswith(kind)):
            apart = (distance(found[name], expected[name], typical)
                     if name in expected and name in found else float('inf'))
            dtype = expected.get(name, torch.empty(0)).dtype
            if apart > default_tolerance(dtype if dtype.is_floating_point else None):
                different.append(f'{name} by {apart:.1e}')
    if different:
        more = f', and {len(different) - 8} others' if len(different) > 8 else ''
        raise ConversionError(
            f'the converted model has other numbers than the model {title}: '
            + ', '.join(different[:8]) + more + '. What differs first is mostly the cause: '
            'something that a graph does not have, such as a change of a tensor by NumPy, or a '
            'way that depends on what is none of its inputs. Name the submodule as a leaf')


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    python = random.getstate()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = range(torch.accelerator.device_count()) if accelerator else range(0)
    try:
        with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator
                                   else 'cuda'):
            torch.manual_seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(python)
