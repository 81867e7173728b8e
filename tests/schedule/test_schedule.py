"""A schedule as data: read, written, drawn, and refused where it will not do."""

import subprocess
import sys

import pytest
from torch.distributed.pipelining.schedules import _Action

from torchgpipe.schedule import KINDS, Action, Schedule, make

GOOD = '0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1B1\n'


def test_an_action_is_read_as_it_is_written():
    for kind in KINDS:
        action = Action(12, kind, 345)
        assert str(action) == f'12{kind}345' and Action.parse(f' {action} ') == action


def test_pytorch_reads_it_alike():
    for kind in sorted({*KINDS} - {'R'}):
        theirs = _Action.from_str(str(Action(3, kind, 14)))
        parts = theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index
        assert parts == (3, kind, 14)


def test_refused_actions():
    for text in ['', '0F', 'F0', '0X1', '0F-1', '0F1 0F2', '0SEND_F1', '1.5F0']:
        with pytest.raises(
            ValueError, match='is no action: .*0F3.*W .backward, gradients of weights'
        ):
            Action.parse(text)


def test_a_schedule_is_read_as_it_is_written():
    schedule = Schedule.parse(GOOD)
    assert schedule.to_csv() == '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
    assert Schedule.parse(schedule.to_csv()) == schedule
    assert schedule.stages == ((0,), (1,)) and schedule.micro_batches == 2
    schedule.validate()


def test_an_error_in_a_row_is_found():
    with pytest.raises(ValueError, match="row 2, column 3: 'B0' is no action"):
        Schedule.parse('0F0,0B0\n1F0,,B0\n')


def test_virtual_stages():
    schedule = make('zb-v', 2, 3)
    assert schedule.stages == ((0, 3), (1, 2))
    assert make('interleaved', 2, 3, virtual=3).stages == ((0, 2, 4), (1, 3, 5))


def test_it_is_drawn_in_steps():
    assert str(Schedule.parse(GOOD)) == ('0F0 0F1         0B0 0B1\n    1F0 1F1 1B0 1B1')


def test_failing_plans_are_explained_and_drawn():
    for text, what in [
        ('', 'the schedule is empty'),
        ('0F0\n2F0', r'it has a stage 2, but none \[1\]\n'),
        ('0F1,0B1', r'it has a micro-batch 1, but none \[0\]\n'),
        ('0F0,0F0,0B0', '0F0 is there twice\n>0F0< >0F0< 0B0'),
        ('0F0,0B0\n0F1,0B1', 'stage 0 is on device 0 and on device 1\n0F0 +0B0\n>0F1< 0B1'),
        ('0F0,0F1,0B0', None),
        ('0F0,0I0', 'stage 0 does F, I for micro-batch 0, but it takes F and B, or F, I and W'),
        ('0F0,0B0,0W0', 'stage 0 does B, F, W for'),
        ('0B0', 'stage 0 does B for'),
        (
            '0F0,0F1,0B0\n1F0,1F1,1B0,1B1',
            'stage 0 has no backward for micro-batch 1, and others have',
        ),
        ('0F0\n1F0,1F1', 'stage 0 does nothing for micro-batch 1'),
        ('0B0,0F0', '0B0 comes before 0F0, for which it waits\n>0B0< 0F0'),
        ('0F0,0W0,0I0', '0W0 comes before 0I0, for which it waits'),
        ('0R0,0F0,0B0', '0R0 comes before 0F0'),
        ('0F0,0B0,0R0', '0B0 comes before 0R0'),
        ('0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1', None),
        (
            '0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1',
            'it cannot go on: 0B0 waits for 0F0, 1B0; 1F1 waits for '
            '0F1\n0F0 +>0B0< 0F1 +0B1\n1F0 +>1F1< 1B0 +1B1',
        ),
    ]:
        schedule = Schedule.parse(text)
        if what is None and text.count('F') == text.count('B'):
            schedule.validate()
            continue
        with pytest.raises(ValueError, match=what or 'stage 0 has no backward for micro-batch 1'):
            schedule.validate()


def test_forward_alone_will_do():
    Schedule.parse('0F0,0F1\n1F0,1F1').validate()
    Schedule.parse('0F0,0R0,0I0,0W0').validate()


def test_it_needs_the_standard_library_alone():
    code = (
        'import sys, types\n'
        'package = types.ModuleType("torchgpipe"); package.__path__ = [sys.argv[1]]\n'
        'sys.modules["torchgpipe"] = package\n'
        'import torchgpipe.schedule\n'
        'assert "torch" not in sys.modules\n'
    )
    import torchgpipe

    subprocess.run([sys.executable, '-c', code, torchgpipe.__path__[0]], check=True)


def test_recomputations_of_any_micro_batches():
    schedule = make('gpipe', 2, 3)
    assert schedule.recomputing([2, {2}]) == schedule.recomputing([{0, 1}, [2]])
    assert [schedule.recomputing([2, {2}]).recomputed(j) for j in range(2)] == [{0, 1}, {2}]
    assert schedule.recomputing([9, 0]) == schedule.recomputing([3, ()])
    with pytest.raises(ValueError, match=r'has stages \[0, 1\], but there are .* for 1 stages'):
        schedule.recomputing([{1}])
    with pytest.raises(ValueError, match=r'has 3 micro-batches, but \[7\] are to be recomputed'):
        schedule.recomputing([0, {1, 7}])


def test_rows_may_be_lists():
    """In v0.21, such a schedule was valid, and a step raised "unhashable"."""
    schedule = Schedule([[Action(0, 'F', 0), Action(0, 'B', 0)]])
    assert schedule == Schedule.parse('0F0,0B0') and hash(schedule)


def test_rows_have_actions():
    for row in ([(0, 'F', 0)], ['0F0'], '0F0'):
        with pytest.raises(TypeError, match='a row of a schedule has actions'):
            Schedule([row])


def test_a_negative_number_of_recomputations():
    """In v0.21, it was none."""
    with pytest.raises(ValueError, match='zero or more, but is -1'):
        make('1f1b', 2, 2).recomputing([-1, 0])
