"""Overhead: one size, and the ratios by hand."""

import json

import pytest
import torch

from benchmarks.experiments import overhead


@pytest.mark.slow
def test_overhead(run, tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, 'SIZES', [(2, 4)])
    code, out, _ = run('overhead', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and 'n=2 m=4' in out and 'median' in out
    written = json.loads((tmp_path / 'overhead.json').read_text())
    assert written['machine']['torch'] == torch.__version__ and len(written['results']) == 2
    assert "step by 'gpipe', 'never'" in out


def test_ratios():
    got = overhead.ratios(
        {
            'forward': (5.0, 15.0),
            "forward + backward, 'never'": (20.0, 30.0),
            "forward + backward, 'always'": (100.0, 60.0),
        }
    )
    assert got == {
        'forward': 2.0,
        "forward + backward, 'never'": 0.5,
        "forward + backward, 'always'": 0.5,
    }
