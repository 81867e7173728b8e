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

from torchgpipe.distance import default_tolerance, distance
from torchgpipe.engine.microbatches import DEFAULT, Batch, gather, look_up
from torchgpipe.sequential.check import (Evaluated, NamedTensors, differences, fails_by_size,
                                         first_of)
from torchgpipe.sequential.effects import copied_value, same_random_numbers, without_grad
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.patches import one_at_a_time
from torchgpipe.structure import Path, call, flatten, flatten_nested, leaves_of, path_name

__all__ = ['check_mixing', 'coarsest_tolerance', 'mixed', 'neither_mean_nor_sum']


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
        given = [known.outputs if x is known.value else _given(model, x, x is not sample)
                 for x in (sample, *halves)]
        _check_plain_values(given)
        whole, *parts = map(_tensors, given)
        tolerance = coarsest_tolerance((*model.parameters(), *model.buffers(), *whole.values()))
        rules = _rules(rule, given)
        different, wrong, unsure = _compare(whole, parts, sizes, rules, tolerance)
        # Random numbers are others for other sizes.
        if not (different or wrong or unsure) or _reals_differ(
                parts[0], _outputs(model, halves[0], True, seed=1), tolerance) or _is_rounding(
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
            found[_name(path)] = each
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
    return (mixed(others, parts, tolerance), _reals_differ(whole, joined, tolerance),
            neither_mean_nor_sum(others, parts, sizes, tolerance))


def _check_plain_values(given: Sequence[dict[Path, Any]]) -> None:
    """Raise which outputs that are no tensors are others for halves of a sample."""
    for path, value in given[0].items():
        found = [value, *(outputs.get(path, value) for outputs in given[1:])]
        # By their texts, as NaN is not itself.
        if len({*map(repr, found)}) > 1 and not any(isinstance(x, Tensor) for x in found):
            name, (whole, *parts) = _name(path), found
            raise ConversionError(
                f'a plain value that the model gives goes by the samples, or by their number, and '
                f'a pipeline cannot put those of micro-batches together: {name} is {whole!r} for '
                f'the sample and {", ".join(map(repr, parts))} for halves. Compute it of what the '
                'pipeline gives or is called with; or give a tensor with an element for each '
                'sample. check_sample=False does not look')


def _outputs(model: nn.Module, value: Any, is_cut: bool, seed: int = 0) -> NamedTensors:
    return _tensors(_given(model, value, is_cut, seed))


def _given(model: nn.Module, value: Any, is_cut: bool, seed: int = 0) -> dict[Path, Any]:
    """Return what a model gives in evaluation: tensors and plain values, by where they are."""
    with same_random_numbers(seed), fails_by_size(lambda: is_cut, Exception):
        output = without_grad(lambda _: call(model.eval(), copied_value(value)))
    return {leaf.path: leaf.value for leaf in leaves_of(output)}


def _tensors(given: dict[Path, Any]) -> NamedTensors:
    return {_name(path): x.detach() for path, x in given.items() if isinstance(x, Tensor)}


def _name(path: Path) -> str:
    return f'output{path_name(path)}'


def _is_rounding(model: nn.Module, values: list[Any], sizes: Sequence[int],
                 rules: dict[str, Any]) -> bool:
    """Return whether it is known that in float64 the halves of a sample are those of all of it."""
    try:
        double = deepcopy(model).double()
        found = []
        for value in values:
            tensors, kind = flatten_nested(value)
            found.append(_outputs(double, kind(
                [x.double() if x.is_floating_point() else x for x in tensors]), False))
    except Exception:  # Not every model can compute in float64.
        return False
    whole, *parts = found
    return not any(_compare(whole, parts, sizes, rules, 1e-6))


def mixed(whole: NamedTensors, halves: Sequence[NamedTensors], tolerance: float) -> list[str]:
    """Return which outputs for halves of a sample are not those halves of that for all of it.

    What has no batch dimension, such as a scalar, becomes what ``GPipe(…, gather=…)`` says.
    Rounding may come to the tolerance.
    """
    found = []
    joined: NamedTensors = {}
    for name in {name: None for outputs in (whole, *halves) for name in outputs}:
        if not all(name in outputs for outputs in (whole, *halves)):
            found.append(f'{name}, which is not there for each')
            continue
        parts = [outputs[name] for outputs in halves]
        shapes = [tuple(x.shape) for x in parts]
        if any(shape != whole[name].shape for shape in shapes):
            together = _joined(parts, whole[name])
            if together is None:
                found.append(f'{name} of shapes {", ".join(map(str, shapes))}, in place of parts '
                             f'of {tuple(whole[name].shape)}')
            else:
                joined[name] = together
    return found + _reals_differ(whole, joined, tolerance)


def _reals_differ(expected: NamedTensors, found: NamedTensors, tolerance: float) -> list[str]:
    """Return differences in what is found, but for integers and truths.

    These may differ by much where what they are made of differs by rounding.
    """
    reals = {name: x for name, x in found.items() if _is_real(x)}
    return differences({name: expected[name] for name in reals}, reals, tolerance)


def _is_real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _joined(parts: Sequence[Tensor], expected: Tensor) -> Tensor | None:
    """Return parts, put together by the dimension in which they are parts, if there is one."""
    for dim in range(expected.dim()):
        sizes = list(expected.shape)
        for x in parts:
            sizes[dim] = x.shape[dim] if dim < x.dim() else 0
            if list(x.shape) != sizes:
                break
        else:
            if sum(x.shape[dim] for x in parts) == expected.shape[dim]:
                return torch.cat(list(parts), dim)
    return None


def neither_mean_nor_sum(whole: NamedTensors, halves: Sequence[NamedTensors], sizes: Sequence[int],
                         tolerance: float) -> dict[str, str]:
    """Return numbers that are neither the mean nor the sum of those for halves of some sizes.

    Each comes with a text of what it is, and those for halves.
    """
    found = {}
    for name, x in whole.items():
        parts = [outputs[name] for outputs in halves if name in outputs]
        if x.numel() == 1 and _is_real(x) and [y.shape for y in parts] == [x.shape] * len(halves):
            mean = sum(y * (size / sum(sizes)) for y, size in zip(parts, sizes))
            scale = float(torch.stack([x, *parts]).abs().max())
            if all(distance(torch.as_tensor(each, dtype=x.dtype), x, scale) > tolerance
                   for each in (mean, sum(parts))):
                first, *others = (f'{y.item():.4g}' for y in (x, *parts))
                found[name] = f'{first} for the sample and {", ".join(others)} for halves'
    return found


def _grows_unevenly(model: nn.Module, sample: Any, half: Any, names: Sequence[str],
                    tolerance: float) -> list[str]:
    """Return which numbers neither stay as they are nor grow evenly if a half is repeated."""
    if not names:
        return []
    try:
        found = [_outputs(model, _repeated(half, sample, times), False) for times in (1, 2, 3)]
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
        if _is_real(x):
            kind = x.device.type
            lower = not x.is_cpu or torch.get_float32_matmul_precision() != 'highest'
            found.add(torch.float16 if lower and x.dtype == torch.float32 else x.dtype)
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                found.add(torch.get_autocast_dtype(kind))
    return max(map(default_tolerance, found), default=0.0)
