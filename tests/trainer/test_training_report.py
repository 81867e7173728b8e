"""The report of a training."""

import json
import sys

import pytest

from tests.trainer.tiny import TINY, run_tiny
from torchgpipe.trainer.processes import is_available

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


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
