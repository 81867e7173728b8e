"""Schedules: all train the same cells; the table once, with the least there is; ratios by hand."""
import json

import pytest
import torch

from benchmarks.experiments import schedules
from benchmarks.experiments.schedules.contenders import CELLS, OTHERS, contenders
from benchmarks.harness import processes
from benchmarks.models.stacks import STACKS
from torchgpipe.schedule import NAMES

HERE = ['in sequence', 'plain call', *NAMES, '1f1b, one worker', 'zb-h1, one worker']


@pytest.fixture(autouse=True)
def number_of_threads():
    """Put it back."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.mark.parametrize('stack', STACKS)
def test_layers_keep_the_shape(stack):
    x, target = STACKS[stack].data(1)
    assert STACKS[stack].layer()(x).shape == x.shape == target.shape == STACKS[stack].shape


@pytest.mark.parametrize('n', [2, 3])
def test_all_train_the_same_cells(n):
    stack = STACKS['mlp']
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


def run_tiny(run, folder):
    code, out, _ = run('schedules', '--stack', 'mlp', '--chunks', 2, '--milliseconds', .001,
                       '--rounds', 1, '--output', folder)
    assert code == 0
    (case,) = json.loads((folder / 'schedules.json').read_text())['results']['cases']
    assert case['ideal'] == 4 / 3
    assert (folder / 'schedules.png').exists() and (folder / 'schedules.svg').exists()
    return out, [row['name'] for row in case['rows']]


@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_schedules(run, tmp_path):
    out, names = run_tiny(run, tmp_path)
    assert names == [*HERE, *OTHERS] and all(name in out for name in names)


def test_schedules_without_torch_distributed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, 'is_available', lambda: False)
    threads = torch.get_num_threads()
    out, names = run_tiny(run, tmp_path)
    assert names == HERE and 'torch 1F1B  ' in out
    assert torch.get_num_threads() == threads


def test_others_that_train_something_else_are_found_out():
    with pytest.raises(RuntimeError, match='losses should be the same'):
        schedules._check_losses({'in sequence': schedules.Run(1., 2.),
                                 'other': schedules.Run(1., 2.01)})


def test_ratios_by_hand():
    runs = [{'in sequence': 6., '1f1b': 4.}, {'in sequence': 9., '1f1b': 5.},
            {'in sequence': 5., '1f1b': 5.}]
    row = schedules._row('1f1b', runs, peak=7, ideal=1.6, n=2)
    assert row == {'name': '1f1b', 'seconds': 5., 'speed_up': 1.5, 'share': 1.5 / 1.6,
                   'idle': .25, 'peak': 7}
    row = schedules._row('in sequence', runs, peak=7, ideal=1.6, n=2)
    assert (row['speed_up'], row['share'], row['idle']) == (1., None, 0.)


def test_the_summary_by_hand():
    def case(stack, **seconds):
        names = {'gpipe': 4., 'plain call': 6., 'zb-h1, one worker': 5., '1f1b, one worker': 4.}
        return {'stack': stack, 'partitions': 2, 'chunks': 8, 'rows': [
            {'name': name, 'seconds': time, 'peak': 10 * time, 'share': 2 / time}
            for name, time in {**names, **seconds}.items()]}

    header, rows = schedules.summary_rows([
        case(stack, **{'1f1b': time, 'zb-h1': 2.}) for stack, time in
        (('a', 2.), ('b', 3.), ('c', 4.))])
    assert header[1:] == ['n = 2, m = 8']
    assert dict(rows) == {
        '1f1b, of ideal': '0.67', '1f1b, times as fast as torch 1F1B': '—',
        '1f1b, times as fast as the plain call': '2.00', 'zb-h1, times as fast as 1f1b': '1.50',
        'on one worker, zb-h1 to 1f1b: time': '1.25', '1f1b to gpipe: activations': '0.75'}
