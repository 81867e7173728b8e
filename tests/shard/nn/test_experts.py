"""Mixtures of experts, compared with a loop over tokens, and on several ranks with one process."""

import copy
from fractions import Fraction
from math import ceil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import torchgpipe.shard as ts
from tests.shard.nn.oracle import close
from tests.shard.processes import outcomes, run
from torchgpipe import GPipe

DOUBLE = torch.float64
WEIGHTS = ('router', 'up', 'up_bias', 'down', 'down_bias')


def made(experts, k, capacity, **options):
    """Return experts of which some are chosen more than others."""
    torch.manual_seed(1)
    layer = ts.nn.Experts(
        6,
        5,
        experts,
        k,
        **{'capacity': capacity, 'balance': 0.3, 'z': 0.2, 'dtype': DOUBLE, **options},
    )
    with torch.no_grad():
        layer.router.mul_(3)
    return layer


def batch(tokens):
    """Return tokens, and weights of their outputs in a loss."""
    return torch.randn(2, tokens, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(tokens))


def one_by_one(layer, x):
    """Compute the output and the auxiliary losses token by token, and count dropped tokens."""
    scores = x @ layer.router.t()
    chances = scores.softmax(-1)
    chosen = scores.detach().argsort(dim=-1, descending=True, stable=True)[:, : layer.k]
    left = [
        float('inf')
        if layer.capacity is None
        else ceil(Fraction(str(layer.capacity)) * layer.k * len(x) / layer.experts)
    ] * layer.experts
    y, shares, dropped = [torch.zeros_like(each) for each in x], [0] * layer.experts, 0
    for choice in range(layer.k):
        for t, token in enumerate(x):
            e = chosen[t, choice].item()
            shares[e] += 1 / chosen.numel()
            if not left[e]:
                dropped += 1
                continue
            left[e] -= 1
            gate = chances[t, e] if layer.k == 1 else chances[t, e] / chances[t, chosen[t]].sum()
            hidden = F.gelu(layer.up[e] @ token + layer.up_bias[e])
            y[t] = y[t] + gate * (layer.down[e] @ hidden + layer.down_bias[e])
    balance = layer.experts * (chances * torch.tensor(shares, dtype=DOUBLE)).sum(-1)
    return torch.stack(y), 0.3 * balance + 0.2 * scores.exp().sum(-1).log() ** 2, dropped


def test_it_is_equal_to_a_loop_over_tokens():
    for experts, k in ((4, 1), (5, 2), (3, 3)):
        for capacity in (None, 0.5, 1.1, 8.0):
            check_against_a_loop(experts, k, capacity)


def check_against_a_loop(experts, k, capacity):
    """Compare the output, the auxiliary losses and gradients with a loop over tokens."""
    layer = made(experts, k, capacity)
    plain, (x, weights) = copy.deepcopy(layer), batch(20)
    x, expected_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, aux = layer(x.view(4, 5, 6))
    *expected, dropped = one_by_one(plain, expected_x)
    assert bool(dropped) == (capacity in (0.5, 1.1) and not (k == experts and capacity > 1))
    assert y.shape == (4, 5, 6) and aux.shape == (4, 5)
    close(y.view(20, 6), expected[0])
    close(aux.view(20), expected[1])
    for given, out, losses in ((x, y.view(20, 6), aux), (expected_x, *expected)):
        ((out * weights).sum() + losses.sum()).backward()
    close(x.grad, expected_x.grad)
    for name in WEIGHTS:
        close(getattr(layer, name).grad, getattr(plain, name).grad)


def test_capacity_is_rounded_as_it_is_written():
    layer = made(5, 1, 1.1)
    with torch.no_grad():
        layer.router.zero_()  # All go to the first expert, which takes 11 of 50.
    y, _ = layer(batch(50)[0])
    assert y[:11].any(1).all() and not y[11:].any()


def part(x, sizes):
    """Return the tokens of this rank, of so many for each."""
    return x.split(sizes)[dist.get_rank()]


def mesh_of_all():
    return init_device_mesh('cpu', (dist.get_world_size(),), mesh_dim_names=('data',))


