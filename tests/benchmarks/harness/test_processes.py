"""Processes of torch.distributed.pipelining: they answer, or are heard of; none is left."""
import os
import signal
import subprocess
import sys

import click
import pytest

from benchmarks.harness import processes
from benchmarks.harness.page import PAGE
from benchmarks.harness.processes import Processes, is_available

pytestmark = [pytest.mark.distributed,
              pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture
def started():
    """Two processes, and the process objects of these."""
    before = {*processes.multiprocessing.active_children()}
    with Processes(2, 'mlp', 2, 1, 2, ['Schedule1F1B', 'ScheduleGPipe']) as found:
        children = sorted({*processes.multiprocessing.active_children()} - before,
                          key=lambda process: process.pid)
        yield found, children
    assert not any(process.is_alive() for process in children)


def test_they_take_a_step(started):
    found, _ = started
    for name in ('Schedule1F1B', 'ScheduleGPipe', 'Schedule1F1B'):
        first, last = found.step(name)
        assert first.begin < first.end and last.begin < last.end
        assert first.loss is None and last.loss == pytest.approx(found.step(name)[1].loss)
        assert first.peak is None
    peaks = [[answer.peak for answer in found.step(name, count_memory=True)]
             for name in ('Schedule1F1B', 'ScheduleGPipe')]
    assert 0 < peaks[0][1] < peaks[1][1]  # One micro-batch in the last stage, not both.


def test_an_error_in_one_is_an_error_here(started):
    with pytest.raises(click.ClickException, match="process [01] of 2: KeyError: 'Schedule2F2B'"):
        started[0].step('Schedule2F2B')


def test_when_all_were_killed_none_is_waited_for(started):
    found, children = started
    for process in children:
        process.kill()
        process.join()
    with pytest.raises(click.ClickException, match='process [01] of 2: it ended'):
        found.step('Schedule1F1B')


def test_one_that_was_killed_before_it_read_is_missed(started):
    found, children = started
    os.kill(children[1].pid, signal.SIGSTOP)
    [*found._pipes][1].send(('Schedule1F1B', False))
    children[1].kill()
    children[1].join()
    with pytest.raises(click.ClickException, match='process [01] of 2: '):
        found.step('Schedule1F1B')


def test_one_that_hangs_is_not_waited_for_without_end(started, monkeypatch):
    found, children = started
    monkeypatch.setattr(processes, 'PATIENCE', .05)
    os.kill(children[1].pid, signal.SIGSTOP)
    with pytest.raises(click.ClickException, match='no process has answered for 0.1 seconds'):
        found.step('Schedule1F1B')


#: Run the command line, and say when the processes are at work.
TELLING = """
import runpy
from benchmarks.harness.processes import Processes

step = Processes.step
Processes.step = lambda *args: (print('step', flush=True), step(*args))[1]
if __name__ == '__main__':
    runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)
"""


@pytest.mark.parametrize('number, code, last', [
    (signal.SIGINT, 130, 'Stopped.\n'), (signal.SIGKILL, -signal.SIGKILL, '')])
def test_none_is_left_when_the_command_is_stopped(tmp_path, number, code, last):
    process = subprocess.Popen(
        [sys.executable, '-c', TELLING, 'schedules', '--stack', 'mlp', '--chunks', '2',
         '--rounds', '1000', '--milliseconds', '.001', '--output', str(tmp_path)],
        cwd=PAGE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while process.stdout.readline() != 'step\n':
        assert process.poll() is None
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    # It ends when nobody has these pipes any more.
    out, err = process.communicate(timeout=100)
    assert process.returncode == code and err.endswith(last) and 'Traceback' not in err


#: An interrupt as soon as a process was started.
INTERRUPTED = """
from multiprocessing.context import SpawnProcess
from benchmarks.harness.processes import Processes

start = SpawnProcess.start

def interrupted(process):
    start(process)
    raise KeyboardInterrupt

SpawnProcess.start = interrupted
if __name__ == '__main__':
    with Processes(2, 'mlp', 2, 1, 2, []):
        pass
"""


def test_none_is_left_after_an_interrupt_at_the_start():
    process = subprocess.run([sys.executable, '-c', INTERRUPTED], cwd=PAGE.parents[1],
                             capture_output=True, text=True, timeout=100)
    assert process.returncode and 'KeyboardInterrupt' in process.stderr
