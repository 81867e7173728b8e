"""What the user holds: a module that runs a sequential model on several devices."""
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.aliases import Value
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.devices import Device
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.edges import Pipeline
from torchgpipe.engine.gather import check_rules, gather
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.run import Run
from torchgpipe.engine.scatter import check_arguments, cut, fit_rule, value_of
from torchgpipe.materialize import materialize
from torchgpipe.means import no_mean_in_the_model
from torchgpipe.placed import Placed, verify
from torchgpipe.private import uncompiled
from torchgpipe.schedule.plain import PLAIN_CALL
from torchgpipe.settings import (Checkpoint, Settings, checkpoint_stops, parse_checkpoint,
                                 stops_of_mode)
from torchgpipe.split import (parse_balance, parse_chunks, parse_devices, split, verify_shared,
                              verify_source)
from torchgpipe.step import Losses, ScheduleLike, check_model, run_step, seen_means, with_counts
from torchgpipe.structure import Arguments, flatten_nested
from torchgpipe.weights import Weights

__all__ = ['GPipe']


class GPipe(Placed):
    """Run a sequential module on several devices, micro-batch by micro-batch (GPipe, 2019).

    Outputs, gradients, running statistics and ``state_dict`` are those of the module itself. It is
    a sequence of the layers: ``len(model)``, ``model[0]`` and ``for layer in model`` work.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = GPipe(model, balance=[2, 1], devices=['cpu:0', 'cpu:1'], chunks=4)
    >>> output = model(torch.randn(16, 4))
    >>> output.sum().backward()
    >>> output.shape
    torch.Size([16, 2])

    Args:
        module: The model. Its layers move to the devices, and are shared with this module.
        balance: The number of layers in each partition; :mod:`torchgpipe.balance` finds one. Or a
            :class:`~torchgpipe.plan.Plan`, which also says ``devices``, ``chunks`` and
            ``checkpoint``.
        devices: Where each partition lives and runs, by default all devices of the accelerator.
            The input belongs on the first one, the output will be on the last one. ``'cpu:0'``
            and ``'cpu:1'`` run at the same time, in one memory.
        chunks: Into how many micro-batches a mini-batch is split; a batch of fewer samples makes
            fewer.
        checkpoint: Which micro-batches give up their activations in training, to compute them
            again in backward: ``'always'``, ``'except_last'`` (not the last one, whose backward
            follows at once) or ``'never'``. A list has one of these for each partition; a function
            gives one for the index of a partition.
        deferred_batch_norm: Whether batch normalization updates its running statistics once per
            mini-batch, as without micro-batches, by converting ``module`` to
            :class:`~torchgpipe.batchnorm.DeferredBatchNorm` layers in place.
        batch_dim: The dimension of the batch in the tensors of the input and the output; or, for
            parts of the input, a dict or a sequence by its keys, like ``{'mask': 1}``, where
            ``None`` is for what all micro-batches share, and others are split along dimension 0.
        gather: What becomes of the tensors of micro-batches in the output: the dimension by which
            they are put together, if that is another one; for scalars ``'mean'``, which is right
            for means over samples only, ``'sum'`` or ``'stack'``; or, for means over something
            else, a function that counts that in a micro-batch, and is called as the model is. By
            keys of the output, these may be said of parts.
        weights: The values of parameters and buffers by their names in ``module.state_dict()``:
            a mapping; or the path of a file, of ``torch.save`` or, if that package is there, of
            safetensors (``….safetensors``, ``….safetensors.index.json``). They are read layer by
            layer. Without them, a module on the meta device is given initial values layer by
            layer, by ``reset_parameters()`` of the modules in it: those that it would have if it
            had been built on the CPU, where each constructor ends with that call.
        offload: Whether the inputs of partitions that checkpointing keeps wait for backward in
            pinned memory of the host. Copies go beside the computation. Partitions on the CPU
            keep theirs where they are.

    Attributes:
        balance (list[int]): As given.
        devices (list[torch.device]): One per partition.
        chunks (int): As given.
        checkpoint: As given.
        batch_dim: As given.
        gather: As given.
        offload (bool): As given.

    Raises:
        TypeError: The module is not sequential, the balance is not made of integers, or stashes
            and pops of its layers do not match.
        ValueError: The balance, ``chunks`` or ``checkpoint`` is wrong, a device is unknown, the
            balance comes from a profile of another module, the weights are those of another one,
            a tensor on the meta device gets no value, or layers on several devices share what
            only one of them can have.
        IndexError: There are fewer devices than partitions.
    """

    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: Checkpoint
    batch_dim: Any
    gather: Any
    offload: bool

    def __init__(self, module: nn.Sequential, balance: Iterable[int] | Settings | None = None, *,
                 devices: Iterable[Device] | None = None, chunks: int = 1,
                 checkpoint: Checkpoint = 'except_last',
                 deferred_batch_norm: bool = False, batch_dim: Any = 0, gather: Any = None,
                 weights: Weights | None = None, offload: bool = False) -> None:
        super().__init__()
        check_rules(batch_dim, gather)
        self.batch_dim = batch_dim
        self.gather = gather
        self._schedule: str | None = None
        verify(module)
        verify_source(balance, module)
        if isinstance(balance, Settings):
            if (devices, chunks, checkpoint) != (None, 1, 'except_last'):
                raise ValueError('a plan says devices, chunks and checkpoint, so leave these out; '
                                 'or take the balance alone: GPipe(module, plan.balance, …)')
            self._schedule, devices = balance.schedule, balance.devices
            chunks, checkpoint, balance = balance.chunks, balance.checkpoint, balance.balance
        self.chunks = parse_chunks(chunks)
        self.offload = bool(offload)
        self.balance = parse_balance(balance, len(module))
        self.checkpoint = parse_checkpoint(checkpoint, len(self.balance))
        self.devices = parse_devices(devices, len(self.balance))
        verify_shared(module, self.balance, self.devices)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        materialize(module, [device for number, device in zip(self.balance, self.devices)
                             for _ in range(number)], weights)
        partitions = nn.ModuleList(split(module, self.balance, self.devices))
        self._engine: Engine | None = Engine([*partitions], self.devices)
        self._place(module, partitions)

    @uncompiled
    def forward(self, *args: Value, **kwargs: Value) -> Value:
        """Run the model on a mini-batch.

        >>> class Attend(nn.Module):
        ...     def forward(self, query, *, mask=None):
        ...         return query if mask is None else query * mask
        >>> layers = nn.Sequential(Attend(), nn.ReLU())
        >>> model = GPipe(layers, [1, 1], devices=['cpu', 'cpu'], chunks=2)
        >>> model(torch.ones(4, 2), mask=torch.zeros(4, 1)).sum()
        tensor(0.)

        Args:
            *args: What the first layer takes, mostly one value: a tensor of shape
                ``(batch, …)``; or tuples, lists, dicts and dataclasses of any nesting with such
                tensors, ``None`` and plain Python values. Scalars, plain values and what is in a
                :class:`~torchgpipe.NoChunk` are the same for all micro-batches.
            **kwargs: What it takes by name.

        Returns:
            What the last layer returns, of the same nesting, on ``devices[-1]``.

        Raises:
            TypeError: The input, or what a partition returned, is made of something else, or the
                first layer does not take it.
            ValueError: Batch sizes disagree or are zero, the output has another one, or has a
                scalar and no rule for it.
        """
        input = value_of(args, kwargs)
        if not self.devices:
            flatten_nested(input)
            return input
        batches, sizes, rule, options = self._cut(input)
        pipeline = Pipeline(self._running_engine(), batches, **options)
        if rule is not None:
            pipeline.losses = seen_means(rule, sizes)
        pipeline.run()
        if pipeline.losses:
            pipeline.losses.check(no_mean_in_the_model)
        return self._gathered(batches, sizes, rule, pipeline)

    def _running_engine(self) -> Engine:
        partitions = self.partitions  # Where a layer has been replaced, there is no engine now.
        if self._engine is None:
            self._engine = Engine([*partitions], self.devices)
        return self._engine

    def _cut(self, input: Value) -> tuple[list[Batch], list[int], Any, dict[str, Any]]:
        """Return the micro-batches of an input, their sizes, what gathers, and their options."""
        if isinstance(input, Arguments):
            check_arguments(self._names[0], self[0], input)
        rule = self.batch_dim
        rule = rule if isinstance(rule, int) else fit_rule(rule, input, self)
        batches, sizes, common = cut(input, self.chunks, rule)
        mode = self.checkpoint if self.training else 'never'
        stops = (stops_of_mode if isinstance(mode, str) else checkpoint_stops)(
            mode, len(batches), len(self.devices))
        return batches, sizes, self.gather and with_counts(self.gather, batches), {
            'checkpoint_stops': stops, 'common': common, 'offload': self.offload}

    def _gathered(self, batches: list[Batch], sizes: list[int], rule: Any, pipeline: Run) -> Value:
        batch_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return gather(batches, sizes, rule, batch_dim, pipeline.aliasing.common(0))

    def step(self, input: Value, target: Value, loss_fn: Callable[[Any, Any], Tensor], *,
             schedule: ScheduleLike = '1f1b', target_dim: Any = None, normalizer: Any = None,
             scale: Callable[[Tensor], Tensor] | None = None, return_output: bool = False) -> Any:
        """Run forward and backward of a mini-batch, in the order of a schedule.

        Gradients are added to ``.grad`` as by ``loss_fn(model(input), target).backward()``. Where
        the plain call holds all micro-batches at once, a schedule such as 1F1B holds as many as
        there are partitions; and workers of the CPU go through backward at the same time.

        >>> model = GPipe(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), [1, 1],
        ...               devices=['cpu:0', 'cpu:1'], chunks=4)
        >>> loss = model.step(torch.ones(8, 3), torch.ones(8, 2), nn.functional.mse_loss)
        >>> loss.shape, model[0].weight.grad.shape
        (torch.Size([]), torch.Size([4, 3]))

        Args:
            input: As in the call; several arguments as :class:`~torchgpipe.Arguments`.
            target: A value of as many samples, of any nesting, on the last device.
            loss_fn: ``loss_fn(output, target)`` of a micro-batch, a scalar: a mean over samples,
                if ``normalizer`` does not say otherwise. What means of PyTorch's losses of classes
                are over (``ignore_index``, ``weight``) is known. If it is a module, parameters in
                it get their gradients as those of the model do.
            schedule: A name (see :func:`torchgpipe.schedule.make`), a
                :class:`~torchgpipe.schedule.Schedule`, or the path of one as CSV; ``'auto'`` is
                that of the plan by which the model was made. With several partitions on each
                device, as in ``devices=[0, 1, 0, 1]``, ``'interleaved'`` and ``'looped-bfs'`` take
                them for virtual stages; so does ``'zb-v'`` with ``devices=[0, 1, 1, 0]``.
            target_dim: Where the batch of the target is, a rule as ``batch_dim`` is for the input;
                if that is an integer, it is the default.
            normalizer: What the loss is divided by: a number above zero, if ``loss_fn`` gives
                sums (1 leaves it a sum); a function of the target of a micro-batch, if ``loss_fn``
                gives means over what that counts, such as tokens.
            scale: What makes another loss of the loss before backward: ``scaler.scale`` of a
                :class:`torch.amp.GradScaler`.
            return_output: Whether to give the output, too, without a graph.

        Returns:
            The loss of the mini-batch, without a graph, on the last device; or a pair of that and
            the output.

        Raises:
            RuntimeError: The model is in evaluation mode, gradients are off, or there is a hook on
                this model itself.
            ValueError: The schedule is not one for these partitions and micro-batches, the target
                has other samples, or the loss is no scalar or known to be no mean. What a layer or
                the loss raises comes before any gradient is added.
        """
        check_model(self, len(self.devices))
        batches, sizes, rule, options = self._cut(input)
        engine = self._running_engine()
        if target_dim is None:
            target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        if isinstance(schedule, str) and schedule == 'auto':
            schedule = self._planned()
        losses = Losses(loss_fn, target, sizes, target_dim, normalizer, scale)
        pipeline = run_step(engine, batches, losses, schedule, **options)
        loss = losses.total()
        return (loss, self._gathered(batches, sizes, rule, pipeline)) if return_output else loss

    def _planned(self) -> str:
        if self._schedule is None:
            raise ValueError("schedule='auto' is that of a plan, but this model was made without "
                             'one; name a schedule, or make it by a plan: GPipe(module, plan) of '
                             'torchgpipe.plan.plan(module, sample, devices=…)')
        return 'gpipe' if self._schedule == PLAIN_CALL else self._schedule  # in the same order

    @property
    def partitions(self) -> nn.ModuleList:
        """One :class:`torch.nn.Sequential` per device, with layers by their names in the module.

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
        known = list(zip(self._names, self._known))
        if [item for part in partitions for item in part._modules.items()] != known:
            raise RuntimeError('a layer of this GPipe has been replaced, added or removed in its '
                               'partition; replace it in the GPipe itself, '
                               "model.set_submodule('name', layer), and partitions follow")
        if [*layers.items()] != known:
            self._replace(layers, partitions)
        return partitions
