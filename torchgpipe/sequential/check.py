"""Compare a converted model with the original, and detect models that mix samples.

:func:`check_conversion` runs both models in copies, which share the parameters of the model. So
gradients are compared for the same parameters, and buffers and the state of layers do not change.
In training, both models get a micro-batch of the sample, and in evaluation the whole sample. This
detects a program that was recorded for one number of samples, and state that changes in each call.
A batch normalization in training cannot take a single sample, and a loss of padding alone has no
gradient. In these cases, the two inputs are exchanged, or the whole sample is used twice.

:func:`check_mixing` compares the model's results for the whole sample and for halves of it::

    sample    (8, 3)   ─▶  (8, 5)
    halves    (4, 3)   ─▶  (4, 5)  ┐ put together, they have to be the output for all of it
              (4, 3)   ─▶  (4, 5)  ┘

Both halves count. If a sample sees the samples before it, such as steps in time, the first half
alone would be correct. The check runs in evaluation, because batch normalizations mix samples in
training by design. A plain value, such as the number of samples, must be the same for the halves
as for the whole sample.

[Note: Losses that mix samples]
A scalar, such as a loss, must be the mean or the sum of the halves' scalars. If it is neither, the
samples are not necessarily mixed. A mean over tokens that are not padding is a mean of halves with
unknown weights. Therefore one half is repeated once, twice and three times. Then a sum grows
evenly, and a weighted mean stays the same. A loss that compares each sample with all others does
neither. For example, a contrastive loss grows as log(1), log(2), log(3). Such a model is refused.
Cases that cannot be distinguished, such as a loss of the hardest pair or a variance, give a
warning. A rule of ``GPipe(…, gather=…)`` combines the halves instead, and a scalar that differs is
refused.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.distance import (
    apart,
    arbitrary_loss,
    default_tolerance,
    distance,
    is_real,
    rounding,
    together,
)
from torchgpipe.base.structure import Path, call, flatten, flatten_nested, leaves_of, path_name
from torchgpipe.engine.microbatches import DEFAULT, MICRO_BATCH_MEAN, Chunk, gather, look_up
from torchgpipe.sequential.effects import (
    copied,
    copied_value,
    same_random_numbers,
    untouched,
    without_grad,
)
from torchgpipe.sequential.parts import Converted, original_names
from torchgpipe.sequential.patches import one_at_a_time
from torchgpipe.sequential.refusals import ConversionError

#: Tensors that result from a call, by description.
NamedTensors = dict[str, Tensor]


class Evaluated(NamedTuple):
    """A run of the original model in evaluation."""

    #: The copy that ran.
    model: nn.Module
    value: Any
    #: Its results, tensors and plain values, by path in the output.
    outputs: dict[Path, Any]


def check_conversion(
    module: nn.Module,
    converted: Converted,
    halves: Sequence[Any],
    number: int,
    sample: Any,
    advice: str,
) -> Evaluated:
    """Raise if the results of a converted model differ from the original's.

    Raises:
        ConversionError: Outputs, gradients or buffers differ. The message names them.
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
    """Return a copy of a module that has run in training, its input, and its results.

    The input is the whole sample if the results for a part of it are not finite.
    """
    original = copied(module)
    with (
        same_random_numbers(),
        _fails_by_size(
            lambda: value is not sample and _takes(original, sample, True, dict), Exception
        ),
    ):
        outputs, found = _run(original, value, True)
    tensors = [x for x in outputs.values() if isinstance(x, Tensor)]
    if value is sample or all(x.isfinite().all() for x in tensors):
        return original, value, found
    return _trained(module, sample, sample)


def _compare(
    copy: nn.Module, value: Any, training: bool, sample: Any, expected: NamedTensors, advice: str
) -> None:
    """Raise if the results of a copy of a converted model differ from the expected ones."""
    is_cut = value is not sample
    with (
        same_random_numbers(),
        _fails_by_mode(copy, sample, training),
        _fails_by_size(lambda: is_cut and _takes(copy, sample, training), ValueError),
    ):
        _, found = _run(copy, value, training, original_names)
    different = differences(expected, found)
    if different:
        mode = 'training' if training else 'evaluation'
        raise ConversionError(
            f'the converted model has other numbers than the model in {mode}: '
            f'{first_of(different)}. {advice}'
        )


