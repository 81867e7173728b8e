"""What lives how long: nothing of a step outlives it, and no step needs more than it must."""
import pytest
import torch
from torch import nn

from tests.helpers import DEVICES, MODES, WeakLog
from torchgpipe import GPipe

devices = pytest.mark.parametrize('devices', list(DEVICES.values()), ids=list(DEVICES))
modes = pytest.mark.parametrize('mode', MODES)


def make(devices, mode):
    """Give a pipeline, and weak references to all that passes its layers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1),
                          nn.Linear(4, 4), nn.Tanh())
    gpipe = GPipe(model, [2, 2, 2], devices=devices(3), chunks=4, checkpoint=mode,
                  deferred_batch_norm=True)
    return gpipe, WeakLog(*gpipe)


@devices
@modes
def test_nothing_of_a_step_is_alive_after_backward(devices, mode):
    gpipe, log = make(devices, mode)
    for _ in range(30):
        loss = gpipe(torch.rand(8, 4)).sum()
        loss.backward()
        assert log.alive() == 0
        log.refs.clear()


@devices
@modes
def test_nothing_of_a_step_is_alive_if_backward_never_comes(devices, mode):
    gpipe, log = make(devices, mode)
    for _ in range(30):
        output = gpipe(torch.rand(8, 4))
        del output
        assert log.alive() == 0
        log.refs.clear()


@devices
@modes
def test_nothing_is_alive_after_a_forward_without_grad(devices, mode):
    gpipe, log = make(devices, mode)
    with torch.no_grad():
        for _ in range(30):
            output = gpipe(torch.rand(8, 4))
            assert log.alive() == 0
            log.refs.clear()
    assert output is not None


@devices
def test_checkpointed_activations_are_not_alive_after_forward(devices):
    """Of the first partition, Linear and BatchNorm1d, only what crosses the boundary is."""
    alive = {}
    for mode in MODES:
        gpipe, _ = make(devices, mode)
        log = WeakLog(gpipe[0])
        x = torch.rand(8, 4)
        output = gpipe(x)
        del x
        alive[mode] = log.alive()
        del output
    # Per micro-batch, the Linear's input (part of the mini-batch) and its output.
    assert alive == {'never': 8, 'except_last': 5, 'always': 4}


@devices
def test_gradients_of_a_failed_backward_hold_nothing(devices):
    gpipe, log = make(devices, 'always')

    def fail(grad):
        raise ZeroDivisionError

    output = gpipe(torch.rand(8, 4))
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    del output
    assert log.alive() == 0
