"""Contenders in turn: their order, their times, their losses."""

import pytest
import torch

from benchmarks.harness import timing
from benchmarks.harness.timing import (
    check_losses,
    one_thread,
    order_of_round,
    quartiles,
    time_in_turn,
)


def test_each_contender_is_the_first_one_in_some_round():
    assert [order_of_round('abc', k) for k in range(4)] == [[*'abc'], [*'bca'], [*'cab'], [*'abc']]


def test_no_contender_has_no_times():
    assert time_in_turn({}, 2) == {}


def test_times_do_not_include_the_preparation(monkeypatch, clock):
    calls = []

    def take(seconds):
        def call():
            calls.append(seconds)
            clock.now += seconds

        return call

    monkeypatch.setattr(timing, 'time', clock)
    times = time_in_turn({'a': take(1.0), 'b': take(2.0)}, 2, prepare=take(8.0))
    assert times == {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    assert calls == [8.0, 1.0, 8.0, 2.0, 8.0, 2.0, 8.0, 1.0]


def test_another_loss_is_an_error():
    check_losses({'data 2': 2.0, 'DDP': 2.0001}, 2.0)
    check_losses({'data 2': 2.0, 'DDP': 2.01}, tolerance=0.01)
    with pytest.raises(RuntimeError, match="should be the same, 2.0.*'DDP': 2.01"):
        check_losses({'data 2': 2.0, 'DDP': 2.01})
    with pytest.raises(RuntimeError, match='should be the same, 3.0'):
        check_losses({'data 2': 2.0, 'DDP': 2.0}, 3.0)
    with pytest.raises(RuntimeError, match='should be the same'):
        check_losses({'data 2': float('nan'), 'DDP': 2.0})


def test_quartiles():
    assert quartiles([4.0, 1.0, 2.0, 3.0, 0.0]) == [1.0, 3.0]


def test_the_number_of_threads_is_restored():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match='interrupted'), one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError('interrupted')
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
