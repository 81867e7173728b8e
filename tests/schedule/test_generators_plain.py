"""The plain call as a schedule, and as the engine runs it."""

import torch

from torchgpipe.engine.workers import WorkerPlan
from torchgpipe.schedule import Action, make
from torchgpipe.schedule.generators import forward_order, one_by_one, plain_call


def test_the_engine_runs_one_cell_ahead_and_no_more():
    for start, stop, n in [(0, 5, 3), (2, 6, 2), (0, 1, 3), (0, 4, 1)]:
        plan = WorkerPlan.of_forward(start, stop, tuple(torch.device('cpu', j) for j in range(n)))
        assert [row for _, row in plan.rows.values()] == [
            [Action(j, 'F', i) for i in range(start, stop)] for j in range(n)
        ]
        for action, before in plan.waits.items():
            j, _, i = action
            assert {*before} == {
                other
                for other in (Action(j - 1, 'F', i), Action(j + 1, 'F', i - 2))
                if 0 <= other.stage < n and other.micro_batch >= start
            }


def test_on_accelerators_recomputations_wait_for_no_gradient():
    schedule, pairs = plain_call(2, 2, (2, 1))
    assert schedule == make('gpipe', 2, 2).recomputing([2, 1]) and pairs == []


def test_on_the_cpu_backwards_wait_for_each_other():
    schedule, pairs = plain_call(2, 3, one_thread=True)
    assert schedule == make('gpipe', 2, 3)
    assert pairs == [*forward_order(2, 0, 3), *one_by_one(schedule)]
