"""A backward in two halves: weights of linear layers and convolutions come in the second one."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.devices import cpus, devices
from tests.helpers import Spy, assert_same, gradients, on_first
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine import gradients as engine_gradients
from torchgpipe.engine.scheduled import Step
from torchgpipe.schedule import Schedule
from torchgpipe.schedule.generators import SPLIT, V_SHAPED


def loss_of(output, target):
    """Return a mean over samples."""
    return (output - target).square().mean()


@pytest.fixture
def log(monkeypatch):
    """Note the actions, and how many gradients each one adds up that were put off."""
    entries, act, add = [], Step._act, engine_gradients._add

    def note(step, action):
        entries.append([str(action), 0])
        act(step, action)

    def count(leaf, grad):
        entries[-1][1] += 1
        add(leaf, grad)

    monkeypatch.setattr(Step, '_act', note)
    monkeypatch.setattr(engine_gradients, '_add', count)
    return entries


class Checkpointed(nn.Module):
    """Run its layer again in backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return checkpoint(self.layer, x, use_reentrant=False)


class Twice(nn.Module):
    """Use its layer twice."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return self.layer(self.layer(x).tanh())


class OneSample(nn.Module):
    """Call its layer without a batch."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return torch.stack([self.layer(each) for each in x])


class Halved(nn.Module):
    """Compute in a smaller type."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        with torch.autocast('cpu', torch.bfloat16):
            return self.layer(x).to(x.dtype)


class Force(nn.Module):
    """The gradient of an energy, or of a part of it that is detached."""

    def __init__(self, *layers, create_graph=True):
        super().__init__()
        self.energy, self.create_graph = nn.Sequential(*layers), create_graph

    def forward(self, x):
        """Go back, within forward."""
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.create_graph)
        return force + x


class First(nn.Module):
    """The first one of several."""

    def forward(self, values):
        """Take it."""
        return values[0] * 2


class Doubled(nn.Module):
    """Double all gradients of its layer, by a hook on the node."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        y = self.layer(x)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(
                lambda grads, _: tuple(None if grad is None else 2 * grad for grad in grads)
            )
        return y


class Complex(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.cdouble)

    def forward(self, x):
        """Do so."""
        return self.linear(x * (1 + 2j)).abs()


class OfSparse(nn.Module):
    """Give its layer a sparse tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return self.layer(x.detach().to_sparse()) + x


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


class OfMarked(nn.Module):
    """Give its layer such a tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return self.layer(x.as_subclass(Marked)).as_subclass(torch.Tensor)


class Mapped(nn.Module):
    """Call its layer by ``vmap``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return torch.func.vmap(self.layer)(x)


def frozen(layer, *names):
    """Freeze parameters of a layer."""
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def linear(*shape, **options):
    """Return a function that makes two linear layers, and the shape of a sample."""
    return lambda: [nn.Linear(4, 6, **options), nn.Tanh(), nn.Linear(6, 4, **options)], (*shape, 4)


def convolution(kind, dims, **options):
    """Return a function that makes two convolutions, and the shape of a sample."""
    return (lambda: [kind(4, 8, 3, **options), nn.Tanh(), kind(8, 4, 1)], (4, *[9] * dims))


#: Layers, a sample of their input, and the number of deferred gradients per micro-batch.
LAYERS = {
    'linear': (*linear(), 4),
    'of sequences': (*linear(3), 4),
    'no bias': (*linear(bias=False), 2),
    'conv1d': (*convolution(nn.Conv1d, 1), 4),
    'conv2d': (*convolution(nn.Conv2d, 2, stride=(2, 1), padding=1, dilation=2), 4),
    'conv3d': (*convolution(nn.Conv3d, 3, groups=2, bias=False), 3),
    'circular': (*convolution(nn.Conv2d, 2, padding=1, padding_mode='circular'), 4),
    'valid': (*convolution(nn.Conv2d, 2, padding='valid'), 2),
    'same': (*convolution(nn.Conv2d, 2, padding='same'), 2),
    'no batch': (lambda: [OneSample(nn.Conv2d(2, 3, 3))], (2, 5, 5), 0),
    'one at a time': (lambda: [OneSample(nn.Linear(4, 4))], (4,), 2),
    'frozen weight': (lambda: [frozen(nn.Linear(4, 4), 'weight')], (4,), 0),
    'frozen bias': (lambda: [nn.Linear(4, 4), frozen(nn.Linear(4, 4), 'bias')], (4,), 2),
    'twice': (lambda: [Twice(nn.Linear(4, 4))], (4,), 4),
    'checkpointed within': (lambda: [Checkpointed(nn.Linear(4, 4)), nn.Linear(4, 4)], (4,), 2),
    'of other parameters': (lambda: [weight_norm(nn.Linear(4, 4))], (4,), 0),
    'attention': (lambda: [nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)], (3, 4), 4),
    'norms': (
        lambda: [nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 4), nn.Bilinear(4, 4, 2)],
        (4,),
        2,
    ),
    'hook of the node': (lambda: [Doubled(nn.Linear(4, 4)), nn.Linear(4, 4)], (4,), 2),
    'complex': (lambda: [Complex(), nn.Linear(4, 4)], (4,), 2),
    'of sparse': (lambda: [OfSparse(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4)], (4,), 2),
    'of another class': (lambda: [OfMarked(nn.Linear(4, 4)), nn.Linear(4, 4)], (4,), 2),
    'vmap': (lambda: [Mapped(nn.Linear(4, 4)), nn.Linear(4, 4)], (4,), 2),
    'autocast': (lambda: [Halved(nn.Linear(4, 4)), nn.Linear(4, 4)], (4,), 2),
}


class Both(nn.Module):
    """Return a layer that takes two the same for both."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Do so."""
        return self.layer(x, x)


