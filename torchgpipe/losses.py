"""The loss of a mini-batch, told from those of its micro-batches.

::

    normalizer          loss_fn gives           the loss is
    None                a mean over samples     Σ loss · samples / all samples
    a function          a mean over what that   Σ loss · counted / all counted
                        counts in a target
    a number            a sum                   Σ loss / number

Losses of PyTorch's say what they give by their settings, ``reduction``, ``ignore_index`` and
``weight``. So do others that have settings of these names, but what they do with them is theirs.
What a function does not say is seen where it calls a loss of PyTorch's.
"""
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.scatter import cut
from torchgpipe.engine.stepping import leaf_of
from torchgpipe.errors import add_note
from torchgpipe.structure import leaves_of

__all__ = ['Losses']

#: Losses of PyTorch's whose mean is one over what counts in a target of class numbers.
OF_CLASSES = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)

#: What is known of a loss, if it has it.
SETTINGS = ('reduction', 'ignore_index', 'weight')


class Losses:
    """The loss of each micro-batch, and what it counts in the whole.

    Args:
        function: ``loss_fn(output, target)``.
        target: A value of any nesting, or ``None``.
        sizes: The numbers of samples of micro-batches.
        batch_dim: The rule for the target.
        normalizer: See above.
        scale: Makes another loss of one for backward, as ``GradScaler.scale``.

    Raises:
        ValueError: The target has another number of samples, or the loss is known to be no mean.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], target: Any, sizes: Sequence[int],
                 batch_dim: Any, normalizer: Any, scale: Callable[[Tensor], Tensor] | None
                 ) -> None:
        self._function = function
        self._scale = scale
        self._targets = _scatter(target, sizes, batch_dim)
        #: The same as leaves, each of which has a graph of its own above it.
        self._leaves = [Batch.of(tuple(map(leaf_of, batch)), batch.kind)
                        for batch in self._targets]
        self._weights = _weights(function, [batch.value for batch in self._leaves], sizes,
                                 normalizer)
        self._losses: list[Tensor] = []
        self._learns = False
        is_known = normalizer is not None or _code(function) in OF_CLASSES
        self._watch = None if is_known else _Watch(sizes)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that it is made of."""
        itself = _itself(self._function)
        return [*itself.modules()] if isinstance(itself, nn.Module) else []

    def __call__(self, i: int, output: Any) -> Tensor:
        """Compute that of micro-batch ``i``, and give what its backward starts from."""
        if self._weights[i] == 0:  # The mean of nothing is no number.
            return torch.zeros((), requires_grad=True)
        try:
            with self._watch.seeing(i) if self._watch else nullcontext():
                loss = self._function(output, self._leaves[i].value)
            _check(loss, 'loss_fn')
            scaled = loss = loss * self._weights[i]
            if self._scale is not None:
                scaled = self._scale(loss)
                _check(scaled, 'scale')
                if loss.requires_grad and not scaled.requires_grad:
                    raise RuntimeError('scale has detached the loss, so there is nothing to train')
        except Exception as error:
            add_note(error, f'in the loss of micro-batch {i} of {len(self._targets)}')
            raise
        self._losses.append(loss.detach())
        if self._watch and len(self._losses) == len(self._targets):
            self._watch.check()
        self._learns |= scaled.requires_grad
        # A micro-batch may have nothing to learn from.
        return scaled if scaled.requires_grad else scaled.detach().requires_grad_()

    def total(self) -> Tensor:
        """Return the loss of the mini-batch, a scalar.

        Raises:
            RuntimeError: In none of its micro-batches did it require grad.
        """
        if self._losses and not self._learns:
            raise RuntimeError('the loss does not require grad, so there is nothing to train: '
                               'neither a parameter nor the input requires grad, or loss_fn has '
                               'detached it')
        return torch.stack(self._losses).sum() if self._losses else torch.zeros(())

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Give the parts of the target that have a gradient, each with that."""
        return [(x, leaf.grad) for batch, leaves in zip(self._targets, self._leaves)
                for x, leaf in zip(batch, leaves) if leaf.grad is not None]


def _scatter(target: Any, sizes: Sequence[int], batch_dim: Any) -> list[Batch]:
    """Cut a target as the input was cut."""
    if not any(isinstance(leaf.value, Tensor) for leaf in leaves_of(target)):
        return [Batch.of((), lambda tensors: target)] * len(sizes)
    batches, own, _ = cut(target, len(sizes), batch_dim, 'target')
    if own != list(sizes):
        raise ValueError(f'the target has {sum(own)} samples, but the input has {sum(sizes)}; '
                         'both are cut along their batch dimensions. Say which one that of the '
                         'target is: target_dim=0')
    return batches


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


def _weights(loss: Any, targets: Sequence[Any], sizes: Sequence[int], normalizer: Any
             ) -> list[float]:
    """Return what the loss of each micro-batch counts.

    Numbers are Python's, which are exact, and on no device.
    """
    _check_reduction(loss, normalizer)
    if normalizer is None:
        normalizer = _own_normalizer(loss, targets)
    if normalizer is None:
        return [size / sum(sizes) for size in sizes]
    if not callable(normalizer):
        number = _number(normalizer)
        if not number:
            raise ValueError('normalizer must be a function, or a finite number above zero that '
                             f'the loss is divided by, but is {_outline(normalizer)}')
        return [1 / number] * len(sizes)
    given = [normalizer(target) for target in targets]
    counts = [count for each in given if (count := _number(each)) is not None]
    if len(counts) < len(given):
        wrong = next(each for each in given if _number(each) is None)
        raise ValueError('normalizer must count how much of the target of a micro-batch the loss '
                         'is a mean over, a finite number not below zero, but gave '
                         f'{_outline(wrong)}; a function that does is lambda target: (target != '
                         'ignore_index).sum()')
    if not sum(counts):
        raise ValueError('normalizer, or the loss by itself, counts nothing in the whole target, '
                         'so there is no mean over it; leave out this mini-batch')
    return [count / sum(counts) for count in counts]


def _number(value: Any) -> float | None:
    """Return a number that can be a count; ``None`` for what can not be one."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < inf:
        return None
    return float(value)


