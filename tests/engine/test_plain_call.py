"""The pipeline, and who runs at the same time as whom."""

import threading

import pytest
import torch
from torch import nn

from tests.devices import cpus, devices
from tests.helpers import Spy, in_a_new_thread, in_partitions, nodes
from tests.marks import modes
from torchgpipe import GPipe, is_recomputing
from torchgpipe.base.structure import bare
from torchgpipe.engine.backward_order import Tie
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.workers import WorkerPlan


@devices
def test_one_worker_takes_one_micro_batch_after_the_other_through_all_partitions(devices):
    log = []
    model = nn.Sequential(*[Spy(lambda x, j=j: log.append((int(x[0]), j))) for j in range(2)])
    gpipe = GPipe(model, [1, 1], devices=[devices.first] * 2, chunks=3, checkpoint='except_last')
    gpipe(torch.arange(3.0, device=devices.first))
    assert log == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_no_partition_runs_far_ahead_of_the_next_one():
    log = []
    lock = threading.Lock()

    def see(j):
        def enter(x):
            with lock:
                log.append((int(x[0]), j))

        return enter

    model = nn.Sequential(*[Spy(see(j)) for j in range(3)])
    gpipe = GPipe(model, [1] * 3, devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=5)
    for _ in range(100):
        log.clear()
        gpipe(torch.arange(5.0))
        places = {place: k for k, place in enumerate(log)}
        assert len(log) == len(places) == 15
        for i, j in log:
            for before in (i - 1, j), (i, j - 1), (i - 2, j + 1):
                assert places.get(before, -1) < places[i, j]


def test_a_cell_waits_for_cells_on_other_workers():
    plan = WorkerPlan.of_forward(0, 4, (torch.device('cpu:0'), torch.device('cpu:1')))
    waits = {str(action): sorted(map(str, before)) for action, before in plan.waits.items()}
    assert waits == {
        '0F0': [],
        '0F1': [],
        '0F2': ['1F0'],
        '0F3': ['1F1'],
        '1F0': ['0F0'],
        '1F1': ['0F1'],
        '1F2': ['0F2'],
        '1F3': ['0F3'],
    }
    assert [[str(x) for x in row] for _, row in plan.rows.values()] == [
        ['0F0', '0F1', '0F2', '0F3'],
        ['1F0', '1F1', '1F2', '1F3'],
    ]


def test_partitions_on_different_devices_run_at_the_same_time():
    barrier = threading.Barrier(2)

    def meet(x):
        if 1 < int(x[0, 0]) < 4:
            barrier.wait(20)

    model = nn.Sequential(Spy(lambda x: meet(x)), Spy(lambda x: meet(x + 1)))
    gpipe = GPipe(model, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=4)
    x = torch.arange(4.0)[:, None]
    # When partition 0 has micro-batch k, partition 1 has k-1: they meet twice, once micro-batch 0
    # has shown that they may run concurrently.
    gpipe(x)


def test_partitions_on_one_device_need_no_thread():
    before = set(threading.enumerate())
    seen = set()
    model = nn.Sequential(*[Spy(lambda _: seen.add(threading.current_thread())) for _ in range(2)])
    GPipe(model, [1, 1], devices=['cpu', 'cpu:0'], chunks=2)(torch.rand(2, 1))
    assert seen == {threading.current_thread()} and set(threading.enumerate()) == before


class Note(torch.autograd.Function):
    """An identity that notes its micro-batch, known by its size, and its partition in backward."""

    @staticmethod
    def forward(ctx, log, j, x):
        ctx.log, ctx.place = log, (len(x), j)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.place)
        return None, None, grad


class Noted(nn.Linear):
    """A layer that notes its recomputation and its backward."""

    def __init__(self, log, j):
        super().__init__(2, 2)
        self.log, self.j = log, j

    def forward(self, x):
        for _ in range(10):  # unused nodes, so that later ones have high numbers
            x.new_ones(1).requires_grad_() + 1
        if is_recomputing():
            self.log['recomputation'].append((len(x), self.j))
        return Note.apply(self.log['backward'], self.j, super().forward(x))


#: Losses of outputs, such that gradients come at once, or one when all else is done.
LOSSES = {
    'at once': lambda outputs: torch.cat(outputs).sum(),
    'last first': lambda outputs: in_a_new_thread(lambda: sum(x.sum() for x in outputs)),
    'first first': lambda outputs: in_a_new_thread(
        lambda: sum(x.sum() for x in reversed(outputs))
    ),
}


@devices
@modes
@pytest.mark.parametrize('loss', list(LOSSES.values()), ids=list(LOSSES))
def test_backward_takes_the_last_micro_batch_first(devices, mode, loss):
    """By itself, autograd would begin with the node that was made last, so with either end."""
    log = {'recomputation': [], 'backward': []}
    gpipe = GPipe(nn.Sequential(*[Noted(log, j) for j in range(3)]), [1] * 3, devices=devices(3))
    checkpoint_stop = {'always': 3, 'except_last': 2, 'never': 0}[mode]
    for _ in range(5):
        batches = [Chunk((torch.rand(i + 1, 2, device=devices.first),), bare) for i in range(3)]
        PlainCall(gpipe._running_engine(), batches, [range(checkpoint_stop)] * 3).run()
        loss([batch.value for batch in batches]).backward()
        for j in range(3):
            assert [size for size, where in log['backward'] if where == j] == [3, 2, 1]
            assert [size for size, where in log['recomputation'] if where == j] == [3, 2, 1][
                3 - checkpoint_stop :
            ]
        log['recomputation'].clear(), log['backward'].clear()


@cpus
@modes
def test_an_output_has_an_edge_to_the_output_of_the_previous_micro_batch(devices, mode):
    """Wherever a partition has edges at all: [Note: Unchanged outputs]."""
    outputs = {}

    def see(j):
        def look(x):
            if not is_recomputing():
                outputs[j - 1, len(x)] = x

        return look

    model = nn.Sequential(*[nn.Sequential(Spy(see(j)), nn.Linear(2, 2)) for j in range(3)])
    batches = [Chunk((torch.rand(i + 1, 2, device=devices.first),), bare) for i in range(3)]
    checkpoint_stop = {'always': 3, 'except_last': 2, 'never': 0}[mode]
    gpipe = GPipe(model, [1] * 3, devices=devices(3))
    PlainCall(gpipe._running_engine(), batches, [range(checkpoint_stop)] * 3).run()
    for batch in batches:
        see(3)(batch.value)
    for j in range(3):
        ordered = [outputs[j, size].grad_fn in nodes(outputs[j, size + 1]) for size in (1, 2)]
        assert ordered == (
            [True, True]
            if j == 2
            else {'always': [True, True], 'except_last': [True, False], 'never': [False, False]}[
                mode
            ]
        )


def test_there_are_no_edges_to_nowhere():
    gpipe = in_partitions(['cpu'], nn.Linear(2, 2), chunks=4, checkpoint='never')
    output = gpipe(torch.rand(4, 2))
    found = [node for node in nodes(output) if isinstance(node, Tie._backward_cls)]
    assert sorted(len(node.next_functions) for node in found) == [1, 2, 2, 2]
