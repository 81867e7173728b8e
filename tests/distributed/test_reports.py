"""Reports of ranks: the search for the rank that blocks the others."""

from torchgpipe.distributed.reports import Record, blame, doing, text_of
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import UnitAction

WAITS = Record(run=3, state='waits', seconds=9.0, text='a step')


def test_a_record_is_read_as_it_was_written():
    record = Record(4, 3, 'failed', 1.5, 'a step', 'layer.py:1', 'ValueError: é', 3, 'rank 1')
    assert Record.parse(record.pack().encode()) == record


def test_a_rank_that_raised_in_this_run_is_blamed_before_all_others():
    raised = WAITS._replace(state='failed', error='ValueError: no', raised_in=3)
    records = {1: WAITS, 2: raised, 3: None}
    assert blame(records, 3, lost=[1], late=True) == ([(2, 'raised ValueError: no')], True)
    goes_on = raised._replace(run=4, state='waits')
    assert blame({1: WAITS, 2: goes_on}, 3) == ([(2, 'raised ValueError: no')], True)


def test_an_error_of_an_earlier_run_is_not_blamed():
    earlier = WAITS._replace(error='ValueError: no', raised_in=2)
    assert blame({1: earlier}, 3) == ([], True)
    stopped = earlier._replace(run=2, state='failed')
    assert blame({1: WAITS, 2: stopped}, 3) == ([], True)
    assert 'had raised ValueError: no' in blame({1: WAITS, 2: stopped}, 3, late=True)[0][0][1]


def test_the_finding_of_another_rank_is_passed_on_and_is_not_certain():
    assert blame({1: WAITS, 2: WAITS._replace(found='rank 4 is gone')}, 3) == (
        [(2, 'rank 4 is gone')],
        False,
    )


def test_a_rank_that_ended_or_stopped_reporting_is_blamed_at_once():
    ((rank, text),) = blame({1: WAITS, 2: Record(run=2, state='ended')}, 3)[0]
    assert rank == 2 and text.startswith('has ended')
    ((rank, text),) = blame({1: WAITS, 2: WAITS}, 3, lost=[2])[0]
    assert rank == 2 and text.startswith('is gone')


def test_a_busy_rank_is_blamed_only_when_the_others_have_waited_for_long():
    for record, expected in (
        (None, 'has not made this model'),
        (Record(run=3, state='computes', text='this'), 'does not wait, but computes in this, for'),
        (Record(run=2), 'is not where the others are'),
    ):
        records = {1: WAITS, 2: record}
        assert blame(records, 3) == ([], True)
        ((rank, text),) = blame(records, 3, late=True)[0]
        assert rank == 2 and text.startswith(expected), record


def test_without_a_busy_rank_all_that_wait_are_listed():
    assert [rank for rank, _ in blame({1: WAITS, 2: WAITS}, 3, late=True)[0]] == [1, 2]


def test_descriptions_of_actions_and_errors():
    assert doing(None) == ''
    assert doing(Action(1, 'W', 2)) == 'backward to weights of stage 1, micro-batch 2'
    assert doing(UnitAction('UNSHARD', 2)) == 'gather of the parameters of stage 2'
    error = ValueError('x' * 10000)
    assert text_of(error).startswith('ValueError: xxx') and len(text_of(error)) == 4000
