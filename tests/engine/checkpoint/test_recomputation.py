"""A recomputation by itself: what it tells the layers, and what it lets go of."""
import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import memory_of, on_first
from torchgpipe import GPipe, is_checkpointing, is_recomputing


@devices
def test_layers_are_told_in_which_pass_they_are(devices):
    log = []

    class Ask(nn.Linear):
        def forward(self, x):
            log.append((is_checkpointing(), is_recomputing()))
            return super().forward(x)

    gpipe = GPipe(nn.Sequential(Ask(4, 4), nn.Linear(4, 4)), [1, 1], devices=devices(2), chunks=3,
                  checkpoint='except_last')
    for _ in range(2):
        gpipe(on_first(gpipe, torch.rand(3, 4))).sum().backward()
        assert log == [(True, False), (True, False), (False, False), (False, True), (False, True)]
        assert not is_checkpointing() and not is_recomputing()
        log.clear()


@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_backward_frees_inputs_also_while_the_loss_is_there(devices, mode):
    given = []

    class Seen(nn.Linear):
        def forward(self, x):
            given.append(memory_of(x))
            return super().forward(x)

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Seen(4, 4)), [1, 1], devices=devices(2), chunks=2,
                  checkpoint=mode)
    loss = gpipe(on_first(gpipe, torch.rand(4, 4))).sum()
    assert not any(memory.expired() for memory in given)
    loss.backward()
    assert given and all(memory.expired() for memory in given)
