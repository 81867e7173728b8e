"""Campaigns: whatever was measured is kept, with the published figures beside it."""

import json
import shutil

import click
import pytest
import torch
from torch._dynamo import lookup_backend

from benchmarks.experiments import memory as memory_experiment
from benchmarks.experiments import speed
from benchmarks.experiments.timeline.ablation import carry
from benchmarks.harness import job, memory
from benchmarks.harness.campaign import campaign
from benchmarks.harness.job import Job
from benchmarks.harness.memory import free_memory, is_exhaustion, memory_limit, require
from tests.benchmarks import tiny
from torchgpipe import GPipe
from torchgpipe.trainer.files import replacing


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch):
    """Make an epoch of some samples only."""
    monkeypatch.setattr(job, 'SAMPLES', 16)


def results(folder, experiment):
    """Return the settings of the file that a campaign has written."""
    return json.loads((folder / f'{experiment.name}.json').read_text())['results']['settings']


def test_speed(tmp_path, capsys):
    campaign(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path), speed.measure)
    base, two, three = results(tmp_path, tiny.SPEED)
    assert all(
        result['status'] == 'measured' and result['figure'] > 0 and len(result['epochs']) == 1
        for result in (base, two, three)
    )
    assert base['ratio'] == 1 and two['ratio'] == two['figure'] / base['figure']
    assert two['published'] == {
        'torchgpipe 0.0.7': {'figure': 3.0, 'ratio': 1.5},
        'a paper': {'figure': 1.5, 'ratio': 1.5},
    }
    assert (two['batch'], two['chunks'], two['devices']) == (4, 4, ['cpu:0', 'cpu:1'])
    assert not (tmp_path / 'tiny-speed.png').exists()  # It is small, and on the CPU.
    out = capsys.readouterr().out
    assert torch.__version__ in out and 'published ratio' in out and 'a paper' in out
    assert 'At scale 0.5' in out and 'share the cores' in out
    assert 'out of memory' in out  # as published


def test_a_picture_of_full_scale(tmp_path):
    options = tiny.options(tiny.SPEED, tmp_path, settings=tiny.SETTINGS[:1], scale=1.0)
    campaign(tiny.SPEED, options, speed.measure)
    assert (tmp_path / 'tiny-speed.png').read_bytes().startswith(b'\x89PNG')
    assert '<svg' in (tmp_path / 'tiny-speed.svg').read_text()


@pytest.mark.slow
def test_speed_of_steps_by_a_schedule(tmp_path, capsys, monkeypatch):
    steps = []
    step = GPipe.step
    monkeypatch.setattr(
        GPipe,
        'step',
        lambda *args, **kwargs: (steps.append(kwargs['schedule']), step(*args, **kwargs))[1],
    )
    options = tiny.options(tiny.SPEED, tmp_path, settings=tiny.SETTINGS[:2], schedule='1f1b')
    campaign(tiny.SPEED, options, speed.measure)
    assert {*steps} == {'1f1b'}
    assert [result['status'] for result in results(tmp_path, tiny.SPEED)] == ['measured'] * 2
    out = capsys.readouterr().out
    assert "train by GPipe.step, '1f1b'" in out and 'one thread' not in out


def test_a_step_by_a_schedule_equals_the_plain_call(tmp_path):
    losses = []
    for schedule in (None, 'gpipe'):
        job = Job(
            tiny.SPEED,
            tiny.SETTINGS[1],
            tiny.options(tiny.SPEED, tmp_path, dtype=torch.float64, schedule=schedule),
        )
        job.step()
        losses.append(job.forward().item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_only_selected_experiments_run(tmp_path, capsys):
    options = tiny.options(
        tiny.SPEED,
        tmp_path,
        settings=tiny.SETTINGS[1:2],
        devices=(torch.device('cpu'),),
        dtype=torch.float64,
    )
    campaign(tiny.SPEED, options, speed.measure)
    (result,) = results(tmp_path, tiny.SPEED)
    assert result['ratio'] is None and result['devices'] == ['cpu', 'cpu']
    assert not (tmp_path / 'tiny-speed.png').exists()
    assert 'no speed-ups' in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_leaves_the_measurements(tmp_path, capsys):
    def measure(experiment, setting, options, result):
        if setting.name == 'pipeline-3':
            raise KeyboardInterrupt
        result['figure'] = 2.0
        if setting.name == 'pipeline-2':
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path), measure)
    assert [(result['setting'], result['status']) for result in results(tmp_path, tiny.SPEED)] == [
        ('baseline', 'measured'),
        ('pipeline-2', 'interrupted'),
    ]
    assert 'pipeline-2' in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        campaign(
            tiny.SPEED, tiny.options(tiny.SPEED, tmp_path, settings=tiny.SETTINGS[2:]), measure
        )
    assert not capsys.readouterr().out


def test_out_of_memory_is_a_result(tmp_path, capsys, monkeypatch):
    model = sum(p.numel() for p in tiny.UNET.build().parameters()) * 4 * 2
    monkeypatch.setattr(memory, 'free_memory', lambda: model - 1)
    campaign(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path), speed.measure)
    assert {
        (result['status'], result['figure'], result['ratio'])
        for result in results(tmp_path, tiny.SPEED)
    } == {('out of memory', None, None)}
    assert 'of the host' in capsys.readouterr().out


