"""Structured values: inputs of a pipeline, values between partitions, and outputs."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.devices import devices, places
from tests.helpers import Layer, assert_same, gradients, in_partitions, micro_batches
from tests.skip.layers import Pop, Stash
from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.balance import balance_by_size, profile
from torchgpipe.skip import pop, skippable, stash


class State(NamedTuple):
    """The values passed from layer to layer."""

    hidden: torch.Tensor
    mask: object
    table: torch.Tensor
    more: object


@dataclass
class Info:
    """A part of it."""

    scale: float
    losses: list


class Start(nn.Linear):
    """Take several arguments, give a structure."""

    def forward(self, x, mask=None, *, table, scale=1.0):
        return State(super().forward(x), mask, table, {'info': Info(scale, [x.mean()])})


class Block(nn.Linear):
    """Take and give a structure, of the same classes."""

    def forward(self, state):
        assert isinstance(state, State) and isinstance(state.more['info'], Info)
        hidden = super().forward(state.hidden).tanh() + state.table * state.more['info'].scale
        if state.mask is not None:
            hidden = hidden.masked_fill(state.mask, 0)
        state.more['info'].losses.append(hidden.square().mean())
        return state._replace(hidden=hidden)


class End(nn.Linear):
    """Return a dict."""

    def forward(self, state):
        return {
            'y': super().forward(state.hidden),
            'loss': sum(state.more['info'].losses),
            'table': state.table,
            'mask': state.mask,
        }


def network():
    """Return a model of these layers."""
    return nn.Sequential(Start(4, 4), Block(4, 4), Block(4, 4), End(4, 2)).double()


@devices
def test_structures(devices):
    for masked in [True, False]:
        for size, chunks in [(6, 3), (4, 1), (2, 2)]:
            model = network()
            reference = copy.deepcopy(model)
            gpipe = GPipe(
                model,
                [1, 2, 1],
                devices=devices(3),
                chunks=chunks,
                checkpoint='except_last',
                gather='mean',
            )
            optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (gpipe, reference)]
            for _ in range(3):
                x, table = torch.rand(size, 4).double(), torch.rand(4).double().requires_grad_()
                mask = torch.rand(size, 4) < 0.5 if masked else None
                state = reference[0](x, mask, table=table, scale=2.0)
                expected = reference[1:](state)
                (expected['y'].square().sum() + expected['loss']).backward()
                table_grad, table.grad = table.grad, None
                first = devices.first
                output = gpipe(
                    x.to(first),
                    None if mask is None else mask.to(first),
                    table=NoChunk(table.to(first)),
                    scale=2.0,
                )
                (output['y'].square().sum() + output['loss']).backward()
                assert [*output] == [*expected] and output['table'].shape == (4,)
                assert (output['mask'] is None) == (mask is None)
                assert_same(
                    [output['y'], output['loss'], output['table']],
                    [expected['y'], expected['loss'], expected['table']],
                )
                assert mask is None or torch.equal(output['mask'].cpu(), mask)
                assert_same([table.grad, *gradients(gpipe)], [table_grad, *gradients(reference)])
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()


class Words(nn.Linear):
    """Return no batch: a table, a scalar, and as many tensors as there are samples."""

    def forward(self, x):
        return object(), {'all': [*super().forward(x)], 'table': self.weight.t(), 'sum': x.sum()}


class Sentence(nn.Module):
    """Drop the object."""

    def forward(self, value):
        return value[1]


class Meaning(nn.Linear):
    """Return a batch again."""

    def forward(self, value):
        return super().forward(torch.stack(value['all']) @ value['table']) * value['sum']


@devices
def test_a_value_without_a_batch_between_partitions(devices):
    model = nn.Sequential(Words(4, 4), Sentence(), Meaning(4, 4)).double()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [2, 1], devices=devices(2), chunks=3, checkpoint='except_last')
    x = torch.rand(7, 4).double()
    output, expected = (
        gpipe(x.to(devices.first)),
        torch.cat([reference(each) for each in micro_batches(x, 3)]),
    )
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same([output, *gradients(gpipe)], [expected, *gradients(reference)])


@devices
def test_a_shared_tensor_that_comes_out_is_one(devices):
    """This also holds if it has the shape of a micro-batch, and after copies."""

    class Pass(nn.Module):
        def forward(self, value):
            return [value[0] * 2, value[1]]

    for n in (1, 3):
        gpipe = GPipe(
            nn.Sequential(*[Pass() for _ in range(3)]),
            [3] if n == 1 else [1, 1, 1],
            devices=devices(n),
            chunks=4,
        )
        x = torch.rand(4, 2)
        table = torch.rand(1, 2, device=devices.first, requires_grad=True)
        y, out = gpipe([x.to(devices.first), NoChunk(table)])
        assert torch.equal(y.cpu(), x * 8) and torch.equal(out.cpu(), table.cpu())
        out.sum().backward()
        assert table.grad.tolist() == [[1, 1]]


@devices
def test_the_batch_and_a_shared_tensor_in_one_memory(devices):
    class Add(nn.Module):
        def forward(self, x, everything):
            return x, x + everything.sum(0)

    x = torch.rand(6, 2, device=devices.first)
    a, b = in_partitions(devices, Add(), chunks=3)(x, NoChunk(x))
    assert torch.equal(a.cpu(), x.cpu()) and torch.equal(b.cpu(), (x + x.sum(0)).cpu())


class Attention(nn.Module):
    """A layer whose batch dimension is the second."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, x):
        return self.layer(x)


