"""The loss of a mini-batch from the losses of its micro-batches, and the normalizer of a loss.

:class:`Losses` adds up the losses of micro-batches by the normalizer::

    normalizer          loss_fn gives           the loss is
    None                a mean over samples     Σ loss · samples / all samples
    a function          a mean over its count   Σ loss · counted / all counted
                        in a target
    a number            a sum                   Σ loss / number

:class:`LossSettings` holds the settings of a loss: ``reduction``, ``ignore_index`` and ``weight``.
For PyTorch's own losses, they determine the result. Other losses may have settings with these
names, but may use them in another way. If a function does not have such settings,
:mod:`torchgpipe.divisors` detects the divisor where the function calls one of PyTorch's
losses.

Terms:

count
    The part of a micro-batch that its loss is a mean over, such as its number of samples.
divisor
    The number by which a loss divides its sum.
normalizer
    The rule for the divisor of the mini-batch's loss: a function that counts, or a number.
reduction
    The setting of PyTorch's losses that selects a mean, a sum, or no reduction.
rule of ``gather``
    The way to combine an output of all micro-batches, such as a mean.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from torchgpipe.base.context import context
from torchgpipe.base.errors import add_note
from torchgpipe.base.settings import LossOptions
from torchgpipe.base.structure import Gradients, call, leaves_of
from torchgpipe.divisors import LossMonitor, counted_labels, no_mean_over_samples, reduction_of
from torchgpipe.engine.gradients import leaf_of
from torchgpipe.engine.microbatches import Chunk, cut


def itself(loss: Any) -> Any:
    """Return the function or the module behind partials, and behind a module's ``forward``."""
    while isinstance(loss, partial):
        loss = loss.func
    # The settings of a bound ``forward`` are attributes of its module.
    owner = getattr(loss, '__self__', None)
    if isinstance(owner, nn.Module) and loss.__name__ == 'forward':
        return owner
    return loss


class LossSettings(NamedTuple):
    """The settings of a loss."""

    #: The settings, by the names that PyTorch's losses use.
    settings: Mapping[str, Any]
    #: As in PyTorch: ``'mean'``, ``'sum'`` or ``'none'``.
    reduction: Any
    #: Whether it is one of PyTorch's losses, or ``parallel_cross_entropy`` of
    #: :mod:`torchgpipe.shard.nn`. These follow their settings.
    is_of_pytorch: bool
    #: The name in errors.
    name: str

    @classmethod
    def of(cls, loss: Any) -> 'LossSettings':
        """Return the settings of a loss."""
        function = itself(loss)
        settings = {}
        if isinstance(function, nn.Module):
            code = getattr(function.forward, '__func__', None)
            for name in ('reduction', 'ignore_index', 'weight'):
                if hasattr(function, name):
                    settings[name] = getattr(function, name)
        else:
            code = function
            try:
                # Of the loss, not of the function behind it, because partials have arguments.
                bound = inspect.signature(loss).bind(None, None)
                bound.apply_defaults()
                settings = bound.arguments
            except (TypeError, ValueError):  # It has no signature, or other arguments.
                pass
        module = str(getattr(code, '__module__', ''))
        return cls(
            settings,
            reduction_of(settings),
            module.startswith(('torch.nn.', 'torchgpipe.')) and 'reduction' in settings,
            getattr(function, '__name__', type(function).__name__),
        )


def watches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's function in which a pipeline records the divisors of losses."""

    def call(*args: Any) -> Any:
        cell = None
        # Compiled code has no values to record.
        if not torch.compiler.is_compiling():
            cell = context.micro_batch
        if cell is None or cell.losses is None:
            return function(*args)
        return cell.losses.see(cell.i, function, *args)

    return call


def normalizer_of(
    loss: LossSettings,
    normalizer: Any,
    targets: Sequence[Any],
) -> Any:
    """Return the normalizer of a loss: the argument, or its own; ``None`` for samples.

    Raises:
        ValueError: By its settings, the loss is a sum without a number to divide by, no scalar, or
            a mean with an unknown count.
    """
    if loss.reduction == 'none' and loss.is_of_pytorch:
        raise ValueError(
            "the loss is one of each sample (reduction='none'), and a step takes a "
            "scalar: reduction='mean', or reduction='sum' and a normalizer"
        )
    # A function counts the divisor of a mean. A sum of PyTorch's does not have one.
    is_counted = loss.is_of_pytorch and callable(normalizer)
    if loss.reduction == 'sum' and (normalizer is None or is_counted):
        raise _sum_of_samples()
    if normalizer is not None or loss.reduction != 'mean':
        return normalizer
    if 'ignore_index' not in loss.settings:
        return None
    return _normalizer_of_labels(loss, targets)


