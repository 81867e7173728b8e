"""Digits: GPipe learns what the model without it learns, by a schedule as well."""
import re

import pytest

from benchmarks.harness.options import choose_devices


def test_digits(run, tmp_path):
    code, out, _ = run('digits', '--epochs', 3, '--checkpoint', 'always', '--output', tmp_path)
    assert code == 0
    accuracies = re.findall(r'(?:unwrapped|GPipe) +([\d.]+)%', out)
    assert len(accuracies) == 2 and all(float(accuracy) > 90 for accuracy in accuracies)
    assert 'largest difference of the losses' in out
    assert (tmp_path / 'digits.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
@pytest.mark.parametrize('schedule, balance', [('1f1b', '6,10'), ('zb-v', '3,3,3,7')])
def test_digits_by_a_schedule(run, tmp_path, schedule, balance):
    code, out, _ = run('digits', '--epochs', 2, '--schedule', schedule, '--balance', balance,
                       '--output', tmp_path)
    assert code == 0
    accuracy = re.search(rf'GPipe, {schedule} +([\d.]+)%', out)
    assert float(accuracy[1]) > 85


@pytest.mark.parametrize('schedule, places', [
    (None, [0, 1, 2, 3]), ('1f1b', [0, 1, 2, 3]), ('interleaved', [0, 1, 0, 1]),
    ('zb-v', [0, 1, 1, 0])])
def test_partitions_are_where_a_schedule_has_them(schedule, places):
    found = choose_devices(4, schedule)
    one_of_each = choose_devices(4)
    assert found == [one_of_each[j] for j in places]
