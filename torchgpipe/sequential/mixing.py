"""Detect models that mix the samples of a mini-batch, so that micro-batches change the results.

::

    sample    (8, 3)   ─▶  (8, 5)
    halves    (4, 3)   ─▶  (4, 5)  ┐ put together, they have to be the output for all of it
              (4, 3)   ─▶  (4, 5)  ┘

Both halves count: the first one is right where a sample sees those before it, as steps in time do.
It is seen in evaluation, as normalizations of batches mix samples in training by design. A plain
value, such as the number of samples, has to be the same for the halves as for all of it.

[Note: Losses that mix samples]
A number, such as a loss, has to be the mean or the sum of those for the halves. If it is neither,
samples need not be mixed: a mean over tokens that are not padding is a mean of halves with weights
that nobody knows. So a half is repeated: for once, twice and three times the same samples, a sum
grows evenly, and a mean by any weights stays the same. A loss that compares each sample with all
others does neither: a contrastive one grows as log(1), log(2), log(3) by what it compares with.
Such a model is refused. What cannot be told apart, as a loss of the hardest pair or a variance,
gives a warning. A rule of ``GPipe(…, gather=…)`` puts halves together instead; a number that
differs is refused.
"""
import warnings
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.distance import default_tolerance, distance, is_real, together
from torchgpipe.base.structure import Path, flatten, flatten_nested, path_name
from torchgpipe.engine.microbatches import DEFAULT, Batch, gather, look_up
from torchgpipe.sequential.check import (Evaluated, NamedTensors, differences, evaluated, first_of,
                                         tensors_of)
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.patches import one_at_a_time

__all__ = ['check_mixing', 'coarsest_tolerance', 'compare_parts']


def check_mixing(known: Evaluated, sample: Any, halves: Sequence[Any], sizes: Sequence[int],
                 batch_dim: Any, rule: Any = None) -> None:
    """Raise what is another number for halves of a sample than for all of it, in evaluation.

    Args:
        known: The model, in a copy, and what it gave for one of these.
        sample: All of it.
        halves, sizes, batch_dim: How that was cut.

    Raises:
        ConversionError: Samples are mixed.
    """
    with one_at_a_time, torch.inference_mode(False):
        model = known.model
        given = [known.outputs if x is known.value else evaluated(model, x, x is not sample)[0]
                 for x in (sample, *halves)]
        _check_plain_values(given)
        whole, *parts = map(tensors_of, given)
        tolerance = coarsest_tolerance((*model.parameters(), *model.buffers(), *whole.values()))
        rules = _rules(rule, given)
        different, wrong, unsure = _compare(whole, parts, sizes, rules, tolerance)
        # Random numbers are others for other sizes.
        if not (different or wrong or unsure) or _reals_differ(
                parts[0], _outputs(model, halves[0], seed=1), tolerance) or _is_rounding(
                model, [sample, *halves], sizes, rules):
            return
        uneven = _grows_unevenly(model, sample, halves[0], [*unsure], tolerance)
    different += [f'{name}, {unsure[name]}' for name in uneven]
    if different:
        raise _mixes(different, batch_dim)
    if wrong:
        raise _other_rule(wrong)
    warnings.warn(
        f'{", ".join(f"{name} is {text}" for name, text in unsure.items())}. That is neither '
        "their mean nor their sum, so no word of GPipe(…, gather=…) gives it. A mean over "
        'anything but samples, such as tokens that are not padding: let a function count them, '
        "gather={'loss': lambda ids, mask, labels: (labels != -100).sum()}, which is called as "
        'the model is; or labels[:, 1:], where the model shifts them. Pass it to '
        'to_sequential(…, gather=…) as well, which checks it. A loss that compares '
        'samples: compute it of what the pipeline gives. check_sample=False does not look',
        stacklevel=4)