@devices
def test_another_batch_dimension(devices):
    model = nn.Sequential(Attention(), nn.Linear(4, 4), Attention()).double()
    reference = copy.deepcopy(model)
    gpipe = GPipe(
        model, [1, 2], devices=devices(2), chunks=3, checkpoint='except_last', batch_dim=1
    )
    x = torch.rand(4, 5, 4).double()
    expected, output = reference(x), gpipe(x.to(devices.first))
    expected.square().sum().backward()
    output.square().sum().backward()
    assert_same([output, *gradients(gpipe)], [expected, *gradients(reference)])
    assert (
        GPipe(copy.deepcopy(model), [3], devices=devices(1), batch_dim=1, chunks=2, gather=1)(
            x.to(devices.first)
        ).shape
        == x.shape
    )


@devices
def test_rules_by_part(devices):
    class Mix(nn.Module):
        def forward(self, value):
            return {
                'k': 3,
                'y': value['x'] + value['t'].T,
                'turned': value['t'],
                'n': value['x'].sum(),
            }

    gpipe = in_partitions(
        devices,
        Mix(),
        nn.Identity(),
        chunks=2,
        batch_dim={'t': 1},
        gather={'y': None, 'turned': 1, 'n': 'sum'},
    )
    x, t = torch.rand(5, 3), torch.rand(3, 5)
    output = gpipe({'x': x.to(devices.first), 't': t.to(devices.first)})
    assert output['k'] == 3 and torch.equal(output['y'].cpu(), x + t.T)
    assert torch.equal(output['turned'].cpu(), t)
    assert torch.allclose(output['n'].cpu(), x.sum())


def test_rules_that_are_none():
    with pytest.raises(ValueError, match='batch_dim must be a dimension'):
        in_partitions(['cpu'], nn.ReLU(), batch_dim='first')
    with pytest.raises(ValueError, match='gather must be a dimension'):
        in_partitions(['cpu'], nn.ReLU(), gather='max')
    with pytest.raises(ValueError, match='batch_dim is None'):
        in_partitions(['cpu'], nn.ReLU(), batch_dim=None)


@devices
def test_a_shared_tensor_that_changes_in_place(devices):
    class Grow(nn.Module):
        def forward(self, x, table):
            table += 1
            return x + table

    x = torch.zeros(4, 2, device=devices.first)
    for mark in (NoChunk(x[0].clone()), x[0, 0].clone()):
        gpipe = in_partitions(devices, Grow(), nn.ReLU(), chunks=2)
        with pytest.raises(RuntimeError, match='partition 0 changed a tensor in place that all'):
            gpipe(x, mark)
        gpipe.chunks = 1
        assert gpipe(x, mark).max() > 0


@pytest.mark.accelerator
def test_gradients_of_a_shared_tensor_are_added_up_on_one_stream():
    """PyTorch warns if not, and lets one stream wait for the other."""

    class Pass(nn.Module):
        def forward(self, x, table):
            return x, table

    class Add(nn.Module):
        def forward(self, value):
            return value[0] + value[1]

    gpipe = in_partitions(places('aa'), Pass(), Add(), chunks=3, checkpoint='except_last')
    x = torch.rand(6, 2, device=gpipe.devices[0])
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        gpipe(x, NoChunk(x[0].clone().requires_grad_())).sum().backward()
    finally:
        torch.set_warn_always(before)


