"""Virtual ranks: threads that take turns."""

import threading

import pytest
import torch

from torchgpipe.dry_run.virtual import Turns


def test_one_function_runs_at_a_time_in_a_repeatable_order():
    def play(k):
        for number in range(3):
            log.append((k, number))
            turns.wait(lambda number=number: len(log) > 2 * number + 1)

    logs = []
    for _ in range(20):
        log, turns = [], Turns()
        turns.run([lambda: play(0), lambda: play(1)])
        logs.append(log)
    assert all(log == logs[0] for log in logs) and len(logs[0]) == 6


def test_an_error_ends_all():
    """Later errors of the others are not reported, and keep none of them from its end."""

    def fail():
        raise ValueError('no')

    def wait():
        try:
            turns.wait(lambda: False)
        finally:
            raise KeyError('later')

    turns = Turns()
    before = threading.active_count()
    with pytest.raises(ValueError, match='no'):
        turns.run([wait, wait, fail])
    assert threading.active_count() == before


def test_functions_that_wait_for_each_other_raise():
    turns = Turns()
    with pytest.raises(RuntimeError, match='wait for each other'):
        turns.run([lambda: turns.wait(lambda: False)] * 2)


def test_the_state_of_the_caller_holds_in_all():
    seen, turns = [], Turns()
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        turns.run(
            [lambda: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled('cpu')))] * 2
        )
    assert seen == [(False, True)] * 2
