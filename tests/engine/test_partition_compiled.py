"""``torch.compile`` of layers, of partitions and of code around them: the results of the model."""

import copy
import itertools
import threading
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func as boxed
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config

from tests.devices import DEVICES, devices
from tests.helpers import assert_same, gradients, in_a_new_thread, memory_of, on_first
from tests.marks import modes
from torchgpipe import GPipe, is_recomputing
from torchgpipe.base import private
from torchgpipe.base.context import context
from torchgpipe.engine.checkpoint import recomputation
from torchgpipe.skip import Namespace, pop, skippable, stash

pytestmark = pytest.mark.usefixtures('compiler')


class Backend:
    """Compile without a C++ compiler, and count the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return lookup_backend('aot_eager')(graph, inputs)


@skippable(stash=['skip'])
class Stash(nn.Linear):
    """Stash a function of the output."""

    def forward(self, x):
        y = super().forward(x).tanh()
        yield stash('skip', y * 2)
        return y


@skippable(pop=['skip'])
class Pop(nn.Linear):
    """Add the stashed tensor."""

    def forward(self, x):
        skip = yield pop('skip')
        return super().forward(x) + skip


class Residual(nn.Module):
    """Have a child, and an operation that draws nothing."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.GELU())

    def forward(self, x):
        return x + self.inner(x)


def plain_layers():
    """Return layers of several kinds."""
    return nn.Sequential(
        nn.Linear(4, 4),
        Residual(),
        nn.BatchNorm1d(4),
        nn.ReLU(inplace=True),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
    )


def layers_with_skips():
    """Return skips within a partition, and from one to another."""
    inner = Namespace()
    return nn.Sequential(
        Stash(4, 4),
        Residual(),
        Stash(4, 4).isolate(inner),
        nn.Tanh(),
        Pop(4, 4).isolate(inner),
        Residual(),
        Pop(4, 4),
        nn.Linear(4, 3),
    )


MODELS = pytest.mark.parametrize(
    'make, balance', [(plain_layers, [2, 4]), (layers_with_skips, [3, 5])], ids=['plain', 'skips']
)


def compile_as(how, model, backend):
    """Compile, and return the module to call."""
    if how == 'model':
        return torch.compile(model, backend=backend)
    if how == 'partitions':
        model.compile(backend=backend)
    else:
        for module in model if how == 'layers' else model.partitions:
            if how == 'forward':
                module.forward = torch.compile(module.forward, backend=backend)
            else:
                module.compile(backend=backend)
    return model


def steps(model, call, sizes):
    """Make steps of gradient descent; give all that comes out of them."""
    torch.manual_seed(1)
    found = []
    for size in sizes:
        x = torch.rand(size, 4, dtype=torch.double)
        x = x.to(next(model.parameters()).device).requires_grad_(size == 8)
        model.zero_grad()
        output = call(x)
        output.square().sum().backward()
        found += [output, x.grad, *gradients(model), *map(torch.clone, model.buffers())]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= 0.1 * parameter.grad
    return found


def compare(layers, call, gpipe, sizes=(6, 6)):
    """Compare with the unwrapped model, run on one micro-batch after the other."""

    def one_by_one(x):
        return torch.cat([layers(c) for c in x.tensor_split(gpipe.chunks)])

    assert_same(steps(gpipe, call, sizes), steps(layers, one_by_one, sizes))


@devices
@MODELS
@pytest.mark.parametrize('how', ['layers', 'partitions', 'model'])
def test_compiled_models_train_as_the_unwrapped_model(how, make, balance, devices):
    """Before 0.5.0 a skip of compiled layers had no gradient, without an error."""
    layers, backend = make().double(), Backend()
    gpipe = GPipe(
        copy.deepcopy(layers), balance, devices=devices(2), chunks=3, checkpoint='except_last'
    )
    compare(layers, compile_as(how, gpipe, backend), gpipe)
    assert bool(backend.graphs) == (how != 'model')
    assert list(gpipe.state_dict()) == list(layers.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    'how, devices',
    [
        ('some partitions', DEVICES['one worker']),
        ('layers', DEVICES['a worker each']),
        pytest.param('forward', DEVICES['accelerators'], marks=pytest.mark.accelerator),
    ],
)
def test_micro_batches_of_several_sizes(how, devices):
    layers, backend = plain_layers().double(), Backend()
    gpipe = GPipe(copy.deepcopy(layers), [2, 4], devices=devices(2), chunks=3)
    # Layers of PyTorch's own share one code.
    with torch._dynamo.config.patch(recompile_limit=32):
        compare(layers, compile_as(how, gpipe, backend), gpipe, (7, 7, 8))
    assert backend.graphs


@pytest.mark.slow
@devices
@modes
def test_a_compiled_step_around_it(mode, devices):
    layers, backend = layers_with_skips().double(), Backend()
    gpipe = GPipe(copy.deepcopy(layers), [3, 5], devices=devices(2), chunks=3, checkpoint=mode)

    def step(model, x):
        loss = (model(x * 2) / 2).square().sum()
        loss.backward()
        return loss

    x = torch.rand(7, 4, dtype=torch.double)
    losses = [torch.compile(step, backend=backend)(gpipe, on_first(gpipe, x)), step(layers, x)]
    assert_same([losses[0], *gradients(gpipe)], [losses[1], *gradients(layers)])
    assert backend.graphs


