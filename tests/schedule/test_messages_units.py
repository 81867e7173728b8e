"""Actions of units: gathers, frees and reductions in the rows of ranks."""

from torchgpipe.schedule import NAMES, Action, make
from torchgpipe.schedule.generators import V_SHAPED
from torchgpipe.schedule.messages import (
    Message,
    Send,
    UnitAction,
    last_backwards,
    receiving_early,
    with_messages,
    with_unit_actions,
)

STAGES = {'interleaved': 4, 'looped-bfs': 4, **dict.fromkeys(V_SHAPED, 2)}


def rows(name, m=8):
    """Return the rows of two ranks."""
    v = STAGES.get(name, 1)
    return [*map(receiving_early, with_messages(make(name, 2, m, v).recomputing([m] * 2 * v)))]


def check(row, units, reduced):
    """Run the actions of units in a row, and return the largest number of whole units."""
    whole, done, largest, last = set(), [], 0, {}
    for k, each in enumerate(row):
        if isinstance(each, Action):
            last[units[each.stage]] = k
            assert units[each.stage] in whole and units[each.stage] not in done
        elif isinstance(each, UnitAction) and each.kind == 'UNSHARD':
            assert each.stage not in whole
            whole.add(each.stage)
        elif isinstance(each, UnitAction):
            whole.remove(each.stage)
            done += [each.stage] * (each.kind == 'REDUCE_GRAD')
        largest = max(largest, len(whole))
    assert sorted(done) == sorted(reduced)
    for unit in reduced:  # Right after its last action, and after messages behind that.
        at = row.index(UnitAction('REDUCE_GRAD', unit))
        between = row[last[unit] + 1 : at]
        assert not any(isinstance(each, Action) for each in between)
        assert not any(isinstance(each, Send) for each in row[at : at + 1])
    return largest


def test_units_are_whole_while_their_actions_run_and_are_reduced_once():
    for name in NAMES:
        for most in [1, 2, 3, 8]:
            for row in rows(name):
                stages = {each.stage for each in row if isinstance(each, Action)}
                units = {j: j for j in stages}
                found = with_unit_actions(row, units, most, stages)
                assert tuple(each for each in found if not isinstance(each, UnitAction)) == row
                assert check(found, units, stages) == min(most, len(stages))


def test_stages_of_one_unit_are_whole_together():
    row = rows('interleaved')[0]
    units = {0: 0, 2: 2, 4: 0, 6: 6}
    assert check(with_unit_actions(row, units, 2, [0, 6]), units, [0, 6]) == 2


def test_the_next_unit_is_gathered_while_an_action_runs():
    row = tuple(map(Action.parse, '0F0 2F0 4F0 4B0 2B0 0B0'.split()))
    assert ' '.join(map(str, with_unit_actions(row, {0: 0, 2: 2, 4: 4}, 2, [0, 2, 4]))) == (
        '0UNSHARD 2UNSHARD 0F0 0RESHARD 4UNSHARD 2F0 4F0 4B0 4REDUCE_GRAD 0UNSHARD 2B0 '
        '2REDUCE_GRAD 0B0 0REDUCE_GRAD'
    )


def test_parameters_that_stay_whole_are_reduced_only():
    row = rows('1f1b')[0]
    found = with_unit_actions(row, {0: 0}, 0, [0])
    assert found == (*row, UnitAction('REDUCE_GRAD', 0))


def test_a_gradient_leaves_before_a_reduction():
    row = with_messages(make('gpipe', 2, 2))[1]
    found = with_unit_actions(row, {1: 1}, 0, [1])
    assert isinstance(found[-2], Message) and found[-1] == UnitAction('REDUCE_GRAD', 1)


def test_gradients_are_complete_within_a_backward_whose_unit_is_reduced_right_after_it():
    units = {0: 0, 2: 2}

    def found(text):
        items = []
        for word in text.split():
            kind = word[1:]
            is_action = len(kind) < 3
            items.append(Action.parse(word) if is_action else UnitAction(kind, int(word[0])))
        return {str(action): unit for action, unit in last_backwards(tuple(items), units).items()}

    assert found('2B0 2REDUCE_GRAD 0UNSHARD 0B0 0REDUCE_GRAD') == {'2B0': 2, '0B0': 0}
    # At the end of a row, the reductions of all units follow each other.
    assert found('2B0 0B0 0REDUCE_GRAD 2REDUCE_GRAD') == {'0B0': 0}
    assert found('0B0 2B0 0REDUCE_GRAD 2REDUCE_GRAD') == {}
    # The second half of a backward is last, or an exchange is between.
    assert found('2I0 2W0 2REDUCE_GRAD') == {}
    assert found('2B0 2RESHARD 2REDUCE_GRAD') == {}