def _mixes(different: list[str], batch_dim: Any) -> ConversionError:
    return ConversionError(
        'the samples of a mini-batch are mixed, so the model cannot be cut into micro-batches'
        f' (batch_dim={batch_dim!r}): in evaluation, halves of the sample give other numbers '
        f'than all of it: {first_of(different)}. If the batch is in another dimension, say so: '
        'to_sequential(…, batch_dim=1) and GPipe(…, batch_dim=1). If an argument is the same for '
        'all samples, mark it: NoChunk(tensor). If the model compares samples, as a contrastive '
        'loss does, do so with what the pipeline gives. check_sample=False converts it as it is')


def _other_rule(wrong: list[str]) -> ConversionError:
    return ConversionError(
        'gather gives other numbers for halves of the sample than the model for the whole sample, '
        f"in evaluation: {first_of(wrong)}. Use 'mean' for a mean over samples, 'sum' for a sum, "
        'or a function that counts the elements of any other mean. Compute a loss that compares '
        'samples from the output of the pipeline')


def _rules(rule: Any, given: Sequence[dict[Path, Any]]) -> dict[str, Any]:
    """Return the rules of ``GPipe(…, gather=rule)`` by the names of outputs."""
    found = {}
    for path, x in given[0].items():
        each, named = look_up(rule, path)
        if each not in (DEFAULT, None) and all(
                isinstance(outputs.get(path), Tensor) for outputs in given) and (
                named or isinstance(each, int) or x.dim() == 0):  # A word alone is for scalars.
            found[f'output{path_name(path)}'] = each
    return found


def _compare(whole: NamedTensors, halves: Sequence[NamedTensors], sizes: Sequence[int],
             rules: dict[str, Any], tolerance: float
             ) -> tuple[list[str], list[str], dict[str, str]]:
    """Return mixed outputs, those with a wrong rule, and those that need one."""
    joined = {}
    for name, rule in rules.items():
        if rule != 'stack':  # which keeps numbers of micro-batches apart
            batches = [Batch(*flatten({name: outputs[name]})) for outputs in halves]
            joined[name] = gather(batches, sizes, {name: rule})[name]
    others, *parts = ({name: x for name, x in outputs.items() if name not in rules}
                      for outputs in (whole, *halves))
    different, unsure = compare_parts(others, parts, sizes, tolerance)
    return different, _reals_differ(whole, joined, tolerance), unsure


def _check_plain_values(given: Sequence[dict[Path, Any]]) -> None:
    """Raise which outputs that are no tensors are others for halves of a sample."""
    for path, value in given[0].items():
        found = [value, *(outputs.get(path, value) for outputs in given[1:])]
        # By their texts, as NaN is not itself.
        if len({*map(repr, found)}) > 1 and not any(isinstance(x, Tensor) for x in found):
            name, (whole, *parts) = path_name(path), found
            raise ConversionError(
                'a plain value that the model returns depends on the samples, or on their number, '
                f'and a pipeline cannot combine the values of micro-batches: output{name} is '
                f'{whole!r} for the sample and {", ".join(map(repr, parts))} for halves. Compute '
                'it from the inputs or outputs of the pipeline; or return a tensor with an '
                'element for each sample. check_sample=False does not look')


def _outputs(model: nn.Module, value: Any, seed: int = 0) -> NamedTensors:
    return tensors_of(evaluated(model, value, False, seed)[0])


def _is_rounding(model: nn.Module, values: list[Any], sizes: Sequence[int],
                 rules: dict[str, Any]) -> bool:
    """Return whether it is known that in float64 the halves of a sample are those of all of it."""
    try:
        double = deepcopy(model).double()
        found = []
        for value in values:
            tensors, kind = flatten_nested(value)
            found.append(_outputs(double, kind(
                [x.double() if x.is_floating_point() else x for x in tensors])))
    except Exception:  # Not every model can compute in float64.
        return False
    whole, *parts = found
    return not any(_compare(whole, parts, sizes, rules, 1e-6))


