"""The page of tools: its table is that of the tests, and its recipes run."""
import importlib.util
import re
from pathlib import Path

import pytest

from tests.devices import cpu_only
from tests.tools.rows import table

pytestmark = cpu_only('what the documentation shows runs on the CPU')

PAGE = (Path(__file__).parents[2] / 'docs/guide/tools.md').read_text()

#: The model that recipes share, and recipes by what they need.
MODEL = re.search(r'^```python\n(.*?)^```$', PAGE, re.M | re.S)[1]
RECIPES = {}
for package, code in re.findall(r'^```py\n# needs (\w+)\n(.*?)^```$', PAGE, re.M | re.S):
    RECIPES.setdefault(package, []).append(code)


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
