"""Ranks that do not do the same are named, in the debug mode: by PyTorch, or before its call."""

import re

import pytest
import torch
import torch.distributed as dist

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard.collectives import is_read


def other_shapes():
    """Differ in a shape on one rank."""
    ts.distributed.reduce(torch.ones(3 if dist.get_rank() == 2 else 4, 5))


def other_types():
    """Differ in a type on one rank."""
    dtype = torch.half if dist.get_rank() == 1 else torch.float
    ts.distributed.gather(torch.ones(2, dtype=dtype), size=8)


def other_rows():
    """Differ in a dimension that is not split; gathered tensors may differ in the other one."""
    rank = dist.get_rank()
    ts.distributed.gather(torch.ones(3 if rank == 2 else 4, rank))


def other_calls():
    """Do something else on one rank, in backward."""
    x = torch.ones(4, requires_grad=True)
    same = ts.distributed.copy(x) if dist.get_rank() else ts.distributed.scatter(x, 0)
    same.sum().backward()


def other_sizes():
    """Have another size in mind, on the rank whose shard that changes."""
    last = dist.get_rank() == 3
    ts.distributed.gather(torch.ones(1 if last else 2), size=7 if last else 8)


def other_logits():
    """Have logits of another type on one rank, whose sums are of the same type."""
    logits = torch.ones(2, 3, dtype=torch.half if dist.get_rank() == 1 else torch.bfloat16)
    ts.register_parallel_dim(logits, -1)
    ts.nn.functional.parallel_cross_entropy(logits, torch.tensor([1, 2]))


#: Of these the error comes from PyTorch, and names a rank that differs from this one.
PYTORCH = [
    (other_shapes, 2, r'TensorShape=\[3, 5\].*Tensor shapes'),
    (other_types, 1, 'Half.*Tensor dtypes'),
    (other_rows, 2, r'TensorShape=\[3, 3\].*Tensor shapes'),
    (other_calls, 0, 'OpType=_?ALLGATHER.*Op type'),
]

#: Differences that PyTorch does not detect.
OWN = [
    (other_sizes, r'rank 3 has all_gather: \[2, 2, 2, 1\]; ranks 0, 1, 2 have .*2, 2, 2, 2\]'),
    (
        other_logits,
        r'rank 1 has parallel_cross_entropy: logits of torch.float16 and shape '
        r'\(2, classes\), .*; ranks 0, 2, 3 have .*bfloat16',
    ),
]


def raised(function):
    """Return the message that a call raises."""
    with pytest.raises(RuntimeError) as caught:
        function()
    return str(caught.value)


def debug():
    """Make faults in the debug mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TORCH_DISTRIBUTED_DEBUG', 'DETAIL')
        dist.set_debug_level_from_env()
    ts.distributed.init_process_group(4)
    texts = [raised(function) for function, *_ in PYTORCH + OWN]
    # Matching calls still work.
    x = torch.full((2, ts.distributed.get_rank()), 1.0, requires_grad=True)
    ts.distributed.gather(x).sum().backward()
    assert ts.distributed.reduce(x.grad.sum()) == 12
    return texts


@pytest.mark.slow
def test_the_debug_mode_names_the_rank_that_differs():
    for rank, texts in enumerate(run(4, debug)):
        for text, (function, other, pattern) in zip(texts, PYTORCH):
            assert f'Rank {other} is running collective' in text, (function, text)
            assert re.search('(?s)Detected mismatch.*' + pattern, text), (function, text)
        for text, (function, pattern) in zip(texts[len(PYTORCH) :], OWN):
            assert re.search(pattern, text), (function, text)


def plain():
    """Count exchanges between ranks."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, 'all_gather_object', lambda *args, **kwargs: seen.append(args))
        ts.distributed.gather(torch.ones(2), size=4)
        assert not seen
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        ts.distributed.gather(torch.ones(2), size=4)
        assert len(seen) == 1
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_nothing_more_is_exchanged_without_it():
    run(2, plain, group=2)


def test_the_host_reads_device_memory_in_debug_mode_only(monkeypatch):
    assert is_read(torch.empty(1)) and not is_read(torch.empty(1, device='meta'))
    monkeypatch.setattr(
        'torchgpipe.shard.collectives.get_debug_level', lambda: dist.DebugLevel.DETAIL
    )
    assert is_read(torch.empty(1, device='meta'))
