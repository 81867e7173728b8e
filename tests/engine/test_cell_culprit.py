"""Remedies: errors of PyTorch's own that come of the pipeline say the way out."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.devices import devices, places
from tests.helpers import Call, in_partitions
from torchgpipe import GPipe


def notes_of(function):
    """Return the notes of the error that a function raises."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        function()
    return error.value.__notes__


def train(gpipe, x):
    """Go forward and back."""
    gpipe(x).sum().backward()


@devices
def test_a_first_layer_in_place_on_an_input_that_requires_grad(devices):
    gpipe = in_partitions(devices, nn.ReLU(inplace=True), chunks=2)
    x = torch.rand(4, 2, device=devices.first, requires_grad=True) * 1
    place, remedy = notes_of(lambda: train(gpipe, x))
    assert place.endswith("layer '0'") and 'chunks=1' in remedy


@devices
def test_too_few_values_to_normalise(devices):
    gpipe = in_partitions(devices, nn.Linear(2, 2), nn.BatchNorm1d(2), chunks=4)
    place, remedy = notes_of(lambda: gpipe(torch.rand(4, 2, device=devices.first)))
    assert place.endswith("layer '1'") and 'fewer chunks' in remedy


def transformed(x):
    """Transform a function."""
    return x * torch.func.grad(lambda x: x.square().sum())(x)


@devices
def test_a_transform_in_a_checkpointed_layer(devices):
    gpipe = GPipe(
        nn.Sequential(nn.Linear(2, 2), Call(transformed)),
        [2],
        devices=devices(1),
        checkpoint='always',
    )
    place, remedy = notes_of(lambda: gpipe(torch.rand(4, 2, device=devices.first)))
    assert place.endswith("layer '1'") and "checkpoint='never'" in remedy


@devices
def test_a_second_backward(devices):
    model = nn.Sequential(nn.Linear(2, 2), Call(lambda x: (x, x * 2)))
    gpipe = GPipe(model, [1, 1], devices=devices(2), chunks=2, checkpoint='always')
    a, b = gpipe(torch.rand(4, 2, device=devices.first))
    a.sum().backward()
    (remedy,) = notes_of(b.sum().backward)
    assert 'come of one recomputation' in remedy and 'retain_graph=True' in remedy


@pytest.mark.accelerator
def test_tensors_on_several_devices():
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.constants = [torch.ones(2)]

        def forward(self, x):
            return x + self.constants[0]

    gpipe = in_partitions(places('aa'), nn.Linear(2, 2), Add(), chunks=2)
    for x, layer in ((torch.rand(4, 2), '0'), (torch.rand(4, 2, device=gpipe.devices[0]), '1')):
        place, remedy = notes_of(lambda: gpipe(x))
        assert place.endswith(f"layer '{layer}'")
        assert 'model.devices[0]' in remedy and 'register_buffer' in remedy


def change_one_of_several_views(x):
    """Make a change that also raises without a pipeline."""
    return (x * 1).requires_grad_().chunk(2)[0].add_(1)


@devices
def test_errors_of_a_layer_have_no_remedy_of_the_pipeline(devices):
    for layers, options in [
        ([nn.Identity(), nn.BatchNorm1d(2)], {'chunks': 1}),
        ([nn.Identity(), Call(change_one_of_several_views)], {'chunks': 2}),
        ([Call(change_one_of_several_views), nn.Identity()], {'chunks': 1}),
        ([nn.Identity(), Call(transformed)], {'checkpoint': 'never'}),
    ]:
        gpipe = GPipe(nn.Sequential(*layers), [1, 1], devices=devices(2), **options)
        x = torch.rand(options.get('chunks', 2), 2, device=devices.first)
        with saved_tensors_hooks(id, id):
            (place,) = notes_of(lambda: gpipe(x))
        assert place.startswith('in partition ')


@devices
def test_an_input_that_is_changed_before_the_only_backward(devices):
    gpipe = in_partitions(devices, nn.Linear(2, 2), checkpoint='always')
    x = torch.rand(4, 2, device=devices.first)
    output = gpipe(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match='inplace') as error:
        output.sum().backward()
    (place,) = error.value.__notes__
    assert place.startswith('in the recomputation of partition 0 on ')
    assert place.endswith('micro-batch 0 of 1')
