"""The loss of a mini-batch, computed from the losses of its micro-batches.

::

    normalizer          loss_fn gives           the loss is
    None                a mean over samples     Σ loss · samples / all samples
    a function          a mean over what that   Σ loss · counted / all counted
                        counts in a target
    a number            a sum                   Σ loss / number
"""
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchgpipe.base.context import context
from torchgpipe.base.errors import add_note
from torchgpipe.base.structure import call, leaves_of
from torchgpipe.engine.gradients import leaf_of
from torchgpipe.engine.microbatches import Batch, cut
from torchgpipe.means import Known, LossMonitor, itself, normalizer_of

__all__ = ['Losses', 'count_functions', 'counts_of', 'seen_means', 'with_counts']


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
        self._leaves = [Batch(tuple(map(leaf_of, batch.tensors)), batch.kind)
                        for batch in self.targets]
        module, known = itself(function), Known.of(function)
        #: The modules that it is made of.
        self.modules = [*module.modules()] if isinstance(module, nn.Module) else []
        #: What the loss of each micro-batch counts.
        self.counts, self._whole = _counted(
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


def _scatter(target: Any, sizes: Sequence[int], batch_dim: Any) -> list[Batch]:
    """Cut a target as the input was cut."""
    if not (isinstance(target, Tensor) or any(
            isinstance(leaf.value, Tensor) for leaf in leaves_of(target))):
        return [Batch((), lambda tensors: target)] * len(sizes)
    batches, own, _ = cut(target, len(sizes), batch_dim, 'target')
    if own != list(sizes):
        raise ValueError(f'the target has {sum(own)} samples, but the input has {sum(sizes)}; '
                         'both are cut along their batch dimensions. Say which one that of the '
                         'target is: target_dim=0')
    return batches


def counts_of(rule: Any, batches: Sequence[Batch]) -> list[Any]:
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


def _counted(loss: Known, targets: Sequence[Any], sizes: Sequence[int], normalizer: Any
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
