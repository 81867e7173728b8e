"""The tracker of torchgpipe 0.0.7: portals for tensors passed to another partition."""

import pytest
import torch

from tests.devices import devices
from torchgpipe.checkpoint import enable_checkpointing, enable_recomputing
from torchgpipe.microbatch import Batch
from torchgpipe.skip import tracker as tracker_module
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.stream import default_stream

SkipTrackerThroughPortals = tracker_module.SkipTrackerThroughPortals

batch = Batch(torch.ones(1))


@pytest.fixture
def tracker():
    """Return a tracker of a layout with one skip to another partition and one within."""
    return SkipTrackerThroughPortals(
        SkipLayout(num_partitions=2, skip_routes={(None, 'far'): (0, 1), (None, 'near'): (0, 0)})
    )


def test_the_spelling_of_0_0_7():
    assert tracker_module.SkipTrackerThroughPotals is SkipTrackerThroughPortals


def test_portals_are_for_tensors_that_go_to_another_partition(tracker):
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


@devices
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
