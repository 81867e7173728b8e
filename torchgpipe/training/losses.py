"""The loss of a mini-batch from the losses of its micro-batches, and the normalizer of a loss.

Losses of PyTorch's say what they give by their settings, ``reduction``, ``ignore_index`` and
``weight``. So do others that have settings of these names, but what they do with them is theirs.
What a function does not say is seen where it calls a loss of PyTorch's.

::

    normalizer          loss_fn gives           the loss is
    None                a mean over samples     Σ loss · samples / all samples
    a function          a mean over what that   Σ loss · counted / all counted
                        counts in a target
    a number            a sum                   Σ loss / number
"""
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, nan
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchgpipe.base.context import context
from torchgpipe.base.errors import add_note
from torchgpipe.base.private import is_transformed
from torchgpipe.base.structure import call, leaves_of
from torchgpipe.engine.gradients import leaf_of
from torchgpipe.engine.microbatches import Chunk, cut

__all__ = ['Known', 'LossMonitor', 'Losses', 'count_functions', 'counts_of', 'itself',
           'no_mean_in_the_model', 'no_mean_over_samples', 'normalizer_of', 'seen_means',
           'watches', 'with_counts']

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


class Losses:
    """The loss of each micro-batch, and what it counts in the whole.

    Args:
        function: ``loss_fn(output, target)``.
        target: A value of any nesting, or ``None``.
        sizes: The numbers of samples of micro-batches.
        batch_dim: The rule for the target.
        normalizer: See above.
        scale: Makes another loss of one for backward, as ``GradScaler.scale``.
        alone: Whether this process has all of the mini-batch. Otherwise :meth:`count_in` follows.

    Raises:
        ValueError: The target has another number of samples, or the loss is known to be no mean.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], target: Any, sizes: Sequence[int],
                 batch_dim: Any, normalizer: Any, scale: Callable[[Tensor], Tensor] | None,
                 alone: bool = True) -> None:
        self._function = function
        self._scale = scale
        #: Of micro-batches.
        self.targets = _scatter(target, sizes, batch_dim)
        #: The same as leaves, each of which has a graph of its own above it.
        self._leaves = [Chunk(tuple(map(leaf_of, batch.tensors)), batch.kind)
                        for batch in self.targets]
        module, known = itself(function), Known.of(function)
        #: The modules that it is made of.
        self.modules = [*module.modules()] if isinstance(module, nn.Module) else []
        #: What the loss of each micro-batch counts.
        self.counts, self._whole = _counts(
            known, [batch.value for batch in self._leaves], sizes, normalizer)
        #: The count of the mini-batch in this process, and after :meth:`count_in` in all
        #: processes; ``None`` where the loss is over a number.
        self.counted = None if self._whole else sum(self.counts)
        if alone and self.counted is not None:
            self._whole = self.counted or _nothing()
        self._losses: list[Tensor] = []
        self._learns = False
        is_known = normalizer is not None or known.is_of_pytorch
        #: Sees what losses in the function, or in layers, divide by.
        self.monitor = None if is_known else LossMonitor(sizes)

    @property
    def divisors(self) -> tuple[float, float]:
        """What the loss divides by in this process: :meth:`LossMonitor.summary`."""
        return self.monitor.summary() if self.monitor else (0., 0.)

    def count_in(self, whole: float, trains: bool = True) -> None:
        """Set the count of the whole mini-batch, of which other processes may have parts.

        Raises:
            ValueError: It is nothing, and there is a backward.
        """
        self.counted, self._whole = whole, whole or (_nothing() if trains else 1.)

    def __call__(self, i: int, output: Any) -> Tensor:
        """Compute that of micro-batch ``i``, and give what its backward starts from."""
        if self.counts[i] == 0:  # The mean of nothing is no number.
            return torch.zeros((), requires_grad=True)
        try:
            given = output, self._leaves[i].value
            loss = (self.monitor.call(i, self._function, *given) if self.monitor
                    else self._function(*given))
            _check(loss, 'loss_fn')
            scaled = loss = loss * (self.counts[i] / self._whole)
            if self._scale is not None:
                scaled = self._scale(loss)
                _check(scaled, 'scale')
                if loss.requires_grad and not scaled.requires_grad:
                    raise RuntimeError('scale has detached the loss, so there is nothing to train')
        except Exception as error:
            add_note(error, f'in the loss of micro-batch {i} of {len(self.targets)}')
            raise
        self._losses.append(loss.detach())
        if self.monitor and len(self._losses) == len(self.targets):
            self.monitor.check()
        self._learns |= scaled.requires_grad
        # A micro-batch may have nothing to learn from.
        return scaled if scaled.requires_grad else scaled.detach().requires_grad_()

    def behind(self, layers: Callable[..., Any], keeps: bool) -> Callable[..., Any]:
        """Return layers that give the loss of a micro-batch, so that their output is freed.

        Args:
            layers: The layers of the last partition.
            keeps: Whether to give the output instead, after the loss was computed.
        """
        def call(*args: Any, **kwargs: Any) -> Any:
            output = layers(*args, **kwargs)
            assert context.micro_batch is not None
            loss = self(context.micro_batch.i, output)
            return output if keeps else loss.detach()
        return call

    @property
    def count(self) -> float:
        """The divisor of the loss of the mini-batch."""
        return self._whole if self.counted is None else self.counted

    def total(self, trains: bool = True) -> Tensor:
        """Return the loss of the mini-batch, a scalar.

        Args:
            trains: Whether there is a backward.

        Raises:
            RuntimeError: There is, but in none of its micro-batches did the loss require grad.
        """
        if trains and self._losses and not self._learns:
            raise RuntimeError('the loss does not require grad, so there is nothing to train: '
                               'neither a parameter nor the input requires grad, or loss_fn has '
                               'detached it')
        return torch.stack(self._losses).sum() if self._losses else torch.zeros(())

    @property
    def inputs(self) -> list[Tensor]:
        """What it takes in place of the tensors of the target."""
        return [x for batch in self._leaves for x in batch.tensors]

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parts of the target that have a gradient, each with that."""
        return [(x, leaf.grad) for batch, leaves in zip(self.targets, self._leaves)
                for x, leaf in zip(batch.tensors, leaves.tensors) if leaf.grad is not None]


