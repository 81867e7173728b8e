"""Collectives without a gradient, errors raised on all ranks, and random numbers of ranks.

Where no rank communicates, ranks ask each other whether one has raised
(:func:`raise_on_all_ranks`). In a collective, the others wait for a rank that has raised. When its
process ends, the ranks that are connected with it get an error that names an address, and the
others wait for these in turn. So each rank that fails leaves a note in the group's store, and each
rank that waits for long looks for such notes. A rank without a note after a while is the one that
blocked all others::

    rank 0    collective ── fails ── note ─┐
    rank 1    raises, ends                 ├─▶ 0, 2, 3 have left a note: it was 1
    rank 2    collective ── fails ── note ─┤
    rank 3    collective ── waits ── note ─┘

On accelerators a collective is only put into a queue. There NCCL's watchdog ends a process whose
collective does not end.

All ranks of a group have to call the same collectives in the same order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    ProcessGroup,
    get_debug_level,
)

from torchgpipe.base.context import check_order
from torchgpipe.base.devices import is_cpu
from torchgpipe.base.private import FakeTensor
from torchgpipe.shard.exchange import exchange
from torchgpipe.shard.parameter import check_dim
from torchgpipe.shard.world import World, current, needed_by

#: How long a rank waits for the others before it looks for their notes.
LOOK = timedelta(seconds=0.5)

#: How long a rank waits for the notes of the others, which look for its note every ``LOOK``.
GRACE = timedelta(seconds=5)

#: How many collectives of a group have failed on this rank. Ranks may continue after a failure
#: on all of them; the next failure has its own notes.
_failures: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


class NotBegun(RuntimeError):
    """Another rank has raised an error in a task of all ranks."""


@contextmanager
def raise_on_all_ranks(task: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks of a group if one of them raises in a block without communication.

    Raises:
        ValueError: Another rank has raised one; the message has the task, the rank and its error.
        NotBegun: Another rank has raised another error.
    """
    group = group or current().tensor_group
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:  # Also an interrupt: the others would wait for this rank.
        error = raised
    failed = torch.tensor(float(error is not None), device=current().mesh.device_type)
    complete(
        lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, group, async_op=True),
        group,
        failed.is_cpu,
    )
    if failed:
        _raise_first(task, error, group)


F = TypeVar('F', bound=tuple[Any, ...])


def agree(
    task: str,
    function: Callable[[], F],
    default: F,
    group: ProcessGroup | None,
    device: torch.device,
) -> dict[int, F]:
    """Call a function on all ranks of a group, and return the facts of each rank.

    One exchange also reports a rank that raised, such as for a wrong input, so that no other rank
    waits for it::

        rank 0    facts ────────┐                     facts of all ranks, or the same error
        rank 1    an error ─────┼── exchange ──▶      its error
        rank 2    facts ────────┘                     NotBegun: … failed on rank 1

    Args:
        function: Returns the facts of this rank, numbers that a float64 holds exactly; it does
            not communicate.
        default: The facts of a rank that raises.
        group: The ranks; ``None`` if there is only this one.

    Raises:
        ValueError: The function raised a ValueError on another rank.
        NotBegun: It raised another error there.
    """
    if group is None:
        return {dist.get_rank(): function()}
    error: BaseException | None = None
    facts = default
    try:
        facts = function()
    except BaseException as raised:  # Also an interrupt: the others would wait for this rank.
        error = raised

    try:
        rows = exchange([float(error is not None), *facts], group, device)
    except Exception as failure:
        if error is not None:
            raise error from failure
        raise
    by_rank = {}
    for rank, row in zip(dist.get_process_group_ranks(group), rows):
        if row[0]:
            _raise_first(task, error, group)
        by_rank[rank] = _parse(row[1:], default)
    return by_rank


def _parse(row: Sequence[float], default: F) -> F:
    """Return the facts in a row of numbers, which have the types of the default."""
    values = []
    for value, number in zip(default, row):
        values.append(type(value)(number))
    return type(default)(*values)


def _raise_first(task: str, error: BaseException | None, group: ProcessGroup) -> NoReturn:
    """Raise the error of this rank, or of the first rank that has one."""
    text = '' if error is None else f'{type(error).__name__}: {error}'
    texts = gathered(text, group)
    if error is not None:
        raise error
    for rank, text in zip(dist.get_process_group_ranks(group), texts):
        if text:
            kind = ValueError if text.startswith(ValueError.__name__) else NotBegun
            raise kind(f'{task} failed on rank {rank}, so it ended here, too: {text}')
    raise AssertionError('no rank has failed')


