"""``DistributedGPipe``: a pipeline over ranks and its replicas, for one process of many."""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from torchgpipe.base.settings import Checkpoint, LossOptions, Settings
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.distributed import checkpoint as checkpoints
from torchgpipe.distributed import exports
from torchgpipe.distributed.agreement import Facts, check_settings, digest
from torchgpipe.distributed.clocks import merge
from torchgpipe.distributed.failures import Watch, watched
from torchgpipe.distributed.layers import Values, check_plan, check_whole, skeleton_of
from torchgpipe.distributed.mesh import MeshInfo, lines_of
from torchgpipe.distributed.placement import Placement, parse_places
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.steps import Steps
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.policy import KeepRules
from torchgpipe.engine.split import parse_seed
from torchgpipe.model.loader import Loader
from torchgpipe.model.pretrained import original_of
from torchgpipe.model.weights import Weights
from torchgpipe.pipeline_module import PipelineModule
from torchgpipe.schedule import ScheduleLike, Timed
from torchgpipe.shard.folders import Saving
from torchgpipe.shard.sums import clip


class DistributedGPipe(PipelineModule):
    """Run a sequential model on the processes of a mesh: data × pipe × tensor.

    Each process makes the layers of its own stages only. Loss, gradients and running statistics
    equal the results of one process with the whole model and the whole mini-batch.

    >>> import torch
    >>> from torchgpipe.distributed import DistributedGPipe, init_mesh
    >>> with torch.device('meta'):
    ...     module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = DistributedGPipe(module, [2, 1], mesh=init_mesh(device_type='cpu'), chunks=4)
    >>> loss = model.step(torch.ones(8, 4), torch.zeros(8, 2), nn.functional.mse_loss)
    >>> loss.shape, model.get_parameter('2.weight').grad.shape
    (torch.Size([]), torch.Size([2, 8]))
    >>> torch.distributed.destroy_process_group()

    Args:
        module: The model, the same on all ranks: a sequential module, best on the meta device; or
            a list of functions of which each makes a layer. On the meta device, layer ``i`` gets
            initial values that depend on ``(seed, i)`` only, not on the mesh. The same holds for
            layers made by functions. A module with values keeps the first replica's values.
        balance: The number of layers in each stage; or a plan by
            :func:`torchgpipe.plan.plan` in place of balance, chunks, checkpoint, places and data.
        mesh: A mesh with the axes ``'data'``, ``'pipe'`` and ``'tensor'``, or some of these; see
            :func:`~torchgpipe.distributed.init_mesh`.
        chunks: The number of micro-batches of each replica.
        checkpoint: As of :class:`~torchgpipe.GPipe`.
        keep: As of :class:`~torchgpipe.GPipe`, the same on all ranks.
        places: The rank along the pipe axis of each stage; by default ranks take turns, and
            ``[0, 1, 1, 0]`` is for the V of ``'zb-v'``, ``'v-half'`` and ``'v-min'``.
        data: ``'replicate'``: ranks along the data axis have the same parameters; ``'shard'``:
            each has a part of them, and of the optimizer's state (FSDP2).
        tensor_plan: How layers are split along the tensor axis: styles of
            ``torch.distributed.tensor.parallel`` by the names of modules, in which ``*`` stands
            for anything.
        seed: The seed of initial values.
        deferred_batch_norm: As of :class:`~torchgpipe.GPipe`; statistics are over all replicas.
        batch_dim: As of :class:`~torchgpipe.GPipe`.
        gather: As of :class:`~torchgpipe.GPipe`.
        weights: As of :class:`~torchgpipe.GPipe`; each rank reads only the values of its layers.
        init: As of :class:`~torchgpipe.GPipe`.
        offload: As of :class:`~torchgpipe.GPipe`.
        mp_policy: With ``data='shard'``, the dtypes of FSDP2
            (:class:`torch.distributed.fsdp.MixedPrecisionPolicy`). The input of the first layer is
            cast to ``param_dtype``, and the output of the last one to ``output_dtype``. Gradients
            of micro-batches are added up in ``reduce_dtype``.
        offload_policy: With ``data='shard'``,
            :class:`torch.distributed.fsdp.CPUOffloadPolicy`: parameters, gradients and states of
            the optimizer stay in host memory, also with one replica. Replicas take the same number
            of micro-batches if ranks have more than ``max_active_stages`` stages.
        max_active_stages: With ``data='shard'``, the number of stages of a rank whose parameters
            are whole at a time; by default 3, and 1 with ``offload_policy``. If a rank has more
            stages, it gathers parameters several times in a step; ``schedule='looped-bfs'``
            gathers each stage twice. Gathers run while earlier stages compute.
        timeout: How long a rank may wait for others: seconds, or a ``timedelta``; by default 30
            minutes. After that all ranks end, with an error that names the rank that they wait
            for. A rank that raises or dies ends all within seconds.
        compare_every: The largest number of steps between comparisons, to the bit, of the
            parameters and buffers that ranks share. Ranks compare before the first steps, then
            less and less often, and at each save and load. Tensors that differ are an error on
            all ranks. 0 compares at saves and loads only.

    Raises:
        TypeError: The model is of another type, or its skips do not match.
        ValueError: The balance, the mesh, places, ``data`` or the plan do not fit.
        RuntimeError: Ranks were given other arguments.
    """

    _rank: Rank
    _steps: Steps
    #: The classes of its parts, for which a dry run has others.
    _watch_type: Callable[..., Watch] = Watch
    _rank_type: Callable[..., Rank] = Rank
    _steps_type: Callable[..., Steps] = Steps

    def __init__(
        self,
        module: nn.Sequential | Sequence[Callable[[], nn.Module]],
        balance: Iterable[int] | Settings,
        *,
        mesh: DeviceMesh,
        chunks: int = 1,
        checkpoint: Checkpoint = 'except_last',
        keep: KeepRules = None,
        places: Sequence[int] | None = None,
        data: str = 'replicate',
        tensor_plan: Mapping[str, Any] | None = None,
        seed: int = 0,
        deferred_batch_norm: bool = False,
        batch_dim: Any = 0,
        gather: Any = None,
        weights: Weights | None = None,
        init: Callable[[nn.Module], Any] | None = None,
        offload: bool = False,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        max_active_stages: int | None = None,
        timeout: float | timedelta | None = None,
        compare_every: int = 100,
    ) -> None:
        super().__init__()
        #: Ends all ranks when one fails.
        self._watch = self._watch_type(mesh, timeout)
        with self._watch.run('the making of this model'):
            skeleton = skeleton_of(module)
            check_whole(skeleton)
            devices = self._set(
                skeleton, balance, None, chunks, checkpoint, batch_dim, gather, offload, keep
            )
            if isinstance(balance, Settings) and balance.mesh:
                data = _data_of(balance, mesh, data)
            if places is None and devices is not None:
                order = [*dict.fromkeys(devices)]
                places = [order.index(device) for device in devices]
            info = MeshInfo.of(mesh)
            placement = Placement(
                parse_places(places, len(self.balance), info.pipe.size),
                data,
                dict(tensor_plan or {}),
                mp_policy,
                offload_policy,
                max_active_stages,
            )
            placement.check(mesh)
            check_plan(placement.tensor_plan, skeleton, info.tensor.size)
            rank = self._rank_type(info, placement, _stages_of(skeleton, self.balance))
            self._compare_every = compare_every
            self._seed = parse_seed(seed)
            settings = partial(
                self._settings_of, skeleton, placement, deferred_batch_norm, compare_every
            )
            facts = rank.agree('this model', settings, Facts())
            check_settings('this model', facts)
            if deferred_batch_norm:
                module = _deferred(module, skeleton, self.chunks)
            values = self._values(rank, skeleton, weights, init)
            rank.make(module, skeleton, values)
            self._take(rank, skeleton._modules, skeleton.training)

    def _settings_of(
        self,
        skeleton: nn.Module,
        placement: Placement,
        deferred_batch_norm: bool,
        compare_every: int,
    ) -> Facts:
        """Return a digest of the arguments, which have to be the same on all ranks."""
        settings = digest(
            [*skeleton._modules],
            self.balance,
            self.chunks,
            self.checkpoint,
            self.keep,
            placement.places,
            placement.data,
            sorted(placement.tensor_plan),
            self._seed,
            deferred_batch_norm,
            self.batch_dim,
            self.gather,
            placement.policies,
            placement.max_active_stages,
            compare_every,
        )
        return Facts(settings=settings)

    def _values(
        self,
        rank: Rank,
        skeleton: nn.Sequential,
        weights: Weights | None,
        init: Callable[[nn.Module], Any] | None,
    ) -> Values:
        """Return the initial values. All ranks open the weights, and have the same ones."""
        loaders: list[Loader] = []

        def open_all() -> Facts:
            if weights is None:
                return Facts()
            loaders.append(Loader(weights, skeleton))
            return Facts(settings=digest(loaders[0].names))

        facts = rank.agree('this model', open_all, Facts())
        check_settings('this model', facts)
        return Values(self._seed, loaders[0] if loaders else None, init)

    def _take(self, rank: Rank, names: Iterable[str], training: bool) -> None:
        """Use the layers of a rank."""
        self.devices = [rank.mesh.device] * len(self.balance)
        self._rank = rank
        self._engine = rank.engine
        self._steps = self._steps_type(rank, self, self._watch.at, self._compare_every)
        self._place(names, rank.layers, nn.ModuleList(rank.partitions), training)

    def __deepcopy__(self, memo: dict[int, Any]) -> 'DistributedGPipe':
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        shared = {'_rank', '_engine', '_steps', '_watch', 'partitions', '_known'}
        self.partitions  # Where a layer has been replaced, the rank follows.
        new.__dict__.update(
            deepcopy(
                {name: value for name, value in self.__dict__.items() if name not in shared}, memo
            )
        )
        new._watch = self._watch
        new._take(self._rank.copied({**new._modules}), self._names, self.training)
        return new

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            'a DistributedGPipe has processes around it, so it cannot be pickled: '
            'save(folder), or torch.save(model.state_dict(), path) on each rank'
        )

    def _replace(self, layers: 'OrderedDict[str, Any]', partitions: nn.ModuleList) -> None:
        replaced = {}
        for (name, layer), before in zip(layers.items(), self._known):
            if layer is not before:
                replaced[name] = layer
        self._rank.replace(replaced)
        self._engine = self._rank.engine

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
        """Run forward and backward of a mini-batch. All ranks call it."""
        with self._watch.run('a step'):
            return super().step(
                input,
                target,
                loss_fn,
                schedule=schedule,
                target_dim=target_dim,
                normalizer=normalizer,
                scale=scale,
                return_output=return_output,
            )

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
        """Return the loss of a mini-batch and its count. All ranks call it."""
        with self._watch.run('an evaluation'):
            return super().evaluate(
                input,
                target,
                loss_fn,
                normalizer=normalizer,
                target_dim=target_dim,
                return_output=return_output,
            )

    # They are documented once.
    step.__doc__ = PipelineModule.step.__doc__
    evaluate.__doc__ = PipelineModule.evaluate.__doc__

    def _call(self, input: Any) -> Any:
        with self._watch.run('a call'):
            return self._steps.call(input)

    def _train_step(
        self,
        input: Any,
        ready: Callable[[], ScheduleLike],
        loss: LossOptions,
        return_output: bool,
    ) -> Any:
        return self._steps.train(input, ready, loss, return_output)

    def _evaluate(
        self,
        input: Any,
        ready: Callable[[], Any],
        loss: LossOptions,
        return_output: bool,
    ) -> Any:
        return self._steps.evaluate(input, ready, loss, return_output)

    @watched('apply')
    def apply(self, fn: Callable[[nn.Module], None]) -> 'DistributedGPipe':
        """Apply a function to all modules, as ``torch.nn.Module.apply``. All ranks call it.

        Random numbers depend on ``(seed, layer)`` only. So replicas get the same values, and so
        does each layer on all meshes. A weight that ranks share gets the value of its first layer.

        Raises:
            RuntimeError: It draws values of parameters of which each rank has a part.
        """
        self.partitions
        self._rank.apply(fn, self._seed)
        fn(self)
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of steps on each replica, until the first step after this context.

        Gradients of several steps are added up and reduced once, as for one mini-batch of all.
        """
        before = self._rank.replicas.syncs
        self._rank.replicas.syncs = False
        try:
            yield
        finally:
            self._rank.replicas.syncs = before

    @watched('clipping')
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the whole model to a norm, as ``torch.nn.utils`` does for one.

        All ranks call it.

        Args:
            max_norm: The largest norm that they may have.
            norm_type: The order of the norm; ``float('inf')`` for the largest value.

        Returns:
            The norm that they had, on all ranks, in float64.

        Raises:
            ValueError: The order is 0.
        """
        mesh = self._rank.mesh
        later_copies = self._rank.ties.ids_of_later_copies
        gradients = []
        copies = []
        for x in dict.fromkeys(self.parameters()):
            if x.grad is None:
                continue
            if id(x) in later_copies:
                copies.append(x.grad)
            else:
                gradients.append(x.grad)
        places = {'data': mesh.data.rank, 'tensor': mesh.tensor.rank}
        return clip(gradients, copies, places, max_norm, norm_type, mesh.everyone, mesh.device)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of this rank.

        Raises:
            RuntimeError: ``torch.nn.utils.clip_grad_norm_`` iterates over them, but other stages
                are on other ranks, so it would clip each rank by another norm.
        """
        if self._rank.mesh.pipe.size > 1 and sys._getframe(1).f_code is _clip_code:
            raise _only_own_norm()
        yield from super().parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also the ones that steps within :meth:`no_sync` have left."""
        super().zero_grad(set_to_none)
        self._rank.replicas.forget()

    def _running_engine(self) -> Engine:
        return self._rank.engine

    def lane_names(self) -> list[str]:
        """Return the names of all ranks, for the lanes of a timeline."""
        group = self._rank.mesh.everyone
        ranks = self._rank.ranks[:1] if group is None else get_process_group_ranks(group)
        return [f'rank {rank}' for rank in ranks]

    @watched('a recording')
    def merged(self, actions: list[Timed], began: float) -> list[Timed]:
        """Return the actions of all ranks by one clock, for :func:`torchgpipe.timeline.record`."""
        return merge(actions, began, self._rank.mesh.everyone, self._rank.mesh.device)

    @watched('a reduction of metrics')
    def reduced(
        self, largest: Sequence[float], total: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return maxima and sums over all ranks, for :func:`torchgpipe.timeline.measure`."""
        mesh = self._rank.mesh
        results = []
        for numbers, operation in ((largest, dist.ReduceOp.MAX), (total, dist.ReduceOp.SUM)):
            tensor = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
            if mesh.everyone is not None:
                dist.all_reduce(tensor, operation, group=mesh.everyone)
            results.append(tensor.tolist())
        return results[0], results[1]

    @watched('saving')
    def save(
        self,
        folder: str | PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> Saving | None:
        """Save the model, its optimizer and the states of generators, for any mesh.

        All ranks call it. A previous checkpoint in the folder stays until all ranks have written
        their parts.

        Args:
            folder: A new folder, or a checkpoint to replace; on a file system that ranks share.
            optimizer: The optimizer of this rank's parameters.
            extra: Further state of the training, by names: objects with ``state_dict()``,
                such as a scheduler or a data loader, and plain values. If it differs between
                replicas, each has its own.
            wait: Whether to wait for the files. Otherwise all tensors are copied to the host, and
                written while training continues.

        Returns:
            ``None``; without waiting, an object with ``result()``, which waits, and ``done()``.

        Raises:
            FileExistsError: The folder has other things in it.
            ValueError: The optimizer has other parameters.
            RuntimeError: A rank cannot write its part.
        """
        self.partitions  # Where a layer has been replaced, the rank follows.
        return checkpoints.save(
            self, self._rank, folder, optimizer, extra, wait, self._watch.patience
        )

    @watched('loading')
    def load(
        self,
        folder: str | PathLike[str],
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint that was saved on any mesh, or in one process. All ranks call it.

        Args:
            folder: The folder; its last complete checkpoint is loaded.
            optimizer: The optimizer of this rank's parameters.
            extra: Objects by their names in ``save``; ``load_state_dict()`` is called on them.

        Returns:
            All states and values of ``extra`` in ``save``, by names. A value that differed
            between replicas is included for the same number of replicas only.

        Raises:
            FileNotFoundError: There is no checkpoint.
            ValueError: It is of another model, or of another optimizer.
            RuntimeError: A rank cannot read its part, or could not begin.
        """
        return checkpoints.load(self, self._rank, folder, optimizer, extra)

    @watched('saving a model')
    def save_pretrained(
        self, folder: str | PathLike[str], *, max_shard_size: int | str = '50GB'
    ) -> None:
        """Save the model for ``from_pretrained``: see :meth:`torchgpipe.GPipe.save_pretrained`.

        All ranks call it. Each file is written by a rank that has its tensors, one layer after the
        other, so no rank has more than one whole layer in memory.

        Args:
            folder: The folder, on a file system that ranks share.
            max_shard_size: The largest file: bytes, or a text such as ``'5GB'``. Each rank along
                the pipe axis has its own files.

        Raises:
            FileExistsError: The folder is a file, or has other folders in it.
            ValueError: A layer has a state that is no tensor, or a dtype that these files do not
                have.
            RuntimeError: A rank cannot write its files. An earlier folder is unchanged.
        """
        self.partitions  # Where a layer has been replaced, the rank follows.
        original = original_of(self)
        names = exports.names_of(self._rank, original)
        exports.save(self._rank, names, original, folder, max_shard_size)

    @watched('saving an adapter')
    def save_adapter(self, folder: str | PathLike[str]) -> None:
        """Save the active adapter: see :meth:`torchgpipe.GPipe.save_adapter`.

        All ranks call it. The first one gets the adapter's tensors, and writes them.

        Args:
            folder: The folder. Other files in it stay.

        Raises:
            FileExistsError: The folder is a file, or has other folders in it.
            ValueError: The layers were not converted from a model with adapters.
        """
        self.partitions
        watch = partial(self._watch.run, 'a stream of tensors')
        exports.save_adapter(self._rank, original_of(self), folder, watch)

    def named_tensors(self, full: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the whole tensors of all ranks, by their names in files.

        All ranks call it, and iterate to the end. Ranks that take tensors, such as for an
        inference engine, have at most one layer of others in memory.

        >>> for name, tensor in model.named_tensors(full=rank == 0):  # doctest: +SKIP
        ...     engine.load_weights([(name, tensor)])

        Args:
            full: Whether this rank takes tensors. Otherwise it only sends its parts, and the
                iterator is empty.
        """
        self.partitions
        names = exports.names_of(self._rank, original_of(self))
        return exports.stream(
            self._rank, names, full, partial(self._watch.run, 'a stream of tensors')
        )


def _stages_of(skeleton: nn.Sequential, balance: Iterable[int]) -> list[list[str]]:
    """Return the names of the layers of each stage."""
    names = [*skeleton._modules]
    stages = []
    for size in balance:
        stages.append(names[:size])
        del names[:size]
    return stages


#: The code that iterates over the argument of PyTorch's function.
_clip_code = inspect.unwrap(nn.utils.clip_grad_norm_).__code__


def _only_own_norm() -> RuntimeError:
    return RuntimeError(
        'torch.nn.utils.clip_grad_norm_ would clip the gradients of each rank by '
        'the norm of its own stages only: model.clip_grad_norm_(max_norm) takes '
        'the norm of the whole model'
    )


def _data_of(plan: Settings, mesh: DeviceMesh, data: str) -> str:
    """Return ``data`` as a plan says it.

    Raises:
        ValueError: The plan is for another mesh, or ``data`` is given as well.
    """
    sizes = {axis: len(lines[0]) for axis, lines in lines_of(mesh).items()}
    if {axis: plan.mesh.get(axis, 1) for axis in sizes} != sizes:
        raise ValueError(
            f'the plan is for the mesh {dict(plan.mesh)}, but this one is {sizes}: '
            'mesh=init_mesh(**plan.mesh, axes=plan.axes)'
        )
    planned = []
    for axis in plan.axes:
        if sizes[axis] > 1:
            planned.append(axis)
    axes = []
    for axis in mesh.mesh_dim_names or ():
        if sizes[axis] > 1:
            axes.append(axis)
    if axes != planned:
        raise ValueError(
            f'the plan is for a mesh whose axes are {planned}, from the outermost one, but those '
            f'of this one are {axes}: mesh=init_mesh(**plan.mesh, axes=plan.axes), or a plan '
            'with axes=…'
        )
    if data not in ('replicate', plan.data):
        raise ValueError(f'the plan says data={plan.data!r}, so leave data={data!r} out')
    return plan.data


def _deferred(model: Any, skeleton: nn.Module, chunks: int) -> Any:
    """Return a model, or functions that make its layers, with deferred batch normalization."""
    convert = DeferredBatchNorm.convert_deferred_batch_norm
    convert(skeleton, chunks)

    def make(function: Callable[[], nn.Module]) -> nn.Module:
        return convert(function(), chunks)

    if model is skeleton:
        return model
    return [partial(make, function) for function in model]
