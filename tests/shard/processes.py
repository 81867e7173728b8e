"""Run a function on several ranks, each a process of its own, and return their results.

The processes are forked by a server that has imported torch already. A later call reuses the
processes that an earlier one has left unchanged. Each call has a process group of its own, whose
ranks meet in a folder, so that no port is needed::

    test            rank 0                          rank 1
     │ call ──────▶ init_process_group, barrier     init_process_group, barrier
     │              function                        function
     │ ◀─ result ──┤                     ◀─ result ─┤
     │ end ───────▶ destroy_process_group           destroy_process_group    when all are there
     │ ◀─ whether nothing is left of the call ──────┤

A process that does not return or leaves something behind (a thread, a patch) is killed. A rank
that has failed ends unless all have returned at once, because another one may wait for it.
"""

import atexit
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path

_context = multiprocessing.get_context('forkserver')
#: Modules that the server imports. Optimizers and DistributedDataParallel import Dynamo when first
#: made.
IMPORTED = [
    'pytest',
    'torch._dynamo',
    'torch.distributed.checkpoint.state_dict',
    'torch.distributed.tensor',
    'torch.distributed.fsdp',
    'torchgpipe.distributed',
    'torchgpipe.sequential',
    'torchgpipe.shard',
    'torchgpipe.testing',
    'torchgpipe.timeline',
]

#: For so many seconds a rank that has failed waits for the word that all the others are there.
TO_HEAR = 0.3

#: For so many seconds the results of the other ranks are awaited when one has failed. The one that
#: has caused it may be later than one that lost the connection.
TO_FOLLOW = 0.5

#: Seconds that a rank may take to clean up after a call.
TO_END = 5


@dataclass(frozen=True)
class Failure:
    """The result of a rank that raises, or ends without a result."""

    rank: int
    text: str


def run(world, function, *args, group=None, timeout=120):
    """Call a function on each rank, and return the results of all ranks.

    Args:
        world: The number of ranks. function: A function that can be pickled, such as one of a test
        file. args: The arguments of the function. group: The size of the parallel groups; None
        leaves them to the function. timeout: A collective that takes longer raises, in seconds.
        The processes are ended after a quarter more.

    Raises:
        RuntimeError: Ranks have failed. The message has their numbers and tracebacks.
        TimeoutError: It names the ranks that have not returned.
    """
    found = outcomes(world, function, *args, group=group, timeout=timeout, stop=True)
    failures = [result for result in found if isinstance(result, Failure)]
    if failures:
        raise RuntimeError(
            '\n'.join(f'rank {failure.rank} failed:\n{failure.text}' for failure in failures)
        )
    return found


def outcomes(world, function, *args, group=None, timeout=120, stop=False):
    """Do the same, but give a `Failure` where a rank raises, and let the others go on.

    With `stop`, they are ended soon after, and give None.
    """
    ranks = [_Process.living() for _ in range(world)]
    kept = False
    try:
        path = Path(_folder.name, str(next(_number)))
        call = pickle.dumps((function, args))
        for rank, each in enumerate(ranks):
            each.end.send((rank, world, group, timeout, str(path), stop, call))
        deadline = time.monotonic() + 1.25 * timeout  # The errors of collectives come first.
        found = _collect(ranks, deadline, stop)
        failed = any(isinstance(each, Failure) for each in found)
        kept = not (stop and failed) and all(each.ends_call() for each in ranks)
        return found
    finally:
        for each in ranks:
            _idle.append(each) if kept else each.kill()


def _collect(processes, deadline, stop):
    found = [None] * len(processes)
    ends = [process.end for process in processes]
    left = list(ends)
    failed = False
    while left:
        ready = wait(left, max(deadline - time.monotonic(), 0))
        if not ready and failed:
            return found
        if not ready:
            late = [ends.index(end) for end in left]
            raise TimeoutError(f'ranks {late} have not returned')

        for end in ready:
            rank = ends.index(end)
            left.remove(end)
            try:
                found[rank] = pickle.loads(end.recv_bytes())
            except (EOFError, OSError):
                found[rank] = Failure(rank, processes[rank].how_it_ended())
            if stop and isinstance(found[rank], Failure) and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + TO_FOLLOW)
    return found


