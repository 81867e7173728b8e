"""Linear layers that gather the tokens of their input: results, gradients, saved tensors."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.shard.processes import run
from torchgpipe.distributed import SequenceColwiseParallel, dry_run
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, layers, tensor_plan


def product(has_bias, dim, is_local, dtype):
    """Compare a layer with the whole one; return the elements that autograd saves."""
    mesh = init_device_mesh('cpu', (torch.distributed.get_world_size(),), mesh_dim_names=('t',))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    whole = nn.Linear(6, 5, has_bias)  # 5 features that ranks share unevenly
    split = nn.Linear(6, 5, has_bias)
    split.load_state_dict(whole.state_dict())
    whole.to(dtype)
    split.to(dtype)
    style = SequenceColwiseParallel(sequence_dim=dim, use_local_output=is_local)
    parallelize_module(split, mesh, style)

    x = torch.randn(4, 4, 6, dtype=dtype, requires_grad=True)
    expected = whole(x)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()

    tokens = x.detach().chunk(ranks, dim)[rank].clone().requires_grad_()
    saved = []

    def keep(value):
        saved.append(value.numel())
        return value

    with saved_tensors_hooks(keep, lambda value: value):
        y = split(tokens)
    part = distribute_tensor(weight, mesh, [Shard(2)]).to_local()
    if is_local:
        (y * part).sum().backward()
    else:
        assert isinstance(y, DTensor) and y.shape == expected.shape
        (y.to_local() * part).sum().backward()
        y = y.to_local()

    same = torch.testing.assert_close
    same(y, distribute_tensor(expected.detach(), mesh, [Shard(2)]).to_local())
    same(tokens.grad, x.grad.chunk(ranks, dim)[rank])
    same(split.weight.grad.full_tensor(), whole.weight.grad)
    if has_bias:
        same(split.bias.grad.full_tensor(), whole.bias.grad)
    return sum(saved), tokens.numel() + split.weight.to_local().numel()


@pytest.mark.parametrize('has_bias', [True, False])
@pytest.mark.parametrize('dim, is_local', [(1, True), (0, False)])
def test_results_equal_the_whole_layer_and_gathered_tokens_are_not_saved(has_bias, dim, is_local):
    for saved, expected in run(2, product, has_bias, dim, is_local, torch.float64):
        assert saved == expected


def under_autocast():
    """Return dtypes of output and gradients, and the dtypes that autograd saves."""
    mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('t',))
    layer = nn.Linear(6, 4)
    parallelize_module(layer, mesh, SequenceColwiseParallel())
    x = torch.randn(2, 3, 6, requires_grad=True)
    saved = []

    def keep(value):
        saved.append(str(value.dtype))
        return value

    with torch.autocast('cpu', torch.bfloat16), saved_tensors_hooks(keep, lambda value: value):
        y = layer(x)
    y.float().sum().backward()
    return str(y.dtype), str(x.grad.dtype), str(layer.weight.grad.dtype), saved


def test_autocast():
    """Tokens are saved in the dtype of the product, and the weight is not copied."""
    for output, of_x, of_weight, saved in run(2, under_autocast):
        assert output == 'torch.bfloat16'
        assert of_x == of_weight == 'torch.float32'
        assert saved == ['torch.bfloat16', 'torch.float32']


def test_another_module_is_refused():
    mesh = None
    with pytest.raises(TypeError, match='is for nn.Linear, but this is a Embedding'):
        SequenceColwiseParallel()._apply(nn.Embedding(2, 2), mesh)


def saved_by_a_block(sequence_parallel):
    """Return the activations of a block for one micro-batch on one of four ranks, in a dry run."""
    with torch.device('meta'):
        module = layers(GPT(Sizes(64, 256, 128, 8, 3)))
    tokens = torch.empty(2, 256, dtype=torch.long, device='meta')
    report = dry_run(
        module,
        [2, 1, 2],
        tokens,
        tokens,
        parallel_cross_entropy,
        mesh={'pipe': 3, 'tensor': 4},
        chunks=2,
        checkpoint='never',
        tensor_plan=tensor_plan(sequence_parallel),
    )
    (forward,) = {entry.bytes for item, entry in report.accounts[1].row if str(item) in '1F0 1F1'}
    return forward


def test_activations_of_a_block():
    """As in Korthikanti et al., 2022, without masks of dropout and scores of attention."""
    elements = 256 * 128  # s b h of the paper
    size = 4  # bytes in float32, of which the paper has two
    saved = saved_by_a_block(sequence_parallel=True)
    assert saved == pytest.approx(32 * elements / 4 * size / 2, rel=0.05)
    # Without it, two inputs of norms and of products are whole on each rank.
    saved = saved_by_a_block(sequence_parallel=False)
    assert saved == pytest.approx((8 + 24 / 4) * elements * size / 2, rel=0.05)
