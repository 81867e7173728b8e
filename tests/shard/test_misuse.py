"""Operations that treat a shard as a whole tensor, and would be silently wrong."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import torchgpipe.shard as ts
from tests.shard.plain import in_turn
from tests.shard.processes import run

X = torch.linspace(-1, 1, 12, dtype=torch.double).view(2, 6)


def layer(dim=1):
    """Return a sharded layer."""
    return ts.nn.ParallelLinear(6, 4, dim=dim, dtype=torch.double)


def computed():
    """Let something compute the weight."""
    makers = [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda x: prune.l1_unstructured(x, 'weight', 0.5),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r'the weight of .*ParallelLinear.* is computed'):
            make(layer())(X)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        old = weight_norm(layer(0))
    with pytest.raises(ValueError, match='is computed, as by weight_norm'):
        old(X)


def replaced():
    """Let something put another parameter in the place of one, or the user."""
    from torch.distributed.fsdp import fully_shard

    model = layer()
    fully_shard(model)
    with pytest.raises(ValueError, match='put there as fully_shard does'):
        model(X)

    model = layer()
    expected = model(X)
    model.weight = nn.Parameter(model.weight.detach().clone())
    assert torch.equal(model(X), expected)
    tensors = {name: x.detach().clone() for name, x in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, tensors, (X,)), expected)


def transformed():
    """Differentiate by torch.func."""
    for model in (layer(0), layer(1)):
        with pytest.raises(RuntimeError, match='torch.func.*call backward'):
            torch.func.grad(lambda x: model(x).sum())(X)


def encoder():
    """Evaluate an encoder layer, which reads its layers' weights if it may."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, dtype=torch.double)
    model = copy.deepcopy(plain)
    model.linear1 = ts.nn.ParallelLinear.convert_parallel_linear(model.linear1, 1)
    model.activation = nn.Sequential(nn.ReLU(), ts.nn.RegisterParallelDim(-1))
    model.linear2 = ts.nn.ParallelLinear.convert_parallel_linear(model.linear2, 0)
    model.activation_relu_or_gelu = 1  # as it is with F.relu
    with torch.no_grad():
        found, expected = model.eval()(X[None]), plain.eval()(X[None])
    assert (found - expected).abs().max() < 1e-12
    assert not torch.backends.mha.get_fastpath_enabled()
    ts.distributed.destroy_process_group()
    assert torch.backends.mha.get_fastpath_enabled()


def whole():
    """Load a whole weight into a layer that has a part of it."""
    model = nn.Sequential(layer())
    with pytest.raises(
        RuntimeError,
        match="0.weight is full, and the layer takes this rank's "
        r'shard: load ts.relocate_state_dict\(model, state_dict\)',
    ):
        model.load_state_dict(nn.Sequential(nn.Linear(6, 4)).state_dict())
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(nn.Sequential(nn.Linear(5, 3)).state_dict())
    assert 'relocate' not in str(raised.value)


def test_no_operation_takes_a_shard_for_a_whole_tensor():
    run(2, in_turn, computed, replaced, transformed, whole, encoder, group=2)
