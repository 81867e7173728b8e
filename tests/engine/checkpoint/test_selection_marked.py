"""Modules that are kept out of recomputation: their operations run once, with all values."""

import copy
import itertools
import pickle
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.devices import DEVICES, devices
from tests.engine.checkpoint.layers import Executed, Layer, compare_modes
from tests.helpers import (
    STEPS,
    Call,
    WeakLog,
    assert_same,
    call,
    compare_all_pending,
    gradients,
    in_partitions,
    nodes,
    to,
    train_both,
)
from tests.skip.layers import Stash
from tests.zoo.kept import Data, Inner, model_of
from torchgpipe import GPipe, is_recomputing, no_recompute
from torchgpipe.base.structure import leaves_of
from torchgpipe.engine.checkpoint import swaps
from torchgpipe.skip import pop, skippable


class Counted(nn.Linear):
    """A layer that records its calls: whether each is in a recomputation."""

    def __init__(self, width=4):
        super().__init__(width, width)
        self.calls = []

    def forward(self, x):
        self.calls.append(is_recomputing())
        return super().forward(x)


@devices
def test_operations_of_a_marked_layer_run_once(devices):
    stops = {'always': 4, 'except_last': 3, 'never': 0}
    for mode in ['always', 'except_last', 'never', ['always', 'never']]:
        layer, other = no_recompute(Counted()), Counted()
        gpipe = in_partitions(
            devices,
            nn.Sequential(other, nn.Tanh(), layer),
            nn.Linear(4, 4),
            chunks=4,
            checkpoint=mode,
        )
        recomputed = stops.get(str(mode), 4)
        if mode == ['always', 'never']:
            recomputed_last = 0
        else:
            recomputed_last = recomputed
        for _ in range(2):
            layer.calls.clear()
            with Executed() as executed:
                call(gpipe, torch.randn(8, 4)).sum().backward()
            # Three products of each micro-batch, and again those of the layers without a mark.
            assert executed.counts['addmm'] == 3 * 4 + recomputed + recomputed_last
            assert sum(layer.calls) == recomputed


@devices
def test_all_layers_marked(devices):
    compare_modes(
        lambda: nn.Sequential(*[no_recompute(Counted()) for _ in range(3)]).double(), devices
    )


@devices
def test_draws_of_other_layers(devices):
    """Dropouts before, in and after the marked one, and an own generator in the middle."""
    for place in range(5):

        def make():
            generator = torch.Generator().manual_seed(3)
            layers = [
                nn.Dropout(0.5),
                nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4)),
                Layer(
                    lambda layer, x: (
                        x * torch.rand(x.shape, dtype=x.dtype, generator=generator).to(x.device)
                        + torch.rand_like(x)
                    )
                ),
                nn.RReLU(),
                nn.Dropout(0.3),
            ]
            no_recompute(layers[place])
            return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*layers), nn.Dropout(0.1)).double()

        compare_modes(make, devices)


@pytest.mark.accelerator
def test_draws_on_an_accelerator():
    """Its own generator is moved back for a recomputation, and left alone by it."""
    for place in range(3):
        device = DEVICES['accelerators'].first
        module = torch.get_device_module(device)
        layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.4), nn.Dropout(0.3))
        no_recompute(layers[place])
        gpipe = GPipe(
            nn.Sequential(layers, nn.Dropout(0.2)),
            [2],
            devices=[device],
            chunks=4,
            checkpoint='always',
        )
        for _ in range(2):
            x = torch.rand(8, 16, device=device, requires_grad=True)
            output = gpipe(x)
            state = module.get_rng_state(device)
            output.sum().backward()
            assert torch.equal(module.get_rng_state(device), state)
            assert torch.allclose(output, x * x.grad)


