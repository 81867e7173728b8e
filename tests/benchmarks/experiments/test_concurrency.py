"""Concurrency: once, with few rows; shares by hand."""

import pytest

from benchmarks.experiments import concurrency
from benchmarks.models.stacks import perceptron


@pytest.mark.slow
def test_concurrency(run, tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency, 'ROWS', 2)
    monkeypatch.setattr(concurrency, 'CELLS', {0.01: 8, 0.02: 8})
    monkeypatch.setattr(concurrency, 'CHUNKS', (1, 3))
    code, out, _ = run('concurrency', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and 'cells of 0.02 ms' in out and 'm = 3' in out
    assert (tmp_path / 'concurrency.json').exists() and (tmp_path / 'concurrency.svg').exists()


def test_shares_are_relative_to_the_possible_overlap():
    for each in concurrency.measure(perceptron(4, 2), 0.01, 3, 1):
        assert each['speed_up'] == each['serial_ms'] / each['pipeline_ms']
        ideal = 2 if each['what'] == concurrency.THREADS else 1.5  # 2 · 3 / 4
        assert abs(each['share'] * ideal - each['speed_up']) < 1e-9
    header, rows = concurrency.share_rows(
        [
            {'what': 'x', 'milliseconds': size, 'chunks': m, 'share': size / 10, 'speed_up': m}
            for size in (1.0, 5.0)
            for m in (2, 4)
        ],
        'x',
    )
    assert header == ['x', 'm = 2', 'm = 4']
    assert rows[1] == ['cells of 5 ms', '0.50 (2.00 ×)', '0.50 (4.00 ×)']
