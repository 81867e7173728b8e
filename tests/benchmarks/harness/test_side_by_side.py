"""One process beside several: rows by hand, and losses that are not the same are found out."""

import pytest

from benchmarks.experiments.sharded.comparison import (
    Step,
    _difference,
    _row,
    memory_cells,
    training_rows,
)
from torchgpipe.trainer.processes import Interval

MIB = 2**20


def steps(*losses):
    """Take steps of 2, 4, 6, … seconds on two ranks."""
    return [
        [Step(Interval(0.0, 1.0 + i), loss), Step(Interval(1.0, 2.0 + 2 * i), loss)]
        for i, loss in enumerate(losses)
    ]


def test_a_row_by_hand():
    figures = [
        {'parameters': MIB, 'gradients': MIB, 'optimizer': 2 * MIB, 'peak': 9 * MIB},
        {'parameters': MIB, 'gradients': MIB, 'optimizer': 3 * MIB, 'peak': 7 * MIB},
    ]
    row = _row('sharded over 2', steps(5.0, 4.0, 3.0), figures)
    assert row == {
        'name': 'sharded over 2',
        'losses': [5.0, 4.0, 3.0],
        'seconds': 5.0,  # The first step is not timed.
        'ranks': figures,
    }
    assert memory_cells(row) == ['5.00', '9.00']
    row['difference'] = _difference(row, [5.0, 4.5, 3.0], 0.2)
    assert training_rows([row])[1] == [
        ['sharded over 2', '5.0000', '3.0000', '5e-01', '5000.0', '5.00', '9.00']
    ]


@pytest.mark.parametrize('loss', [1.1, float('nan')])
def test_a_loss_of_its_own_is_found_out(loss):
    row = {'name': 'sharded over 2', 'losses': [3.0, loss]}
    with pytest.raises(RuntimeError, match='sharded over 2: the loss of step 1 should be 1.0'):
        _difference(row, [3.0, 1.0], 1e-3)


def test_ranks_that_differ_are_found_out():
    ((one, other),) = steps(1.0)
    with pytest.raises(RuntimeError, match='same on all ranks'):
        _row('sharded over 2', [[one, other._replace(loss=1.5)]], [])
