"""Differences of two models: tensors after a step, the first module that differs, and reasons."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import rng_states
from torchgpipe.base.distance import apart, close, split_dim, together
from torchgpipe.base.private import BatchNorm
from torchgpipe.base.structure import Arguments, Path, leaves_of, path_name
from torchgpipe.engine.microbatches import cut
from torchgpipe.testing.runs import RESULTS, InParts, Record, Setup, Unwrapped, Wrapped


class Difference(NamedTuple):
    """The distance of a tensor from its expected value.

    Attributes:
        kind: ``'outputs'`` (and the loss), ``'gradients'``, ``'buffers'`` or ``'parameters'``.
        name: The name of the tensor: ``output['y']``, or the name of a parameter or buffer.
        step: The first step in which it differs, counted from 1.
        distance: The largest difference of two elements in that step, relative to the largest
            element of the tensor, or of a typical tensor of its kind if that is larger. For
            integers it is the difference itself; infinite if shapes differ or a tensor is missing.
    """

    kind: str
    name: str
    step: int
    distance: float


class Differences:
    """All differences in some steps.

    Attributes:
        differences: The first difference of each tensor, if there is one.
        tensors: Numbers of tensors that were compared, by kind.
        largest: The largest distance within the tolerance, by kind.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._found: dict[tuple[str, str], Difference] = {}
        self.tensors = dict.fromkeys(RESULTS, 0)
        self.largest = dict.fromkeys(RESULTS, 0.0)

    @property
    def differences(self) -> list[Difference]:
        """The differences, kind by kind, the largest first."""
        return sorted(
            self._found.values(),
            key=lambda each: (RESULTS.index(each.kind), each.step, -each.distance),
        )

    def add(self, step: int, expected: Record, actual: Record) -> None:
        """Compare the results of a step, counted from 0."""
        for kind, number in Counter(kind for kind, _ in {**expected, **actual}).items():
            self.tensors[kind] = max(self.tensors[kind], number)
        for (kind, name), found in apart(expected, actual, itemgetter(0)).items():
            if found <= self._tolerance:
                self.largest[kind] = max(self.largest[kind], found)
            else:
                self._found.setdefault((kind, name), Difference(kind, name, step + 1, found))


def compare(expected: Unwrapped, actual: Unwrapped, steps: int, tolerance: float) -> Differences:
    """Train two models in parallel, and compare all results of each step.

    Raises:
        ValueError: The loss of the first model is not finite, so there is nothing to compare.
    """
    comparison = Differences(tolerance)
    for step in range(steps):
        record = expected.step(step)
        loss = record['outputs', 'loss']
        if not loss.isfinite().all():
            raise ValueError(
                f'the loss of the unwrapped model is {loss.tolist()} in step '
                f'{step + 1}, so there is nothing to compare; take fewer steps, or '
                'an optimizer with a smaller learning rate'
            )
        comparison.add(step, record, actual.step(step))
    return comparison


@dataclass
class ModuleCall:
    """A call of a module."""

    name: str
    module: nn.Module
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = ()
    drew: bool = False
    changed: bool = False
    states: Sequence[Tensor] = field(default=(), repr=False)
    inner_drew: bool = False


def recorded_calls(model: nn.Module, device: torch.device) -> list[ModuleCall]:
    """Return a list to which each call of the modules in a model is added when it ends."""
    found: list[ModuleCall] = []
    begun: dict[int, list[ModuleCall]] = defaultdict(list)  # by thread
    names = {module: name for name, module in model.named_modules() if name}

    def states() -> list[Tensor]:
        return [*rng_states([device]).values()]

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        begun[threading.get_ident()].append(
            ModuleCall(names[module], module, _copies((args, kwargs)), states=states())
        )

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outer = begun[threading.get_ident()]
        call = outer.pop()
        call.outputs = _copies(output)
        call.changed = not _equal(call.inputs, _copies((args, kwargs)))
        drew = not _equal(call.states, states())
        call.drew = drew and not call.inner_drew
        if drew and outer:
            outer[-1].inner_drew = True
        found.append(call)

    for module in names:
        module.register_forward_pre_hook(begin, with_kwargs=True)
        module.register_forward_hook(end, with_kwargs=True)
    return found


