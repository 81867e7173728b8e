"""Random layers that nest backwards, keep state, register hooks or write in place.

Each trains as the unwrapped layer does, or raises an error that names its place.
"""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from tests.devices import DEVICES, cpu_only
from tests.engine.stateful_parts import PARTS, RandomLayer
from tests.helpers import MODES, assert_same, gradients, micro_batches
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import V_SHAPED

#: The plain call, and all schedules.
SCHEDULES = [None, *NAMES]

CHUNKS = 3


def loss_of(output, target):
    """Return a mean over samples."""
    return (output - target).square().mean()


def train_in_parts(model, x, target):
    """Run the unwrapped model on one micro-batch after the other."""
    for part, label in zip(micro_batches(x, CHUNKS), micro_batches(target, CHUNKS)):
        (loss_of(model(part), label) * len(part) / len(x)).backward()


def train(gpipe, schedule, x, target):
    """Run the pipeline."""
    if schedule is None:
        loss_of(gpipe(x), target).backward()
    else:
        gpipe.step(x, target, loss_of, schedule=schedule)


def pipeline(model, schedule, workers, mode):
    """Wrap a copy of the model."""
    places = DEVICES['a worker each' if workers else 'one worker'](4)
    if schedule in V_SHAPED:
        places = [*places[:2], *reversed(places[:2])]
    return GPipe(copy.deepcopy(model), [1] * 4, devices=places, chunks=CHUNKS, checkpoint=mode)


def outcome(model, schedule, workers, mode, steps=2):
    """Return whether the pipeline trains as the model does: ``'equal'``, or its error."""
    gpipe, model = pipeline(model, schedule, workers, mode), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in (model, gpipe)]
    for _ in range(steps):
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        for optimizer in optimizers:
            optimizer.zero_grad()
        train_in_parts(model, x, target)
        try:
            train(gpipe, schedule, x, target)
        except Exception as error:
            return check_error(error, schedule)
        assert_same(gradients(gpipe), gradients(model), 1e-9)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(gpipe.state_dict().values(), model.state_dict().values(), 1e-9)
    return 'equal'


def check_error(error, schedule):
    """Check that an error names the place, and return it."""
    text = '\n'.join([str(error), *getattr(error, '__notes__', ())])
    if schedule is None and 'modified by an inplace operation' in text:
        return text  # It is PyTorch's, in a backward that PyTorch runs.
    assert 'partition' in text or "layer '" in text, text
    return text


def model_of(names):
    """Return a model with a layer of these parts in each partition."""
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 4), RandomLayer(names)) for _ in range(4)]
    ).double()


def errors_of(names, mode, workers, schedules):
    """Return how often a random layer raises an error; each time otherwise, numbers are equal."""
    errors = 0
    for schedule in schedules:
        torch.manual_seed(0)
        if outcome(model_of(names), schedule, workers, mode) != 'equal':
            errors += 1
    return errors


#: Parts that PyTorch or a recomputation refuse, with the modes in which they do so: a buffer or a
#: weight is written that the backward of an earlier micro-batch reads, gradients are taken within
#: forward, or a write is not counted.
REFUSED = {
    'moving_average': ['never'],
    'buffer_of_a_linear_layer': ['never'],
    'ClippedWeight': ['never'],
    'normalized_weight': ['never'],
    'gradient_within_forward': ['except_last', 'always'],
    'weight_through_data': ['except_last', 'always'],
}


@cpu_only('parts use operations that the simulated accelerator does not have')
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('name', PARTS)
def test_each_part(name, mode):
    for workers in (False, True):
        schedules = [None, '1f1b', 'zb-h1', 'v-half']
        errors = errors_of([name], mode, workers, schedules)
        assert errors == (len(schedules) if mode in REFUSED.get(name, ()) else 0)


@pytest.mark.slow
@cpu_only('parts use operations that the simulated accelerator does not have')
@pytest.mark.parametrize('chunk', range(10))
def test_random_layers(chunk):
    """500 layers of up to four parts, each with two schedules in each mode."""

    @seed(chunk)
    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(
        names=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4),
        schedules=st.lists(st.sampled_from(SCHEDULES), min_size=2, max_size=2, unique=True),
        workers=st.booleans(),
    )
    def search(names, schedules, workers):
        for mode in MODES:
            errors_of(names, mode, workers, schedules)

    search()
