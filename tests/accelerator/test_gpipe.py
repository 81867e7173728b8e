"""GPipe on the simulated accelerator: the numbers of the unwrapped model, and no race."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.accelerator import on
from tests.helpers import assert_same, gradients
from tests.marks import MODES
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe, NoChunk
from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.engine.streams import new_stream, record_stream, use_stream
from torchgpipe.skip import Namespace

pytestmark = pytest.mark.sim

modes = pytest.mark.parametrize('mode', MODES)
seeds = pytest.mark.parametrize('seed', range(5))


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


@seeds
@pytest.mark.parametrize(
    'mode',
    [*MODES, ['always', 'never', 'always', 'except_last'], ['never', 'always', 'never', 'never']],
)
def test_skips_between_four_devices(mode, seed):
    accelerator.set_delays(seed, 300)
    model = layers()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [3, 3, 3, 3], chunks=5, checkpoint=mode)
    assert [str(device) for device in gpipe.devices] == ['sim:0', 'sim:1', 'sim:2', 'sim:3']
    for _ in range(2):
        x = torch.randn(11, 6, dtype=torch.double, requires_grad=True)
        expected = reference(x)
        (x_grad,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        expected.square().sum().backward(inputs=list(reference.parameters()))
        y = x.detach().to('sim:0').requires_grad_()
        actual = gpipe(y)
        actual.square().sum().backward()
        assert actual.device == torch.device('sim:3')
        assert_same(
            [actual.cpu(), y.grad.cpu(), *gradients(gpipe)],
            [expected, x_grad, *gradients(reference)],
            1e-11,
        )


def test_the_current_streams_stay_the_caller_s():
    accelerator.set_delays(0, 300)
    model = layers()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [3, 3, 3, 3], chunks=5, checkpoint='except_last')
    x = torch.randn(11, 6, dtype=torch.double)
    with ExitStack() as stack:
        for device in gpipe.devices:
            stream = torch.Stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            stack.enter_context(on(stream))
        for module, device in ((reference, 'cpu'), (gpipe, 'sim:0')):
            loss = module(x.to(device)).square().sum()
            for _ in range(3):  # memory of one pass is there for the next
                loss.backward(retain_graph=True)
        assert_same(gradients(gpipe), gradients(reference), 1e-11)


def test_a_stream_of_another_device_is_current_for_a_while_only():
    stream = new_stream(torch.device('sim:1'))
    with use_stream(stream):
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_device_index() == 0


def test_no_stream_uses_the_memory_of_the_host():
    record_stream(torch.ones(2), new_stream(torch.device('sim')))


@seeds
def test_an_input_that_is_handed_on_has_its_gradient(seed):
    class Both(nn.Module):
        def forward(self, x, table):
            return x * table, table

    class Add(nn.Module):
        def forward(self, value):
            return value[0] + value[1]

    accelerator.set_delays(seed, 300)
    model = GPipe(nn.Sequential(Both(), Add()), [1, 1], chunks=5, checkpoint='except_last')
    table = torch.ones(1000, device='sim', requires_grad=True)
    model(torch.ones(5, 1000, device='sim'), NoChunk(table)).sum().backward()
    assert table.grad.tolist() == [10] * 1000


@seeds
def test_forward_without_grad(seed):
    accelerator.set_delays(seed, 300)
    model = layers()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [4, 4, 4], chunks=4)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(9, 6, dtype=torch.double)
            assert_same([gpipe(x.to('sim')).cpu()], [reference(x)])


def test_mixed_devices():
    for devices in [
        ['sim:0', 'cpu', 'sim:1'],
        ['cpu', 'sim:2', 'cpu'],
        ['sim:1', 'sim:0', 'sim:1'],
        ['sim:3', 'sim:3', 'sim:3'],
    ]:
        accelerator.set_delays(3, 200)
        model = layers()
        reference = copy.deepcopy(model)
        gpipe = GPipe(model, [4, 4, 4], devices=devices, chunks=3, checkpoint='except_last')
        x = torch.randn(7, 6, dtype=torch.double)
        reference(x).square().sum().backward()
        gpipe(x.to(gpipe.devices[0])).square().sum().backward()
        assert_same(gradients(gpipe), gradients(reference))


def test_dropout_is_drawn_again():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    gpipe = GPipe(model, [1, 1], devices=['sim:0', 'sim:1'], chunks=4, checkpoint='except_last')
    x = torch.rand(8, 16, device='sim:0', requires_grad=True)
    output = gpipe(x)
    output.sum().backward()
    assert torch.allclose(output.cpu(), (x * x.grad).detach().cpu())
    assert 0 < (output == 0).sum().item() < output.numel()


def test_deferred_batch_norm():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    reference = copy.deepcopy(model)
    gpipe = GPipe(
        model,
        [1, 2],
        devices=['sim:0', 'sim:1'],
        chunks=2,
        checkpoint='except_last',
        deferred_batch_norm=True,
    )
    x = torch.randn(8, 4, dtype=torch.double)
    gpipe(x.to('sim:0')).sum().backward()
    reference(x)
    assert_same(
        [gpipe[1].running_mean.cpu(), gpipe[1].running_var.cpu()],
        [reference[1].running_mean, reference[1].running_var],
    )


def test_autocast():
    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    x = torch.randn(4, 4, device='sim:0')
    with torch.autocast('sim', torch.bfloat16):
        output = gpipe(x)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float for p in gpipe.parameters())


def test_the_error_names_the_devices():
    with pytest.raises(ValueError, match="'cuda:0'.*'sim:0' to 'sim:3'"):
        GPipe(nn.Sequential(nn.ReLU()), [1], devices=['cuda:0'])
    with pytest.raises(ValueError, match="'sim:4'.*'sim:0' to 'sim:3'"):
        GPipe(nn.Sequential(nn.ReLU()), [1], devices=['sim:4'])


def test_the_device_without_a_number_is_the_current_one():
    with torch.accelerator.device_index(2):
        gpipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=['sim'])
    assert gpipe.devices == [torch.device('sim:2')] and gpipe[0].weight.device.index == 2


def test_balances_are_measured_on_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    state = torch.sim.get_rng_state()
    assert sum(balance_by_time(2, model, torch.randn(4, 8), timeout=0.01)) == 3
    assert sum(balance_by_size(2, model, torch.randn(4, 8))) == 3
    assert torch.equal(torch.sim.get_rng_state(), state)


def test_micro_batches_overlap_on_devices():
    """While the second device works on one micro-batch, the first one works on the next."""
    stamps = {}

    class Busy(nn.Module):
        def __init__(self, j):
            super().__init__()
            self.j = j

        def forward(self, x):
            events = [torch.Event(x.device, enable_timing=True) for _ in range(2)]
            events[0].record()
            accelerator.sleep(30000)
            events[1].record()
            stamps.setdefault(self.j, []).append(events)
            return x * 1

    gpipe = GPipe(nn.Sequential(Busy(0), Busy(1)), [1, 1], devices=['sim:0', 'sim:1'], chunks=3)
    with torch.no_grad():
        gpipe(torch.rand(3, 1, device='sim:0'))
    for device in range(2):
        torch.accelerator.synchronize(device)
    assert len(stamps[0]) == len(stamps[1]) == 3
    for i in range(2):
        (begin, _), (_, end) = stamps[0][i + 1], stamps[1][i]
        assert begin.elapsed_time(end) > 0
        assert stamps[0][i][1].elapsed_time(stamps[1][i][0]) > 0
