"""``GPipe``: a module that runs a sequential model on several devices.

Modules that a plain call does not use, such as steps and losses, are imported in functions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import Device
from torchgpipe.base.settings import (
    Checkpoint,
    LossOptions,
    Settings,
)
from torchgpipe.base.structure import Arguments, Value, flatten_nested
from torchgpipe.engine.microbatches import (
    Chunk,
    check_arguments,
    cut,
    gather,
)
from torchgpipe.engine.partition import Engine, shared_in
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.policy import KeepRules
from torchgpipe.engine.run import Run
from torchgpipe.engine.split import parse_devices, parse_seed, split, verify_shared
from torchgpipe.engine.split import verify_module as verify_module  # a name of torchgpipe 0.0.7
from torchgpipe.model.weights import Weights
from torchgpipe.pipeline_module import PipelineModule, verify
from torchgpipe.schedule import ScheduleLike


class _MicroBatches(NamedTuple):
    """A mini-batch, split; a run replaces each micro-batch by its output."""

    batches: list[Chunk]
    #: The number of samples in each.
    sizes: list[int]
    #: The rule for gathering, with counts of this mini-batch.
    rule: Any
    #: The arguments of :class:`~torchgpipe.engine.run.Run` after the micro-batches.
    options: dict[str, Any]


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
        keep: The results of operations that checkpointing keeps, so that backward does not compute
            them again: ``'products'``, ``'every second product'`` (of matrices) or ``'all'``; a
            list of operations, such as ``[torch.ops.aten.mm.default]``; or a policy function of
            :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts`. Products are
            products of matrices, convolutions, attention, and collectives that return new tensors
            of no larger size. A dict has one of these for partitions by index, and for layers and
            modules in them by name. The innermost one applies.
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
        keep: As given.
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
        keep: KeepRules = None,
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
                'DistributedGPipe(module, plan, mesh=init_mesh(**plan.mesh, axes=plan.axes))'
            )
        devices = self._set(
            module,
            balance,
            devices,
            chunks,
            checkpoint,
            batch_dim,
            gather,
            offload,
            keep,
        )
        self.devices = parse_devices(devices, len(self.balance))
        if seed is not None:
            seed = parse_seed(seed)
        # All checks come first: an error must not leave a module whose layers have moved.
        verify_shared(module, self.balance, self.devices)
        if deferred_batch_norm:
            from torchgpipe.batchnorm import DeferredBatchNorm

            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        # A tensor on the meta device cannot move, so it gets its value on its device.
        tensors = [*module.parameters(), *module.buffers()]
        if weights is not None or init is not None or any(x.is_meta for x in tensors):
            self._materialize(module, weights, init, seed)
        partitions = nn.ModuleList(split(module, self.balance, self.devices))
        self._engine: Engine | None = Engine([*partitions], self.devices)
        self._place(
            module._modules,
            module._modules,
            partitions,
            module.training,
        )

    def _materialize(
        self,
        module: nn.Sequential,
        weights: Weights | None,
        init: Callable[[nn.Module], Any] | None,
        seed: int | None,
    ) -> None:
        from torchgpipe.model.loader import Loader
        from torchgpipe.model.materialize import materialize, seeded

        loader = None
        if weights is not None:
            loader = Loader(weights, module)
        devices: list[torch.device] = []
        for number, device in zip(self.balance, self.devices):
            devices += [device] * number
        # By its number, a layer has the same values for any balance, and on any rank.
        numbers = {name: i for i, name in enumerate(module._modules)}
        random_numbers = None
        if seed is not None:

            def random_numbers(name: str, _: Any) -> Any:
                return seeded(seed, numbers[name])

        materialize(module, devices, loader, random_numbers, init)
        if loader is not None:
            loader.load(zip(module._modules, module, devices))

    def _call(self, input: Any) -> Any:
        if not self.devices:
            flatten_nested(input)  # which checks the input, as for any other model
            return input
        mini_batch = self._split(input)
        run = PlainCall(self._running_engine(), mini_batch.batches, **mini_batch.options)
        if mini_batch.rule is not None:
            from torchgpipe.losses import seen_means

            run.losses = seen_means(mini_batch.rule, mini_batch.sizes)
        run.run()
        if run.losses:
            # With `gather='mean'`, a loss in the model has to be a mean over samples.
            from torchgpipe.losses import no_mean_in_the_model

            run.losses.check(no_mean_in_the_model)
        return self._output(mini_batch, run)

    def _train_step(
        self,
        input: Any,
        ready: Callable[[], ScheduleLike],
        loss: LossOptions,
        return_output: bool,
    ) -> Any:
        from torchgpipe.losses import Losses
        from torchgpipe.step import run_step

        schedule = ready()
        mini_batch = self._split(input)
        losses = Losses(loss, mini_batch.sizes)
        run = run_step(
            self._running_engine(),
            mini_batch.batches,
            losses,
            schedule,
            return_output,
            **mini_batch.options,
        )
        total = losses.total()
        if return_output:
            return total, self._output(mini_batch, run)
        return total

    @torch.no_grad()
    def _evaluate(
        self,
        input: Any,
        ready: Callable[[], Any],
        loss: LossOptions,
        return_output: bool,
    ) -> Any:
        from torchgpipe.losses import Losses

        ready()
        mini_batch = self._split(input)
        losses = Losses(loss, mini_batch.sizes, alone=False)
        # A step raises if nothing counts. An evaluation returns that count.
        if losses.counted is not None:
            losses.count_in(losses.counted, trains=False)
        run = PlainCall(self._running_engine(), mini_batch.batches, **mini_batch.options)
        run.losses = losses.in_layers
        run.wrap_last(partial(losses.behind, keeps=return_output))
        run.run()
        losses.check()
        total = losses.total(trains=False)
        if return_output:
            return total, losses.count, self._output(mini_batch, run)
        return total, losses.count

    def _running_engine(self) -> Engine:
        partitions = self.partitions  # If a layer has been replaced, there is no engine now.
        if self._engine is None:
            self._engine = Engine([*partitions], self.devices)
        return self._engine

    def _split(self, input: Value) -> _MicroBatches:
        if isinstance(input, Arguments):
            check_arguments(self._names[0], self[0], input)
        batches, sizes, common = cut(
            input,
            self.chunks,
            self.batch_dim,
            layers=self,
        )
        recomputed = []
        if self.training:
            recomputed = self._recomputed(len(batches))
        rule = self.gather
        if rule:
            from torchgpipe.losses import counts_of, with_counts

            rule = with_counts(rule, iter(counts_of(rule, batches)))
        options = {
            'recomputed': recomputed,
            'common': common,
            'offload': self.offload,
            'policies': self._policies,
        }
        return _MicroBatches(batches, sizes, rule, options)

    def _output(self, mini_batch: _MicroBatches, run: Run) -> Any:
        """Return the output of a run, which has replaced the micro-batches."""
        return gather(
            mini_batch.batches,
            mini_batch.sizes,
            mini_batch.rule,
            self.batch_dim,
            run.aliasing.common(0),
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts with no threads.
        return {**self.__dict__, '_engine': None}

    def _replace(self, layers: 'OrderedDict[str, Any]', partitions: nn.ModuleList) -> None:
        module = nn.Sequential(layers)
        verify(module)
        verify_shared(module, self.balance, self.devices)
        for new, partition in zip(split(module, self.balance, self.devices), partitions):
            partition._modules.update(new._modules)
        self._engine = None

    def named_tensors(self, full: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over all tensors, by their names in files of the model.

        It has the tensors that :meth:`save_pretrained` writes, each once, in the order of layers.

        Args:
            full: Whether to return tensors; on one process, they are always whole.
        """
        from torchgpipe.model import export

        layers, names = self._exported()
        if not full:
            return iter(())
        return export.tensors_of(layers, names)

    def save_pretrained(
        self, folder: str | PathLike[str], *, max_shard_size: int | str = '50GB'
    ) -> None:
        """Save the model as files of safetensors, under the names of its original.

        ``from_pretrained`` reads the folder if the layers were converted from a model of
        Transformers: it has the names and forms of tensors as ``save_pretrained`` of that model
        writes them, ``config.json`` and ``generation_config.json``. Any model reads it by
        ``weights=folder``.

        The new folder takes the place of an earlier one at once. Other files in that one, such as
        a tokenizer's, stay.

        >>> gpipe.save_pretrained('tuned')  # doctest: +SKIP

        Args:
            folder: The folder.
            max_shard_size: The largest file: bytes, or a text such as ``'5GB'``.

        Raises:
            FileExistsError: The folder is a file, or has other folders in it.
            ValueError: A layer has a state that is no tensor, or a dtype that these files do not
                have.
        """
        from torchgpipe.model import export
        from torchgpipe.model.pretrained import original_of

        layers, names = self._exported()
        export.save(
            layers,
            names,
            original_of(self),
            folder,
            max_shard_size,
        )

    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Save the active adapter, as ``PeftModel.save_pretrained`` does.

        ``PeftModel.from_pretrained(model, folder)`` reads it. :meth:`save_pretrained` saves the
        model with its adapters merged into its weights.

        >>> gpipe.save_adapter('adapter')  # doctest: +SKIP

        Args:
            folder: The folder. Other files in it stay.

        Raises:
            FileExistsError: The folder is a file, or has other folders in it.
            ValueError: The layers were not converted from a model with adapters.
        """
        from torchgpipe.model import export
        from torchgpipe.model.pretrained import original_of

        layers, _ = self._exported()
        names = export.AdapterNames(original_of(self))
        export.save_adapter(names, export.tensors_of(layers, names), folder)

    def _exported(self) -> Any:
        """Return the layers and the names of their tensors in files."""
        from torchgpipe.model.export import FileNames
        from torchgpipe.model.pretrained import original_of

        self.partitions  # Raises if one of them has other layers.
        layers = {}
        for name in self._names:
            layers[name] = self.get_submodule(name)
        names = FileNames(original_of(self), shared_in(layers))
        return layers, names

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
