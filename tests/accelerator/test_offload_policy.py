"""Parameters, gradients and states of optimizers that wait on the host, by a policy of FSDP2."""
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from tests import accelerator
from tests.devices import ACCELERATOR
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh

pytestmark = pytest.mark.accelerator


def layers():
    """Return layers with the same values everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch():
    """Return a mini-batch on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(8, 6, dtype=torch.float64, generator=generator),
            torch.randn(8, 4, dtype=torch.float64, generator=generator))


def distance(output, target):
    """Return a mean over samples."""
    return (output - target).square().mean()


def trained():
    """Train on a device; give losses, norms, the output, and where things are."""
    if ACCELERATOR == 'sim':
        accelerator.load()
    model = DistributedGPipe(layers(), [2, 1], mesh=init_mesh(device_type=ACCELERATOR), chunks=2,
                             data='shard', offload_policy=CPUOffloadPolicy())
    optimizer, found = torch.optim.AdamW(model.parameters(), .1), []
    x, target = (each.to(ACCELERATOR) for each in batch())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.step(x, target, distance)
        found += [loss.item(), model.clip_grad_norm_(.5).item()]
        optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    kinds = {each.device.type for each in (
        *states, *model.parameters(), *(x.grad for x in model.parameters()))}
    return found, model(x).cpu(), kinds


def test_a_model_whose_parameters_wait_on_the_host():
    module, (x, target), expected = layers(), batch(), []
    optimizer = torch.optim.AdamW(module.parameters(), .1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = distance(module(x), target)
        loss.backward()
        expected += [loss.item(), nn.utils.clip_grad_norm_(module.parameters(), .5).item()]
        optimizer.step()
    (found, output, kinds), = run(1, trained)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(output, module(x).detach(), rtol=1e-10, atol=1e-10)
    assert kinds == {'cpu'}
