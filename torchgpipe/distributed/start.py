"""The start of a step: facts that ranks exchange before the first message.

The exchange is a collective of a few numbers. It also reports a rank that could not begin, such as
for a wrong input, so that no other rank waits for it.
"""
import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

__all__ = ['Facts', 'NotBegun', 'digest', 'together']


class NotBegun(RuntimeError):
    """Another rank could not begin."""


class Facts(NamedTuple):
    """The facts of a rank about a step.

    Args:
        m: The number of micro-batches, where it has the input.
        size: The number of samples, where it has the input.
        counted: Its share of the whole loss, or of the loss's count.
        settings: A digest of the settings, which have to be the same on all ranks.
        digest: A digest of everything that determines the form of this rank's messages.
        layers: A digest of state that ranks with the same stages share: modes, which parameters
            require grad, and which layers were replaced.
        given: A number for the samples, equal on ranks along the tensor axis.
        divisors: The divisors of its loss, in two numbers.
        numbers: The numbers of its tensors, if ranks compare them: see `comparison`.
    """

    m: int = 0
    size: int = 0
    counted: float = 0.
    settings: int = 0
    digest: int = 0
    layers: int = 0
    given: int = 0
    divisors: tuple[float, float] = (0., 0.)
    numbers: tuple[int, int, int] = (0, 0, 0)


def digest(*values: object) -> int:
    """Return a number that is the same for values with the same ``repr``.

    Addresses in them, such as addresses of functions, do not count.
    """
    return zlib.crc32(re.sub(' at 0x[0-9a-f]+', '', repr(values)).encode())


def together(task: str, function: Callable[[], Facts | None], group: dist.ProcessGroup | None,
             device: torch.device) -> dict[int, Facts]:
    """Call a function on all ranks of a group, and return the facts of each rank, by its number.

    Args:
        task: The task of the ranks, for errors.
        function: Returns the facts of this rank, if any; it does not communicate.
        group: The ranks; ``None`` if there is only this one.
        device: The device of this rank.

    Raises:
        RuntimeError: The function raised on another rank, or ranks have different settings.
    """
    error: BaseException | None = None
    facts = Facts()
    try:
        facts = function() or facts
    except BaseException as raised:  # Also an interrupt: the others would wait for this rank.
        error = raised
    if group is not None:
        own = torch.tensor([error is not None, *facts[:-2], *facts.divisors, *facts.numbers],
                           dtype=torch.float64, device=device)
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group)
    if error is not None:
        raise error
    if group is None:
        return {dist.get_rank(): facts}
    ranks = dist.get_process_group_ranks(group)
    rows = torch.stack(found).tolist()
    for rank, (failed, *_) in zip(ranks, rows):
        if failed:
            raise NotBegun(f'{task} could not begin on rank {rank}, so it ended here, too; '
                           'look at what that rank has raised')
    said = {}
    for rank, (_, m, size, counted, *more) in zip(ranks, rows):
        settings, looks, layers, given, *numbers = map(int, (*more[:4], *more[6:]))
        said[rank] = Facts(int(m), int(size), counted, settings, looks, layers, given,
                           (more[4], more[5]), (numbers[0], numbers[1], numbers[2]))
    for rank, each in said.items():
        if each.settings != said[ranks[0]].settings:
            raise RuntimeError(f'{task} has other settings on rank {rank} than on rank '
                               f'{ranks[0]}; all ranks call it with the same ones')
    return said
