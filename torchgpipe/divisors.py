"""The divisors of losses, recorded while a loss function runs, and compared with weights.

The loss of a mini-batch is a weighted sum of the losses of micro-batches. It is exact if each
micro-batch divides by a number that is proportional to its weight::

    micro-batch        0           1           2
    loss               s0 / d0     s1 / d1     s2 / d2        s: a sum over elements
    weight             w0 / W      w1 / W      w2 / W         d / w is equal for all
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchgpipe.base.private import is_transformed

#: PyTorch's losses, each with its signature.
LOSSES = {
    function: signature
    for function in vars(F).values()
    if inspect.isfunction(function)
    if 'reduction' in (signature := inspect.signature(function)).parameters
}

#: Losses whose mean is divided by the sum of ``weight``, which has the shape of the input.
BY_WEIGHT = (F.mse_loss, F.l1_loss)

#: Functions that divide a tensor, as the operator ``/`` does.
DIVISIONS = {
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ('div', 'div_', 'divide', 'divide_', 'true_divide', 'true_divide_')
    if hasattr(place, name)
}

#: Functions that multiply tensors, as the operator ``*`` does.
PRODUCTS = {
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ('mul', 'mul_', 'multiply', 'multiply_')
    if hasattr(place, name)
}

#: Functions that add up the elements of a tensor.
SUMS = {torch.sum, Tensor.sum}
#: Functions that take the mean of the elements of a tensor.
MEANS = {torch.mean, Tensor.mean}


def reduction_of(settings: Mapping[str, Any]) -> Any:
    """Return the reduction of a loss with some settings, also of the deprecated ones."""
    legacy = settings.get('size_average'), settings.get('reduce')
    if 'size_average' in settings and legacy != (None, None):  # has precedence in PyTorch
        return nn.L1Loss(*legacy).reduction
    return settings.get('reduction', 'mean')


def counted_labels(ignored: int | None, weight: Tensor | None, target: Tensor) -> Any:
    """Count a target as PyTorch's classification losses do, each class by its weight."""
    if target.is_floating_point():  # All probabilities count, equally many for each sample.
        return target.numel()
    kept = target != (-100 if ignored is None else ignored)
    if weight is None:
        return kept.sum()
    return (weight[target.where(kept, 0).long()] * kept).sum()


class Division(NamedTuple):
    """The division of a loss in one micro-batch.

    Args:
        elements: The number of elements; ``None`` if they are known to be of the samples, and not
            of parameters.
        divisor: A number or a tensor, which stays on the device, so that no thread waits for it.
    """

    name: str
    elements: int | None
    divisor: Any
    site: int


