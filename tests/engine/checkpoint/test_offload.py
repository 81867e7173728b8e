"""Offload: tensors kept by checkpoints wait in host memory, and results stay the same."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from tests.devices import ACCELERATOR, DEVICES, places
from tests.helpers import (
    WeakLog,
    assert_same,
    call,
    compare_all_pending,
    gradients,
    in_partitions,
    memory_of,
    train_both,
)
from tests.marks import MODES
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe, NoChunk, no_recompute
from torchgpipe.engine.checkpoint.offload import Offload
from torchgpipe.engine.streams import current_stream, new_stream
from torchgpipe.skip import Namespace


def doubled(x):
    """Return a skip tensor and the output."""
    return x, x * 2


def layers():
    """Return a model with two skips that cross each other."""
    a, b = Namespace(), Namespace()
    return nn.Sequential(
        nn.Linear(6, 6),
        Stash(doubled).isolate(a),
        nn.Tanh(),
        nn.Linear(6, 6),
        Stash(doubled).isolate(b),
        nn.ReLU(),
        nn.LayerNorm(6),
        Pop().isolate(a),
        nn.Linear(6, 6),
        nn.GELU(),
        Pop().isolate(b),
        nn.Linear(6, 3),
    ).double()


@pytest.mark.accelerator
def test_results_equal_the_unwrapped_model():
    for mode in [*MODES, ['always', 'never', 'always', 'except_last']]:
        for letters in ['aaaa', 'acac', 'caac']:
            model = layers()
            gpipe = GPipe(
                copy.deepcopy(model),
                [3, 3, 3, 3],
                devices=places(letters),
                chunks=5,
                checkpoint=mode,
                offload=True,
            )
            for _ in range(2):
                model.zero_grad(), gpipe.zero_grad()
                train_both(model, gpipe, torch.randn(11, 6, dtype=torch.double))
            compare_all_pending(gpipe)


@pytest.mark.accelerator
@pytest.mark.parametrize('devices', [2, 1], ids=['two devices', 'one device'])
def test_dropout_marked_layers_and_shared_tensors(devices):
    class Scale(nn.Linear):
        def forward(self, x):
            return super().forward(x[0]) * x[1], x[1]

    results = []
    for waits in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            Scale(4, 4),
            Scale(4, 4),
            nn.Sequential(
                First(), no_recompute(nn.Linear(4, 4)), nn.ReLU(inplace=True), nn.Dropout(0.3)
            ),
        ).double()
        gpipe = GPipe(
            model,
            [1, 2],
            devices=DEVICES['accelerators'].distinct(devices) * 2,
            chunks=3,
            checkpoint='always',
            offload=waits,
        )
        table = torch.rand(4, dtype=torch.double, device=gpipe.devices[0], requires_grad=True)
        x = torch.rand(7, 4, dtype=torch.double, device=gpipe.devices[0])
        for _ in range(2):
            gpipe((x, NoChunk(table))).square().sum().backward()
        results.append([table.grad.cpu(), *gradients(gpipe)])
    assert_same(*results)


class First(nn.Module):
    """Return the first of several."""

    def forward(self, xs):
        return xs[0]


@pytest.mark.accelerator
def test_gradients_may_be_asked_for_twice_and_of_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()).double()
    gpipe = GPipe(
        copy.deepcopy(model),
        [2, 2],
        devices=places('aa'),
        chunks=2,
        checkpoint='always',
        offload=True,
    )
    got = []
    for net in (model, gpipe):
        x = torch.linspace(-1, 1, 20, dtype=torch.double).view(5, 4).requires_grad_()
        output = call(net, x).square().sum()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        (first,) = torch.autograd.grad(output, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        got.append([first, second, x.grad, *gradients(net)])
    assert_same(got[1], got[0], 1e-10)
    with pytest.raises(RuntimeError, match='second time'):
        output.backward()


@pytest.mark.accelerator
def test_save_on_cpu_around_it():
    """The user's hooks decide where to keep the tensors that they pack."""
    for pinned in [False, True]:
        for waits in [False, True]:
            model = layers()
            gpipe = GPipe(
                copy.deepcopy(model),
                [6, 6],
                devices=places('aa'),
                chunks=3,
                checkpoint='except_last',
                offload=waits,
            )
            x = torch.randn(7, 6, dtype=torch.double)
            model(x).square().sum().backward()
            with torch.autograd.graph.save_on_cpu(pinned, ACCELERATOR):
                output = gpipe(x.to(gpipe.devices[0]))
            output.square().sum().backward()
            assert_same(gradients(gpipe), gradients(model), 1e-11)


@pytest.mark.accelerator
def test_a_changed_input_is_named_as_ever():
    gpipe = in_partitions(
        [f'{ACCELERATOR}:0'] * 2,
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        checkpoint=['never', 'always'],
        offload=True,
    )
    gpipe[0].requires_grad_(False)
    gpipe[1].weight = nn.Parameter(torch.ones(1, device=gpipe.devices[0]))
    gpipe[1].register_forward_hook(lambda module, args, output: output * module.weight)
    output = gpipe(torch.rand(2, 4, device=gpipe.devices[0]))
    with pytest.raises(RuntimeError, match="layer '1' of partition 1 .* changed the input"):
        output.sum().backward()


