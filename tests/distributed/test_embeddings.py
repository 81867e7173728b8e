"""Embeddings whose rows are split: values, gradients, memory, and numbers out of range."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional as F

from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, dry_run, init_mesh

#: Rows that two and four ranks share evenly and unevenly. With the others, the last rank of two or
#: of four has none.
ROWS = (8, 11, 1, 5)


class Scaled(nn.Embedding):
    """An embedding with a forward of its own."""

    def forward(self, ids):
        return 3 * super().forward(ids)


def layers(rows, kind, **options):
    """Return an embedding and a linear layer."""
    return nn.Sequential(kind(rows, 4, **options), nn.Linear(4, 2)).double()


def plan(output=None):
    """Split the rows of the embedding."""
    output = Replicate() if output is None else output
    return {'0': RowwiseParallel(input_layouts=Replicate(), output_layouts=output)}


def trained(rows, kind, options, chunks=2):
    """Train on a rank, and in one process; return both losses and both gradients."""
    tensor = torch.distributed.get_world_size()
    ids = torch.arange(12).reshape(4, 3) * 5 % rows
    target = torch.ones(4, 3, 2).double()
    model = DistributedGPipe(
        layers(rows, kind, **options),
        [2],
        mesh=init_mesh(tensor=tensor, device_type='cpu'),
        chunks=chunks,
        tensor_plan=plan(),
    )
    loss = model.step(ids, target, F.mse_loss)
    state = {}
    for name, x in model.named_parameters():
        state[name] = x.full_tensor() if isinstance(x, DTensor) else x

    plain = layers(rows, kind, **options)
    plain.load_state_dict(state)
    expected = F.mse_loss(plain(ids), target)
    expected.backward()
    weight = next(model.parameters())
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    is_replaced = 'forward' in vars(embedding)
    return loss, expected.detach(), weight.grad.full_tensor(), plain[0].weight.grad, is_replaced


@pytest.mark.parametrize('rows', ROWS)
@pytest.mark.parametrize(
    'kind, options',
    [
        (nn.Embedding, {}),
        (nn.Embedding, {'padding_idx': 0}),
        (nn.Embedding, {'padding_idx': -1}),
        (Scaled, {}),
    ],
)
@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lookup_and_gradient_equal_one_process(rows, kind, options, ranks):
    if (kind, rows, ranks) == (Scaled, 5, 4):
        pytest.skip('PyTorch has no lookup on a rank without rows')
    for loss, expected, grad, expected_grad, is_replaced in run(
        ranks, trained, rows, kind, options
    ):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
        assert is_replaced == (kind is nn.Embedding)


@pytest.mark.parametrize('options', [{'scale_grad_by_freq': True}])
def test_an_option_that_needs_counts_is_left_to_pytorch(options):
    for loss, expected, grad, expected_grad, is_replaced in run(
        2, trained, 11, nn.Embedding, options, 1
    ):
        assert not is_replaced
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def out_of_range(number):
    """Return the error of a number that no rank has."""
    model = DistributedGPipe(
        layers(11, nn.Embedding),
        [2],
        mesh=init_mesh(tensor=2, device_type='cpu'),
        tensor_plan=plan(),
    )
    with pytest.raises(IndexError) as caught:
        model(torch.full((2, 3), number))
    return str(caught.value)


@pytest.mark.parametrize('number', [11, 12, -1])
def test_a_number_that_no_rank_has_is_an_error(number):
    for text in run(2, out_of_range, number):
        assert 'index out of range' in text


@pytest.mark.parametrize('output', [Replicate(), Shard(1)])
def test_no_rank_has_the_gradient_of_all_rows(output):
    rows, width = 4096, 64
    with torch.device('meta'):
        module = nn.Sequential(nn.Embedding(rows, width))
    ids = torch.empty(2, 8, dtype=torch.long, device='meta')
    report = dry_run(
        module,
        [1],
        ids,
        ids,
        lambda y, t: y.mean(),
        mesh={'tensor': 8},
        checkpoint='never',
        tensor_plan=plan(output),
    )
    rank = report.ranks[0]
    assert rank.parameters == rows * width * 4 / 8
    # The gradient of its rows, and some activations.
    assert rank.total < 2.5 * rank.parameters