def test_an_allocator_that_gives_up_is_out_of_memory(tmp_path):
    def measure(experiment, setting, options, result):
        if setting.name == 'pipeline-2':
            raise MemoryError
        torch.empty(free_memory() + 2**31, dtype=torch.uint8)

    campaign(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path), measure)
    one, two, _ = results(tmp_path, tiny.SPEED)
    assert one['status'] == two['status'] == 'out of memory'
    assert two['reason'] == 'MemoryError'


def test_a_folder_that_vanishes_leaves_the_table_and_one_clear_error(tmp_path, capsys):
    def measure(experiment, setting, options, result):
        result['figure'] = 2.5
        shutil.rmtree(tmp_path / 'gone')

    with pytest.raises(click.ClickException, match='cannot write .*tiny-speed.json'):
        campaign(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path / 'gone'), measure)
    assert '2.50' in capsys.readouterr().out


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / 'x.json'
    path.write_text('old')
    with pytest.raises(KeyboardInterrupt):
        with replacing(path) as new:
            new.write_text('ne')
            raise KeyboardInterrupt
    assert path.read_text() == 'old' and list(tmp_path.iterdir()) == [path]


def test_other_errors_are_errors(tmp_path):
    def measure(experiment, setting, options, result):
        raise RuntimeError('a bug')

    with pytest.raises(RuntimeError, match='a bug'):
        campaign(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path), measure)


def test_the_memory_limit_ends_with_its_context():
    with memory_limit():
        with pytest.raises(RuntimeError) as error:
            torch.empty(free_memory() + 2**31, dtype=torch.uint8)
        assert is_exhaustion(error.value)
    with memory_limit():
        torch.empty(2**20)
    require(1, 'a byte')
    with pytest.raises(MemoryError, match='needs .* GiB'):
        require(2**60, 'too much')
    assert not is_exhaustion(RuntimeError('shapes'))


@pytest.mark.slow
def test_memory_by_its_definition(tmp_path):
    options = tiny.options(tiny.MEMORY, tmp_path, epochs=1, skip_epochs=0)
    campaign(tiny.MEMORY, options, memory_experiment.measure)
    parameters = sum(p.numel() for p in tiny.UNET.build().parameters())
    for result in results(tmp_path, tiny.MEMORY):
        parts = result['partitions']
        for name in ('parameters', 'gradients'):
            assert sum(part[name] for part in parts) == 4 * parameters
        # RMSprop has a number and one count of 4 bytes for each parameter tensor.
        assert 0 <= sum(part['optimizer'] for part in parts) - 4 * parameters < 400
        total = sum(sum(v for v in part.values() if isinstance(v, int)) for part in parts)
        assert result['figure'] == pytest.approx(total / 2**30)
        assert result['measured_by'] == 'live tensors'
        assert all(part['activations'] > 2**16 for part in parts)
        assert sum(result['details'].values()) == pytest.approx(result['figure'])


def test_memory_of_compiled_layers_is_said_to_be_unknown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, 'compile', lambda run: run)
    options = tiny.options(tiny.MEMORY, tmp_path, settings=tiny.SETTINGS[:1], compile=True)
    campaign(tiny.MEMORY, options, memory_experiment.measure)
    assert 'runs compiled layers uncompiled' in capsys.readouterr().out


def test_data_types(tmp_path):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        job = Job(tiny.SPEED, tiny.SETTINGS[1], tiny.options(tiny.SPEED, tmp_path, dtype=dtype))
        loss = job.forward()
        loss.backward()
        expected = dtype if dtype == torch.float64 else torch.float32
        assert loss.isfinite(), dtype
        assert {p.dtype for p in job.model.parameters()} == {expected}, dtype


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:The .grad attribute')  # torch.compile looks at it
@pytest.mark.parametrize(
    'setting', [tiny.SETTINGS[0], tiny.TIMELINE.settings[0]], ids=lambda setting: setting.name
)
def test_compiled_partitions_give_the_same_numbers(tmp_path, monkeypatch, setting):
    # A backend that compiles nothing needs no compiler; all that comes before it is the same.
    compiled, calls = [], []

    def backend(graph, inputs):
        run = lookup_backend('aot_eager')(graph, inputs)
        compiled.append(graph)

        def count(*args):
            calls.append(graph)
            return run(*args)

        return count

    torch_compile = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda run: torch_compile(run, backend=backend))
    losses = []
    for chosen in (False, True):
        options = tiny.options(tiny.SPEED, tmp_path, dtype=torch.float64, compile=chosen)
        job = Job(tiny.SPEED, setting, options, carry if setting.off else lambda model: model)
        losses.append([])
        for _ in range(3):
            torch.manual_seed(0)
            losses[-1].append(job.forward().item())
            job.step()
    assert losses[0] == pytest.approx(losses[1], abs=1e-9) and losses[0][0] != losses[0][2]
    # 5 stashes and 5 pops are left alone, so there are 11 runs, and more where partitions begin.
    cells = 3 * (2 * job.chunks - 1 if setting.balance else 1)  # some of them computed again
    assert len(set(map(id, calls))) >= 11 and len(calls) >= 11 * cells
    assert len(compiled) <= 3 * len(set(map(id, calls)))


def test_a_seed_makes_the_same_job(tmp_path):
    losses = [
        Job(tiny.SPEED, tiny.SETTINGS[0], tiny.options(tiny.SPEED, tmp_path, seed=seed))
        .forward()
        .item()
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
