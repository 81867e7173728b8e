"""Modes of checkpointing: the number of checkpointed micro-batches of each partition."""

import pytest

from torchgpipe.base.settings import checkpoint_stops, parse_checkpoint


def test_each_partition_checkpoints_the_first_micro_batches():
    for mode, stops in [
        ('always', (4, 4)),
        ('except_last', (3, 3)),
        ('never', (0, 0)),
        (['never', 'always'], (0, 4)),
        (lambda j: ['except_last', 'never'][j], (3, 0)),
    ]:
        assert checkpoint_stops(parse_checkpoint(mode, 2), 4, 2) == stops


def test_an_unknown_mode_raises():
    for mode in ['sometimes', ['always', 'sometimes'], lambda j: 'sometimes', 1]:
        with pytest.raises(ValueError, match="not one of 'always', 'except_last', or 'never'"):
            parse_checkpoint(mode, 2)


def test_a_list_of_another_length_raises():
    with pytest.raises(ValueError, match='1 modes for 2 partitions'):
        parse_checkpoint(['always'], 2)
