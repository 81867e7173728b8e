"""Folders of Transformers through meshes: one architecture, and the table."""

import pytest

from benchmarks.experiments import folders
from benchmarks.harness.report import markdown


@pytest.mark.tools
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', ['GPTNeoXForCausalLM', 'Qwen3MoeForCausalLM'])
def test_an_architecture_is_equal_before_a_step_and_close_after_three(name):
    pytest.importorskip('transformers')
    row = folders.row_of(name)
    for mesh in folders.MESHES:
        assert row[f'{mesh}, equal'] and 0 < row[str(mesh)] <= 1e-6


def test_the_table():
    row = {}
    for mesh in folders.MESHES:
        row |= {f'{mesh}, equal': True, str(mesh): 2e-7}
    rows = {'A': row, 'B': {'reason': 'not in this version of Transformers'}}
    results = {'transformers': '5', 'rows': rows}
    *_, table = folders.SECTIONS[0].parts(results)
    text = markdown(table)
    assert 'equal; 2e-07' in text and 'not in this version' in text and '2×2×1' in text
