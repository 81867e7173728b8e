"""Let the ranks of a group compare what they are about to do, and name the one that differs.

They do so in the debug mode of PyTorch, ``TORCH_DISTRIBUTED_DEBUG=DETAIL``. The level is
``torch.distributed.get_debug_level()``, which is read when ``torch.distributed`` is imported.
"""
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (DebugLevel, ProcessGroup,  # type: ignore[attr-defined]
                               get_debug_level)

from torchgpipe.shard.failures import complete

__all__ = ['compare', 'differences', 'is_read']


def compare(call: str, facts: str, group: ProcessGroup, device: torch.device) -> None:
    """Raise an error on each rank of a group if one does something else, in the debug mode.

    Without it, ranks that come with different shapes to a collective may wait for each other until
    its time is over, or end; but it costs a collective and a synchronisation for each call. Ranks
    compare a checksum of what they do. Where these differ, they exchange words.

    Args:
        call: What is about to be called.
        facts: What has to be the same on all ranks, such as types and shapes.
        group: The ranks.
        device: Where they communicate.

    Raises:
        RuntimeError: Calls or facts differ. The message names the ranks.
    """
    if get_debug_level() != DebugLevel.DETAIL:
        return
    said = f'{call}: {facts}'
    own = torch.tensor([zlib.crc32(said.encode())], device=device)
    found = own.new_empty(group.size(), 1)
    complete(lambda: dist.all_gather(list(found.unbind()), own, group, async_op=True), group,
             own.is_cpu)
    if found.ne(own).any():
        words: list[str] = [''] * group.size()
        dist.all_gather_object(words, said, group)
        raise RuntimeError(
            f'the ranks of a group do not do the same: {differences(words, group)}. Let all of '
            'them call the same layers in the same order, on tensors that fit together')


def is_read(x: Tensor) -> bool:
    """Return whether the host looks at values: it need not wait for them, or is told to."""
    return x.is_cpu or get_debug_level() == DebugLevel.DETAIL


def differences(facts: Sequence[object], group: ProcessGroup) -> str:
    """Say which ranks of a group have what, those first that fewest agree with."""
    ranks = dist.get_process_group_ranks(group)
    said = []
    for fact, count in reversed(Counter(facts).most_common()):
        who = ', '.join(str(rank) for rank, each in zip(ranks, facts) if each == fact)
        said.append(f'rank {who} has {fact}' if count == 1 else f'ranks {who} have {fact}')
    return '; '.join(said)
