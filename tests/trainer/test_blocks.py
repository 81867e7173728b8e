"""Times of blocks, and of the layers around them."""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace

import pytest

from torchgpipe.balance import LayerProfile
from torchgpipe.plan import MACHINES, ParameterBytes
from torchgpipe.trainer import blocks
from torchgpipe.trainer.gpt import Sizes

#: Bytes of a parameter, whose products may be in bfloat16.
STATE = ParameterBytes(4, 4, 8)


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