def _copies(value: Any) -> list[Tensor]:
    return [
        leaf.value.detach().clone() for leaf in leaves_of(value) if isinstance(leaf.value, Tensor)
    ]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others))


def _trace(form: Callable[[Setup], Unwrapped], setup: Setup, step: int = 0) -> list[ModuleCall]:
    """Return the calls of modules in the forward pass of a step, counted from 0."""
    trained = form(setup)
    for before in range(step):
        trained.step(before)
    calls = recorded_calls(trained.model, setup.device_of(0))
    trained.forward(step)
    return calls


def quiet(setup: Setup) -> tuple[Setup, list[str]]:
    """Put modules that draw into evaluation mode; return names of ones that still draw."""
    while True:
        names = {call.name for call in _trace(Unwrapped, setup) if call.drew}
        if names <= setup.quiet:
            return setup, sorted(names)
        setup = replace(setup, quiet=setup.quiet | names)


def culprit(setup: Setup, step: int) -> list[str]:
    """Return the first module with different outputs for the same inputs, and the reason."""
    sizes = cut(setup.input(), int(setup.options['chunks']), setup.options.get('batch_dim', 0))[1]
    calls = _trace(Unwrapped, setup, step), _trace(InParts, setup, step)
    for call, outputs in _wrong(*calls, sizes):
        return [f'{_first(call)}: {_why(call, outputs)}']
    return []


def where_in_the_pipeline(setup: Setup, differences: Sequence[Difference], step: int) -> str:
    """Return the first module whose outputs differ in the pipeline, as a sentence."""
    for call, _ in _wrong(_trace(InParts, setup, step), _trace(Wrapped, setup, step), [1]):
        return f'. {_first(call)}'
    return where_in_backward(setup, differences)


def where_in_backward(setup: Setup, differences: Sequence[Difference]) -> str:
    """Return the first parameter in backward with another gradient, as a sentence."""
    outputs = [each.name for each in differences if each.kind == 'outputs']
    if outputs == ['loss']:  # Then backward begins with other gradients.
        return ''
    wrong = {each.name for each in differences if each.kind == 'gradients'}
    names = [name for name, _ in setup.module.named_parameters() if name in wrong]
    if names:
        return f". Backward is right until it comes to '{names[-1]}'"
    return ''


def _first(call: ModuleCall) -> str:
    return f"'{call.name}' ({type(call.module).__name__}) is the first module to differ"


def _wrong(
    whole: Sequence[ModuleCall], parts: Sequence[ModuleCall], sizes: Sequence[int]
) -> Iterator[tuple[ModuleCall, 'Apart']]:
    """Yield the calls with different outputs for the same inputs."""
    for call, calls in _pairs(whole, parts, len(sizes)):
        outputs = _apart(call.outputs, [each.outputs for each in calls], sizes)
        if outputs and (
            call.changed or not _apart(call.inputs, [each.inputs for each in calls], sizes)
        ):
            yield call, outputs


def _pairs(
    whole: Sequence[ModuleCall], parts: Sequence[ModuleCall], m: int
) -> Iterator[tuple[ModuleCall, list[ModuleCall]]]:
    """Yield each call, with the m calls that should return the same."""
    number: dict[str, int] = {}
    for call in whole:
        k = number[call.name] = number.get(call.name, -1) + 1
        calls = [each for each in parts if each.name == call.name]
        if len(calls) % m == 0 and k < len(calls) // m:
            yield call, calls[k :: len(calls) // m]


#: Tensors of the mini-batch, each with the tensors of micro-batches that do not combine to it.
Apart = list[tuple[Tensor, list[Tensor]]]


def _apart(
    whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]
) -> Apart:
    """Return the tensors that micro-batches do not give, neither combined nor by themselves."""
    apart = []
    for x, *xs in zip(whole, *parts):
        combined = together(x, xs, sizes)
        if not any(close(y, x) for y in combined) and not all(close(y, x) for y in xs):
            apart.append((x, xs))
    return apart


def _first_is_right(x: Tensor, xs: Sequence[Tensor]) -> bool:
    """Return whether the first micro-batch is right."""
    dim = split_dim(x, xs)
    return dim is not None and close(xs[0], x.narrow(dim, 0, xs[0].shape[dim]))


