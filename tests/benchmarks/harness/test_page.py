"""The page of the results, and its tables."""
from benchmarks.commands import MODULES
from benchmarks.harness.costs import COSTS
from benchmarks.harness.page import PAGE, make_costs, make_page
from benchmarks.harness.report import table


def test_the_page_is_made_of_the_results_that_are_kept():
    assert PAGE.read_text() == make_page(MODULES)
    assert COSTS.read_text() == make_costs(MODULES)


def test_tables_are_aligned():
    assert table(['', 'x'], [['ab', 1], ['c', 10]]).splitlines() == [
        '     x', '──  ──', 'ab   1', 'c   10']
