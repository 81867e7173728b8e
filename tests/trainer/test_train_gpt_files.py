"""The files of a training: checkpoints, logs and pictures, with damaged ones and missing parts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from tests.trainer import killing
from tests.trainer.test_train_gpt import (
    COMMAND,
    ROOT,
    TINY,
    assert_same,
    launched,
    lines_of,
    mesh_of,
    options_of,
    plain_curve,
    run_tiny,
    start,
)
from torchgpipe.trainer import command, train_gpt
from torchgpipe.trainer.gpt import parameter_counts
from torchgpipe.trainer.launch import starting_ranks
from torchgpipe.trainer.prediction import settings_of
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.training_folder import TrainingFolder

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


@pytest.fixture
def trained(run, tmp_path):
    """Train for some steps with checkpoints and a log; return the options."""
    files = ['--output', tmp_path, '--log', tmp_path / 'log', '--save', tmp_path / 'saved']
    words = [*TINY, *files, *'--save-interval 2 --keep-last 9 --log-samples'.split()]
    assert run(*words)[0] == 0
    return words


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


def test_a_training_continues_as_it_began(run, tmp_path, trained):
    for args, reason in [
        (['--steps', 5], 'step-6, but --steps is 5'),
        (['--weight-decay', 0.2], 'weight_decay 0.1 the'),
        (['--dtype', 'float32'], 'dtype float64 there'),
        (['--log', '/'], 'cannot write to the log'),
        (['--log', ROOT / 'README.md'], 'is no log of JSON lines'),
        (['--seed', 1], 'seed 0 there'),
    ]:
        before = {
            path: path.read_bytes()
            for path in tmp_path.rglob('*')
            if path.is_file() and path.name != 'training.lock'
        }
        code, out, err = run(*trained, '--resume', *args)
        assert code == 2 and not out and reason in err and err.count('\n') == 1
        assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.slow
def test_another_text_of_the_same_length_is_refused(run, tmp_path):
    text = tmp_path / 'text'
    text.write_text('abcd' * 999)
    words = '--steps 1 --save', tmp_path / 'saved', '--text', text
    assert run_tiny(run, tmp_path, *words)[0] == 0
    for k in (0, 1998, 3995):
        changed = bytearray(b'abcd' * 999)
        changed[k] += 1
        text.write_bytes(changed)
        code, _, err = run_tiny(run, tmp_path, *words, '--resume')
        assert code == 2 and 'digest' in err
    text.write_text('abcd' * 999)
    assert run_tiny(run, tmp_path, *words, '--resume')[0] == 0


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
def test_a_terminal_without_unicode(tmp_path):
    for encoding, options in [('latin-1', ['--data', 2]), ('ascii', ['--dry-run'])]:
        done = subprocess.run(
            [*map(str, (*COMMAND, *TINY, '--steps', 1, '--output', tmp_path, *options))],
            cwd=ROOT,
            capture_output=True,
            env={**os.environ, 'PYTHONIOENCODING': encoding},
        )
        assert done.returncode == 0, done.stderr
        assert b'train-gpt.png' in done.stdout or b'dry-run.png' in done.stdout


def test_results_without_matplotlib(run, tmp_path, monkeypatch):
    for words in [['--steps', 1, '--generate', 3], ['--dry-run']]:
        monkeypatch.setitem(sys.modules, 'matplotlib', None)
        monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
        code, out, err = run(*TINY, '--output', tmp_path, *words)
        assert code == 0 and 'there is no picture: ' in err
        assert 'validation loss' in out or json.loads((tmp_path / 'dry-run.json').read_text())


def test_a_text_of_a_small_vocabulary(run, tmp_path):
    options = '--steps 1 --generate 5 --mock-data --vocab-size 8'
    code, out, err = run_tiny(run, tmp_path, options)
    assert code == 0, err
    tokens = json.loads(out.splitlines()[-1])
    assert len(tokens) == 5 and max(tokens) < 8


def test_a_rank_without_a_world(run, tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '0')
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    code, _, err = run(*TINY, '--output', tmp_path)
    assert code == 2 and 'RANK is set, but WORLD_SIZE is no number' in err


@pytest.mark.slow
def test_a_dry_run_has_the_stages_of_the_training(run, tmp_path):
    for args, stages in [
        (['--offload', '--n-layer', 3], 5),
        (['--pipe', 4, '--n-layer', 2], 4),
        (['--pipe', 2, '--schedule', 'interleaved', '--virtual', 3, '--n-layer', 8], 6),
        (['--pipe', 2, '--schedule', 'zb-v'], 4),
    ]:
        code, _, err = run(*TINY, '--output', tmp_path, *args, '--dry-run')
        assert code == 0, err
        report = json.loads((tmp_path / 'dry-run.json').read_text())
        config = options_of(tmp_path, *args)
        settings = settings_of(config)
        assert report['balance'] == [*settings.balance] and len(settings.balance) == stages
        assert [f'cpu:{place}' for place in report['places']] == [*settings.devices]
        assert sum(settings.balance) == config.n_layer + 2


@pytest.mark.slow
def test_a_training_has_the_balance_of_its_settings(tmp_path):
    args = ['--pipe', 2, '--schedule', 'interleaved', '--virtual', 3, '--n-layer', 8]
    settings = settings_of(options_of(tmp_path, *args))
    words = [*COMMAND, *TINY, '--output', tmp_path, '--steps', 1, *args]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'balance {[*settings.balance]}, schedule {settings.schedule}' in done.stdout


def test_flops_count_the_router_of_experts(tmp_path):
    config = options_of(tmp_path, '--experts', 8)
    with torch.device('meta'):
        module = train_gpt.build_layers(config, config.n_layer)
    experts = module[1].experts
    unused = sum(x.numel() for name, x in experts.named_parameters() if name != 'router')
    total, used = parameter_counts(config.sizes, config.experts)
    assert total - used == config.n_layer * unused * 6 // 8


def serves(pid):
    """Return whether a process has started the server of ranks, which imports modules first."""
    children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    return any(b'forkserver' in Path(f'/proc/{child}/cmdline').read_bytes() for child in children)


@pytest.mark.slow
def test_ctrl_c_while_processes_start(tmp_path, ctrl_c):
    words = [*COMMAND, *TINY, '--data', 2, '--steps', 10**6, '--output', tmp_path]
    process = subprocess.Popen(
        [*map(str, words)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr.readline() == b'starting 2 processes\n'
    while not serves(process.pid):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # or it would go on for hours
        raise
    assert process.returncode == 130 and b'Traceback' not in err and err.endswith(b'Stopped.\n')


@pytest.mark.parametrize('interrupted', ['server', 0, 1])
def test_ctrl_c_waits_until_all_ranks_have_started(interrupted, monkeypatch, ctrl_c):
    started = []

    class Process:
        def __init__(self, rank):
            self.rank = rank

        def start(self):
            if self.rank == interrupted:
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            started.append(self.rank)

    monkeypatch.setattr(forkserver, 'ensure_running', Process('server').start)
    with pytest.raises(KeyboardInterrupt):
        with starting_ranks():
            for rank in range(2):
                Process(rank).start()
    assert started == ['server', 0, 1]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_starts_ranks(tmp_path, monkeypatch, capfd):
    """Another server starts the ranks."""
    run_server, killed = forkserver.ensure_running, []

    def ensure_running():
        run_server()
        if not killed:
            killed.append(forkserver._forkserver._forkserver_pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(forkserver, 'ensure_running', ensure_running)
    config = options_of(tmp_path, *mesh_of(2, 1, 1), '--save', tmp_path / 'saved', '--restarts', 1)
    start(command.run_rank, config, None)
    assert len(lines_of(tmp_path / 'log')) == 6
    assert forkserver._forkserver._forkserver_pid != killed[0]
    # A server that has already ended before a rank needs it costs no attempt.
    err = capfd.readouterr().err
    assert err.count('restart') == ('the process that starts' in err or 'with status 255' in err)


@pytest.mark.slow
def test_a_part_of_a_checkpoint_is_damaged_on_another_rank(tmp_path):
    words = [*mesh_of(2, 1, 1), '--save', tmp_path / 'saved', '--save-interval', 3]
    expected = launched(tmp_path, *words)
    for file in (tmp_path / 'saved/step-6').glob('__1*.distcp'):
        file.write_bytes(file.read_bytes() + b'?')
    assert_same(launched(tmp_path, *words, '--resume'), expected)
    assert names(tmp_path) == ['step-3', 'step-6', 'step-6.damaged']