def _scatter(target: Any, sizes: Sequence[int], batch_dim: Any) -> list[Chunk]:
    """Cut a target as the input was cut."""
    if not (isinstance(target, Tensor) or any(
            isinstance(leaf.value, Tensor) for leaf in leaves_of(target))):
        return [Chunk((), lambda tensors: target)] * len(sizes)
    batches, own, _ = cut(target, len(sizes), batch_dim, 'target')
    if own != list(sizes):
        raise ValueError(f'the target has {sum(own)} samples, but the input has {sum(sizes)}; '
                         'both are cut along their batch dimensions. Say which one that of the '
                         'target is: target_dim=0')
    return batches


def counts_of(rule: Any, batches: Sequence[Chunk]) -> list[Any]:
    """Return the counts of each function in a rule of ``gather``, one for each micro-batch.

    Args:
        rule: The rule.
        batches: The input. Functions are called as the model is.

    Returns:
        Lists of counts; or errors, since the output may not have that part, as without labels.
    """
    found: list[Any] = []
    for function in filter(callable, _words(rule)):
        try:
            counts = _count(partial(call, function), [batch.value for batch in batches], 'gather',
                            'input')
            found.append(counts if sum(counts) else _nothing('gather', 'input'))
        except Exception as error:
            found.append(error)
    return found


def count_functions(rule: Any) -> int:
    """Return how many functions a rule of ``gather`` has."""
    return sum(map(callable, _words(rule)))


def with_counts(rule: Any, counts: Iterator[Any]) -> Any:
    """Return a rule of ``gather`` with means in place of functions that count.

    Args:
        rule: The rule. A part of the output is a mean over the counts of its function.
        counts: The results of :func:`counts_of`.
    """
    if isinstance(rule, Mapping):
        return {key: with_counts(each, counts) for key, each in rule.items()}
    if isinstance(rule, (list, tuple)):
        return [with_counts(each, counts) for each in rule]
    if not callable(rule):
        return rule
    found = next(counts)
    return partial(_raise, found) if isinstance(found, Exception) else partial(
        _mean_of, found, sum(found))


def seen_means(rule: Any, sizes: Sequence[int]) -> LossMonitor | None:
    """Return what sees whether means are over samples, if a rule of ``gather`` takes them so."""
    words = {each for each in _words(rule) if isinstance(each, str) or callable(each)}
    return LossMonitor(sizes) if words == {'mean'} else None


def _words(rule: Any) -> Iterator[Any]:
    if not isinstance(rule, (Mapping, list, tuple)):
        yield rule
        return
    for each in rule.values() if isinstance(rule, Mapping) else rule:
        yield from _words(each)


def _raise(error: Exception, _: Any) -> NoReturn:
    raise error


def _mean_of(counts: Sequence[float], whole: float, xs: Sequence[Tensor]) -> Tensor:
    # The mean of nothing is no number.
    return torch.stack([x * (count / whole) for count, x in zip(counts, xs) if count]).sum(0)


def _check(loss: Any, name: str) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise ValueError(f'{name} must give a scalar tensor of real numbers, but gave '
                         f'{_outline(loss)}; reduce it, as by loss.mean(), or give the plain call '
                         'a loss of another form')


def _outline(value: Any) -> str:
    """Write what something is in a few words."""
    if isinstance(value, Tensor):
        grad = ' that requires grad' if value.requires_grad else ''
        return f'a tensor of {value.dtype} of shape {tuple(value.shape)}{grad}'
    return f'{type(value).__name__} {value}' if isinstance(value, Real) else type(value).__name__


def _counts(loss: Known, targets: Sequence[Any], sizes: Sequence[int], normalizer: Any
            ) -> tuple[list[float], float]:
    """Return what the loss of each micro-batch counts; and out of what, where that is a number.

    Numbers are Python's, which are exact, and on no device.
    """
    normalizer = normalizer_of(loss, normalizer, targets)
    if normalizer is None:
        return [*map(float, sizes)], 0
    if not callable(normalizer):
        number = _number(normalizer)
        if not number:
            raise ValueError('normalizer must be a function, or a finite number above zero that '
                             f'the loss is divided by, but is {_outline(normalizer)}')
        return [1.] * len(sizes), number
    return _count(normalizer, targets, 'normalizer', 'target'), 0


def _count(function: Callable[[Any], Any], values: Sequence[Any], name: str, what: str
           ) -> list[float]:
    """Return what a function counts in each value."""
    given = [function(value) for value in values]
    counts = [count for each in given if (count := _number(each)) is not None]
    if len(counts) < len(given):
        wrong = next(each for each in given if _number(each) is None)
        raise ValueError(f'{name} must count how much of the {what} of a micro-batch the loss '
                         'is a mean over, a finite number not below zero, but gave '
                         f'{_outline(wrong)}; a function that does is lambda target: (target != '
                         'ignore_index).sum()')
    return counts


def _nothing(name: str = 'normalizer, or the loss by itself,', what: str = 'target') -> NoReturn:
    raise ValueError(f'{name} counts nothing in the whole {what}, so there is no mean over it; '
                     'leave out this mini-batch')


def _number(value: Any) -> float | None:
    """Return a number that can be a count; ``None`` for what cannot be one."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < inf:
        return None
    return float(value)
