"""A mesh chosen by a plan, and dry runs of all ranks."""

import json
import re
from argparse import Namespace
from dataclasses import replace

import click
import pytest

from tests.trainer.tiny import (
    TINY,
    assert_same,
    lines_of,
    options_of,
    plain_curve,
    run_tiny,
)
from torchgpipe.plan import MACHINES, ParameterBytes, Transformer
from torchgpipe.trainer import blocks, command, planning, train_gpt
from torchgpipe.trainer.config import complete, config_of
from torchgpipe.trainer.prediction import settings_of
from torchgpipe.trainer.processes import is_available

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not is_available(), reason='needs gloo')]


WORDS = (
    '--cpu --n-layer 4 --n-head 2 --n-embd 16 --block-size 8 --dtype bfloat16 '
    '--global-batch-size 32 --plan auto --devices 8'
).split()


def chosen(*args):
    """Return the options after a plan has chosen some."""
    with command.train_gpt.make_context('train-gpt', [*WORDS, *map(str, args)]) as context:
        return planning.choose_mesh(config_of(context.params), context.params)


CHOSEN = Namespace(
    mesh={'data': 2, 'pipe': 2, 'tensor': 2},
    schedule='interleaved',
    checkpoint='always',
    balance=(1,) * 6,
    micro_batch=4,
    data='shard',
    recomputation='full',
)


@pytest.fixture
def asked(monkeypatch):
    """Let a plan be a known one; return the arguments of it, later."""
    asked = {}
    monkeypatch.setattr(
        planning, 'plan', lambda model, **options: asked.update(options, model=model) or CHOSEN
    )
    return asked


#: Bytes of a parameter, whose products may be in bfloat16.
STATE = ParameterBytes(4, 4, 8)


def test_a_chosen_mesh_gets_the_sizes_and_gives_its_settings(asked):
    for dtype in ('bfloat16', 'float32'):
        config = chosen('--machine', 'H100', '--memory', '1GiB', '--dtype', dtype)
        sizes = complete(config).sizes
        assert asked == {
            'model': Transformer(
                4, 16, 2, sizes.vocabulary, 8, tied=sizes.tied, dtype=dtype, eager=True
            ),
            'mesh': 8,
            'machine': MACHINES['H100'],
            'batch': 32,
            'state': STATE,
            'memory_limit': 0.9 * 2**30,
        }
        assert (config.data, config.pipe, config.tensor) == (2, 2, 2)
        assert (config.schedule, config.checkpoint) == ('interleaved', 'always')
        assert (config.virtual, config.micro_batch_size, config.shard) == (3, 4, True)
        assert config.balance == (1,) * 6
        assert (config.plan, config.devices, config.machine) == ('', 0, '')


def test_a_chosen_mesh_with_kept_products(monkeypatch):
    selective = Namespace(**{**vars(CHOSEN), 'recomputation': 'selective'})
    monkeypatch.setattr(planning, 'plan', lambda model, **options: selective)
    config = chosen('--machine', 'H100')
    assert config.checkpoint == 'selective'


def test_a_mesh_on_this_cpu_is_chosen_by_measured_layers(asked, monkeypatch):
    monkeypatch.setattr(planning, 'measure_machine', lambda device: MACHINES['A100'])
    monkeypatch.setattr(
        planning,
        'profiles_of',
        lambda sizes, devices, ranks, machine, state, sequence_parallel: (
            (sizes.context, devices, ranks, state, sequence_parallel),
            replace(machine, bandwidth=7.0),
        ),
    )
    config = chosen('--dtype', 'bfloat16', '--sequence-parallel')
    assert asked['model'] == (8, 8, [1, 2], STATE, True)
    assert config.sequence_parallel and config.tensor == 2
    assert asked['machine'] == replace(MACHINES['A100'], bandwidth=7.0)
    assert asked['micro_batches'] == (1, 2, 4, blocks.LARGE) and 'memory_limit' not in asked


def test_torchrun_has_a_mesh_already(asked, monkeypatch):
    monkeypatch.setenv('RANK', '0')
    with pytest.raises(click.UsageError, match='torchrun has started some'):
        chosen('--machine', 'H100')
    monkeypatch.delenv('RANK')
    with pytest.raises(click.UsageError, match='without --experts, --offload and --chunked-loss'):
        chosen('--machine', 'H100', '--offload')


