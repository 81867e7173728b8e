"""Each layer of the zoo trains in a pipeline as it does unwrapped, whatever the options."""

import random
from itertools import combinations

import pytest
from torch import nn

from tests.devices import DEVICES
from tests.equivalence import MODES, OPTIONS, PLACEMENTS, SCHEDULES, cases_of, check
from tests.zoo import LAYERS
from tests.zoo.entry import Entry
from torchgpipe.engine import gradients
from torchgpipe.schedule.generators import SPLIT

WORKERS, ACCELERATORS = DEVICES['a worker each'], DEVICES['accelerators']

#: Cases of a layer on accelerators: many of the simulated ones take long.
ON_ACCELERATORS = 2


def test_each_layer_trains_as_unwrapped_in_one_case():
    for name in LAYERS:
        check(cases_of(name)[0], WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize('group', range(24))
def test_layers_train_as_unwrapped_in_all_other_cases(group):
    for name in list(LAYERS)[group::24]:
        for case in cases_of(name)[1:]:
            check(case, WORKERS)


@pytest.mark.slow
@pytest.mark.parametrize('group', range(4))
def test_random_sequences_of_layers_train_as_unwrapped(group):
    choose = random.Random(group)
    names = [name for name, entry in LAYERS.items() if entry.shape == (4,)]
    for _ in range(12):
        name = '+'.join(choose.sample(names, choose.randint(2, 4)))
        cases = [case for case in cases_of(name) if case.option != 'autocast']
        for case in choose.sample(cases, 4):
            check(case, WORKERS)


@pytest.mark.accelerator
@pytest.mark.parametrize('group', range(8))
def test_layers_train_on_accelerators_as_on_the_cpu(group):
    names = [name for name in LAYERS if admits_accelerators(name)]
    for name in names[group::8]:
        cases = [case for case in cases_of(name) if case.option != 'autocast']
        for case in cases[:ON_ACCELERATORS]:
            check(case, ACCELERATORS)


def admits_accelerators(name):
    """Return whether a layer draws nothing, and the simulated accelerator has its operations."""
    return not LAYERS[name].draws and 'accelerators' not in LAYERS[name].lacks


def test_a_planted_fault_in_the_split_backward_of_a_layer_is_found(monkeypatch):
    """Only the second half of the backward of one layer is wrong."""
    weight_grads = gradients._weight_grads

    def planted(function, grad, input, weights):
        grads = weight_grads(function, grad, input, weights)
        if weights[0].shape != (5, 4):
            return grads
        return tuple([None if grad is None else grad * 1.5 for grad in grads])

    monkeypatch.setattr(gradients, '_weight_grads', planted)
    layer = Entry(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)))
    monkeypatch.setitem(LAYERS, 'planted', layer)
    found = set()
    for case in cases_of('planted'):
        try:
            check(case, WORKERS)
        except AssertionError:
            found.add(case.schedule)
    assert found and found <= {*SPLIT}


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