@pytest.mark.slow
@devices
@pytest.mark.parametrize('frozen', [False, True])
def test_frozen_layers_and_frozen_parameters(frozen, devices):
    layers = plain_layers().double()
    for k, parameter in enumerate(layers.parameters()):
        parameter.requires_grad_(k > 3 if frozen else k % 2 == 0)
    gpipe = GPipe(copy.deepcopy(layers), [2, 4], devices=devices(2), chunks=3, checkpoint='always')
    compare(layers, compile_as('partitions', gpipe, Backend()), gpipe)


class TwoWays(nn.Module):
    """Do the same in both passes, in another order."""

    def __init__(self, first, second):
        super().__init__()
        self.ways = first, second

    def forward(self, x):
        first, second = self.ways
        if is_recomputing():
            b, a = second(x), first(x)
        else:
            a, b = first(x), second(x)
        return x.masked_fill(a, 0) * x.masked_fill(b, 1) if a.dtype == torch.bool else a * b


class Scale(nn.Module):
    """Multiply by numbers for two samples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 4, dtype=torch.double))

    def forward(self, x):
        return self.weight * x


#: Save all that a backward pass takes, where the usual ones would compute some of it again.
SAVES_ALL = aot_autograd(fw_compiler=lambda graph, inputs: boxed(graph.forward))


@pytest.fixture(params=['known', 'unknown'])
def frames(request, monkeypatch):
    """Let it be known in which frame compiled code saves tensors, or not, as in other releases."""
    if request.param == 'unknown':
        for module in private, recomputation:
            monkeypatch.setattr(module, 'APPLY', None)


@pytest.mark.slow
@devices
@pytest.mark.usefixtures('frames')
def test_other_compiled_code_that_saves_other_tensors(devices):
    """Before 0.5.0 it took one for the other: the gradient was wrong without an error."""
    for first, second in [(torch.sin, torch.cos), (lambda x: x > 0.3, lambda x: x < 0.6)]:
        layers = nn.Sequential(nn.Linear(4, 4), TwoWays(first, second)).double()
        gpipe = GPipe(
            copy.deepcopy(layers), [2], devices=devices(1), chunks=2, checkpoint='always'
        )
        x = torch.rand(4, 4, dtype=torch.double)
        gpipe.compile(backend=SAVES_ALL)
        with pytest.raises(
            RuntimeError, match='took another path .* saved by other compiled code'
        ):
            gpipe(on_first(gpipe, x)).sum().backward()


@devices
@pytest.mark.usefixtures('frames')
def test_other_compiled_code_that_saves_the_same(devices):
    """Masks are compared, too."""

    class Mask(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0.3, 0)

    gpipe = GPipe(nn.Sequential(Mask()), [1], devices=devices(1), checkpoint='always')
    gpipe.compile(backend=SAVES_ALL)
    x = torch.rand(4, 4, device=devices.first, requires_grad=True)
    output = gpipe(x)
    torch._dynamo.reset()
    output.sum().backward()
    assert x.grad.equal((x <= 0.3).float())


@devices
@pytest.mark.usefixtures('frames')
def test_only_one_of_both_passes_was_compiled(devices):
    """Compiled code saves tensors in another order; before 0.5.0 the gradient was wrong."""
    for stances in [('force_eager', 'default'), ('default', 'force_eager')]:
        gpipe = GPipe(nn.Sequential(Scale()), [1], devices=devices(1), checkpoint='always')
        gpipe.compile(backend=SAVES_ALL)
        with torch.compiler.set_stance(stances[0]):
            output = gpipe(on_first(gpipe, torch.rand(2, 4, dtype=torch.double)).requires_grad_())
        with (
            torch.compiler.set_stance(stances[1]),
            pytest.raises(RuntimeError, match='took another path .* saved by other compiled code'),
        ):
            output.sum().backward()


@devices
def test_tensors_saved_by_checkpointed_compiled_code_are_freed(devices):
    seen = []

    def forward(graph, inputs):
        def call(*args):
            results = graph.forward(*args)
            seen.append([memory_of(x) for x in results])
            return results

        return boxed(call)

    gpipe = GPipe(
        nn.Sequential(TwoWays(torch.sin, torch.cos)),
        [1],
        devices=devices(1),
        chunks=2,
        checkpoint='always',
    )
    gpipe.compile(backend=aot_autograd(fw_compiler=forward))
    output = gpipe(torch.rand(400, 4, device=devices.first, requires_grad=True))
    assert output.requires_grad and len(seen) == 2
    for _, input, *others in seen:
        assert others and all(each.expired() for each in others)


def test_compiled_code_can_tell_the_passes_apart():
    """Before 0.5.0 code that asked before a thread's first checkpoint got that answer forever."""
    ask = torch.compile(lambda x: x + is_recomputing(), backend='eager')

    def ask_twice():
        before = ask(torch.zeros(1))
        with mock.patch.object(context, 'recomputing', True):
            return before, ask(torch.zeros(1))

    assert in_a_new_thread(ask_twice) == (0, 1)


