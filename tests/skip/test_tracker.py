"""Trackers: per thread, with portals in a pipeline only."""
import threading

import pytest
import torch
from torch import nn

from tests.devices import one_worker
from tests.skip.layers import Pop, Stash
from torchgpipe.engine.passes import enable_checkpointing, enable_recomputing
from torchgpipe.microbatch import Batch
from torchgpipe.skip import tracker as tracker_module
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.portal import Portal
from torchgpipe.skip.tracker import (SkipTracker, SkipTrackerThroughPortals,
                                     SkipTrackerThroughPotals, current_skip_tracker,
                                     use_skip_tracker)
from torchgpipe.stream import CPUStream, default_stream

batch = Batch(torch.ones(1))


@pytest.fixture
def tracker():
    """Give a tracker of a layout with one skip to another partition and one within."""
    return SkipTrackerThroughPortals(SkipLayout(num_partitions=2, skip_routes={
        (None, 'far'): (0, 1), (None, 'near'): (0, 0)}))


def test_each_thread_has_a_plain_tracker_of_its_own():
    found = []
    thread = threading.Thread(target=lambda: found.append(current_skip_tracker()))
    thread.start()
    thread.join()
    assert type(found[0]) is SkipTracker and found[0] is not current_skip_tracker()


def test_a_tracker_is_used_within_a_context():
    outside, inside = current_skip_tracker(), SkipTracker()
    with pytest.raises(ZeroDivisionError), use_skip_tracker(inside):
        assert current_skip_tracker() is inside
        raise ZeroDivisionError
    assert current_skip_tracker() is outside


def test_the_spelling_of_0_0_7():
    assert SkipTrackerThroughPotals is SkipTrackerThroughPortals
    assert 'SkipTrackerThroughPotals' in tracker_module.__all__


def test_no_portal_without_a_pipeline(monkeypatch):
    def deny(*_):
        raise AssertionError('a portal')

    monkeypatch.setattr(Portal, '__init__', deny)
    x = torch.rand(3, requires_grad=True)
    nn.Sequential(Stash(), Pop())(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match='without portals'):
        SkipTracker().copy(batch, CPUStream, CPUStream, None, 'skip')


def test_a_portal_for_what_goes_to_another_partition_only(tracker):
    tracker.save(batch, None, 'far', torch.ones(1))
    tracker.save(batch, None, 'near', torch.ones(1))
    assert set(tracker.portals) == {(None, 'far')}
    assert set(tracker.tensors) == {(None, 'near')}
    assert tracker.load(batch, None, 'near').item() == 1 and not tracker.tensors
    with pytest.raises(KeyError):
        tracker.load(batch, None, 'near')


def test_a_portal_is_reused(tracker):
    tracker.save(batch, None, 'far', torch.ones(1))
    portal = tracker.portals[None, 'far']
    tracker.save(batch, None, 'far', torch.zeros(1))
    assert tracker.portals[None, 'far'] is portal and tracker.load(batch, None, 'far').item() == 0


@one_worker
def test_tensor_life_without_checkpointing(devices, tracker):
    stream = default_stream(devices.first)
    tracker.save(batch, None, 'far', torch.ones(1, device=devices.first))
    assert tracker.portals[None, 'far'].tensor_life == 1
    tracker.copy(batch, stream, stream, None, 'far')
    tracker.load(batch, None, 'far')
    assert tracker.portals[None, 'far'].tensor_life == 0


def test_tensor_life_with_checkpointing(tracker):
    with enable_checkpointing():
        tracker.save(batch, None, 'far', torch.ones(1))
        assert tracker.portals[None, 'far'].tensor_life == 2
        tracker.load(batch, None, 'far')
        assert tracker.portals[None, 'far'].tensor_life == 1
    with enable_recomputing():
        tracker.load(batch, None, 'far')
        assert tracker.portals[None, 'far'].tensor_life == 0
        tracker.save(batch, None, 'far', torch.ones(1))
        assert tracker.portals[None, 'far'].tensor_life == 0


def test_a_cleared_tracker_holds_nothing(tracker):
    tracker.save(batch, None, 'far', torch.ones(1, requires_grad=True))
    tracker.save(batch, None, 'near', torch.ones(1))
    tracker.clear()
    assert not tracker.tensors and not tracker.phonies
    assert tracker.portals[None, 'far'].tensor is None
