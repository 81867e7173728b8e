"""GPipe on the simulated accelerator: the numbers of the unwrapped model, and no race."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.accelerator import on
from tests.helpers import Call, assert_same, gradients, in_partitions
from tests.skip.models import WIDTH, crossing
from torchgpipe import GPipe, NoChunk
from torchgpipe.engine.streams import new_stream, record_stream, use_stream

pytestmark = pytest.mark.sim

seeds = pytest.mark.parametrize('seed', range(5))


def test_the_current_streams_stay_the_caller_s():
    accelerator.set_delays(0, 300)
    model = crossing()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [2, 1, 2, 1], chunks=5, checkpoint='except_last')
    assert [str(device) for device in gpipe.devices] == ['sim:0', 'sim:1', 'sim:2', 'sim:3']
    x = torch.randn(11, WIDTH, dtype=torch.double)
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
    accelerator.set_delays(seed, 300)
    both, add = Call(lambda x, table: (x * table, table)), Call(lambda value: value[0] + value[1])
    model = in_partitions(None, both, add, chunks=5, checkpoint='except_last')
    table = torch.ones(1000, device='sim', requires_grad=True)
    model(torch.ones(5, 1000, device='sim'), NoChunk(table)).sum().backward()
    assert table.grad.tolist() == [10] * 1000


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