def make(name):
    """Make a model of a kind of layers, and a sample of its input."""
    function, shape, number = LAYERS[name]
    found = [Both(layer) if isinstance(layer, nn.Bilinear) else layer for layer in function()]
    return nn.Sequential(*found).double(), shape, number


@cpus
@pytest.mark.parametrize('name', LAYERS)
def test_each_kind_of_layer(devices, name, log):
    model, shape, number = make(name)
    model = nn.Sequential(nn.Tanh(), *model)
    other = nn.Sequential(nn.Tanh(), *make(name)[0])  # no copy: TorchScript's have a graph
    other.load_state_dict(model.state_dict())
    gpipe = GPipe(other, [len(model)], devices=devices(1), chunks=3, checkpoint='except_last')
    for _ in range(2):
        x = torch.randn(7, *shape, dtype=torch.double, requires_grad=True)
        y = x.detach().requires_grad_()
        output = torch.cat([model(part) for part in x.tensor_split(3)])
        target = torch.randn_like(output)
        loss_of(output, target).backward()
        log.clear()
        gpipe.step(y, target, loss_of, schedule='zb-h1')
        assert_same(gradients(gpipe), gradients(model))
        assert_same([y.grad], [x.grad])
        deferred = [(action[1], count) for action, count in log]
        calls = 7 if name == 'one at a time' else 3
        assert sum(count for kind, count in deferred) == number * calls
        assert all(kind == 'W' for kind, count in deferred if count)


@cpus
@pytest.mark.parametrize('create_graph', [False, True])
@pytest.mark.parametrize(
    'layers, shape',
    [
        (lambda: [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)], [4]),
        (lambda: [nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)], [2, 5, 5]),
    ],
)
def test_a_layer_that_goes_back_within_its_forward(devices, layers, shape, create_graph):
    """Gradients of gradients among its own; nothing of that is put off."""
    model = nn.Sequential(
        nn.PReLU(), Force(*layers(), create_graph=create_graph), nn.PReLU()
    ).double()
    gpipe = GPipe(copy.deepcopy(model), [3], devices=devices(1), chunks=2, checkpoint='never')
    x = torch.randn(4, *shape, dtype=torch.double)
    loss_of(model(x), x).backward()
    gpipe.step(x, x, loss_of, schedule='zb-h1')
    assert_same(gradients(gpipe), gradients(model))


class Learner(nn.Linear):
    """A layer that takes a step of its own, in each forward."""

    def forward(self, x):
        """Go back to the weight, and use another one."""
        loss = nn.functional.linear(x, self.weight, self.bias).square().mean()
        (grad,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return nn.functional.linear(x, self.weight - 0.1 * grad, self.bias)


@devices
def test_a_layer_that_learns_within_its_forward(devices):
    """It asks for the gradient of a weight, which is none that is put off."""
    model = nn.Sequential(nn.Linear(4, 4), Learner(4, 4), nn.Linear(4, 4), Learner(4, 4)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 2], devices=devices(2), chunks=2, checkpoint='never')
    x = torch.randn(4, 4, dtype=torch.double)
    (sum(loss_of(model(part), part) for part in x.chunk(2)) / 2).backward()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule='zb-h1')
    assert_same(gradients(gpipe), gradients(model))


