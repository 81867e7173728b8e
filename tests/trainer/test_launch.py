"""Processes of ranks: all of them end when one fails, and with their parent."""

import os
import signal
import subprocess
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.trainer import killing
from tests.trainer.tiny import COMMAND, ROOT, TINY, lines_of, mesh_of, options_of, start
from torchgpipe.trainer import command
from torchgpipe.trainer.launch import launch, starting_ranks
from torchgpipe.trainer.processes import is_available

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


def forks(attempt, output):
    """End the server that forks ranks, on the first one, and wait."""
    Path(output, os.environ['RANK']).write_text(str(os.getpid()))
    while len(list(Path(output).glob('[01]'))) < 2:
        time.sleep(0.01)
    if os.environ['RANK'] == '0' and killing.once(output):
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.slow
def test_no_rank_outlives_its_attempt(tmp_path):
    with pytest.raises(SystemExit):
        launch(forks, str(tmp_path), world=2)
    for rank in '01':
        path = Path('/proc', (tmp_path / rank).read_text(), 'stat')
        for _ in range(1000):  # It is a zombie for a moment.
            if not path.exists() or ') Z ' in path.read_text():
                break
            time.sleep(0.01)
        else:
            pytest.fail(f'rank {rank} lives on')


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    words = [*COMMAND, *TINY, '--data', 2, '--steps', 10**6, '--output', tmp_path]
    process = subprocess.Popen(
        [*map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    while b'step     2' not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate(timeout=200)  # until no rank can write any more


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
        _, err = process.communicate(timeout=200)
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
