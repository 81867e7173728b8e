"""Measurements on one device: results that grow, failures, and the page."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from benchmarks.experiments.gpu import gpt, page, parts
from benchmarks.experiments.gpu.page import GPU_PAGE, make_gpu_page, predicted_seconds
from benchmarks.harness.published import EXPERIMENTS
from tests.benchmarks import tiny
from torchgpipe.base.devices import current_device
from torchgpipe.plan import MACHINES
from torchgpipe.trainer.gpt import Sizes


class Stopped(BaseException):
    """The process is killed."""


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurements; return the names of those that were taken."""
    names = []

    def part(name, act):
        def measure(device, scale):
            names.append(name)
            return act()

        return parts.Measurement(name, measure)

    def stop():
        raise Stopped

    def fail():
        raise ValueError('no such kernel\nmore')

    def exhaust():
        raise torch.OutOfMemoryError('4 GiB are free')

    actions = {'stop': stop, 'fail': fail, 'exhaust': exhaust}

    def use(*kinds):
        made = []
        for k, kind in enumerate(kinds):
            act = kind if callable(kind) else actions.get(kind, lambda k=k: {'value': k})
            made.append(part(f'part {k}', act))
        monkeypatch.setattr('benchmarks.experiments.gpu.all_parts', lambda: made)
        return names

    return use


def results_of(folder):
    return json.loads((folder / 'gpu.json').read_text())['results']['parts']


def test_a_run_goes_on_where_it_was_killed(run, tmp_path, measured):
    names = measured('', 'stop', '')
    with pytest.raises(Stopped):
        run('gpu', '--devices', 'cpu', '--output', tmp_path)
    assert results_of(tmp_path) == {'part 0': {'value': 0}}

    measured('', '', '')
    assert run('gpu', '--devices', 'cpu', '--output', tmp_path)[0] == 0
    assert names == ['part 0', 'part 1', 'part 1', 'part 2']
    assert results_of(tmp_path) == {f'part {k}': {'value': k} for k in range(3)}
    assert (tmp_path / 'gpu.md').read_text().startswith('# On a GPU')


@pytest.mark.slow
def test_a_failure_does_not_stop_later_measurements_and_is_measured_again(run, tmp_path, measured):
    names = measured('fail', 'exhaust', '')
    code, _, err = run('gpu', '--devices', 'cpu', '--output', tmp_path)
    assert code == 1 and 'part 0: ValueError: no such kernel\n' in err
    results = results_of(tmp_path)
    assert results['part 1'] == {'status': 'out of memory', 'reason': '4 GiB are free'}
    assert results['part 2'] == {'value': 2}
    text = (tmp_path / 'gpu.md').read_text()
    assert '- part 0: ValueError' in text and '- part 1: out of memory' in text

    measured('', '', '')
    assert run('gpu', '--devices', 'cpu', '--output', tmp_path)[0] == 0
    assert names == ['part 0', 'part 1', 'part 2', 'part 0']


def test_the_memory_of_the_host_is_a_limit(run, tmp_path, measured, monkeypatch):
    @contextmanager
    def nothing_is_free():
        raise MemoryError('no byte is free')
        yield

    monkeypatch.setattr('benchmarks.experiments.gpu.memory_limit', nothing_is_free)
    names = measured('')
    assert run('gpu', '--devices', 'cpu', '--output', tmp_path)[0] == 0 and names == []
    reason = {'status': 'out of memory', 'reason': 'no byte is free'}
    assert results_of(tmp_path) == {'part 0': reason}


def test_nothing_is_started_after_the_minutes(run, tmp_path, measured):
    names = measured('', '')
    code, out, _ = run('gpu', '--devices', 'cpu', '--output', tmp_path, '--minutes', 1e-9)
    assert code == 0 and names == []
    assert 'not started within 1e-09 minutes: part 0, part 1; run this again to go on' in out


def test_results_of_another_device_scale_or_version_are_refused(
    run, tmp_path, measured, monkeypatch
):
    measured('')
    words = ('gpu', '--devices', 'cpu', '--output', tmp_path)
    assert run(*words)[0] == 0
    path = tmp_path / 'gpu.json'
    file = json.loads(path.read_text())
    for change, message in (
        ({'scale': 0.5}, 'scale 0.5 instead of 1.0'),
        ({'device': 'cuda:0'}, 'cuda:0 instead of cpu'),
    ):
        path.write_text(json.dumps({**file, 'results': {**file['results'], **change}}))
        code, _, err = run(*words)
        assert code == 2 and message in err and 'choose another --output' in err
    path.write_text(json.dumps(file))
    monkeypatch.setattr('torchgpipe.__version__', '99')
    code, _, err = run(*words)
    assert code == 2 and 'instead of 99' in err


