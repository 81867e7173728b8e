"""The normalizer of a loss, known from its settings or from the calls that it makes.

Losses of PyTorch's say what they give by their settings, ``reduction``, ``ignore_index`` and
``weight``. So do others that have settings of these names, but what they do with them is theirs.
What a function does not say is seen where it calls a loss of PyTorch's.
"""
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nan
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchgpipe.base.context import context
from torchgpipe.base.private import is_transformed
from torchgpipe.base.structure import leaves_of

__all__ = ['Known', 'LossMonitor', 'itself', 'no_mean_in_the_model', 'no_mean_over_samples',
           'normalizer_of', 'watches']

#: What is known of a loss, if it has it.
SETTINGS = ('reduction', 'ignore_index', 'weight')

#: The losses of PyTorch's, each with its signature.
LOSSES = {function: signature for function in vars(F).values() if inspect.isfunction(function)
          if 'reduction' in (signature := inspect.signature(function)).parameters}

#: Those whose mean is a sum divided by that of ``weight``, which has the shape of the input.
BY_WEIGHT = (F.mse_loss, F.l1_loss)

#: What divides a tensor, as the operator does.
DIVISIONS = {getattr(place, name) for place in (torch, Tensor)
             for name in ('div', 'div_', 'divide', 'divide_', 'true_divide', 'true_divide_')
             if hasattr(place, name)}


def itself(loss: Any) -> Any:
    """Return the function or the module behind partials, and behind a module's ``forward``."""
    while isinstance(loss, partial):
        loss = loss.func
    owner = getattr(loss, '__self__', None)
    return owner if isinstance(owner, nn.Module) and loss.__name__ == 'forward' else loss


class Known(NamedTuple):
    """What is known of a loss by its settings."""

    #: By the names that those of PyTorch's have.
    settings: Mapping[str, Any]
    reduction: Any
    #: Whether it is one of PyTorch's, which does what its settings say.
    is_of_pytorch: bool
    name: str

    @classmethod
    def of(cls, loss: Any) -> 'Known':
        """Look at a loss."""
        what, settings = itself(loss), {}
        if isinstance(what, nn.Module):
            code = getattr(what.forward, '__func__', None)
            settings = {name: getattr(what, name) for name in SETTINGS if hasattr(what, name)}
        else:
            code = what
            try:
                bound = inspect.signature(loss).bind(None, None)
                bound.apply_defaults()
                settings = bound.arguments
            except (TypeError, ValueError):  # It is not Python's, or takes something else.
                pass
        is_torch = str(getattr(code, '__module__', '')).startswith('torch.nn.')
        return cls(settings, _reduction(settings), is_torch and 'reduction' in settings,
                   getattr(what, '__name__', type(what).__name__))


def watches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a layer, in which a pipeline sees what losses divide by."""
    def call(*given: Any) -> Any:
        cell = None if torch.compiler.is_compiling() else context.micro_batch
        if cell is None or cell.losses is None:
            return function(*given)
        return cell.losses.see(cell.i, function, *given)
    return call


def _reduction(settings: Mapping[str, Any]) -> Any:
    legacy = settings.get('size_average'), settings.get('reduce')
    if 'size_average' in settings and legacy != (None, None):  # PyTorch lets it come first.
        return nn.L1Loss(*legacy).reduction
    return settings.get('reduction', 'mean')


def normalizer_of(loss: Known, given: Any, targets: Sequence[Any]) -> Any:
    """Return the normalizer of a loss: the given one, or its own; ``None`` for samples.

    Raises:
        ValueError: It is known to be no mean and no scalar, or a mean over something else, and not
            how that is counted.
    """
    if loss.reduction == 'none' and loss.is_of_pytorch:
        raise ValueError("the loss is one of each sample (reduction='none'), and a step takes a "
                         "scalar: reduction='mean', or reduction='sum' and a normalizer")
    if loss.reduction == 'sum' and (
            given is None or (loss.is_of_pytorch and callable(given))):
        raise _sum()
    if given is not None or 'ignore_index' not in loss.settings or loss.reduction != 'mean':
        return given
    ignored, weight = loss.settings['ignore_index'], loss.settings.get('weight')
    if loss.is_of_pytorch and all(isinstance(target, Tensor) for target in targets):
        return partial(_counted, ignored, weight)
    if ignored is None:
        return None
    tensors = [leaf.value for leaf in leaves_of(list(targets)) if isinstance(leaf.value, Tensor)]
    if isinstance(weight, Tensor) or any(
            bool((x == ignored).any()) for x in tensors if not x.is_floating_point()):
        raise no_mean_over_samples(loss.name)
    return None


def _counted(ignored: int | None, weight: Tensor | None, target: Tensor) -> Any:
    """Count as PyTorch's losses of classes do: each class by its weight."""
    if target.is_floating_point():  # Probabilities all count, and as many for each sample.
        return target.numel()
    kept = target != (-100 if ignored is None else ignored)
    return kept.sum() if weight is None else (
        weight[target.where(kept, 0).long()] * kept).sum()