def gathered(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, which can be anything that can be pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


# --- collectives
# ----------------------------------------------------------------------------------


def complete(start: Callable[[], Any], group: ProcessGroup, on_cpu: bool) -> None:
    """Start a collective, and wait for it.

    Raises:
        RuntimeError: It failed, and the message names the ranks that did not take part; or this
            is a cell of a pipeline whose collectives have no order.
    """
    check_order()
    work = start()
    try:
        if on_cpu:
            _wait(work, group)
        else:
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(_message(group)) from error


def _wait(work: Any, group: ProcessGroup) -> None:
    """Wait for the work of a collective, but not if it cannot end any more."""
    while True:
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            if work.is_completed() or group.get_group_store().check([_note(group)]):
                raise


def _note(group: ProcessGroup) -> str:
    return f'torchgpipe.shard/failed/{_failures.get(group, 0)}'


def _message(group: ProcessGroup) -> str:
    """Leave a note, wait for the notes of others, and return a message about ranks without one."""
    store = group.get_group_store()
    ranks = dist.get_process_group_ranks(group)
    note = _note(group)
    store.set(f'{note}/{group.rank()}', '')
    store.set(note, '')
    _failures[group] = _failures.get(group, 0) + 1
    missing: list[int] = []
    for i, rank in enumerate(ranks):
        try:
            store.wait([f'{note}/{i}'], timedelta(0) if missing else GRACE)
        except RuntimeError:
            missing.append(rank)
    where = f'a collective of the group of ranks {ranks} failed on rank {ranks[group.rank()]}'
    if not missing:
        return f'{where}, and on all others, for the reason above'
    names = ('rank ' if len(missing) == 1 else 'ranks ') + ', '.join(map(str, missing))
    return (
        f'{where}: {names} did not take part. There, an error was raised before, or the '
        'process was ended, or other layers were called: look at what it has printed. '
        'TORCH_DISTRIBUTED_DEBUG=DETAIL lets ranks compare what they are about to do'
    )


# --- the debug mode: TORCH_DISTRIBUTED_DEBUG=DETAIL, which PyTorch reads when it is imported
# ----------------------------------------------------------------------------------


def compare(facts: str, group: ProcessGroup) -> None:
    """Raise on all ranks of a group, in the debug mode, if their facts differ.

    In that mode PyTorch compares the collectives that ranks call, and the shapes and types of the
    sent tensors. This function compares further facts.

    Raises:
        RuntimeError: Facts differ. The message names the ranks.
    """
    if get_debug_level() != DebugLevel.DETAIL:
        return
    by_rank = gathered(facts, group)
    if len({*by_rank}) > 1:
        raise RuntimeError(
            f'the ranks of a group do not do the same: {differences(by_rank, group)}. Let all of '
            'them call the same layers in the same order, on tensors that fit together'
        )


def is_read(x: Tensor) -> bool:
    """Return whether the host reads values: on the CPU, or in the debug mode.

    A fake tensor, as in a dry run, has none.
    """
    if isinstance(x, FakeTensor):
        return False
    return x.is_cpu or get_debug_level() == DebugLevel.DETAIL


def differences(facts: Sequence[object], group: ProcessGroup) -> str:
    """Return a text of facts and the ranks that have them, the rarest fact first."""
    ranks = dist.get_process_group_ranks(group)
    texts = []
    for fact, count in reversed(Counter(facts).most_common()):
        who = ', '.join(str(rank) for rank, other in zip(ranks, facts) if other == fact)
        texts.append(f'rank {who} has {fact}' if count == 1 else f'ranks {who} have {fact}')
    return '; '.join(texts)


def all_reduce(
    tensor: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce a contiguous tensor over a group, in place; by default to the sum."""
    if group.size() > 1:
        complete(lambda: dist.all_reduce(tensor, op, group, async_op=True), group, tensor.is_cpu)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup, source: int = 0) -> Tensor:
    """Copy the values of one rank of a group to a contiguous tensor, in place."""
    if group.size() > 1:
        complete(
            lambda: dist.broadcast(tensor, group=group, async_op=True, group_src=source),
            group,
            tensor.is_cpu,
        )
    return tensor


def from_first(tensor: Tensor, world: World) -> Tensor:
    """Copy the values of the first rank of the first replica to a contiguous tensor.

    They are sent to the first rank of each group, and from there to the others of the group.
    """
    return broadcast(broadcast(tensor, world.data_group), world.tensor_group)


def all_gather(tensor: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return the full tensor of shards of these lengths, one of each rank, along a dimension."""
    if group.size() == 1:
        return tensor
    # PyTorch compares only the sent shapes, which may be equal for shards of different lengths.
    compare(f'all_gather: {[*lengths]}', group)
    # All ranks have to send the same shape, so shorter shards are padded.
    shape = list(tensor.shape)
    shape[dim] = max(lengths)
    if tensor.size(dim) == shape[dim]:
        sent = tensor.contiguous()
    else:
        sent = tensor.new_zeros(shape)
        sent.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
    received = [torch.empty_like(sent) for _ in lengths]
    complete(lambda: dist.all_gather(received, sent, group, async_op=True), group, tensor.is_cpu)
    shards = [x.narrow(dim, 0, length) for x, length in zip(received, lengths)]
    return torch.cat(shards, dim)


def all_sizes(tensor: Tensor, group: ProcessGroup, dim: int) -> list[int]:
    """Return the size of a dimension on each rank of a group."""
    if group.size() == 1:
        return [tensor.size(dim)]
    size = torch.tensor([tensor.size(dim)], device=tensor.device)
    sizes: list[int] = all_gather(size, group, 0, [1] * group.size()).tolist()
    return sizes


def all_to_all(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Send the given numbers of rows to each rank of a group; return the received rows."""
    received = x.new_empty(sum(receive), *x.shape[1:])
    complete(
        lambda: dist.all_to_all_single(
            received, x.contiguous(), receive, send, group, async_op=True
        ),
        group,
        x.is_cpu,
    )
    return received


# Random numbers: equal or different ones on the ranks of a group.


class _OfDevice:
    """The default generator of the current device of an accelerator."""

    def __init__(self, kind: str) -> None:
        module = torch.get_device_module(kind)
        self.get_state = module.get_rng_state
        self.set_state = module.set_rng_state
        self.manual_seed = module.manual_seed


@contextmanager
def same_draws(world: World, *generators: Any, replicas: bool = False) -> Iterator[None]:
    """Draw the random numbers of the group's first rank on all ranks of the group.

    If a rank's generators were in the same state, they keep the first rank's state afterwards.
    Otherwise their own state is restored. With `replicas`, all groups draw the same numbers.
    """
    states = [generator.get_state() for generator in generators]
    first = [_of_first(state, world, replicas) for state in states]
    if all(map(torch.equal, states, first)):
        yield
        return
    with _in_state(generators, states):
        for generator, state in zip(generators, first):
            generator.set_state(state)
        yield


@contextmanager
def draws(parallel_dim: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Draw the same random numbers on all ranks of a group, or different ones.

    Use it around operations in your own layer that draw random numbers::

        with ts.draws(-1):  # each rank has heads of its own
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    In both cases the numbers depend on ``torch.manual_seed``, and a checkpoint that restores the
    states of generators draws them again. All ranks of a group have to enter it together.

    Args:
        parallel_dim: None for a full tensor. Then all ranks draw the numbers of a single process
            if their seeds are equal, and otherwise the numbers of the group's first rank. With -1
            or 1, for this rank's shard, each rank draws its own numbers.
        device: The device that draws; by default the accelerator, if there is one.
    """
    split = check_dim(parallel_dim) is not None
    world = needed_by(parallel_dim)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = device is None or is_cpu(device)
    generators: list[Any] = [torch.default_generator]
    generators += [] if device is None or on_cpu else [_OfDevice(device.type)]
    if world is None or split and world.tensor_size == 1:
        yield
    elif not split:
        with same_draws(world, *generators):
            yield
    else:
        # Ranks with the same seed draw the same number here.
        seed = int(torch.randint(2**62, (), device='cpu'))
        with _in_state(generators, [generator.get_state() for generator in generators]):
            for generator in generators:
                generator.manual_seed(seed + world.tensor_rank)
            yield


def _of_first(state: Tensor, world: World, replicas: bool) -> Tensor:
    """Return the state of a generator of the first rank, of the group or of all groups."""
    sent = state.clone().to(world.mesh.device_type)
    return (from_first(sent, world) if replicas else broadcast(sent, world.tensor_group)).cpu()


@contextmanager
def _in_state(generators: Any, states: list[Tensor]) -> Iterator[None]:
    """Restore the given states of generators at the end."""
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
