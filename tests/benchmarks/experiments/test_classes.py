"""Classes: the table once, with sizes that cannot be divided."""

import json

import pytest

from torchgpipe.trainer.processes import is_available

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.mark.slow
def test_classes(run, tmp_path):
    words = 'classes --classes 3001 --classes 4 --processes 3 --processes 3 --steps 2 --features 4'
    code, out, err = run(*words.split(), '--batch', 32, '--output', tmp_path)
    assert code == 0, err
    results = json.loads((tmp_path / 'classes.json').read_text())['results']
    few, many = results['cases']
    assert (few['classes'], many['classes']) == (4, 3001)
    for case, sizes in ((few, [2, 2, 0]), (many, [1001, 1001, 999])):
        plain, sharded = case['rows']
        assert (plain['name'], sharded['name']) == ('plain', 'sharded over 3')
        assert plain['losses'][0] != plain['losses'][1] and sharded['difference'] < 1e-5
        assert [rank['logits'] for rank in sharded['ranks']] == [4 * 32 * size for size in sizes]
        assert [rank['parameters'] for rank in sharded['ranks']] == [20 * size for size in sizes]
        assert f'{case["classes"]:,} ' in out
    assert all(rank['peak'] < plain['ranks'][0]['peak'] for rank in sharded['ranks'])
    assert max(rank['loss'] / rank['logits'] / 2 for rank in sharded['ranks']) < 1.3
    assert (tmp_path / 'classes.png').exists() and (tmp_path / 'classes.svg').exists()
