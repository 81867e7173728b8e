"""``GPipe``: a module that runs a sequential model on several devices, and the base of pipelines.

[Note: Two views of the layers]
The layers are registered as children under their own names. All tools that use names therefore
see the module's names, for any balance. Partitions are a second view of the same layers, and not
children. If a tool replaces a child, partitions follow. A change in a partition raises, because
the children cannot follow it: their parameters may be read at any time. If a layer has the name of
an attribute of the class, `model.name` is the attribute, and functions that take names as strings
find the layer. Over processes a rank has only the layers of its own stages; its other partitions
are empty.

Modules that a plain call does not use, such as steps and losses, are imported in functions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import Device
from torchgpipe.base.private import hooks_of, uncompiled
from torchgpipe.base.settings import (
    Checkpoint,
    Settings,
    checkpoint_stops,
    parse_checkpoint,
    stops_of_mode,
)
from torchgpipe.base.structure import Arguments, Value, flatten_nested
from torchgpipe.engine.microbatches import (
    Chunk,
    check_arguments,
    check_rules,
    cut,
    fit_rule,
    gather,
    value_of,
)
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.split import (
    parse_balance,
    parse_chunks,
    parse_devices,
    parse_seed,
    split,
    verify_counts,
    verify_layers,
    verify_module,
    verify_shared,
    verify_source,
)
from torchgpipe.model.sequence import LayerSequence
from torchgpipe.model.weights import Weights
from torchgpipe.schedule import Schedule, ScheduleLike
from torchgpipe.schedule.generators import PLAIN_CALL
from torchgpipe.skip.skippable import verify_skippables


class PipelineModule(LayerSequence):
    """A pipeline as a module; a subclass moves micro-batches through it.

    Attributes:
        balance (list[int]): The number of layers in each partition.
        chunks (int): The largest number of micro-batches.
        checkpoint: The mode of checkpointing, as given.
        batch_dim: The rule for the batch dimension.
        gather: The rule for tensors without a batch dimension.
        offload (bool): Whether checkpointed inputs wait in the memory of the host.
        devices (list[torch.device]): One per partition.
    """

    batch_dim: Any
    gather: Any
    offload: bool
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
    ) -> Any:
        """Check the settings and keep them; return the devices, which a plan may name."""
        check_rules(batch_dim, gather)
        self.batch_dim = batch_dim
        self.gather = gather
        self.offload = bool(offload)
        self._schedule = None
        verify(module)
        verify_source(balance, module)
        if isinstance(balance, Settings):
            if (devices, chunks, checkpoint) != (None, 1, 'except_last'):
                raise ValueError(
                    'a plan says devices, chunks and checkpoint, so leave these out; or take the '
                    f'balance alone: {type(self).__name__}(module, plan.balance, …)'
                )
            self._schedule = Schedule.parse(balance.order) if balance.order else balance.schedule
            devices = balance.devices
            chunks = balance.chunks
            checkpoint = balance.checkpoint
            balance = balance.balance
        self.chunks = parse_chunks(chunks)
        if self.chunks > 1:
            verify_counts(module)
        self.balance = parse_balance(balance, len(module))
        self.checkpoint = parse_checkpoint(checkpoint, len(self.balance))
        return devices

    def _place(
        self,
        names: Iterable[str],
        layers: Mapping[str, Any],
        partitions: nn.ModuleList,
        training: bool,
    ) -> None:
        """Take the layers of a module: [Note: Two views of the layers]."""
        for each in (self, partitions, *partitions):
            each.training = training
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
        loss: tuple[Any, ...],
        return_output: bool,
    ) -> Any:
        raise NotImplementedError

    def _evaluate(
        self, input: Any, ready: Callable[[], Any], loss: tuple[Any, ...], return_output: bool
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
            target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return self._train_step(
            input,
            partial(self._ready, schedule),
            (loss_fn, target, target_dim, normalizer, scale),
            return_output,
        )

    def _ready(self, schedule: ScheduleLike | None = None) -> Any:
        """See that the model may take a step, or an evaluation, and return the schedule of it."""
        trains = schedule is not None
        if trains and (
            not self.training or not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        ):
            raise RuntimeError(
                'a step computes gradients, but '
                + (
                    'gradients are off (torch.no_grad or inference_mode)'
                    if self.training
                    else 'the model is in evaluation mode'
                )
                + '; call model(input) for outputs, or model.train() before'
            )
        if any(hooks_of(self)):
            raise _left_out('a step' if trains else 'an evaluation')
        if not self.balance:
            raise ValueError(
                f'{"a step" if trains else "an evaluation"} takes at least one partition'
            )
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
        return self._evaluate(
            input, self._ready, (loss_fn, target, target_dim, normalizer, None), return_output
        )

    def _planned(self) -> ScheduleLike:
        if self._schedule is None:
            name = type(self).__name__
            raise ValueError(
                "schedule='auto' is that of a plan, but this model was made without "
                f'one; name a schedule, or make it by a plan: {name}(module, plan) '
                'of torchgpipe.plan.plan(module, sample, devices=…)'
            )
        return 'gpipe' if self._schedule == PLAIN_CALL else self._schedule  # in the same order

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
        known = list(zip(self._names, self._known))
        if [item for part in partitions for item in part._modules.items()] != [
            item for item in known if item[1] is not None
        ]:
            raise RuntimeError(
                'a layer of this GPipe has been replaced, added or removed in its '
                'partition; replace it in the GPipe itself, '
                "model.set_submodule('name', layer), and partitions follow"
            )
        if [*layers.items()] != known:
            self._replace(layers, partitions)
            self._known = tuple(layers.values())
        return partitions


def _left_out(what: str) -> RuntimeError:
    return RuntimeError(
        f'{what} does not call this model as a whole, so it would leave out the '
        'hooks that are registered on it; register them on its layers'
    )


def _not_sequential(module: object) -> TypeError:
    from torchgpipe.sequential.convert import not_sequential

    return not_sequential(module)


def verify(module: nn.Sequential) -> None:
    """Check that a module is a sequence of layers, whose skips match."""
    if not isinstance(module, nn.Sequential):
        raise _not_sequential(module)
    verify_module(module)
    verify_layers(module)
    verify_skippables(module)


class GPipe(PipelineModule):
    """Run a sequential module on several devices, micro-batch by micro-batch (GPipe, 2019).

    Outputs, gradients, running statistics and ``state_dict`` equal the module's. The model is a
    sequence of the layers: ``len(model)``, ``model[0]`` and ``for layer in model`` work.

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
        batch_dim: The batch dimension of the tensors in the input and the output. For parts of the
            input, it is a dict or a sequence by its keys, such as ``{'mask': 1}``: ``None`` marks
            values that all micro-batches share, and other tensors are split along dimension 0.
        gather: The rule for tensors of micro-batches in the output. An integer is the dimension
            of their concatenation, if it is not ``batch_dim``. Scalars take ``'mean'``, which is
            exact for means over samples only, ``'sum'`` or ``'stack'``. For means over other
            counts, it is a function that is called like the model and counts in a micro-batch.
            ``'micro-batch mean'`` accepts a loss for each micro-batch, such as a router's
            auxiliary loss, although their mean is not the loss of the mini-batch. A dict or a
            sequence has rules by keys of the output.
        weights: The values of parameters and buffers, by their names in ``module.state_dict()``.
            They are a mapping, a file of ``torch.save`` or, if that package is installed, of
            safetensors (``….safetensors``, ``….safetensors.index.json``), or a folder of them,
            such as ``save_pretrained`` of Transformers writes. They are read layer by layer. By
            default, a module on the meta device is initialized layer by layer, by
            ``reset_parameters()`` of its modules and ``_init_weights`` of a Transformers model.
        init: ``init(module)`` initializes a module. It is called for all modules of each layer,
            the modules within a module first, as by ``module.apply(init)``. A model on the meta
            device needs it where its constructor initializes in another way than the above.
        seed: The seed of initial values: layer ``i`` draws its values from ``(seed, i)``, as in
            a :class:`~torchgpipe.distributed.DistributedGPipe` of that seed. By default they are
            drawn from the generator of the CPU.
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
        ValueError: The balance, ``chunks`` or ``checkpoint`` is wrong, or a device is unknown. The
            balance or the weights belong to another module. A tensor on the meta device gets no
            value. Layers on several devices share an object that only one of them can have.
        IndexError: There are fewer devices than partitions.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | Settings | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = 'except_last',
        deferred_batch_norm: bool = False,
        batch_dim: Any = 0,
        gather: Any = None,
        weights: Weights | None = None,
        init: Callable[[nn.Module], Any] | None = None,
        seed: int | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(balance, Settings) and balance.mesh:
            raise ValueError(
                f'this plan is for the processes of a mesh, {balance.mesh}: '
                'DistributedGPipe(module, plan, mesh=init_mesh(**plan.mesh))'
            )
        devices = self._set(
            module, balance, devices, chunks, checkpoint, batch_dim, gather, offload
        )
        self.devices = parse_devices(devices, len(self.balance))
        seed = None if seed is None else parse_seed(seed)
        verify_shared(module, self.balance, self.devices)
        if deferred_batch_norm:
            from torchgpipe.batchnorm import DeferredBatchNorm

            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        if (
            weights is not None
            or init is not None
            or any(x.is_meta for x in (*module.parameters(), *module.buffers()))
        ):
            self._materialize(module, weights, init, seed)
        partitions = nn.ModuleList(split(module, self.balance, self.devices))
        self._engine: Engine | None = Engine([*partitions], self.devices)
        self._place(module._modules, module._modules, partitions, module.training)

    def _materialize(
        self,
        module: nn.Sequential,
        weights: Weights | None,
        init: Callable[[nn.Module], Any] | None,
        seed: int | None,
    ) -> None:
        from torchgpipe.model.materialize import materialize, seeded

        numbers = {name: i for i, name in enumerate(module._modules)}
        materialize(
            module,
            [device for number, device in zip(self.balance, self.devices) for _ in range(number)],
            weights,
            None if seed is None else (lambda name, _: seeded(seed, numbers[name])),
            init,
        )

    def _call(self, input: Any) -> Any:
        if not self.devices:
            flatten_nested(input)
            return input
        batches, sizes, rule, options = self._cut(input)
        pipeline = PlainCall(self._running_engine(), batches, **options)
        if rule is not None:
            from torchgpipe.training.losses import seen_means

            pipeline.losses = seen_means(rule, sizes)
        pipeline.run()
        if pipeline.losses:
            from torchgpipe.training.losses import no_mean_in_the_model

            pipeline.losses.check(no_mean_in_the_model)
        return gather(batches, sizes, rule, self.batch_dim, pipeline.aliasing.common(0))

    def _train_step(
        self,
        input: Any,
        ready: Callable[[], ScheduleLike],
        loss: tuple[Any, ...],
        return_output: bool,
    ) -> Any:
        from torchgpipe.training.losses import Losses
        from torchgpipe.training.step import run_step

        schedule = ready()
        batches, sizes, rule, options = self._cut(input)
        loss_fn, target, target_dim, normalizer, scale = loss
        losses = Losses(loss_fn, target, sizes, target_dim, normalizer, scale)
        pipeline = run_step(
            self._running_engine(), batches, losses, schedule, return_output, **options
        )
        total = losses.total()
        if return_output:
            return (
                total,
                gather(batches, sizes, rule, self.batch_dim, pipeline.aliasing.common(0)),
            )
        return total

    @torch.no_grad()
    def _evaluate(
        self, input: Any, ready: Callable[[], Any], loss: tuple[Any, ...], return_output: bool
    ) -> Any:
        from torchgpipe.training.losses import Losses

        ready()
        batches, sizes, rule, options = self._cut(input)
        loss_fn, target, target_dim, normalizer, _ = loss
        losses = Losses(loss_fn, target, sizes, target_dim, normalizer, None, False)
        if losses.counted is not None:
            losses.count_in(losses.counted, False)
        pipeline = PlainCall(self._running_engine(), batches, **options)
        pipeline.losses = losses.in_layers
        pipeline.wrap_last(partial(losses.behind, keeps=return_output))
        pipeline.run()
        losses.check()
        found = losses.total(False), losses.count
        if return_output:
            return (
                *found,
                gather(batches, sizes, rule, self.batch_dim, pipeline.aliasing.common(0)),
            )
        return found

    def _running_engine(self) -> Engine:
        partitions = self.partitions  # Where a layer has been replaced, there is no engine now.
        if self._engine is None:
            self._engine = Engine([*partitions], self.devices)
        return self._engine

    def _cut(self, input: Value) -> tuple[list[Chunk], list[int], Any, dict[str, Any]]:
        """Return the micro-batches of an input, their sizes, their gather rule and options."""
        if isinstance(input, Arguments):
            check_arguments(self._names[0], self[0], input)
        rule = self.batch_dim
        rule = rule if isinstance(rule, int) else fit_rule(rule, input, self)
        batches, sizes, common = cut(input, self.chunks, rule)
        mode = self.checkpoint if self.training else 'never'
        stops = (stops_of_mode if isinstance(mode, str) else checkpoint_stops)(
            mode, len(batches), len(self.devices)
        )
        rule = self.gather
        if rule:
            from torchgpipe.training.losses import counts_of, with_counts

            rule = with_counts(rule, iter(counts_of(rule, batches)))
        return (
            batches,
            sizes,
            rule,
            {'recomputed': [*map(range, stops)], 'common': common, 'offload': self.offload},
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts with no threads.
        return {**self.__dict__, '_engine': None}

    def _replace(self, layers: 'OrderedDict[str, Any]', partitions: nn.ModuleList) -> None:
        module = nn.Sequential(layers)
        verify(module)
        verify_shared(module, self.balance, self.devices)
        for new, own in zip(split(module, self.balance, self.devices), partitions):
            own._modules.update(new._modules)
        self._engine = None

    def in_place_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model that was converted is run by this pipeline.

        The model keeps its names, ``state_dict``, configuration and methods. Its parameters and
        buffers are the same objects as the layers'. So tools that train, save and load the model
        use the pipeline. Afterwards the model runs itself.

        >>> from torchgpipe.sequential import to_sequential
        >>> import torch
        >>> from torch import nn
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        ...
        ...     def forward(self, x):
        ...         return self.last(self.first(x).relu())
        >>> net, x = Net(), torch.rand(8, 3)
        >>> model = GPipe(to_sequential(net, x), [1, 1], devices=['cpu', 'cpu'], chunks=4)
        >>> with model.in_place_of(net):
        ...     net(x).sum().backward()
        >>> [*net.state_dict()][0], net.first.weight.grad is model[0].first.weight.grad
        ('first.weight', True)

        In this context, tensors of the model may be changed in place, such as by an optimizer, but
        not replaced. Other values are the values at the time of the conversion: numbers that its
        forward reads, such as of a configuration, and the hooks of submodules that were cut into
        layers. Training and evaluation mode of the model and its submodules apply to the pipeline.
        Tensors without dimensions in the output, such as a loss, are on the first device.
        ``hf_device_map`` tells Accelerate and transformers that the model is on its devices.

        Raises:
            ValueError: The pipeline has other parameters than the model. Or the model's forward is
                not the forward of its class.
            RuntimeError: In a call: tensors of the model were replaced, added or removed.
        """
        from torchgpipe.model.in_place_of import run_by

        return run_by(self, model)
