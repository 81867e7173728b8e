"""The page of tools: its table is that of the tests, and its recipes run."""
import importlib.util

import pytest

from tests.devices import cpu_only
from tests.tools.page import MODEL, PAGE, RECIPES
from tests.tools.rows import table

pytestmark = cpu_only('what the documentation shows runs on the CPU')


def test_the_table_is_that_of_the_tests():
    """To make it: python -m tests.tools.rows."""
    assert table() in PAGE


def test_each_package_of_the_table_has_a_recipe():
    assert sorted(RECIPES) == ['accelerate', 'lightning', 'peft', 'transformers']


@pytest.mark.tools
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('package', sorted(RECIPES))
def test_a_recipe_runs(package, tmp_path, monkeypatch, no_state):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[tools]'")
    monkeypatch.chdir(tmp_path)
    names = {'__name__': 'page'}
    for code in [MODEL, *RECIPES[package]]:
        exec(code, names)