@devices
@pytest.mark.parametrize('schedule', SPLIT)
def test_weights_come_with_w(devices, schedule, log):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    model[3].weight = model[0].weight
    places = devices(4)
    if schedule in V_SHAPED:
        places = [*places[:2], *reversed(places[:2])]
    gpipe = GPipe(
        copy.deepcopy(model), [1] * 4, devices=places, chunks=3, checkpoint='except_last'
    )
    x = torch.randn(7, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
    assert_same(gradients(gpipe), gradients(model))
    if len({*gpipe.devices}) == 1:  # Then no other action comes between.
        assert {(action[1], count) for action, count in log if count} == {('W', 2)}


@devices
def test_what_is_not_used_has_no_gradient(devices):
    """Not zeros, by which an optimizer with momentum or weight decay would change it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x), self.b(x)

    gpipe = GPipe(
        nn.Sequential(Two(), Spy(lambda x: None), First()),
        [1, 2],
        devices=devices(2),
        chunks=2,
        checkpoint='except_last',
    )
    x = torch.randn(4, 4)
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule='zb-h1')
    assert gpipe[0].b.weight.grad is None and gpipe[0].a.weight.grad is not None


@devices
def test_a_layer_that_computes_without_grad_too(devices):
    class Centred(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                mean = super().forward(x).mean()
            return super().forward(x) - mean

    model = nn.Sequential(Centred(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=1)
    x = torch.randn(4, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule='zb-h1')
    assert_same(gradients(gpipe), gradients(model))


class Special(torch.Tensor):
    """A tensor of a class that layers may ask for."""


class ToSpecial(nn.Linear):
    """Return one."""

    def forward(self, x):
        """Return it."""
        return super().forward(x).as_subclass(Special)


class DoubleSpecial(nn.Linear):
    """Double special outputs."""

    def forward(self, x):
        """Ask for the class."""
        y = super().forward(x)
        return y * 2 if isinstance(y, Special) else y


@devices
def test_tensors_of_other_classes_stay_so(devices):
    model = nn.Sequential(ToSpecial(4, 4), DoubleSpecial(4, 4), DoubleSpecial(4, 4)).double()
    gpipe = GPipe(copy.deepcopy(model), [3], devices=devices(1), chunks=2, checkpoint='never')
    x = torch.randn(4, 4, dtype=torch.double)

    def loss(output, target):
        return (output.as_subclass(torch.Tensor) - target).square().mean()

    loss(model(x), x).backward()
    gpipe.step(on_first(gpipe, x), on_first(gpipe, x), loss, schedule='zb-h1')
    assert_same(gradients(gpipe), gradients(model))


def test_what_is_compiled_is_not_split(log):
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=['cpu', 'cpu'], chunks=2
    )
    expected = copy.deepcopy(gpipe)
    gpipe.partitions[0].compile(backend='eager')
    x = torch.randn(4, 4)
    for model in (gpipe, expected):
        log.clear()
        model.step(x, x, loss_of, schedule='zb-h1')
        counts = {action: count for action, count in log}
        assert counts['1W0'] == 2 and counts['0W0'] == (0 if model is gpipe else 2)
    assert_same(gradients(gpipe), gradients(expected), 1e-6)


def test_under_hooks_of_the_user_s():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=2)
    x = torch.randn(4, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    with saved_tensors_hooks(lambda x: x.numpy(), torch.from_numpy):
        gpipe.step(x, x, loss_of, schedule='zb-h1')
    assert_same(gradients(gpipe), gradients(model))


@devices
def test_the_input_s_gradient_does_not_wait_for_that_of_weights(devices, monkeypatch):
    """Partition 0 goes back while partition 1 is held before its first W."""
    sent, add = threading.Event(), engine_gradients._add
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        [1, 1],
        devices=devices.distinct(2),
        chunks=2,
        checkpoint='never',
    )
    x = torch.randn(4, 4, device=devices.first)
    target = x.to(gpipe.devices[-1])
    gpipe.step(x, target, loss_of, schedule='zb-h1')

    def wait(leaf, grad):
        if leaf.deferred is places[1]:
            assert sent.wait(20)
        add(leaf, grad)

    places, act = {}, Step._act

    def note(step, action):
        places.update(step._deferred)
        act(step, action)
        if str(action) == '0I0':
            sent.set()

    monkeypatch.setattr(engine_gradients, '_add', wait)
    monkeypatch.setattr(Step, '_act', note)
    gpipe.step(x, target, loss_of, schedule='zb-h1')
    assert sent.is_set()


@pytest.mark.slow
@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_a_fault_in_a_second_half(devices, mode, monkeypatch):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
    gpipe = GPipe(copy.deepcopy(model), [1] * 3, devices=devices(3), chunks=3, checkpoint=mode)
    x = torch.randn(6, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    y, target = on_first(gpipe, x), x.to(gpipe.devices[-1])
    add, kept = engine_gradients._add, weakref.WeakSet()
    for number in (1, 5, 18):
        left = [number]

        def fail(leaf, grad, left=left):
            left[0] -= 1
            kept.add(grad)
            if left[0] == 0:
                raise ValueError
            add(leaf, grad)

        monkeypatch.setattr(engine_gradients, '_add', fail)
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(ValueError) as caught:
                gpipe.step(y, target, loss_of, schedule='zb-h1')
            assert 'in backward of partition' in ''.join(caught.value.__notes__)
            del caught
            assert all(parameter.grad is None for parameter in gpipe.parameters())
        finally:
            gc.enable()
        monkeypatch.setattr(engine_gradients, '_add', add)
        gpipe.step(y, target, loss_of, schedule='zb-h1')
        assert_same(gradients(gpipe), gradients(model))
        gpipe.zero_grad()


@pytest.mark.parametrize('fails', [False, True])
def test_nothing_is_left_behind(fails, monkeypatch):
    """No cycle through nodes of the graph, which Python's garbage collector would not see."""
    gpipe = GPipe(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]),
        [2, 2],
        devices=['cpu:0', 'cpu:1'],
        chunks=2,
        checkpoint='never',
    )
    x, alive = torch.randn(4, 4), weakref.WeakSet()
    for layer in gpipe:
        layer.register_forward_hook(lambda layer, args, output: alive.add(output))
    if fails:

        def fail(*args):
            raise ValueError

        monkeypatch.setattr(engine_gradients, '_add', fail)
    gc.disable()
    try:
        gpipe.step(x, x, loss_of, schedule='zb-h1')
    except ValueError:
        assert fails
    finally:
        gc.enable()
    assert not alive