def _normalizer_of_labels(loss: LossSettings, targets: Sequence[Any]) -> Any:
    """Return the normalizer of a mean that may ignore labels or weight classes."""
    ignored = loss.settings['ignore_index']
    weight = loss.settings.get('weight')
    if loss.is_of_pytorch and all(isinstance(target, Tensor) for target in targets):
        return partial(counted_labels, ignored, weight)
    if ignored is None:
        return None
    # Another loss may count in another way. That makes no difference if all labels count alike.
    leaves = leaves_of(list(targets))
    if isinstance(weight, Tensor):
        raise no_mean_over_samples(loss.name)
    for leaf in leaves:
        value = leaf.value
        is_label = isinstance(value, Tensor) and not value.is_floating_point()
        if is_label and (value == ignored).any():
            raise no_mean_over_samples(loss.name)
    return None


def _sum_of_samples() -> ValueError:
    return ValueError(
        "the loss adds up samples (reduction='sum'), and those of micro-batches "
        'would be averaged; give normalizer=1, or the number that the sum over '
        'the whole mini-batch is divided by'
    )


def no_mean_in_the_model(_: str) -> ValueError:
    """Return the error for a ``gather='mean'`` that would weight micro-batches wrongly."""
    return ValueError(
        'a loss in the model divides by what it counts in labels (ignore_index, class weights), '
        "not by the number of samples, so gather='mean' is not the loss of the mini-batch; let a "
        "function count, which is called as the model is: gather={'loss': lambda ids, mask, "
        "labels: (labels != -100).sum()}, or labels[:, 1:], where the model shifts them; 'sum', "
        'if the model is given the number of the mini-batch; or lambda ids, mask, labels: '
        'len(labels), if it is a mean over samples'
    )


def no_mean_by_normalizer(name: str) -> ValueError:
    """Return the error for a mean over something else than the normalizer counts."""
    return ValueError(
        f'{name} divides by other numbers than normalizer counts in the target, so the loss would '
        'not be the loss of the whole mini-batch. Count what loss_fn divides by; or, if it has '
        "several means, add up each one with reduction='sum', divide it by its count in the whole "
        'mini-batch (of all replicas), and pass normalizer=1'
    )


def error_of(normalizer: Any) -> Callable[[str], ValueError]:
    """Return the error for divisors that the normalizer, or the samples, do not have."""
    if normalizer is None:
        return no_mean_over_samples
    return no_mean_by_normalizer


