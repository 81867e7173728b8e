"""Each layer of the zoo trains over processes as it does unwrapped: by stages and by replicas."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import full
from tests.equivalence import (
    LOOPED,
    OPTIONS,
    SIZE,
    Case,
    cases_of,
    loss_of,
    model_of,
    numbers_of,
    run_unwrapped,
)
from tests.shard.processes import run
from tests.zoo import LAYERS
from tests.zoo.computing import COMPUTING
from tests.zoo.nested import NESTED
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.schedule.generators import V_SHAPED

#: Meshes, and how replicas keep parameters.
SETTINGS = {
    'one rank': ({}, 'replicate'),
    'pipe': ({'pipe': 2}, 'replicate'),
    'data': ({'data': 2}, 'replicate'),
    'shard': ({'data': 2}, 'shard'),
}

#: Options that change only the model.
PLAIN_OPTIONS = (
    'plain',
    'layers in evaluation',
    'frozen parameters',
    'tied weights',
    'kept out of recomputation',
    'products kept',
    'all results kept',
)

#: Layers whose forward does not depend on earlier micro-batches, which another replica has.
STATELESS = {**COMPUTING, **NESTED}


def cases_for(setting):
    """Return a case of each layer that a setting admits."""
    cases = []
    for k, name in enumerate(LAYERS):
        if 'data' in SETTINGS[setting][0] and name not in STATELESS:
            continue
        if LAYERS[name].refused or setting in LAYERS[name].lacks:
            continue
        case = cases_of(name)[(k + len(cases)) % 10]
        schedule = case.schedule or '1f1b'
        mode = case.mode if isinstance(case.mode, str) else 'except_last'
        option = PLAIN_OPTIONS[k % len(PLAIN_OPTIONS)]
        cases.append(Case(name, schedule, setting, mode, option))
    return cases


def distributed(case):
    """Return the model of a case on this rank."""
    axes, data = SETTINGS[case.placement]
    pipe = axes.get('pipe', 1)
    has_several_stages = case.schedule in (*LOOPED, *V_SHAPED)
    balance = [1] * 4 if has_several_stages or pipe == 1 else [2, 2]
    places = None
    if pipe == 2 and case.schedule in V_SHAPED:
        places = [0, 1, 1, 0]
    return DistributedGPipe(
        model_of(case.layer, OPTIONS[case.option]),
        balance,
        mesh=init_mesh(**axes),
        chunks=3,
        places=places,
        checkpoint=case.mode,
        keep=None if case.mode == 'never' else OPTIONS[case.option].keep,
        data=data,
    )


def train(case, steps=2):
    """Train a layer on this rank and unwrapped, and compare this rank's tensors by name."""
    wrapped = distributed(case)
    model = model_of(case.layer, OPTIONS[case.option])
    replicas = SETTINGS[case.placement][0].get('data', 1)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05, 0.9) for net in (model, wrapped)]
    shape = (SIZE * replicas, *LAYERS[case.layer].shape)
    for step in range(steps):
        torch.manual_seed(step + 1)
        x, target = torch.randn(2, *shape, dtype=torch.double)
        parts = [*zip(x.chunk(replicas), target.chunk(replicas))]

        torch.manual_seed(step + 1)
        loss = torch.zeros(())
        for part, label in parts:
            loss = loss + run_unwrapped(model, part, label)[1] / replicas
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= replicas
        torch.manual_seed(step + 1)
        part, label = parts[dist.get_rank() if replicas > 1 else 0]
        actual = wrapped.step(part, label, loss_of, schedule=case.schedule)

        torch.testing.assert_close(actual, loss.to(actual), rtol=1e-9, atol=1e-9)
        compare(wrapped, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(wrapped, model)


def compare(wrapped, model):
    """Compare gradients, parameters and buffers of this rank with the unwrapped model's."""
    expected = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in wrapped.named_parameters(remove_duplicate=False):
        close(parameter, expected[name])
        assert (parameter.grad is None) == (expected[name].grad is None), name
        if parameter.grad is not None:
            close(parameter.grad, expected[name].grad)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in wrapped.named_buffers(remove_duplicate=False):
        close(buffer, buffers[name])
    numbers = numbers_of(model)
    for (name, key), number in numbers_of(wrapped).items():
        if name and (name, key) in numbers:
            assert number == numbers[name, key]


def close(actual, expected):
    """Compare a tensor, of which this rank may have a shard."""
    torch.testing.assert_close(
        full(actual).to_dense(), expected.detach().to_dense(), rtol=1e-9, atol=1e-9
    )


def train_all(cases):
    """Train all cases on this rank."""
    for case in cases:
        try:
            train(case)
        except BaseException as error:
            raise AssertionError(f'{case}') from error


@pytest.mark.slow
@pytest.mark.parametrize('setting', SETTINGS)
def test_layers_train_over_ranks_as_unwrapped(setting):
    axes, _ = SETTINGS[setting]
    number = max(axes.values(), default=1)
    run(number, train_all, cases_for(setting))