@devices
def test_draws_after_a_marked_layer_in_each_of_two_recomputations(devices):
    results = []
    for mode in ('never', 'always'):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Dropout(0.3), no_recompute(nn.Dropout(0.4)), nn.Dropout(0.5))
        gpipe = GPipe(
            nn.Sequential(nn.Linear(4, 4), layers, nn.Linear(4, 4)).double(),
            [3],
            devices=devices(1),
            chunks=2,
            checkpoint=mode,
        )
        torch.manual_seed(1)
        loss = call(gpipe, torch.randn(6, 4, dtype=torch.double)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        compare_all_pending(gpipe)
        results.append(gradients(gpipe))
    assert_same(*results)


@devices
def test_gradients_may_be_asked_for_twice_and_of_gradients(devices):
    model = model_of('in place twice')
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint='always')
    got = []
    for net in (model, gpipe):
        x = torch.linspace(-1, 1, 20, dtype=torch.double).view(5, 4).requires_grad_()
        output = call(net, x).square().sum()
        output.backward(retain_graph=True)
        output.backward(retain_graph=True)
        (first,) = torch.autograd.grad(output, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        got.append([first, second, x.grad, *gradients(net)])
    assert_same(got[1], got[0], 1e-10)


@devices
def test_autocast(devices):
    results = []
    for mode in ('never', 'always'):
        torch.manual_seed(0)
        gpipe = GPipe(
            model_of('tuple').float(), [2, 1], devices=devices(2), chunks=2, checkpoint=mode
        )
        with torch.autocast(devices.first.type, torch.bfloat16):
            output = call(gpipe, torch.randn(6, 4))
        output.float().sum().backward()
        results.append([output, *gradients(gpipe)])
    assert_same(results[1], results[0], 0)


@devices
def test_tensors_alive_between_forward_and_backward(devices):
    """The marked layer's saved tensors and its result stay alive, but not the tensors around
    it."""
    middle = no_recompute(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), middle, nn.Tanh(), nn.Sigmoid()),
        [5],
        devices=devices(1),
        chunks=2,
        checkpoint='always',
    )
    around = WeakLog(gpipe[1], gpipe[4])  # input and output of each
    tanh = WeakLog(middle[0])
    output = call(gpipe, torch.rand(4, 4))
    # The Linear saves the result of the Tanh, which does so itself.
    assert around.alive() == 0 and tanh.alive() == 2
    output.sum().backward()
    assert tanh.alive() == 0


@devices
def test_a_result_in_the_memory_of_the_input_does_not_keep_it(devices):
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), no_recompute(nn.Flatten()), nn.Tanh()),
        [3],
        devices=devices(1),
        chunks=2,
        checkpoint='always',
    )
    log = WeakLog(gpipe[1])
    output = call(gpipe, torch.rand(4, 4))
    assert log.alive() == 0
    output.sum().backward()


class Double:
    """Call a pipeline with another dtype."""

    def __init__(self, gpipe):
        self.gpipe, self.devices = gpipe, gpipe.devices

    def __call__(self, x):
        return self.gpipe(x.double())


@devices
def test_nothing_is_alive_after_a_step(devices):
    gpipe = GPipe(model_of('dict'), [2, 1], devices=devices(2), chunks=3, checkpoint='always')
    log = WeakLog(gpipe[0].before, gpipe[0].inner.linear)
    for step in STEPS.values():
        step(Double(gpipe))
        assert log.alive() == 0


@devices
def test_the_result_is_not_kept_when_the_graph_is_freed(devices):
    """Also where a node of the graph is still referred to."""
    gpipe = GPipe(model_of('tensor'), [3], devices=devices(1), checkpoint='always')
    output = call(gpipe, torch.rand(6, 4).double())
    (recomputation,) = {
        node.recomputation
        for node in nodes(output)
        if hasattr(node, 'recomputation') and node.name() == 'CheckpointBackward'
    }
    output.sum().backward()
    assert not hasattr(recomputation, '_selection')


@devices
def test_hooks_run_in_both_passes(devices):
    seen = []
    model = model_of('tensor')
    model[0].inner.register_forward_hook(lambda *args: seen.append('after') or args[2] * 2)
    model[0].inner.register_forward_pre_hook(
        lambda module, args: seen.append('before') or (args[0] * 3,)
    )
    model[0].inner.register_full_backward_hook(lambda *args: seen.append('backward'))
    model.eval()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), checkpoint='always')
    model.train(), gpipe.train()
    for net in (*model.modules(), *gpipe.modules()):
        if isinstance(net, nn.BatchNorm1d):
            net.eval()
    train_both(model, gpipe, torch.randn(7, 4, dtype=torch.double))
    assert seen == ['before', 'after', 'backward'] + ['before', 'after'] * 2 + ['backward']


@devices
def test_hooks_of_the_user_s_around_the_model(devices):
    packed = []

    def pack(x):
        packed.append(x.shape)
        return x

    model = model_of('in place afterwards')
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint='always')
    for context in (
        lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autograd.graph.save_on_cpu,
    ):
        gpipe.zero_grad()
        train_both(model, gpipe, torch.randn(7, 4, dtype=torch.double), context=context)
    assert packed


@devices
def test_a_checkpoint_of_pytorch_around_the_model(devices):
    model = model_of('in place afterwards')
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint='always')
    x = torch.randn(7, 4, dtype=torch.double)
    model(x).square().sum().backward()
    torch_checkpoint(gpipe, to(devices.first, x), use_reentrant=False).square().sum().backward()
    assert_same(gradients(gpipe), gradients(model))


