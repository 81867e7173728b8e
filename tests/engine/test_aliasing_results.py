"""Tensors that share a memory: a change in place has the history that it has without pipeline."""

import pytest
import torch
from torch import nn

from tests.devices import cpus, devices
from tests.helpers import Layer, assert_same, gradients
from tests.marks import MODES
from torchgpipe import GPipe
from torchgpipe.engine import partition


def keep(linear, x):
    """Keep all outputs."""
    linear.kept.append(linear(x))
    return linear.kept[-1]


def change(linear, x):
    """Change the input in place."""
    x.relu_()
    return linear(x)


def twice(linear, x):
    """Return a tensor twice."""
    y = linear(x)
    return y, y


def view(linear, x):
    """Return a tensor and a view of it."""
    y = linear(x)
    return y, y.view(-1, 2, 2)


def add(linear, xs):
    """Change one in place, and add both."""
    x, y = xs
    x.relu_()
    return linear(x) + y.reshape(-1, 4) * 3


def pass_on(linear, xs):
    """Change nothing."""
    return xs


def models():
    """Return models in which a partition changes a tensor in place that another one also has."""
    first = Layer(keep)
    first.linear.kept = []
    return {
        'kept': nn.Sequential(first, Layer(change), nn.Linear(4, 4)),
        'twice': nn.Sequential(Layer(twice), Layer(add), nn.Linear(4, 4)),
        'twice, passed on': nn.Sequential(Layer(twice), Layer(pass_on), Layer(add)),
        'view': nn.Sequential(Layer(view), Layer(add), nn.Linear(4, 4)),
    }


@cpus
def test_in_v030_gradients_were_wrong(devices):
    for name in models():
        for chunks in [1, 2, 5]:
            for mode in ['never', 'except_last']:
                torch.manual_seed(0)
                model = models()[name].double()
                gpipe = GPipe(model, [1, 1, 1], devices=devices(3), chunks=chunks, checkpoint=mode)
                x = torch.randn(5, 4, dtype=torch.double)

                def train(net):
                    model.zero_grad()
                    model[0].linear.kept = []
                    loss = net(x).square().sum()
                    if model[0].linear.kept:
                        loss = loss + torch.cat(model[0].linear.kept).square().sum()
                    loss.backward()
                    return gradients(model)

                expected = train(lambda x: torch.cat([model(c) for c in x.tensor_split(chunks)]))
                if mode == 'never' or chunks == 1:
                    assert_same(train(gpipe), expected)
                else:
                    with pytest.raises(
                        RuntimeError, match='changed the input of the partition in place'
                    ):
                        train(gpipe)


@pytest.mark.parametrize('name', ['twice', 'twice, passed on'])
def test_a_tensor_given_twice_is_copied_once(name, monkeypatch):
    """In v0.8.0 these were two copies, and to change one in place was refused."""
    monkeypatch.setattr(partition.Engine, 'apart', lambda self, j, k: True)
    monkeypatch.setattr(
        'torchgpipe.engine.backward_order.copy_tensor', lambda x, *streams: x.clone()
    )
    model = models()[name].double()
    gpipe = GPipe(model, [1, 1, 1], devices=['cpu'] * 3, chunks=2, checkpoint='never')
    x = torch.randn(4, 4, dtype=torch.double)
    results = []
    for net in (model, gpipe):
        model.zero_grad()
        net(x).square().sum().backward()
        results.append(gradients(model))
    assert_same(results[1], results[0])


def test_a_copy_separates_tensors_that_share_a_memory(monkeypatch):
    """As if each partition had a memory of its own."""
    monkeypatch.setattr(partition.Engine, 'apart', lambda self, j, k: True)
    monkeypatch.setattr(
        'torchgpipe.engine.backward_order.copy_tensor', lambda x, *streams: x.clone()
    )
    model = models()['view']
    gpipe = GPipe(model, [1, 1, 1], devices=['cpu'] * 3, chunks=2, checkpoint='never')
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match='changed in place, .* before both came from'),
        ):
            gpipe(torch.randn(4, 4))
    # Who does not change them may have them.
    model[1].function = pass_on
    gpipe.set_submodule('2', Layer(lambda linear, xs: linear(xs[0]) + xs[0]))
    gpipe(torch.randn(4, 4)).sum().backward()


@cpus
@pytest.mark.parametrize('mode', MODES)
def test_a_first_layer_works_in_place_on_the_output_of_a_backbone(devices, mode):
    """In v0.3.0: "Output 0 of SplitWithSizesBackward0 is a view and is being modified inplace"."""
    backbone = nn.Linear(4, 4).double()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    gpipe = GPipe(model, [2, 1], devices=devices(2), checkpoint=mode)
    x = torch.randn(6, 4, dtype=torch.double)
    results = []
    for net in (model, gpipe):
        backbone.zero_grad(), model.zero_grad()
        y = backbone(x)
        loss = net(y).sum()
        # The backbone's output changes wherever it is used, as without a pipeline.
        loss = loss + y.square().sum()
        if net is gpipe and mode == 'always':
            with pytest.raises(RuntimeError, match='in place'):
                loss.backward()
            return
        loss.backward()
        results.append([y, *gradients(backbone), *gradients(model)])
    assert_same(results[1], results[0])


@devices
def test_that_there_are_several_micro_batches_of_is_said(devices):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    gpipe = GPipe(model, [1, 1], devices=devices(2), chunks=2)
    with pytest.raises(RuntimeError) as error:
        gpipe(nn.Linear(4, 4)(torch.rand(6, 4)).to(devices.first)).sum().backward()
    assert 'inplace=False' in error.value.__notes__[1]


@pytest.mark.parametrize('chunks, j', [(1, 0), (2, 1)])
def test_that_is_not_said_where_it_is_not_the_reason(chunks, j):
    class ChangeView(nn.Linear):
        def forward(self, x):
            return super().forward(x).unbind()[0].add_(1)

    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[j] = ChangeView(4, 4)
    gpipe = GPipe(
        nn.Sequential(*layers), [1, 1], devices=['cpu', 'cpu'], chunks=chunks, checkpoint='never'
    )
    with pytest.raises(RuntimeError, match='is being modified inplace') as error:
        gpipe(torch.rand(6, 4))
    assert len(error.value.__notes__) == 1
