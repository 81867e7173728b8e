"""What layers were seen to do, by itself."""
from torchgpipe.engine.checkpoint.observed import Observed


def test_false_alarms_are_looked_into_less_and_less_often():
    observed, looked_into = Observed(), []
    for alarm in range(1, 20):
        observed.draws = False
        observed.watch_draws()
        if observed.draws is None:
            looked_into.append(alarm)
    assert looked_into == [1, 2, 4, 8, 16]


def test_what_is_seen_to_draw_is_not_asked_again():
    observed = Observed()
    observed.draws = True
    observed.watch_draws()
    assert observed.draws is True


def test_layers_that_did_something_new_are_watched_as_at_first():
    observed = Observed()
    observed.draws = observed.watched = True
    observed.watch_again()
    assert observed.draws is None and not observed.watched