class LossMonitor(TorchFunctionMode):
    """Records the divisors of PyTorch's losses in a function, and detects that it returns a sum.

    It follows a loss that is not reduced (``reduction='none'``) to its sum or mean::

        F.cross_entropy(…, reduction='mean')       divided by the labels that count
        F.cross_entropy(…, reduction='sum') / n    divided by n
        (F.cross_entropy(…, reduction='none') * mask).sum() / mask.sum()
                unreduced        unreduced       sum    divided by mask.sum()

    It ignores compiled and transformed code, because values there do not persist; losses without
    a gradient, which are metrics; and a loss that a loop computes for each sample.

    Args:
        weights: The weight of the loss of each micro-batch, to which divisors are proportional:
            its count by a normalizer, or by default its samples.
        trusts: Whether a mean that is multiplied or divided by a tensor has other weights, which
            the given normalizer knows: ``F.cross_entropy(…) * count / len(target)``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
        trusts: bool = False,
        where: str = 'loss_fn',
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self._weights = sizes if weights is None else weights
        self._trusts = trusts
        self._where = where
        #: By micro-batch, its divisions.
        self._divisions: list[list[Division]] = [[] for _ in sizes]
        #: The sums of the current micro-batch, with their versions and numbers of elements.
        self._sums: list[tuple[Tensor, int, int | None]] = []
        #: The tensors of the current micro-batch that are losses without a reduction.
        self._unreduced: list[Tensor] = []
        #: The means of the current micro-batch, with the numbers of their divisions.
        self._means: list[tuple[Tensor, int]] = []

    def call(self, i: int, function: Callable[..., Any], *given: Any) -> tuple[Any, bool]:
        """Call a function for micro-batch ``i``; return its loss, and whether that is a sum."""
        self._i = i
        self._learns = torch.is_grad_enabled()
        try:
            with self:
                loss = function(*given)
            is_sum = any(loss is x and x._version == version for x, version, _ in self._sums)
            return loss, is_sum
        finally:
            # They hold graphs.
            self._sums = []
            self._unreduced = []
            self._means = []

    def see(self, i: int, function: Callable[..., Any], *given: Any) -> Any:
        """Call a layer's function for micro-batch ``i``, and record the divisors of losses."""
        # Other layers may run concurrently.
        monitor = LossMonitor(self._sizes, self._weights, where='a layer')
        result, _ = monitor.call(i, function, *given)
        self._divisions[i] += monitor._divisions[i]
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in LOSSES or torch.compiler.is_compiling():
            result = func(*args, **kwargs)
            if self._sums or self._unreduced or self._trusts:
                self._follow(func, [*args, *kwargs.values()], result)
            return result
        bound = LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        if func is F.l1_loss and bound.arguments['weight'] is None:
            bound.arguments['weight'] = _weight_of_l1_loss()
        result = func(*bound.args, **bound.kwargs)
        if not is_transformed():
            self._see_loss(func, bound.arguments, result)
        return result

    def _see_loss(self, func: Any, given: Mapping[str, Any], result: Tensor) -> None:
        if self._learns and not result.requires_grad:
            return  # a metric
        name = f"a loss of PyTorch's in {self._where}"
        weight = given.get('weight')
        reduction = reduction_of(given)
        if reduction == 'none':
            self._unreduced.append(result)
        elif reduction == 'sum':
            elements = next(iter(given.values())).numel()
            self._sums.append((result, result._version, elements))
        elif reduction == 'mean' and 'ignore_index' in given:
            with torch.no_grad():
                count = counted_labels(given['ignore_index'], weight, given['target'])
            self._divide(name, None, count, result)
        elif reduction == 'mean' and func in BY_WEIGHT and weight is not None:
            self._divide(name, weight.numel(), weight.detach().sum(dtype=torch.float), result)

    def _follow(self, func: Any, values: Sequence[Any], result: Any) -> None:
        """Record an operation on a loss that has no mean yet."""
        if torch.compiler.is_compiling() or is_transformed():
            return
        if self._trusts and (func in DIVISIONS or func in PRODUCTS):
            self._see_weight(result, *values[:2])
        if func in DIVISIONS and self._sums:
            self._see_division(result, *values[:2])
        unreduced = {id(loss) for loss in self._unreduced}
        source = next((x for x in values if id(x) in unreduced), None)
        if source is None or not isinstance(result, Tensor):
            return
        if func in SUMS and not result.dim():
            self._sums.append((result, result._version, None))
        elif func in MEANS and not result.dim():
            self._divide(self._where, None, source.numel(), result)
        else:
            self._unreduced.append(result)

    def _see_weight(self, result: Any, one: Any, other: Any) -> None:
        """Forget the division of a mean that is weighted by a tensor."""
        for x, number in [*self._means]:
            weight = None
            if one is x:
                weight = other
            elif other is x:
                weight = one
            if isinstance(weight, Real):  # A constant changes nothing.
                self._means.append((result, number))
            elif isinstance(weight, Tensor) and not weight.requires_grad:
                self._divisions[self._i][number] = Division('', 0, 0, 0)

    def _see_division(self, result: Tensor, dividend: Any, divisor: Any) -> None:
        if isinstance(divisor, Tensor) and divisor.numel() == 1 and not divisor.is_complex():
            divisor = divisor.detach()
        elif not isinstance(divisor, Real):
            return
        for x, _, elements in self._sums:
            if x is dividend:
                self._divide(self._where, elements, divisor, result)

    def _divide(self, name: str, elements: int | None, divisor: Any, result: Tensor) -> None:
        self._means.append((result, len(self._divisions[self._i])))
        self._divisions[self._i].append(Division(name, elements, divisor, _site()))

    def _all_divisions(self) -> Iterator[tuple[Division, ...]]:
        """Yield one division of each micro-batch after the other."""
        loops = self._loops_over_samples()
        divisions = []
        for of_micro_batch in self._divisions:
            divisions.append([x for x in of_micro_batch if x.site not in loops])
        most = max(map(len, divisions), default=0)
        # A micro-batch without divisions counts nothing, so its loss was not computed.
        nothing = [Division('', None, 0, 0)] * most
        return zip(*(own or nothing for own in divisions))

    def _loops_over_samples(self) -> set[int]:
        """Return the places in the code that each micro-batch passes once for each sample."""
        sizes = []
        passes = []
        for divisions, size in zip(self._divisions, self._sizes):
            if divisions:
                sizes.append(size)
                passes.append(Counter(division.site for division in divisions))
        if all(size == 1 for size in sizes):  # One pass does not make a loop.
            return set()
        first, *others = [
            {site for site, count in counts.items() if count == size}
            for counts, size in zip(passes, sizes)
        ]
        return first.intersection(*others)

    def check(self, error: Callable[[str], Exception] | None = None) -> None:
        """Raise if a divisor is not proportional to the weights of micro-batches."""
        for divisions in self._all_divisions():
            names, elements, divisors, _ = zip(*divisions)
            counts = [float(each) for each in divisors]
            if None not in elements and len({*zip(elements, counts)}) == 1:
                continue  # Equal for all micro-batches, as for a loss of parameters.
            whole = sum(counts)
            total = sum(self._weights)
            if any(
                abs(count * total - weight * whole) > 1e-5 * weight * abs(whole)
                for count, weight in zip(counts, self._weights)
            ):
                raise (error or no_mean_over_samples)(max(names))

    def summary(self) -> tuple[float, float]:
        """Return two numbers that summarize the divisors, for comparison with other processes.

        The first is equal in all processes if all micro-batches have the same elements and
        divisors, as for a loss of parameters. The second is equal in all processes if all divisors
        are proportional to the weights.
        """
        same = 0.0
        ratio = 0.0
        for k, divisions in enumerate(self._all_divisions(), 1):
            _, elements, divisors, _ = zip(*divisions)
            counts = [float(each) for each in divisors]
            if None in elements or len({*zip(elements, counts)}) > 1:
                same = nan
            else:
                same += k * (counts[0] + elements[0] / 3)
            ratio += k * sum(counts) / (sum(self._weights) or 1.0)
        return same, ratio


def _site() -> int:
    """Return a number for the place in a loss function that runs, with its callers."""
    places = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not LossMonitor.call.__code__:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places))


def _weight_of_l1_loss() -> Any:
    """Return the ``weight`` argument of ``F.l1_loss``, which PyTorch does not pass on to modes."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get('weight')


def no_mean_over_samples(name: str) -> ValueError:
    """Return the error about a loss that divides by something else than samples."""
    return ValueError(
        f'{name} divides by what it counts in a target (ignore_index, class weights), not by the '
        'number of samples; say what that is: normalizer=lambda target: (target != ignore_index)'
        '.sum(), or weight[target].sum(); or normalizer=len if loss_fn is a mean over samples'
    )
