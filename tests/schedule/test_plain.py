"""The plain call as a schedule, and as the engine runs it."""
import pytest
import torch

from torchgpipe.engine.interpreter import Plan
from torchgpipe.schedule import Action, make
from torchgpipe.schedule.plain import forward_order, one_by_one, plain_call


@pytest.mark.parametrize('start, stop, n', [(0, 5, 3), (2, 6, 2), (0, 1, 3), (0, 4, 1)])
def test_the_order_of_forwards_is_that_of_the_engine(start, stop, n):
    found = Plan.of_forward(start, stop, tuple(torch.device('cpu', j) for j in range(n)))
    other = {action: {*before} for action, before in found.waits.items()}
    assert [row for _, row in found.rows.values()] == [
        [Action(j, 'F', i) for i in range(start, stop)] for j in range(n)]
    for one, next in forward_order(n, start, stop):
        other[next].remove(one)
    assert other == {action: {Action(action.stage - 1, 'F', action.micro_batch)}
                     if action.stage else set() for action in other}


def test_on_accelerators_recomputations_wait_for_no_gradient():
    schedule, pairs = plain_call(2, 2, (2, 1))
    assert schedule == make('gpipe', 2, 2).recomputing([2, 1]) and pairs == []


def test_on_the_cpu_backwards_wait_for_each_other():
    schedule, pairs = plain_call(2, 3, one_thread=True)
    assert schedule == make('gpipe', 2, 3)
    assert pairs == [*forward_order(2, 0, 3), *one_by_one(schedule)]
