"""The folder of a training: whose it is, and which files in it a training deletes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from torchgpipe.trainer.training_folder import TrainingFolder

OPTIONS = {'depth': 4, 'tokens': 100, 'dtype': 'float32'}

HOLD = """
import sys
from torchgpipe.trainer.training_folder import TrainingFolder

with TrainingFolder(sys.argv[1]).locked():
    print('locked', flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    return TrainingFolder(str(tmp_path / 'saved'))


def checkpoint(folder, name):
    """Make a folder that looks like a checkpoint."""
    path = folder.path / name
    path.mkdir(parents=True)
    for file in ('.metadata', '__0_0.distcp'):
        (path / file).touch()
    return path


def names(folder):
    return sorted(path.name for path in folder.path.glob('step*'))


def test_only_old_checkpoints_of_the_training_are_deleted(folder, tmp_path):
    kept = ['step-300-best', 'step-0100', 'step-', 'step-x', 'step-1e3', 'step-100.old']
    for name in [
        *kept,
        'step-100',
        'step-100.saving',
        'step-200',
        'step-200.before',
        'step-300',
        'step-400',
        'step-500.saving',
    ]:
        checkpoint(folder, name)
    mine = checkpoint(folder, 'step-7')
    (mine / 'notes.txt').touch()
    (folder.path / 'step-8').write_text('a file')
    (folder.path / 'step-9').symlink_to(tmp_path)
    folder.delete_old(2, 500)
    assert names(folder) == sorted(
        [*kept, 'step-300', 'step-400', 'step-500.saving', 'step-7', 'step-8', 'step-9']
    )
    assert tmp_path.exists()


def test_steps_are_in_the_order_of_numbers_and_include_replaced_checkpoints(folder):
    for name in ('step-9', 'step-10', 'step-11.before', 'step-12.saving', 'step-9-best'):
        checkpoint(folder, name)
    assert folder.steps() == [9, 10, 11]
    assert TrainingFolder(str(folder.path / 'nothing')).steps() == []


def test_a_checkpoint_that_is_set_aside_keeps_its_files(folder):
    for k in range(3):
        checkpoint(folder, 'step-9')
        assert folder.set_aside(9).joinpath('.metadata').exists()
    checkpoint(folder, 'step-10.before')
    folder.set_aside(10)
    assert names(folder) == [
        'step-10.damaged',
        'step-9.damaged',
        'step-9.damaged1',
        'step-9.damaged2',
    ]
    assert folder.steps() == []


def test_a_training_begins_in_an_empty_folder_and_continues_in_its_own(folder):
    name = folder.check(OPTIONS, False, 10)
    folder.describe({**OPTIONS, 'name': name})
    assert folder.check(OPTIONS, False, 10) == folder.check(OPTIONS, True, 10) == name
    assert TrainingFolder(str(folder.path / 'other')).check(OPTIONS, False, 10) != name
    checkpoint(folder, 'step-10')
    assert folder.check(OPTIONS, True, 10) == name
    with pytest.raises(click.UsageError, match='has checkpoints already: give --resume'):
        folder.check(OPTIONS, False, 10)
    with pytest.raises(click.UsageError, match='step-10, but --steps is 9: give 10 steps or more'):
        folder.check(OPTIONS, True, 9)


def test_a_folder_of_another_training_is_refused(folder):
    folder.describe({**OPTIONS, 'name': 'x'})
    for change, reason in (
        ({'depth': 5}, 'depth 4 there, 5 here'),
        ({'dtype': 'float64'}, 'dtype float32 there'),
        ({'experts': 2}, 'experts None there, 2 here'),
    ):
        with pytest.raises(click.UsageError, match=reason):
            folder.check({**OPTIONS, **change}, True, 10)


def test_a_training_of_an_earlier_version_continues(folder):
    folder.describe({'depth': 4, 'tokens': 100})
    assert folder.check({**OPTIONS, 'weight_decay': 0.1, 'digest': 7}, True, 10) == ''


def test_a_file_without_a_description_is_refused(folder):
    folder.path.mkdir()
    for text in ('[]', '3', '"x"', '{"voc', ''):
        (folder.path / 'training.json').write_text(text)
        with pytest.raises(click.UsageError, match='training.json'):
            folder.check(OPTIONS, True, 10)


def test_checkpoints_without_a_description_are_refused(folder):
    for name in ('step-900', 'step-900.before'):
        path = checkpoint(folder, name)
        for resume in (False, True):
            with pytest.raises(click.UsageError, match='has step-900, but no training.json'):
                folder.check(OPTIONS, resume, 1000)
        shutil.rmtree(path)


def hold(folder):
    process = subprocess.Popen(
        [sys.executable, '-c', HOLD, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() == b'locked\n'
    return process


@pytest.mark.parametrize('end', ['kill', 'close'])
def test_one_process_has_the_folder(folder, end):
    process = hold(folder)
    with pytest.raises(click.UsageError, match=f'is in use by process {process.pid} on '):
        with folder.locked():
            pass
    if end == 'kill':
        process.kill()
    process.communicate()
    with folder.locked():
        assert f'process {os.getpid()} ' in (folder.path / 'training.lock').read_text()
    with folder.locked():  # and again in this process
        pass


def test_a_copied_lock_locks_nothing(folder, tmp_path):
    process = hold(folder)
    copy = TrainingFolder(str(tmp_path / 'copy'))
    copy.path.mkdir()
    (copy.path / 'training.lock').write_bytes((folder.path / 'training.lock').read_bytes())
    with copy.locked():
        pass
    process.communicate()


def test_a_file_system_without_locks_gets_a_word(folder, monkeypatch, capsys):
    def flock(*args):
        raise OSError(95, 'Operation not supported')

    monkeypatch.setattr('torchgpipe.trainer.training_folder.fcntl.flock', flock)
    with folder.locked():
        assert 'has no lock (Operation not supported)' in capsys.readouterr().err


def test_the_description_is_json(folder):
    folder.describe(OPTIONS)
    assert json.loads((folder.path / 'training.json').read_text()) == OPTIONS
