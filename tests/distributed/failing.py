"""Run processes of which some fail: how each ends, and its output."""

import os
import pickle
import signal
import tempfile
import time
import warnings
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist
from torch import nn

from tests.shard.processes import _context


def endings(world, function, *args, tcp=False, stays=(), group_timeout=100):
    """Call a function on each rank; return the exit status of each, and its standard error.

    Args:
        world: How many ranks there are.
        function: It is called with an event that is set when all ranks but `stays` have ended, and
            with the arguments.
        args: These.
        tcp: Whether rank 0 has the store, which is a file otherwise.
        stays: The ranks that wait for that event.
        group_timeout: After so many seconds a wait of theirs ends, whatever their model says.
    """
    release, ports = _context.Event(), _context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(
                target=_serve,
                daemon=True,
                args=(
                    rank,
                    world,
                    folder,
                    ports if tcp else None,
                    release,
                    group_timeout,
                    pickle.dumps((function, args)),
                ),
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + 100
            _join([each for rank, each in enumerate(processes) if rank not in stays], deadline)
            release.set()
            _join(processes, deadline)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [(code, Path(folder, f'{rank}.txt').read_text()) for rank, code in enumerate(codes)]


def _join(processes, deadline):
    left = {process.sentinel for process in processes}
    while left:
        ready = connection.wait([*left], max(deadline - time.monotonic(), 0))
        if not ready:
            return
        left -= {*ready}
    for process in processes:
        process.join()


def _serve(rank, world, folder, ports, release, group_timeout, call):
    """Be a rank."""
    errors = os.open(Path(folder, f'{rank}.txt'), os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter('error')
    warnings.filterwarnings('ignore', '.*torch.jit')
    if ports is None:
        store = dist.FileStore(str(Path(folder, 'store')), world)
    elif rank == 0:
        store = dist.TCPStore('localhost', 0, world, True, wait_for_workers=False)
        for _ in range(world - 1):
            ports.put(store.port)
    else:
        store = dist.TCPStore('localhost', ports.get(), world, False)
    dist.init_process_group(
        'gloo', store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout)
    )
    dist.barrier()
    function, args = pickle.loads(call)
    function(release, *args)


def _raise():
    raise ValueError('it is broken')


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


#: Faults by name.
FAULTS = {'raise': _raise, 'kill': _kill, 'stuck': lambda: Event().wait()}


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.fault()
        return grad, None


class Fault(nn.Module):
    """A layer in which something happens, in the second step, for micro-batch 1 of 2."""

    def __init__(self, how, backward=False):
        super().__init__()
        self.how, self.backward, self.calls = how, backward, 0

    def happen(self, *args):
        """Let it happen if it is time."""
        self.calls += 1
        if self.calls == 4:
            FAULTS[self.how]()

    def forward(self, x):
        if self.backward:
            return _Backward.apply(x, self.happen)
        self.happen()
        return x
