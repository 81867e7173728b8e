"""Recorded calls of modules."""

import threading

import torch
from torch import nn

from tests.helpers import Spy
from torchgpipe.testing.differences import recorded_calls


def test_calls_in_two_threads():
    """The one that began first ends first."""
    began, ended = threading.Event(), threading.Event()
    model = nn.Sequential(Spy(lambda x: began.wait(10)), Spy(lambda x: ended.wait(10)))
    calls = recorded_calls(model, torch.device('cpu'))

    def second():
        model[1].register_forward_pre_hook(lambda *_: began.set())
        model[1](torch.tensor(2.0))

    thread = threading.Thread(target=second)
    model[0].register_forward_pre_hook(lambda *_: thread.start())
    model[0](torch.tensor(1.0))
    ended.set()
    thread.join()
    assert [(call.name, call.outputs) for call in calls] == [('0', [1]), ('1', [2])]