def test_a_file_without_results_is_kept(run, tmp_path, measured):
    measured('')
    for text in ('{', '[]', '{"machine": {}}'):
        (tmp_path / 'gpu.json').write_text(text)
        code, _, err = run('gpu', '--devices', 'cpu', '--output', tmp_path)
        assert code == 2 and 'has no results of this command' in err
        assert (tmp_path / 'gpu.json').read_text() == text


def test_a_part_that_is_named_is_measured_again(run, tmp_path, monkeypatch):
    numbers = iter(range(9))
    monkeypatch.setattr(
        'benchmarks.experiments.gpu.all_parts',
        lambda: [
            parts.Measurement(
                'tests', lambda device, scale: {'status': f'not run {next(numbers)}'}
            )
        ],
    )
    for words, expected in ((), 0), ((), 0), (('--part', 'tests'), 1):
        assert run('gpu', '--devices', 'cpu', '--output', tmp_path, *words)[0] == 0
        assert results_of(tmp_path) == {'tests': {'status': f'not run {expected}'}}


def test_an_error_that_ends_the_device_ends_the_run(run, tmp_path, measured, monkeypatch):
    class Ended(RuntimeError):
        pass

    def end():
        raise Ended('an illegal memory access')

    monkeypatch.setattr(torch, 'AcceleratorError', Ended, raising=False)
    names = measured(end, '')
    code, _, err = run('gpu', '--devices', 'cpu', '--output', tmp_path)
    assert code == 1 and 'an illegal memory access; run this again to go on' in err
    assert names == ['part 0']

    # What failed comes last, so that it does not keep others from being measured.
    assert run('gpu', '--devices', 'cpu', '--output', tmp_path)[0] == 1
    assert names == ['part 0', 'part 1', 'part 0']


def test_the_default_is_an_accelerator(run, tmp_path, monkeypatch):
    monkeypatch.setattr('benchmarks.experiments.gpu.accelerator', lambda: None)
    code, _, err = run('gpu', '--output', tmp_path)
    assert code == 2 and '--devices cpu --scale 0.01' in err


@pytest.mark.slow
def test_a_schedule_without_memory_leaves_the_others(monkeypatch):
    made = gpt._contenders

    def contenders(sizes, device):
        model, steps = made(sizes, device)

        def exhaust():
            raise torch.OutOfMemoryError('4 GiB are free')

        return model, {**steps, 'zb-h1, 1 partition': exhaust}

    monkeypatch.setattr(gpt, '_contenders', contenders)
    sizes = Sizes(vocabulary=11, context=4, width=8, heads=2, depth=2)
    rows = gpt.compare(sizes, torch.device('cpu'), 1)['rows']
    assert rows.pop('zb-h1, 1 partition') == {
        'status': 'out of memory',
        'reason': '4 GiB are free',
    }
    assert all(row['seconds'] > 0 for row in rows.values())


def test_outcomes_of_tests():
    for output, passed, failed, skipped, names in (
        (
            'FAILED tests/a.py::test - x\n= 1 failed, 20 passed, 3 skipped in 2.00s =\nmore text',
            *(20, 1, 3, ['tests/a.py::test']),
        ),
        ('ERROR tests/b.py\n5 passed, 1 error in 0.10s', 5, 1, 0, ['tests/b.py']),
        ('No module named pytest', 0, 0, 0, []),
    ):
        assert parts._outcomes(output) == {
            'passed': passed,
            'failed': failed,
            'skipped': skipped,
            'names': names,
        }


@pytest.mark.slow
def test_tests_that_do_not_run_are_a_failure(monkeypatch):
    monkeypatch.setattr(parts, 'is_simulated', lambda device: False)
    monkeypatch.setattr(parts, 'TESTS', ['tests/none.py'])
    result = parts._tests(torch.device('meta'), 1.0)
    assert 'pytest ran no test (exit code ' in result['failure']


def test_several_devices_are_refused(run, tmp_path):
    code, _, err = run('gpu', '--devices', 'cpu:0,cpu:1', '--output', tmp_path)
    assert code == 2 and '--devices has 2' in err


