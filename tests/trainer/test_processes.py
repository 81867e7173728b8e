"""Processes with a worker each: they answer, or are heard of; none is left."""

import os
import signal
import subprocess
import sys

import click
import pytest
import torch
from torch import distributed

from benchmarks.harness.page import PAGE
from torchgpipe.trainer import processes
from torchgpipe.trainer.processes import Interval, Processes, is_available, seconds

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


class Adder:
    """A worker that adds up the terms of all workers."""

    def __init__(self, term):
        self.term = torch.tensor(term * (distributed.get_rank() + 1.0))

    def add(self, times=1):
        distributed.all_reduce(self.term)
        return distributed.get_rank(), torch.get_num_threads(), self.term.item() * times

    def cores(self):
        return os.sched_getaffinity(0)

    def fail(self):
        raise KeyError('no')


@pytest.fixture
def started():
    """Two processes, and the process objects of these."""
    before = {*processes.multiprocessing.active_children()}
    with Processes(2, Adder, 5) as found:
        children = sorted(
            {*processes.multiprocessing.active_children()} - before,
            key=lambda process: process.pid,
        )
        yield found, children
    assert not any(process.is_alive() for process in children)


@pytest.mark.slow
def test_they_do_as_told(started):
    assert started[0].call('add') == [(0, 1, 15.0), (1, 1, 15.0)]
    assert started[0].call('add', 2) == [(0, 1, 60.0), (1, 1, 60.0)]


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'), reason='needs affinities of Linux')
def test_each_is_on_a_core_if_it_is_pinned():
    own = sorted(os.sched_getaffinity(0))
    with Processes(3, Adder, 5, cores=range(3)) as found:
        assert found.call('cores') == [{own[rank % len(own)]} for rank in range(3)]
    with Processes(1, Adder, 5) as found:
        assert found.call('cores') == [{*own}]


def test_a_span_is_from_the_first_to_the_last():
    spans = [Interval(3.0, 5.0), Interval(2.0, 4.0)]
    assert seconds(spans) == 3.0
    ran = []
    span = Interval.of(lambda: ran.append(True))
    assert ran and span.begin <= span.end


def test_an_error_in_one_is_an_error_here(started):
    with pytest.raises(click.ClickException, match="process [01] of 2: KeyError: 'no'"):
        started[0].call('fail')


def test_without_gloo_it_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(processes, 'METHOD', 'no such method')
    assert not is_available()
    with pytest.raises(click.ClickException, match='gloo'):
        Processes(2, Adder, 5)


def test_when_all_were_killed_none_is_waited_for(started):
    found, children = started
    for process in children:
        process.kill()
        process.join()
    with pytest.raises(click.ClickException, match='process [01] of 2: it ended'):
        found.call('add')


def test_one_that_was_killed_before_it_read_is_missed(started):
    found, children = started
    os.kill(children[1].pid, signal.SIGSTOP)
    [*found._pipes][1].send(('add', ()))
    children[1].kill()
    children[1].join()
    with pytest.raises(click.ClickException, match='process [01] of 2: '):
        found.call('add')


def test_one_that_hangs_is_not_waited_for_without_end(started, monkeypatch):
    found, children = started
    monkeypatch.setattr(processes, 'PATIENCE', 0.05)
    os.kill(children[1].pid, signal.SIGSTOP)
    with pytest.raises(click.ClickException, match='no process has answered for 0.1 seconds'):
        found.call('add')


#: Run the command line, and say when the processes are at work.
TELLING = """
import runpy
from torchgpipe.trainer.processes import Processes

call = Processes.call
Processes.call = lambda *args: (print('step', flush=True), call(*args))[1]
if __name__ == '__main__':
    runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    'number, code, last',
    [(signal.SIGINT, 130, 'Stopped.\n'), (signal.SIGKILL, -signal.SIGKILL, '')],
)
def test_none_is_left_when_the_command_is_stopped(tmp_path, number, code, last):
    words = 'schedules --stack mlp --chunks 2 --rounds 1000 --milliseconds .001'.split()
    process = subprocess.Popen(
        [sys.executable, '-c', TELLING, *words, '--output', str(tmp_path)],
        cwd=PAGE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while process.stdout.readline() != 'step\n':
        assert process.poll() is None
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    # It ends when no process has these pipes any more.
    out, err = process.communicate(timeout=200)
    assert process.returncode == code and err.endswith(last) and 'Traceback' not in err


#: An interrupt as soon as a process was started.
INTERRUPTED = """
from multiprocessing.context import ForkServerProcess
from torchgpipe.trainer.processes import Processes

start = ForkServerProcess.start

def interrupted(process):
    start(process)
    raise KeyboardInterrupt

ForkServerProcess.start = interrupted
if __name__ == '__main__':
    with Processes(2, print):
        pass
"""


@pytest.mark.slow
def test_none_is_left_after_an_interrupt_at_the_start():
    process = subprocess.run(
        [sys.executable, '-c', INTERRUPTED],
        cwd=PAGE.parents[1],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert process.returncode and 'KeyboardInterrupt' in process.stderr
