"""What the user holds on each of many processes: a pipeline over ranks, and its replicas."""
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.distributed.clipping import clip
from torchgpipe.distributed.layers import skeleton_of
from torchgpipe.distributed.messages import Header, Messages
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.replicas import DATA, Gradients
from torchgpipe.distributed.start import Facts, digest
from torchgpipe.distributed.tensor import check_plan
from torchgpipe.distributed.transport import Evaluation, Training, Way
from torchgpipe.distributed.watch import Watch, watched
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.gather import REDUCTIONS, gather
from torchgpipe.engine.run import Run
from torchgpipe.engine.scatter import check_rule, cut, fit_rule
from torchgpipe.losses import Losses
from torchgpipe.schedule import Schedule, make
from torchgpipe.schedule.messages import Message, Row, with_messages
from torchgpipe.settings import Checkpoint, checkpoint_stops, parse_checkpoint
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.split import parse_balance, verify_module
from torchgpipe.step import ScheduleLike, find_schedule
from torchgpipe.weights import Weights

__all__ = ['DistributedGPipe']

#: The types that a loss may have.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: So many kinds of steps are remembered, with the headers of their messages.
_KINDS = 32


class DistributedGPipe(nn.Module):
    """Run a sequential model on the processes of a mesh: data × pipe × tensor.

    Each process makes the layers of its own stages only. Loss, gradients and running statistics
    are those of one process that has the whole model and the whole mini-batch.

    >>> from torchgpipe.distributed import DistributedGPipe, init_mesh
    >>> with torch.device('meta'):
    ...     module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model = DistributedGPipe(module, [2, 1], mesh=init_mesh(), chunks=4)
    >>> loss = model.step(torch.ones(8, 4), torch.zeros(8, 2), nn.functional.mse_loss)
    >>> loss.shape, model.get_parameter('2.weight').grad.shape
    (torch.Size([]), torch.Size([2, 8]))

    Args:
        module: The model, the same on all ranks: a sequential module, best on the meta device; or
            a list of functions of which each makes a layer. On the meta device, layer ``i`` gets
            the initial values that follow from ``(seed, i)``, whatever the mesh; so do layers that
            functions make. A module with values keeps those of the first replica.
        balance: The number of layers in each stage.
        mesh: Axes of it are ``'data'``, ``'pipe'`` and ``'tensor'``, or some of these; see
            :func:`~torchgpipe.distributed.init_mesh`.
        chunks: Into how many micro-batches the part of a replica is split.
        checkpoint: As of :class:`~torchgpipe.GPipe`.
        places: The rank along the pipe axis of each stage; by default ranks take turns, and
            ``[0, 1, 1, 0]`` is for the V of ``'zb-v'``.
        data: ``'replicate'``: ranks along the data axis have the same parameters; ``'shard'``:
            each has a part of them, and of what an optimizer keeps (FSDP2).
        tensor_plan: How layers are split along the tensor axis: styles of
            ``torch.distributed.tensor.parallel`` by the names of modules, in which ``*`` stands
            for anything.
        seed: Where initial values come from.
        deferred_batch_norm: As of :class:`~torchgpipe.GPipe`; statistics are over all replicas.
        batch_dim: As of :class:`~torchgpipe.GPipe`.
        gather: As of :class:`~torchgpipe.GPipe`.
        weights: The same; each rank reads what its layers need.
        offload: As of :class:`~torchgpipe.GPipe`.
        timeout: How long a rank may wait for others before all end, with an error that names the
            rank that they wait for; by default 30 minutes. A rank that raises or dies ends all
            within seconds.

    Raises:
        TypeError: The model is neither, or its skips do not match.
        ValueError: The balance, the mesh, places, ``data`` or the plan do not fit.
        RuntimeError: Ranks were given other arguments.
    """

    _rank: Rank

    def __init__(self, module: nn.Sequential | Sequence[Callable[[], nn.Module]],
                 balance: Iterable[int], *, mesh: DeviceMesh, chunks: int = 1,
                 checkpoint: Checkpoint = 'except_last', places: Sequence[int] | None = None,
                 data: str = 'replicate', tensor_plan: Mapping[str, Any] | None = None,
                 seed: int = 0, deferred_batch_norm: bool = False, batch_dim: Any = 0,
                 gather: Any = None, weights: Weights | None = None, offload: bool = False,
                 timeout: timedelta | None = None) -> None:
        super().__init__()
        #: Ends all ranks when one fails.
        self._watch = Watch(mesh, timeout)
        self._make(module, balance, mesh, chunks, checkpoint, places, data, tensor_plan, seed,
                   deferred_batch_norm, batch_dim, gather, weights, offload)

    @watched('the making of this model')
    def _make(self, module: Any, balance: Iterable[int], mesh: DeviceMesh, chunks: int,
              checkpoint: Checkpoint, places: Sequence[int] | None, data: str,
              tensor_plan: Mapping[str, Any] | None, seed: int, deferred_batch_norm: bool,
              batch_dim: Any, gather: Any, weights: Weights | None, offload: bool) -> None:
        skeleton = skeleton_of(module)
        verify_module(skeleton)
        verify_skippables(skeleton)
        self.balance = parse_balance(balance, len(skeleton))
        self.chunks, self.batch_dim, self.gather = int(chunks), batch_dim, gather
        self.offload = bool(offload)
        self.checkpoint = parse_checkpoint(checkpoint, len(self.balance))
        check_rule('batch_dim', batch_dim, [None])
        check_rule('gather', gather, [None, *REDUCTIONS])
        if self.chunks < 1 or data not in DATA:
            raise ValueError(f'chunks must be above zero, and data one of {DATA}, but they are '
                             f'{chunks!r} and {data!r}')
        names = iter(skeleton._modules)
        rank = Rank(mesh, places, [[next(names) for _ in range(n)] for n in self.balance])
        plan = dict(tensor_plan or {})
        check_plan(plan, skeleton, rank.tensor.size)
        rank.together('this model', lambda: Facts(settings=digest(
            [*skeleton._modules], self.balance, self.chunks, str(self.checkpoint), rank.places,
            data, sorted(plan), seed, deferred_batch_norm, str(batch_dim), str(gather))))
        if deferred_batch_norm:
            DeferredBatchNorm.convert_deferred_batch_norm(skeleton, self.chunks)
        rank.make(module, skeleton, seed, weights, plan, data)
        self._modules.update(rank.made)
        self.__dict__['_rank'] = rank
        #: The headers of messages, by what ranks have said of a step.
        self._known: OrderedDict[Any, dict[Message, Header]] = OrderedDict()

    @watched('a step')
    def step(self, input: Any, target: Any, loss_fn: Callable[[Any, Any], Tensor], *,
             schedule: ScheduleLike = '1f1b', target_dim: Any = None, normalizer: Any = None,
             scale: Callable[[Tensor], Tensor] | None = None, return_output: bool = False) -> Any:
        """Run forward and backward of a mini-batch, in the order of a schedule.

        All ranks call it. Each replica has its part of the mini-batch, of any number of samples.

        Args:
            input: As of :meth:`~torchgpipe.GPipe.step`; that of ranks with the first stage counts.
            target: Only ranks with the last stage look at it.
            loss_fn: As of :meth:`~torchgpipe.GPipe.step`.
            schedule: The same, for stages at these places.
            target_dim: As of :meth:`~torchgpipe.GPipe.step`.
            normalizer: The same; what a function counts is over all replicas.
            scale: As of :meth:`~torchgpipe.GPipe.step`.
            return_output: Whether to give the output of this replica, too.

        Returns:
            The loss of the whole mini-batch, on all ranks; or a pair of that and the output, which
            is ``None`` on ranks without the last stage.

        Raises:
            RuntimeError: The model is in evaluation mode, gradients are off, or another rank could
                not begin.
            ValueError: As of :meth:`~torchgpipe.GPipe.step`.
        """
        if not self.training or not torch.is_grad_enabled():
            raise RuntimeError('a step computes gradients, but they are off, or the model is in '
                               'evaluation mode; call model(input) for outputs')
        if target_dim is None:
            target_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        rank = self._rank
        batches, sizes, common, key = self._begin(input, 'step', schedule)
        losses = self._losses(loss_fn, target, sizes, target_dim, normalizer, scale)
        m = len(batches)
        stops = tuple(checkpoint_stops(self.checkpoint, m, len(self.balance)))
        workers = [('rank', place) for place in rank.places]
        found = find_schedule(schedule, workers, m).recomputing(stops)
        way = self._way(found, (key, found))
        training = Training(rank.engine, batches, way, losses, checkpoint_stops=stops,
                            common=common, offload=self.offload)

        training.mini_batch.gather = rank.replicas.gather

        def run() -> Gradients:
            training.run()
            return rank.ties.together(training.gradients)

        others = [x for module in losses.modules for x in module.parameters(recurse=False)]
        rank.replicas.run(run, others)
        loss = self._whole(losses)
        return (loss, self._gathered(batches, sizes, training)) if return_output else loss

    @watched('a call')
    def forward(self, input: Any = None) -> Any:
        """Run the model on a mini-batch, without graphs.

        Args:
            input: As of :class:`~torchgpipe.GPipe`; only ranks with the first stage look at it.

        Returns:
            The output of this replica on ranks with the last stage, ``None`` on others.
        """
        batches, sizes, common, key = self._begin(input, 'call', 'gpipe')
        found = _forward(len(self.balance), len(batches))
        with torch.no_grad():
            evaluation = Evaluation(self._rank.engine, batches, self._way(found, (key, found)),
                                    common=common)

            def run() -> Gradients:
                evaluation.run()
                return []

            self._rank.replicas.evaluate(run)
            return self._gathered(batches, sizes, evaluation)

    def _begin(self, input: Any, what: str, schedule: Any
               ) -> tuple[list[Batch], list[int], list[int], Any]:
        """Return micro-batches, their sizes, which tensors they share, and what a step is like."""
        cuts: list[tuple[list[Batch], list[int], list[int]]] = []
        text = schedule.to_csv() if isinstance(schedule, Schedule) else str(schedule)
        modes = [(module.training, *(x.requires_grad for x in module.parameters(recurse=False)))
                 for module in self.modules()]

        def read() -> Facts:
            settings, looks = digest(what, text, self._rank.replicas.syncs), digest(modes)
            if not self._rank.is_first:
                return Facts(settings=settings, digest=looks)
            cuts.append(cut(input, self.chunks, fit_rule(self.batch_dim, input, self.children())))
            batches, sizes, common = cuts[0]
            outlines = [[(x.shape, x.dtype, x.requires_grad) for x in batch] for batch in batches]
            kind = batches[0].kind([None] * len(batches[0]))  # type: ignore[list-item]
            return Facts(len(batches), sum(sizes), 0., settings,
                         digest(looks, outlines, kind, common))

        said = self._rank.together(f'a {what} of this model', read)
        own = [said[rank] for rank in self._rank.pipe.ranks]
        first = said[self._rank.ranks[0]]
        sizes = [first.size // first.m + (i < first.size % first.m) for i in range(first.m)]
        batches, _, common = cuts[0] if cuts else ([Batch.of(()) for _ in sizes], sizes, [])
        return batches, sizes, common, (what, *own)

    def _losses(self, loss_fn: Any, target: Any, sizes: list[int], target_dim: Any,
                normalizer: Any, scale: Any) -> Losses:
        """Return the losses of micro-batches; on ranks without the last stage, of nothing."""
        is_last = self._rank.is_last
        found: list[Losses] = []

        def count() -> Facts:
            found.append(Losses(loss_fn, target, sizes, target_dim, normalizer, scale, False)
                         if is_last else Losses(_nothing, None, sizes, 0, 1, None))
            return Facts(counted=found[0].counted or 0.)

        said = self._rank.together('the loss of a step', count)
        if found[0].counted is not None:
            found[0].count_in(self._rank.sum(said))
        return found[0]

    def _whole(self, losses: Losses) -> Tensor:
        """Return the loss of the whole mini-batch."""
        def count() -> Facts:
            if not self._rank.is_last:
                return Facts()
            total = losses.total()
            return Facts(counted=float(total), digest=_DTYPES.index(total.dtype))

        said = self._rank.together('the loss of a step', count)
        dtype = _DTYPES[said[self._rank.ranks[-1]].digest]
        return torch.tensor(self._rank.sum(said), dtype=dtype, device=self._rank.device)

    def _way(self, schedule: Schedule, key: Any) -> Way:
        if key not in self._known and len(self._known) >= _KINDS:
            self._known.popitem(last=False)
        known = self._known.setdefault(key, {})
        rank = self._rank
        row = _rows(schedule, rank.skips, tuple(rank.places))[rank.pipe.rank]
        return Way(row, Messages(rank.pipe.group, rank.ranks, rank.device, known), self._watch.at)

    def _gathered(self, batches: list[Batch], sizes: list[int], run: Run) -> Any:
        if not self._rank.is_last:
            return None
        batch_dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        return gather(batches, sizes, self.gather, batch_dim, run.aliasing.common(0))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let steps keep their gradients on each replica, for the first one after this context.

        Gradients of several steps are added up and reduced once, as for one mini-batch of all.
        """
        before, self._rank.replicas.syncs = self._rank.replicas.syncs, False
        try:
            yield
        finally:
            self._rank.replicas.syncs = before

    @watched('clipping')
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.) -> Tensor:
        """Scale the gradients of the whole model to a norm, as ``torch.nn.utils`` does for one.

        All ranks call it.

        Args:
            max_norm: The largest norm that they may have.
            norm_type: The type of the norm; ``float('inf')`` for the largest value.

        Returns:
            The norm that they had, on all ranks, in float64.
        """
        copies = self._rank.ties.copies
        own = {id(x): x for x in self.parameters() if x.grad is not None}
        return clip([x.grad for x in own.values() if x.grad is not None],
                    [number not in copies for number in own], max_norm, norm_type,
                    self._rank.pipe.group, self._rank.device)

    def train(self, mode: bool = True) -> 'DistributedGPipe':
        """Set training or evaluation mode."""
        super().train(mode)
        self._rank.replicas.train(mode)
        return self


@lru_cache(maxsize=_KINDS)
def _rows(schedule: Schedule, skips: frozenset[tuple[int, int]], places: tuple[int, ...]
          ) -> tuple[Row, ...]:
    return with_messages(schedule, sorted(skips), places)


@lru_cache(maxsize=_KINDS)
def _forward(stages: int, m: int) -> Schedule:
    """Return the forward of micro-batches as a schedule."""
    rows = make('gpipe', stages, m).rows
    return Schedule(tuple(tuple(each for each in row if each.kind == 'F') for row in rows))


def _nothing(output: Any, target: Any) -> Tensor:
    """Stand for a loss where there is none."""
    raise AssertionError('this rank does not have the last stage')
