"""The command line: help, wrong options, and each command once, at a small size."""
import json
import re
import sys

import pytest
import torch

from benchmarks import balance as balance_module
from benchmarks import concurrency as concurrency_module
from benchmarks import overhead as overhead_module
from benchmarks.__main__ import main
from benchmarks.overhead import ratios
from benchmarks.report import table
from torchgpipe.balance.live import LiveTensors


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


def test_help(run):
    code, out, _ = run('--help')
    assert code == 0
    assert all(name in out for name in ('digits', 'balance', 'overhead', 'concurrency'))
    code, out, _ = run('digits', '--help')
    assert code == 0
    for option in ('--epochs', '--chunks', '--balance', '--checkpoint', '--output'):
        assert option in out
    assert run()[0] == 0


@pytest.mark.parametrize('args, reason', [
    (['digits', '--epochs', '0'], '--epochs'), (['digits', '--epochs', 'x'], '--epochs'),
    (['digits', '--chunks', '0'], '--chunks'), (['digits', '--chunks', '65'], '--chunks 65'),
    (['digits', '--balance', '1,2'], '16 layers'), (['digits', '--balance', 'a,b'], 'a,b'),
    (['digits', '--balance', '0,16'], 'positive'),
    (['digits', '--checkpoint', 'sometimes'], "'except_last'"),
    (['digits', '--output', '/proc/nothing'], '/proc/nothing'), (['digitz'], 'digitz'),
    (['digits', '--speed', 'high'], '--speed'), (['digits', 'more'], 'more')])
def test_a_wrong_option_gets_one_clear_line(run, args, reason):
    code, out, err = run(*args)
    assert code != 0 and not out
    assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


def test_digits(run, tmp_path):
    code, out, _ = run('digits', '--epochs', 3, '--checkpoint', 'always', '--output', tmp_path)
    assert code == 0
    accuracies = re.findall(r'(?:unwrapped|GPipe) +([\d.]+)%', out)
    assert len(accuracies) == 2 and all(float(accuracy) > 90 for accuracy in accuracies)
    assert 'largest difference of the losses' in out
    assert (tmp_path / 'digits.png').read_bytes().startswith(b'\x89PNG')


def test_overhead(run, tmp_path, monkeypatch):
    monkeypatch.setattr(overhead_module, 'SIZES', [(2, 4)])
    code, out, _ = run('overhead', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and 'n=2 m=4' in out and 'median' in out
    written = json.loads((tmp_path / 'overhead.json').read_text())
    assert written['machine']['torch'] == torch.__version__ and len(written['results']) == 2


def test_balance(run, tmp_path, monkeypatch):
    monkeypatch.setattr(balance_module, 'SIZES', (2,))
    monkeypatch.setattr(balance_module, 'MODES', ('except_last',))
    code, out, _ = run('balance', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and all(name in out for name in balance_module.MODELS)
    results = json.loads((tmp_path / 'balance.json').read_text())['results']
    assert len(results) == 3 and all(0.1 < result['ratio'] < 10 for result in results)
    code, _, err = run('balance', '--device', 'cuda:99')
    assert code == 1 and '--device cuda:99' in err and err.count('\n') == 1


def test_concurrency(run, tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency_module, 'ROWS', 2)
    code, out, _ = run('concurrency', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and 'speed-up' in out and (tmp_path / 'concurrency.json').exists()


def test_ratios():
    got = ratios({'forward': (5., 15.), "forward + backward, 'never'": (20., 30.),
                  "forward + backward, 'always'": (100., 60.)})
    assert got == {'forward': 2., "forward + backward, 'never'": .5,
                   "forward + backward, 'always'": .5}


def test_tables_are_aligned():
    assert table(['', 'x'], [['ab', 1], ['c', 10]]).splitlines() == [
        '     x', '──  ──', 'ab   1', 'c   10']


def test_live_tensors_are_counted_once_and_until_they_die():
    with LiveTensors().watched() as live:
        a = torch.empty(100)
        b = a.view(10, 10)
        assert live.now == 400
        c = b + 1
        del a, c
        assert live.now == 400
        del b
    assert (live.now, live.peak) == (0, 800)