@pytest.mark.accelerator
def test_memory_of_partitions_on_one_accelerator():
    device = current_device()
    setting = tiny.MEMORY.setting('pipeline-2')
    result = parts._memory(tiny.MEMORY, setting)(device, 0.5)
    assert result['status'] == 'measured' and (result['batch'], result['chunks']) == (4, 4)
    # RMSprop: parameters, gradients and their squares. Norms have no gradients of buffers.
    assert result['model'] == pytest.approx(12 * result['parameters'], rel=0.01)
    assert result['activations'] > 4 * 3 * result['resolution'] ** 2


def test_a_model_that_is_larger_than_the_device_is_not_built(monkeypatch):
    monkeypatch.setattr(parts, '_room', lambda device: 1000)
    monkeypatch.setattr(parts, 'Job', None)
    result = parts._memory(tiny.MEMORY, tiny.MEMORY.baseline)(torch.device('cpu'), 1.0)
    assert result['status'] == 'does not fit' and result['model'] == 12 * result['parameters']


@pytest.mark.slow
def test_a_gpt_by_all_orders_has_one_loss():
    sizes = Sizes(vocabulary=11, context=4, width=8, heads=2, depth=8)
    result = gpt.compare(sizes, torch.device('cpu'), 1)
    rows = result['rows']
    assert [name for name in rows if 'zb' in name or 'v-' in name] == [
        'zb-h1, 1 partition',
        'zb-h1, 4 partitions',
        'zb-h1, 8 partitions',
        'zb-v, 8 partitions',
        'v-half, 8 partitions',
        'v-min, 8 partitions',
    ]
    losses = {row['loss'] for row in rows.values()}
    assert max(losses) - min(losses) < 1e-4
    assert all(row['seconds'] > 0 and row['peak'] > 0 for row in rows.values())
    # One partition holds one micro-batch, as a loop does; four partitions hold several.
    assert rows['1f1b, 4 partitions']['peak'] > rows['1f1b, 1 partition']['peak']
    assert rows['1f1b, 4 partitions, always']['peak'] < rows['1f1b, 4 partitions']['peak']


def test_different_losses_are_no_comparison(monkeypatch):
    monkeypatch.setattr(gpt, '_checkpointed', lambda *args: torch.tensor(0.0))
    sizes = Sizes(vocabulary=11, context=4, width=8, heads=2, depth=2)
    with pytest.raises(RuntimeError, match='losses should be the same'):
        gpt.compare(sizes, torch.device('cpu'), 1)


@pytest.mark.slow
def test_the_whole_command_on_a_small_scale(run, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, 'amoebanetd-memory', tiny.MEMORY)
    monkeypatch.setitem(EXPERIMENTS, 'unet-memory', replace(tiny.MEMORY, name='other-memory'))
    monkeypatch.setattr(parts, 'ROUNDS', 1)
    code, _, err = run('gpu', '--devices', 'cpu', '--scale', 0.01, '--output', tmp_path)
    assert code == 0, err
    results = results_of(tmp_path)
    assert 'failure' not in str(results) and len(results) == len(parts.all_parts())
    text = (tmp_path / 'gpu.md').read_text()
    for title in (
        'Tests',
        'Engine per cell',
        'A GPT on one device',
        'ResNet-101',
        'The machine for plans',
        tiny.MEMORY.title,
    ):
        assert title in text
    assert 'torchgpipe' in text and torch.__version__ in text


@pytest.mark.slow
def test_the_page_is_made_of_the_results_that_are_kept():
    assert GPU_PAGE.read_text() == make_gpu_page()


@pytest.mark.slow
def test_predictions_of_the_schedules_on_an_h100():
    """Within 15 % of each, with splits after whole backwards, and more stages after these."""
    times = json.loads((page.RESULTS / 'h100.json').read_text())['milliseconds']
    layers = times['1f1b 4'] / 1e3
    predicted = {
        name: 1e3 * predicted_seconds(page.ORDERS[name], 16, layers, MACHINES['H100'])
        for name in times
    }
    for name, time in times.items():
        assert predicted[name] == pytest.approx(time, rel=0.15), name
    order = ['1f1b 4', 'gpipe 4', 'zb-h1 4', 'v-min 8', 'zb-v 8', 'v-half 8', '1f1b 4 always']
    assert sorted(order, key=times.get) == order
    assert sorted(order, key=predicted.get) == order  # sorting keeps the order of equal times
