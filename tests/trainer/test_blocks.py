"""A mesh chosen by a plan: its arguments, the settings that it changes, and measured blocks."""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace

import click
import pytest
import torch

from torchgpipe.balance import LayerProfile
from torchgpipe.base.settings import Settings
from torchgpipe.plan import MACHINES, ParameterBytes, Transformer
from torchgpipe.trainer import blocks, train_gpt
from torchgpipe.trainer.config import checked
from torchgpipe.trainer.gpt import GPT, Sizes, layers

WORDS = (
    '--cpu --n-layer 4 --n-head 2 --n-embd 16 --block-size 8 --dtype bfloat16 '
    '--global-batch-size 32 --plan auto --devices 8'
).split()


def chosen(*args):
    """Return the options after a plan has chosen some."""
    with train_gpt.train_gpt.make_context('train-gpt', [*WORDS, *map(str, args)]) as context:
        config = Namespace(**context.params)
        train_gpt.choose_mesh(config)
    return config


FOUND = Namespace(
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
        train_gpt, 'plan', lambda model, **options: asked.update(options, model=model) or FOUND
    )
    return asked


#: Bytes of a parameter, whose products may be in bfloat16.
STATE = ParameterBytes(4, 4, 8)


def test_a_chosen_mesh_gets_the_sizes_and_gives_its_settings(asked):
    for dtype in ('bfloat16', 'float32'):
        config = chosen('--machine', 'H100', '--memory', '1GiB', '--dtype', dtype)
        sizes = checked(Namespace(**vars(config))).sizes
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
        assert config.balance == [1] * 6
        assert (config.plan, config.devices, config.machine) == (None, None, None)


def test_a_chosen_mesh_with_kept_products(monkeypatch):
    selective = Namespace(**{**vars(FOUND), 'recomputation': 'selective'})
    monkeypatch.setattr(train_gpt, 'plan', lambda model, **options: selective)
    config = chosen('--machine', 'H100')
    assert config.checkpoint == 'selective'


def test_a_mesh_on_this_cpu_is_chosen_by_measured_layers(asked, monkeypatch):
    monkeypatch.setattr(train_gpt, 'measure_machine', lambda device: MACHINES['A100'])
    monkeypatch.setattr(
        train_gpt,
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


def test_times_of_a_block_and_of_ends():
    """From steps whose times are known: an end takes 3 s, a block 5 s, for one micro-batch."""

    def call(name, sizes, tensor, batch, sequence_parallel):
        return [2 * 3.0 + sizes.depth * 5.0, 0.0]  # the slowest rank counts

    group = Namespace(call=call)
    assert blocks._times(group, Sizes(256, 128, 64, 4, 3), 2, 1, False) == (3.0, 5.0)


def test_overheads_of_layers():
    """Overheads do not grow with the samples; they are between zero and all of the time."""
    layer = LayerProfile('0', 0.0, 0.0, 8, 0, 0, 4, 4, input_share=0.5, weight_share=0.5)
    for small, large, overhead in ((3, 10, 2), (1, 8, 0), (1, 9, 0), (4, 2, 4)):
        assert blocks._timed(layer, small, large) == replace(
            layer,
            forward_seconds=large / 3,
            backward_seconds=2 * large / 3,
            forward_overhead=overhead / 3,
            backward_overhead=2 * overhead / 3,
            input_share=None,
            weight_share=None,
        )


def test_profiles_have_times_of_ends_and_of_blocks(monkeypatch):
    monkeypatch.setattr(
        blocks, '_times', lambda group, sizes, tensor, batch, *_: (batch, 10.0 * batch)
    )

    group = nullcontext(Namespace(call=lambda name, sizes: [2.0, 9.0]))
    monkeypatch.setattr(blocks, 'Processes', lambda number, rank: group)
    found, machine = blocks.profiles_of(
        Sizes(256, 128, 64, 4, 3), 2, [1, 2], MACHINES['A100'], STATE
    )
    assert [*found] == [1, 2]
    divided, _ = blocks.profiles_of(
        Sizes(256, 126, 64, 4, 3), 2, [1, 2, 4], MACHINES['A100'], STATE, sequence_parallel=True
    )
    assert [*divided] == [1, 2]  # 4 ranks cannot share 126 tokens
    seconds = [x.forward_seconds + x.backward_seconds for x in found[2].layers]
    assert seconds == pytest.approx([8.0, 80.0, 80.0, 80.0, 8.0])
    assert found[1].batch_size == blocks.LARGE
    assert machine == replace(MACHINES['A100'], bandwidth=STATE.traffic / 9)


def test_the_weight_of_embedding_and_head_is_counted_once_by_each_device():
    """The block between them is repeated, so the head's place is another one than measured."""
    depth = 3
    sizes = Sizes(vocabulary=64, context=8, width=16, heads=2, depth=1)
    sample = torch.zeros(2, 8).long()
    cpu = torch.device('cpu')

    def resident_bytes(*balance):
        devices = tuple(f'cpu:{rank}' for rank in range(len(balance)))
        settings = Settings('1f1b', balance, devices, 2, 'never', ())
        plan = blocks.plan_blocks(
            layers(GPT(sizes)),
            sample,
            cpu,
            depth=depth,
            batch=2,
            ranks=len(balance),
            tensor=1,
            virtual=1,
            settings=settings,
        )
        return sum(stage.resident_bytes for stage in plan.costs.stages)

    weight = 64 * 16 * 4
    assert resident_bytes(1, depth + 1) - resident_bytes(depth + 2) == 4 * weight
    plan = blocks.plan_blocks(
        layers(GPT(sizes)), sample, cpu, depth=depth, batch=2, ranks=2, tensor=1, virtual=1
    )
    assert sum(plan.balance) == depth + 2
