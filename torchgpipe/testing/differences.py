"""Differences of two models: the tensors after a step, and the first module that differs."""
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import rng_states
from torchgpipe.base.distance import apart, close, split_dim, together
from torchgpipe.base.private import BatchNorm
from torchgpipe.base.structure import leaves_of
from torchgpipe.engine.microbatches import cut
from torchgpipe.testing.training import RESULTS, InParts, Record, Setup, Whole, Wrapped

__all__ = ['Comparison', 'Difference', 'compare', 'culprit', 'quiet', 'recorded_calls',
           'where_in_backward', 'where_in_the_pipeline']


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


class Comparison:
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
        return sorted(self._found.values(), key=lambda each: (RESULTS.index(each.kind), each.step,
                                                              -each.distance))

    def add(self, step: int, expected: Record, actual: Record) -> None:
        """Compare the results of a step, counted from 0."""
        for kind, number in Counter(kind for kind, _ in {**expected, **actual}).items():
            self.tensors[kind] = max(self.tensors[kind], number)
        for (kind, name), found in apart(expected, actual, itemgetter(0)).items():
            if found <= self._tolerance:
                self.largest[kind] = max(self.largest[kind], found)
            else:
                self._found.setdefault((kind, name), Difference(kind, name, step + 1, found))


def compare(expected: Whole, actual: Whole, steps: int, tolerance: float) -> Comparison:
    """Train two models in parallel, and compare all results of each step.

    Raises:
        ValueError: The loss of the first model is not finite, so there is nothing to compare.
    """
    comparison = Comparison(tolerance)
    for step in range(steps):
        record = expected.step(step)
        loss = record['outputs', 'loss']
        if not loss.isfinite().all():
            raise ValueError(f'the loss of the unwrapped model is {loss.tolist()} in step '
                             f'{step + 1}, so there is nothing to compare; take fewer steps, or '
                             'an optimizer with a smaller learning rate')
        comparison.add(step, record, actual.step(step))
    return comparison


@dataclass
class ModuleCall:
    """A call of a module.

    Attributes:
        name: The module's name in the model.
        module: The module.
        inputs: Copies of the tensors among its arguments.
        outputs: Copies of the tensors that it returned.
        drew: Whether it drew random numbers itself, not in an inner module.
        changed: Whether it changed an input in place.
    """

    name: str
    module: nn.Module
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = ()
    drew: bool = False
    changed: bool = False
    states: Sequence[Tensor] = field(default=(), repr=False)
    inner_drew: bool = False


def recorded_calls(model: nn.Module, device: torch.device) -> list[ModuleCall]:
    """Return a list to which each call of the modules in a model is added when it ends.

    Args:
        model: The model. Each call of a module ends in the thread in which it began.
        device: A device on which it may draw random numbers, besides the CPU.
    """
    found: list[ModuleCall] = []
    begun: dict[int, list[ModuleCall]] = defaultdict(list)  # by thread
    names = {module: name for name, module in model.named_modules() if name}

    def states() -> list[Tensor]:
        return [*rng_states([device]).values()]

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        begun[threading.get_ident()].append(ModuleCall(
            names[module], module, _copies((args, kwargs)), states=states()))

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
    return [leaf.value.detach().clone() for leaf in leaves_of(value)
            if isinstance(leaf.value, Tensor)]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others))


def _trace(form: Callable[[Setup], Whole], setup: Setup, step: int = 0) -> list[ModuleCall]:
    """Return the calls of modules in the forward pass of a step, counted from 0."""
    trained = form(setup)
    for before in range(step):
        trained.step(before)
    calls = recorded_calls(trained.model, setup.device_of(0))
    trained.forward(step)
    return calls