@devices
def test_a_part_of_a_shared_tensor_that_changes_in_place(devices):
    """On several devices there is a copy for each micro-batch, and each changes once."""

    class Some(nn.Module):
        def forward(self, x, table):
            return x, table[:1]

    class Grow(nn.Module):
        def forward(self, value):
            return value[0] + value[1].add_(1)

    gpipe = in_partitions(devices, Some(), Grow(), chunks=2)
    x, table = torch.zeros(4, 2, device=devices.first), torch.zeros(2, device=devices.first)
    if devices.are_apart:
        assert gpipe(x, NoChunk(table)).tolist() == [[1, 1]] * 4
    else:
        with pytest.raises(RuntimeError, match='changed a tensor in place that all'):
            gpipe(x, NoChunk(table))


@skippable(stash=['mask'])
class Part(nn.Module):
    """Stash all that there is but one tensor."""

    def forward(self, x, table):
        yield stash('mask', table)
        return x * 2


@skippable(pop=['mask'])
class Join(nn.Module):
    """Put it back, and change it if told to."""

    def __init__(self, change=False):
        super().__init__()
        self.change = change

    def forward(self, x):
        table = yield pop('mask')
        return x, table.add_(1) if self.change else table


@devices
def test_a_shared_tensor_that_is_a_skip_on_its_way(devices):
    """It had the size of a micro-batch, and so three of them were put together."""
    for balance in [[3], [1, 2], [2, 1], [1, 1, 1]]:
        x, table = torch.rand(6, 2), torch.rand(2, 2)
        for shared in (table, table[0, 0].clone()):
            gpipe = GPipe(
                nn.Sequential(Part(), nn.Tanh(), Join()),
                balance,
                devices=devices(len(balance)),
                chunks=3,
            )
            y, out = gpipe(x.to(devices.first), NoChunk(shared.to(devices.first)))
            assert torch.allclose(y.cpu(), (x * 2).tanh()) and torch.equal(out.cpu(), shared)


@devices
def test_a_shared_tensor_that_changes_in_place_after_a_skip(devices):
    for balance in [[3], [1, 2], [2, 1], [1, 1, 1]]:
        gpipe = GPipe(
            nn.Sequential(Part(), nn.Tanh(), Join(change=True)),
            balance,
            devices=devices(len(balance)),
            chunks=3,
        )
        x = torch.rand(6, 2, device=devices.first)
        with pytest.raises(RuntimeError, match='changed a tensor in place that all'):
            gpipe(x, NoChunk(x[:2].clone()))
        gpipe.chunks = 1
        assert gpipe(x, NoChunk(x[:2].clone()))[1].min() >= 1


@devices
def test_structures_and_skips(devices):
    class Double(nn.Linear):
        def forward(self, value):
            return {**value, 'x': super().forward(value['x'])}

    model = nn.Sequential(
        Stash(lambda value: (value['mask'], {'x': value['x'], 'n': 2})),
        Double(3, 3),
        Pop(lambda value, mask: [value['x'] * mask * value['n']]),
    ).double()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [1, 1, 1], devices=devices(3), chunks=2, checkpoint='except_last')
    value = {'x': torch.rand(5, 3).double().requires_grad_(), 'mask': torch.rand(5, 3).double()}
    (expected,) = reference(value)
    (output,) = gpipe({name: x.to(devices.first) for name, x in value.items()})
    expected.sum().backward()
    grad, value['x'].grad = value['x'].grad, None
    output.sum().backward()
    assert_same(
        [output, value['x'].grad, *gradients(gpipe)], [expected, grad, *gradients(reference)]
    )


@devices
def test_one_keyword_named_input(devices):
    class Named(nn.Module):
        def forward(self, x):
            return x * 2

    gpipe = in_partitions(devices, Named())
    x = torch.ones(2, device=devices.first)
    assert gpipe(input=x).tolist() == gpipe(x=x).tolist() == [2, 2]