class Losses:
    """The loss of each micro-batch, and its weight in the loss of the mini-batch.

    Args:
        loss: The function, and the target: a value of any nesting, or ``None``. The normalizer is
            ``None``, a function or a number: see the table of this module.
        sizes: The numbers of samples of micro-batches.
        targets: The targets of micro-batches, if they are cut already.
        alone: Whether this process has all of the mini-batch. Otherwise :meth:`count_in` follows.
        settings: The settings of the function, if they are known.

    Raises:
        ValueError: The target has another number of samples, or the loss is known not to be a
            mean.
    """

    def __init__(
        self,
        loss: LossOptions,
        sizes: Sequence[int],
        targets: list[Chunk] | None = None,
        alone: bool = True,
        settings: LossSettings | None = None,
    ) -> None:
        function = loss.function
        normalizer = loss.normalizer
        self._function = function
        #: Scales a loss for its backward, such as a gradient scaler's ``scale``.
        self._scale = loss.scale
        #: Whether no other process waits for this one.
        self._alone = alone
        module = itself(function)
        #: The modules of the loss function.
        self.modules: list[nn.Module] = []
        if isinstance(module, nn.Module):
            self.modules = [*module.modules()]
        #: The targets of micro-batches.
        if targets is None:
            targets, samples = cut_target(loss.target, len(sizes), loss.target_dim)
            if samples is None:
                targets = targets * len(sizes)
            else:
                check_samples(sum(samples), sum(sizes))
        self.targets = targets
        #: The targets with leaves in place of tensors, at which the graphs of losses end.
        self._leaves = []
        for batch in self.targets:
            leaves = tuple(map(leaf_of, batch.tensors))
            self._leaves.append(Chunk(leaves, batch.kind))

        if settings is None:
            settings = LossSettings.of(function)
        values = [batch.value for batch in self._leaves]
        #: The count of each micro-batch.
        self.counts, self._whole = _counts(
            settings,
            values,
            sizes,
            normalizer,
        )
        #: The count of the mini-batch in this process, and after :meth:`count_in` in all
        #: processes; ``None`` if the normalizer is a number.
        self.counted: float | None = None
        if not self._whole:
            self.counted = sum(self.counts)
            if alone:
                self.count_in(self.counted)

        #: Records the divisors of losses in the function. The settings of PyTorch's own losses
        #: determine their divisors, so they are not recorded.
        self.monitor: LossMonitor | None = None
        #: Records the divisors of losses in layers, which a normalizer does not know.
        self.in_layers: LossMonitor | None = None
        if normalizer is not None:
            self.monitor = LossMonitor(sizes, self.counts, True)
        elif not settings.is_of_pytorch:
            self.monitor = LossMonitor(sizes)
            self.in_layers = self.monitor
        #: Returns the error for other divisors.
        self.error = error_of(normalizer)

        #: The losses of micro-batches, each with its weight.
        self._losses: list[Tensor] = []
        #: Whether the loss of some micro-batch requires grad.
        self._learns = False
        #: Why the loss of a micro-batch was refused, in one of several processes.
        self._refusal: ValueError | None = None

    @property
    def divisors(self) -> tuple[float, float]:
        """The divisors of the loss in this process: see :meth:`LossMonitor.summary`."""
        if self.monitor is None:
            return 0.0, 0.0
        return self.monitor.summary()

    def count_in(self, whole: float, trains: bool = True) -> None:
        """Set the count of the whole mini-batch, of which other processes may have parts.

        Raises:
            ValueError: The count is zero, and there is a backward.
        """
        if trains and not whole:
            raise _zero_count('normalizer, or the loss by itself,', 'target')
        # Nothing is divided by a count of zero, because the loss of no micro-batch is computed.
        self._whole = whole or 1.0
        self.counted = whole

    def __call__(self, i: int, output: Any) -> Tensor:
        """Compute the loss of micro-batch ``i``, and return the tensor to start its backward."""
        if self.counts[i] == 0:  # The mean of nothing is NaN.
            return torch.zeros((), requires_grad=True)
        try:
            loss, is_sum = self._call(i, output)
            # A sum has no divisor, so its micro-batches cannot be weighted.
            refusal = _sum_of_samples() if is_sum else _refusal(loss, 'loss_fn')
            if refusal is not None:
                return self._refuse(refusal)
            loss = loss * (self.counts[i] / self._whole)
            scaled: Tensor = loss
            if self._scale is not None:
                scaled = self._scale(loss)
                refusal = _refusal(scaled, 'scale')
                if refusal is not None:
                    return self._refuse(refusal)
                if loss.requires_grad and not scaled.requires_grad:
                    raise RuntimeError('scale has detached the loss, so there is nothing to train')
        except Exception as error:
            add_note(error, f'in the loss of micro-batch {i} of {len(self.targets)}')
            if 'mixed torch.Tensor and DTensor' in str(error):
                add_note(error, _SPLIT_OUTPUT)
            raise

        # Without the scale, as users see it, and without the graph, which backward frees.
        self._losses.append(loss.detach())
        if self._alone and len(self._losses) == len(self.targets):
            # Several processes check together, after the step.
            self.check()
        if scaled.requires_grad:
            self._learns = True
            return scaled
        # The loss of a single micro-batch may not require grad.
        return scaled.detach().requires_grad_()

    def _call(
        self,
        i: int,
        output: Any,
    ) -> tuple[Any, bool]:
        """Call the function; return its result, and whether that is known to be a sum."""
        target = self._leaves[i].value
        if self.monitor is None:
            return self._function(output, target), False
        loss, is_sum = self.monitor.call(i, self._function, output, target)
        # The sum is wanted if the normalizer is a number.
        return loss, is_sum and self.counted is not None

    def _refuse(self, error: ValueError) -> Tensor:
        """Raise an error, or keep it for :meth:`check` if other processes wait for this one.

        Those have to get their gradients, because messages are counted. All raise at the end.
        """
        if self._alone:
            raise error
        self._refusal = self._refusal or error
        return torch.zeros((), requires_grad=True)

    def check(self) -> None:
        """Check the losses of all micro-batches.

        Raises:
            ValueError: One was refused, or is not a mean over the count of its micro-batch.
        """
        if self._refusal is not None:
            raise self._refusal
        if self.monitor is not None:
            self.monitor.check(self.error)

    def behind(
        self,
        layers: Callable[..., Any],
        keeps: bool,
    ) -> Callable[..., Any]:
        """Return layers that return the loss of a micro-batch, so that their output is freed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            output = layers(*args, **kwargs)
            assert context.micro_batch is not None
            loss = self(context.micro_batch.i, output)
            if keeps:
                return output
            return loss.detach()

        return call

    @property
    def count(self) -> float:
        """The divisor of the loss of the mini-batch."""
        if self.counted is None:
            return self._whole
        return self.counted

    def total(self, trains: bool = True) -> Tensor:
        """Return the loss of the mini-batch, a scalar.

        Raises:
            RuntimeError: There is a backward, but the loss of no micro-batch requires grad.
        """
        if trains and self._losses and not self._learns:
            raise RuntimeError(
                'the loss does not require grad, so there is nothing to train: '
                'neither a parameter nor the input requires grad, or loss_fn has '
                'detached it'
            )
        if self._losses:
            return torch.stack(self._losses).sum()
        # This process has no loss, such as a rank without the last stage.
        return torch.zeros(())

    @property
    def inputs(self) -> list[Tensor]:
        """The leaves in place of the tensors of the target."""
        result: list[Tensor] = []
        for batch in self._leaves:
            result += batch.tensors
        return result

    def gradients(self) -> Gradients:
        """Return the tensors of the target that have a gradient, each with its gradient."""
        result = []
        for batch, leaves in zip(self.targets, self._leaves):
            for tensor, leaf in zip(batch.tensors, leaves.tensors):
                if leaf.grad is not None:
                    result.append((tensor, leaf.grad))
        return result


def cut_target(
    target: Any,
    chunks: int,
    batch_dim: Any,
) -> tuple[list[Chunk], list[int] | None]:
    """Cut a target into at most as many micro-batches.

    Returns:
        The targets of micro-batches, and their numbers of samples; or the target of each
        micro-batch, and ``None``, if there is nothing to cut.
    """
    is_tensor = isinstance(target, Tensor)
    if not is_tensor and not any(isinstance(leaf.value, Tensor) for leaf in leaves_of(target)):
        return [Chunk((), lambda tensors: target)], None
    batches, samples, _ = cut(target, chunks, batch_dim, 'target')
    return batches, samples


def check_samples(in_target: int, in_input: int) -> None:
    """Check that a target has as many samples as the input.

    Raises:
        ValueError: It does not.
    """
    if in_target != in_input:
        raise ValueError(
            f'the target has {in_target} samples, but the input has {in_input}; '
            'both are cut along their batch dimensions. Say which one that of the '
            'target is: target_dim=0'
        )


def counts_of(
    rule: Any,
    batches: Sequence[Chunk],
) -> list[Any]:
    """Return the counts of each function in a rule of ``gather``, one for each micro-batch.

    Args:
        batches: The input. Functions are called as the model is.

    Returns:
        For each function, a list of counts or an error. The error is not raised, because the
        output may not have this part, such as a loss without labels.
    """
    results: list[Any] = []
    for function in filter(callable, _parts(rule)):
        try:
            inputs = [batch.value for batch in batches]
            counts = _count(
                partial(call, function),
                inputs,
                'gather',
                'input',
            )
            if not sum(counts):
                raise _zero_count('gather', 'input')
            results.append(counts)
        except Exception as error:
            # To be raised only if the output has this part.
            results.append(error)
    return results


def count_functions(rule: Any) -> int:
    """Return the number of functions in a rule of ``gather``."""
    return sum(map(callable, _parts(rule)))


def with_counts(rule: Any, counts: Iterator[Any]) -> Any:
    """Return a rule of ``gather`` with means in place of functions that count.

    Args:
        rule: The rule. A part of the output is a mean over the counts of its function.
    """
    if isinstance(rule, Mapping):
        return {key: with_counts(part, counts) for key, part in rule.items()}
    if isinstance(rule, (list, tuple)):
        return [with_counts(part, counts) for part in rule]
    if not callable(rule):
        return rule
    result = next(counts)
    if isinstance(result, Exception):
        # Only an output with this part raises it.
        return partial(_raise, result)
    return partial(_mean_of, result, sum(result))


def seen_means(
    rule: Any,
    sizes: Sequence[int],
) -> LossMonitor | None:
    """Return a monitor, if a rule of ``gather`` treats all parts as means over samples."""
    words = set()
    for part in _parts(rule):
        if isinstance(part, str) or callable(part):
            words.add(part)
    if words == {'mean'}:
        return LossMonitor(sizes)
    return None


def _parts(rule: Any) -> Iterator[Any]:
    """Yield the rules of the parts of an output."""
    if isinstance(rule, Mapping):
        rule = list(rule.values())
    if not isinstance(rule, (list, tuple)):
        yield rule
        return
    for part in rule:
        yield from _parts(part)


def _raise(error: Exception, _: Any) -> NoReturn:
    raise error


def _mean_of(
    counts: Sequence[float],
    whole: float,
    xs: Sequence[Tensor],
) -> Tensor:
    terms = []
    for count, x in zip(counts, xs):
        # The mean of nothing is NaN.
        if count:
            terms.append(x * (count / whole))
    return torch.stack(terms).sum(0)


#: The way out if a loss cannot use an output that is split over ranks.
_SPLIT_OUTPUT = (
    'The output is a DTensor, which tensor_plan leaves split over ranks. Let loss_fn call '
    'torchgpipe.shard.nn.functional.parallel_cross_entropy, or call the step within '
    'torch.distributed.tensor.parallel.loss_parallel()'
)


def _refusal(loss: Any, name: str) -> ValueError | None:
    """Return the error for a loss that is no scalar."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return None
    return ValueError(
        f'{name} must give a scalar tensor of real numbers, but gave '
        f'{_outline(loss)}; reduce it, as by loss.mean(), or give the plain call '
        'a loss of another form'
    )


