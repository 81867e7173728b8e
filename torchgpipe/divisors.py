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
from functools import cache
from math import nan
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchgpipe.base.private import is_transformed


@cache
def defaults_of(function: Any) -> dict[str, Any] | None:
    """Return the parameters of a loss in their order, with their defaults.

    Losses are PyTorch's functions with a parameter ``reduction``, and functions that follow them
    and announce their calls to modes: see :func:`torch.overrides.handle_torch_function`.

    Returns:
        ``None`` if the function is no loss.
    """
    if not inspect.isfunction(function):
        return None
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # A function of Python wraps a builtin, as for the operator `**`.
        return None
    if 'reduction' not in parameters:
        return None
    defaults = {}
    for name, parameter in parameters.items():
        defaults[name] = parameter.default
    return defaults


#: Losses whose mean is divided by the sum of ``weight``, which has the shape of the input.
BY_WEIGHT = (F.mse_loss, F.l1_loss)


#: Functions that divide a tensor, as the operator ``/`` does.
DIVISIONS = {
    torch.div,
    torch.divide,
    torch.true_divide,
    Tensor.div,
    Tensor.div_,
    Tensor.divide,
    Tensor.divide_,
    Tensor.true_divide,
    Tensor.true_divide_,
}

#: Functions that multiply tensors, as the operator ``*`` does.
PRODUCTS = {
    torch.mul,
    torch.multiply,
    Tensor.mul,
    Tensor.mul_,
    Tensor.multiply,
    Tensor.multiply_,
}

#: Functions that add up the elements of a tensor.
SUMS = {torch.sum, Tensor.sum}
#: Functions that take the mean of the elements of a tensor.
MEANS = {torch.mean, Tensor.mean}


def reduction_of(settings: Mapping[str, Any]) -> Any:
    """Return the reduction of a loss with some settings, also of the deprecated ones."""
    legacy = settings.get('size_average'), settings.get('reduce')
    # The deprecated settings have precedence in PyTorch.
    if 'size_average' in settings and legacy != (None, None):
        return nn.L1Loss(*legacy).reduction
    return settings.get('reduction', 'mean')


def counted_labels(
    ignored: int | None,
    weight: Tensor | None,
    target: Tensor,
) -> Any:
    """Count a target as PyTorch's classification losses do, each class by its weight."""
    if target.is_floating_point():  # All probabilities count, equally many for each sample.
        return target.numel()
    if ignored is None:
        ignored = -100  # the default of PyTorch's losses
    kept = target != ignored
    if weight is None:
        return kept.sum()
    # An ignored label may not be the index of a class.
    classes = target.where(kept, 0).long()
    return (weight[classes] * kept).sum()


