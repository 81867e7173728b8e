"""Agreement of ranks: facts exchanged at the start of a step, clocks, and bitwise comparison.

The exchange is a collective of a few numbers. It also reports a rank that could not begin, such as
for a wrong input, so that no other rank waits for it.

The clock offset of a rank results from one exchange::

    first rank     asks at t0                 has the answer at t1
    other rank                 answers: now                          now − (t0 + t1) / 2

Ranks compare the bits of the parameters and buffers that they share::

    data axis      all that is not split over it: weights, statistics
    tensor axis    all that is not split over it: layers without a style, norms
    pipe axis      tied weights, and buffers of modules that stand in stages of several ranks

At the start of a step with a comparison, ranks exchange one number for each axis. If numbers
differ, the ranks search for the tensor, and all raise an error. A number is computed from the bits
of the tensors, as integers, and their places. So it depends neither on the device nor on an order
of sums.
"""

import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.schedule import Timed
from torchgpipe.shard.collectives import gathered


class NotBegun(RuntimeError):
    """Another rank could not begin."""


class Facts(NamedTuple):
    """The facts of a rank about a step.

    Args:
        counted: Its share of the whole loss, or of the loss's count.
        settings: A digest of the settings, which have to be the same on all ranks.
        digest: A digest of everything that determines the form of this rank's messages.
        layers: A digest of state that ranks with the same stages share: modes, which parameters
            require grad, and which layers were replaced.
        given: A number for the samples, equal on ranks along the tensor axis.
        divisors: The divisors of its loss, in two numbers.
        numbers: The numbers of its tensors, if ranks compare them: see :func:`numbers_of`.
    """

    m: int = 0
    size: int = 0
    counted: float = 0.0
    settings: int = 0
    digest: int = 0
    layers: int = 0
    given: int = 0
    divisors: tuple[float, float] = (0.0, 0.0)
    numbers: tuple[int, int, int] = (0, 0, 0)


def digest(*values: object) -> int:
    """Return a number that is the same for values with the same ``repr``.

    Addresses in them, such as addresses of functions, do not count.
    """
    return zlib.crc32(re.sub(' at 0x[0-9a-f]+', '', repr(values)).encode())


def together(
    task: str,
    function: Callable[[], Facts | None],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[int, Facts]:
    """Call a function on all ranks of a group, and return the facts of each rank, by its number.

    Args:
        function: Returns the facts of this rank, if any; it does not communicate.
        group: The ranks; ``None`` if there is only this one.

    Raises:
        ValueError: The function raised a ValueError on another rank.
        RuntimeError: It raised another error there, or ranks have different settings.
    """
    error: BaseException | None = None
    facts = Facts()
    try:
        facts = function() or facts
    except BaseException as raised:  # Also an interrupt: the others would wait for this rank.
        error = raised
    if group is not None:
        own = torch.tensor(
            [error is not None, *facts[:-2], *facts.divisors, *facts.numbers],
            dtype=torch.float64,
            device=device,
        )
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group)
    if group is None:
        if error is not None:
            raise error
        return {dist.get_rank(): facts}
    ranks = dist.get_process_group_ranks(group)
    rows = torch.stack(found).tolist()
    if any(failed for failed, *_ in rows):
        reasons = gathered(str(error) if isinstance(error, ValueError) else None, group)
        if error is not None:
            raise error
        _raise_first(
            task,
            {rank: reason for rank, reason, (failed, *_) in zip(ranks, reasons, rows) if failed},
        )
    said = {}
    for rank, (_, m, size, counted, *more) in zip(ranks, rows):
        settings, looks, layers, given, *numbers = map(int, (*more[:4], *more[6:]))
        said[rank] = Facts(
            int(m),
            int(size),
            counted,
            settings,
            looks,
            layers,
            given,
            (more[4], more[5]),
            (numbers[0], numbers[1], numbers[2]),
        )
    for rank, each in said.items():
        if each.settings != said[ranks[0]].settings:
            raise RuntimeError(
                f'{task} has other settings on rank {rank} than on rank '
                f'{ranks[0]}; all ranks call it with the same ones'
            )
    return said


