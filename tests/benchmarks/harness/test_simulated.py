"""`--devices sim`: four simulated accelerators, named as such wherever a figure is."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks.experiments import memory, speed, timeline
from benchmarks.harness import job
from benchmarks.harness.campaign import campaign
from benchmarks.harness.options import load, parse_devices
from benchmarks.harness.page import _command
from benchmarks.harness.report import describe
from tests import accelerator
from tests.benchmarks import tiny

SIM = [f'sim:{j}' for j in range(4)]


@pytest.mark.sim
def test_devices():
    for value, names in (
        ('sim', SIM),
        ('sim,cpu', [*SIM, 'cpu']),
        ('cpu:1, sim:2', ['cpu:1', 'sim:2']),
    ):
        assert [str(device) for device in parse_devices(None, None, value)] == names


def no_sources(monkeypatch):
    """Take the tests away."""
    monkeypatch.setitem(sys.modules, 'tests', None)


def no_compiler(monkeypatch):
    """Take the compiler away."""

    def fail():
        raise RuntimeError('it needs a C++ compiler\nand more')

    monkeypatch.setattr(accelerator, 'load', fail)


def other_accelerator(monkeypatch):
    """Put another accelerator there."""
    monkeypatch.setattr(
        torch.accelerator,
        'current_accelerator',
        lambda check_available=False: torch.device('cuda'),
    )


def test_the_error_says_why_there_are_none(run):
    for change, reason in (
        (no_sources, 'a checkout of the sources'),
        (no_compiler, 'it needs a C++ compiler'),
        (other_accelerator, "one accelerator in a process, here 'cuda'"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            code, out, err = run('unet-timeline', '--devices', 'sim')
        assert code != 0 and not out and reason in err and err.count('\n') == 1


def measure(experiment, function, folder, monkeypatch, **changes):
    """Run a campaign on simulated accelerators; give its summary and its machine."""
    monkeypatch.setattr(job, 'SAMPLES', 4)
    options = tiny.options(experiment, folder, devices=tuple(load()), **changes)
    campaign(experiment, options, function)
    written = json.loads((folder / f'{experiment.name}.json').read_text())
    return written['results'], written['machine']


@pytest.mark.slow
@pytest.mark.sim
def test_a_timeline(tmp_path, monkeypatch, capsys):
    summary, machine = measure(tiny.TIMELINE, timeline.measure, tmp_path, monkeypatch, scale=1.0)
    for result in summary['settings']:
        assert result['ratio'] > 0 and 0 < result['details']['utilisation, %'] <= 100
        assert result['details']['memory, GiB'] > 0
        _, svg, trace = (tmp_path / name for name in result['files'])
        assert 'on a simulated accelerator' in svg.read_text()
        events = json.loads(trace.read_text())['traceEvents']
        kinds = {event['cat'] for event in events if event['ph'] == 'X'}
        assert kinds == {'forward', 'recomputation', 'backward', 'copy'}
    assert 'on a simulated accelerator' in (tmp_path / 'tiny-timeline.svg').read_text()
    out = capsys.readouterr().out
    assert '4 × simulated accelerator on ' in out and 'The accelerator is simulated' in out
    here = describe(machine, accelerated=True)
    assert here.count('simulated') == 1 and f'{machine["cores"]} cores' in here
    assert _command('unet-timeline', summary).endswith(' --devices sim')


@pytest.mark.sim
def test_throughput_equals_the_devices(tmp_path):
    options = tiny.options(tiny.SPEED, tmp_path)
    sleeper = SimpleNamespace(
        setting=tiny.SETTINGS[0],
        options=options,
        devices=load(),
        batch=8,
        step=lambda: accelerator.sleep(2000),
    )
    result = {}
    job.time_epochs(sleeper, result)
    assert result['figure'] == pytest.approx(8 / 0.002, rel=0.01)


@pytest.mark.sim
def test_memory_is_told_by_the_allocators(tmp_path, monkeypatch):
    summary, _ = measure(tiny.MEMORY, memory.measure, tmp_path, monkeypatch)
    for result in summary['settings']:
        assert result['measured_by'] == 'the allocator'
        assert all(part['activations'] > 2**16 for part in result['partitions'])


@contextmanager
def nothing_is_free():
    """Leave no memory to the process."""
    raise MemoryError
    yield


@pytest.mark.sim
@pytest.mark.parametrize(
    'name, value',
    [('memory.free_memory', lambda: 2**16), ('campaign.memory_limit', nothing_is_free)],
)
def test_their_memory_is_host_memory(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(f'benchmarks.harness.{name}', value)
    summary, _ = measure(tiny.SPEED, speed.measure, tmp_path, monkeypatch)
    assert {result['status'] for result in summary['settings']} == {'out of memory'}