class Division(NamedTuple):
    """The division of a loss in one micro-batch."""

    #: The loss, in errors.
    name: str
    #: The number of elements; ``None`` if they are known to be of the samples, and not of
    #: parameters.
    elements: int | None
    #: A number or a tensor, which stays on the device, so that no thread waits for it.
    divisor: Any
    #: The place in the code: see :func:`_site`.
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

    def call(
        self,
        i: int,
        function: Callable[..., Any],
        *args: Any,
    ) -> tuple[Any, bool]:
        """Call a function for micro-batch ``i``; return its loss, and whether that is a sum."""
        self._i = i
        # In an evaluation, a loss without a gradient is not a metric.
        self._learns = torch.is_grad_enabled()
        try:
            with self:
                loss = function(*args)
            # A sum that has changed in place since is no longer one.
            is_sum = False
            for total, version, _ in self._sums:
                if loss is total and total._version == version:
                    is_sum = True
            return loss, is_sum
        finally:
            # They hold graphs.
            self._sums = []
            self._unreduced = []
            self._means = []

    def see(
        self,
        i: int,
        function: Callable[..., Any],
        *args: Any,
    ) -> Any:
        """Call a layer's function for micro-batch ``i``, and record the divisors of losses."""
        # Other layers may run concurrently.
        monitor = LossMonitor(self._sizes, self._weights, where='a layer')
        result, _ = monitor.call(i, function, *args)
        self._divisions[i] += monitor._divisions[i]
        return result

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        defaults = None
        if not torch.compiler.is_compiling():
            defaults = defaults_of(func)
        if defaults is None:
            result = func(*args, **kwargs)
            if self._sums or self._unreduced or self._trusts:
                self._follow(func, [*args, *kwargs.values()], result)
            return result
        if func is F.l1_loss and kwargs.get('weight') is None:
            weight = _weight_of_l1_loss()
            kwargs = {**kwargs, 'weight': weight}
        result = func(*args, **kwargs)
        # Not bound to a signature: that would take longer than a small loss.
        arguments = {**defaults}
        arguments.update(zip(arguments, args))
        arguments.update(kwargs)
        if not is_transformed():
            self._see_loss(func, arguments, result)
        return result

    def _see_loss(
        self,
        func: Any,
        arguments: Mapping[str, Any],
        result: Tensor,
    ) -> None:
        if self._learns and not result.requires_grad:
            return  # a metric
        name = f"a loss of PyTorch's in {self._where}"
        weight = arguments.get('weight')
        reduction = reduction_of(arguments)
        if reduction == 'none':
            self._unreduced.append(result)
        elif reduction == 'sum':
            # Losses have different names for it.
            input = next(iter(arguments.values()))
            self._sums.append((result, result._version, input.numel()))
        elif reduction == 'mean' and 'ignore_index' in arguments:
            with torch.no_grad():
                count = counted_labels(
                    arguments['ignore_index'],
                    weight,
                    arguments['target'],
                )
            self._divide(name, None, count, result)
        elif reduction == 'mean' and func in BY_WEIGHT and weight is not None:
            divisor = weight.detach().sum(dtype=torch.float)
            self._divide(
                name,
                weight.numel(),
                divisor,
                result,
            )

    def _follow(
        self,
        func: Any,
        values: Sequence[Any],
        result: Any,
    ) -> None:
        """Record an operation on a loss that has no mean yet."""
        if torch.compiler.is_compiling() or is_transformed():
            return
        if self._trusts and (func in DIVISIONS or func in PRODUCTS):
            self._see_weight(result, *values[:2])
        if func in DIVISIONS and self._sums:
            self._see_division(result, *values[:2])
        if isinstance(result, Tensor):
            for value in values:
                # By identity, because tensors compare by their elements.
                if any(value is loss for loss in self._unreduced):
                    self._see_reduction(func, value, result)
                    return

    def _see_reduction(
        self,
        func: Any,
        loss: Tensor,
        result: Tensor,
    ) -> None:
        """Record the first operation on a loss that is not reduced."""
        if func in SUMS and not result.dim():
            self._sums.append((result, result._version, None))
        elif func in MEANS and not result.dim():
            self._divide(
                self._where,
                None,
                loss.numel(),
                result,
            )
        else:
            # It may be a product with a mask.
            self._unreduced.append(result)

    def _see_weight(
        self,
        result: Any,
        one: Any,
        other: Any,
    ) -> None:
        """Forget the division of a mean that is weighted by a tensor."""
        for mean, number in [*self._means]:
            weight = None
            if one is mean:
                weight = other
            elif other is mean:
                weight = one
            if isinstance(weight, Real):  # A constant changes nothing.
                self._means.append((result, number))
            elif isinstance(weight, Tensor) and not weight.requires_grad:
                # The other divisions keep their numbers.
                self._divisions[self._i][number] = Division('', 0, 0, 0)

    def _see_division(
        self,
        result: Tensor,
        dividend: Any,
        divisor: Any,
    ) -> None:
        if isinstance(divisor, Tensor) and divisor.numel() == 1 and not divisor.is_complex():
            divisor = divisor.detach()
        elif not isinstance(divisor, Real):
            return
        for total, _, elements in self._sums:
            if total is dividend:
                self._divide(self._where, elements, divisor, result)

    def _divide(
        self,
        name: str,
        elements: int | None,
        divisor: Any,
        result: Tensor,
    ) -> None:
        divisions = self._divisions[self._i]
        # By number, because a weight may still replace the division.
        self._means.append((result, len(divisions)))
        division = Division(
            name,
            elements,
            divisor,
            _site(),
        )
        divisions.append(division)

    def _all_divisions(self) -> Iterator[tuple[Division, ...]]:
        """Yield one division of each micro-batch after the other."""
        loops = self._loops_over_samples()
        table = []
        for divisions in self._divisions:
            table.append([division for division in divisions if division.site not in loops])
        most = max(map(len, table), default=0)
        # A micro-batch without divisions counts nothing, so its loss was not computed.
        nothing = [Division('', None, 0, 0)] * most
        return zip(*(divisions or nothing for divisions in table))

    def _loops_over_samples(self) -> set[int]:
        """Return the places in the code that each micro-batch passes once for each sample."""
        loops = []
        is_single = True
        for divisions, size in zip(self._divisions, self._sizes):
            if not divisions:
                continue
            passes = Counter(division.site for division in divisions)
            loops.append({site for site, count in passes.items() if count == size})
            is_single = is_single and size == 1
        # In micro-batches of one sample, one pass does not make a loop.
        if is_single:
            return set()
        return set.intersection(*loops)

    def check(self, error: Callable[[str], Exception] | None = None) -> None:
        """Raise if a divisor is not proportional to the weights of micro-batches."""
        total = sum(self._weights)
        for divisions in self._all_divisions():
            counts = [float(division.divisor) for division in divisions]
            if _are_equal(divisions, counts):
                continue  # as for a loss of parameters
            whole = sum(counts)
            for count, weight in zip(counts, self._weights):
                # Divisors may be sums in single precision.
                if abs(count * total - weight * whole) > 1e-5 * weight * abs(whole):
                    name = max(division.name for division in divisions)
                    make_error = error or no_mean_over_samples
                    raise make_error(name)

    def summary(self) -> tuple[float, float]:
        """Return two numbers that summarize the divisors, for comparison with other processes.

        The first is equal in all processes if all micro-batches have the same elements and
        divisors, as for a loss of parameters. The second is equal in all processes if all divisors
        are proportional to the weights.
        """
        same = 0.0
        ratio = 0.0
        for k, divisions in enumerate(self._all_divisions(), 1):
            counts = [float(division.divisor) for division in divisions]
            elements = divisions[0].elements
            if elements is not None and _are_equal(divisions, counts):
                third = elements / 3
                same += k * (counts[0] + third)
            else:
                same = nan
            weight = sum(self._weights) or 1.0
            ratio += k * sum(counts) / weight
        return same, ratio


def _are_equal(
    divisions: Sequence[Division],
    counts: Sequence[float],
) -> bool:
    """Return whether all micro-batches have the same known elements and the same divisor."""
    elements = {division.elements for division in divisions}
    return None not in elements and len(elements) == len({*counts}) == 1


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
    if frame is None:
        return None
    return frame.f_locals.get('weight')


def no_mean_over_samples(name: str) -> ValueError:
    """Return the error about a loss that divides by something else than samples."""
    return ValueError(
        f'{name} divides by what it counts in a target (ignore_index, class weights), not by the '
        'number of samples; say what that is: normalizer=lambda target: (target != ignore_index)'
        '.sum(), or weight[target].sum(); or normalizer=len if loss_fn is a mean over samples'
    )