@devices
def test_hooks_and_names_of_a_first_layer_with_several_arguments(devices):
    seen = []
    model = network()
    model[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((len(args), sorted(kwargs))), with_kwargs=True
    )
    gpipe = GPipe(model, [2, 2], devices=devices(2), chunks=2, gather='mean')
    x = torch.rand(2, 4).double().to(devices.first)
    gpipe(x, table=NoChunk(x[0].clone()))['y'].sum().backward()
    assert seen == [(1, ['table'])] * 3  # and once again, to recompute


@devices
def test_costs_of_structures(devices):
    device = devices.first
    sample = Arguments(torch.rand(16, 4).double(), table=NoChunk(torch.rand(4).double()))
    costs = profile(network(), sample, device=device, timeout=0)
    assert costs.layers[0].output_bytes == 16 * 4 * 8 + 4 * 8 + 8 and costs.batch_size == 16
    assert sum(balance_by_size(2, network(), sample, device=device, chunks=4)) == 4
    turned = profile(
        nn.Sequential(Attention()), torch.rand(3, 16, 4), device=device, timeout=0, batch_dim=1
    )
    assert turned.batch_size == 16


@devices
def test_a_partition_is_a_sequential_module(devices):
    gpipe = GPipe(network(), [2, 2], devices=devices(2)[:1] * 2)
    assert all(isinstance(partition, nn.Sequential) for partition in gpipe.partitions)
    again = GPipe(gpipe.partitions[1], [2], devices=devices(1), gather='mean')
    x = torch.rand(2, 4).double().to(devices.first)
    state = gpipe[0](x, table=x[0])
    assert again(state._replace(table=NoChunk(state.table)))['y'].shape == (2, 2)


class Embed(nn.Module):
    """Takes a sequence of the batch first, and a table of all."""

    def forward(self, x, positions, mask=None):
        x = x + positions[:, None]
        return x if mask is None else x * mask


@devices
def test_a_rule_goes_by_positions_and_names_of_arguments(devices):
    """However the call says them; the table has as many rows as the batch."""
    for rule in [
        {'positions': None},
        {'positions': None, 'mask': 0},
        {1: None},
        (0, None),
        [0, None, 0],
    ]:
        gpipe = in_partitions(devices, Embed(), nn.Tanh(), chunks=3, batch_dim=rule)
        x = torch.randn(6, 6, 2, device=devices.first)
        positions = torch.randn(6, device=devices.first)
        expected = (x + positions[:, None]).tanh()
        for found in (
            gpipe(x, positions),
            gpipe(x, positions=positions),
            gpipe(positions=positions, x=x),
        ):
            assert_same([found], [expected.to(found.device)])


class Sums(nn.Module):
    """Return the cumulative sum along the first dimension."""

    def forward(self, x):
        return x.cumsum(0)


@devices
def test_a_rule_of_a_single_argument(devices):
    for rule in [(1,), [1], {0: 1}, {'x': 1}]:
        gpipe = in_partitions(devices, Sums(), nn.Tanh(), chunks=3, batch_dim=rule, gather=1)
        x = torch.randn(5, 5, 2, device=devices.first)
        assert_same([gpipe(x)], [x.cumsum(0).tanh().to(gpipe.devices[-1])])


def test_a_rule_about_nothing():
    for rule, call, key in [
        ({'postions': None}, lambda m, x: m(x, x), 'postions'),
        ({'postions': None}, lambda m, x: m(x, positions=x), 'postions'),
        ((0, None, 0, 1), lambda m, x: m(x, x), '3'),
        ({'src': 1}, lambda m, x: m(x), 'src'),
    ]:
        gpipe = in_partitions(['cpu'], Embed(), chunks=3, batch_dim=rule)
        with pytest.raises(ValueError, match=f"batch_dim says something of '?{key}"):
            call(gpipe, torch.zeros(6))


def test_a_rule_about_nothing_in_a_value():
    gpipe = in_partitions(['cpu'], nn.Identity(), chunks=3, batch_dim={'x': {'mask': 1}})
    gpipe({'x': {'mask': torch.zeros(2, 6), 'y': torch.zeros(6)}})
    with pytest.raises(ValueError, match="batch_dim says something of 'mask'"):
        gpipe({'x': {'msk': torch.zeros(6, 6)}})


