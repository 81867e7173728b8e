"""Fixtures for tests of the command."""

import sys

import pytest

from tests.trainer.tiny import TINY
from torchgpipe.trainer.command import main


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command; return its exit code, its output and its errors."""

    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['torchgpipe-train-gpt', *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def trained(run, tmp_path):
    """Train for some steps with checkpoints and a log; return the options."""
    files = ['--output', tmp_path, '--log', tmp_path / 'log', '--save', tmp_path / 'saved']
    words = [*TINY, *files, *'--save-interval 2 --keep-last 9 --log-samples'.split()]
    assert run(*words)[0] == 0
    return words