@pytest.mark.accelerator
def test_an_input_that_is_changed_before_backward():
    for change in [lambda x: x.mul_(2), lambda x: x[1:].zero_()]:
        for waits in [False, True]:
            device = torch.device(ACCELERATOR, 0)
            gpipe = in_partitions(
                [device], nn.Linear(4, 4), chunks=2, checkpoint='always', offload=waits
            )
            x = torch.rand(4, 4, device=device)
            output = gpipe(x)
            torch.accelerator.synchronize(0)
            change(x)
            with pytest.raises(RuntimeError, match='modified by an inplace operation'):
                output.sum().backward()


def sizes():
    """Return the bytes that each device has handed out."""
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
    return [
        torch.accelerator.memory_allocated(device)
        for device in range(torch.accelerator.device_count())
    ]


@pytest.mark.sim
def test_inputs_that_wait_for_backward_are_not_on_the_device():
    """Between forward and backward each device holds less, by the inputs of its cells."""
    for mode, kept in [('always', 4), ('except_last', 3), ('never', 0)]:
        m, rows, width = 4, 8, 64
        boundary = rows * width * 4
        used = []
        for waits in (False, True):
            gpipe = GPipe(
                nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]),
                [1] * 4,
                chunks=m,
                checkpoint=mode,
                offload=waits,
            )
            x = torch.rand(m * rows, width, device='sim:0')
            gpipe(x).sum().backward()
            before = sizes()
            output = gpipe(x)
            used.append([after - size for after, size in zip(sizes(), before)])
            del output
        saved = [without - waiting for without, waiting in zip(*used)]
        # Inputs of the first device are parts of the caller's tensor.
        assert saved == [0] + [kept * boundary] * 3


@pytest.mark.accelerator
def test_nothing_is_alive_after_a_step():
    gpipe = in_partitions(
        places('aa'), nn.Linear(4, 4), nn.Linear(4, 4), chunks=3, checkpoint='always', offload=True
    )
    log = WeakLog(*gpipe)
    hosts = []
    store = Offload.store

    def see(self, tensors, compute):
        stored = store(self, tensors, compute)
        assert all(x.is_pinned() for x in stored)
        hosts.extend(map(memory_of, stored))
        return stored

    with mock.patch.object(Offload, 'store', see):
        gpipe(torch.rand(6, 4, device=gpipe.devices[0])).sum().backward()
        gpipe(torch.rand(6, 4, device=gpipe.devices[0]))
    assert len(hosts) == 12 and all(ref.expired() for ref in hosts) and log.alive() == 0


@pytest.mark.parametrize('devices', [['cpu'] * 2, ['cpu:0', 'cpu:1']])
def test_on_the_cpu_it_does_nothing(devices):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Stash(), nn.Linear(4, 4), Pop()).double()
    gpipe = GPipe(
        copy.deepcopy(model),
        [3, 2],
        devices=devices,
        chunks=3,
        checkpoint='except_last',
        offload=True,
    )
    assert gpipe.offload is True
    with mock.patch.object(Offload, 'store', side_effect=AssertionError):
        train_both(model, gpipe, torch.randn(7, 4, dtype=torch.double))


@pytest.mark.accelerator
def test_tensors_that_stay():
    """Tensors of other devices, sparse ones, other types, and tensors without elements."""

    class Type(torch.Tensor):
        pass

    device = torch.device(ACCELERATOR, 0)
    away, compute = Offload(new_stream(device)), current_stream(device)
    tensors = (
        torch.ones(2),
        torch.ones(0, device=device),
        torch.ones(2, device=device).as_subclass(Type),
    )
    stored = away.store(tensors, compute)
    assert all(a is b for a, b in zip(stored, tensors))
    assert all(a is b for a, b in zip(away.fetch(stored, compute), tensors))


@pytest.mark.accelerator
def test_tensors_that_come_back():
    for make in [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, 1:],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.to(torch.bfloat16),
        lambda x: x > 0.5,
        lambda x: x.view(3, 2, 2, 1).to(memory_format=torch.channels_last),
    ]:
        device = torch.device(ACCELERATOR, 0)
        x = make(torch.rand(3, 4, device=device))
        away, compute = Offload(new_stream(device)), current_stream(device)
        if x.is_floating_point():
            x.requires_grad_()
        (stored,) = away.store((x,), compute)
        (back,) = away.fetch((stored,), compute)
        assert stored.is_cpu and stored.is_pinned() and stored.requires_grad == x.requires_grad
        assert back.device == device and back.dtype == x.dtype and torch.equal(back, x)
        assert back.requires_grad == x.requires_grad and back.is_leaf
        assert back.stride() == torch.empty_like(x).stride()
