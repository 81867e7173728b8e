"""Ranks that do not do the same are named: in the debug mode, before each collective."""
import re

import pytest
import torch
import torch.distributed as dist

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard import collectives
from torchgpipe.shard.debug import is_read


def other_shapes():
    """Differ in a shape on one rank."""
    ts.distributed.reduce(torch.ones(3 if dist.get_rank() == 2 else 4, 5))


def other_types():
    """Differ in a type on one rank."""
    dtype = torch.half if dist.get_rank() == 1 else torch.float
    ts.distributed.gather(torch.ones(2, dtype=dtype), size=8)


def other_rows():
    """Differ in a dimension that is not split; what is gathered may differ in the other one."""
    rank = dist.get_rank()
    ts.distributed.gather(torch.ones(3 if rank == 2 else 4, rank))


def other_sizes():
    """Have another size in mind, on the rank whose part that changes."""
    last = dist.get_rank() == 3
    ts.distributed.gather(torch.ones(1 if last else 2), size=7 if last else 8)


def other_calls():
    """Do something else on one rank, in backward."""
    x = torch.ones(4, requires_grad=True)
    same = ts.distributed.copy(x) if dist.get_rank() else ts.distributed.scatter(x, 0)
    same.sum().backward()


def other_sources():
    """Take values from different ranks."""
    collectives.broadcast(torch.ones(2), ts.distributed.get_group(), int(dist.get_rank() == 3))


FAULTS = [
    (other_shapes, r'rank 2 has all_reduce: .*SUM of torch.float32 of shape \(3, 5\); '
                   r'ranks 0, 1, 3 have .* \(4, 5\)\.'),
    (other_types, r'rank 1 has all_gather: .* torch.float16 .*; ranks 0, 2, 3 have .*float32'),
    (other_rows, r'rank 2 has all_gather: .* \(3, part\); ranks 0, 1, 3 have .*\(4, part\)'),
    (other_sizes, r'rank 3 has all_gather: \[2, 2, 2, 1\] .*; ranks 0, 1, 2 have .*2, 2, 2, 2\]'),
    (other_calls, r'rank 0 has all_gather: .*; ranks 1, 2, 3 have all_reduce: '),
    (other_sources, r'rank 3 has broadcast: from 1 .*; ranks 0, 1, 2 have broadcast: from 0 of '),
]


def debug(wrapped):
    """Make faults in the debug mode, with the groups that PyTorch makes then, or others."""
    if not wrapped:
        ts.distributed.init_process_group(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TORCH_DISTRIBUTED_DEBUG', 'DETAIL')
        dist.set_debug_level_from_env()
    if wrapped:
        ts.distributed.init_process_group(4)
    texts = []
    for function, _ in FAULTS:
        with pytest.raises(RuntimeError) as caught:
            function()
        texts.append(str(caught.value))
    # What fits together still works.
    x = torch.full((2, ts.distributed.get_rank()), 1., requires_grad=True)
    ts.distributed.gather(x).sum().backward()
    assert ts.distributed.reduce(x.grad.sum()) == 12
    return texts


@pytest.mark.parametrize('wrapped', [False, True])
def test_the_debug_mode_names_the_rank_that_differs(wrapped):
    for texts in run(4, debug, wrapped):
        for text, (function, pattern) in zip(texts, FAULTS):
            assert re.search(pattern, text), (function, text)


def plain():
    """Count what is exchanged."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        all_gather = dist.all_gather
        patch.setattr(dist, 'all_gather', lambda *args, **kwargs: seen.append(args)
                      or all_gather(*args, **kwargs))
        ts.distributed.reduce(torch.ones(2))
        assert not seen
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        ts.distributed.reduce(torch.ones(2))
        assert len(seen) == 1


def test_nothing_more_is_exchanged_without_it():
    run(2, plain, group=2)


def test_the_host_reads_what_is_elsewhere_in_the_debug_mode_alone(monkeypatch):
    assert is_read(torch.empty(1)) and not is_read(torch.empty(1, device='meta'))
    monkeypatch.setattr('torchgpipe.shard.debug.get_debug_level', lambda: dist.DebugLevel.DETAIL)
    assert is_read(torch.empty(1, device='meta'))