def test_a_weight_is_a_parameter_for_all_that_look_at_it():
    weight = engine_gradients.Weight(torch.ones(2, 2))
    weight.deferred = engine_gradients.DeferredWork()
    assert isinstance(weight, nn.Parameter) and weight.shape == (2, 2)
    assert type(weight * 2) is torch.Tensor and type(weight.detach()) is torch.Tensor
    assert type(weight.t()) is torch.Tensor


# --- recomputations
# ----------------------------------------------------------------------------------


@devices
def test_a_recomputation_starts_before_its_gradient_is_there(devices):
    again, calls = threading.Event(), []

    def see(x):
        calls.append(len(calls))
        if len(calls) == 5:  # of 4 first passes and as many recomputations
            again.set()

    class Hold(nn.Module):
        holds = False

        def forward(self, x):
            x = x * 1
            if Hold.holds:
                x.register_hook(lambda grad: (again.wait(20), None)[1])
            return x

    gpipe = GPipe(
        nn.Sequential(Spy(see), nn.Linear(4, 4), Hold()),
        [2, 1],
        devices=devices.distinct(2),
        chunks=4,
        checkpoint=['always', 'never'],
    )
    x = torch.randn(4, 4, device=devices.first)
    for Hold.holds in (False, True):
        calls.clear(), again.clear()
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')
        assert len(calls) == 8
    assert again.is_set()


@devices
def test_a_recomputation_where_the_schedule_has_it(devices):
    """It may stand anywhere before its backward, and is in addition to the mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)).double()
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(is_recomputing()))
    gpipe = GPipe(
        copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint=['always', 'never']
    )
    x = torch.randn(4, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    schedule = Schedule.parse('0F0,0F1,0R1,0R0,0B1,0B0\n1F0,1R0,1F1,1B1,1B0')
    if len({*gpipe.devices}) == 1:
        schedule = Schedule.parse('0F0,0F1,0R1,0R0,1F0,1F1,1R0,1B1,1B0,0B1,0B0')
    calls.clear()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
    assert_same(gradients(gpipe), gradients(model))
    assert sorted(calls) == [False, False, True]


@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_in_v080_what_a_split_layer_gave_could_not_be_changed_in_place(devices, mode):
    """ "Output 0 of _Split is a view …", for a linear layer on more than two dimensions."""
    layers = nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)]
    ).double()
    x, y = torch.randn(2, 6, 3, 4, dtype=torch.double)
    loss_of(layers(x), y).backward()
    expected = gradients(layers)
    layers.zero_grad()
    model = GPipe(layers, [1, 1], devices=devices(2), chunks=3, checkpoint=mode)
    model.step(on_first(model, x), y.to(model.devices[-1]), loss_of, schedule='zb-h1')
    assert_same(gradients(layers), expected)
