"""``dry_run``: a step of each rank of a mesh, in one process, without devices and values.

::

    mesh, model, step ─▶ virtual ranks ─▶ a step ─▶ an entry for each item ─▶ replay ─▶ report
                         one for places   of a few                            of all
                         that are alike   micro-batches                       places and items

Replicas and ranks along the tensor axis do the same work. So one virtual rank runs for each place
along the pipe axis, and for one of several places with equal layers. It runs a few micro-batches
of each kind. The change of memory, the FLOPs, messages and collectives of each action are recorded
then. The replay adds them up over the whole row of each place.
"""

import re
import sys
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchgpipe.base.private import fake_store, forget_meshes
from torchgpipe.base.settings import AXES, checkpoint_stops
from torchgpipe.base.structure import flatten_nested, storage_id
from torchgpipe.distributed.layers import skeleton_of, style_of
from torchgpipe.distributed.mesh import Axis, check_sizes, init_mesh
from torchgpipe.dry_run.counters import Entry, calls_seen
from torchgpipe.dry_run.report import Account, DryRun, Kept
from torchgpipe.dry_run.virtual import (
    Rendezvous,
    VirtualModel,
    VirtualRank,
    micro_batch_of,
)
from torchgpipe.engine.gradients import FakeWeights
from torchgpipe.schedule import Action, ScheduleLike
from torchgpipe.schedule.messages import Message, Row, UnitAction, receiving_early, with_messages
from torchgpipe.shard.sums import local


def dry_run(
    module: nn.Sequential | Sequence[Callable[[], nn.Module]],
    balance: Any,
    input: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    mesh: Mapping[str, int],
    schedule: ScheduleLike = '1f1b',
    target_dim: Any = None,
    normalizer: Any = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    processes: int | None = None,
    devices_per_host: int | None = None,
    memory_limit: float | None = None,
    axes: Sequence[str] = AXES,
    **options: Any,
) -> DryRun:
    """Run a step on each rank of a mesh that does not exist, and report the needs of each rank.

    The model and the step are the ones of :class:`~torchgpipe.distributed.DistributedGPipe`, with
    its checks and errors. Tensors have no memory and no values, and messages are handed over
    within this process. So a step of thousands of ranks takes seconds, without a device.

    >>> import torch
    >>> from torch import nn
    >>> from torchgpipe.distributed import dry_run
    >>> with torch.device('meta'):
    ...     module = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    >>> report = dry_run(module, [2, 1], torch.empty(64, 256), torch.empty(64, 256),
    ...                  nn.functional.mse_loss, mesh={'data': 2, 'pipe': 2}, chunks=8,
    ...                  optimizer=torch.optim.AdamW)
    >>> [rank.parameters for rank in report.ranks]
    [1052672, 1049600, 1052672, 1049600]

    Args:
        module: As of :class:`~torchgpipe.distributed.DistributedGPipe`, best on the meta device.
        balance: As of :class:`~torchgpipe.distributed.DistributedGPipe`.
        input: The input of one replica. Only shapes and types of tensors matter, so tensors may be
            on the meta device.
        target: The target of one replica, in the same way.
        loss_fn: As of :meth:`~torchgpipe.distributed.DistributedGPipe.step`.
        mesh: The sizes of the axes, such as ``{'data': 64, 'pipe': 8, 'tensor': 8}``.
        schedule: As of :meth:`~torchgpipe.distributed.DistributedGPipe.step`.
        target_dim: As of :meth:`~torchgpipe.distributed.DistributedGPipe.step`.
        normalizer: As of :meth:`~torchgpipe.distributed.DistributedGPipe.step`.
        optimizer: Makes the optimizer from a list of parameters, such as ``torch.optim.AdamW``. It
            takes a step, and the size of its state is reported. By default there is none.
        processes: The number of processes that will be started; by default, as many as the mesh
            has ranks.
        devices_per_host: The number of devices of a host, of which each runs one rank. If it is
            given, the report divides messages and collectives into those within a host and those
            between hosts.
        memory_limit: The memory of a device in bytes. If it is given, the report lists the ranks
            that need more.
        axes: The axes of the mesh, from the outermost one, as for
            :func:`~torchgpipe.distributed.init_mesh`.
        options: The other arguments of :class:`~torchgpipe.distributed.DistributedGPipe`, such as
            ``chunks``, ``checkpoint``, ``data`` and ``tensor_plan``.

    Raises:
        ValueError: As ``DistributedGPipe`` and its ``step`` raise for these arguments; or
            ``devices_per_host`` or ``memory_limit`` is no number above zero.
        RuntimeError: ``torch.distributed`` is initialized, or a layer reads a value of a tensor.
    """
    for name, number, kinds in (
        ('devices_per_host', devices_per_host, int),
        ('memory_limit', memory_limit, (int, float)),
    ):
        if number is not None and not (isinstance(number, kinds) and number > 0):
            raise ValueError(f'{name} must be a number above zero, but is {number!r}')
    step = partial(
        _step,
        input,
        target,
        loss_fn,
        optimizer,
        schedule=schedule,
        target_dim=target_dim,
        normalizer=normalizer,
    )
    skeleton = skeleton_of(module)
    # The caller may make the model and call this on the meta device.
    with torch.device('cpu'), _fake_mesh(mesh, axes, processes) as found:
        options |= {'compare_every': 0, 'weights': None, 'init': None}
        make = partial(VirtualModel, balance=balance, mesh=found, **options)
        meeting, models, kept = _run(make, skeleton, step, options.get('tensor_plan') or {})
        if not _are_alike(meeting, models):
            meeting, models, kept = _run(make, skeleton, step, None)
        return _report(meeting, models, kept, skeleton, devices_per_host, memory_limit)


