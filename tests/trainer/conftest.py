"""Fixtures for tests of the command line."""

import sys

import pytest

from benchmarks.__main__ import main


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
