"""Compare a model with what it was converted to: what they give for a sample, in both modes.

Both run in copies, which have the parameters of the model itself, so gradients are of the same
ones, and neither buffers nor the state of layers change. The second time, a micro-batch of the
sample goes through both: a program that was recorded for one number of samples shows there, and so
does state that changes in each call.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.distance import arbitrary_loss, default_tolerance, distance, typical_size
from torchgpipe.sequential.effects import copied, copied_value, same_random_numbers, without_grad
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.parts import Converted, original_names
from torchgpipe.sequential.patches import one_at_a_time
from torchgpipe.structure import call, leaves_of, path_name

__all__ = ['NamedTensors', 'check_conversion', 'differences', 'fails_by_size', 'first_of']

#: Tensors that come of a call, by what they are.
NamedTensors = dict[str, Tensor]


def check_conversion(module: nn.Module, converted: Converted, sample: Any, half: Any, advice: str
                     ) -> None:
    """Raise what is different in a converted model for a sample or a half of it, with advice.

    Raises:
        ConversionError: Outputs, gradients or buffers differ, which are named.
    """
    with one_at_a_time, torch.inference_mode(False):
        original, copy = copied(module), copied(converted)
        for title, training, value in (('in training', True, sample),
                                       ('in evaluation, for a half of the sample', False, half)):
            with same_random_numbers(), fails_by_size(value is not sample, Exception):
                expected = _run(original, value, training)
            with (same_random_numbers(), _fails_by_mode(copy, sample, training),
                  fails_by_size(value is not sample, ValueError)):
                found = _run(copy, value, training, original_names)
            different = []
            for kind in ('output', 'gradient', 'buffer'):
                different += differences(_of_kind(expected, kind), _of_kind(found, kind))
            if different:
                raise ConversionError(f'the converted model has other numbers than the model '
                                      f'{title}: {first_of(different)}. {advice}')


def _run(module: nn.Module, value: Any, training: bool,
         original: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> NamedTensors:
    """Return outputs of a module and its buffers, and in training gradients of a loss.

    Names in the original, for those of the module, are given by ``original``.
    """
    module.train(training)
    # What was made in inference mode has no graph.
    learns = training and not any(x.is_inference() for x in module.parameters())

    def output_of(_: bool) -> Any:
        return call(module, copied_value(value))

    with torch.set_grad_enabled(learns):
        output = output_of(True) if learns else without_grad(output_of)
        found = {f'output{path_name(leaf.path)}': leaf.value for leaf in leaves_of(output)
                 if isinstance(leaf.value, Tensor)}
        loss = arbitrary_loss(output)
    if loss.requires_grad:
        names = original(dict(module.named_parameters(remove_duplicate=False)))
        learning = {name: x for name, x in names.items() if x.requires_grad}
        grads = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
        found.update({f'gradient of {name}': grad for name, grad in zip(learning, grads)
                      if grad is not None})
    buffers = original(dict(module.named_buffers(remove_duplicate=False)))
    found.update({f'buffer {name}': x.clone() for name, x in buffers.items()
                  if '_constant_' not in name})
    return {name: x.detach() for name, x in found.items()}


def differences(expected: NamedTensors, found: NamedTensors, tolerance: float | None = None
                ) -> list[str]:
    """Return which tensors differ by more than rounding, and by how much.

    Rounding may come to the tolerance or, without one, to what it does for the type of each.
    """
    typical = typical_size([*expected.values()])
    different = []
    for name in {**expected, **found}:
        apart, dtype = float('inf'), None
        if name in expected and name in found:
            apart = distance(found[name], expected[name], typical)
            dtype = expected[name].dtype if expected[name].is_floating_point() else None
        if apart > (default_tolerance(dtype) if tolerance is None else tolerance):
            different.append(f'{name} by {apart:.1e}')
    return different


def first_of(different: list[str]) -> str:
    """Return the first few of some differences, as a text."""
    more = f', and {len(different) - 8} others' if len(different) > 8 else ''
    return ', '.join(different[:8]) + more


def _of_kind(tensors: NamedTensors, kind: str) -> NamedTensors:
    """Return those of some tensors that are outputs, gradients or buffers."""
    return {name: x for name, x in tensors.items() if name.startswith(kind)}


@contextmanager
def fails_by_size(is_cut: bool, failure: type[Exception]) -> Iterator[None]:
    """Say of what fails that the number of samples is the reason."""
    try:
        yield
    except failure as error:
        if not is_cut:
            raise
        raise ConversionError('the model can not be cut into micro-batches as it is, since its '
                              f'program goes by their size: {error}') from error


@contextmanager
def _fails_by_mode(converted: nn.Module, sample: Any, training: bool) -> Iterator[None]:
    """Say of what fails in one mode only that the mode is the reason."""
    try:
        yield
    except AttributeError:  # Stages by hand say what they lack.
        raise
    except Exception as error:
        if _takes(converted, sample, training) or not _takes(converted, sample, not training):
            raise
        here, there = ('training', 'evaluation') if training else ('evaluation', 'training')
        raise ConversionError(
            'the converted model fails in one mode: a submodule gives something else in training '
            f'than in evaluation, and what goes on with it was recorded in {there} and can not do '
            f'so in {here}: {error.__cause__ or error}. If it gives a cache in evaluation, '
            'go without: model.config.use_cache = False, or use_cache=False in the call. Else let '
            'it give the same in both modes, as without auxiliary heads; or let one leaf have '
            'it and what goes on with it: '
            'to_sequential(model, sample, leaves=[…]); or convert the model in the mode that it '
            'is used in, by train() or eval() before, with check_sample=False') from error


def _takes(converted: nn.Module, sample: Any, training: bool) -> bool:
    try:
        with same_random_numbers():
            _run(converted, sample, training, original_names)
    except Exception:
        return False
    return True
