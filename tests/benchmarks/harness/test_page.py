"""The page of the results, and its tables."""

from benchmarks.commands import MODULES
from benchmarks.harness import page
from benchmarks.harness.costs import COSTS
from benchmarks.harness.page import PAGE, make_costs, make_page
from torchgpipe.base.errors import table


def test_the_page_is_made_of_the_results_that_are_kept():
    assert PAGE.read_text() == make_page(MODULES)
    assert COSTS.read_text() == make_costs(MODULES)


def test_an_experiment_has_no_pictures_of_one_with_a_longer_name(tmp_path, monkeypatch):
    monkeypatch.setattr(page, 'RESULTS', tmp_path)
    for file in (
        'gpt.json',
        'gpt-predicted.json',
        'gpt-sizes.json',
        'gpt.svg',
        'gpt-predicted.svg',
        'gpt-sizes.svg',
        'gpt-sizes-large.svg',
    ):
        (tmp_path / file).touch()
    assert page._pictures('gpt') == ['gpt-predicted.svg', 'gpt.svg']
    assert page._pictures('gpt-sizes') == ['gpt-sizes-large.svg', 'gpt-sizes.svg']


def test_tables_are_aligned():
    assert table(['', 'x'], [['ab', 1], ['c', 10]]).splitlines() == [
        '     x',
        '──  ──',
        'ab   1',
        'c   10',
    ]
