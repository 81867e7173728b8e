"""What tests of the command line share."""
import multiprocessing
import sys

import pytest

from benchmarks.__main__ import main
from tests.shard.processes import IMPORTED


@pytest.fixture(autouse=True)
def one_server(monkeypatch):
    """Let the process that forks all others import what ranks need: a test worker has only one."""
    context = multiprocessing.get_context('forkserver')
    preload = context.set_forkserver_preload
    monkeypatch.setattr(context, 'set_forkserver_preload',
                        lambda names: preload([*IMPORTED, *names]))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command; give its exit code, its output and its errors."""
    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['benchmarks', *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err
    return call