class _Process:
    """A process that is a rank of one call after the other."""

    def __init__(self):
        _context.set_forkserver_preload(IMPORTED)
        self.end, far = _context.Pipe()
        self._process = _context.Process(target=_serve, daemon=True, args=(far,))
        self._process.start()
        far.close()

    @classmethod
    def living(cls):
        """Return one that an earlier call has left as it was, or a new one."""
        while _idle:
            found = _idle.pop()
            if found.is_as_before():
                return found
            found.kill()
        return cls()

    def ends_call(self):
        """Tell it that all ranks have returned; return whether it has heard so."""
        try:
            self.end.send(None)
        except OSError:  # It has ended.
            return False
        return True

    def how_it_ended(self):
        """Return a text with its exit code, which is a negative number after a signal."""
        self._process.join(TO_END)
        return f'the process has ended with exit code {self._process.exitcode}'

    def is_as_before(self):
        """Wait for the end of a call, and return whether nothing is left of it."""
        try:
            return self.end.poll(TO_END) and self.end.recv()
        except (EOFError, OSError):
            return False

    def kill(self):
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.end.close()


#: Idle processes. They may still be at the end of a call.
_idle = []

#: Where the ranks of each call meet, which they may use until they have ended it.
_folder = tempfile.TemporaryDirectory()
atexit.register(_folder.cleanup)
_number = itertools.count()


def end_idle():
    """Let the next call have new processes."""
    while _idle:
        _idle.pop().kill()


def _serve(end):
    """Be a rank, in each call another one."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    while True:
        try:
            call = end.recv()
        except EOFError:
            return
        before = _state()
        result, ends = _call(*call)
        end.send_bytes(result)
        if ends and not end.poll(TO_HEAR):
            return
        if end.recv() is None:
            del result, call
            _end()
            end.send(_is_kept(before))


def _call(rank, world, group, timeout, path, stays, call):
    """Return the function's result, and whether this process ends because it has failed.

    It does not end if it `stays` until it is killed, because others would fail when it ends.
    """
    import torch
    import torch.distributed as dist

    import torchgpipe.shard as ts

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        warnings.filterwarnings('ignore', '.*torch.jit')  # as setup.cfg has it
        try:
            dist.init_process_group(
                'gloo',
                store=dist.FileStore(path, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
            if group is not None:
                ts.distributed.init_process_group(group)
            dist.barrier()  # A rank that ends while others connect would be a failure of theirs.
            function, args = pickle.loads(call)
            return pickle.dumps(function(*args)), False
        except BaseException:
            return pickle.dumps(Failure(rank, traceback.format_exc())), not stays


def _end():
    """Take the groups of a call apart."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    import torchgpipe.shard as ts

    gc.collect()  # A model that is in a cycle has a thread, which uses the store of the group.
    if ts.distributed.is_initialized():
        ts.distributed.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
    # PyTorch takes a mesh of this call for an equal one of the next, which has other groups.
    _clear_sharding_prop_cache()


def _state():
    """Return the state that a call may not change: of the process, of modules and of classes."""
    import torch

    return {
        'dtype': torch.get_default_dtype(),
        'grad mode': torch.is_grad_enabled(),
        'deterministic': torch.are_deterministic_algorithms_enabled(),
        'accelerator': torch.accelerator.current_accelerator(),
        'debug': torch.distributed.get_debug_level(),
        'threads': threading.active_count(),
        'folder': os.getcwd(),
        'environment': dict(os.environ),
        **{holder: [*map(id, vars(holder).values())] for holder in _holders()},
    }


def _holders():
    """Yield modules and classes that a function of a test might patch."""
    for name, module in [*sys.modules.items()]:
        if name.startswith('torchgpipe'):
            yield module
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__ == name:
                    yield from value.__mro__  # A class of PyTorch is often among the bases.
    yield from (sys.modules['torch'], sys.modules['torch.distributed'])


def _is_kept(before):
    """Return whether all is there that was; imports and caches may have added to it."""
    now = _state()
    return all(
        now[name] == value or (isinstance(value, list) and now[name][: len(value)] == value)
        for name, value in before.items()
    )