def compare_parts(whole: NamedTensors, halves: Sequence[NamedTensors], sizes: Sequence[int],
                  tolerance: float) -> tuple[list[str], dict[str, str]]:
    """Compare outputs for all of a sample with those for halves of some sizes.

    ``GPipe(…, gather=…)`` decides on outputs without a batch dimension. Rounding may come to the
    tolerance.

    Returns:
        Which outputs for halves are not the halves, and how; and which numbers are neither the
        mean nor the sum of the numbers for halves, with their values.
    """
    found, unsure = [], {}
    joined: NamedTensors = {}
    for name in {name: None for outputs in (whole, *halves) for name in outputs}:
        if not all(name in outputs for outputs in (whole, *halves)):
            found.append(f'{name}, which is not there for each')
            continue
        x, *parts = (outputs[name] for outputs in (whole, *halves))
        if any(part.shape != x.shape for part in parts):
            joined.update((name, way) for way in together(x, parts, sizes))
            if name not in joined:
                shapes = ', '.join(str(tuple(part.shape)) for part in parts)
                found.append(f'{name} of shapes {shapes}, in place of parts of {tuple(x.shape)}')
        elif x.numel() == 1 and is_real(x):
            scale = float(torch.stack([x, *parts]).abs().max())
            if all(distance(way, x, scale) > tolerance for way in together(x, parts, sizes)):
                first, *others = (f'{y.item():.4g}' for y in (x, *parts))
                unsure[name] = f'{first} for the sample and {", ".join(others)} for halves'
    return found + _reals_differ(whole, joined, tolerance), unsure


def _reals_differ(expected: NamedTensors, found: NamedTensors, tolerance: float) -> list[str]:
    """Return differences in what is found, but for integers and truths.

    These may differ by much where what they are made of differs by rounding.
    """
    reals = {name: x for name, x in found.items() if is_real(x)}
    return differences({name: expected[name] for name in reals}, reals, tolerance)


def _grows_unevenly(model: nn.Module, sample: Any, half: Any, names: Sequence[str],
                    tolerance: float) -> list[str]:
    """Return which numbers neither stay as they are nor grow evenly if a half is repeated."""
    if not names:
        return []
    try:
        found = [_outputs(model, _repeated(half, sample, times)) for times in (1, 2, 3)]
    except Exception:  # It does not take as many.
        return []
    uneven = []
    for name in names:
        once, twice, thrice = (outputs[name].double() for outputs in found)
        apart = (thrice - 2 * twice + once).abs()
        scale = torch.stack([once, twice, thrice]).abs().max()
        if apart.isfinite() and apart > 4 * tolerance * scale:
            uneven.append(name)
    return uneven


def _repeated(half: Any, sample: Any, times: int) -> Any:
    """Return a half of a sample several times over, by the dimension in which it is a half."""
    (tensors, kind), (wholes, _) = flatten_nested(half), flatten_nested(sample)
    dims = [[k for k, size in enumerate(x.shape) if size != whole.shape[k]]
            for x, whole in zip(tensors, wholes)]
    return kind([torch.cat([x] * times, dim[0]) if dim else x for x, dim in zip(tensors, dims)])


def coarsest_tolerance(tensors: Iterable[Tensor]) -> float:
    """Return what rounding may come to in the least precise of some tensors.

    Other sizes get other kernels, so rounding is another one; and those may compute with less
    precision than what they are given has, under autocast, or by TF32, which has that of float16.
    """
    found: set[torch.dtype] = set()
    for x in tensors:
        if is_real(x):
            kind = x.device.type
            lower = not x.is_cpu or torch.get_float32_matmul_precision() != 'highest'
            found.add(torch.float16 if lower and x.dtype == torch.float32 else x.dtype)
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                found.add(torch.get_autocast_dtype(kind))
    return max(map(default_tolerance, found), default=0.0)
