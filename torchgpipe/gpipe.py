"""What the user holds: a module that runs a sequential model on several devices."""
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.aliases import Value
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.devices import Device, is_cpu, memory_of
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.edges import Pipeline
from torchgpipe.engine.gather import REDUCTIONS, gather
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.run import Run
from torchgpipe.engine.scatter import check_rule, cut, fit_rule
from torchgpipe.materialize import materialize
from torchgpipe.private import allows_mutation, has_hooks, is_transformed, proxy_mode, uncompiled
from torchgpipe.schedule.plain import PLAIN_CALL
from torchgpipe.sequential.convert import not_sequential
from torchgpipe.sequential.parts import to_own_names
from torchgpipe.settings import Checkpoint, Settings, checkpoint_stops, parse_checkpoint
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.split import (parse_balance, parse_devices, split, still_shared, verify_module,
                              verify_shared, verify_source)
from torchgpipe.step import Losses, ScheduleLike, run_step
from torchgpipe.structure import Arguments, flatten_nested
from torchgpipe.weights import Weights

__all__ = ['GPipe']


class GPipe(nn.Module):
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
            for means over samples only, ``'sum'`` or ``'stack'``. By keys of the output, these may
            be said of parts.
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
    _names: tuple[str, ...]
    _known: tuple[nn.Module, ...]

    def __init__(self, module: nn.Sequential, balance: Iterable[int] | Settings | None = None, *,
                 devices: Iterable[Device] | None = None, chunks: int = 1,
                 checkpoint: Checkpoint = 'except_last',
                 deferred_batch_norm: bool = False, batch_dim: Any = 0, gather: Any = None,
                 weights: Weights | None = None, offload: bool = False) -> None:
        super().__init__()
        check_rule('batch_dim', batch_dim, [None])
        check_rule('gather', gather, [None, *REDUCTIONS])
        if batch_dim is None:
            raise ValueError('batch_dim is None, so there would be nothing to split; name the '
                             'dimension, or those of parts: batch_dim={\'table\': None}')
        self.batch_dim = batch_dim
        self.gather = gather
        self._schedule: str | None = None
        if isinstance(balance, Settings):
            if (devices, chunks, checkpoint) != (None, 1, 'except_last'):
                raise ValueError('a plan says devices, chunks and checkpoint, so leave these out; '
                                 'or take the balance alone: GPipe(module, plan.balance, …)')
            verify_source(balance, module)
            self._schedule, devices = balance.schedule, balance.devices
            chunks, checkpoint, balance = balance.chunks, balance.checkpoint, balance.balance
        self.chunks = _parse_chunks(chunks)
        self.offload = bool(offload)
        if not isinstance(module, nn.Sequential):
            raise not_sequential(module)
        verify_module(module)
        verify_skippables(module)
        verify_source(balance, module)
        self.balance = parse_balance(balance, len(module))
        self.checkpoint = parse_checkpoint(checkpoint, len(self.balance))
        self.devices = parse_devices(devices, len(self.balance))
        verify_shared(module, self.balance, self.devices)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        materialize(module, [device for number, device in zip(self.balance, self.devices)
                             for _ in range(number)], weights)

        # [Note: Two views of the layers]
        # The layers are registered as children under their own names, so that all that goes by
        # names speaks those of the module, whatever the balance. Partitions are a second view of
        # the same layers, and no child. They follow where a child is replaced, as tools do that
        # go by names; the children can not follow, as nobody asks before he takes parameters from
        # them. Where a layer has the name of an attribute of this class, `model.name` is the
        # attribute, and what takes names as strings finds the layer.
        self.training = module.training
        partitions = nn.ModuleList(split(module, self.balance, self.devices))
        partitions.training = module.training
        self._engine: Engine | None = self._make_engine(partitions)
        self.__dict__['partitions'] = partitions
        self.__dict__['_names'] = tuple(module._modules)
        self.__dict__['_known'] = tuple(module._modules.values())
        self._modules.update(module._modules)

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
        input = _value_of(args, kwargs)
        if not self.devices:
            flatten_nested(input)
            return input
        if isinstance(input, Arguments):
            _check_arguments(self.partitions[0], input)
        batches, sizes, common = self._cut(input)
        stops = checkpoint_stops(self.checkpoint if self.training else 'never', len(batches),
                                 len(self.devices))
        engine = self._running_engine()
        _check_contexts(threads=not engine.one_worker or any(stops))
        pipeline = Pipeline(engine, batches, stops, common=common, offload=self.offload)
        pipeline.run()
        return self._gathered(batches, sizes, pipeline)

    def _running_engine(self) -> Engine:
        partitions = self.partitions  # Where a layer has been replaced, there is no engine now.
        if self._engine is None:
            self._engine = self._make_engine(partitions)
        return self._engine

    def _cut(self, input: Value) -> tuple[list[Batch], list[int], list[int]]:
        return cut(input, self.chunks, fit_rule(self.batch_dim, input, self))

    def _gathered(self, batches: list[Batch], sizes: list[int], pipeline: Run) -> Value:
        batch_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return gather(batches, sizes, self.gather, batch_dim, pipeline.aliasing.common(0))

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
        if not self.training or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise RuntimeError('a step computes gradients, but '
                               + ('gradients are off (torch.no_grad or inference_mode)'
                                  if self.training else 'the model is in evaluation mode')
                               + '; call model(input) for outputs, or model.train() before')
        if has_hooks(self):
            raise RuntimeError('a step does not call this model as a whole, so it would leave out '
                               'the hooks that are registered on it; register them on its layers')
        if not self.devices:
            raise ValueError('a step takes at least one partition')
        if isinstance(input, Arguments):
            _check_arguments(self.partitions[0], input)
        batches, sizes, common = self._cut(input)
        engine = self._running_engine()
        _check_contexts(threads=True)
        if target_dim is None:
            target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        if isinstance(schedule, str) and schedule == 'auto':
            schedule = self._planned()
        losses = Losses(loss_fn, target, sizes, target_dim, normalizer, scale)
        if losses.counted is not None:
            losses.count_in(losses.counted)
        stops = checkpoint_stops(self.checkpoint, len(batches), len(self.devices))
        pipeline = run_step(engine, batches, losses, schedule, checkpoint_stops=stops,
                            common=common, offload=self.offload)
        loss = losses.total()
        return (loss, self._gathered(batches, sizes, pipeline)) if return_output else loss

    def _planned(self) -> str:
        if self._schedule is None:
            raise ValueError("schedule='auto' is that of a plan, but this model was made without "
                             'one; name a schedule, or make it by a plan: GPipe(module, plan) of '
                             'torchgpipe.plan.plan(module, sample, devices=…)')
        return 'gpipe' if self._schedule == PLAIN_CALL else self._schedule  # in the same order

    def _make_engine(self, partitions: nn.ModuleList) -> Engine:
        return Engine(partitions.children(), self.devices)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of an earlier version has no rules for batches.
        known = tuple(map(state['_modules'].get, state['_names']))
        super().__setstate__({  # type: ignore[no-untyped-call]
            'batch_dim': 0, 'gather': None, 'offload': False, '_known': known, '_schedule': None,
            **state})

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts with no threads.
        return {**self.__dict__, '_engine': None}

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

    def _replace(self, layers: 'OrderedDict[str, Any]', partitions: nn.ModuleList) -> None:
        module = nn.Sequential(layers)
        verify_module(module)
        verify_skippables(module)
        verify_shared(module, self.balance, self.devices)
        for new, own in zip(split(module, self.balance, self.devices), partitions):
            own._modules.update(new._modules)
        self._known = tuple(layers.values())
        self._engine = None

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def __getitem__(self, index: int) -> nn.Module:
        return self._layers()[index]

    def _layers(self) -> list[nn.Module]:
        return [layer for partition in self.partitions
                for layer in partition._modules.values() if layer is not None]

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name, also a layer that has the name of an attribute of this.

        >>> from collections import OrderedDict
        >>> model = nn.Sequential(OrderedDict(chunks=nn.Linear(2, 2)))
        >>> GPipe(model, [1], devices=['cpu']).get_parameter('chunks.bias').shape
        torch.Size([2])
        """
        name, _, rest = target.partition('.')
        layer = self._modules.get(name)
        return super().get_submodule(target) if layer is None else layer.get_submodule(rest)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each partition, with the arguments of :func:`torch.compile`.

        ``torch.compile(model)`` compiles nothing by itself, as a pipeline hands micro-batches to
        other threads. What was compiled before, partitions or layers, stays so in it.
        """
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def train(self, mode: bool = True) -> 'GPipe':
        """Set training or evaluation mode."""
        super().train(mode)
        self.partitions.train(mode)
        return self

    def extra_repr(self) -> str:
        """Say how the layers below are distributed."""
        devices = [str(device) for device in self.devices]
        return (f'balance={self.balance}, devices={devices}, chunks={self.chunks}, '
                f'checkpoint={self.checkpoint!r}')

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
                        assign: bool = False) -> Any:
        """Load a state dict; what layers share stays shared, also where tensors are assigned."""
        with still_shared(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Keys of 0.0.7 are `partitions.<j>.<layer>.…`, from any balance.
        old = prefix + 'partitions.'
        for key in [key for key in state_dict if key.startswith(old)]:
            name = key[len(old):].partition('.')[2]
            if name.partition('.')[0] in self._names:
                state_dict.setdefault(prefix + name, state_dict.pop(key))
        to_own_names(state_dict, prefix, self._modules)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def cuda(self, device: Any = None) -> 'GPipe':
        """Raise :exc:`TypeError`: the devices were chosen at construction."""
        raise _denied()

    def cpu(self) -> 'GPipe':
        """Raise :exc:`TypeError`: the devices were chosen at construction."""
        raise _denied()

    def to(self, *args: Any, **kwargs: Any) -> 'GPipe':
        """Change the dtype of parameters and buffers; to move them is a :exc:`TypeError`.

        The device where all of them are already is none to move to.

        >>> model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=['cpu'])
        >>> model.to('cpu', torch.float64)[0].weight.dtype
        torch.float64
        """
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            raise _denied()
        asked = args[0] if args else kwargs.get('device')
        if asked is not None and not isinstance(asked, torch.dtype):
            try:
                device = torch.device(asked)
            except RuntimeError as error:  # a device that this machine does not have
                raise _denied() from error
            if not self._is_all_on(device):
                raise _denied()
        return super().to(*args, **kwargs)

    def _is_all_on(self, device: torch.device) -> bool:
        if {device.type} != {own.type for own in self.devices}:
            return False
        # All CPU devices share one memory; and without a number it is the current device.
        return is_cpu(device) or {torch.empty(0, device=device).device} == {*self.devices}

    def _apply(self, fn: Any, recurse: bool = True) -> 'GPipe':
        # A module that has this one as its child moves it without asking any method above.
        for device in {*map(memory_of, self.devices)}:
            probe = torch.empty(1, device=device)
            if fn(probe).device != probe.device:
                raise _denied()
        with still_shared(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _value_of(args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """Return the one value that a pipeline is called with, or what stands for several."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and [*kwargs] == ['input']:  # as a sequential module calls its own
        return kwargs['input']
    return Arguments(*args, **kwargs)


def _check_arguments(partition: nn.Module, input: Arguments) -> None:
    """Check that a first layer takes several arguments."""
    name, layer = next(partition.named_children())
    try:
        signature = inspect.signature(layer.forward)
    except ValueError:  # It is not Python's.
        return
    try:
        signature.bind(*input.args, **input.kwargs)
    except TypeError as error:
        raise TypeError(
            f"the first layer, '{name}' ({type(layer).__name__}), can not be called with these "
            f'{len(input.args)} arguments and keywords {sorted(input.kwargs)}: {error}. Its '
            f'forward takes {signature}. What the model is called with goes to its first layer '
            'alone; what later layers need travels in the value that each layer returns, such as '
            'a dict, or as a skip (torchgpipe.skip)') from None


def _check_contexts(threads: bool) -> None:
    """Refuse contexts that follow a computation in a way that does not reach all of it here.

    Args:
        threads: Whether cells run in other threads, or will run again in backward.
    """
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    if is_traced or proxy_mode() is not None:
        raise RuntimeError('a GPipe can not be traced (torch.jit.trace, make_fx, torch.export): a '
                           'trace would hold for one batch size, and miss what runs in other '
                           'threads. Trace the sequential module that was wrapped')
    if threads and is_transformed():
        raise RuntimeError('a transform of torch.func (grad, vmap, jvp, …) does not reach the '
                           'threads of a GPipe, nor its recomputations: the result would be '
                           'wrong. Transform the sequential module that was wrapped; or put all '
                           "partitions on one device, with checkpoint='never'")
    if torch.is_grad_enabled() and allows_mutation():
        raise RuntimeError('a GPipe can not be called in torch.autograd.graph.'
                           'allow_mutation_on_saved_tensors(): that one knows a saved tensor by '
                           'the address where it begins, so it misses micro-batches, which are '
                           'parts of a tensor, and takes one for another that had the address '
                           'before; gradients would be wrong. Change a copy, as y = y.mul(2) for '
                           'y.mul_(2); it takes no more memory than the copy made there')


def _denied() -> TypeError:
    return TypeError('denied to move parameters and buffers, because GPipe should manage device '
                     'placement; name the devices when you make it: GPipe(module, balance, '
                     'devices=…)')


def _parse_chunks(chunks: int | str | Any) -> int:
    try:
        number = int(chunks)
    except (OverflowError, TypeError, ValueError):
        raise ValueError('number of chunks must be a positive integer, but got '
                         f'{chunks!r}') from None
    if number < 1:
        raise ValueError(f'number of chunks must be a positive integer, but got {number}')
    return number
