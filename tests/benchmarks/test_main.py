"""The command line: help, wrong options, and a published model."""

import json
import pkgutil
import signal
import subprocess
import sys

import pytest
import torch

from benchmarks import experiments
from benchmarks.__main__ import cli
from benchmarks.commands import MODULES
from benchmarks.harness.page import PAGE
from benchmarks.harness.published import EXPERIMENTS


def test_help(run):
    code, out, _ = run('--help')
    assert code == 0
    names = 'list digits balance overhead concurrency schedules scaling pictures classes mingpt'
    assert all(name in out for name in (*names.split(), 'arcface', *EXPERIMENTS))
    shown = [command for command in cli.commands.values() if not command.hidden]
    assert len(out.partition('Commands:')[2].split('\n  ')) == 1 + len(shown)  # a line for each
    code, out, _ = run('digits', '--help')
    assert code == 0
    for option in ('--epochs', '--chunks', '--balance', '--checkpoint', '--schedule', '--output'):
        assert option in out
    assert run()[0] == 0


def test_all_experiments_are_in_the_list():
    found = pkgutil.iter_modules(experiments.__path__, 'benchmarks.experiments.')
    assert {module.__name__ for module in MODULES} == {info.name for info in found}


def test_a_wrong_option_gets_one_clear_line(run):
    for args, reason in [
        (['digits', '--epochs', '0'], '--epochs'),
        (['digits', '--epochs', 'x'], '--epochs'),
        (['digits', '--chunks', '0'], '--chunks'),
        (['digits', '--chunks', '257'], '1<=x<=256'),
        (['digits', '--balance', '1,2'], '16 layers'),
        (['digits', '--balance', 'a,b'], 'a,b'),
        (['digits', '--balance', '0,16'], 'positive'),
        (['digits', '--checkpoint', 'sometimes'], "'except_last'"),
        (['digits', '--schedule', 'zb-v', '--balance', '4,4,8'], "'zb-v' has 2 partitions"),
        (['digits', '--schedule', '2f2b'], "'1f1b'"),
        (['digits', '--output', '/proc/nothing'], '/proc/nothing'),
        (['digitz'], 'digitz'),
        (['digits', '--speed', 'high'], '--speed'),
        (['digits', 'more'], 'more'),
        (['unet-sped'], "'unet-speed'"),
        (['unet-speed', '--setting', 'pipeline-3'], 'pipeline-4'),
        (['unet-speed', '--schedule', 'zb-v'], "'1f1b'"),
        (['unet-speed', '--scale', '0'], '--scale'),
        (['unet-speed', '--scale', '2'], '--scale'),
        (['unet-speed', '--epochs', '2', '--skip-epochs', '2'], 'nothing to measure'),
        (['unet-speed', '--devices', 'cpu:0,gpu'], "'gpu'"),
        (['unet-speed', '--devices', 'cuda:99'], "'cuda:99'"),
        (['unet-speed', '--devices', 'meta'], 'neither a CPU nor an accelerator'),
        (['unet-speed', '--dtype', 'int8'], "'bfloat16'"),
        (['unet-speed', '--output', '/proc/nothing'], '/proc/nothing'),
        (['unet-timeline', '--model', 'vgg'], "'resnet101'"),
        (['resnet101-accuracy', '--data', '/proc/nothing'], '/proc/nothing/train'),
        (['mingpt', '--heads', '5'], '--width 64'),
        (['mingpt', '--processes', '3'], '--heads 4'),
        (['classes', '--classes', '1'], '--classes'),
        (['arcface', '--processes', '0'], '--processes'),
        (['arcface', '--output', '/proc/nothing'], '/proc/nothing'),
        (['pictures', '/proc/nothing'], '/proc/nothing'),
        (['pictures'], 'DIR'),
    ]:
        code, out, err = run(*args)
        assert code != 0 and not out
        assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


def test_the_help_of_an_experiment_shows_the_common_options(run):
    options = (
        '--setting --devices --scale --epochs --skip-epochs --dtype --compile --seed --output'
    )
    for name, experiment in EXPERIMENTS.items():
        code, out, _ = run(name, '--help')
        assert code == 0 and out.count('\n') < 50, name
        assert all(option in out for option in options.split()), name
        assert all(setting.name in out for setting in experiment.settings), name


def test_the_list(run):
    code, out, _ = run('list')
    assert code == 0 and out.count('\n') < 50 and max(map(len, out.splitlines())) < 140
    for experiment in EXPERIMENTS.values():
        assert experiment.name in out
        assert all(setting.name in out for setting in experiment.settings)
    for figure in (
        '135.539 (1.41)',
        '22.24 ± 0.19',
        '0.91 + out of memory',
        '6.07 + 3.39',
        '154.1',
        'GPipe paper 24.62 + 26.24',
        '75 utilisation',
        'Goyal et al. 22.08 ± 0.06',
    ):
        assert figure in out


@pytest.mark.slow
def test_a_published_model_from_the_command_line(run, tmp_path):
    words = 'resnet101-speed --setting baseline --setting pipeline-1 --scale 0.004 --epochs 1'
    code, out, _ = run(*words.split(), '--output', tmp_path)
    assert code == 0 and '0.853' in out
    summary = json.loads((tmp_path / 'resnet101-speed.json').read_text())
    assert summary['machine']['torch'] == torch.__version__
    base, piped = summary['results']['settings']
    assert piped['ratio'] == piped['figure'] / base['figure'] and piped['balance'] == [370]


def test_without_the_extra_the_error_names_the_command_that_installs_it():
    code = "import sys; sys.modules['tqdm'] = None; import benchmarks"
    process = subprocess.run(
        [sys.executable, '-c', code], cwd=PAGE.parents[1], text=True, capture_output=True
    )
    assert process.returncode == 1
    assert "'tqdm'" in process.stderr.splitlines()[-1]
    assert "pip install -e '.[benchmarks]'" in process.stderr.splitlines()[-1]


#: Run the command line, and say when a result has been written.
TELLING = """
import runpy
from benchmarks.harness import campaign

write = campaign.write_json
campaign.write_json = lambda *args: (write(*args), print('written', flush=True))[0]
runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    words = 'resnet101-speed --scale 0.004 --epochs 2 --setting baseline --setting pipeline-2'
    process = subprocess.Popen(
        [sys.executable, '-c', TELLING, *words.split(), '--output', str(tmp_path)],
        cwd=PAGE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process that was started in the background would ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == 'written\n'
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and err.endswith('Stopped.\n') and 'baseline' in out
    written = json.loads((tmp_path / 'resnet101-speed.json').read_text())
    assert written['results']['settings'][0]['status'] == 'measured'