def _raise_first(task: str, reasons: Mapping[int, str | None]) -> NoReturn:
    """Raise the error of the first rank that has raised one, with its text for a ValueError."""
    rank, reason = next(iter(reasons.items()))
    if reason is None:
        raise NotBegun(
            f'{task} could not begin on rank {rank}, so it ended here, too; '
            'look at what that rank has raised'
        )
    raise ValueError(f'{task} ended on rank {rank}, so it ended here, too: {reason}')


#: How often each clock is read; the answer with the shortest round trip counts.
ASKED = 8


def merge(
    actions: list[Timed], began: float, group: dist.ProcessGroup | None, device: torch.device
) -> list[Timed]:
    """Return the actions of all ranks of a group, in seconds of the first one's clock.

    Args:
        actions: The actions of this rank, in seconds since a recording began.
        began: The time when the recording began, by this rank's clock.
        group: The ranks; lanes are in their order.
    """
    if group is None:
        return actions
    began -= _ahead(group, device)
    found: list[list[Timed]] = gathered(
        [
            timed._replace(device=group.rank(), start=timed.start + began, end=timed.end + began)
            for timed in actions
        ],
        group,
    )
    return sum(found, [])


def _ahead(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return by how much this rank's clock is ahead of the first one's."""
    first, *others = dist.get_process_group_ranks(group)
    now = torch.zeros((), dtype=torch.float64, device=device)
    for rank in others:
        best = float('inf'), 0.0
        for _ in range(ASKED):
            if dist.get_rank() == first:
                start = time.perf_counter()
                dist.send(now, rank, group)
                dist.recv(now, rank, group)
                end = time.perf_counter()
                best = min(best, (end - start, now.item() - (start + end) / 2))
            elif dist.get_rank() == rank:
                dist.recv(now, first, group)
                dist.send(now.fill_(time.perf_counter()), first, group)
        if dist.get_rank() == first:
            dist.send(now.fill_(best[1]), rank, group)
        elif dist.get_rank() == rank:
            dist.recv(now, first, group)
    return 0.0 if dist.get_rank() == first else now.item()


#: The bits of a number; float64 holds it exactly, and the sum over many ranks.
_BITS = 40

#: How many words of eight bytes are mixed at a time.
_AT_ONCE = 1 << 18

#: The usual causes of a difference along each axis.
_CAUSES = {
    'data': 'Usual causes: a layer that changes a buffer or a weight by its own samples (batch '
    'norm takes deferred_batch_norm=True; another layer adds its statistics up over '
    "replicas, by torch.distributed.all_reduce with group=mesh['data'].get_group(), or "
    'keeps them in an attribute that is no buffer); a weight that was changed or an '
    'optimizer that was made otherwise on one rank',
    'tensor': 'Usual causes: a layer that tensor_plan does not split, but whose input differs; a '
    'weight that was changed on one rank; kernels that are not deterministic',
    'gradients': 'A layer that tensor_plan does not split was applied to the heads or features of '
    'one rank, so each rank has a part of this gradient. Let the plan split it: for '
    'a norm of heads, SequenceParallel(sequence_dim=2, use_local_output=True), where '
    'dimension 2 has the heads. Or let its forward use '
    'torchgpipe.shard.distributed.copy(parameter), whose gradient is the sum over '
    "ranks, after init_process_group(mesh=mesh['data', 'tensor']) of that module. "
    'Kernels that are not deterministic are another cause',
    'pipe': 'Usual causes: a layer that stands in several stages and changes a buffer or a weight '
    'itself; a weight that was changed or an optimizer that was made otherwise on one '
    'rank. Stages may share a rank: places=…',
}

#: The ranks along each axis of a mesh.
Groups = Mapping[str, Sequence[Sequence[int]]]


class Shared(NamedTuple):
    """A tensor that ranks share.

    Args:
        axes: The axes along which other ranks have the same value.
        others: How many other ranks of the pipe axis have it; -1 on all of them but the first.
        is_cache: Whether it is in no state dict. Such a tensor may have other sizes on other
            ranks.
    """

    name: str
    #: The tensor, or the part of it that this rank has.
    value: Tensor
    axes: frozenset[str]
    others: int = 0
    is_cache: bool = False


class Detail(NamedTuple):
    """A rank's description of one tensor."""

    name: str
    axes: frozenset[str]
    shape: tuple[int, ...] | None
    number: int


def numbers_of(tensors: Sequence[Shared]) -> tuple[int, int, int]:
    """Return a number for each axis, computed from the tensors of a rank.

    Along the data and the tensor axis, the numbers of all ranks are equal. Along the pipe axis,
    each rank has other tensors, and the numbers add up to zero.
    """
    data = tensor = pipe = 0
    for each, (_, axes, _, number) in zip(tensors, details(tensors)):
        data = (data * 3 + number) % (1 << _BITS) if 'data' in axes else data
        tensor = (tensor * 3 + number) % (1 << _BITS) if 'tensor' in axes else tensor
        pipe += each.others * number
    return data, tensor, pipe % (1 << _BITS)


def differ(numbers: Mapping[int, tuple[int, int, int]], groups: Groups) -> bool:
    """Return whether the numbers of ranks differ."""

    def along(k: int, lines: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        return ([numbers[rank][k] for rank in ranks] for ranks in lines)

    return any(
        len({*each}) > 1
        for k, axis in enumerate(('data', 'tensor'))
        for each in along(k, groups[axis])
    ) or any(sum(each) % (1 << _BITS) for each in along(2, groups['pipe']))


def details(tensors: Sequence[Shared]) -> list[Detail]:
    """Return the description of each tensor of a rank."""
    return [
        Detail(
            each.name,
            each.axes | ({'pipe'} if each.others else frozenset()),
            tuple(each.value.shape) if each.is_cache else None,
            number
            ^ zlib.crc32(f'{each.name} {tuple(each.value.shape)} {each.value.dtype}'.encode()),
        )
        for each, number in zip(tensors, digests([each.value for each in tensors]))
    ]


def differences(
    everywhere: Mapping[int, Sequence[Detail]], groups: Groups, gradients: bool = False
) -> str:
    """Describe the tensors that differ between ranks, with usual causes; '' if there are none."""
    for axis, lines in groups.items():
        for ranks in lines:
            of = {
                rank: {each.name: each for each in everywhere[rank] if axis in each.axes}
                for rank in ranks
            }
            found = {}
            for name in dict.fromkeys(name for each in of.values() for name in each):
                there = {
                    rank: each.get(name)
                    for rank, each in of.items()
                    if name in each or axis != 'pipe'
                }
                if len({*there.values()}) > 1 and not _are_caches([*there.values()]):
                    found[name] = [*there]
            if found:
                name, owners = next(iter(found.items()))
                others = f' and {len(found) - 1} others' if len(found) > 1 else ''
                subject = 'the gradient of ' if gradients else ''
                causes = _CAUSES['gradients' if gradients else axis]
                return (
                    f"{subject}'{name}'{others} should be the same on ranks {owners}, along "
                    f'the {axis} axis, but differs. {causes}'
                )
    return ''


def _are_caches(details: Sequence[Detail | None]) -> bool:
    """Return whether tensors are in no state dict, and have different sizes."""
    return len({None if each is None else each.shape for each in details}) > 1 and all(
        each is None or each.shape is not None for each in details
    )


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor. The host waits once for each device."""
    found = [_digest(x.detach()) for x in tensors]
    on: dict[torch.device, list[Tensor]] = {}
    for x in found:
        on.setdefault(x.device, []).append(x)
    read = {device: iter(torch.stack(each).tolist()) for device, each in on.items()}
    return [next(read[x.device]) % (1 << _BITS) for x in found]


def _digest(x: Tensor) -> Tensor:
    """Return a number, in a tensor: the sum of the words of ``x``, each mixed with its place."""
    x = x.to_dense() if x.layout is not torch.strided else x
    if x.is_quantized:
        x = x.int_repr()
    elif x.is_nested:
        x = x.values()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    data = x.resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -data.numel() % 8))  # a copy
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, words in enumerate(data.view(torch.int64).split(_AT_ONCE)):
        place = torch.arange(k * _AT_ONCE + 1, k * _AT_ONCE + len(words) + 1, device=x.device)
        mixed = place.mul_(0x1E3779B97F4A7C15).add_(words)
        mixed ^= mixed >> 32
        mixed *= 0x3F58476D1CE4E5B9
        mixed ^= mixed >> 29
        mixed *= 0x14D049BB133111EB
        mixed ^= mixed >> 32
        found += mixed.sum()
    return found
