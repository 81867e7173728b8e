"""Batch normalization whose running statistics see the mini-batch, not the micro-batches.

Each micro-batch has to be normalised by its own statistics. Mean and variance are merged over all
micro-batches. The running statistics change once per mini-batch, as they would in plain batch
normalization of the whole mini-batch::

    micro-batch     0          1          2          end of forward     0, recomputed
    normalise by    own        own        own                           own
    merge           start      merge      merge      commit             nothing
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from torchgpipe.base.context import context
from torchgpipe.base.private import HOOKS, BatchNorm, is_full_backward_hook, uncompiled

__all__ = ['DeferredBatchNorm']

TModule = TypeVar('TModule', bound=nn.Module)


#: Returns the tensors of all replicas.
Gather = Callable[[Tensor], Sequence[Tensor]]


class _Moments(NamedTuple):
    """Number, mean and sum of squared deviations of the values seen, per channel.

    They are merged as in Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances" (1979). The method avoids E[x²] - E[x]², which cancels if the mean
    is large.
    """

    number: int
    mean: Tensor
    deviation: Tensor

    def merge(self, other: '_Moments') -> '_Moments':
        number = self.number + other.number
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.number / number)
        between = delta.square() * (self.number * other.number / number)
        deviation = self.deviation + other.deviation + between
        return _Moments(number, mean, deviation)

    def of_all(self, gather: Gather) -> '_Moments':
        """Return the merged moments of all replicas, in the order of replicas."""
        number = torch.full_like(self.mean, self.number, dtype=torch.float64)
        # Packed, because one exchange is enough. All channels have the same number.
        packed = torch.stack([number, self.mean, self.deviation])
        replicas = []
        for replica in gather(packed):
            number, mean, deviation = replica.unbind()
            replicas.append(_Moments(int(number[0]), mean, deviation))
        return reduce(_Moments.merge, replicas)


class _Statistics:
    """A layer's statistics of a mini-batch: moments by partition and call within a cell.

    A layer that is called twice updates its running statistics twice.
    """

    def __init__(self) -> None:
        self._cell: int | None = None
        self._call = 0
        #: By partition and call.
        self.moments: dict[tuple[int, int], _Moments] = {}

    def add(
        self,
        j: int,
        cell: int,
        moments: _Moments,
    ) -> None:
        """Merge the moments of a call with the same call's moments in other micro-batches."""
        if cell == self._cell:
            self._call += 1
        else:
            self._call = 0
        self._cell = cell
        key = j, self._call
        if key in self.moments:
            moments = self.moments[key].merge(moments)
        self.moments[key] = moments