def quiet(setup: Setup) -> tuple[Setup, list[str]]:
    """Put modules that draw random numbers into evaluation mode.

    Returns:
        The setup with these modules, and the names of modules that still draw.
    """
    while True:
        names = {call.name for call in _trace(Whole, setup) if call.drew}
        if names <= setup.quiet:
            return setup, sorted(names)
        setup = replace(setup, quiet=setup.quiet | names)


def culprit(setup: Setup, step: int) -> list[str]:
    """Return the first module with different outputs for the same inputs, and the reason."""
    sizes = cut(setup.input(), int(setup.options['chunks']), setup.options.get('batch_dim', 0))[1]
    calls = _trace(Whole, setup, step), _trace(InParts, setup, step)
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
    wrong = {each.name for each in differences if each.kind == 'gradients'}
    names = [name for name, _ in setup.module.named_parameters() if name in wrong]
    return f". Backward is right until it comes to '{names[-1]}'" if names else ''


def _first(call: ModuleCall) -> str:
    return f"'{call.name}' ({type(call.module).__name__}) is the first module to differ"


def _wrong(whole: Sequence[ModuleCall], parts: Sequence[ModuleCall], sizes: Sequence[int]
           ) -> Iterator[tuple[ModuleCall, 'Apart']]:
    """Yield the calls with different outputs for the same inputs."""
    for call, calls in _pairs(whole, parts, len(sizes)):
        outputs = _apart(call.outputs, [each.outputs for each in calls], sizes)
        if outputs and (call.changed or not _apart(
                call.inputs, [each.inputs for each in calls], sizes)):
            yield call, outputs


def _pairs(whole: Sequence[ModuleCall], parts: Sequence[ModuleCall], m: int
           ) -> Iterator[tuple[ModuleCall, list[ModuleCall]]]:
    """Yield each call, with the m calls that should return the same."""
    number: dict[str, int] = {}
    for call in whole:
        k = number[call.name] = number.get(call.name, -1) + 1
        calls = [each for each in parts if each.name == call.name]
        if len(calls) % m == 0 and k < len(calls) // m:
            yield call, calls[k::len(calls) // m]


#: Tensors of the mini-batch, each with the tensors of micro-batches that do not combine to it.
Apart = list[tuple[Tensor, list[Tensor]]]


def _apart(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]
           ) -> Apart:
    """Return the tensors that micro-batches do not give, neither combined nor by themselves."""
    return [(x, xs) for x, *xs in zip(whole, *parts)
            if not any(close(y, x) for y in together(x, xs, sizes))
            and not all(close(y, x) for y in xs)]


def _first_is_right(x: Tensor, xs: Sequence[Tensor]) -> bool:
    """Return whether the first micro-batch is right."""
    dim = split_dim(x, xs)
    return dim is not None and close(xs[0], x.narrow(dim, 0, xs[0].shape[dim]))


def _why(call: ModuleCall, outputs: Apart) -> str:
    """Return the reason why a module differs."""
    if call.changed:
        return ('it changes its input in place, and so for each micro-batch what all of them '
                'share, or what another one reads. Let it not work in place')
    if isinstance(call.module, BatchNorm):
        return ('batch normalization, which normalises each micro-batch by its own mean and '
                'variance, as GPipe trains; with deferred_batch_norm=True running statistics move '
                'once per mini-batch. Evaluation mode, or a norm within each sample, has no '
                'difference')
    if all(y.shape == x.shape for x, xs in outputs for y in xs):
        return ('it gives something of a whole batch, and those of micro-batches make that of the '
                'mini-batch neither by their mean, weighted by samples, nor by their sum. A mean '
                'over something else than samples, as over tokens that are not masked? Give sum '
                'and number, and divide after the pipeline')
    if all(_first_is_right(x, xs) for x, xs in outputs):
        return ('the first micro-batch is right, and later ones are not: it keeps something from '
                'call to call, and is called for each micro-batch here')
    return ('what it gives for a sample depends on which others are in its batch. A normalisation '
            'or a mean over the batch, or over a dimension that it takes for another one?')
