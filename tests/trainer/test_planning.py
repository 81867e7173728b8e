"""A mesh chosen by a plan: its arguments, and the settings that it changes."""

from argparse import Namespace
from dataclasses import replace

import click
import pytest

from torchgpipe.plan import MACHINES, ParameterBytes, Transformer
from torchgpipe.trainer import blocks, planning
from torchgpipe.trainer.command import train_gpt
from torchgpipe.trainer.config import complete, config_of

WORDS = (
    '--cpu --n-layer 4 --n-head 2 --n-embd 16 --block-size 8 --dtype bfloat16 '
    '--global-batch-size 32 --plan auto --devices 8'
).split()


def chosen(*args):
    """Return the options after a plan has chosen some."""
    with train_gpt.make_context('train-gpt', [*WORDS, *map(str, args)]) as context:
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
