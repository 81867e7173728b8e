"""Parameters, gradients and states of optimizers that wait on the host, by a policy of FSDP2."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from tests import accelerator
from tests.devices import ACCELERATOR
from tests.shard.processes import Failure, end_idle, outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.distributed.ties import Ties

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def new_processes():
    """Have new ranks, as they load the accelerator before their first backward pass."""
    end_idle()


def layers():
    """Return layers with the same values everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch():
    """Return a mini-batch on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(8, 6, dtype=torch.float64, generator=generator),
        torch.randn(8, 4, dtype=torch.float64, generator=generator),
    )


def distance(output, target):
    """Return a mean over samples."""
    return (output - target).square().mean()


def trained():
    """Train on a device; give losses, norms, the output, and where things are."""
    if ACCELERATOR == 'sim':
        accelerator.load()
    torch.accelerator.set_device_index(0)
    model = DistributedGPipe(
        layers(),
        [2, 1],
        mesh=init_mesh(device_type=ACCELERATOR),
        chunks=2,
        data='shard',
        offload_policy=CPUOffloadPolicy(),
    )
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.1), []
    x, target = (each.to(ACCELERATOR) for each in batch())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.step(x, target, distance)
        found += [loss.item(), model.clip_grad_norm_(0.5).item()]
        optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values()]
    kinds = {
        each.device.type
        for each in (*states, *model.parameters(), *(x.grad for x in model.parameters()))
    }
    return found, model(x).cpu(), kinds


def test_a_model_whose_parameters_wait_on_the_host():
    module, (x, target), expected = layers(), batch(), []
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = distance(module(x), target)
        loss.backward()
        expected += [loss.item(), nn.utils.clip_grad_norm_(module.parameters(), 0.5).item()]
        optimizer.step()
    ((found, output, kinds),) = run(1, trained)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(output, module(x).detach(), rtol=1e-10, atol=1e-10)
    assert kinds == {'cpu'}


# --- memory of a device
# ---------------------------------------------------------------------------------------------

#: Layers, each a stage, and their width: large enough for a library's workspace on a real device.
N, WIDTH = 8, 256 if ACCELERATOR == 'sim' else 4096

#: The parameters, in bytes of float64.
SIZE = 8 * N * (WIDTH * WIDTH + WIDTH)

OFFLOAD = {'data': 'shard', 'offload_policy': CPUOffloadPolicy()}


def large():
    """Return layers on the meta device."""
    with torch.device('meta'):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(N)))


def limit(size):
    """Limit the bytes of the device. Return a context that fails if work on it races."""
    if ACCELERATOR == 'sim':
        accelerator.load()
        accelerator.set_memory_limit(size)
        accelerator.set_delays(1, 100)
        return accelerator.no_race()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])
    return nullcontext()


def squeezed(share, **options):
    """Train on a device with room for so many times the parameters; give numbers, and the peak."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator)
    with limit(int(share * SIZE)):
        torch.accelerator.reset_peak_memory_stats()  # A rank may have run before.
        model = DistributedGPipe(
            large(),
            [1] * N,
            mesh=init_mesh(device_type=ACCELERATOR),
            chunks=4,
            compare_every=0,
            **options,
        )  # digests take room
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=2.56 / WIDTH), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.step(
                x.to(ACCELERATOR), target.to(ACCELERATOR), distance, schedule='looped-bfs'
            )
            found += [loss.item(), model.clip_grad_norm_(0.5).item()]
            optimizer.step()
        output = model(x.to(ACCELERATOR)).cpu()
    return found, output, torch.accelerator.max_memory_allocated() / SIZE


@pytest.mark.parametrize('options', [{}, {'offload': True, 'checkpoint': 'always'}])
def test_a_device_has_parameters_and_gradients_of_one_stage(options):
    """Its memory has parameters, gradients, buffers sent to other replicas, and activations."""
    ((expected, output, whole),) = run(1, squeezed, 6.0)
    ((found, own, peak),) = run(1, partial(squeezed, **OFFLOAD, **options), 0.75)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own, output, rtol=1e-12, atol=1e-12)
    # On CUDA there is the workspace of cuBLAS, too.
    assert peak < (3.5 if ACCELERATOR == 'sim' else 3.6) / N and whole > 5


def test_without_a_policy_a_device_needs_room_for_all():
    (failure,) = outcomes(1, squeezed, 2.0)
    assert isinstance(failure, Failure) and 'OutOfMemoryError' in failure.text


def spread():
    """Let ranks tell each other a tied weight that waits on the host."""
    module, messages = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    ties = [((0, '0.weight'), (1, '1.weight'))]
    with (
        limit(SIZE),
        patch.object(dist, 'send', lambda x, *args: messages.append(x)),
        patch.object(dist, 'recv', lambda x, *args: messages.append(x.fill_(2))),
    ):
        for ranks in ([0, 1], [1, 0]):  # This is rank 0.
            Ties({'0': module[0], '1': module[1]}, ties, ranks, None, 0).spread(
                torch.device(ACCELERATOR, 0)
            )
    return [x.device.type for x in messages], module[1].weight.tolist()


def test_a_tied_weight_that_waits_on_the_host_travels_between_devices():
    kinds, weight = run(1, spread)[0]
    assert kinds == [ACCELERATOR] * 2 and weight == [[2.0] * 3] * 3
