"""The matrix of releases: failures are detected, and all pages name the same releases."""

import re
import sys

import pytest

from tests.matrix import CORE, ROOT, Failed, Row, requirement
from torchgpipe.base.private import TESTED


class Scripted(Row):
    """A row whose commands print given outputs, or fail with them."""

    def __init__(self, folder, outcomes, release='floor'):
        super().__init__(sys.executable, release, folder, WHEEL)
        self.outcomes, self.commands = iter(outcomes), []

    def _run(self, *command, **options):
        self.commands.append([str(word) for word in command])
        outcome = next(self.outcomes)
        if isinstance(outcome, Failed):
            raise outcome
        return outcome


WHEEL = 'torchgpipe.whl'
# The environment, the package, versions, README: its code and two programs; extras, tests.
GOOD = ['', '', '2.9.0 3.11.7', '', '', '', '', '....\n5 passed, 2 skipped in 3.2s\n']
LACKS = 'ERROR: No matching distribution found for '


@pytest.mark.parametrize(
    'outcomes, good, cells',
    [
        (GOOD, True, ['2.9.0', '3.11.7', 'passed', '5 passed, 2 skipped']),
        (
            [*GOOD[:7], Failed('=== 1 failed, 4 passed in 3s ===\n')],
            False,
            ['2.9.0', '3.11.7', 'passed', '1 failed, 4 passed'],
        ),
        (
            [*GOOD[:7], Failed('Segmentation fault\n')],
            False,
            ['2.9.0', '3.11.7', 'passed', 'failed'],
        ),
        ([*GOOD[:3], Failed('AttributeError\n')], False, ['2.9.0', '3.11.7', 'failed', '']),
        ([*GOOD[:5], Failed('AttributeError\n')], False, ['2.9.0', '3.11.7', 'failed', '']),
        (
            ['', Failed(f'{LACKS}torch==2.9\n')],
            True,
            ['floor', sys.executable, 'the index has no torch==2.9', ''],
        ),
        (
            ['', Failed(f'{LACKS}torchgpipe\n')],
            False,
            ['floor', sys.executable, 'not installed', ''],
        ),
        (['', Failed('no space left\n')], False, ['floor', sys.executable, 'not installed', '']),
    ],
)
def test_failures_and_releases_that_the_index_lacks(outcomes, good, cells, tmp_path):
    row = Scripted(tmp_path, outcomes)
    assert row.run(whole=False) is good
    assert row.cells[:4] == cells


@pytest.mark.parametrize(
    'release, good',
    [('floor', True), ('pinned', True), ('newest', True), ('9.9', False), ('2.9', False)],
)
def test_who_may_lack_a_release(release, good, tmp_path):
    """In v0.8.0, ``python -m tests.matrix 9.9`` was no failure."""
    row = Scripted(tmp_path, ['', Failed(f'{LACKS}torch==9.9\n')], release)
    assert row.run(whole=False) is good
    assert row.cells[2] == 'the index has no torch==9.9'


@pytest.mark.parametrize('whole', [False, True])
def test_commands_of_a_release(whole, tmp_path):
    row = Scripted(tmp_path, GOOD)
    row.run(whole)
    _, first, _, page, program, ranks, second, tests = row.commands
    assert first[-2:] == [*requirement('floor'), WHEEL] and second[5] == f'{WHEEL}[tests]'
    assert 'to_sequential' in page[2] and 'check_parity' in page[2]
    assert program[1:] == ['with_torchgpipe.py']
    assert ranks[2] == 'torch.distributed.run' and ranks[-1] == 'with_pipelining.py'
    assert tests[-2:] == ['auto', '--whole'] if whole else tests[-len(CORE) :] == CORE
    assert 'torch==' not in (tmp_path / 'constraints.txt').read_text()


def test_all_that_is_said_of_releases_is_the_same():
    oldest, newest = TESTED
    assert requirement('floor') == [f'torch=={oldest}'] and requirement('newest') == []
    for page in ('README.md', 'README.ko.md'):
        assert re.findall(r'\d\.\d+', (ROOT / page).read_text().split('`torch`')[1])[:2] == [
            oldest,
            newest,
        ]
