"""The documentation: its code runs, its links lead somewhere, its pictures are up to date."""
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchgpipe
from tests.refusals import REFUSALS

ROOT = Path(torchgpipe.__file__).parent.parent
PAGES = sorted([*ROOT.glob('*.md'), *(page for page in ROOT.glob('docs/**/*.md')
                                      if '_build' not in page.parts)])
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```$', re.M | re.S)


def name(page):
    """Give a page's name as tests show it."""
    return str(page.relative_to(ROOT))


def blocks(text):
    """Give blocks: language, code, line, and the text that follows at once, if any."""
    found = list(BLOCK.finditer(text))
    for block, after in zip(found, [*found[1:], None]):
        follows = after is not None and not text[block.end():after.start()].strip()
        expected = after[2] if follows and after[1] == 'text' else None
        yield block[1], block[2], text[:block.start()].count('\n') + 1, expected


def execute(code, line, page):
    """Run Python in a module of its own; give what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile('\n' * line + code, page, 'exec'), sys.modules['page'].__dict__)
    return printed.getvalue()


def shell(command):
    """Run a command with this environment's programs; give what it prints."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    return subprocess.run(command, shell=True, check=True, text=True, stdout=subprocess.PIPE,
                          env={**os.environ, 'PATH': path, 'OMP_NUM_THREADS': '1'}).stdout


def run(text, page):
    """Run a page in this folder, block by block, and compare what it prints.

    Python that starts with a comment like ``# train.py`` is a file of that name, which a command
    further down runs.
    """
    for language, code, line, expected in blocks(text):
        if language == 'python' and (file := re.match(r'# (\w+\.py)\n', code)):
            Path(file[1]).write_text(code)
        elif language == 'python':
            printed = execute(code, line, page)
            assert expected is None or printed.split() == expected.split(), f'{page}:{line}'
        elif language == 'sh' and code.startswith(('python ', 'torchrun ')):
            assert shell(code).split() == expected.split(), f'{page}:{line}'


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Be in an empty folder, with an empty module for a page's names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, 'page', ModuleType('page'))


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_the_code_of_a_page_runs(page, empty):
    run(page.read_text(), name(page))


@pytest.mark.parametrize('text', ['```python\nprint(1)\n```\n\n```text\n2\n```\n',
                                  '```python\nundefined\n```\n'])
def test_code_that_is_wrong_would_be_found(text, empty):
    with pytest.raises((AssertionError, NameError)):
        run(text, 'page')


ERRORS = re.findall(r'^\| `(\w+Error: .*?)` \|', (ROOT / 'docs/guide/restrictions.md').read_text(),
                    re.M)


@pytest.mark.parametrize('k', range(len(ERRORS)))
def test_an_error_is_quoted_as_it_is(k):
    with pytest.raises(Exception) as raised:
        REFUSALS[k]()
    pattern = '.*'.join(map(re.escape, ERRORS[k].split('…')))
    assert re.match(pattern, f'{raised.type.__name__}: {raised.value}', re.S)


def test_all_errors_are_tried():
    assert len(ERRORS) == len(REFUSALS) > 40
