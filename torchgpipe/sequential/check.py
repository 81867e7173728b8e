"""Compare a converted model with the original: outputs for a sample, in both modes.

Both run in copies, which have the parameters of the model itself, so gradients are of the same
ones, and neither buffers nor the state of layers change. In training a micro-batch of the sample
goes through both, and in evaluation all of it: a program that was recorded for one number of
samples shows there, and so does state that changes in each call. One sample alone is none for a
batch normalization in training, and a loss of nothing but padding has no gradient: then it is the
other way round, or all of it in both.
"""
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.distance import apart, arbitrary_loss, rounding
from torchgpipe.base.structure import Path, call, leaves_of, path_name
from torchgpipe.sequential.effects import copied, copied_value, same_random_numbers, without_grad
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.parts import Converted, original_names
from torchgpipe.sequential.patches import one_at_a_time

__all__ = ['Evaluated', 'NamedTensors', 'check_conversion', 'differences', 'evaluated',
           'first_of', 'tensors_of']

#: Tensors that come of a call, by what they are.
NamedTensors = dict[str, Tensor]


class Evaluated(NamedTuple):
    """What a model was compared by in evaluation."""

    #: The copy that ran.
    model: nn.Module
    value: Any
    #: What it gave: tensors and plain values, by where they are.
    outputs: dict[Path, Any]


def check_conversion(module: nn.Module, converted: Converted, halves: Sequence[Any],
                     number: int, sample: Any, advice: str) -> Evaluated:
    """Raise what is different in a converted model, with advice.

    Args:
        module, converted: The model, and what it was converted to.
        sample: What both are called with.
        halves: How that was cut.
        number: Of how many samples the first one is.
        advice: What to do.

    Raises:
        ConversionError: Outputs, gradients or buffers differ, which are named.
    """
    with one_at_a_time, torch.inference_mode(False):
        copy = copied(converted)
        original, value, expected = _trained(module, halves[0] if number > 1 else sample, sample)
        _compare(copy, value, True, sample, expected, advice)
        value = halves[0] if value is sample else sample
        outputs, expected = evaluated(original, value, value is not sample)
        _compare(copy, value, False, sample, expected, advice)
        return Evaluated(original, value, outputs)


def _trained(module: nn.Module, value: Any, sample: Any) -> tuple[nn.Module, Any, NamedTensors]:
    """Return a copy of a module that has run in training, with what, and what came of it.

    That is all of the sample if what comes of a part of it is no number.
    """
    original = copied(module)
    with same_random_numbers(), _fails_by_size(
            lambda: value is not sample and _takes(original, sample, True, dict), Exception):
        outputs, found = _run(original, value, True)
    tensors = [x for x in outputs.values() if isinstance(x, Tensor)]
    if value is sample or all(x.isfinite().all() for x in tensors):
        return original, value, found
    return _trained(module, sample, sample)


def _compare(copy: nn.Module, value: Any, training: bool, sample: Any, expected: NamedTensors,
             advice: str) -> None:
    """Raise what is different from what is expected of a copy of a converted model."""
    is_cut = value is not sample
    with (same_random_numbers(), _fails_by_mode(copy, sample, training),
          _fails_by_size(lambda: is_cut and _takes(copy, sample, training), ValueError)):
        _, found = _run(copy, value, training, original_names)
    different = differences(expected, found)
    if different:
        mode = 'training' if training else 'evaluation'
        raise ConversionError(f'the converted model has other numbers than the model in {mode}: '
                              f'{first_of(different)}. {advice}')


def _run(module: nn.Module, value: Any, training: bool,
         original: Callable[[dict[str, Any]], dict[str, Any]] = dict
         ) -> tuple[dict[Path, Any], NamedTensors]:
    """Return outputs of a module, and tensors: these, its buffers, and gradients in training.

    Names in the original, for those of the module, are given by ``original``.
    """
    module.train(training)
    # What was made in inference mode has no graph.
    learns = training and not any(x.is_inference() for x in module.parameters())

    def output_of(_: bool) -> Any:
        return call(module, copied_value(value))

    with torch.set_grad_enabled(learns):
        output = output_of(True) if learns else without_grad(output_of)
        loss = arbitrary_loss(output) if learns else torch.zeros(())
    outputs = {leaf.path: leaf.value for leaf in leaves_of(output)}
    found = tensors_of(outputs)
    if loss.requires_grad:
        names = original(dict(module.named_parameters(remove_duplicate=False)))
        learning = {name: x for name, x in names.items() if x.requires_grad}
        grads = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
        found.update({f'gradient of {name}': grad for name, grad in zip(learning, grads)
                      if grad is not None})
    buffers = original(dict(module.named_buffers(remove_duplicate=False)))
    found.update({f'buffer {name}': x.clone() for name, x in buffers.items()
                  if '_constant_' not in name})
    return outputs, {name: x.detach() for name, x in found.items()}


def evaluated(module: nn.Module, value: Any, is_cut: bool, seed: int = 0
              ) -> tuple[dict[Path, Any], NamedTensors]:
    """Return the outputs of a module in evaluation, and all tensors: outputs and buffers."""
    with same_random_numbers(seed), _fails_by_size(lambda: is_cut, Exception):
        return _run(module, value, False)


def tensors_of(outputs: dict[Path, Any]) -> NamedTensors:
    """Return the tensors of an output by their names."""
    return {f'output{path_name(path)}': x.detach() for path, x in outputs.items()
            if isinstance(x, Tensor)}


def differences(expected: NamedTensors, found: NamedTensors, tolerance: float | None = None
                ) -> list[str]:
    """Return which tensors differ by more than rounding, and by how much.

    Rounding may come to the tolerance or, without one, to what it does for the type of each.
    """
    kinds = itemgetter(slice(6))  # 'output', 'gradient of …', 'buffer …'
    return [f'{name} by {far:.1e}' for name, far in apart(expected, found, kinds).items()
            if far > (rounding(expected.get(name)) if tolerance is None else tolerance)]


def first_of(different: list[str]) -> str:
    """Return the first few of some differences, as a text."""
    more = f', and {len(different) - 8} others' if len(different) > 8 else ''
    return ', '.join(different[:8]) + more


@contextmanager
def _fails_by_size(does: Callable[[], bool], failure: type[Exception]) -> Iterator[None]:
    """Say of what fails that the number of samples is the reason, if it is."""
    try:
        yield
    except failure as error:
        if not does():
            raise
        raise ConversionError('the model cannot be cut into micro-batches as it is, since its '
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
            f'than in evaluation, and what goes on with it was recorded in {there} and cannot do '
            f'so in {here}: {error.__cause__ or error}. If it gives a cache in evaluation, '
            'go without: model.config.use_cache = False, for XLNet model.config.use_mems_eval = '
            'False, or use_cache=False in the call. Else let it give the same in both modes, as '
            'without auxiliary heads; or let one leaf have it and what goes on with it: '
            'to_sequential(model, sample, leaves=[…]); or convert the model in the mode that it '
            'is used in, by train() or eval() before, with check_sample=False') from error


def _takes(module: nn.Module, sample: Any, training: bool,
           original: Callable[[dict[str, Any]], dict[str, Any]] = original_names) -> bool:
    try:
        with same_random_numbers():
            _run(module, sample, training, original)
    except Exception:
        return False
    return True
