"""Run a function on several ranks, each a process of its own, and bring back what they give.

The processes come from a server that has imported torch already, so that one starts in
milliseconds. They meet in a folder, so that no port is needed.
"""
import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

__all__ = ['Failure', 'outcomes', 'run']

_context = multiprocessing.get_context('forkserver')
# Optimizers and DistributedDataParallel import Dynamo when they are first made.
_context.set_forkserver_preload([
    'pytest', 'torch._dynamo', 'torch.distributed.checkpoint.state_dict',
    'torch.distributed.tensor', 'torchgpipe', 'torchgpipe.shard'])


@dataclass(frozen=True)
class Failure:
    """What a rank gives if it raises, or ends without a word."""

    rank: int
    text: str


def run(world, function, *args, group=None, timeout=120):
    """Call a function on each rank, and give what it returns on each.

    Args:
        world: How many ranks there are.
        function: One that can be pickled: of a test file, say.
        args: What it is called with.
        group: The size of the parallel groups; None leaves them to the function.
        timeout: After so many seconds the processes are ended.

    Raises:
        RuntimeError: A rank has failed. The message has its number and its traceback.
        TimeoutError: It names the ranks that have not returned.
    """
    found = outcomes(world, function, *args, group=group, timeout=timeout, stop=True)
    for each in found:
        if isinstance(each, Failure):
            raise RuntimeError(f'rank {each.rank} failed:\n{each.text}')
    return found


def outcomes(world, function, *args, group=None, timeout=120, stop=False):
    """Do the same, but give a `Failure` where a rank raises, and let the others go on.

    With `stop`, they are ended then, and give None.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world):
            end, far = _context.Pipe(duplex=False)
            process = _context.Process(target=_serve, daemon=True, args=(
                far, rank, world, group, timeout, str(Path(folder) / 'store'),
                pickle.dumps((function, args)), stop))
            process.start()
            far.close()
            ends.append(end)
            processes.append(process)
        try:
            return _collect(ends, time.monotonic() + timeout, stop)
        finally:
            for process, end in zip(processes, ends):
                process.kill()
                process.join()
                process.close()
                end.close()


def _collect(ends, deadline, stop):
    found = [None] * len(ends)
    left = list(ends)
    while left:
        ready = wait(left, max(deadline - time.monotonic(), 0))
        if not ready:
            late = [ends.index(end) for end in left]
            raise TimeoutError(f'ranks {late} have not returned')
        for end in ready:
            rank = ends.index(end)
            left.remove(end)
            try:
                found[rank] = pickle.loads(end.recv_bytes())
            except EOFError:
                found[rank] = Failure(rank, 'the process has ended')
            if stop and isinstance(found[rank], Failure):
                return found
    return found


def _serve(end, rank, world, group, timeout, path, call, stay):
    """Be a rank."""
    import torch
    import torch.distributed as dist

    import torchgpipe.shard as ts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter('error')
    warnings.filterwarnings('ignore', '.*torch.jit')  # as setup.cfg has it
    try:
        dist.init_process_group('gloo', store=dist.FileStore(path, world), rank=rank,
                                world_size=world, timeout=timedelta(seconds=timeout))
        if group is not None:
            ts.distributed.init_process_group(group)
        dist.barrier()  # A rank that ends while others connect would be a failure of theirs.
        function, args = pickle.loads(call)
        result = pickle.dumps(function(*args))
    except BaseException:
        result = pickle.dumps(Failure(rank, traceback.format_exc()))
    end.send_bytes(result)
    if stay:  # Until it is killed: for who waits for it, its end would be a failure as well.
        time.sleep(timeout)
    # What is left of the groups goes with the process.