def spread(sizes, experts, k, capacity):
    """Compare with one process that has all tokens."""
    plain = made(experts, k, capacity)
    x, weights = batch(sum(sizes))
    expected_x = x.clone().requires_grad_()
    expected, losses = plain(expected_x)
    ((expected * weights).sum() + losses.sum()).backward()

    layer = copy.deepcopy(plain)
    if dist.get_rank():
        with torch.no_grad():
            for each in layer.parameters():
                each.zero_()  # They get the values of the first rank.
    layer.spread(mesh_of_all())
    assert layer.communicates and not plain.communicates
    own = ts.slice(torch.arange(experts), len(sizes))[dist.get_rank()]
    assert torch.equal(layer.up.to_local(), plain.up[own])
    x = part(x, sizes).clone().requires_grad_()
    y, aux = layer(x)
    close(y, part(expected, sizes))
    close(aux, part(losses, sizes))
    ((y * part(weights, sizes)).sum() + aux.sum()).backward()
    close(x.grad, part(expected_x.grad, sizes))
    dist.all_reduce(layer.router.grad)
    close(layer.router.grad, plain.router.grad)
    for name in WEIGHTS[1:]:
        close(getattr(layer, name).grad.to_local(), getattr(plain, name).grad[own])


def several(*cases):
    for case in cases:
        spread(*case)


@pytest.mark.parametrize('sizes', [[7, 5], [3, 0, 8, 1]])
def test_results_on_several_ranks_equal_one_process(sizes):
    run(
        len(sizes),
        several,
        *(
            (sizes, experts, k, capacity)
            for experts, k in ((4, 1), (5, 2), (3, 2))
            for capacity in (None, 0.6)
        ),
    )


def test_experts_without_tokens_have_gradients_of_zeros():
    """Also where no rank has any tokens."""
    run(2, no_tokens)
    layer = made(4, 1, None)
    zeros(layer)


def zeros(layer):
    y, aux = layer(torch.zeros(0, 6, dtype=DOUBLE))
    assert y.shape == (0, 6) and aux.shape == (0,)
    (y.sum() + aux.sum()).backward()
    for name, x in layer.named_parameters():
        assert x.grad is not None and not x.grad.any(), name


def no_tokens():
    layer = made(1, 1, None).spread(mesh_of_all())
    y, aux = layer(torch.zeros(0, 6, dtype=DOUBLE))
    (y.sum() + aux.sum()).backward()
    assert all(x.grad is not None for x in layer.parameters())
    layer = made(3, 1, None).spread(mesh_of_all())
    with torch.no_grad():
        layer.router.zero_()  # Of equal scores, the first expert has the larger.
    y, aux = layer(torch.ones(4, 6, dtype=DOUBLE))
    (y.sum() + aux.sum()).backward()
    grad = layer.up.grad.full_tensor()
    assert grad[0].any() and not grad[1:].any()


def averaged():
    """Give gradients of means over the tokens of a rank, averaged over ranks."""
    ts.distributed.init_process_group(1)
    plain, (x, weights) = made(5, 2, 1.0), batch(8)
    y, aux = plain(x)
    ((y * weights).mean() + aux.mean()).backward()
    layer = made(5, 2, 1.0).spread(ts.distributed.get_mesh()['data'])
    y, aux = layer(part(x, [4, 4]))
    ((y * part(weights, [4, 4])).mean() + aux.mean()).backward()
    ts.average_gradients(layer)
    close(layer.router.grad, plain.router.grad)
    for name in WEIGHTS[1:]:
        close(getattr(layer, name).grad.full_tensor(), getattr(plain, name).grad)


def test_the_mean_over_replicas_takes_a_gradient_that_is_complete_as_a_sum():
    run(2, averaged)


class Mixture(nn.Module):
    """A block with a layer of experts, each a perceptron."""

    def __init__(self, capacity=0.8):
        super().__init__()
        self.norm = nn.Linear(6, 6, dtype=DOUBLE)
        self.experts = made(5, 2, capacity)

    def forward(self, pair):
        x, losses = pair
        y, aux = self.experts(self.norm(x))
        return x + y, losses + aux


