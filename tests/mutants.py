"""Mutants: ``python -m tests.mutants`` takes guards out of the package, and runs the tests.

It draws conditions, waits, locks and comparisons of versions by a seed. It takes each out in a
copy of the project, one at a time, and runs tests until one fails: first the module's tests, then
the harness of equivalence, the tests of the folder, and others that reach the folder. It prints
the mutants that no test notices. A file of results is continued, so a run may be interrupted.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

#: The folders of mutants, with their shares of 120.
SHARES = {'engine': 48, 'distributed': 28, 'sequential': 18, 'plan': 16, 'skip': 10}

#: Tests outside of a folder's own that may notice its mutants.
OTHERS = {
    'engine': [
        'tests/test_equivalence.py',
        'tests/test_equivalence_ranks.py',
        'tests/skip',
        'tests/base',
        'tests/accelerator',
        'tests/legacy',
        'tests/model',
        'tests/timeline',
        'tests/testing',
        'tests/project/test_surface.py',
        *sorted(f'tests/{path.name}' for path in (ROOT / 'tests').glob('test_[bglps]*.py')),
    ],
    'distributed': ['tests/test_equivalence_ranks.py', 'tests/shard', 'tests/timeline'],
    'sequential': ['tests/model', 'tests/testing', 'tests/plan', 'tests/project'],
    'plan': ['tests/distributed/dry_runs', 'tests/benchmarks', 'tests/project'],
    'skip': ['tests/engine', 'tests/test_equivalence.py', 'tests/legacy', 'tests/test_gpipe.py'],
}

#: Contexts that are locks, streams or modes, and calls that wait, free or check.
CONTEXTS = re.compile(r'lock|held|unseen|use_|stream|no_grad|substituted')
CALLS = re.compile(r'wait|synchronize|record|acquire|release|join|clear|\.set\(|check|register')

#: Seconds for one run of tests. A mutant that hangs is noticed.
TIMEOUT = 1500


#: Pytest's exit code if no test is selected.
NO_TESTS = 5


class Mutant(NamedTuple):
    """A change of one node of a file."""

    path: str
    change: str
    line: int
    column: int
    text: str


def changes_of(node):
    """Yield the changes of a node: their names."""
    text = ast.unparse(node)
    if isinstance(node, ast.If) and 'TYPE_CHECKING' not in ast.unparse(node.test):
        yield 'never'
        yield 'always'
    elif isinstance(node, ast.BoolOp):
        for k in range(len(node.values)):
            yield f'without operand {k}'
    elif isinstance(node, ast.With) and CONTEXTS.search(ast.unparse(node.items[0])):
        yield 'without context'
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and CALLS.search(text):
        yield 'without call'
    elif isinstance(node, ast.Compare) and 'version' in text:
        yield 'equal'


def mutants_of(folder):
    """Return all mutants of a folder of the package."""
    mutants = []
    for path in sorted((ROOT / 'torchgpipe' / folder).rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            for change in changes_of(node):
                name = str(path.relative_to(ROOT))
                text = ast.unparse(node).splitlines()[0]
                mutants.append(Mutant(name, change, node.lineno, node.col_offset, text))
    return mutants


def draw(count, seed):
    """Return about so many mutants, in random order."""
    choose = random.Random(seed)
    drawn = []
    for folder, share in SHARES.items():
        mutants = mutants_of(folder)
        drawn += choose.sample(mutants, min(round(count * share / 120), len(mutants)))
    choose.shuffle(drawn)
    return drawn


class Change(ast.NodeTransformer):
    """Apply the change of a mutant to a tree."""

    def __init__(self, mutant):
        self.mutant = mutant
        self.is_done = False

    def visit(self, node):
        mutant = self.mutant
        place = getattr(node, 'lineno', None), getattr(node, 'col_offset', None)
        if self.is_done or place != (mutant.line, mutant.column):
            return self.generic_visit(node)
        if mutant.change not in changes_of(node):
            return self.generic_visit(node)

        self.is_done = True
        if mutant.change in ('never', 'always'):
            node.test = ast.Constant(mutant.change == 'always')
        elif mutant.change == 'without context':
            return node.body
        elif mutant.change == 'without call':
            return ast.Pass()
        elif mutant.change == 'equal':
            return ast.Constant(isinstance(node.ops[0], ast.Eq | ast.Is))
        else:
            del node.values[int(mutant.change.split()[-1])]
            if len(node.values) == 1:
                return node.values[0]
        return node


def changed(source, mutant):
    """Return the source with a mutant's change."""
    change = Change(mutant)
    tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
    assert change.is_done, mutant
    return ast.unparse(tree)


def stages(root, mutant):
    """Yield arguments of pytest: the nearest tests first."""
    module = Path(mutant.path).relative_to('torchgpipe')
    folder = root / 'tests' / module.parent
    near = {*folder.glob(f'test_{module.stem}.py'), *folder.glob(f'test_{module.stem}_*.py')}
    if near:
        yield sorted(map(str, near))
    top = module.parts[0]
    if top in ('engine', 'skip'):
        yield ['tests/test_equivalence.py', '-k', 'one_case']
    yield [f'tests/{top}']
    yield OTHERS[top]


def noticed(root, mutant):
    """Return the first test that fails with a mutant, or None."""
    path = root / mutant.path
    source = path.read_text()
    path.write_text(changed(source, mutant))
    environment = os.environ | {'PYTHONDONTWRITEBYTECODE': '1'}
    options = ['-q', '-x', '--whole', '-n', '2', '-p', 'no:cacheprovider', '--timeout', '120']
    try:
        for tests in stages(root, mutant):
            command = [sys.executable, '-m', 'pytest', *options, *tests]
            try:
                run = subprocess.run(
                    command,
                    cwd=root,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT,
                )
            except subprocess.TimeoutExpired:
                return 'no end'
            if run.returncode not in (0, NO_TESTS):
                failed = re.search(r'^(FAILED|ERROR) (.*)', run.stdout, re.M)
                return failed[2] if failed else f'exit code {run.returncode}'
        return None
    finally:
        path.write_text(source)


def main():
    """Run mutants, and print those that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=120, help='number of mutants')
    parser.add_argument('--seed', type=int, default=68, help='seed of the draw')
    parser.add_argument('--output', type=Path, default='mutants.jsonl', help='file of results')
    args = parser.parse_args()
    done = {}
    if args.output.exists():
        for line in args.output.read_text().splitlines():
            mutant, test = json.loads(line)
            done[Mutant(*mutant)] = test

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, 'project')
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns('.git', '__pycache__', 'build'))
        for mutant in draw(args.count, args.seed):
            if mutant not in done:
                done[mutant] = noticed(root, mutant)
                with args.output.open('a') as results:
                    print(json.dumps([mutant, done[mutant]]), file=results)
            print(*mutant, '->', done[mutant] or 'NOT NOTICED', flush=True)
    missed = [mutant for mutant, test in done.items() if test is None]
    print(f'{len(missed)} of {len(done)} mutants are not noticed')


if __name__ == '__main__':
    main()
