"""Kept results of operations: values, counts, memory, changes in place, and refusals."""

import copy
import gc
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from tests.devices import DEVICES, devices
from tests.engine.checkpoint.layers import Executed
from tests.helpers import Call, call, gradients, train_both
from torchgpipe import GPipe, is_recomputing, no_recompute
from torchgpipe.engine.checkpoint import selection
from torchgpipe.engine.checkpoint.offload import Offload

aten = torch.ops.aten


class Block(nn.Module):
    """A small block of a transformer."""

    def __init__(self, width=8, dropout=0.2):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


def blocks(number=3):
    return nn.Sequential(*[Block() for _ in range(number)]).double()


def compare(model, devices, keep, balance, schedule=None, **options):
    """Train a pipeline with and without recomputation."""
    results = []
    for mode, kept in [('never', None), ('always', keep)]:
        gpipe = GPipe(
            copy.deepcopy(model),
            balance,
            devices=devices(len(balance)),
            chunks=3,
            checkpoint=mode,
            keep=kept,
            **options,
        )
        for _ in range(2):
            torch.manual_seed(0)
            x = torch.randn(7, 5, 8, dtype=torch.double, device=devices.first)
            if schedule is None:
                gpipe(x).square().sum().backward()
            else:
                gpipe.step(x, None, lambda y, target: y.square().mean(), schedule=schedule)
        results.append(gradients(gpipe))
    for kept_gradient, gradient in zip(results[1], results[0]):
        assert torch.allclose(kept_gradient, gradient, 1e-10, 1e-10)


def keep_dropout(ctx, operation, *args, **kwargs):
    return operation in (aten.mul.Tensor, aten.addmm.default)


@devices
@pytest.mark.parametrize('schedule', [None, '1f1b', 'zb-h1'])
@pytest.mark.parametrize(
    'keep',
    ['products', 'every second product', 'all', [aten.addmm], {'1': 'all'}, keep_dropout],
)
def test_gradients_equal_those_without_checkpoints(devices, keep, schedule):
    compare(blocks(), devices, keep, [2, 1], schedule)


@pytest.mark.parametrize(
    ('keep', 'recomputed'),
    [
        ('products', {'addmm': 0, 'gelu': 1, 'native_layer_norm': 2}),
        ('every second product', {'addmm': 2, 'gelu': 1}),
        ([aten.gelu], {'addmm': 4, 'gelu': 0}),
        ({'0.up': 'all'}, {'addmm': 3, 'gelu': 1}),
        ({'0': 'all', '0.up': None}, {'addmm': 1, 'gelu': 0, 'native_layer_norm': 0}),
        ({0: 'products', '0.up': None}, {'addmm': 1}),
        ('all', {'addmm': 0, 'gelu': 0, 'native_layer_norm': 0}),
    ],
)
@pytest.mark.parametrize('schedule', [None, '1f1b'])
def test_kept_operations_run_once(keep, recomputed, schedule):
    gpipe = GPipe(
        blocks(1).float(), [1], devices=['cpu'], chunks=2, checkpoint='always', keep=keep
    )
    x = torch.rand(2, 3, 8)
    once = {'addmm': 4, 'gelu': 1, 'native_layer_norm': 2}
    for _ in range(2):
        with Executed() as executed:
            if schedule is None:
                gpipe(x).sum().backward()
            else:
                gpipe.step(x, x, F.mse_loss, schedule=schedule)
        for name, number in recomputed.items():
            assert executed.counts[name] == 2 * (once[name] + number), name


def test_kept_random_operations_are_not_drawn_again():
    def keep(ctx, operation, *args, **kwargs):
        return operation is aten.rand_like.default

    layer = Call(lambda x: x * torch.rand_like(x) * F.dropout(x))
    model = nn.Sequential(layer, nn.Dropout(0.3))
    gpipe = GPipe(model, [2], devices=['cpu'], checkpoint='always', keep=keep)
    x = torch.ones(4, 4, requires_grad=True)
    with Executed() as executed:
        output = gpipe(x)
        state = torch.get_rng_state()
        output.sum().backward()
    assert torch.equal(x.grad, 2 * output.detach())
    assert torch.equal(torch.get_rng_state(), state)
    assert executed.counts['rand_like'] == 1 and executed.counts['bernoulli_'] == 4


@devices
def test_results_that_later_operations_change_in_place(devices):
    """Within the cell a copy is kept. After the cell, the operation runs again."""
    for function in [
        lambda y: y.relu_(),
        lambda y: y.mul_(2).sigmoid_() * y,
        lambda y: y.T.add_(1).relu_().T,
        lambda y: y.data.add_(1) * y,
    ]:
        for balance, mode in ([3], 'always'), ([1, 2], ['always', 'never']):
            if len(balance) == 2 and 'data' in function.__code__.co_names:
                continue  # A change that PyTorch hides: the output has other values.
            model = nn.Sequential(nn.Linear(4, 4), Call(function), nn.Linear(4, 4)).double()
            gpipe = GPipe(
                copy.deepcopy(model),
                balance,
                devices=devices(len(balance)),
                chunks=2,
                checkpoint=mode,
                keep=[aten.addmm],
            )
            with Executed() as executed:
                train_both(model, gpipe, torch.randn(5, 4, dtype=torch.double))
            if len(balance) == 1:
                assert executed.counts['addmm'] == 2 + 2 * 2


