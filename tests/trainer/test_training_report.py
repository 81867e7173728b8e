"""The report of a training."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.trainer.tiny import ROOT, TINY, run_tiny
from torchgpipe.trainer import config, train_gpt, training_report
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.training_report import Phase, times_of_phases

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


def table_of(out):
    """Return the rows of the tables of a report, by their first cell."""
    rows = {}
    for line in out.splitlines():
        cells = line.split('  ')
        if len(cells) > 1:
            rows[cells[0]] = [cell.strip() for cell in cells[1:] if cell.strip()]
    return rows


def test_the_end_of_a_run(run, tmp_path):
    save = ['--save', tmp_path / 'saved', '--log', tmp_path / 'log', '--peak-tflops', 1]
    code, out, err = run(*TINY, '--output', tmp_path, *save, '--generate', 3)
    assert code == 0, err
    rows = table_of(out)
    assert len(rows['forward and backward, ms']) == len(rows['bubble']) == 2
    predicted, measured = rows['memory of layers and loss']
    assert 'iB' in predicted and 'iB' in measured
    assert re.search(
        r'median of a step: [\d,]+ tokens/s, .* TFLOP/s per device, \d+\.\d% MFU', out
    )
    shares = []
    for phase in Phase:
        seconds, share = rows[phase.value]
        shares.append(float(share.removesuffix('%')))
    assert sum(shares) == pytest.approx(100, abs=1)

    # The second run has the steps of its own process only.
    lines = [json.loads(line) for line in (tmp_path / 'log').read_text().splitlines()]
    slow = [json.dumps({**line, 'bubble': 0.987}) for line in lines]
    (tmp_path / 'log').write_text('\n'.join(slow) + '\n')
    words = [*TINY, '--output', tmp_path, *save, '--resume', '--steps']
    code, out, err = run(*words, 6)
    assert code == 0 and 'where time went' not in out and 'validation loss' in out, err
    code, out, err = run(*words, 8)
    assert code == 0, err
    assert table_of(out)['bubble'][1] != '98.7%'
    code, out, err = run(*words, 16, '--log-interval', 5, '--eval-interval', 5)
    assert code == 0 and table_of(out)['memory of layers and loss'][1] != '0 B', err


@pytest.mark.parametrize('options', [['--shard'], ['--offload']])
def test_memory_that_is_not_predicted(run, tmp_path, options):
    code, out, err = run(*TINY, '--output', tmp_path, *options, '--steps', 2)
    assert code == 0, err
    assert table_of(out)['memory of layers and loss'][0] == 'not predicted'


def test_times_of_phases():
    laps = {Phase.SAVE: [1.0, 2.0], Phase.STEP: [9.0], Phase.LOG: []}
    lines = times_of_phases(laps).splitlines()
    assert lines[2].split() == ['forward', 'and', 'backward', '9.00', '75.0%']
    assert lines[3].split() == ['checkpoints', '3.00', '25.0%'] and len(lines) == 4


@pytest.mark.tools
def test_curves_of_tensorboard(run, tmp_path):
    """A training that resumes hides steps that its checkpoint does not have."""
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [*TINY, '--output', tmp_path, '--tensorboard', tmp_path / 'board']
    words += ['--save', tmp_path / 'saved', '--save-interval', 3]
    assert run(*words)[0] == 0
    shutil.rmtree(tmp_path / 'saved/step-6')
    assert run(*words, '--resume')[0] == 0
    events = EventAccumulator(str(tmp_path / 'board'))
    events.Reload()
    assert {'loss', 'val_loss', 'grad_norm', 'lr', 'tokens_per_second'} <= {
        *events.Tags()['scalars']
    }
    assert [event.step for event in events.Scalars('loss')] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars('val_loss')] == [3, 6]


def test_tensorboard_is_a_package(run, tmp_path, monkeypatch):
    monkeypatch.setattr(config.importlib.util, 'find_spec', lambda name: None)
    code, out, err = run(*TINY, '--output', tmp_path, '--tensorboard', tmp_path / 'board')
    assert (code, out) == (2, '') and 'pip install tensorboard' in err


def grown(attempt, config, training):
    """Train, with more memory on the last rank."""
    training_report.peak = lambda device: (int(os.environ['RANK']) + 1) * 2**40
    training_report.reset_peak = lambda device: 0
    train_gpt.train(config, training)


@pytest.mark.slow
def test_the_memory_is_of_the_largest_rank(tmp_path):
    program = (
        'import sys\n'
        'from tests.trainer.test_training_report import grown\n'
        'from tests.trainer.tiny import options_of, start\n'
        "start(grown, options_of(sys.argv[1], '--pipe', 2, '--steps', 1))\n"
    )
    words = [sys.executable, '-c', program, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert table_of(done.stdout)['memory of layers and loss'][1] == '2.00 TiB'
