"""Profiling leaves the module and all random states as they were."""

import copy
import random

import numpy
import torch
from torch import nn

import torchgpipe.balance
from tests.plan.models import MODELS
from torchgpipe.balance import balance_by_size, profile
from torchgpipe.plan.profile import layerwise_sandbox
from torchgpipe.skip.transfer import current_skip_tracker


def test_the_module_and_the_random_state_are_untouched():
    for make in MODELS:
        for training in [True, False]:
            model, sample = make()
            model.train(training)
            called = []
            for layer in model:
                layer.register_forward_hook(lambda *_: called.append('forward'))
                layer.register_forward_pre_hook(lambda *_: called.append('before'))
                layer.register_full_backward_hook(lambda *_: called.append('backward'))
            before = copy.deepcopy(model.state_dict())
            hooks = [dict(layer._forward_hooks) for layer in model]
            given = sample.clone()
            state = torch.get_rng_state()
            profile(model, sample, device='cpu', timeout=0)
            balance_by_size(1, model, sample, device='meta')
            assert torch.equal(torch.get_rng_state(), state) and torch.equal(sample, given)
            assert not called and [dict(layer._forward_hooks) for layer in model] == hooks
            assert all(module.training == training for module in model.modules())
            assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
            assert all(p.grad is None for p in model.parameters()), (make, training)
            assert not current_skip_tracker().tensors, (make, training)
            assert torch.is_grad_enabled(), (make, training)


def test_other_random_states_are_untouched():
    class Draw(nn.Module):
        def forward(self, x):
            return x + random.random() + numpy.random.rand()

    random.seed(0)
    numpy.random.seed(0)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    profile(nn.Sequential(Draw()), torch.rand(2, 3), device='cpu', timeout=0)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_layers_are_called_in_training_mode_with_the_output_of_the_previous_layer():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((self.training, x.requires_grad, float(x.detach().sum())))
            return x + 1

    sample = torch.zeros(1, requires_grad=True)
    with torch.no_grad():
        profile(nn.Sequential(See(), See()).eval(), sample, device='cpu', timeout=0)
    assert set(seen) == {(True, True, 0.0), (True, True, 1.0)}
    seen.clear()
    with torch.inference_mode():
        profile(nn.Sequential(See()), torch.zeros(1), device='cpu', timeout=0)
    assert set(seen) == {(True, False, 0.0)}


def test_the_sandbox_holds_one_layer_at_a_time_in_training_mode():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    for layer in layerwise_sandbox(model, torch.device('meta')):
        assert layer.training and all(p.is_meta for p in layer.parameters())
    assert not any(layer.training or p.is_meta for layer in model for p in layer.parameters())
    assert torchgpipe.balance.profile.layerwise_sandbox is layerwise_sandbox
