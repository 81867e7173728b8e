"""Workers by themselves: values, errors, lifetime, forks, and who may wait for them."""

import gc
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.helpers import Child, Spy, in_partitions, no_gc
from torchgpipe.engine import workers as workers_module
from torchgpipe.engine.workers import Worker, Workers, _stop

cpu = torch.device('cpu')


def test_a_function_s_value_or_error_comes_back():
    workers = Workers()
    assert workers.submit([(cpu, lambda: 42)])[0].result() == 42
    with pytest.raises(ZeroDivisionError):
        workers.submit([(cpu, lambda: 1 / 0)])[0].result()


def test_an_error_is_freed_without_the_garbage_collector():
    class Oops(Exception):
        pass

    def fail():
        raise Oops

    workers = Workers()
    with no_gc():
        try:
            workers.submit([(cpu, fail)])[0].result()
        except Oops as error:
            ref = weakref.ref(error)
        assert ref() is None


def test_devices_have_threads_of_their_own():
    barrier = threading.Barrier(2)  # breaks unless both wait at the same time
    workers = Workers()
    futures = [
        workers.submit([(torch.device('cpu', k), lambda: barrier.wait(10))])[0] for k in (0, 1)
    ]
    assert sorted(future.result() for future in futures) == [0, 1]


def test_an_idle_worker_refers_to_nothing_of_its_last_task():
    workers = Workers()
    for _ in range(300):
        x = torch.rand(1)
        ref = weakref.ref(x)
        workers.submit([(cpu, lambda x=x: None)])[0].result()
        del x
        assert ref() is None


def test_workers_start_when_asked_for_and_end_with_their_owner():
    before = set(threading.enumerate())
    workers = Workers()
    assert set(threading.enumerate()) == before
    first = workers.worker(cpu)
    assert workers.worker(torch.device('cpu:0')) is first
    assert len(set(threading.enumerate()) - before) == 1
    del workers
    assert set(threading.enumerate()) == before


@pytest.mark.slow
def test_workers_end_with_their_owner_also_by_the_garbage_collector():
    gc.collect()
    before = set(threading.enumerate())
    workers = Workers()
    workers.worker(cpu)
    workers.itself = workers
    del workers
    gc.collect()
    assert set(threading.enumerate()) == before


def test_the_thread_of_an_unreferenced_worker_ends():
    worker = Worker('test', 0)
    thread = worker.thread
    del worker
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_thread_does_not_keep_the_interpreter_from_exiting():
    program = """if True:
        import torch
        from torchgpipe.engine.workers import Workers
        workers = Workers()
        workers.submit([(torch.device('cpu'), int)])[0].result()"""
    assert subprocess.run([sys.executable, '-c', program], timeout=50).returncode == 0


def is_free(lock):
    """Return whether another thread could take a lock."""

    def take():
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


def test_no_task_is_given_to_a_worker_while_it_is_told_to_end():
    free = []

    class Watched(Workers):
        def worker(self, device):
            free.append(is_free(self._lock))
            return super().worker(device)

    class WatchedDict(dict):
        def clear(self):
            free.append(is_free(workers._lock))
            super().clear()

    workers = Watched()
    workers.submit([(cpu, int)])[0].result()
    _stop(WatchedDict(workers._workers), workers._lock)
    assert free == [False, False] and is_free(workers._lock)


def test_threads_that_ask_at_once_get_one_stream_to_the_host(monkeypatch):
    free = []

    def new_stream(device):
        free.append(is_free(workers._lock))
        return object()

    monkeypatch.setattr(workers_module, 'new_stream', new_stream)
    workers = Workers()
    assert workers.host_stream(cpu) is workers.host_stream(cpu) and free == [False]


def test_a_worker_may_tell_itself_to_end():
    """As where the garbage collector runs in it, and finds its owner."""
    workers = Workers()
    thread = workers.worker(cpu).thread
    workers.submit([(cpu, lambda: _stop(workers._workers, workers._lock))])[0].result()
    thread.join(20)
    assert not thread.is_alive()


def test_workers_start_anew_after_an_interrupt_has_cut_short_that_they_end(monkeypatch):
    workers, end = Workers(), threading.Event()
    workers.submit([(cpu, lambda: end.wait(20))])[0]
    thread = workers.worker(cpu).thread

    def join():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, 'join', join)
        with pytest.raises(KeyboardInterrupt):
            workers.stop()
    assert thread.is_alive() and workers.worker(cpu).thread is not thread
    end.set()
    thread.join()


def test_a_pickled_copy_has_no_threads():
    workers = Workers()
    workers.worker(cpu)
    assert not pickle.loads(pickle.dumps(workers))._workers


def test_a_dead_thread_is_replaced():
    workers = Workers()
    dead = workers.worker(cpu)
    dead.tasks.put(None)
    dead.thread.join()
    assert workers.worker(cpu) is not dead


@pytest.mark.parametrize('nested', [False, True])
def test_a_layer_that_calls_the_pipeline_that_runs_it(nested):
    """In v0.3.0 the worker waited for itself."""
    x = torch.rand(2, 2)

    def call(_):
        if nested:
            in_partitions(['cpu:0', 'cpu:1'], nn.Identity(), Spy(lambda x: gpipe(x)))(x)
        else:
            gpipe(x)

    gpipe = in_partitions(['cpu:0', 'cpu:1'], Spy(call), nn.Identity())
    with pytest.raises(RuntimeError, match="the GPipe that runs it.*devices=\\['cpu', 'cpu'\\]"):
        gpipe(x)


def test_on_one_device_a_layer_may_call_its_pipeline():
    depth = []

    def call(x):
        depth.append(1)
        if len(depth) < 3:
            gpipe(x)

    gpipe = in_partitions(['cpu', 'cpu'], Spy(call), nn.Identity())
    gpipe(torch.rand(2, 2))
    assert len(depth) == 3


def test_a_finalizer_on_a_worker_that_calls_the_pipeline(monkeypatch):
    errors = []
    monkeypatch.setattr(
        'sys.unraisablehook', lambda unraisable: errors.append(unraisable.exc_value)
    )

    class Last:
        def __del__(self):
            gpipe(torch.rand(2, 2))

    class Once(nn.Module):
        def forward(self, x):
            if not errors:
                Last()  # dies at once
            return x

    gpipe = in_partitions(['cpu:0', 'cpu:1'], Once(), nn.Identity())
    gpipe(torch.rand(2, 2))
    assert len(errors) == 1 and 'the GPipe that runs it' in str(errors[0])


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_fork_while_another_thread_holds_every_lock():
    """In v0.3.0 the child waited for locks that no thread held any more."""
    gpipe = in_partitions(
        ['cpu:0', 'cpu:1'], nn.Linear(4, 4), nn.Dropout(0.5), chunks=2, checkpoint='always'
    )
    held, end = threading.Event(), threading.Event()

    def hold():
        from torchgpipe.base import locks
        from torchgpipe.engine.checkpoint import random

        with (
            gpipe._engine.workers._lock,
            random._lock,
            locks._lock,
            locks.generator_lock,
            gpipe._engine.partitions[0].lock,
            gpipe._engine.partitions[1].lock,
        ):
            held.set()
            end.wait(20)

    def in_child():
        loss = gpipe(torch.rand(4, 4)).sum()
        try:
            loss.backward()
        except RuntimeError as error:  # Autograd has threads for devices by now.
            assert 'fork' in str(error)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    child = Child(in_child)
    end.set()
    thread.join()
    assert child.wait() == 0
