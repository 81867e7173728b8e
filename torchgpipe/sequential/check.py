"""Compare a model with what it was converted to: what they give for a sample, in both modes.

Both run in copies, which have the parameters of the model itself, so gradients are of the same
ones, and neither buffers nor the state of layers change. The second time, a micro-batch of the
sample goes through both: a program that was recorded for one number of samples shows there, and so
does state that changes in each call. A model that mixes samples gives other numbers for it than
for all of the sample: that is seen in evaluation, as normalizations of batches do it in training.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.distance import arbitrary_loss, default_tolerance, distance, typical_size
from torchgpipe.engine.scatter import cut, fit_rule
from torchgpipe.sequential.copies import copied, copied_value
from torchgpipe.sequential.draws import same_random_numbers
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.mixing import coarsest_tolerance, differences, mixed
from torchgpipe.sequential.names import Converted, original_names
from torchgpipe.sequential.patches import one_at_a_time
from torchgpipe.structure import call, flatten_nested, leaves_of, path_name

__all__ = ['check']

#: Tensors that come of a call, by what they are.
Record = dict[str, Tensor]


def check(module: nn.Module, converted: Converted, sample: Any, batch_dim: Any, advice: str
          ) -> None:
    """Raise what is different in a converted model.

    Args:
        module: The model.
        converted: What was made of it.
        sample: What both are called with.
        batch_dim: Where its batch is.
        advice: What to do, if numbers differ.

    Raises:
        ConversionError: Outputs, gradients or buffers differ, which are named; or
            samples are mixed.
    """
    if any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        return  # There are no numbers to compare.
    tensors, kind = flatten_nested(sample)
    whole = kind(tensors)
    batches, _, _ = cut(sample, 2, fit_rule(batch_dim, sample, converted))
    halves = [batch.value for batch in batches]
    runs = [('in training', True, whole),
            ('in evaluation, for a half of the sample', False, halves[0])]
    with one_at_a_time, torch.inference_mode(False):
        original, copy = copied(module), copied(converted)
        for title, training, value in runs:
            with same_random_numbers(), _cut(value is not whole, Exception):
                expected = _run(original, value, training)
            with same_random_numbers(), _cut(value is not whole, ValueError):
                found = _run(copy, value, training, original_names)
            _compare(title, expected, found, advice)
        if len(halves) > 1:
            _check_not_mixed(original, whole, halves, _outputs(expected), batch_dim)


def _check_not_mixed(model: nn.Module, whole: Any, halves: list[Any], first: Record,
                     batch_dim: Any) -> None:
    """Raise what is another number for halves of a sample than for all of it, in evaluation.

    Args:
        model: The model.
        whole: The sample.
        halves: Its halves.
        first: What the model gives for the first one.
        batch_dim: Where it was cut.
    """
    def run(value: Any, seed: int = 0) -> Record:
        with same_random_numbers(seed), _cut(value is not whole, Exception):
            return _outputs(_run(model, value, training=False))

    expected = run(whole)
    tolerance = coarsest_tolerance((*model.parameters(), *model.buffers(), *expected.values()))
    different = mixed(expected, [first, run(halves[1])], tolerance)
    # Random numbers are others for other sizes.
    if different and not differences(first, run(halves[0], seed=1), tolerance) \
            and not _is_rounding(model, [whole, *halves]):
        raise ConversionError(
            'the samples of a mini-batch are mixed, so the model can not be cut into micro-batches'
            f' (batch_dim={batch_dim!r}): in evaluation, halves of the sample give other numbers '
            f'than all of it: {_first(different)}. If the batch is in another dimension, say so: '
            'to_sequential(…, batch_dim=1) and GPipe(…, batch_dim=1). If an argument is the same '
            'for all samples, mark it: NoChunk(tensor). If the model compares samples, as a '
            'contrastive loss does, do so with what the pipeline gives. check_sample=False '
            'converts it as it is')


def _is_rounding(model: nn.Module, values: list[Any]) -> bool:
    """Return whether it is known that in float64 the halves of a sample are those of all of it."""
    try:
        double = deepcopy(model).double()
        found = []
        for value in values:
            tensors, kind = flatten_nested(value)
            with same_random_numbers():
                found.append(_outputs(_run(double, kind(
                    [x.double() if x.is_floating_point() else x for x in tensors]), False)))
    except Exception:  # Not every model can compute in float64.
        return False
    return not mixed(found[0], found[1:], 1e-6)


def _outputs(record: Record) -> Record:
    return {name: x for name, x in record.items() if name.startswith('output')}


def _first(different: list[str]) -> str:
    more = f', and {len(different) - 8} others' if len(different) > 8 else ''
    return ', '.join(different[:8]) + more


def _run(module: nn.Module, value: Any, training: bool,
         original: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Record:
    module.train(training)
    # What was made in inference mode has no graph.
    learns = training and not any(x.is_inference() for x in module.parameters())
    with torch.set_grad_enabled(learns):
        output = call(module, copied_value(value))
        record = {f'output{path_name(leaf.path)}': leaf.value for leaf in leaves_of(output)
                  if isinstance(leaf.value, Tensor)}
        loss = arbitrary_loss(output)
    if loss.requires_grad:
        names = original(dict(module.named_parameters(remove_duplicate=False)))
        learning = {name: x for name, x in names.items() if x.requires_grad}
        grads = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
        record.update({f'gradient of {name}': grad for name, grad in zip(learning, grads)
                       if grad is not None})
    buffers = original(dict(module.named_buffers(remove_duplicate=False)))
    record.update({f'buffer {name}': x.clone() for name, x in buffers.items()
                   if '_constant_' not in name})
    return {name: x.detach() for name, x in record.items()}


def _compare(title: str, expected: Record, found: Record, advice: str) -> None:
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
        raise ConversionError(f'the converted model has other numbers than the model {title}: '
                              f'{_first(different)}. {advice}')


@contextmanager
def _cut(is_cut: bool, failure: type[Exception]) -> Iterator[None]:
    """Say of what fails that the number of samples is the reason."""
    try:
        yield
    except failure as error:
        if not is_cut:
            raise
        raise ConversionError('the model can not be cut into micro-batches as it is, since its '
                              f'program goes by their size: {error}') from error
