"""The command line: help, wrong options, and each command once, at a small size."""
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.experiments import balance as balance_module
from benchmarks.experiments import concurrency as concurrency_module
from benchmarks.experiments import overhead as overhead_module
from benchmarks.experiments.overhead import ratios
from benchmarks.harness.page import PAGE, make_page
from benchmarks.harness.published import EXPERIMENTS
from benchmarks.harness.report import table
from torchgpipe.balance.live import LiveTensors


def test_help(run):
    code, out, _ = run('--help')
    assert code == 0
    assert all(name in out for name in ('list', 'digits', 'balance', 'overhead', 'concurrency',
                                        'pictures', *EXPERIMENTS))
    assert out.count('\n') < 30
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
    (['digits', '--speed', 'high'], '--speed'), (['digits', 'more'], 'more'),
    (['unet-sped'], "'unet-speed'"), (['unet-speed', '--setting', 'pipeline-3'], 'pipeline-4'),
    (['unet-speed', '--scale', '0'], '--scale'), (['unet-speed', '--scale', '2'], '--scale'),
    (['unet-speed', '--epochs', '2', '--skip-epochs', '2'], 'nothing to measure'),
    (['unet-speed', '--devices', 'cpu:0,gpu'], "'gpu'"),
    (['unet-speed', '--devices', 'cuda:99'], "'cuda:99'"),
    (['unet-speed', '--devices', 'meta'], 'neither a CPU nor a CUDA device'),
    (['unet-speed', '--dtype', 'int8'], "'bfloat16'"),
    (['unet-speed', '--output', '/proc/nothing'], '/proc/nothing'),
    (['unet-timeline', '--model', 'vgg'], "'resnet101'"),
    (['resnet101-accuracy', '--data', '/proc/nothing'], '/proc/nothing/train'),
    (['pictures', '/proc/nothing'], '/proc/nothing'), (['pictures'], 'DIR')])
def test_a_wrong_option_gets_one_clear_line(run, args, reason):
    code, out, err = run(*args)
    assert code != 0 and not out
    assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_the_help_of_an_experiment_shows_the_common_options(run, name):
    code, out, _ = run(name, '--help')
    assert code == 0 and out.count('\n') < 50
    for option in ('--setting', '--devices', '--scale', '--epochs', '--skip-epochs', '--dtype',
                   '--compile', '--seed', '--output'):
        assert option in out
    assert all(setting.name in out for setting in EXPERIMENTS[name].settings)


def test_the_list(run):
    code, out, _ = run('list')
    assert code == 0 and out.count('\n') < 50 and max(map(len, out.splitlines())) < 140
    for experiment in EXPERIMENTS.values():
        assert experiment.name in out
        assert all(setting.name in out for setting in experiment.settings)
    for figure in ('135.539 (1.41)', '22.24 ± 0.19', '0.91 + out of memory', '6.07 + 3.39',
                   '154.1', 'GPipe paper 24.62 + 26.24', '75 utilisation',
                   'Goyal et al. 22.08 ± 0.06'):
        assert figure in out


def test_a_published_model_from_the_command_line(run, tmp_path):
    code, out, _ = run('resnet101-speed', '--setting', 'baseline', '--setting', 'pipeline-1',
                       '--scale', 0.004, '--epochs', 1, '--output', tmp_path)
    assert code == 0 and '0.853' in out
    summary = json.loads((tmp_path / 'resnet101-speed.json').read_text())
    assert summary['machine']['torch'] == torch.__version__
    base, piped = summary['results']['settings']
    assert piped['ratio'] == piped['figure'] / base['figure'] and piped['balance'] == [370]


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    process = subprocess.Popen(
        [sys.executable, '-m', 'benchmarks', 'resnet101-speed', '--scale', '0.004', '--epochs',
         '2', '--setting', 'baseline', '--setting', 'pipeline-2', '--output', str(tmp_path)],
        cwd=PAGE.parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A process that was started in the background would ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    path = tmp_path / 'resnet101-speed.json'
    while not path.exists() and process.poll() is None:
        time.sleep(.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and err.endswith('Stopped.\n') and 'baseline' in out
    assert json.loads(path.read_text())['results']['settings'][0]['status'] == 'measured'


def test_the_page_is_made_of_the_results_that_are_kept():
    assert PAGE.read_text() == make_page()


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
