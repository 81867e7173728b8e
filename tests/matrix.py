"""The suite on several releases of PyTorch: ``python -m tests.matrix`` prints a table.

Each row has its own virtual environment, and all rows run concurrently. They install one wheel,
which is built before, because builds in one folder would disturb each other. In an empty folder,
the README's code runs, a comparison and a step. Then the core of the suite runs, or all of it. A
release that this project names itself may be missing in the package index, which the table then
says. A release that the user names by its number has to be there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The tests that depend most on PyTorch, in less than three minutes.
CORE = [
    'tests/test_equivalence.py',
    'tests/base/test_private.py',
    'tests/engine/test_partition_compiled.py',
    'tests/test_gpipe.py',
    'tests/test_batchnorm.py',
    'tests/model/test_materialize.py',
    'tests/engine/test_workers_interpreter.py',
    'tests/engine/test_scheduled_numbers.py',
    'tests/engine/test_policy.py',
    'tests/engine/checkpoint/test_random.py',
    'tests/engine/checkpoint/test_selection.py',
    'tests/engine/checkpoint/test_state.py',
    'tests/base/test_context_thread_state.py',
    'tests/dry_run/test_counters.py',
    'tests/dry_run/test_rehearsal.py',
    'tests/schedule/test_schedule.py',
    'tests/sequential/test_record.py',
    'tests/shard/test_averaging_scaler.py',
    'tests/skip/test_gpipe_gradients.py',
]

#: The next steps of a new user after the README's code.
MORE = """
from torchgpipe.testing import check_parity

layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
options = {'balance': [2, 1], 'devices': ['cpu:0', 'cpu:1'], 'chunks': 3}
parity = check_parity(layers, torch.rand(6, 8), **options)
assert parity.equal, parity
model = GPipe(layers, **options)
loss = model.step(torch.rand(6, 8), torch.rand(6, 4), nn.functional.mse_loss)
assert loss > 0 and all(p.grad is not None for p in model.parameters())
"""


class Failed(Exception):
    """A command failed, or the index does not have the release that it installs."""


#: Releases that this project names itself.
NAMED = ['floor', 'pinned', 'newest']


def requirement(release):
    """Return pip's requirement: the oldest release, the pinned one, the newest or another."""
    if release == 'newest':
        return []
    if release == 'floor':
        release = re.search(r'^ +torch>=(.*)$', (ROOT / 'setup.cfg').read_text(), re.M)[1]
    elif release == 'pinned':
        release = re.search(r'^torch==(.*)$', (ROOT / 'constraints.txt').read_text(), re.M)[1]
    return [f'torch=={release}']


class Row:
    """One release of PyTorch, and one Python.

    Args:
        python: The Python.
        release: The release.
        folder: Where its virtual environment will be.
        package: Path of the wheel to install.
    """

    def __init__(self, python, release, folder, package):
        self.cells = [release, python, '', '', '']
        self._folder, self._release, self._package = folder, release, package
        bin = folder / 'venv' / 'bin'
        self._python = bin / 'python'
        path = f'{bin}{os.pathsep}{os.environ["PATH"]}'
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ('PYTHONPATH', 'VIRTUAL_ENV')
        } | {'PATH': path}

    def _run(self, *command, cwd=ROOT, **environment):
        """Run a command. Show and return its output."""
        self._print('$', *command)
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env=self._environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        lines = []
        for line in process.stdout:
            self._print(line.rstrip())
            lines.append(line)
        if process.wait():
            raise Failed(''.join(lines))
        return ''.join(lines)

    def _print(self, *words):
        print(f'{self._release:>7}:', *words, flush=True)

    def run(self, whole):
        """Fill the cells; return whether nothing failed."""
        begin, cells = time.monotonic(), self.cells
        release, python, *_ = cells
        try:
            self._run(python, '-m', 'venv', self._folder / 'venv')
            self._install(*requirement(release), self._package)
            cells[0], cells[1] = self._run(
                self._python,
                '-c',
                'import platform, torch; print(torch.__version__, platform.python_version())',
            ).split()[-2:]
            cells[2] = 'failed'
            self._read_me()
            cells[2], cells[3] = 'passed', 'failed'
            self._install(f'{self._package}[tests]', '-c', self._constraints())
            cells[3] = self._test(['--whole'] if whole else CORE, 'auto' if whole else 'off')
            return True
        except Failed as failed:
            found = re.search(r'No matching distribution found for (\S+)', str(failed))
            if found and not found[1].startswith('torchgpipe'):
                cells[2] = f'the index has no {found[1]}'
                return release in NAMED
            numbers = re.findall(r'^=* ?(\d+ failed.*?) in \S+s', str(failed), re.M)
            cells[3] = numbers[-1] if numbers else cells[3]
            cells[2] = cells[2] or 'not installed'
            return False
        finally:
            cells[4] = f'{(time.monotonic() - begin) / 60:.1f} min'

    def _install(self, *what):
        self._run(self._python, '-m', 'pip', 'install', '-q', *what)

    def _constraints(self):
        path, pins = self._folder / 'constraints.txt', (ROOT / 'constraints.txt').read_text()
        path.write_text(re.sub(r'^torch==.*\n', '', pins, flags=re.M))
        return path

    def _read_me(self):
        empty = self._folder / 'empty'
        empty.mkdir()
        blocks = re.findall(
            r'^```(python|sh)\n(.*?)^```', (ROOT / 'README.md').read_text(), re.M | re.S
        )
        code, files, commands = '', [], []
        for language, text in blocks:
            file = re.match(r'# (\w+\.py)\n', text)
            if language == 'sh':
                commands.append(text.split())
            elif file:
                (empty / file[1]).write_text(text)
                files.append(file[1])
            else:
                code += text
        self._run(self._python, '-c', code + MORE, cwd=empty)
        launchers = {'python': [], 'torchrun': ['-m', 'torch.distributed.run']}
        for program, *arguments in commands:
            if arguments[-1] in files:
                self._run(self._python, *launchers[program], *arguments, cwd=empty)

    def _test(self, what, sim):
        printed = self._run(
            self._python, '-m', 'pytest', '-q', '-rs', '-n', 'auto', *what, TORCHGPIPE_SIM=sim
        )
        return re.findall(r'^=* ?(\d+ passed.*?) in \S+s', printed, re.M)[-1]


def build(folder):
    """Return the path of the package's wheel, built into a folder."""
    shutil.rmtree(ROOT / 'build', ignore_errors=True)  # It may have modules of older versions.
    subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', folder, ROOT], check=True
    )
    return next(Path(folder).glob('*.whl'))


def main():
    """Run all rows, print the table, and fail if a row did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        'releases',
        nargs='*',
        default=NAMED,
        help="versions of torch; 'floor', 'pinned' and 'newest' if none is named",
    )
    parser.add_argument('--python', action='append', help='a Python, this one if none is named')
    parser.add_argument('--whole', action='store_true', help='run all tests, not their core')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        package = build(folder)
        rows = [
            Row(python, release, Path(folder, str(k), release), package)
            for k, python in enumerate(args.python or [sys.executable])
            for release in args.releases
        ]
        with ThreadPoolExecutor(len(rows)) as pool:
            good = [*pool.map(lambda row: row.run(args.whole), rows)]
    for cells in [
        ['torch', 'Python', 'README', 'tests', 'took'],
        ['---'] * 5,
        *(row.cells for row in rows),
    ]:
        print(f'| {" | ".join(cells)} |')
    sys.exit(not all(good))


if __name__ == '__main__':
    main()