class DeferredBatchNorm(BatchNorm):
    """Batch normalization for micro-batches: running statistics once per mini-batch.

    In a :class:`~torchgpipe.GPipe`, the pipeline determines the end of a mini-batch, even if some
    micro-batches skip this layer. Elsewhere, every ``chunks`` calls make a mini-batch. Means and
    variances of micro-batches are merged as in Chan, Golub and LeVeque (1979).

    >>> import torch
    >>> bn = DeferredBatchNorm(3, chunks=2)
    >>> for micro_batch in torch.randn(8, 3, 5).chunk(2):
    ...     output = bn(micro_batch)
    >>> bn.num_batches_tracked
    tensor(1)

    Args:
        num_features: Number of channels ``C`` of an input of shape ``(N, C)`` or ``(N, C, …)``.
        eps: Added to the variance.
        momentum: Weight of the newest mini-batch in the running statistics; ``None`` for their
            cumulative average.
        affine: Whether to have a weight and a bias.
        chunks: Number of micro-batches in a mini-batch, outside of a pipeline.
    """

    # The base may not have running statistics, but this layer always has.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats=True,
            device=device,
            dtype=dtype,
        )
        self.chunks = chunks
        self._start()

    def _start(self) -> None:
        # The calls outside of a pipeline since the last mini-batch.
        self._calls = 0
        self._statistics = _Statistics()

    def __getstate__(self) -> dict[str, Any]:
        # Copies have no statistics of an interrupted mini-batch.
        return {**self.__dict__, '_calls': 0, '_statistics': _Statistics()}

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f'expected an input of shape (N, C) or (N, C, …), got {tuple(input.shape)}'
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch of shape ``(N, C)`` or ``(N, C, …)``."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        # With momentum 1, PyTorch's kernel writes the statistics of this micro-batch to its
        # running statistics. Therefore no second pass over the input is needed.
        mean = torch.zeros_like(self.running_mean)
        var = torch.zeros_like(self.running_var)
        output = F.batch_norm(
            input,
            mean,
            var,
            self.weight,
            self.bias,
            True,  # training
            1.0,  # momentum
            self.eps,
        )
        if not context.recomputing:
            self._track(input.numel() // input.size(1), mean, var)
        return output

    @uncompiled
    def _track(
        self,
        number: int,
        mean: Tensor,
        var: Tensor,
    ) -> None:
        # Running statistics may have half precision, in which merged moments would be inexact.
        dtype = torch.promote_types(mean.dtype, torch.float32)
        deviation = var.to(dtype) * (number - 1)
        moments = _Moments(number, mean.to(dtype), deviation)
        micro_batch = context.micro_batch
        if micro_batch is not None:
            statistics = micro_batch.mini_batch.value(self, self._begin)
            statistics.add(micro_batch.j, micro_batch.cell, moments)
            return
        # Outside of a pipeline, every call is a cell.
        self._statistics.add(0, self._calls, moments)
        self._calls += 1
        if self._calls >= self.chunks:
            statistics = self._statistics
            self._start()
            self._commit(statistics)

    def _begin(self) -> _Statistics:
        """Begin a mini-batch of a pipeline."""
        micro_batch = context.micro_batch
        assert micro_batch is not None
        mini_batch = micro_batch.mini_batch
        statistics = _Statistics()
        gather = mini_batch.gather
        mini_batch.at_end(lambda: self._commit(statistics, gather), micro_batch.lock)
        return statistics

    @torch.no_grad()
    def _commit(
        self,
        statistics: _Statistics,
        gather: Gather | None = None,
    ) -> None:
        # In the order of partitions and calls, regardless of the threads that added them.
        for _, moments in sorted(statistics.moments.items()):
            if gather is not None:
                moments = moments.of_all(gather)
            self._move(moments)

    def _move(self, moments: _Moments) -> None:
        """Update the running statistics by one mini-batch."""
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1 / float(self.num_batches_tracked)
        mean = self.running_mean
        var = self.running_var
        # The moments may be from another partition, and so from another device.
        mean.lerp_(moments.mean.to(mean), factor)
        new = moments.deviation / (moments.number - 1)
        var.lerp_(new.to(var), factor)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        # In version 0.0.7, these buffers held an unfinished mini-batch.
        for name in ('sum', 'sum_squares'):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @classmethod
    def convert_deferred_batch_norm(cls, module: TModule, chunks: int = 1) -> TModule:
        """Replace every batch normalization in a module by a deferred one, in place.

        Weights, biases and running statistics are shared with the replaced layer. Layers without
        running statistics are not replaced, because they have nothing to defer. Layers with their
        own forward, such as :class:`torch.nn.SyncBatchNorm`, are not replaced either.

        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> DeferredBatchNorm.convert_deferred_batch_norm(model)[1].num_features
        3

        Args:
            module: A module, itself a batch normalization or not.
            chunks: Number of micro-batches in a mini-batch, outside of a pipeline.

        Returns:
            The module, or its replacement.

        Raises:
            ValueError: A lazy layer has not seen its first input, or a layer has
                parametrizations.
        """
        return cast(TModule, cls._convert_all(module, chunks, {}))

    @classmethod
    def _convert_all(
        cls,
        module: nn.Module,
        chunks: int,
        done: dict[nn.Module, nn.Module],
    ) -> nn.Module:
        # A layer in two places is replaced by one layer in both.
        if module not in done:
            done[module] = module
            if isinstance(module, BatchNorm):
                done[module] = cls._convert(module, chunks)
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = cls._convert_all(child, chunks, done)
        return done[module]

    @classmethod
    def _convert(cls, module: BatchNorm, chunks: int) -> BatchNorm:
        if isinstance(module, LazyModuleMixin):
            raise ValueError(
                f'{type(module).__name__} does not know its number of channels yet; '
                'call the module once before it is converted'
            )
        is_plain = type(module).forward is BatchNorm.forward and module.track_running_stats
        is_deferred = isinstance(module, cls) and module.chunks != chunks
        if not is_plain and not is_deferred:
            return module
        if is_parametrized(module):
            raise ValueError('a batch normalization with parametrizations cannot be converted')
        # On the meta device, because the parameters of the module replace these.
        deferred = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            chunks,
            device='meta',
        )
        for name in ('_parameters', '_buffers', *HOOKS):
            getattr(deferred, name).update(getattr(module, name))
        setattr(deferred, is_full_backward_hook, getattr(module, is_full_backward_hook))
        return deferred.train(module.training)
