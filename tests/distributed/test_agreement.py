"""Agreement: all ranks get the facts of all, or an error that names the rank that raised."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.shard.processes import run
from torchgpipe.distributed.agreement import Facts, LastDigest, NotBegun, check_settings, digest
from torchgpipe.shard import collectives
from torchgpipe.shard.collectives import agree


def facts_of(error=None):
    """Return the facts of this rank; the second one raises an error, if there is one."""
    if error is not None and dist.get_rank() == 1:
        raise error('rank 1 does not like this')
    return Facts(settings=7, state=dist.get_rank())


def exchanged(error=None):
    """Exchange facts of three ranks; return them, or the type and text of an error."""
    function = partial(facts_of, error)
    try:
        return agree('a test', function, Facts(), dist.group.WORLD, torch.device('cpu'))
    except BaseException as raised:
        return type(raised), str(raised)


def test_all_ranks_get_the_facts_of_all():
    assert run(3, exchanged) == [{rank: Facts(7, rank) for rank in range(3)}] * 3


def test_a_value_error_of_one_rank_is_raised_with_its_text_on_all():
    ranks = run(3, exchanged, ValueError)
    assert [kind for kind, _ in ranks] == [ValueError] * 3
    assert ranks[1][1] == 'rank 1 does not like this'
    for _, text in (ranks[0], ranks[2]):
        assert text == (
            'a test failed on rank 1, so it ended here, too: ValueError: rank 1 does not like this'
        )


def test_another_error_names_the_rank_on_all_others():
    ranks = run(3, exchanged, KeyboardInterrupt)
    assert [kind for kind, _ in ranks] == [NotBegun, KeyboardInterrupt, NotBegun]
    assert 'a test failed on rank 1' in ranks[0][1]


def test_settings_are_equal_or_the_first_other_rank_is_named():
    facts = {rank: Facts(settings) for rank, settings in enumerate((3, 3, 4))}
    check_settings('a step', {0: facts[0], 1: facts[1]})
    with pytest.raises(RuntimeError, match='a step has other settings on rank 2 than on rank 0'):
        check_settings('a step', facts)


def test_addresses_do_not_change_a_digest():
    assert digest(lambda: 1, 3) == digest(lambda: 1, 3) != digest(lambda: 1, 4)


def test_a_digest_of_other_values_is_another_one():
    last = LastDigest()
    first = last.of([True, False], 1)
    assert last.of([True, False], 1) == first == digest([True, False], 1)
    assert last.of([True, True], 1) == digest([True, True], 1) != first
    assert last.of([True, False], 1) == first


def test_the_error_of_this_rank_is_raised_if_the_exchange_fails_as_well():
    function = mock.Mock(side_effect=KeyError('of this rank'))
    with mock.patch.object(collectives, 'exchange', side_effect=RuntimeError('a rank is lost')):
        with pytest.raises(KeyError, match='of this rank') as info:
            agree('a test', function, Facts(), mock.Mock(), torch.device('cpu'))
        with pytest.raises(RuntimeError, match='a rank is lost'):
            agree('a test', Facts, Facts(), mock.Mock(), torch.device('cpu'))
    assert 'a rank is lost' in str(info.value.__cause__)