def _outline(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        grad = ' that requires grad' if value.requires_grad else ''
        return f'a tensor of {value.dtype} of shape {tuple(value.shape)}{grad}'
    if isinstance(value, Real):
        return f'{type(value).__name__} {value}'
    return type(value).__name__


def _counts(
    loss: LossSettings,
    targets: Sequence[Any],
    sizes: Sequence[int],
    normalizer: Any,
) -> tuple[list[float], float]:
    """Return the count of each micro-batch, and the normalizer if it is a number, else 0.

    The results are Python's numbers, which are exact and on no device.
    """
    normalizer = normalizer_of(loss, normalizer, targets)
    if normalizer is None:
        return [*map(float, sizes)], 0
    if not callable(normalizer):
        number = _number(normalizer)
        if not number:
            raise ValueError(
                'normalizer must be a function, or a finite number above zero that '
                f'the loss is divided by, but is {_outline(normalizer)}'
            )
        return [1.0] * len(sizes), number
    return _count(normalizer, targets, 'normalizer', 'target'), 0


def _count(
    function: Callable[[Any], Any],
    values: Sequence[Any],
    name: str,
    part: str,
) -> list[float]:
    """Return the count of a function in each value."""
    counts = []
    for result in [function(value) for value in values]:
        count = _number(result)
        if count is None:
            raise ValueError(
                f'{name} must count how much of the {part} of a micro-batch the loss '
                'is a mean over, a finite number not below zero, but gave '
                f'{_outline(result)}; a function that does is lambda target: (target != '
                'ignore_index).sum()'
            )
        counts.append(count)
    return counts


def _zero_count(name: str, whole: str) -> ValueError:
    return ValueError(
        f'{name} counts nothing in the whole {whole}, so there is no mean over it; '
        'leave out this mini-batch'
    )


def _number(value: Any) -> float | None:
    """Return a value as a number, or ``None`` if it cannot be a count."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    # A comparison is no count, although Python's bool is a number.
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if not 0 <= float(value) < inf:
        return None
    return float(value)