@pytest.mark.slow
def test_a_dry_run_prints_and_draws_the_needs_of_each_rank(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, 'launch', None)
    monkeypatch.setattr(command, 'train', None)
    mesh = ['--data', '2', '--pipe', '2', '--tensor', '2']
    words = [*TINY, '--output', tmp_path, *mesh, '--dry-run']
    code, out, _ = run(*words)
    assert code == 0 and out.startswith('8 ranks: data 2 × pipe 2 × tensor 2; 8 micro-batches')
    report = json.loads((tmp_path / 'dry-run.json').read_text())
    assert (tmp_path / 'dry-run.png').exists() and len(report['ranks']) == 8
    config = options_of(tmp_path, *mesh)
    module = train_gpt.build_layers(config, config.n_layer)
    whole = sum(x.numel() * x.element_size() for x in module.parameters())
    ranks = [each['parameters'] for each in report['ranks']]
    assert ranks[:4] == ranks[4:] and whole / 4 < max(ranks) < whole
    code, out, _ = run(*words, '--memory', '1KiB')
    assert code == 1 and 'more than the limit of 1.00 KiB' in out


def test_a_plan_chooses_the_mesh_of_a_dry_run(run, tmp_path):
    options = '--plan auto --devices 8 --machine H100 --dtype bfloat16 --dry-run'
    code, out, err = run_tiny(run, tmp_path, options)
    assert code == 0, err
    assert 'slower by' in out and 'the first: compute' in out
    mesh = re.search(r'^8 ranks: data (\d+) × pipe (\d+) × tensor (\d+)', out, re.MULTILINE)
    assert out.splitlines()[2].split()[:3] == [*mesh.groups()]


@pytest.mark.slow
def test_a_plan_chooses_the_mesh_of_a_training(run, tmp_path, monkeypatch):
    """It has the losses of a plain loop."""
    monkeypatch.setattr(planning, 'measure_machine', lambda device: MACHINES['A100'])
    words = [*TINY, '--output', tmp_path, '--log', tmp_path / 'log']
    code, out, err = run(*words, '--plan', 'auto', '--devices', 2)
    assert code == 0 and 'starting 2 processes' in err and 'slower by' in out, err
    assert_same(lines_of(tmp_path / 'log'), plain_curve(options_of(tmp_path), 6))


def test_a_plan_that_cannot_be_made_is_refused(run, tmp_path):
    for args, reason in [
        (['--devices', 2], '--devices and --machine are for --plan auto'),
        (['--machine', 'H100'], '--devices and --machine are for --plan auto'),
        (['--plan', 'auto', '--machine', 'H100'], '--machine is for --devices'),
        (
            ['--plan', 'auto', '--devices', 2, '--data', 2],
            '--devices chooses --data: leave it out',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--checkpoint', 'always', '--micro-batch-size', 1],
            '--devices chooses --checkpoint, --micro-batch-size: leave',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--experts', 2],
            'without --experts, --offload and --chunked-loss',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--machine', 'H100', '--memory', '1KiB'],
            'no plan for this mesh',
        ),
        (
            ['--plan', 'auto', '--devices', 2, '--machine', 'H1'],
            "'H1' is not one of 'A100', 'H100'",
        ),
    ]:
        code, out, err = run(*TINY, '--output', tmp_path, '--dtype', 'float32', *args)
        assert (code, out) == (2, '') and reason in err


@pytest.mark.slow
def test_a_dry_run_of_each_schedule(run, tmp_path):
    for options in ('interleaved', 'looped-bfs --shard', 'zb-h2', 'zb-v', '1f1b --dtype bfloat16'):
        words = f'--data 2 --pipe 2 --dry-run --schedule {options}'
        code, out, _ = run_tiny(run, tmp_path, words)
        assert code == 0 and out.startswith('4 ranks')


def test_a_dry_run_that_cannot_be_made_gets_one_line(run, tmp_path):
    for args, reason in [
        (['--memory', '80'], "'80' is no size above zero"),
        (['--memory', '0GiB'], 'no size above zero'),
        (['--plan', 'auto'], '--plan measures layers'),
        (['--experts', '4', '--data', '2'], 'a dry run has no values'),
    ]:
        code, out, err = run(*TINY, '--output', tmp_path, '--dry-run', *args)
        assert code == 2 and not out
        assert reason in err and err.startswith('Error: ') and err.count('\n') == 1


@pytest.mark.slow
def test_a_dry_run_has_the_stages_of_the_training(run, tmp_path):
    for args, stages in [
        (['--offload', '--n-layer', 3], 5),
        (['--pipe', 4, '--n-layer', 2], 4),
        (['--pipe', 2, '--schedule', 'interleaved', '--virtual', 3, '--n-layer', 8], 6),
        (['--pipe', 2, '--schedule', 'zb-v'], 4),
    ]:
        code, _, err = run(*TINY, '--output', tmp_path, *args, '--dry-run')
        assert code == 0, err
        report = json.loads((tmp_path / 'dry-run.json').read_text())
        config = options_of(tmp_path, *args)
        settings = settings_of(config)
        assert report['balance'] == [*settings.balance] and len(settings.balance) == stages
        assert [f'cpu:{place}' for place in report['places']] == [*settings.devices]
        assert sum(settings.balance) == config.n_layer + 2
