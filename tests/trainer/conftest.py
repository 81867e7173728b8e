"""Fixtures for tests of the command."""

import sys

import pytest

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