class LossMonitor(TorchFunctionMode):
    """Sees what losses of PyTorch's that a function calls divide by, and whether it returns a sum.

    Not in what is compiled or transformed: values there are none that stay.
    """

    def __init__(self, sizes: Sequence[int], where: str = 'loss_fn') -> None:
        super().__init__()
        self._sizes = sizes
        self._where = where
        #: By micro-batch, of each division: whose it is, of how many, and by what. The last is on
        #: the device: nobody waits for it there.
        self._divisions: list[list[tuple[str, int, Any]]] = [[] for _ in sizes]
        #: Of the micro-batch that is on: each sum, its version, and of how many elements it is.
        self._sums: list[tuple[Tensor, int, int]] = []

    def call(self, i: int, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function for micro-batch ``i``; refuse a sum that it returns as it is."""
        self._i = i
        try:
            with self:
                loss = function(*given)
            if any(loss is each and each._version == version for each, version, _ in self._sums):
                raise _sum()
            return loss
        finally:
            self._sums = []  # They hold graphs.

    def see(self, i: int, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of a layer for micro-batch ``i``; see what losses in it divide by."""
        own = LossMonitor(self._sizes, 'a layer')  # Others may be at work beside it.
        own._i = i
        with own:
            result = function(*given)
        self._divisions[i] += own._divisions[i]
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not (func in LOSSES or func in DIVISIONS):
            return func(*args, **kwargs)
        if func in DIVISIONS:
            if self._sums and not is_transformed():
                self._see_division(*args, *kwargs.values())
            return func(*args, **kwargs)
        bound = LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        if func is F.l1_loss and bound.arguments['weight'] is None:
            bound.arguments['weight'] = _weight_of_l1_loss()
        result = func(*bound.args, **bound.kwargs)
        if not is_transformed():
            self._see_loss(func, bound.arguments, result)
        return result

    def _see_loss(self, func: Any, given: Mapping[str, Any], result: Tensor) -> None:
        name, weight = f"a loss of PyTorch's in {self._where}", given.get('weight')
        if _reduction(given) == 'sum':
            elements = next(iter(given.values())).numel()
            self._sums.append((result, result._version, elements))
        elif _reduction(given) == 'mean' and 'ignore_index' in given:
            with torch.no_grad():
                count = _counted(given['ignore_index'], weight, given['target'])
            self._divisions[self._i].append((name, self._sizes[self._i], count))
        elif _reduction(given) == 'mean' and func in BY_WEIGHT and weight is not None:
            self._divisions[self._i].append((
                name, weight.numel(), weight.detach().sum(dtype=torch.float)))

    def _see_division(self, dividend: Any, divisor: Any, *_: Any) -> None:
        if isinstance(divisor, Tensor) and divisor.numel() == 1 and not divisor.is_complex():
            divisor = divisor.detach()
        elif not isinstance(divisor, Real):
            return
        self._divisions[self._i].extend((self._where, elements, divisor)
                                        for each, _, elements in self._sums if each is dividend)

    def check(self, error: Callable[[str], Exception] | None = None) -> None:
        """Raise if a mean is none over samples."""
        nothing = [('', 0, 0)]  # Where no loss of classes is called, nothing counts.
        for divisions in zip(*(each or nothing for each in self._divisions)):
            names, elements, divisors = zip(*divisions)
            counts = [float(each) for each in divisors]
            if len({*zip(elements, counts)}) == 1:
                continue  # The same of each micro-batch, as of parameters.
            whole = sum(counts)
            if any(abs(count * sum(self._sizes) - size * whole) > 1e-5 * size * abs(whole)
                   for count, size in zip(counts, self._sizes)):
                raise (error or no_mean_over_samples)(max(names))

    def summary(self) -> tuple[float, float]:
        """Return in two numbers what this process divides by, to compare it with others.

        The first one is the same where each micro-batch anywhere divides by the same, the second
        one where all divide in proportion to their samples.
        """
        same, ratio = 0., 0.
        for k, divisions in enumerate(zip(*self._divisions), 1):
            counts = [float(count) for _, _, count in divisions]
            same += k * (counts[0] if len({*counts}) == 1 else nan)
            ratio += k * sum(counts) / sum(self._sizes)
        return same, ratio


def _weight_of_l1_loss() -> Any:
    """Return the ``weight`` that ``F.l1_loss`` has got: PyTorch does not hand it on to modes."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get('weight')


def _sum() -> ValueError:
    return ValueError("the loss adds up samples (reduction='sum'), and those of micro-batches "
                      'would be averaged; give normalizer=1, or the number that the sum over '
                      'the whole mini-batch is divided by')


def no_mean_in_the_model(_: str) -> ValueError:
    """Return the error of a ``gather='mean'`` that would weigh micro-batches wrongly."""
    return ValueError(
        'a loss in the model divides by what it counts in labels (ignore_index, class weights), '
        "not by the number of samples, so gather='mean' is not the loss of the mini-batch; let a "
        "function count, which is called as the model is: gather={'loss': lambda ids, mask, "
        "labels: (labels != -100).sum()}, or labels[:, 1:], where the model shifts them; 'sum', "
        'if the model is given the number of the mini-batch; or lambda ids, mask, labels: '
        'len(labels), if it is a mean over samples')


def no_mean_over_samples(name: str) -> ValueError:
    return ValueError(
        f'{name} divides by what it counts in a target (ignore_index, class weights), not by the '
        'number of samples; say what that is: normalizer=lambda target: (target != ignore_index)'
        '.sum(), or weight[target].sum(); or normalizer=len if loss_fn is a mean over samples')
