"""Pages about tools: the table comes from the tests, and recipes run."""

import importlib.util

import pytest

from tests.tools.page import HUGGING_FACE, MODEL, PAGE, RECIPES, VISION
from tests.tools.rows import table


def test_the_table_equals_the_tests():
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


@pytest.mark.tools
@pytest.mark.filterwarnings('ignore')
def test_hugging_face_in_twenty_lines(tmp_path, monkeypatch, capsys, no_state):
    pytest.importorskip('transformers', reason="pip install -e '.[tools]'")
    monkeypatch.chdir(tmp_path)
    names = {'__name__': 'page'}
    for package, code in HUGGING_FACE:
        if importlib.util.find_spec(package) is not None:
            exec(code, names)
    assert 'tensor([[3, 4, 5, 6, 7, 8, 9]])' in capsys.readouterr().out
    assert (tmp_path / 'trained/model.safetensors').exists()


@pytest.mark.tools
@pytest.mark.filterwarnings('ignore')
def test_vision_and_language(tmp_path, monkeypatch, capsys, no_state):
    pytest.importorskip('transformers', reason="pip install -e '.[tools]'")
    monkeypatch.chdir(tmp_path)
    ((_, code),) = VISION
    exec(code, {'__name__': 'page'})
    assert capsys.readouterr().out == 'True True\n'
