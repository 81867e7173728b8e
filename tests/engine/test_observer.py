"""Observers: one for a model, and none in its copies."""

import copy

import pytest

from tests.devices import devices
from tests.timeline.test_recorder import M, assert_nothing_observes, call, check, pipeline, step
from torchgpipe.timeline import record


@devices
def test_one_recording_of_a_model_at_a_time(devices):
    model = pipeline(devices)
    with record(model) as timeline:
        with pytest.raises(RuntimeError, match='being recorded already'):
            with record(model):
                pass
        call(model)
    check(timeline, M - 1)
    assert_nothing_observes(model)


@devices
def test_two_models_at_a_time(devices):
    one, other = pipeline(devices), pipeline(devices, 'never')
    with record(one) as first, record(other) as second:
        call(one)
        step(other)
    check(first, M - 1)
    check(second, 0)
    assert_nothing_observes(one)


@devices
def test_a_copy_of_a_model_is_not_recorded(devices):
    model = pipeline(devices)
    with record(model) as timeline:
        other = copy.deepcopy(model)
        call(other)
    assert timeline.actions == ()
    assert_nothing_observes(other)