def _why(call: ModuleCall, outputs: Apart) -> str:
    """Return the reason why a module differs."""
    if call.changed:
        return (
            'it changes its input in place, and so for each micro-batch what all of them '
            'share, or what another one reads. Let it not work in place'
        )
    if isinstance(call.module, BatchNorm):
        return (
            'batch normalization, which normalises each micro-batch by its own mean and '
            'variance, as GPipe trains; with deferred_batch_norm=True running statistics move '
            'once per mini-batch. Evaluation mode, or a norm within each sample, has no '
            'difference'
        )
    if all(y.shape == x.shape for x, xs in outputs for y in xs):
        return (
            'it gives something of a whole batch, and those of micro-batches make that of the '
            'mini-batch neither by their mean, weighted by samples, nor by their sum. A mean '
            'over something else than samples, as over tokens that are not masked? Give sum '
            'and number, and divide after the pipeline'
        )
    if all(_first_is_right(x, xs) for x, xs in outputs):
        return (
            'the first micro-batch is right, and later ones are not: it keeps something from '
            'call to call, and is called for each micro-batch here'
        )
    return (
        'what it gives for a sample depends on which others are in its batch. A normalisation '
        'or a mean over the batch, or over a dimension that it takes for another one?'
    )


Form = Callable[[Setup], Unwrapped]

#: Options to try, and the reason to report if the numbers are right with them.
WayOut = tuple[dict[str, Any], str]


class Forms(NamedTuple):
    """A form of a model with the right numbers, another one, and their number of steps."""

    setup: Setup
    expected: Form
    actual: Form
    steps: int

    def agree(self, actual: Form, options: dict[str, Any]) -> bool:
        """Return whether a form, with other options, has the right numbers."""
        other = replace(self.setup, options={**self.setup.options, **options})
        try:
            return not compare(
                self.expected(self.setup), actual(other), self.steps, self.setup.rounding
            ).differences
        except Exception:  # The form does not run with these options.
            return False

    def repeat(self) -> list[str]:
        """Return a reason if the unwrapped model has other numbers each time; otherwise none."""
        if self.agree(self.expected, {}):
            return []
        return [
            'the unwrapped model has other numbers each time that it runs from the same state '
            'and seed: it draws from something that torch.manual_seed does not set, or keeps '
            'something outside of itself. Nothing can be said until it repeats itself'
        ]

    def try_all(self, remedies: Iterator[WayOut]) -> list[str]:
        """Return the reason of the first options with right numbers, if there are any."""
        return next(([text] for options, text in remedies if self.agree(self.actual, options)), [])


def why_of_micro_batches(setup: Setup, differences: Sequence[Difference]) -> list[str]:
    """Return why the layers have other numbers on micro-batches than on the mini-batch."""
    steps, first = _first_of(differences)
    forms = Forms(setup, Unwrapped, InParts, steps)
    return (
        forms.repeat()
        or forms.try_all(_other_dimensions(setup))
        or culprit(setup, steps - 1)
        or _buffers(first)
        or [
            'every module gives the same on micro-batches, but something in backward does '
            'not: a hook or an autograd function whose gradient is not a sum over samples'
            + where_in_backward(setup, first)
        ]
    )


def why_of_the_pipeline(setup: Setup, differences: Sequence[Difference]) -> list[str]:
    """Return why the pipeline has other numbers than the layers on the same micro-batches."""
    steps, first = _first_of(differences)
    forms = Forms(setup, InParts, Wrapped, steps)
    if repeat := forms.repeat():
        return repeat
    (reason,) = forms.try_all(_less_machinery(setup)) or [
        "it is neither recomputation nor threads: with checkpoint='never' on one device the "
        'numbers are no better. Perhaps a layer changes something through tensor.data, or asks '
        'whether it is in a pipeline'
    ]
    return [reason + where_in_the_pipeline(setup, first, steps - 1)]


def _first_of(differences: Sequence[Difference]) -> tuple[int, list[Difference]]:
    """Return the first step with differences, and these."""
    steps = min(difference.step for difference in differences)
    return steps, [difference for difference in differences if difference.step == steps]


def ways_out(setup: Setup, steps: int) -> list[str]:
    """Return options with which a model does not raise and has the right numbers."""
    dimensions = Forms(setup, Unwrapped, InParts, steps).try_all(_other_dimensions(setup))
    if dimensions:
        return dimensions
    return Forms(setup, InParts, Wrapped, steps).try_all(_simpler(setup))


