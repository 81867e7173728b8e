"""Digests: equal for equal bits, and vectors of them that name the tensors that differ."""

import torch
import torch.distributed as dist

from tests.shard.processes import run
from torchgpipe.shard.digests import differing, digests, digests_of

CPU = torch.device('cpu')


def test_numbers_tell_values_and_places_of_all_types():
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ):
        x = torch.arange(24).reshape(2, 3, 4) % 7
        x = (x > 3 if dtype is torch.bool else x).to(dtype)
        others = [x.flip(0), x.flip(1), x.flip(2), x.transpose(0, 1).contiguous().view(2, 3, 4)]
        changed = x.clone()
        changed[1, 2, 3] = changed[0, 1, 2]
        found = digests(
            [x, x.clone(), x.permute(2, 0, 1).contiguous().permute(1, 2, 0), changed, *others]
        )
        assert found[0] == found[1] == found[2] and found[0] not in found[3:], dtype
        assert all(0 <= each < 1 << 40 for each in found)
    constant = digests([torch.ones(4), torch.ones(4) + 1, torch.ones(()), torch.empty(0)])
    assert len({*constant}) == 4
    order = digests([torch.eye(4)[rows] for rows in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0])])
    assert len({*order}) == 3
    odd = torch.arange(9, dtype=torch.uint8)
    assert digests([odd[1:]]) == digests([odd[1:].clone()]) != digests([odd[:-1]])


def compared(same_names):
    """Return the names that differ between two ranks."""
    rank = dist.get_rank()
    tensors = {
        'equal': torch.ones(3),
        'value': torch.full((3,), float(rank)),
        'dtype': torch.zeros(4, dtype=torch.float32 if rank else torch.int32),
        'cache': torch.ones(2 + rank),
        'moved cache': torch.full((2,), float(rank)),
        'on none': None,
        'on the first': None if rank else torch.ones(2),
    }
    caches = {'cache', 'moved cache'}
    if not same_names and rank:
        tensors |= {'only here': torch.ones(1), 'cache only here': torch.ones(1)}
        caches.add('cache only here')
    # All ranks have the order of names in common, or exchange the names.
    digests = digests_of(tensors, caches)
    return differing(digests, dist.group.WORLD, CPU, same_names)


def test_tensors_that_differ_are_named_on_all_ranks_except_caches_of_other_sizes():
    """A rank without a tensor has nothing to compare."""
    names = ['value', 'dtype', 'moved cache']
    assert run(2, compared, True) == [names] * 2
    assert run(2, compared, False) == [['only here', *names]] * 2
