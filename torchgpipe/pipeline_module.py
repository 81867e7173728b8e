"""The base of pipelines: a module with settings, two views of its layers, and steps.

[Note: Two views of the layers]
The layers are registered as children under their own names. All tools that use names therefore
see the module's names, for any balance. Partitions are a second view of the same layers, and not
children. If a tool replaces a child, partitions follow. A change in a partition raises, because
the children cannot follow it: their parameters may be read at any time. If a layer has the name of
an attribute of the class, `model.name` is the attribute, and functions that take names as strings
find the layer. Over processes a rank has only the layers of its own stages; its other partitions
are empty.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.private import hooks_of, uncompiled
from torchgpipe.base.settings import (
    Checkpoint,
    LossOptions,
    Settings,
    checkpoint_stops,
    parse_checkpoint,
)
from torchgpipe.engine.microbatches import (
    check_rules,
    value_of,
)
from torchgpipe.engine.policy import (
    KeepRules,
    PartitionPolicy,
    keep_everything,
    parse_keep,
)
from torchgpipe.engine.split import (
    parse_balance,
    parse_chunks,
    verify_counts,
    verify_layers,
    verify_module,
    verify_source,
)
from torchgpipe.model.sequence import LayerSequence
from torchgpipe.schedule import Schedule, ScheduleLike
from torchgpipe.schedule.generators import PLAIN_CALL
from torchgpipe.skip.skippable import verify_skippables


class PipelineModule(LayerSequence):
    """A pipeline as a module; a subclass moves micro-batches through it.

    Attributes:
        balance (list[int]): The number of layers in each partition.
        chunks (int): The largest number of micro-batches.
        checkpoint: The mode of checkpointing, as given.
        keep: The results that checkpointing keeps, as given.
        batch_dim: The rule for the batch dimension.
        gather: The rule for tensors without a batch dimension.
        offload (bool): Whether checkpointed inputs wait in the memory of the host.
        devices (list[torch.device]): One per partition.
    """

    batch_dim: Any
    gather: Any
    offload: bool
    keep: KeepRules
    _policies: tuple[PartitionPolicy, ...]
    _engine: Any
    _known: tuple[nn.Module | None, ...]
    _schedule: str | Schedule | None

    def _set(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | Settings | None,
        devices: Any,
        chunks: int,
        checkpoint: Checkpoint,
        batch_dim: Any,
        gather: Any,
        offload: bool,
        keep: KeepRules,
    ) -> Any:
        """Check the settings and keep them; return the devices, which a plan may name."""
        check_rules(batch_dim, gather)
        self.batch_dim = batch_dim
        self.gather = gather
        self.offload = bool(offload)
        self._schedule = None
        verify(module)
        # Not by `setattr`, which would register it as a child.
        self.__dict__['_original'] = module.__dict__.get('_original')
        verify_source(balance, module)
        if isinstance(balance, Settings):
            if (devices, chunks, checkpoint, keep) != (None, 1, 'except_last', None):
                raise ValueError(
                    'a plan says devices, chunks, checkpoint and keep, so leave these out; or '
                    f'take the balance alone: {type(self).__name__}(module, plan.balance, …)'
                )
            self._schedule = balance.schedule
            if balance.order:
                self._schedule = Schedule.parse(balance.order)
            devices = balance.devices
            chunks = balance.chunks
            checkpoint = balance.checkpoint
            keep = balance.keep or None
            balance = balance.balance
        self.chunks = parse_chunks(chunks)
        if self.chunks > 1:
            # With one micro-batch, such a layer sees all indices of the mini-batch.
            verify_counts(module)
        self.balance = parse_balance(balance, len(module))
        self.checkpoint = parse_checkpoint(checkpoint, len(self.balance))
        self.keep = keep
        self._policies = parse_keep(keep, module, self.balance)
        self._check_keep()
        return devices

    def _check_keep(self) -> None:
        """Raise if a policy is for a partition that is not checkpointed."""
        stops = checkpoint_stops(self.checkpoint, 2, len(self.balance))
        is_in_vain = bool(stops) and not any(stops) and any(map(any, self._policies))
        for stop, policy in zip(stops, self._policies):
            if stop == 0 and any(policy) and isinstance(self.keep, Mapping):
                is_in_vain = True
        if is_in_vain:
            raise ValueError(
                f'keep={self.keep!r} is for checkpointed micro-batches, but with checkpoint='
                f'{self.checkpoint!r} such a partition does not have any; use '
                "checkpoint='always', or leave out keep"
            )

    def _recomputed(self, m: int) -> list[range]:
        """Return the checkpointed micro-batches of each partition in training."""
        stops = checkpoint_stops(self.checkpoint, m, len(self.balance))
        recomputed = []
        for stop, policy in zip(stops, self._policies):
            # A partition that keeps everything is a partition without checkpoints.
            keeps_all = policy == PartitionPolicy(keep_everything)
            recomputed.append(range(0 if keeps_all else stop))
        return recomputed

    def _place(
        self,
        names: Iterable[str],
        layers: Mapping[str, Any],
        partitions: nn.ModuleList,
        training: bool,
    ) -> None:
        """Take the layers of a module: [Note: Two views of the layers]."""
        for module in (self, partitions, *partitions):
            module.training = training
        # Not by `setattr`, which would register the partitions as children.
        self.__dict__['partitions'] = partitions
        self.__dict__['_names'] = tuple(names)
        self.__dict__['_known'] = tuple(layers.get(name) for name in self._names)
        self._modules.update(layers)

    def _call(self, input: Any) -> Any:
        raise NotImplementedError

    def _train_step(
        self,
        input: Any,
        ready: Callable[[], ScheduleLike],
        loss: LossOptions,
        return_output: bool,
    ) -> Any:
        raise NotImplementedError

    def _evaluate(
        self,
        input: Any,
        ready: Callable[[], Any],
        loss: LossOptions,
        return_output: bool,
    ) -> Any:
        raise NotImplementedError

    def _replace(self, layers: 'OrderedDict[str, Any]', partitions: nn.ModuleList) -> None:
        """Let partitions have other layers than before."""
        raise NotImplementedError

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a mini-batch.

        >>> from torchgpipe import GPipe
        >>> class Attend(nn.Module):
        ...     def forward(self, query, *, mask=None):
        ...         return query if mask is None else query * mask
        >>> layers = nn.Sequential(Attend(), nn.ReLU())
        >>> model = GPipe(layers, [1, 1], devices=['cpu', 'cpu'], chunks=2)
        >>> model(torch.ones(4, 2), mask=torch.zeros(4, 1)).sum()
        tensor(0.)

        Args:
            *args: The arguments of the first layer, usually one value: a tensor of shape
                ``(batch, …)``, or tuples, lists, dicts and dataclasses of any nesting. These have
                such tensors, ``None`` and plain Python values. Scalars, plain values and the
                content of a :class:`~torchgpipe.NoChunk` are the same for all micro-batches.
            **kwargs: The keyword arguments of the first layer.

        Returns:
            The output of the last layer, of the same nesting, on the last device. Over processes,
            the output of this replica, without a graph, and ``None`` on ranks without the last
            stage.

        Raises:
            TypeError: The input or the output of a partition has another type, or the first layer
                does not take the arguments.
            ValueError: Batch sizes disagree or are zero, the output has another one, or has a
                scalar and no rule for it.
        """
        return self._call(value_of(args, kwargs))

    def step(
        self,
        input: Any,
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        schedule: ScheduleLike = '1f1b',
        target_dim: Any = None,
        normalizer: Any = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        return_output: bool = False,
    ) -> Any:
        """Run forward and backward of a mini-batch, in the order of a schedule.

        Gradients are added to ``.grad`` as by ``loss_fn(model(input), target).backward()``. Where
        the plain call holds all micro-batches at once, a schedule such as 1F1B holds as many as
        there are partitions; and workers of the CPU run backward concurrently. Over processes, all
        ranks call it, and each replica passes its own part of the mini-batch, of any size.

        >>> from torchgpipe import GPipe
        >>> model = GPipe(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), [1, 1],
        ...               devices=['cpu:0', 'cpu:1'], chunks=4)
        >>> loss = model.step(torch.ones(8, 3), torch.ones(8, 2), nn.functional.mse_loss)
        >>> loss.shape, model[0].weight.grad.shape
        (torch.Size([]), torch.Size([4, 3]))

        Args:
            input: As in the call; several arguments as :class:`~torchgpipe.Arguments`. Only ranks
                with the first stage read it.
            target: A value of as many samples, of any nesting, on the last device. Only ranks with
                the last stage read it.
            loss_fn: ``loss_fn(output, target)`` of a micro-batch, a scalar: a mean over samples,
                if ``normalizer`` does not say otherwise. The divisors of PyTorch's losses of
                classes (``ignore_index``, ``weight``) are known. If it is a module, its parameters
                get their gradients as the parameters of the model do.
            schedule: A name (see :func:`torchgpipe.schedule.make`), a
                :class:`~torchgpipe.schedule.Schedule`, or the path of one as CSV; ``'auto'`` is
                the schedule of the plan by which the model was made. With several partitions on
                each device, as in ``devices=[0, 1, 0, 1]``, ``'interleaved'`` and ``'looped-bfs'``
                take them for virtual stages; so do ``'zb-v'``, ``'v-half'`` and ``'v-min'`` with
                ``devices=[0, 1, 1, 0]``. Recomputations in a schedule (``R``) are in addition to
                ``checkpoint``.
            target_dim: The batch dimension of the target, a rule as ``batch_dim`` is for the
                input; if that is an integer, it is the default.
            normalizer: The divisor of the loss. If ``loss_fn`` returns sums, it is a number above
                zero (1 keeps the sum). If ``loss_fn`` returns means over a count, such as the
                number of tokens, it is a function that counts in the target of a micro-batch.
                Counts are summed over all replicas.
            scale: Scales the loss before backward: ``scaler.scale`` of a
                :class:`torch.amp.GradScaler`.
            return_output: Whether to return the output as well, without a graph.

        Returns:
            The loss of the mini-batch, without a graph, on the last device, or on all ranks; or a
            pair of it and the output as in the call.

        Raises:
            RuntimeError: The model is in evaluation mode, gradients are off, there is a hook on
                this model itself, or another rank could not begin.
            ValueError: The schedule is not one for these partitions and micro-batches, the target
                has other samples, or the loss is no scalar or known to be no mean. An error of a
                layer or of the loss is raised before any gradient is added.
        """
        if target_dim is None:
            # A rule by keys of the input says nothing of the target.
            target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        loss = LossOptions(loss_fn, target, target_dim, normalizer, scale)
        return self._train_step(input, partial(self._ready, schedule), loss, return_output)

    def _ready(self, schedule: ScheduleLike | None = None) -> Any:
        """Check that the model can take a step, or an evaluation, and return its schedule."""
        action = 'an evaluation'
        if schedule is not None:
            action = 'a step'
            reason = None
            if not self.training:
                reason = 'the model is in evaluation mode'
            elif not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                reason = 'gradients are off (torch.no_grad or inference_mode)'
            if reason is not None:
                raise RuntimeError(
                    f'a step computes gradients, but {reason}; call model(input) for outputs, or '
                    'model.train() before'
                )
        if any(hooks_of(self)):
            # Hooks of layers are called, because cells call the layers.
            raise RuntimeError(
                f'{action} does not call this model as a whole, so it would leave out the '
                'hooks that are registered on it; register them on its layers'
            )
        if not self.balance:
            raise ValueError(f'{action} takes at least one partition')
        if isinstance(schedule, str) and schedule == 'auto':
            return self._planned()
        return schedule

    def evaluate(
        self,
        input: Any,
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        normalizer: Any = None,
        target_dim: Any = None,
        return_output: bool = False,
    ) -> Any:
        """Return the loss of a mini-batch and its count, by a forward through the pipeline.

        The mean over several mini-batches is exact, whatever the sizes of these:

        >>> from torchgpipe import GPipe
        >>> model = GPipe(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), [1, 1],
        ...               devices=['cpu:0', 'cpu:1'], chunks=4).eval()
        >>> total = count = 0
        >>> for x, y in zip(torch.ones(11, 3).split(8), torch.ones(11, 2).split(8)):
        ...     loss, n = model.evaluate(x, y, nn.functional.mse_loss)
        ...     total, count = total + loss * n, count + n
        >>> (total / count).shape, count
        (torch.Size([]), 11.0)

        Over processes, all ranks call it, and each replica passes its own part. A replica that
        has no samples left passes ``None`` for both, in evaluation mode.

        Args:
            input: As in :meth:`step`.
            target: As in :meth:`step`.
            loss_fn: As in :meth:`step`.
            normalizer: As in :meth:`step`.
            target_dim: As in :meth:`step`.
            return_output: Whether to return the output of this replica as well. Otherwise the
                output of a micro-batch is freed when its loss is known.

        Returns:
            The loss of the mini-batch, on all ranks, and its divisor, for example the number of
            samples or of labels, as a float. With ``return_output``, the output as well.

        Raises:
            ValueError: The target has other samples, or the loss is no scalar or known to be no
                mean.
        """
        if target_dim is None:
            target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        loss = LossOptions(loss_fn, target, target_dim, normalizer)
        return self._evaluate(input, self._ready, loss, return_output)

    def _planned(self) -> ScheduleLike:
        if self._schedule is None:
            name = type(self).__name__
            raise ValueError(
                "schedule='auto' is that of a plan, but this model was made without "
                f'one; name a schedule, or make it by a plan: {name}(module, plan) '
                'of torchgpipe.plan.plan(module, sample, devices=…)'
            )
        if self._schedule == PLAIN_CALL:
            return 'gpipe'  # in the same order
        return self._schedule

    @property
    def partitions(self) -> nn.ModuleList:
        """One :class:`torch.nn.Sequential` per partition, with layers by their names.

        >>> from torchgpipe import GPipe
        >>> model = GPipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [1, 1], devices=['cpu'] * 2)
        >>> model.set_submodule('1', nn.Tanh())
        >>> model.partitions[1]
        Sequential(
          (1): Tanh()
        )

        Raises:
            RuntimeError: A layer of one has been replaced there, and not in the model.
        """
        partitions: nn.ModuleList = self.__dict__['partitions']
        layers = OrderedDict((name, self._modules.get(name)) for name in self._names)
        before = list(zip(self._names, self._known))
        # Over processes, this rank does not have the layers of other stages.
        expected = [(name, layer) for name, layer in before if layer is not None]
        actual: list[Any] = []
        for partition in partitions:
            actual += partition._modules.items()
        if actual != expected:
            raise RuntimeError(
                'a layer of this GPipe has been replaced, added or removed in its '
                'partition; replace it in the GPipe itself, '
                "model.set_submodule('name', layer), and partitions follow"
            )
        # A child was replaced, added or removed since the last time, so partitions follow.
        if [*layers.items()] != before:
            self._replace(layers, partitions)
            self._known = tuple(layers.values())
        return partitions


def verify(module: nn.Module) -> None:
    """Check that a module is a sequence of layers, whose skips match."""
    if not isinstance(module, nn.Sequential):
        from torchgpipe.sequential.convert import not_sequential

        raise not_sequential(module)
    verify_module(module)
    verify_layers(module)
    verify_skippables(module)
