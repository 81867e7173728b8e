"""Determine by experiments why the results of a wrapped model differ from the unwrapped model."""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.base.structure import Arguments, Path, leaves_of, path_name
from torchgpipe.testing.differences import (Difference, compare, culprit, where_in_backward,
                                            where_in_the_pipeline)
from torchgpipe.testing.training import InParts, Setup, Whole, Wrapped

__all__ = ['ways_out', 'why_of_micro_batches', 'why_of_the_pipeline']

Form = Callable[[Setup], Whole]

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
            return not compare(self.expected(self.setup), actual(other), self.steps,
                               self.setup.rounding).differences
        except Exception:  # The form does not run with these options.
            return False

    def repeat(self) -> list[str]:
        """Return a reason if the unwrapped model has other numbers each time; otherwise none."""
        return [] if self.agree(self.expected, {}) else [
            'the unwrapped model has other numbers each time that it runs from the same state and '
            'seed: it draws from something that torch.manual_seed does not set, or keeps '
            'something outside of itself. Nothing can be said until it repeats itself']

    def try_all(self, remedies: Iterator[WayOut]) -> list[str]:
        """Return the reason of the first options with right numbers, if there are any."""
        return next(([text] for options, text in remedies if self.agree(self.actual, options)), [])


def why_of_micro_batches(setup: Setup, differences: Sequence[Difference]) -> list[str]:
    """Return why the layers have other numbers on micro-batches than on the mini-batch."""
    steps, first = _first_of(differences)
    forms = Forms(setup, Whole, InParts, steps)
    return (forms.repeat() or forms.try_all(_other_dimensions(setup))
            or culprit(setup, steps - 1) or _buffers(first)
            or ['every module gives the same on micro-batches, but something in backward does '
                'not: a hook or an autograd function whose gradient is not a sum over samples'
                + where_in_backward(setup, first)])


def why_of_the_pipeline(setup: Setup, differences: Sequence[Difference]) -> list[str]:
    """Return why the pipeline has other numbers than the layers on the same micro-batches."""
    steps, first = _first_of(differences)
    forms = Forms(setup, InParts, Wrapped, steps)
    if repeat := forms.repeat():
        return repeat
    reason, = forms.try_all(_less_machinery(setup)) or [
        "it is neither recomputation nor threads: with checkpoint='never' on one device the "
        'numbers are no better. Perhaps a layer changes something through tensor.data, or asks '
        'whether it is in a pipeline']
    return [reason + where_in_the_pipeline(setup, first, steps - 1)]


def _first_of(differences: Sequence[Difference]) -> tuple[int, list[Difference]]:
    """Return the first step with differences, and these."""
    steps = min(difference.step for difference in differences)
    return steps, [difference for difference in differences if difference.step == steps]


def ways_out(setup: Setup, steps: int) -> list[str]:
    """Return options with which a model does not raise and has the right numbers."""
    simpler = ((options, 'with ' + ', '.join(f'{name}={x!r}' for name, x in options.items())
                + ' it does not raise and the numbers are right')
               for options, _ in _less_machinery(setup))
    return (Forms(setup, Whole, InParts, steps).try_all(_other_dimensions(setup))
            or Forms(setup, InParts, Wrapped, steps).try_all(simpler))


def _other_dimensions(setup: Setup) -> Iterator[WayOut]:
    """Yield options with other dimensions of inputs and outputs."""
    said = setup.options.get('batch_dim', 0)
    if isinstance(said, int):
        split = [leaf for leaf in leaves_of(setup.sample) if isinstance(leaf.value, Tensor)
                 and leaf.value.dim() > 0 and not leaf.shared]
        for dim in range(min((leaf.value.dim() for leaf in split), default=0)):
            if dim != said:
                yield {'batch_dim': dim}, (
                    f'dimension {said} is not the batch: with batch_dim={dim} the numbers are '
                    'those of the unwrapped model')
        if said == 0:
            yield from _shared([leaf.path for leaf in split], isinstance(setup.sample, Arguments))
    for rule in ('mean', 'sum'):
        if setup.options.get('gather') is not None:
            yield {'gather': rule}, (
                'scalars of the output are gathered by another rule than they need: with '
                f'gather={rule!r} the numbers are those of the unwrapped model')


def _shared(paths: Sequence[Path], several: bool) -> Iterator[WayOut]:
    """Yield options in which micro-batches share one or two parts of the input."""
    parts = dict.fromkeys(path[:k] for path in paths for k in range(1 + several, len(path) + 1))
    for some in (*combinations(parts, 1), *combinations(parts, 2)):
        names = ' and '.join(path_name(part)[1:] if several else f'input{path_name(part)}'
                             for part in some)
        yield {'batch_dim': _rule([part[several:] for part in some])}, (
            f'{names} was split, and is the same for all samples: with NoChunk(…) around it the '
            'numbers are those of the unwrapped model')


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
    """Yield options without recomputation, without threads, and without both."""
    never = {'checkpoint': 'never'}
    one_thread = {'devices': [setup.options['devices'][0]] * len(setup.balance)}
    yield never, ("recomputation: with checkpoint='never' the numbers are right. A layer does "
                  'something else the second time, by what it keeps outside of its attributes and '
                  'buffers; is_recomputing() tells the passes apart')
    yield one_thread, ('threads: with all partitions on one device the numbers are right. Layers '
                       'share something, or look at something of the calling thread, such as a '
                       'threading.local')
    yield {**never, **one_thread}, (
        "recomputation and threads: with checkpoint='never' and all partitions on one device the "
        'numbers are right. A layer looks at something outside of its attributes and buffers')


def _buffers(differences: Sequence[Difference]) -> list[str]:
    """Return a reason about buffers that change with each micro-batch."""
    names = [each.name for each in differences if each.kind == 'buffers']
    if not names:
        return []
    return [f"buffers move with each micro-batch, not once per mini-batch: '{names[0]}' and "
            f'{len(names) - 1} more. Let that be done outside of forward']