@devices
@pytest.mark.parametrize('how', ['call', 'step'])
def test_in_v080_a_tensor_in_two_places_was_two_behind_a_checkpoint(devices, how):
    same = []

    def give(linear, x, again, whole):
        same.append(x is again and x is not whole)
        return {'x': (y := linear(x)), 'also': [y, whole]}

    def take(linear, value):
        same.append(value['x'] is value['also'][0])
        return {'x': linear(value['x']), 'sum': value['also'][0] + value['also'][1]}

    def end(linear, value):
        y = linear(value['x']) + value['sum']
        return y, y

    gpipe = GPipe(
        nn.Sequential(Layer(give), Layer(take), Layer(end)).double(),
        [1, 1, 1],
        devices=devices(3),
        chunks=2,
        checkpoint='except_last',
    )
    x = torch.randn(4, 4, dtype=torch.double, device=devices.first)
    if how == 'step':
        gpipe.step(Arguments(x, x, NoChunk(x[0])), None, lambda output, _: output[0].sum() / 4)
    else:
        output, again = gpipe(x, x, NoChunk(x[0]))
        assert output is again and output.shape == (4, 4)
        output.sum().backward()
    assert all(same) and len(same) >= 4


def test_tensors_in_several_places_may_differ_between_micro_batches():
    seen = []

    def twice(linear, x):
        seen.append(linear(x))
        return seen[-1], seen[-1].clone() if len(seen) == 1 else seen[-1]

    gpipe = in_partitions(['cpu'], Layer(twice), chunks=2)
    a, b = gpipe(torch.randn(4, 4))
    assert torch.equal(a, b) and a.shape == (4, 4)


# --- lists with an item for each sample
# ----------------------------------------------------------------------------------


class Lengths(nn.Linear):
    """Scale by the sum of the lengths."""

    def forward(self, value):
        return super().forward(value['x']) * sum(value['lengths'])


class Images(nn.Module):
    """Reduce each image by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, images):
        return torch.stack([self.linear(image).mean(0) for image in images])


@devices
def test_a_list_of_a_number_for_each_sample(devices):
    """In v0.21, each micro-batch got the whole list, silently."""
    x = torch.rand(4, 4, device=devices.first)
    layers = nn.Sequential(Lengths(4, 4))
    gpipe = GPipe(layers, [1], devices=devices(1), chunks=2)
    with pytest.raises(ValueError, match=r"input\['lengths'\] is a list of as many .* \(4\)"):
        gpipe({'x': x, 'lengths': [1, 2, 3, 4]})
    expected = gpipe({'x': x, 'lengths': [10]})
    for lengths in (NoChunk([1, 2, 3, 4]), (1, 2, 3, 4), [1, 2, 7]):
        assert_same([gpipe({'x': x, 'lengths': lengths})], [expected], 1e-6)
    single = GPipe(layers, [1], devices=devices(1), chunks=1)
    assert_same([single({'x': x, 'lengths': [1, 2, 3, 4]})], [expected], 1e-6)


@devices
@pytest.mark.parametrize('sizes', [(5, 6, 7), (5, 5, 5)])
def test_a_list_of_a_tensor_for_each_sample(devices, sizes):
    """In v0.21, chunks=1 refused it, and no advice helped."""
    images = [torch.rand(size, 4, device=devices.first) for size in sizes]
    layers = nn.Sequential(Images(), nn.Linear(2, 2))
    gpipe = GPipe(layers, [1, 1], devices=devices(2), chunks=2)
    # If all sizes agree, the list could also be one of several inputs. Then the output is wrong.
    message = 'If the list input has an item' if len({*sizes}) > 1 else 'with 2 samples and came'
    with pytest.raises(ValueError, match=message):
        gpipe(images)
    single = GPipe(copy.deepcopy(layers), [1, 1], devices=devices(2), chunks=1)
    target = torch.rand(3, 2)
    loss = (
        F.mse_loss
        if not devices.are_accelerators
        else (lambda output, target: (output - target).square().mean())
    )
    expected = loss(layers.cpu()([image.cpu() for image in images]), target)
    expected.backward()
    target = target.to(single.devices[-1])
    if len({*sizes}) > 1:
        assert_same([single.step(images, target, loss)], [expected.detach()], 1e-6)
    else:  # A step counts the samples of its input, and finds another number in its target.
        loss(single(images), target).backward()
    assert_same(gradients(single), gradients(layers), 1e-6)
