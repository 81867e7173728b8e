"""The workers of torchgpipe 0.0.7: queues, errors, lifetime."""

import threading
import weakref

import pytest
import torch

from torchgpipe.microbatch import Batch
from torchgpipe.stream import CPUStream
from torchgpipe.worker import Task, spawn_workers


class FakeDevice:
    """Stands for a device: every one is another."""

    count = 0

    def __init__(self):
        self.type = 'fake'
        self.index = FakeDevice.count
        FakeDevice.count += 1


cpu = torch.device('cpu')


def test_a_task_returns_its_result():
    with spawn_workers([cpu]) as (in_queues, out_queues):
        task = Task(CPUStream, compute=lambda: Batch(torch.tensor(42)), finalize=None)
        in_queues[0].put(task)
        ok, (same, batch) = out_queues[0].get()
    assert ok and same is task and batch[0].item() == 42


def test_finalize_gets_the_batch():
    seen = []
    batch = Batch(torch.tensor(42))
    Task(CPUStream, compute=lambda: batch, finalize=seen.append).finalize(batch)
    assert seen == [batch]


def test_an_exception_comes_out_with_its_traceback():
    def divide():
        0 / 0

    with spawn_workers([cpu]) as (in_queues, out_queues):
        in_queues[0].put(Task(CPUStream, compute=divide, finalize=None))
        ok, (kind, error, traceback) = out_queues[0].get()
    assert not ok and kind is ZeroDivisionError and isinstance(error, kind)
    while traceback.tb_next:
        traceback = traceback.tb_next
    assert traceback.tb_frame.f_code is divide.__code__


def test_devices_have_threads_of_their_own():
    barrier = threading.Barrier(2)  # breaks unless both tasks run at the same time
    with spawn_workers([FakeDevice(), FakeDevice()]) as (in_queues, out_queues):
        for queue in in_queues:
            queue.put(Task(CPUStream, compute=lambda: barrier.wait(10) and None, finalize=None))
        assert [queue.get()[0] for queue in out_queues] == [True, True]


def test_equal_devices_share_a_worker_and_cpu_is_cpu_0():
    devices = [cpu, torch.device('cpu:0'), torch.device('cpu:1'), FakeDevice()]
    with spawn_workers(devices) as (in_queues, out_queues):
        assert in_queues[0] is in_queues[1] and out_queues[0] is out_queues[1]
        assert len(set(map(id, in_queues))) == 3


def test_leaving_the_context_waits_for_tasks_in_flight():
    for error in [None, RuntimeError, KeyboardInterrupt]:
        count = []
        go = threading.Event()

        def compute():
            go.wait(10)
            count.append(1)

        def use():
            with spawn_workers([FakeDevice() for _ in range(4)]) as (in_queues, _):
                for queue in in_queues:
                    queue.put(Task(CPUStream, compute=compute, finalize=None))
                go.set()
                if error is not None:
                    raise error

        if error is None:
            use()
        else:
            with pytest.raises(error):
                use()
        assert len(count) == 4, error


def test_a_task_takes_over_grad_mode():
    for grad_mode in [True, False]:
        with spawn_workers([cpu]) as (in_queues, out_queues):
            with torch.set_grad_enabled(grad_mode):
                task = Task(CPUStream, finalize=None, compute=lambda: torch.is_grad_enabled())
            in_queues[0].put(task)
            assert out_queues[0].get()[1][1] is grad_mode


def test_an_idle_worker_refers_to_no_tensor():
    with spawn_workers([cpu]) as (in_queues, out_queues):
        for _ in range(300):
            x = torch.rand(1)
            ref = weakref.ref(x)
            in_queues[0].put(Task(CPUStream, compute=lambda x=x: Batch(x), finalize=None))
            out_queues[0].get()
            del x
            assert ref() is None
