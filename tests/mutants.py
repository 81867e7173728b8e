"""Mutants: ``python -m tests.mutants`` takes guards out of the package, and runs the tests.

It draws conditions, waits, locks and comparisons of versions by a seed. It copies the project, and
runs all tests once with a probe at each of them (`tests.probes`). Then it takes them out one by
one, and runs the tests that reach the place until one fails, starting with the module's tests. It
prints the mutants that no test notices. Results are in a folder, so a run may be interrupted.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests import probes

ROOT = Path(__file__).resolve().parent.parent

#: The folders of mutants, with their shares of 120.
SHARES = {'engine': 48, 'distributed': 28, 'sequential': 18, 'plan': 16, 'skip': 10}

#: Contexts that are locks, streams or modes, and calls that wait, free or check.
CONTEXTS = re.compile(r'lock|held|unseen|use_|stream|no_grad|substituted')
CALLS = re.compile(r'wait|synchronize|record|acquire|release|join|clear|\.set\(|check|register')

#: Seconds for the tests of one mutant. A mutant that hangs is noticed.
TIMEOUT = 1500

#: The number of tests that are run first for each mutant. The others run for those that remain.
NEAREST = 150

#: The command of all tests.
PYTEST = [sys.executable, '-m', 'pytest', '-q', '--whole', '-p', 'no:cacheprovider']


class Mutant(NamedTuple):
    """A change of one node of a file."""

    path: str
    change: str
    line: int
    column: int
    text: str

    @property
    def place(self):
        return self.path, self.line, self.column


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
    """Change the nodes of some mutants of a file.

    Args:
        mutants: The mutants; of several at one place, the last one counts
        change: A function of a node and its mutant that returns the node's replacement
    """

    def __init__(self, mutants, change):
        self.mutants = {(mutant.line, mutant.column): mutant for mutant in mutants}
        self.change = change

    def visit(self, node):
        place = getattr(node, 'lineno', None), getattr(node, 'col_offset', None)
        mutant = self.mutants.get(place)
        is_mutated = mutant is not None and mutant.change in changes_of(node)
        if is_mutated:
            del self.mutants[place]
        node = self.generic_visit(node)
        if is_mutated:
            return self.change(node, mutant)
        return node


def mutate(node, mutant):
    """Return a node with a mutant's change."""
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


def changed(source, mutants, change):
    """Return the source with the changes of some of its mutants."""
    transformer = Change(mutants, change)
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(source)))
    assert not transformer.mutants, transformer.mutants
    return ast.unparse(tree)


def pytest_of(root, arguments, **variables):
    """Run pytest in a copy of the project, where processes find the copy's package."""
    variables |= {'PYTHONDONTWRITEBYTECODE': '1', 'PYTHONPATH': str(root)}
    return subprocess.run(
        [*PYTEST, *arguments],
        cwd=root,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT if '-x' in arguments else None,
    )


def reaching(root, mutants, folder):
    """Return the tests that reach each mutant, from one run of all tests."""
    numbers = {}
    for mutant in mutants:
        numbers.setdefault(mutant.place, len(numbers))

    def probe(node, mutant):
        number = numbers[mutant.place]
        call = ast.parse(f'__import__("torchgpipe.probes").probes.reach({number})').body[0]
        if isinstance(node, ast.stmt):
            return [call, node]
        pair = ast.Tuple([call.value, node], ast.Load())
        return ast.Subscript(pair, ast.Constant(1), ast.Load())

    output = folder / 'output.txt'
    if not output.exists():  # A run that was interrupted has a part of the records.
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copy(root / 'tests/probes.py', root / 'torchgpipe/probes.py')
        sources = {mutant.path: (root / mutant.path).read_text() for mutant in mutants}
        for path, source in sources.items():
            of_file = [mutant for mutant in mutants if mutant.path == path]
            (root / path).write_text(changed(source, of_file, probe))

        folder.mkdir()
        run = pytest_of(root, ['-n', '2', '-p', 'tests.probes'], **{probes.VARIABLE: str(folder)})
        output.write_text(run.stdout)

        for path, source in sources.items():
            (root / path).write_text(source)

    records = probes.records_of(folder)
    return {mutant: records.get(numbers[mutant.place], set()) for mutant in mutants}


def nearest_first(tests, mutant):
    """Return the tests that reach a mutant, starting with the tests of its module."""
    module = Path(mutant.path).relative_to('torchgpipe')

    def distance(test):
        is_of_module = f'{module.parent}/test_{module.stem}' in test
        return not is_of_module, f'/{module.parts[0]}/' not in test, test

    # A line that runs at import is reached by no test in particular.
    return sorted(tests - {''} or {f'tests/{module.parts[0]}'}, key=distance)


def noticed(root, mutant, tests):
    """Return the first of some tests that fails with a mutant, or None."""
    path = root / mutant.path
    source = path.read_text()
    path.write_text(changed(source, [mutant], mutate))
    try:
        run = pytest_of(root, ['-x', '--timeout', '120', *tests])
    except subprocess.TimeoutExpired:
        return 'no end'
    finally:
        path.write_text(source)
    if run.returncode == 0:
        return None
    failed = re.search(r'^(FAILED|ERROR) (.*)', run.stdout, re.M)
    return failed[2] if failed else f'exit code {run.returncode}'


class Results:
    """The results of mutants, in a file."""

    def __init__(self, path):
        self.path = path
        #: The number of tests that have run, and the test that failed or None.
        self.of = {}
        if path.exists():
            for line in path.read_text().splitlines():
                mutant, count, test = json.loads(line)
                self.of[Mutant(*mutant)] = count, test

    def add(self, mutant, count, test):
        """Add or replace a result."""
        self.of[mutant] = count, test
        with self.path.open('a') as lines:
            print(json.dumps([mutant, count, test]), file=lines)
        print(*mutant, f'{count} tests', '->', test or 'NOT NOTICED', flush=True)


def copy_of_project(folder):
    """Copy the project, and return the copy's path."""
    root = Path(folder, 'project')
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns('.git', '__pycache__', 'build'))
    return root


def main():
    """Run mutants, and print those that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--count', type=int, default=120, help='number of mutants')
    parser.add_argument('--seed', type=int, default=68, help='seed of the draw')
    parser.add_argument('--output', type=Path, default='mutants', help='folder of results')
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = Results(args.output / 'results.jsonl')
    mutants = draw(args.count, args.seed)

    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        roots = SimpleQueue()
        for folder in (first, second):
            roots.put(copy_of_project(folder))
        root = roots.get()
        tests = reaching(root, mutants, (args.output / 'probes').resolve())
        roots.put(root)

        def run_more(mutant, most):
            count, test = results.of.get(mutant, (0, None))
            ordered = nearest_first(tests[mutant], mutant)[:most]
            if test is not None or count >= len(ordered):
                return
            root = roots.get()
            test = noticed(root, mutant, ordered[count:])
            roots.put(root)
            results.add(mutant, len(ordered), test)

        for most in (NEAREST, None):
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(run_more, mutants, [most] * len(mutants)))

    missed = [mutant for mutant in mutants if results.of[mutant][1] is None]
    print(f'{len(missed)} of {len(mutants)} mutants are not noticed')


if __name__ == '__main__':
    main()
