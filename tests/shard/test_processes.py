"""Processes that the tests start: their results, and the handling of failed ones."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchgpipe.shard as ts
from tests.shard.processes import Failure, outcomes, run


def place(base):
    """Say who this is."""
    return base + dist.get_rank(), ts.distributed.get_rank(), torch.get_num_threads()


def test_each_rank_returns_the_result_of_the_function():
    assert run(4, place, 10, group=2) == [(10, 0, 1), (11, 1, 1), (12, 0, 1), (13, 1, 1)]


def patched(name):
    """Change something of the process."""
    if name == 'module':
        ts.distributed.gather = None
    elif name == 'class':
        ts.nn.ParallelLinear.forward = None
    elif name == 'base':
        FileSystemWriter.stage = None
    elif name == 'type':
        torch.set_default_dtype(torch.float64)
    elif name == 'thread':
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif name == 'raises':
        raise KeyError


def test_processes_live_on_if_nothing_is_left_of_a_call():
    before = {*run(2, os.getpid)}
    for name in ('module', 'class', 'base', 'type', 'thread', 'raises', ''):
        assert {*run(2, os.getpid)} == before, name
        outcomes(2, patched, name)
        after = {*run(2, os.getpid)}
        assert after == before if name in ('', 'raises') else not after & before, name
        before = after


def one_raises():
    """Raise on a rank, and let the other wait for it."""
    if dist.get_rank() == 1:
        raise KeyError('this one')
    dist.barrier()


def test_a_failure_comes_with_its_rank_and_its_traceback():
    with pytest.raises(RuntimeError, match="(?s)rank 1 failed:.*one_raises.*KeyError: 'this one'"):
        run(2, one_raises)


def end():
    """Do not return on a rank."""
    if dist.get_rank() == 1:
        os._exit(1)
    return 'here'


def test_a_process_that_ends_is_a_failure():
    assert outcomes(2, end) == ['here', Failure(1, 'the process has ended with exit code 1')]


def end_after_another():
    """End on a rank only when the other has failed."""
    if dist.get_rank() == 0:
        raise ConnectionError('the other has ended')
    time.sleep(0.1)
    os._exit(3)


def test_all_ranks_that_fail_concurrently_are_named():
    with pytest.raises(RuntimeError, match='(?s)rank 0.*has ended.*rank 1.*exit code 3'):
        run(2, end_after_another)


def hang():
    """Never return on two of the ranks."""
    while dist.get_rank() % 2:
        time.sleep(1000)


@pytest.mark.slow
def test_ranks_that_do_not_return_are_named():
    with pytest.raises(TimeoutError, match=r'ranks \[1, 3\]'):
        run(4, hang, timeout=5)
