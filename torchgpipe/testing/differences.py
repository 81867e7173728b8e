"""Compare what comes of the steps of two models, tensor by tensor."""
import math
from typing import NamedTuple

from torchgpipe.distance import distance, typical_size
from torchgpipe.testing.training import RESULTS, Record, Whole

__all__ = ['Comparison', 'Difference', 'compare']


class Difference(NamedTuple):
    """How far a tensor is from what it should be.

    Attributes:
        kind: ``'outputs'`` (and the loss), ``'gradients'``, ``'buffers'`` or ``'parameters'``.
        name: Which tensor: ``output['y']``, or the name of a parameter or buffer.
        step: The first step in which it differs, counted from 1.
        distance: The largest difference of two elements in that step, relative to the largest
            element of the tensor, or of a typical one of its kind if that is larger. Of integers
            it is the difference itself; infinite, if shapes differ or one is missing.
    """

    kind: str
    name: str
    step: int
    distance: float


class Comparison:
    """All differences in some steps.

    Attributes:
        differences: Of each tensor the first one, if it has any.
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
        """Compare what came of a step, the first of which is 0."""
        for kind in RESULTS:
            names = dict.fromkeys(name for of, name in [*expected, *actual] if of == kind)
            self.tensors[kind] = max(self.tensors[kind], len(names))
            typical = typical_size([x for (of, _), x in expected.items() if of == kind])
            for name in names:
                a, b = actual.get((kind, name)), expected.get((kind, name))
                found = math.inf if a is None or b is None else distance(a, b, typical)
                if found <= self._tolerance:
                    self.largest[kind] = max(self.largest[kind], found)
                else:
                    self._found.setdefault((kind, name), Difference(kind, name, step + 1, found))


def compare(expected: Whole, actual: Whole, steps: int, tolerance: float) -> Comparison:
    """Train two models side by side, and compare all that comes of each step.

    Raises:
        ValueError: The loss of the first is not finite, so nothing could be told.
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