def _run(
    module: nn.Module,
    value: Any,
    training: bool,
    original: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[dict[Path, Any], NamedTensors]:
    """Return outputs of a module, and tensors: outputs, buffers, and in training gradients.

    ``original`` maps names of the module to names of the original.
    """
    return untouched(module, partial(_run_once, module, value, training, original))


def _run_once(
    module: nn.Module,
    value: Any,
    training: bool,
    original: Callable[[dict[str, Any]], dict[str, Any]],
) -> tuple[dict[Path, Any], NamedTensors]:
    module.train(training)
    # Tensors that were made in inference mode have no graph.
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
        found.update(
            {
                f'gradient of {name}': grad
                for name, grad in zip(learning, grads)
                if grad is not None
            }
        )
    buffers = original(dict(module.named_buffers(remove_duplicate=False)))
    found.update(
        {f'buffer {name}': x.clone() for name, x in buffers.items() if '_constant_' not in name}
    )
    return outputs, {name: x.detach() for name, x in found.items()}


def evaluated(
    module: nn.Module, value: Any, is_cut: bool, seed: int = 0
) -> tuple[dict[Path, Any], NamedTensors]:
    """Return the outputs of a module in evaluation, and all tensors: outputs and buffers."""
    with same_random_numbers(seed), _fails_by_size(lambda: is_cut, Exception):
        return _run(module, value, False)


def tensors_of(outputs: dict[Path, Any]) -> NamedTensors:
    """Return the tensors of an output by their names."""
    return {
        f'output{path_name(path)}': x.detach()
        for path, x in outputs.items()
        if isinstance(x, Tensor)
    }


def differences(
    expected: NamedTensors, found: NamedTensors, tolerance: float | None = None
) -> list[str]:
    """Return the names of tensors that differ by more than rounding, with the differences.

    Rounding errors may reach the tolerance, by default the rounding of each tensor's type.
    """
    kinds = itemgetter(slice(6))  # 'output', 'gradient of …', 'buffer …'
    return [
        f'{name} by {far:.1e}'
        for name, far in apart(expected, found, kinds).items()
        if far > (rounding(expected.get(name)) if tolerance is None else tolerance)
    ]


def first_of(different: list[str]) -> str:
    """Return the first few of some differences, as a text."""
    more = f', and {len(different) - 8} others' if len(different) > 8 else ''
    return ', '.join(different[:8]) + more


@contextmanager
def _fails_by_size(does: Callable[[], bool], failure: type[Exception]) -> Iterator[None]:
    """Raise a :class:`ConversionError` instead, if the number of samples causes a failure."""
    try:
        yield
    except failure as error:
        if not does():
            raise
        raise ConversionError(
            'the model cannot be cut into micro-batches as it is, since its '
            f'program goes by their size: {error}'
        ) from error


@contextmanager
def _fails_by_mode(converted: nn.Module, sample: Any, training: bool) -> Iterator[None]:
    """Raise a :class:`ConversionError` instead, if a failure occurs in one mode only."""
    try:
        yield
    except AttributeError:  # Stages made by hand name the missing attribute.
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
            'is used in, by train() or eval() before, with check_sample=False'
        ) from error


def _takes(
    module: nn.Module,
    sample: Any,
    training: bool,
    original: Callable[[dict[str, Any]], dict[str, Any]] = original_names,
) -> bool:
    try:
        with same_random_numbers():
            _run(module, sample, training, original)
    except Exception:
        return False
    return True


