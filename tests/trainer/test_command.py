"""The command: options, files and processes that it refuses."""

import importlib
import os
import subprocess
import sys

import pytest

from tests.trainer.tiny import COMMAND, ROOT, TINY, run_tiny
from torchgpipe.trainer import command
from torchgpipe.trainer.config import option_fields
from torchgpipe.trainer.processes import is_available

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')


def test_a_wrong_option_gets_one_line_before_any_process_starts(run, tmp_path, monkeypatch):
    for args, reason in [
        (['--data', '4', '--global-batch-size', '6'], '6 is not a multiple of --data 4'),
        (['--micro-batch-size', '5'], '--micro-batch-size 5'),
        (['--n-head', '3'], '--n-embd 16 is not a multiple of --n-head 3'),
        (['--tensor', '4'], '--n-head 2 is not a multiple of --tensor 4'),
        (['--pipe', '7'], '7 stages'),
        (['--schedule', 'zb-v', '--pipe', '4'], '8 stages'),
        (['--schedule', 'interleaved'], '--pipe 2 or more'),
        (['--schedule', '2f2b'], "'1f1b'"),
        (['--model', 'gpt2', '--block-size', '2048'], '--block-size 2048 is more than the 1024'),
        (['--model', 'gpt5'], "'gpt2'"),
        (['--steps', '0'], '--steps'),
        (['--text', '/proc/nothing'], '/proc/nothing'),
        (['--tokens', '/proc/nothing'], 'nothing'),
        (['--tokens', '/proc/self'], 'train.bin'),
        (['--text', '/dev/null'], '0 tokens'),
        (['--vocab-size', '99'], 'there is a token 122'),
        (['--text', __file__, '--mock-data'], 'exclude each other'),
        (['--block-size', '2000'], '--block-size 2000 takes 4000 and 2001'),
        (['--resume'], '--save FOLDER'),
        (['--restarts', '1'], '--save FOLDER'),
        (['--save', '/proc/nothing'], '/proc/nothing'),
        (['--output', '/proc/nothing'], 'nothing'),
        (['--log-samples'], '--log FILE'),
        (['--log', '/proc/nothing/log'], '/proc/nothing'),
        (['--offload', '--plan', 'auto'], '--offload is without --plan'),
        (['--tokenizer', 'gpt2'], '--tokenizer is for --dataset'),
        (['--dataset', '/proc/nothing', '--mock-data'], 'exclude each other'),
        (['--lr', '1e-4', '--min-lr', '1e-3'], '--min-lr 0.001 is more than --lr 0.0001'),
        (['--dtype', 'int8'], "'bfloat16'"),
    ]:
        monkeypatch.setattr(command, 'launch', None)
        monkeypatch.setattr(command, 'train', None)
        code, out, err = run(*TINY, '--output', tmp_path, *args)
        assert code == 2 and not out
        assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


def test_the_guide_has_a_word_on_each_option():
    page = (ROOT / 'docs/guide/train-gpt.md').read_text()
    names = ['--' + item.name.replace('_', '-') for item in option_fields()]
    assert [name for name in names if f'`{name}' not in page] == []
    assert '`--no-such-option' not in page


def test_a_mesh_fits_its_world(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, 'train', None)
    for name, value in (('RANK', '0'), ('WORLD_SIZE', '2')):
        monkeypatch.setenv(name, value)
    code, _, err = run(*TINY, '--output', tmp_path, '--data', 4)
    assert code == 2 and 'take 4 processes, but there are 2 of torchrun' in err
    code, _, err = run_tiny(run, tmp_path, '--data 2 --restarts 1 --save', tmp_path / 'saved')
    assert code == 2 and 'run torchrun again, with --resume' in err


def test_a_rank_without_a_world(run, tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '0')
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    code, _, err = run(*TINY, '--output', tmp_path)
    assert code == 2 and 'RANK is set, but WORLD_SIZE is no number' in err


@pytest.mark.slow
def test_a_terminal_without_unicode(tmp_path):
    for encoding, options in [('latin-1', ['--data', 2]), ('ascii', ['--dry-run'])]:
        done = subprocess.run(
            [*map(str, (*COMMAND, *TINY, '--steps', 1, '--output', tmp_path, *options))],
            cwd=ROOT,
            capture_output=True,
            env={**os.environ, 'PYTHONIOENCODING': encoding},
        )
        assert done.returncode == 0, done.stderr
        assert b'train-gpt.png' in done.stdout or b'dry-run.png' in done.stdout


@pytest.mark.slow
def test_a_folder_of_another_training_is_refused(run, tmp_path):
    save = [*TINY, '--output', tmp_path, '--save', tmp_path / 'saved', '--steps', 1]
    assert run(*save)[0] == 0
    code, _, err = run(*save)
    assert code == 2 and 'has checkpoints already: give --resume' in err
    code, out, err = run(*save, '--resume', '--generate', 5, '--vocab-size', 256)
    assert code == 0 and 'continues after step 1' in out, err  # there is nothing left to do
    code, _, err = run(*save, '--resume', '--n-layer', 5)
    assert code == 2 and "another training's checkpoints (depth 4 there, 5 here)" in err
    (tmp_path / 'saved/training.json').write_text('{"voc')
    code, _, err = run(*save, '--resume')
    assert code == 2 and 'training.json: ' in err and err.count('\n') == 1


def test_a_training_continues_as_it_began(run, tmp_path, trained):
    for args, reason in [
        (['--steps', 5], 'step-6, but --steps is 5'),
        (['--weight-decay', 0.2], 'weight_decay 0.1 the'),
        (['--dtype', 'float32'], 'dtype float64 there'),
        (['--log', '/'], 'cannot write to the log'),
        (['--log', ROOT / 'README.md'], 'is no log of JSON lines'),
        (['--seed', 1], 'seed 0 there'),
    ]:
        before = {
            path: path.read_bytes()
            for path in tmp_path.rglob('*')
            if path.is_file() and path.name != 'training.lock'
        }
        code, out, err = run(*trained, '--resume', *args)
        assert code == 2 and not out and reason in err and err.count('\n') == 1
        assert all(path.read_bytes() == data for path, data in before.items())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'click', None)
    monkeypatch.delitem(sys.modules, 'torchgpipe.trainer')
    with pytest.raises(ImportError, match=r"needs the package 'click'.*torchgpipe\[train\]"):
        importlib.import_module('torchgpipe.trainer')
