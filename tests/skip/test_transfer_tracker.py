"""Trackers: each thread has one, where layers stash and pop."""

import threading

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe
from torchgpipe.base.structure import bare
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.streams import CPUStream
from torchgpipe.skip.transfer import SkipTracker, current_skip_tracker, use_skip_tracker

batch = Chunk((torch.ones(1),), bare)


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


def test_a_model_needs_no_pipeline():
    x = torch.rand(3, requires_grad=True)
    nn.Sequential(Stash(), Pop())(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match='without portals'):
        SkipTracker().copy(batch, CPUStream, CPUStream, None, 'skip')


@devices
def test_a_pipeline_leaves_the_tracker_of_its_caller(devices):
    gpipe = GPipe(nn.Sequential(Stash(), Pop()), [1, 1], devices=devices(2))
    with use_skip_tracker(SkipTracker()):
        outside = current_skip_tracker()
        gpipe(torch.rand(2, 3, device=devices.first))
        assert current_skip_tracker() is outside
