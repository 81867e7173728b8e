"""The files of a training: checkpoints, logs and pictures, with damaged ones and missing parts."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import killing
from tests.trainer.tiny import (
    COMMAND,
    ROOT,
    TINY,
    assert_same,
    launched,
    lines_of,
    mesh_of,
    options_of,
    plain_curve,
    start,
)
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.trainer import train_gpt
from torchgpipe.trainer.prediction import settings_of
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.training_folder import TrainingFolder

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / 'saved').glob('step-*'))


def damage(path):
    file = next(path.glob('*.distcp'))
    file.write_bytes(file.read_bytes()[:-1] + b'?')


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(run, tmp_path, trained):
    for damaged in [
        damage,
        lambda path: next(path.glob('*.distcp')).unlink(),
        lambda path: (path / '.metadata').unlink(),
        lambda path: (path / '.metadata').write_text('x'),
        lambda path: (shutil.rmtree(path), path.write_text('a file')),
    ]:
        expected = lines_of(tmp_path / 'log')
        damaged(tmp_path / 'saved/step-6')
        code, out, err = run(*trained, '--resume')
        assert code == 0, err
        assert 'step-6 is not loaded' in err and 'continues after step 4' in out
        *others, last = names(tmp_path)
        assert others[:3] == ['step-2', 'step-4', 'step-6'] and last.startswith('step-6.damaged')
        assert_same(lines_of(tmp_path / 'log'), expected)
        assert 'continues after step 6' in run(*trained, '--resume')[1]


@pytest.mark.slow
def test_without_a_whole_checkpoint_nothing_begins_again(run, tmp_path, trained):
    before = (tmp_path / 'log').read_bytes()
    for step in (2, 4, 6):
        damage(tmp_path / f'saved/step-{step}')
    code, _, err = run(*trained, '--resume')
    assert code == 2 and 'no checkpoint in' in err
    assert names(tmp_path) == ['step-2', 'step-4', 'step-6']
    assert (tmp_path / 'log').read_bytes() == before


@pytest.mark.slow
def test_a_log_keeps_the_lines_of_an_older_training_and_a_folder_has_one_training(
    run, tmp_path, trained
):
    before = (tmp_path / 'log').read_text()
    with TrainingFolder(str(tmp_path / 'saved')).locked():
        code, _, err = run(*trained, '--resume')
    assert code == 2 and 'is in use by process' in err
    code, _, err = run(*trained, '--save', tmp_path / 'mistyped', '--resume')
    assert code == 0, err
    assert (tmp_path / 'log').read_text().startswith(before)
    assert len(lines_of(tmp_path / 'log')) == 12 and len(lines_of(tmp_path / 'log.0')) == 12


def stopped(attempt, lock):
    """Stop this rank, as if its disk did not respond."""
    print('stopped', flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_ranks_hold_the_folder_of_a_launcher_that_was_killed(tmp_path):
    program = (
        'import sys\n'
        'from torchgpipe.trainer.launch import launch\n'
        'from torchgpipe.trainer.training_folder import TrainingFolder\n'
        'from tests.trainer.test_train_gpt_files import stopped\n'
        'with TrainingFolder(sys.argv[1]).locked() as lock:\n'
        '    launch(stopped, lock, world=1)\n'
    )
    folder = TrainingFolder(str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, '-c', program, tmp_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == b'stopped\n'
    rank = Path(f'/proc/{process.pid}/task/{process.pid}/children')
    server = [int(pid) for pid in rank.read_text().split()]
    ranks = [
        int(pid)
        for one in server
        for pid in Path(f'/proc/{one}/task/{one}/children').read_text().split()
    ]
    process.kill()
    process.wait()
    with pytest.raises(Exception, match='is in use by process'):
        with folder.locked():
            pass
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    process.communicate()  # until the last process has ended
    with folder.locked():
        pass


def failing(attempt, config, training):
    """Train, but validations fail, for the first time."""

    def validate(*args):
        raise RuntimeError('no validation')

    if killing.once(config.output):
        train_gpt.validate = validate
    train_gpt.train(config, training)


@pytest.mark.slow
@pytest.mark.parametrize('options', [['--async-save'], ['--log-interval', 3]])
def test_a_checkpoint_comes_before_the_validation_of_its_step(tmp_path, options):
    config = options_of(
        tmp_path, *mesh_of(2, 1, 1), '--save', tmp_path / 'saved', *options, '--save-interval', 3
    )
    with pytest.raises(SystemExit):
        start(failing, config)
    assert names(tmp_path) == ['step-3'] and len(lines_of(tmp_path / 'log')) in (0, 2)
    lines = launched(
        tmp_path, *mesh_of(1, 1, 1), '--save', tmp_path / 'saved', '--resume', *options
    )
    expected = plain_curve(config, 6)
    assert_same(lines, expected if len(lines) == 6 else [expected[2], expected[5]])


@pytest.mark.slow
def test_validations_of_samples_that_replicas_cannot_share(tmp_path):
    """Of 142 samples, neither batches nor replicas take an equal part."""
    for data, pipe, batch, size, experts in [(3, 1, 18, 1, 3), (2, 2, 18, 3, 0)]:
        sizes = f'--global-batch-size {batch} --experts {experts}'
        words = f'{sizes} --vocab-size 257 --eval-batches 0 --steps 3'.split()
        alone = launched(tmp_path / 'alone', *words, '--micro-batch-size', size * data)
        spread = launched(
            tmp_path / 'spread', *words, *mesh_of(data, pipe, 1), '--micro-batch-size', size
        )
        assert_same(spread, alone)
        assert 'val_loss' in alone[-1]


@pytest.mark.slow
def test_samples_of_lost_steps_are_dropped_on_a_mesh_with_fewer_replicas(tmp_path):
    words = ['--save', tmp_path / 'saved', '--save-interval', 2, '--log-samples']
    config = options_of(tmp_path, *mesh_of(2, 1, 1), *words)
    with pytest.raises(SystemExit):
        # After step 3, which the checkpoint does not have.
        start(killing.killed_at_a_step, config, (0, 4))
    launched(tmp_path, *words, '--resume')
    starts = [
        start
        for path in ('log.0', 'log.1')
        for line in lines_of(tmp_path / path)
        for start in line['starts']
    ]
    assert len(starts) == len({*starts}) == 6 * 16


@pytest.mark.slow
def test_a_training_has_the_balance_of_its_settings(tmp_path):
    args = ['--pipe', 2, '--schedule', 'interleaved', '--virtual', 3, '--n-layer', 8]
    settings = settings_of(options_of(tmp_path, *args))
    words = [*COMMAND, *TINY, '--output', tmp_path, '--steps', 1, *args]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'balance {[*settings.balance]}, schedule {settings.schedule}' in done.stdout


@pytest.mark.slow
def test_a_part_of_a_checkpoint_is_damaged_on_another_rank(tmp_path):
    words = [*mesh_of(2, 1, 1), '--save', tmp_path / 'saved', '--save-interval', 3]
    expected = launched(tmp_path, *words)
    for file in (tmp_path / 'saved/step-6').glob('__1*.distcp'):
        file.write_bytes(file.read_bytes() + b'?')
    assert_same(launched(tmp_path, *words, '--resume'), expected)
    assert names(tmp_path) == ['step-3', 'step-6', 'step-6.damaged']


def test_a_checkpoint_is_written_before_a_validation_begins(run, tmp_path, monkeypatch):
    """Its ranks might end while they write, because the validation fails."""
    saves = []
    save = DistributedGPipe.save

    def recorded(self, folder, *args, wait, **options):
        saves.append((folder.name, wait))
        return save(self, folder, *args, wait=wait, **options)

    monkeypatch.setattr(DistributedGPipe, 'save', recorded)
    words = ['--save', tmp_path / 'saved', '--save-interval', 2, '--async-save']
    code, _, err = run(*TINY, '--output', tmp_path, *words, '--eval-interval', 4)
    assert code == 0, err
    assert saves == [('step-2', False), ('step-4', True), ('step-6', True)]
