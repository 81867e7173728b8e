"""The documentation: its code runs, its links lead somewhere, its pictures are up to date."""
import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent.parent
PAGES = sorted([*ROOT.glob('*.md'), *(page for page in ROOT.glob('docs/**/*.md')
                                      if '_build' not in page.parts)])
BLOCK = re.compile(r'^```(\w*)\n(.*?)^```$', re.M | re.S)


def name(page):
    """Give a page's name as tests show it."""
    return str(page.relative_to(ROOT))


def blocks(page):
    """Give a page's blocks: language, code, line, and the text block right after it, if any."""
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    for block, after in zip(found, [*found[1:], None]):
        shown = after is not None and after[1] == 'text' and not text[block.end():after.start()].strip()
        yield block[1], block[2], text[:block.start()].count('\n') + 1, after[2] if shown else None


def run(page, monkeypatch):
    """Run the Python of a page, in order and in one namespace; compare what it prints."""
    module = ModuleType('page')
    monkeypatch.setitem(sys.modules, 'page', module)
    for language, code, line, expected in blocks(page):
        if language != 'python':
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile('\n' * line + code, str(page), 'exec'), module.__dict__)
        if expected is not None:
            assert printed.getvalue().split() == expected.split(), f'{page}:{line}'
    return module


@pytest.mark.parametrize('page', PAGES, ids=name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, monkeypatch)