def check_mixing(
    known: Evaluated,
    sample: Any,
    halves: Sequence[Any],
    sizes: Sequence[int],
    batch_dim: Any,
    rule: Any = None,
) -> None:
    """Raise if results for halves of a sample differ from the whole sample's, in evaluation.

    Raises:
        ConversionError: Samples are mixed.
    """
    with one_at_a_time, torch.inference_mode(False):
        model = known.model
        given = [
            known.outputs if x is known.value else evaluated(model, x, x is not sample)[0]
            for x in (sample, *halves)
        ]
        _check_plain_values(given)
        whole, *parts = map(tensors_of, given)
        tolerance = coarsest_tolerance((*model.parameters(), *model.buffers(), *whole.values()))
        rules = _rules(rule, given)
        different, wrong, unsure = _compare_halves(whole, parts, sizes, rules, tolerance)
        # Random numbers differ between sizes.
        if (
            not (different or wrong or unsure)
            or _reals_differ(parts[0], _outputs(model, halves[0], seed=1), tolerance)
            or _is_rounding(model, [sample, *halves], sizes, rules)
        ):
            return
        uneven = _grows_unevenly(model, sample, halves[0], [*unsure], tolerance)
    different += [f'{name}, {unsure[name]}' for name in uneven]
    if different:
        raise _mixes(different, batch_dim)
    if wrong:
        raise _other_rule(wrong)
    warnings.warn(
        f'{", ".join(f"{name} is {text}" for name, text in unsure.items())}. That is neither '
        'their mean nor their sum, so no word of GPipe(…, gather=…) gives it. A mean over '
        'anything but samples, such as tokens that are not padding: let a function count them, '
        "gather={'loss': lambda ids, mask, labels: (labels != -100).sum()}, which is called as "
        'the model is; or labels[:, 1:], where the model shifts them. Pass it to '
        'to_sequential(…, gather=…) as well, which checks it. A loss that compares '
        'samples: compute it of what the pipeline gives. A loss for each micro-batch that you '
        "accept although it differs, such as a router's: gather={'aux_loss': 'micro-batch mean'}. "
        'check_sample=False does not look',
        stacklevel=4,
    )


def _mixes(different: list[str], batch_dim: Any) -> ConversionError:
    return ConversionError(
        'the samples of a mini-batch are mixed, so the model cannot be cut into micro-batches'
        f' (batch_dim={batch_dim!r}): in evaluation, halves of the sample give other numbers '
        f'than all of it: {first_of(different)}. If the batch is in another dimension, say so: '
        'to_sequential(…, batch_dim=1) and GPipe(…, batch_dim=1). If an argument is the same for '
        'all samples, mark it: NoChunk(tensor). If the model compares samples, as a contrastive '
        'loss does, do so with what the pipeline gives. check_sample=False converts it as it is'
    )


def _other_rule(wrong: list[str]) -> ConversionError:
    return ConversionError(
        'gather gives other numbers for halves of the sample than the model for the whole sample, '
        f"in evaluation: {first_of(wrong)}. Use 'mean' for a mean over samples, 'sum' for a sum, "
        'or a function that counts the elements of any other mean. Compute a loss that compares '
        'samples from the output of the pipeline'
    )


def _rules(rule: Any, given: Sequence[dict[Path, Any]]) -> dict[str, Any]:
    """Return the rules of ``GPipe(…, gather=rule)`` by the names of outputs."""
    found = {}
    for path, x in given[0].items():
        each, named = look_up(rule, path)
        if (
            each not in (DEFAULT, None)
            and all(isinstance(outputs.get(path), Tensor) for outputs in given)
            and (named or isinstance(each, int) or x.dim() == 0)
        ):  # A single word is for scalars.
            found[f'output{path_name(path)}'] = each
    return found


def _compare_halves(
    whole: NamedTensors,
    halves: Sequence[NamedTensors],
    sizes: Sequence[int],
    rules: dict[str, Any],
    tolerance: float,
) -> tuple[list[str], list[str], dict[str, str]]:
    """Return mixed outputs, outputs with a wrong rule, and outputs that need a rule."""
    joined = {}
    for name, rule in rules.items():
        # The values of micro-batches stay apart, or the user accepts that they differ.
        if rule not in ('stack', MICRO_BATCH_MEAN):
            batches = [Chunk(*flatten({name: outputs[name]})) for outputs in halves]
            joined[name] = gather(batches, sizes, {name: rule})[name]
    without_rules = []
    for outputs in (whole, *halves):
        without_rules.append({name: x for name, x in outputs.items() if name not in rules})
    different, unsure = compare_parts(without_rules[0], without_rules[1:], sizes, tolerance)
    return different, _reals_differ(whole, joined, tolerance), unsure