@devices
def test_a_pipeline_in_a_pipeline(devices):
    for outer in ['always', 'never']:
        for inner in ['always', 'never']:
            model = model_of('in place afterwards')
            first, second = devices(2)
            within = GPipe(
                copy.deepcopy(model)[1:],
                [1, 1],
                chunks=2,
                checkpoint=inner,
                devices=['cpu:2', 'cpu:3'] if second == 'cpu:1' else [second] * 2,
            )
            gpipe = in_partitions(
                [first, second], copy.deepcopy(model)[0], within, chunks=2, checkpoint=outer
            )
            train_both(model, gpipe, torch.randn(7, 4, dtype=torch.double))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:The .grad attribute of a Tensor that is not a leaf')
# Other tests have compiled the same code for other backends, which all count.
@torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024)
def test_a_marked_module_within_compiled_layers(compiler):
    """It runs without compilation."""
    for compile in ['around', 'partition']:
        runs = []

        def backend(graph, inputs):
            return lambda *args: runs.append(1) or graph.forward(*args)

        model = model_of('in place afterwards')
        compiled = copy.deepcopy(model)
        if compile == 'around':
            compiled[0].compile(backend=backend)
        gpipe = GPipe(compiled, [2, 1], devices=['cpu'] * 2, chunks=2, checkpoint='always')
        if compile == 'partition':
            gpipe.partitions[0].compile(backend=backend)
        for _ in range(2):
            gpipe.zero_grad()
            train_both(model, gpipe, torch.randn(8, 4, dtype=torch.double))
        assert runs


@devices
def test_a_module_of_its_own_forward_gets_it_back(devices):
    layer = no_recompute(nn.Linear(4, 4))
    own = layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    gpipe = in_partitions(devices, layer, no_recompute(nn.Linear(4, 4)), checkpoint='always')
    call(gpipe, torch.rand(2, 4)).sum().backward()
    assert layer.forward is own and 'forward' not in vars(gpipe[1])
    layer.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        call(gpipe, torch.rand(2, 4))
    assert 'forward' not in vars(gpipe[1])