@contextmanager
def _fake_mesh(
    sizes: Mapping[str, int], axes: Sequence[str], processes: int | None
) -> Iterator[Any]:
    """Create a mesh of fake processes, of which this process is the first one."""
    unknown = [name for name in sizes if name not in AXES]
    if unknown:
        raise ValueError(f'a mesh has axes of {AXES}, but this one has {unknown}')
    data, pipe, tensor = [sizes.get(name, 1) for name in AXES]
    product = data * pipe * tensor
    check_sizes(data, pipe, tensor, product if processes is None else processes)
    if dist.is_initialized():
        raise RuntimeError(
            'a dry run has a fake group of processes, but torch.distributed is '
            'initialized already: run it in a process of its own'
        )
    forget_meshes()  # A mesh of real processes may equal this one as well.
    hook = sys.excepthook  # PyTorch would print the number of the rank before each line.
    dist.init_process_group('fake', rank=0, world_size=product, store=fake_store())
    try:
        with calls_seen():
            yield init_mesh(data, pipe, tensor, device_type='cpu', axes=axes)
    finally:
        # A later mesh may equal this one, but has other groups.
        forget_meshes()
        dist.destroy_process_group()
        sys.excepthook = hook


Models = dict[int, VirtualModel]


def _run(
    make: Callable[..., VirtualModel],
    skeleton: nn.Sequential,
    step: Callable[..., Any],
    plan: Mapping[str, Any] | None,
) -> tuple[Rendezvous, Models, dict[int, tuple[Kept, ...]]]:
    """Run a step of the virtual ranks; return their models, and the memory that they keep."""
    meeting = Rendezvous()
    models = {0: make(partial(VirtualRank, meeting, 0), skeleton)}
    rank = models[0]._rank
    like = _like(models[0], skeleton, plan) if plan is not None else [*range(rank.mesh.pipe.size)]
    for place in sorted({*like} - {0}):
        models[place] = make(partial(VirtualRank, meeting, place), skeleton)
    meeting.like = like
    kept: dict[int, tuple[Kept, ...]] = {}

    def run(place: int) -> None:
        kept[place] = step(models[place])

    meeting.turns.run([partial(run, place) for place in models])
    return meeting, models, kept


def _step(
    input: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    model: VirtualModel,
    **options: Any,
) -> tuple[Kept, ...]:
    """Take a step of a model and of its optimizer; return the tensors that stay afterwards."""
    rank = model._rank
    meeting = rank.meeting
    counter = rank.counter
    counter.others = {storage_id(local(x)) for x in (*model.parameters(), *model.buffers())}
    with counter, FakeWeights():
        model.step(_fake(meeting, input), _fake(meeting, target), loss_fn, **options)
        counter.at(None)
    parameters = [*model.parameters()]
    states: Mapping[Any, Any] = {}
    if optimizer is not None:
        with counter:
            made = optimizer(parameters)
            made.step()
            states = made.state
    return (
        *(_kept('parameters', x, name) for name, x in model.named_parameters()),
        *(_kept('gradients', x.grad) for x in parameters if x.grad is not None),
        *(_kept('optimizer', each) for x in states for each in _tensors_in(states[x])),
        *(_kept('buffers', x) for x in model.buffers()),
    )