def _check_plain_values(given: Sequence[dict[Path, Any]]) -> None:
    """Raise if an output that is not a tensor differs for halves of a sample."""
    for path, value in given[0].items():
        found = [value, *(outputs.get(path, value) for outputs in given[1:])]
        # Texts are compared, because NaN does not equal itself.
        if len({*map(repr, found)}) > 1 and not any(isinstance(x, Tensor) for x in found):
            name = path_name(path)
            whole, *parts = found
            raise ConversionError(
                'a plain value that the model returns depends on the samples, or on their number, '
                f'and a pipeline cannot combine the values of micro-batches: output{name} is '
                f'{whole!r} for the sample and {", ".join(map(repr, parts))} for halves. Compute '
                'it from the inputs or outputs of the pipeline; or return a tensor with an '
                'element for each sample. check_sample=False does not look'
            )


def _outputs(model: nn.Module, value: Any, seed: int = 0) -> NamedTensors:
    return tensors_of(evaluated(model, value, False, seed)[0])


def _is_rounding(
    model: nn.Module, values: list[Any], sizes: Sequence[int], rules: dict[str, Any]
) -> bool:
    """Return whether a run in float64 shows that the halves differ by rounding only."""
    try:
        double = deepcopy(model).double()
        found = []
        for value in values:
            tensors, kind = flatten_nested(value)
            found.append(
                _outputs(
                    double, kind([x.double() if x.is_floating_point() else x for x in tensors])
                )
            )
    except Exception:  # Not every model can compute in float64.
        return False
    whole, *parts = found
    return not any(_compare_halves(whole, parts, sizes, rules, 1e-6))


def compare_parts(
    whole: NamedTensors, halves: Sequence[NamedTensors], sizes: Sequence[int], tolerance: float
) -> tuple[list[str], dict[str, str]]:
    """Compare outputs for a whole sample with outputs for its halves.

    ``GPipe(…, gather=…)`` decides on outputs without a batch dimension. Rounding errors may reach
    the tolerance.

    Returns:
        Descriptions of the outputs for halves that are not halves of the output. The names and
        values of scalars that are neither the mean nor the sum of the halves' scalars.
    """
    found = []
    unsure = {}
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
    """Return the differences, except in integers and booleans.

    These may differ by much if the values that they are computed from differ by rounding.
    """
    reals = {name: x for name, x in found.items() if is_real(x)}
    return differences({name: expected[name] for name in reals}, reals, tolerance)


def _grows_unevenly(
    model: nn.Module, sample: Any, half: Any, names: Sequence[str], tolerance: float
) -> list[str]:
    """Return the scalars that neither stay the same nor grow evenly if a half is repeated."""
    if not names:
        return []
    try:
        found = [_outputs(model, _repeated(half, sample, times)) for times in (1, 2, 3)]
    except Exception:  # The model does not take this number of samples.
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
    """Return a half of a sample, repeated along the dimension that was cut."""
    tensors, kind = flatten_nested(half)
    wholes, _ = flatten_nested(sample)
    repeated = []
    for x, whole in zip(tensors, wholes):
        cut = [dim for dim, size in enumerate(x.shape) if size != whole.shape[dim]]
        repeated.append(torch.cat([x] * times, cut[0]) if cut else x)
    return kind(repeated)


def coarsest_tolerance(tensors: Iterable[Tensor]) -> float:
    """Return the largest rounding error to expect in the least precise of some tensors.

    Other sizes use other kernels, which round differently. Under autocast or with TF32, kernels
    may compute with less precision than their inputs have. TF32 has the precision of float16.
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