def test_a_change_that_no_mode_sees_runs_the_operation_again():
    """As of compiled code: the version of the result shows it."""
    outputs = []
    layer = Call(lambda y: outputs.append(y.detach()) or y * 2)
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), layer), [2], devices=['cpu'], checkpoint='always',
        keep='products',
    )  # fmt: skip
    with Executed() as executed:
        output = gpipe(torch.rand(2, 4))
        outputs[0].add_(1)
        output.sum().backward()
    assert executed.counts['addmm'] == 2


@pytest.mark.parametrize(('keep', 'number'), [('products', 3), ([aten.addmm], 2), ('all', 2)])
def test_the_output_of_the_model_is_kept_only_if_it_is_a_must(keep, number):
    """It is the largest tensor of a language model, and the loss frees it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 64))
    if keep == 'all':
        keep = {name: 'all' for name in '012'}
    gpipe = GPipe(model, [3], devices=['cpu'], checkpoint='always', keep=keep)
    with Executed() as executed:
        loss = gpipe(torch.rand(2, 4)).square().sum()
        loss.backward()
    assert executed.counts['addmm'] == number


def test_a_recomputation_frees_results_as_it_takes_them():
    """In the last one, they are free unless a node has saved them."""
    alive = []

    def look(x):
        if is_recomputing():
            alive.append(sum(tensor.shape == (3, 5) for tensor in tensors()))
        return x

    def tensors():
        # Not isinstance, which asks a weak proxy of another test for the class of its target.
        return [item for item in gc.get_objects() if type(item) is torch.Tensor]

    layers = []
    for _ in range(3):
        layers += [nn.Linear(4, 5), Call(lambda x: x + 1), Call(look), nn.Linear(5, 4)]
    gpipe = GPipe(
        nn.Sequential(*layers), [12], devices=['cpu'], checkpoint='always', keep=[aten.addmm]
    )
    gpipe(torch.rand(3, 4)).sum().backward()
    # At each place, the sum of the layers so far, and the kept results of later ones.
    assert alive[0] - alive[1] == alive[1] - alive[2] == 0
    alive.clear()
    gpipe(torch.rand(3, 4)).sum().backward(retain_graph=True)
    assert alive[2] - alive[0] == 2


@devices
def test_autocast(devices):
    results = []
    for mode, keep in [('never', None), ('always', 'products'), ('always', {'0': 'all'})]:
        torch.manual_seed(0)
        gpipe = GPipe(
            blocks(2).float(), [1, 1], devices=devices(2), chunks=2, checkpoint=mode, keep=keep
        )
        torch.manual_seed(1)
        with torch.autocast(devices.first.type, torch.bfloat16):
            output = call(gpipe, torch.randn(4, 3, 8))
        output.float().sum().backward()
        results.append([output.detach(), *gradients(gpipe)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@devices
def test_several_recomputations_of_one_first_pass(devices):
    gpipe = GPipe(
        blocks(2), [2], devices=devices(1), chunks=2, checkpoint='always', keep='products'
    )
    loss = call(gpipe, torch.randn(4, 3, 8).double()).square().sum()
    loss.backward(retain_graph=True)
    first = [gradient.clone() for gradient in gradients(gpipe)]
    loss.backward()
    for gradient, half in zip(gradients(gpipe), first):
        assert torch.allclose(gradient, 2 * half, 1e-10)


@devices
def test_hooks_of_the_user_around_the_model(devices):
    """Their operations are not operations of the model."""

    def pack(x):
        torch.addmm(x, x, torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device))
        return x

    for keep in ('products', {'0': 'all'}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        gpipe = GPipe(
            copy.deepcopy(model), [3], devices=devices(1), chunks=2, checkpoint='always', keep=keep
        )
        for context in (
            lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            torch.autograd.graph.save_on_cpu,
        ):
            gpipe.zero_grad()
            x = torch.randn(6, 4, dtype=torch.double)
            train_both(copy.deepcopy(model), copy.deepcopy(gpipe), x, context=context)


@pytest.mark.parametrize('keep', ['products', [aten.addmm]])
def test_another_input_of_a_kept_operation_is_found(keep):
    """Its own result is kept, so the output does not show the difference."""
    layer = Call(lambda x: x * random.random())
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    gpipe = GPipe(model, [3], devices=['cpu'], checkpoint='always', keep=keep)
    with pytest.raises(RuntimeError, match='took another path .* the input of an operation whose'):
        gpipe(torch.rand(2, 4)).sum().backward()


def test_another_order_of_weights_is_found():
    class Swap(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            first, last = (self.a, self.b) if is_recomputing() else (self.b, self.a)
            return last(first(x).tanh())

    gpipe = GPipe(
        nn.Sequential(Swap()), [1], devices=['cpu'], checkpoint='always', keep='products'
    )
    with pytest.raises(RuntimeError, match='took another path .* the input of an operation'):
        gpipe(torch.rand(2, 4)).sum().backward()


@pytest.mark.slow
def test_compiled_code_is_refused(compiler):
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    for keep, compile in [
        ('products', lambda gpipe: gpipe[1].compile(backend='aot_eager')),
        ('products', lambda gpipe: gpipe.partitions[0].compile(backend='aot_eager')),
        ({'1': 'all'}, lambda gpipe: gpipe[1][0].compile(backend='aot_eager')),
    ]:
        gpipe = GPipe(model(), [2], devices=['cpu'], checkpoint='always', keep=keep)
        compile(gpipe)
        with pytest.raises(RuntimeError, match='applies to compiled code'):
            gpipe(torch.rand(2, 4))

    layers = model()
    layers[1][0] = no_recompute(torch.compile(layers[1][0], backend='aot_eager'))
    gpipe = GPipe(layers, [2], devices=['cpu'], checkpoint='always')
    with pytest.raises(RuntimeError, match='applies to compiled code'):
        gpipe(torch.rand(2, 4))

    function = torch.compile(F.linear, backend='aot_eager')
    layer = Call(lambda x: function(x, torch.ones(4, 4)))
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), layer), [2], devices=['cpu'], checkpoint='always',
        keep='products',
    )  # fmt: skip
    with pytest.raises(RuntimeError, match='applies to compiled code'):
        gpipe(torch.rand(2, 4))


@pytest.mark.slow
def test_compiled_layers_without_a_policy(compiler):
    model = blocks(2)
    gpipe = GPipe(
        copy.deepcopy(model).eval(), [2], devices=['cpu'], chunks=2, checkpoint='always',
        keep={'0': 'products'},
    )  # fmt: skip
    model.eval()
    gpipe.train()
    for block in gpipe:
        block.dropout.eval()
    gpipe[1].compile(backend='aot_eager')
    train_both(model, gpipe, torch.randn(4, 3, 8, dtype=torch.double))


@devices
def test_memory_between_forward_and_backward(devices):
    """Tensors of the block are freed, but the kept results are not, until the recomputation."""
    gpipe = GPipe(
        blocks(1), [1], devices=devices(1), chunks=1, checkpoint='always', keep='products'
    )
    output = call(gpipe, torch.rand(2, 3, 8).double())
    shapes = Counter()
    for x in gc.get_objects():
        if type(x) is torch.Tensor and x.shape in [(6, 32), (2, 3, 32)] and x.grad_fn is None:
            shapes[x.shape] += 1
    assert shapes == {(6, 32): 1}  # the result of `up`, and not of the GELU
    output.sum().backward()


#: The names of policies that PyTorch has had since 2.13.
OFFLOADS = 'MUST_CPU_OFFLOAD', 'PREFER_CPU_OFFLOAD'


@devices
@pytest.mark.parametrize('name', OFFLOADS)
def test_results_in_host_memory(devices, name, monkeypatch):
    """A policy may ask for it; and with ``offload=True`` it happens to large results."""
    if not hasattr(CheckpointPolicy, name):
        pytest.skip('this release of PyTorch does not have this policy')

    def keep(ctx, operation, *args, **kwargs):
        if operation is aten.addmm.default:
            return CheckpointPolicy[name]
        return CheckpointPolicy.PREFER_RECOMPUTE

    stored = []
    store = Offload.store
    monkeypatch.setattr(
        Offload, 'store', lambda self, *args: stored.append(args[0]) or store(self, *args)
    )
    monkeypatch.setattr(selection, 'LARGE', 1)
    for policy, options, least in [
        (keep, {}, 2 * 3 * 3 * 4),
        ('products', {'offload': True}, 2 * 3 * (2 + 3 * 5)),
    ]:
        stored.clear()
        compare(blocks(), devices, policy, [2, 1], **options)
        if devices.first.type == 'cpu':
            least = 0
            assert not stored
        assert len(stored) >= least


@pytest.mark.accelerator
def test_results_in_host_memory_that_a_later_operation_changes(monkeypatch, no_race):
    """The operation waits for the copy."""
    monkeypatch.setattr(selection, 'LARGE', 1)
    model = nn.Sequential(nn.Linear(4, 4), Call(lambda y: y.relu_()), nn.Linear(4, 4)).double()
    gpipe = GPipe(
        copy.deepcopy(model),
        [3],
        devices=[DEVICES['accelerators'].first],
        chunks=2,
        checkpoint='always',
        keep='products',
        offload=True,
    )
    train_both(model, gpipe, torch.randn(6, 4, dtype=torch.double))