@pytest.mark.accelerator
def test_backward_of_compiled_code_on_two_devices_at_the_same_time():
    """Before 0.5.0 the second one raised "cannot enter context"."""
    meet = Meet()
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: boxed(graph.forward),
        bw_compiler=lambda graph, inputs: boxed(meet.before(graph.forward)),
    )
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)]).double()
    gpipe = GPipe(
        copy.deepcopy(layers), [1, 1], devices=DEVICES['accelerators'].distinct(2), chunks=2
    )
    x = torch.rand(4, 4, dtype=torch.double)
    gpipe.compile(backend=backend)
    gpipe(on_first(gpipe, x)).sum().backward()
    layers(x).sum().backward()
    assert_same(gradients(gpipe), gradients(layers))
    assert meet.number == 2


class Meet:
    """Let two threads meet, of four calls the second one and the third one."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=10)
        self._calls = itertools.count(1)
        self.number = 0

    def before(self, function):
        """Let them meet before a function is called."""

        def call(*args):
            if next(self._calls) in (2, 3):
                self._barrier.wait()
                self.number += 1
            return function(*args)

        return call


@skippable(stash=['skip'])
class Around(nn.Module):
    """Call a module, and stash."""

    def __init__(self):
        super().__init__()
        self.inner = Residual()

    def forward(self, x):
        yield stash('skip', x)
        return self.inner(x)


@pytest.mark.slow
@devices
@pytest.mark.parametrize('how', ['layers', 'partitions'])
def test_functions_called_by_a_layer_that_stashes_are_compiled(how, devices):
    layers, backend = nn.Sequential(Around(), Pop(4, 4)).double(), Backend()
    gpipe = GPipe(copy.deepcopy(layers), [2], devices=devices(1))
    compare(layers, compile_as(how, gpipe, backend), gpipe)
    assert backend.graphs == 1


@devices
def test_layers_between_stash_and_pop_are_compiled_together(devices):
    """PyTorch's own ones are compiled in the code of others only."""
    layers, backend = nn.Sequential(Stash(4, 4), nn.Linear(4, 4), nn.Tanh(), Pop(4, 4)), Backend()
    gpipe = GPipe(copy.deepcopy(layers.double()), [4], devices=devices(1))
    compare(layers, compile_as('partitions', gpipe, backend), gpipe)
    assert backend.graphs == 1


@pytest.mark.slow
@devices
def test_the_compiler_does_not_give_up_on_many_partitions(devices):
    """Before 0.5.0 all partitions had one code, and it was compiled eight times at most."""
    widths = range(2, 13)
    layers = nn.Sequential(*map(nn.Linear, widths, widths[1:])).double()
    gpipe = GPipe(copy.deepcopy(layers), [1] * 10, devices=devices(10), chunks=2)
    graphs = []
    gpipe.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    x = torch.rand(4, 2, dtype=torch.double)
    assert_same([gpipe(on_first(gpipe, x))], [layers(x)])
    assert len(graphs) == 10


@pytest.mark.slow
@devices
def test_deferred_batch_norm(devices):
    """Statistics are over the mini-batch; nothing is recompiled for each micro-batch."""
    layers, backend = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), Backend()
    gpipe = GPipe(
        copy.deepcopy(layers), [1, 1], devices=devices(2), chunks=3, deferred_batch_norm=True
    )
    gpipe.compile(backend=backend)
    for _ in range(3):
        x = torch.rand(9, 4, dtype=torch.double)
        layers(x)
        gpipe(on_first(gpipe, x)).sum().backward()
    assert_same(gpipe.buffers(), layers.buffers())
    assert backend.graphs <= 6


@devices
def test_copies_are_not_compiled_and_work(devices):
    backend = Backend()
    gpipe = GPipe(plain_layers().double(), [2, 4], devices=devices(2), chunks=2)
    gpipe.compile(backend=backend)
    other = copy.deepcopy(gpipe)
    x = on_first(gpipe, torch.rand(4, 4, dtype=torch.double))
    expected = other(x)
    assert backend.graphs == 0
    assert_same([gpipe(x)], [expected])
    assert backend.graphs > 0


@pytest.mark.slow
def test_inductor():
    """It needs a C++ compiler. Random numbers are its own, and the same in a recomputation."""

    def make(mode):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)
        ).double()
        gpipe = GPipe(layers, [2, 3], devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint=mode)
        gpipe.compile()
        return gpipe

    results = []
    for mode in ('never', 'always'):
        gpipe = make(mode)
        torch.manual_seed(1)
        x = torch.rand(5, 4, dtype=torch.double)
        # Threads of its own would stay for later compilations.
        with inductor_config.patch(compile_threads=1):
            output = gpipe(x)
            output.square().sum().backward()
        results.append([output, *gradients(gpipe)])
    assert_same(*results)
