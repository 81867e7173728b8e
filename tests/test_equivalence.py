"""Each layer of the zoo trains in a pipeline as it does unwrapped, whatever the options."""

from itertools import combinations

import pytest

from tests.devices import DEVICES
from tests.equivalence import MODES, OPTIONS, PLACEMENTS, SCHEDULES, cases_of, check
from tests.zoo import LAYERS


@pytest.mark.slow
@pytest.mark.parametrize('name', LAYERS)
def test_a_layer_trains_as_unwrapped(name):
    for case in cases_of(name):
        check(case, DEVICES['a worker each'])


def pairs_of(case):
    """Return each pair of values of two factors."""
    return {*combinations(vars(case).items(), 2)}


def test_each_pair_of_values_is_in_some_case():
    factors = {
        'layer': LAYERS,
        'schedule': SCHEDULES,
        'placement': PLACEMENTS,
        'mode': MODES,
        'option': OPTIONS,
    }
    covered = set()
    for name in LAYERS:
        for case in cases_of(name):
            covered |= pairs_of(case)

    missing = set()
    for (one, values), (other, other_values) in combinations(factors.items(), 2):
        for value in values:
            for other_value in other_values:
                pair = (one, value), (other, other_value)
                if pair not in covered:
                    missing.add(pair)
    lacking = {
        (('layer', name), ('option', option))
        for name, entry in LAYERS.items()
        for option in entry.lacks & OPTIONS.keys()
    }
    assert missing == lacking
