"""Time and memory by the results that checkpointing keeps."""

import json

import pytest

from benchmarks.experiments.keep import SECTIONS, SETTINGS


def test_keep(run, tmp_path):
    code, out, _ = run('keep', '--depth', 1, '--samples', 2, '--rounds', 1, '--output', tmp_path)
    assert code == 0 and (tmp_path / 'keep.svg').exists()
    stored = json.loads((tmp_path / 'keep.json').read_text())
    assert stored['options'] == ['--depth', '1', '--samples', '2', '--rounds', '1']
    assert not stored['accelerated']
    results = stored['results']
    assert [result['name'] for result in results] == [kept.name for kept in SETTINGS]
    assert all(result['name'] in out for result in results)
    sizes = [result['bytes'] for result in results]
    assert sizes == sorted(sizes)
    for result in results:
        if result['predicted'] is not None:
            assert result['bytes'] == pytest.approx(result['predicted'], rel=0.05)
    (header, lines), _ = SECTIONS[0].parts(results)
    assert all(len(line) == len(header) for line in lines)