def _itself(loss: Any) -> Any:
    """Return the function or the module behind partials, and behind a module's ``forward``."""
    while isinstance(loss, partial):
        loss = loss.func
    owner = getattr(loss, '__self__', None)
    return owner if isinstance(owner, nn.Module) and loss.__name__ == 'forward' else loss


def _code(loss: Any) -> Any:
    """Return the function that computes a loss."""
    itself = _itself(loss)
    return getattr(itself.forward, '__func__', None) if isinstance(itself, nn.Module) else itself


def _settings(loss: Any) -> Mapping[str, Any]:
    """Return the settings of a loss, by the names that those of PyTorch's have."""
    itself = _itself(loss)
    if isinstance(itself, nn.Module):
        return {name: getattr(itself, name) for name in SETTINGS if hasattr(itself, name)}
    try:
        bound = inspect.signature(loss).bind(None, None)
    except (TypeError, ValueError):  # It is not Python's, or takes something else.
        return {}
    bound.apply_defaults()
    return bound.arguments


def _reduction(settings: Mapping[str, Any]) -> Any:
    legacy = settings.get('size_average'), settings.get('reduce')
    if 'size_average' in settings and legacy != (None, None):  # PyTorch lets it come first.
        return nn.L1Loss(*legacy).reduction
    return settings.get('reduction', 'mean')


def _check_reduction(loss: Any, normalizer: Any) -> None:
    """Refuse what is known to be no mean, or no scalar."""
    reduction = _reduction(_settings(loss))
    is_known = str(getattr(_code(loss), '__module__', '')).startswith('torch.nn.')
    if reduction == 'none' and is_known:
        raise ValueError("the loss is one of each sample (reduction='none'), and a step takes a "
                         "scalar: reduction='mean', or reduction='sum' and a normalizer")
    if reduction == 'sum' and (normalizer is None or (is_known and callable(normalizer))):
        raise ValueError("the loss adds up samples (reduction='sum'), and those of micro-batches "
                         'would be averaged; give normalizer=1, or the number that the sum over '
                         'the whole mini-batch is divided by')


def _own_normalizer(loss: Any, targets: Sequence[Any]) -> Callable[[Tensor], Any] | None:
    """Return what counts what the mean of a loss is one over; ``None`` if it is one over samples.

    Raises:
        ValueError: It is known to be one over something else, and not how that is counted.
    """
    settings = _settings(loss)
    ignored, weight = settings.get('ignore_index'), settings.get('weight')
    if ignored is None or _reduction(settings) != 'mean':
        return None
    if _code(loss) in OF_CLASSES and all(isinstance(target, Tensor) for target in targets):
        return partial(_counted, ignored, weight)
    tensors = [leaf.value for leaf in leaves_of(list(targets)) if isinstance(leaf.value, Tensor)]
    if isinstance(weight, Tensor) or any(
            bool((x == ignored).any()) for x in tensors if not x.is_floating_point()):
        itself = _itself(loss)
        raise _no_mean_over_samples(getattr(itself, '__name__', type(itself).__name__))
    return None


def _counted(ignored: int, weight: Tensor | None, target: Tensor) -> Any:
    """Count as PyTorch's losses of classes do: each class by its weight."""
    if target.is_floating_point():  # Probabilities all count, and as many for each sample.
        return target.numel()
    kept = target != ignored
    return kept.sum() if weight is None else (
        weight[target.where(kept, 0).long()] * kept).sum()


class _Watch(TorchFunctionMode):
    """Sees how much the losses of classes take means over that a function calls."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes = sizes
        #: By micro-batch, of each call. On the device: nobody waits for them there.
        self._counts: list[list[Any]] = [[] for _ in sizes]

    def seeing(self, i: int) -> '_Watch':
        """See the calls of micro-batch ``i`` from now on."""
        self._now = self._counts[i]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling() and func in OF_CLASSES:
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            if _reduction(given) == 'mean':
                with torch.no_grad():
                    self._now.append(_counted(
                        given['ignore_index'], given['weight'], given['target']))
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise if a mean is none over samples."""
        for call in zip(*self._counts):
            counts = [float(count) for count in call]
            if any(abs(count * sum(self._sizes) - size * sum(counts)) > 1e-5 * size * sum(counts)
                   for count, size in zip(counts, self._sizes)):
                raise _no_mean_over_samples("a loss of PyTorch's in loss_fn")


def _no_mean_over_samples(name: str) -> ValueError:
    return ValueError(
        f'{name} divides by what it counts in a target (ignore_index, class weights), not by the '
        'number of samples; say what that is: normalizer=lambda target: (target != ignore_index)'
        '.sum(), or weight[target].sum(); or normalizer=len if loss_fn is a mean over samples')
