"""The floors: a file imports only from floors below it, also within functions."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchgpipe

ROOT = Path(torchgpipe.__file__).parent

FLOORS = [
    {'__version__', 'aliases', 'balance.blockpartition', 'balance.layers', 'balance.live',
     'balance.table', 'notes', 'passes', 'skip.namespace'},
    {'ambient', 'balance.bounded', 'microbatch', 'skip.layout', 'stream'},
    {'balance.step', 'batchnorm', 'phony', 'randomness', 'snapshot'},
    {'balance.costs', 'copy', 'dependency', 'partition', 'recompute', 'worker'},
    {'checkpoint', 'skip.portal'},
    {'skip.tracker'},
    {'balance.measure', 'compute', 'skip.crossing', 'skip.drive'},
    {'cell', 'skip.skippable'},
    {'balance.profile', 'pipeline', 'skip'},
    {'balance', 'gpipe'},
    {'__init__'}]


def room(path):
    """Give a file's name as its importers say it: `skip.portal`, and `skip` for a package."""
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


FILES = sorted(ROOT.glob('**/*.py'))


def imports(path):
    """Give the rooms of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('torchgpipe'):
            found.add(node.module.partition('.')[2])
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition('.')[2] for alias in node.names
                      if alias.name.startswith('torchgpipe')}
        assert not (isinstance(node, ast.ImportFrom) and node.level), 'a relative import'
    return found


def climbs(room, imported):
    """Give the imports that do not go downwards."""
    floor = {name: k for k, names in enumerate(FLOORS) for name in names}
    return [name for name in imported if floor[name] >= floor[room]]


@pytest.mark.parametrize('path', FILES, ids=room)
def test_imports_go_down(path):
    assert climbs(room(path), imports(path)) == []


def test_an_import_that_climbs_would_be_found():
    assert sorted(climbs('copy', {'stream', 'pipeline', 'worker'})) == ['pipeline', 'worker']


def test_every_file_says_its_idea_in_its_first_line():
    for path in FILES:
        assert path.read_text().startswith('"""'), path


def test_importing_needs_torch_only():
    code = ('import sys, torch; before = set(sys.modules); import torchgpipe; '
            'print({m.partition(".")[0] for m in set(sys.modules) - before} '
            '- sys.stdlib_module_names - {"torchgpipe", "torch"})')
    output = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True,
                            check=True, cwd=ROOT.parent).stdout
    assert output.strip() == 'set()'


def test_the_table_in_the_documentation_is_this_one():
    rows = re.findall(r'^\| (\d) \| (.*) \|$', (ROOT.parent / 'docs/design.md').read_text(), re.M)
    documented = {int(floor): set(re.findall(r'`([\w.]+)`', text))
                  for floor, text in rows}
    assert [documented[k] | ({'__version__'} if k == 0 else set()) for k in range(len(FLOORS) - 1)
            ] == FLOORS[:-1]


def test_the_changelog_is_up_to_date():
    newest = re.search(r'^## ([\d.]+) ', (ROOT.parent / 'docs/changelog.md').read_text(), re.M)
    assert newest.group(1) == torchgpipe.__version__
