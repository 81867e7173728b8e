"""The clock, and who runs at the same time as whom."""
import threading

import pytest
import torch
from torch import nn

from tests.helpers import Spy, assert_same
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe
from torchgpipe.microbatch import Batch, gather, scatter
from torchgpipe.pipeline import Pipeline, clock_cycles
from torchgpipe.skip.layout import SkipLayout


@pytest.mark.parametrize('m, n, expected', [
    (1, 1, [[(0, 0)]]),
    (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
    (3, 1, [[(0, 0)], [(1, 0)], [(2, 0)]]),
    (3, 3, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1), (0, 2)], [(2, 1), (1, 2)], [(2, 2)]]),
    (4, 2, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(3, 0), (2, 1)], [(3, 1)]])])
def test_clock_cycles(m, n, expected):
    assert list(clock_cycles(m, n)) == expected


def test_a_pipeline_by_itself():
    before = set(threading.enumerate())
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double()
    x = torch.rand(5, 2, dtype=torch.double)
    for devices in (None, [torch.device('cpu:0'), torch.device('cpu:1')]):
        batches = scatter(x, 2)
        Pipeline(batches, [model[:1], model[1:]], devices, checkpoint_stop=1).run()
        assert_same([gather(batches)], [model(x)])
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize('layout', [None, SkipLayout(2, {(None, 'skip'): (0, 1)})])
def test_skips_are_found_in_the_layers_or_given(layout):
    partitions = [nn.Sequential(Stash()), nn.Sequential(Pop())]
    batches = scatter(torch.ones(2, 1), 2)
    Pipeline(batches, partitions, skip_layout=layout).run()
    assert gather(batches).tolist() == [[2], [2]]


def test_micro_batches_are_in_lockstep():
    log = []
    model = nn.Sequential(*[Spy(lambda x, j=j: log.append((int(x[0]), j))) for j in range(2)])
    GPipe(model, [1, 1], devices=['cpu', 'cpu'], chunks=3)(torch.arange(3.))
    assert log == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


def test_a_clock_waits_for_all_cells_of_the_clock_before():
    clocks = []
    lock = threading.Lock()

    def see(j):
        def enter(x):
            with lock:
                clocks.append(int(x[0]) + j)
        return enter

    model = nn.Sequential(*[Spy(see(j)) for j in range(3)])
    gpipe = GPipe(model, [1] * 3, devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=5)
    for _ in range(100):
        clocks.clear()
        gpipe(torch.arange(5.))
        assert clocks == sorted(clocks) and len(clocks) == 15


def test_partitions_on_different_devices_run_at_the_same_time():
    barrier = threading.Barrier(2)

    def meet(x):
        if 0 < int(x[0, 0]) < 4:
            barrier.wait(20)

    model = nn.Sequential(Spy(lambda x: meet(x)), Spy(lambda x: meet(x + 1)))
    gpipe = GPipe(model, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=4)
    x = torch.arange(4.)[:, None]
    # In clock k, partition 0 has micro-batch k and partition 1 has k-1: they meet in clocks 1..3.
    gpipe(x)


def test_partitions_on_one_device_need_no_thread():
    before = set(threading.enumerate())
    seen = set()
    model = nn.Sequential(*[Spy(lambda _: seen.add(threading.current_thread()))
                            for _ in range(2)])
    GPipe(model, [1, 1], devices=['cpu', 'cpu:0'], chunks=2)(torch.rand(2, 1))
    assert seen == {threading.current_thread()} and set(threading.enumerate()) == before


@pytest.mark.parametrize('devices', [['cpu'] * 3, ['cpu:0', 'cpu:1', 'cpu:2']])
@pytest.mark.parametrize('mode', ['always', 'except_last', 'never'])
def test_backward_takes_the_last_micro_batch_first(devices, mode):
    log = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, j, x):
            ctx.place = len(x), j
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            log.append(ctx.place)
            return None, grad

    class Layer(nn.Linear):
        def forward(self, x):
            return Note.apply(self.j, super().forward(x))

    layers = [Layer(2, 2) for _ in range(3)]
    for j, layer in enumerate(layers):
        layer.j = j
    gpipe = GPipe(nn.Sequential(*layers), [1] * 3, devices=devices, chunks=3, checkpoint=mode)
    for _ in range(20):
        log.clear()
        batches = [torch.rand(i + 1, 2) for i in range(3)]  # a micro-batch is known by its size
        boxed = [Batch(x) for x in batches]
        Pipeline(boxed, gpipe.partitions, gpipe.devices,
                 checkpoint_stop={'always': 3, 'except_last': 2, 'never': 0}[mode]).run()
        torch.cat([batch.tensor for batch in boxed]).sum().backward()
        for j in range(3):
            assert [size for size, where in log if where == j] == [3, 2, 1]