def _fake(meeting: Rendezvous, value: Any) -> Any:
    """Return a value with fake tensors."""
    # A copy keeps objects such as NoChunk.
    return deepcopy(value, {id(x): meeting.fake(x) for x in flatten_nested(value)[0]})


def _tensors_in(state: Any) -> Iterable[Tensor]:
    return [
        x
        for x in (state.values() if isinstance(state, dict) else [state])
        if isinstance(x, Tensor)
    ]


def _kept(kind: str, x: Tensor, name: str = '') -> Kept:
    """Return the description of a tensor that stays after a step."""
    axes = []
    if isinstance(x, DTensor):
        names = x.device_mesh.mesh_dim_names or ()
        # The tensor axis splits first, and the data axis splits the resulting part.
        axes = sorted(
            [
                (name, placement.dim)
                for name, placement in zip(names, x.placements)
                if hasattr(placement, 'dim')
            ],
            reverse=True,
        )
    return Kept(kind, name, tuple(x.shape), x.element_size(), tuple(axes))


# Places that are alike.


def _like(model: VirtualModel, skeleton: nn.Sequential, plan: Mapping[str, Any]) -> list[int]:
    """Return for each place along the pipe axis the first place with equal layers."""
    rank = model._rank
    first = dict[Any, int]()
    modes = checkpoint_stops(model.checkpoint, 2, len(model.balance))
    # Stages with ends of skips differ by the names or the namespaces.
    places = rank.placement.places
    alone = {0, len(places) - 1, *(stage for tie in rank.description.ties for stage, _ in tie)}
    found = []
    for place in range(rank.mesh.pipe.size):
        stages = rank.stages_of(place)
        forms = [
            (
                modes[j],
                places[j + 1] == place,
                *(_form(name, skeleton.get_submodule(name), plan) for name in rank.stages[j]),
            )
            for j in stages
            if not alone & {*stages}
        ]
        found.append(first.setdefault(tuple(forms) or place, place))
    return found


def _form(name: str, layer: nn.Module, plan: Mapping[str, Any]) -> Any:
    """Return a value that is equal for layers that do the same with tensors of equal shapes.

    Numbers in names do not count, because layers of one kind differ in them.
    """
    modules = dict(layer.named_modules(prefix=name))
    names = {path.removeprefix(f'{name}.'): k for k, path in enumerate(modules)}
    seen: dict[int, Any] = {}
    try:
        return tuple(
            [
                (
                    re.sub(r'\d+', '', path),
                    style_of(path, plan),
                    type(module),
                    tuple(
                        [
                            (
                                name,
                                None
                                if x is None
                                else (x.shape, x.stride(), x.dtype, x.requires_grad),
                            )
                            for tensors in (module._parameters, module._buffers)
                            for name, x in tensors.items()
                        ]
                    ),
                    tuple(
                        [
                            (name, _plain(value, names, seen))
                            for name, value in vars(module).items()
                            if name not in ('_parameters', '_buffers', '_modules')
                        ]
                    ),
                )
                for path, module in modules.items()
            ]
        )
    except RecursionError:  # Such as for a long linked list.
        return id(layer)