def _simpler(setup: Setup) -> Iterator[WayOut]:
    """Yield options without parts of the engine, described by their values."""
    for options, _ in _less_machinery(setup):
        settings = ', '.join(f'{name}={x!r}' for name, x in options.items())
        yield options, f'with {settings} it does not raise and the numbers are right'


def _other_dimensions(setup: Setup) -> Iterator[WayOut]:
    """Yield options with other dimensions of inputs and outputs."""
    said = setup.options.get('batch_dim', 0)
    if isinstance(said, int):
        split = [
            leaf
            for leaf in leaves_of(setup.sample)
            if isinstance(leaf.value, Tensor) and leaf.value.dim() > 0 and not leaf.shared
        ]
        for dim in range(min((leaf.value.dim() for leaf in split), default=0)):
            if dim != said:
                yield (
                    {'batch_dim': dim},
                    (
                        f'dimension {said} is not the batch: with batch_dim={dim} the numbers are '
                        'those of the unwrapped model'
                    ),
                )
        if said == 0:
            yield from _shared([leaf.path for leaf in split], isinstance(setup.sample, Arguments))
    for rule in ('mean', 'sum'):
        if setup.options.get('gather') is not None:
            yield (
                {'gather': rule},
                (
                    'scalars of the output are gathered by another rule than they need: with '
                    f'gather={rule!r} the numbers are those of the unwrapped model'
                ),
            )


def _shared(paths: Sequence[Path], several: bool) -> Iterator[WayOut]:
    """Yield options in which micro-batches share one or two parts of the input."""
    parts = dict.fromkeys(path[:k] for path in paths for k in range(1 + several, len(path) + 1))
    for some in (*combinations(parts, 1), *combinations(parts, 2)):
        names = ' and '.join(
            path_name(part)[1:] if several else f'input{path_name(part)}' for part in some
        )
        yield (
            {'batch_dim': _rule([part[several:] for part in some])},
            (
                f'{names} was split, and is the same for all samples: with NoChunk(…) around it '
                'the numbers are those of the unwrapped model'
            ),
        )


def _rule(paths: Sequence[Path]) -> dict[Any, Any]:
    """Return the rule that is ``None`` for some paths."""
    rule: dict[Any, Any] = {}
    for path in paths:
        inner = rule
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = None
    return rule


def _less_machinery(setup: Setup) -> Iterator[WayOut]:
    """Yield options without parts of the engine.

    These are a simpler schedule, no recomputation, no threads, and the plain call.
    """
    schedule = setup.options.get('schedule')
    if schedule not in (None, '1f1b'):
        yield (
            {'schedule': '1f1b'},
            (
                "the schedule: with schedule='1f1b' the numbers are right. If backward is in two "
                'halves (I and W), a layer changes an input of the second half in between, or '
                'computes gradients itself'
            ),
        )
    never = {'checkpoint': 'never'}
    one_thread = {'devices': [setup.options['devices'][0]] * len(setup.balance)}
    yield (
        never,
        (
            "recomputation: with checkpoint='never' the numbers are right. A layer does "
            'something else the second time, by what it keeps outside of its attributes and '
            'buffers; is_recomputing() tells the passes apart'
        ),
    )
    yield (
        one_thread,
        (
            'threads: with all partitions on one device the numbers are right. Layers '
            'share something, or look at something of the calling thread, such as a '
            'threading.local'
        ),
    )
    yield (
        {**never, **one_thread},
        (
            "recomputation and threads: with checkpoint='never' and all partitions on one device "
            'the numbers are right. A layer looks at something outside of its attributes and '
            'buffers'
        ),
    )
    if schedule is not None:
        yield (
            {'schedule': None},
            (
                'the step: with the plain call, and so with the loss of the mini-batch, the '
                'numbers are right. A step combines the losses of micro-batches, so the loss has '
                'to be a mean over samples'
            ),
        )


def _buffers(differences: Sequence[Difference]) -> list[str]:
    """Return a reason about buffers that change with each micro-batch."""
    names = [each.name for each in differences if each.kind == 'buffers']
    if not names:
        return []
    return [
        f"buffers move with each micro-batch, not once per mini-batch: '{names[0]}' and "
        f'{len(names) - 1} more. Let that be done outside of forward'
    ]