@devices
def test_layers_that_ask_for_the_pass_keep_their_attributes(devices):
    class Aware(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.passes = no_recompute(Counted()), 0

        def forward(self, x):
            self.passes += 1 + is_recomputing()
            return self.inner(x)

    gpipe = in_partitions(devices, Aware(), nn.Linear(4, 4), checkpoint='always')
    for _ in range(2):
        call(gpipe, torch.rand(2, 4)).sum().backward()
    assert gpipe[0].passes == 6 and 'forward' not in vars(gpipe[0].inner)


@devices
def test_the_mark_travels_with_the_module_and_not_with_its_values(devices):
    layer = no_recompute(Counted())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        compare_modes(
            lambda: nn.Sequential(nn.Linear(4, 4), copy.deepcopy(other)).double(), devices
        )
        gpipe = in_partitions(devices, other, checkpoint='always')
        with Executed() as executed:
            call(gpipe, torch.rand(2, 4)).sum().backward()
        assert executed.counts['addmm'] == 1 and other.calls == [False, True]
    assert list(layer.state_dict()) == ['weight', 'bias']


@devices
def test_modes_of_the_user_see_the_operations_of_layers(devices):
    seen = []
    for mark in (no_recompute, lambda layer: layer):
        gpipe = GPipe(
            nn.Sequential(nn.Linear(4, 4), mark(nn.Linear(4, 4)), nn.Tanh()),
            [3],
            devices=devices(1),
            checkpoint='always',
        )
        for _ in range(2):
            with Executed() as executed:
                call(gpipe, torch.rand(2, 4)).sum().backward()
        seen.append(set(executed.counts))
    assert seen[0] == seen[1] and 'addmm' in seen[0]


@devices
def test_an_interrupt_waits_until_layers_have_their_own_forward_again(devices):
    layer = no_recompute(nn.Linear(4, 4))
    gpipe = GPipe(
        nn.Sequential(layer, nn.Linear(4, 4)), [2], devices=devices(1), checkpoint='always'
    )
    real, interrupts = swaps._restore_all, [KeyboardInterrupt]

    def interrupt(functions):
        if 'forward' in vars(layer) and interrupts:
            raise interrupts.pop()
        real(functions)

    with mock.patch.object(swaps, '_restore_all', interrupt), pytest.raises(KeyboardInterrupt):
        call(gpipe, torch.rand(2, 4))
    assert not interrupts and 'forward' not in vars(layer)


@devices
def test_changes_in_place_of_inputs_and_of_results_in_their_memory(devices):
    """In v0.32, a recomputation skipped the call of a marked layer, so these were refused."""
    for function, after in [
        (lambda x: x.relu_(), lambda y: y),
        (lambda x: x, lambda y: y.relu_()),
        (lambda x: x.view(-1, 4), lambda y: y.relu_()),
        (lambda x: (lambda y: (y, y.T))(x * 2), lambda ys: ys[0].add_(1) + ys[1].T),
        (lambda x: (x, object()), lambda pair: pair[0]),
    ]:
        inner = no_recompute(Call(function))
        model = nn.Sequential(nn.Linear(4, 4), inner, Call(after), nn.Linear(4, 4)).double()
        gpipe = GPipe(copy.deepcopy(model), [4], devices=devices(1), chunks=2, checkpoint='always')
        train_both(model, gpipe, torch.randn(5, 4, dtype=torch.double))


@devices
def test_an_input_of_any_nesting_that_is_changed(devices):
    for use in [
        lambda layer, x: layer(other=x),
        lambda layer, x: layer({'x': [x]}),
        lambda layer, x: layer(Data(None, {'x': x})),
    ]:
        inner = no_recompute(
            Inner(lambda self, *args, **kwargs: leaves_of((args, kwargs))[-1].value.add_(1) * 2)
        )
        layer = Layer(lambda layer, x: use(layer.inner, x * 2))
        layer.inner = inner
        model = nn.Sequential(nn.Linear(4, 4), layer).double()
        gpipe = GPipe(copy.deepcopy(model), [2], devices=devices(1), chunks=2, checkpoint='always')
        train_both(model, gpipe, torch.randn(5, 4, dtype=torch.double))


@devices
def test_another_number_of_operations(devices):
    for number, forward in [
        ('1 times, the first pass 2', lambda a, x: a(x) if is_recomputing() else a(a(x))),
        ('2 times, the first pass 1', lambda a, x: a(a(x)) if is_recomputing() else a(x)),
    ]:
        layer = Layer(lambda layer, x: forward(layer.a, x))
        layer.a = no_recompute(nn.Linear(4, 4))
        gpipe = in_partitions(devices, layer, checkpoint='always')
        output = call(gpipe, torch.rand(2, 4))
        with pytest.raises(RuntimeError, match=f'took another path.*addmm.*{number}'):
            output.sum().backward()


@skippable(pop=['skip'])
class Pop(nn.Module):
    """A layer that pops, with a marked part."""

    def __init__(self):
        super().__init__()
        self.inner = no_recompute(Counted())

    def forward(self, x):
        return self.inner(x + (yield pop('skip')))


@devices
def test_marked_layers_that_stash_and_pop(devices):
    layers = no_recompute(Stash()), nn.Linear(4, 4), no_recompute(Pop())
    model = nn.Sequential(*layers).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 2], devices=devices(2), chunks=2, checkpoint='always')
    train_both(model, gpipe, torch.randn(5, 4, dtype=torch.double))


@devices
def test_a_marked_part_of_a_layer_that_pops(devices):
    model = nn.Sequential(Stash(), nn.Linear(4, 4), Pop()).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 2], devices=devices(2), chunks=2, checkpoint='always')
    train_both(model, gpipe, torch.randn(5, 4, dtype=torch.double))


@devices
def test_a_result_that_is_the_input_or_one_tensor_twice(devices):

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.twice = nn.Linear(4, 4), no_recompute(Same())

        def forward(self, x):
            y = self.linear(x)
            return y, self.twice(y)

    class Same(nn.Module):
        def forward(self, x):
            return x, x

    gpipe = in_partitions(devices, Both(), chunks=2, checkpoint='always')
    x = torch.rand(4, 4, device=devices.first)
    a, (b, c) = gpipe(x)
    (a.sum() + b.sin().sum() + c.sum()).backward()
    y = x @ gpipe[0].linear.weight.detach().T + gpipe[0].linear.bias.detach()
    expected = (2 + y.cos()).sum(0)
    assert torch.allclose(gpipe[0].linear.bias.grad, expected)


def test_a_thread_that_draws_before_a_marked_layer_is_named():
    number = itertools.count()

    def noise(x):
        x = x * torch.rand_like(x)
        if next(number) == 1:  # not in the first cell, which is watched
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        return x * torch.rand_like(x)

    gpipe = GPipe(
        nn.Sequential(Call(noise), no_recompute(nn.Identity())),
        [2],
        devices=['cpu'],
        chunks=3,
        checkpoint='always',
    )
    x = torch.ones(6, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match='another thread drew'):
        gpipe(x).sum().backward()
    number = itertools.count(2)
    output = gpipe(x)
    x.grad = None
    output.sum().backward()
    assert torch.equal(x.grad, output.detach())
