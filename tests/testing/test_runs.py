"""Three forms of one training: whole, in parts, and wrapped, from the same state and seeds."""

import pytest
import torch
from torch import nn

from torchgpipe.testing.runs import InParts, Setup, Unwrapped, Wrapped


def setup(module, **options):
    """Return the training of a model in two partitions."""
    return Setup(
        module,
        torch.rand(4, 3),
        [1, 1],
        {'devices': ['cpu:0', 'cpu:1'], 'chunks': 2, **options},
        lambda output: output.square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        torch.float64,
    )


def test_forms_give_the_same_results_in_each_step():
    for form in [InParts, Wrapped]:
        training = setup(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        expected, actual = Unwrapped(training), form(training)
        for step in range(2):
            a, b = expected.step(step), actual.step(step)
            assert (
                {*a}
                == {*b}
                >= {('outputs', 'loss'), ('gradients', '0.weight'), ('parameters', '1.bias')}
            ), form
            assert all(torch.allclose(a[key], b[key], rtol=1e-12) for key in a), form


def test_the_model_itself_is_not_trained():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = [x.clone() for x in module.parameters()]
    Unwrapped(setup(module)).step(0)
    assert all(map(torch.equal, before, module.parameters()))
    assert all(x.grad is None and x.dtype is torch.float32 for x in module.parameters())


def test_an_error_says_in_which_form_it_was_raised():
    with pytest.raises(RuntimeError) as raised:
        InParts(setup(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 2)))).step(1)
    assert 'in step 2 of the unwrapped layers on micro-batches' in raised.value.__notes__[-1]