def _plain(value: Any, names: Mapping[str, int], seen: dict[int, Any]) -> Any:
    """Return a value that can be compared, or its identity."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, (int, float, type(None), torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (Tensor, nn.Module)):
        return id(value)
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value  # As long as it is there, no other one has its identity.
    plain = partial(_plain, names=names, seen=seen)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(plain, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(plain, value))
    if isinstance(value, dict):
        return type(value), tuple([(key, plain(each)) for key, each in value.items()])
    try:
        reduced = value.__reduce_ex__(4)  # As pickle describes an object: its type and its state.
    except Exception:
        return id(value)
    if isinstance(reduced, tuple):
        return tuple(map(plain, reduced))
    return id(value)


def _are_alike(meeting: Rendezvous, models: Models) -> bool:
    """Return whether places that are alike recompute alike, and have equal headers of messages."""
    rank = models[0]._rank
    for place, like in enumerate(meeting.like):
        for j, k in zip(rank.stages_of(place), rank.stages_of(like)) if like != place else ():
            if meeting.recomputed[j] != meeting.recomputed[k]:
                return False
            for i in meeting.micro_batches:
                for end in (0, 1):  # its input, and its output
                    own = Message(Action(j - 1 + end, 'F', i), j + end)
                    other = Message(Action(k - 1 + end, 'F', i), k + end)
                    if meeting.headers.get(rank.twin(own)) != meeting.headers.get(other):
                        return False
    return True


# The replay.


def _report(
    meeting: Rendezvous,
    models: Models,
    kept: Mapping[int, tuple[Kept, ...]],
    skeleton: nn.Sequential,
    devices_per_host: int | None,
    memory_limit: float | None,
) -> DryRun:
    model = models[0]
    rank = models[0]._rank
    assert meeting.schedule is not None
    rows = [
        *map(
            receiving_early,
            with_messages(meeting.schedule, rank.description.skip_edges, rank.placement.places),
        )
    ]
    sizes = {axis.name: axis.size for axis in rank.mesh.axes}
    groups = {}
    everyone = Axis('all', rank.mesh.size, 0, rank.mesh.everyone, None)
    for axis in (everyone, *rank.mesh.axes):
        if axis.group is not None:
            groups[str(axis.group.group_name)] = axis.name
    accounts = []
    for place, row in enumerate(rows):
        like = meeting.like[place]
        accounts.append(
            Account(
                tuple(rank.stages_of(place)),
                tuple(_replayed(meeting, place, row, models[like]._rank)),
                kept[like],
                groups,
                dict(zip(_names(rank, skeleton, like), _names(rank, skeleton, place))),
            )
        )
    return DryRun(
        sizes,
        tuple(model.balance),
        tuple(rank.placement.places),
        len(meeting.kinds),
        tuple(accounts),
        rank.placement.offloads,
        devices_per_host,
        memory_limit,
        rank.mesh.mesh.mesh_dim_names,
    )


def _names(rank: VirtualRank, skeleton: nn.Sequential, place: int) -> list[str]:
    """Return the names of the parameters of a place."""
    return [
        f'{layer}.{name}'
        for j in rank.stages_of(place)
        for layer in rank.stages[j]
        for name, _ in skeleton.get_submodule(layer).named_parameters()
    ]


def _replayed(
    meeting: Rendezvous, place: int, row: Row, like: VirtualRank
) -> Iterator[tuple[Any, Entry]]:
    """Yield each item in the row of a place, with its entry.

    The first items of a kind have the entries of the first such items that have run. All later
    ones have the last of these entries.
    """
    stages = dict(zip(like.local_stages, like.stages_of(place)))
    row = like.replicas.row(row, like.placement.active_units, True, True, stages)
    begin, *entries = like.counter.entries
    known: defaultdict[Any, list[Entry]] = defaultdict(list)
    numbers = {j: k for k, j in enumerate(like.local_stages)}
    for entry in entries:
        known[entry.item and _kind(meeting, numbers, entry.item)].append(entry)
    numbers = {j: k for k, j in enumerate(like.stages_of(place))}
    seen = Counted[Any]()
    yield None, begin
    for item in row:
        kind = _kind(meeting, numbers, item)
        yield item, known[kind][min(seen[kind], len(known[kind]) - 1)]
        seen[kind] += 1
    for entry in known[None]:
        yield None, entry


def _kind(meeting: Rendezvous, numbers: Mapping[int, int], item: Any) -> Any:
    """Return the kind of an item: equal items have equal entries, except the first ones."""
    if isinstance(item, UnitAction):
        return item.kind, numbers[item.stage]
    kind = meeting.kinds[micro_batch_of(item)]
    if isinstance(item, Action):
        return kind, item.kind, numbers[item.stage]
    (stage, name, _), to = item
    return kind, name, to - stage, numbers.get(stage), numbers.get(to)
