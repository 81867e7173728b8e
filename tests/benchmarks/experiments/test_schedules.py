"""Schedules: all train the same cells; the table once, with the least there is; ratios by hand."""

import json

import pytest
import torch

from benchmarks.experiments import schedules
from benchmarks.experiments.schedules.contenders import CELLS, OTHERS, OWN, Stage, contenders
from benchmarks.experiments.schedules.prediction import Prediction, predict
from benchmarks.models.stacks import STACKS
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import SPLIT
from torchgpipe.trainer import processes

HERE = ['in sequence', 'plain call', *NAMES, '1f1b, one worker', 'zb-h1, one worker']


@pytest.fixture(autouse=True)
def number_of_threads():
    """Put it back."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def test_layers_keep_the_shape():
    for stack in STACKS.values():
        x, target = stack.data(1)
        assert stack.layer()(x).shape == x.shape == target.shape == stack.shape


@pytest.mark.slow
def test_all_train_the_same_cells():
    n, stack = 3, STACKS['mlp']
    cells, data = stack.build(CELLS * n, 1).double(), [x[:8].double() for x in stack.data(1)]
    found = contenders(cells, data, n, 4, None)
    assert [*found] == HERE
    expected = None
    for name, each in found.items():
        run = each.run()
        got = [run.loss, *(p.grad.norm().item() for p in cells.parameters())]
        expected = expected or got
        assert got == pytest.approx(expected, rel=1e-9), name
    peaks = {name: each.peak() for name, each in found.items()}
    assert peaks['in sequence'] < peaks['1f1b'] < peaks['gpipe']
    assert 0 < found['1f1b'].bubble() < 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_stages_of_torch_take_a_step():
    with processes.Processes(2, Stage, 'mlp', 2, 1, 2, [*OTHERS.values()]) as stages:
        losses, peaks = [], []
        for name in ('Schedule1F1B', 'ScheduleGPipe', 'Schedule1F1B'):
            first, last = stages.call('step', name)
            assert first.loss is first.peak is None
            losses.append(last.loss)
            peaks.append(stages.call('step', name, True)[1].peak)
    assert losses == pytest.approx(losses[:1] * 3)
    assert 0 < peaks[0] < peaks[1]  # One micro-batch in the last stage, not both.


def run_tiny(run, folder):
    words = 'schedules --stack mlp --chunks 2 --milliseconds 0.001 --rounds 1'.split()
    code, out, _ = run(*words, '--output', folder)
    assert code == 0
    (case,) = json.loads((folder / 'schedules.json').read_text())['results']['cases']
    assert case['ideal'] == 4 / 3
    assert (folder / 'schedules.png').exists() and (folder / 'schedules.svg').exists()
    predicted = [row['name'] for row in case['rows'] if row['predicted']]
    assert predicted == ['in sequence', 'plain call', *NAMES]
    recorded = [row['name'] for row in case['rows'] if row['bubble'] is not None]
    assert recorded == HERE[1:]
    return out, [row['name'] for row in case['rows']]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_schedules(run, tmp_path):
    out, names = run_tiny(run, tmp_path)
    assert names == [*HERE, *OWN, *OTHERS] and all(name in out for name in names)


@pytest.mark.slow
def test_schedules_without_torch_distributed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, 'is_available', lambda: False)
    threads = torch.get_num_threads()
    out, names = run_tiny(run, tmp_path)
    assert names == HERE and 'torch 1F1B  ' in out
    assert torch.get_num_threads() == threads


def test_ratios_by_hand():
    runs = [
        {'in sequence': 6.0, '1f1b': 4.0},
        {'in sequence': 9.0, '1f1b': 5.0},
        {'in sequence': 5.0, '1f1b': 5.0},
    ]
    row = schedules._row('1f1b', runs, peak=7, ideal=1.6, n=2)
    assert row == {
        'name': '1f1b',
        'seconds': 5.0,
        'speed_up': 1.5,
        'share': 1.5 / 1.6,
        'idle': 0.25,
        'peak': 7,
    }
    row = schedules._row('in sequence', runs, peak=7, ideal=1.6, n=2)
    assert (row['speed_up'], row['share'], row['idle']) == (1.0, None, 0.0)


def test_predictions_by_hand():
    runs = [{'1f1b': 4.0, 'plain call': 6.0}, {'1f1b': 5.0, 'plain call': 6.0}]
    predictions = [{'1f1b': Prediction(4.0, 0.25)}, {'1f1b': Prediction(4.0, 0.75)}]
    assert schedules._prediction('1f1b', runs, predictions) == {
        'seconds': 4.0,
        'bubble': 0.5,
        'ratio': 1.125,
    }
    assert schedules._prediction('plain call', runs, predictions) is None


def test_a_prediction_does_all_the_work(monkeypatch):
    monkeypatch.setitem(predict.__globals__, 'measure_overhead', lambda devices: {})
    stack = STACKS['mlp']
    cells = stack.build(CELLS * 2, 1)
    cells(stack.data(1)[0]).sum().backward()  # Gradients that are there are none of its business.
    found = predict(cells, stack.data(1)[0], 2, 4)
    assert [*found] == ['in sequence', 'plain call', *NAMES]
    whole, _ = found.pop('in sequence')
    monkeypatch.setitem(
        predict.__globals__, 'measure_overhead', lambda devices: {'F': 9.0, 'I': 9.0}
    )
    slow = predict(cells, stack.data(1)[0], 2, 4)
    assert all(slow[name].seconds > 36 for name in found)
    assert found['plain call'].seconds > found['gpipe'].seconds  # One thread for backward.
    for name, (seconds, bubble) in found.items():
        if name not in SPLIT:  # Halves of a backward may take longer.
            assert seconds * (1 - bubble) * 2 == pytest.approx(whole)
        assert seconds > whole / 4 and 0 < bubble < 1 / 2


def test_the_summary_by_hand():
    def case(stack, **seconds):
        names = {
            'gpipe': 4.0,
            'plain call': 6.0,
            'zb-h1, one worker': 5.0,
            '1f1b, one worker': 4.0,
        }
        return {
            'stack': stack,
            'partitions': 2,
            'chunks': 8,
            'rows': [
                {
                    'name': name,
                    'speed_up': 12 / time,
                    'peak': 10 * time,
                    'share': 2 / time,
                    'predicted': {'ratio': time / 4},
                }
                for name, time in {**names, **seconds}.items()
            ],
        }

    header, rows = schedules.summary_rows(
        [
            case(stack, **{'1f1b': time, 'zb-h1': 3.0})
            for stack, time in (('a', 3.0), ('b', 4.0), ('c', 4.5))
        ]
    )
    assert header[1:] == ['n = 2, m = 8']
    assert dict(rows) == {
        '1f1b, of ideal': '0.50',
        '1f1b, times as fast as torch 1F1B': '—',
        'in processes, 1f1b, times as fast as torch 1F1B': '—',
        '1f1b, times as fast as the plain call': '1.50',
        'zb-h1, times as fast as 1f1b': '1.33',
        'on one worker, 1f1b, times as fast as zb-h1': '1.25',
        'activations, 1f1b to gpipe': '1.00',
        'largest error of a prediction, %': '25',
    }
