"""Placements: the rank of each stage, and how many units a rank gathers at once."""

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from torchgpipe.distributed.placement import Placement, parse_places


def test_ranks_take_turns_by_default():
    assert parse_places(None, 4, 2) == [0, 1, 0, 1]
    assert parse_places((0, 1, 1, 0), 4, 2) == [0, 1, 1, 0]


def test_each_rank_takes_a_stage_and_each_stage_a_rank():
    for places, stages, ranks in (([0, 0], 2, 2), ([0, 1], 3, 2), (None, 1, 2)):
        with pytest.raises(ValueError, match=f'each of {ranks} ranks .* one of {stages} stages'):
            parse_places(places, stages, ranks)


def test_a_rank_gathers_again_if_it_has_more_stages_than_may_be_whole():
    cases = [
        ({}, 3, False),
        ({'max_active_stages': 1}, 1, True),
        ({'max_active_stages': 2}, 2, False),
        ({'offload_policy': CPUOffloadPolicy()}, 1, True),
        ({'offload_policy': CPUOffloadPolicy(), 'max_active_stages': 2}, 2, False),
    ]
    for options, active, again in cases:
        placement = Placement([0, 1, 0, 1], 'shard', {}, **options)
        assert placement.active_units == active
        assert placement.gathers_again is again


def test_policies_are_the_ones_that_were_given():
    policy = MixedPrecisionPolicy()
    assert Placement([0], 'shard', {}).policies == {}
    assert Placement([0], 'shard', {}, mp_policy=policy).policies == {'mp_policy': policy}
