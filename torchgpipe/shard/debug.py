"""Let the ranks of a group compare what they are about to do, and name the one that differs."""
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (DebugLevel, ProcessGroup,  # type: ignore[attr-defined]
                               get_debug_level)

from torchgpipe.shard.failures import complete

__all__ = ['agree', 'compare', 'differences']


def compare(call: str, facts: str, group: ProcessGroup, device: torch.device) -> None:
    """Do what :func:`agree` does in the debug mode of PyTorch, ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    Without it, ranks that come with different shapes to a collective may wait for each other for
    ever, or get numbers that belong elsewhere; but it costs a collective and a synchronisation for
    each call. The level is ``torch.distributed.get_debug_level()``, which is read when
    ``torch.distributed`` is imported.
    """
    if get_debug_level() == DebugLevel.DETAIL:
        agree(call, facts, group, torch.zeros(2, dtype=torch.long, device=device))


def agree(call: str, facts: str, group: ProcessGroup, numbers: Tensor) -> list[list[int]]:
    """Exchange two numbers; raise an error on each rank of a group if one does something else.

    Ranks compare a checksum of what they do. Where these differ, they exchange words.

    Args:
        call: What is about to be called.
        facts: What has to be the same on all ranks, such as types and shapes.
        group: The ranks.
        numbers: This rank's, of type int64. They are two in any call, so that ranks which come
            from different calls understand each other.

    Returns:
        The numbers of each rank.

    Raises:
        RuntimeError: Calls or facts differ. The message names the ranks.
    """
    said = f'{call}: {facts}'
    own = torch.cat([numbers, numbers.new_tensor([zlib.crc32(said.encode())])])
    found = own.new_empty(group.size(), 3)
    complete(lambda: dist.all_gather(list(found.unbind()), own, group, async_op=True), group,
             own.is_cpu)
    rows: list[list[int]] = found.tolist()
    if len({checksum for *_, checksum in rows}) > 1:
        words: list[str] = [''] * group.size()
        dist.all_gather_object(words, said, group)
        raise RuntimeError(
            f'the ranks of a group do not do the same: {differences(words, group)}. Let all of '
            'them call the same layers in the same order, on tensors that fit together')
    return [row[:2] for row in rows]


def differences(facts: Sequence[object], group: ProcessGroup) -> str:
    """Say which ranks of a group have what, those first that fewest agree with."""
    ranks = dist.get_process_group_ranks(group)
    said = []
    for fact, count in reversed(Counter(facts).most_common()):
        who = ', '.join(str(rank) for rank, each in zip(ranks, facts) if each == fact)
        said.append(f'rank {who} has {fact}' if count == 1 else f'ranks {who} have {fact}')
    return '; '.join(said)