def pipelined(checkpoint):
    """Compare the plain call of a pipeline on each rank with one process, micro-batch by one."""
    torch.manual_seed(2)
    plain = nn.Sequential(Mixture(), Mixture())
    layers = copy.deepcopy(plain)
    for layer in layers:
        layer.experts.spread(mesh_of_all())
    sizes = [4, 4, 3, 3]  # A micro-batch of both ranks is one of one process.
    x, weights = batch(14)
    own = [torch.cat(each.split(sizes)[dist.get_rank() :: 2]) for each in (x, weights)]
    pipe = GPipe(layers, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint=checkpoint)
    alone = GPipe(plain, [1, 1], devices=['cpu', 'cpu'], chunks=1)
    expected = [alone((each, torch.zeros(len(each), dtype=DOUBLE))) for each in x.split([8, 6])]
    y, aux = pipe((own[0], torch.zeros(7, dtype=DOUBLE)))
    for found, whole in zip((y, aux), map(torch.cat, zip(*expected))):
        close(found, torch.cat(whole.split(sizes)[dist.get_rank() :: 2]))
    ((y * own[1]).sum() + aux.sum()).backward()
    (
        sum((y * w).sum() + aux.sum() for (y, aux), w in zip(expected, weights.split([8, 6])))
    ).backward()
    for (name, p), q in zip(layers.named_parameters(), plain.parameters()):
        grad = p.grad
        if hasattr(grad, 'full_tensor'):
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad)
        close(grad, q.grad)


def test_a_pipeline_has_the_losses_of_each_token_once():
    for checkpoint in ('always', 'never'):
        run(2, pipelined, checkpoint)


def autocasted():
    """Compute in bfloat16 where a rank has no experts."""
    layer = ts.nn.Experts(6, 5, 1, 1).spread(mesh_of_all())
    with torch.autocast('cpu', torch.bfloat16):
        y, aux = layer(torch.ones(3, 6))
    (y.float().sum() + aux.sum()).backward()
    return y.dtype, aux.dtype, layer.up.grad.dtype


def test_ranks_without_experts_send_the_same_types_under_autocast():
    assert run(2, autocasted) == [(torch.bfloat16, torch.float32, torch.float32)] * 2


def not_finite():
    x = torch.ones(3, 6, dtype=DOUBLE)
    if dist.get_rank() == 1:
        x[1, 2] = float('nan')
    made(4, 1, None).spread(mesh_of_all())(x)


def test_scores_that_are_not_finite_are_refused_on_all_ranks():
    for each in outcomes(2, not_finite):
        assert r'NaN or infinite on ranks [1]' in each.text


def test_wrong_options_and_inputs_are_refused():
    for options, message in (
        ({'k': 5}, r'k=5, and there are 4: take a k from 1 to 4'),
        ({'k': 0}, 'k=0'),
        ({'experts': 0}, 'there are 0'),
        ({'capacity': 0}, 'not 0: 1.25'),
        ({'capacity': -1.0}, r'not -1\.0'),
        ({'capacity': float('nan')}, 'not nan'),
        ({'capacity': float('inf')}, 'not inf'),
    ):
        with pytest.raises(ValueError, match=message):
            ts.nn.Experts(**{'width': 2, 'hidden': 3, 'experts': 4, **options})
    with pytest.raises(ValueError, match=r'tokens of 6 features.*\(3, 4\)'):
        made(4, 1, None)(torch.zeros(3, 4, dtype=DOUBLE))


def refused():
    mesh = mesh_of_all()
    layer = made(2, 1, None).spread(mesh)
    with pytest.raises(ValueError, match='spread once.* spread already'):
        layer.spread(mesh)
    on_meta = made(2, 1, None, device='meta').spread(mesh)
    assert on_meta.up.is_meta and on_meta.up.to_local().shape == on_meta.up.shape
    square = init_device_mesh('cpu', (1, 1), mesh_dim_names=('data', 'pipe'))
    with pytest.raises(ValueError, match=r"here are axes \('data', 'pipe'\)"):
        made(2, 1, None).spread(square)


def test_experts_are_spread_once_over_one_axis_where_they_have_values():
    run(1, refused)
