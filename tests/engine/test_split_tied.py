"""Layers that share parameters, buffers and modules: the numbers of the unwrapped model."""

import copy
import pickle
import random
import threading

import pytest
import torch
from torch import nn

from tests.devices import devices, places
from tests.helpers import Spy, assert_same, call, gradients, in_two_memories, micro_batches
from tests.marks import MODES
from tests.project.refusals import Pop, Stash
from torchgpipe import GPipe, no_recompute
from torchgpipe.balance import balance_by_size, balance_by_time, profile
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.legacy import pipeline as legacy
from torchgpipe.microbatch import gather, scatter

OPTIMIZERS = {
    'SGD': lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    'Adam': lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}

#: One worker, a worker each, and devices with memories of their own.
LAYOUTS = [
    ['cpu', 'cpu'],
    ['cpu:0', 'cpu:1'],
    *(pytest.param(letters, marks=pytest.mark.accelerator) for letters in ('aa', 'ac', 'ca')),
]

layouts = pytest.mark.parametrize('layout', LAYOUTS, ids=str)


def devices_of(layout):
    """Return the devices of a layout."""
    return places(layout) if isinstance(layout, str) else layout


def pipe(model, balance, layout, **options):
    """Wrap a copy of a model on the devices of a layout."""
    options = {'chunks': 3, 'checkpoint': 'except_last', **options}
    return GPipe(copy.deepcopy(model), balance, devices=devices_of(layout), **options)


def language_model():
    """Return a small model with one tensor for its embedding and its head."""
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), head).double()


def tokens(batch=7):
    """Return an input of that."""
    return torch.randint(7, (batch, 3))


def train(reference, gpipe, batches, make_optimizer=OPTIMIZERS['SGD'], tolerance=1e-12):
    """Train both with the same batches, and compare all that comes of it."""
    optimizers = [make_optimizer(module.parameters()) for module in (reference, gpipe)]
    for x in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, actual = reference(x), call(gpipe, x)
        assert actual.requires_grad == expected.requires_grad
        if expected.requires_grad:
            expected.square().mean().backward(), actual.square().mean().backward()
        assert_same(
            [actual.cpu(), *gradients(gpipe)], [expected, *gradients(reference)], tolerance
        )
        norms = [
            nn.utils.clip_grad_norm_(module.parameters(), 1.0).item()
            for module in (reference, gpipe)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    assert list(gpipe.state_dict()) == list(reference.state_dict())
    assert_same(
        [x.cpu() for x in gpipe.state_dict().values()], reference.state_dict().values(), tolerance
    )
    with torch.no_grad():
        assert_same([call(gpipe, x).cpu()], [reference(x)], tolerance)


@layouts
@pytest.mark.parametrize('optimizer', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_embedding_and_a_head(layout, optimizer):
    model = language_model()
    gpipe = pipe(model, [2, 3], layout)
    weight = gpipe[0].weight
    train(model, gpipe, [tokens(), tokens(6), tokens(2)], optimizer)
    assert gpipe[4].weight is gpipe[0].weight is weight
    assert weight.device == gpipe[1].weight.device
    names = [name for name, _ in gpipe.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()] and '4.weight' not in names
    assert {'0.weight', '4.weight'} <= gpipe.state_dict().keys()


class Tied(nn.Module):
    """A layer that uses the weight of another one."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, x):
        return x @ self.embedding.weight.T


class Scale(nn.Module):
    """A layer of its own with a parameter and a buffer."""

    def __init__(self, weight=None, table=None):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4)) if weight is None else weight
        self.register_buffer('table', torch.rand(4) if table is None else table)

    def forward(self, x):
        return x * self.weight + self.table


def scales(number):
    """Return layers that share a parameter and a buffer."""
    first = Scale()
    return nn.Sequential(first, *[Scale(first.weight, first.table) for _ in range(number - 1)])


@pytest.mark.parametrize(
    'layout',
    [
        'cccc',
        *(pytest.param(letters, marks=pytest.mark.accelerator) for letters in ('aaaa', 'acac')),
    ],
)
def test_a_parameter_and_a_buffer_in_four_partitions(layout):
    model = scales(4).double()
    gpipe = GPipe(
        copy.deepcopy(model),
        [1] * 4,
        devices=[
            f'cpu:{j}' if device == 'cpu' else device for j, device in enumerate(places(layout))
        ],
        chunks=3,
        checkpoint='except_last',
    )
    assert [name for name, _ in gpipe.named_parameters()] == ['0.weight']
    train(model, gpipe, [torch.rand(7, 4).double() for _ in range(3)])


@layouts
def test_a_module_within_another_one(layout):
    embedding = nn.Embedding(7, 4)
    model = nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), Tied(embedding)).double()
    gpipe = pipe(model, [2, 2], layout)
    train(model, gpipe, [tokens(), tokens(5)])


class Last(nn.Module):
    """A recurrent layer without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@layouts
def test_a_recurrent_layer_twice(layout):
    layer = Last(nn.LSTM(4, 4, batch_first=True))
    model = nn.Sequential(layer, nn.Tanh(), layer).double()
    gpipe = pipe(model, [1, 2], layout)
    train(model, gpipe, [torch.randn(7, 3, 4, dtype=torch.double) for _ in range(3)])
    copy.deepcopy(gpipe), pickle.loads(pickle.dumps(gpipe))


def random_layer(rng, earlier):
    """Return a layer that may share something with earlier ones."""
    kind = rng.choice(['new', 'again', 'within', 'weight', 'bias', 'act', 'scale', 'table'])
    if kind == 'again' and earlier:
        return rng.choice(earlier)
    if kind == 'within' and earlier:
        return nn.Sequential(nn.Tanh(), *rng.choices(earlier, k=rng.randint(1, 2)))
    inside = [module for layer in earlier for module in layer.modules()]
    linear = [module for module in inside if isinstance(module, nn.Linear)]
    scales = [module for module in inside if isinstance(module, Scale)]
    if kind in ('scale', 'table'):
        other = rng.choice(scales) if scales else Scale()
        return Scale(
            other.weight if kind == 'scale' else None, other.table if kind == 'table' else None
        )
    if kind == 'act':
        return nn.GELU()
    layer = nn.Linear(4, 4)
    if kind in ('weight', 'bias') and linear:
        setattr(layer, kind, getattr(rng.choice(linear), kind))
    return layer


def random_model(rng):
    """Return a model of layers that share much."""
    layers = [nn.Linear(4, 4)]
    for _ in range(rng.randint(1, 7)):
        layers.append(random_layer(rng, layers))
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() < 0.85)
    return model


def random_case(seed, kinds):
    """Train a random model on random devices of some kinds, wrapped and unwrapped."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = random_model(rng)
    n = rng.randint(1, min(4, len(model)))
    cuts = [0, *sorted(rng.sample(range(1, len(model)), n - 1)), len(model)]
    letters = ''.join(rng.choice(kinds) for _ in range(n))
    devices = [
        f'cpu:{rng.randrange(3)}' if letter == 'c' else device
        for letter, device in zip(letters, places(letters))
    ]
    gpipe = GPipe(
        copy.deepcopy(model),
        [b - a for a, b in zip(cuts, cuts[1:])],
        devices=devices,
        chunks=rng.randint(1, 4),
        checkpoint=rng.choice(MODES),
    )
    batches = [torch.randn(rng.randint(1, 7), 4, dtype=torch.double) for _ in range(3)]
    train(model, gpipe, batches, rng.choice(list(OPTIMIZERS.values())), 1e-11)


@pytest.mark.parametrize('kinds', ['c', pytest.param('aac', marks=pytest.mark.accelerator)])
@pytest.mark.parametrize('group', range(4))
def test_random_models(group, kinds):
    for seed in range(10 * group, 10 * group + 10):
        random_case(seed, kinds)


# Other properties of a parameter


@pytest.fixture
def gpipe(request, monkeypatch):
    """Yield a language model on two devices, or on two of the CPU that stand for such."""
    if request.param == 'cc':
        in_two_memories(monkeypatch)
    devices = ['cpu:0', 'cpu:1'] if request.param == 'cc' else places(request.param)
    gpipe = GPipe(language_model(), [2, 3], devices=devices, chunks=3)
    yield gpipe
    gpipe._engine.workers.stop()


STAND_INS = pytest.mark.parametrize('gpipe', ['cc'], indirect=True)

apart = pytest.mark.parametrize(
    'gpipe',
    [
        'cc',
        pytest.param('ac', marks=pytest.mark.accelerator),
        pytest.param('ca', marks=pytest.mark.accelerator),
    ],
    indirect=True,
)


def unwrapped(gpipe):
    """Return a copy of the wrapped model, on the CPU."""
    model = language_model()
    model.load_state_dict({name: x.cpu() for name, x in gpipe.state_dict().items()})
    return model


@apart
def test_either_name_can_be_loaded_and_the_later_one_wins(gpipe):
    state = {name: x.cpu() for name, x in gpipe.state_dict().items()}
    state['0.weight'] = torch.zeros_like(state['0.weight'])
    state['4.weight'] = torch.ones_like(state['4.weight'])
    plain = language_model()
    plain.load_state_dict(state), gpipe.load_state_dict(state)
    assert_same(gpipe.state_dict().values(), plain.state_dict().values(), 0)
    assert gpipe[0].weight is gpipe[4].weight
    for missing, other in [('0.weight', '4.weight'), ('4.weight', '0.weight')]:
        part = {name: x + 1 for name, x in state.items() if name != missing}
        with pytest.raises(RuntimeError, match=missing):
            gpipe.load_state_dict(part)
        gpipe.load_state_dict(part, strict=False)
        assert_same([gpipe[0].weight], [part[other]], 0)
    old = {f'partitions.{int(name[0] > "1")}.{name}': x for name, x in state.items()}
    gpipe.load_state_dict(old)
    assert_same([gpipe[0].weight], [state['4.weight']], 0)


@apart
@pytest.mark.parametrize('copied', [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_model_share_as_it_does(gpipe, copied):
    call(gpipe, tokens()).sum().backward()
    again = copied(gpipe)
    assert again[0].weight is again[4].weight is not gpipe[0].weight
    again.zero_grad()
    train(unwrapped(again), again, [tokens()])


@apart
def test_functional_call(gpipe):
    gpipe.checkpoint = 'except_last'
    own, plain, x = gpipe[0].weight, unwrapped(gpipe), tokens()
    given = {name: (x * 2).detach().requires_grad_() for name, x in plain.named_parameters()}
    expected = torch.func.functional_call(plain, given, (x,)).square().sum()
    expected = torch.autograd.grad(expected, list(given.values()))
    there = {
        name: x.detach().to(gpipe.get_parameter(name).device).requires_grad_()
        for name, x in given.items()
    }
    x = x.to(gpipe.devices[0])
    actual = torch.func.functional_call(gpipe, there, (x,)).square().sum()
    assert_same(torch.autograd.grad(actual, list(there.values())), expected)
    assert gpipe[0].weight is gpipe[4].weight is own


@apart
def test_other_types_of_numbers(gpipe):
    gpipe.float()
    assert call(gpipe, tokens()).dtype is torch.float
    gpipe.double()
    assert gpipe[0].weight is gpipe[4].weight and gpipe[0].weight.dtype is torch.double
    train(unwrapped(gpipe), gpipe, [tokens()])


@apart
def test_buffers_stay_shared_when_their_type_changes(gpipe):
    """PyTorch itself makes two of one; the second would be on the device of the first for good."""
    model = scales(2)
    gpipe = GPipe(copy.deepcopy(model), [1, 1], devices=gpipe.devices, chunks=2).double()
    assert gpipe[0].table is gpipe[1].table and gpipe[0].table.dtype is torch.double
    train(model.double(), gpipe, [torch.rand(5, 4).double()])


@apart
def test_passes_and_mini_batches_before_a_step(gpipe):
    """Two passes are in flight, and gradients add up over two backward passes."""
    gpipe.checkpoint = 'except_last'
    plain, inputs = unwrapped(gpipe), [tokens(), tokens(4), tokens()]
    losses = [[call(module, x).square().sum() for x in inputs] for module in (plain, gpipe)]
    for a, b, c in losses:
        (a + b).backward(), c.backward()
    assert_same(gradients(gpipe), gradients(plain), 1e-9)


@pytest.mark.slow
@STAND_INS
@pytest.mark.filterwarnings('ignore:The .grad attribute')  # torch.compile looks at it
@pytest.mark.parametrize('how', ['partition', 'layer'])
def test_compiled(gpipe, how):
    """There is another copy in each pass, and nothing is compiled again for that."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    gpipe.checkpoint = 'except_last'
    plain = copy.deepcopy(nn.Sequential(*gpipe))
    compiled = list(gpipe.partitions) if how == 'partition' else list(gpipe)
    for module in compiled:
        if how == 'partition':
            module.compile(backend=backend)
        else:
            module.forward = torch.compile(module.forward, backend=backend)
    train(plain, gpipe, [tokens(6)])
    number = len(graphs)
    assert number >= len(compiled)
    train(plain, gpipe, [tokens(6), tokens(6)])
    assert len(graphs) == number


@pytest.fixture
def process_group():
    """Be a process group of one."""
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@STAND_INS
@pytest.mark.skipif(not torch.distributed.is_available(), reason='without torch.distributed')
def test_in_several_processes(gpipe, process_group):
    """A gradient is ready once, when all of it is there."""
    gpipe.checkpoint = 'except_last'
    reference = copy.deepcopy(nn.Sequential(*gpipe))
    model = nn.parallel.DistributedDataParallel(gpipe)
    for _ in range(2):
        x = tokens()
        reference.zero_grad(), model.zero_grad()
        reference(x).square().sum().backward(), model(x).square().sum().backward()
        assert_same(gradients(model), gradients(reference))


@apart
def test_autograd_grad_and_gradients_of_gradients(gpipe):
    gpipe.checkpoint = 'never'
    found, x = [], tokens()
    for module in (unwrapped(gpipe), gpipe):
        weight = module[0].weight
        (grad,) = torch.autograd.grad(call(module, x).pow(3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), weight)
        found.append([grad.detach(), second])
    assert_same(*found, 1e-9)


# Layers in several places


@devices
def test_a_layer_in_several_places_has_several_names(devices):
    layer, act = nn.Linear(4, 4), nn.Tanh()
    model = nn.Sequential(layer, act, layer, act).double()
    gpipe = GPipe(copy.deepcopy(model), [3, 1], devices=devices(2), chunks=2)
    assert len(gpipe) == 4 and gpipe[0] is gpipe[2] and list(gpipe)[3] is gpipe[1]
    assert list(gpipe.state_dict()) == ['0.weight', '0.bias', '2.weight', '2.bias']
    assert gpipe.get_submodule('2') is gpipe[0]
    x = torch.randn(5, 4, dtype=torch.double)
    train(model, gpipe, [x])


@devices
def test_balances_of_layers_that_share(devices):
    """Each is measured as if it had all for itself, as it has on a device of its own."""
    model, x = language_model(), tokens(8)
    model.append(model[2])
    costs = profile(model, x, device=devices.first, timeout=0)
    assert costs.layers[0].parameter_bytes == costs.layers[4].parameter_bytes == 7 * 4 * 8
    assert [layer.name for layer in costs.layers] == list('012345')
    for balance in (
        costs.balance(2, chunks=2),
        balance_by_time(2, model, x, device=devices.first, timeout=0),
        balance_by_size(2, model, x, device=devices.first),
    ):
        assert sum(balance) == 6 and model[4].weight is model[0].weight
        gpipe = GPipe(copy.deepcopy(model), balance, devices=devices(2), chunks=2)
        assert call(gpipe, x).shape == (8, 3, 7)


@devices
def test_an_error_names_all_places_of_a_layer_in_a_partition(devices):
    layer = nn.Linear(4, 4)
    gpipe = GPipe(nn.Sequential(nn.ReLU(), layer, layer), [1, 2], devices=devices(2))
    with pytest.raises(RuntimeError) as error:
        call(gpipe, torch.rand(2, 3))
    assert "layer '1' or '2'" in error.value.__notes__[0]


@devices
def test_the_layer_that_changes_the_input_is_found_behind_one_that_stands_twice(devices):
    class Turn(nn.Module):
        def forward(self, x):
            return x.mT

    class Add(nn.Module):
        def forward(self, x):
            return x.add_(torch.ones(2, 4, device=x.device))

    layer = Turn()
    gpipe = GPipe(
        nn.Sequential(layer, layer, Add(), nn.Linear(4, 4)),
        [4],
        devices=devices(1),
        checkpoint='always',
    )
    with pytest.raises(RuntimeError, match="layer '2' of partition 0"):
        call(gpipe, torch.rand(2, 4)).sum().backward()


class Where(nn.Module):
    """Call a layer for a micro-batch of so many rows, in a partition of its own."""

    def __init__(self, rows, layer):
        super().__init__()
        self.rows = rows
        self.layer = layer

    def forward(self, x):
        return self.layer(x) if len(x) == self.rows else x


@devices
def test_a_layer_that_only_computes_runs_in_two_partitions_at_once(devices):
    meet = threading.Barrier(2, timeout=10)
    act = nn.Tanh()
    act.register_forward_hook(lambda *args: (meet.wait(), None)[1])
    gpipe = GPipe(
        nn.Sequential(Where(1, act), Where(2, act)), [1, 1], devices=devices.distinct(2), chunks=2
    )
    with torch.no_grad():
        call(gpipe, torch.rand(6, 4))  # learns that partitions may run at the same time
        # Three rows in two micro-batches: one of them is in each partition at the same time.
        call(gpipe, torch.rand(3, 4))


@layouts
def test_a_layer_that_is_kept_out_of_recomputation(layout):
    act, linear = nn.Tanh(), nn.Linear(4, 4)
    model = nn.Sequential(linear, act, nn.Sequential(nn.Linear(4, 4), act), linear).double()
    gpipe = pipe(model, [2, 2], layout)
    no_recompute(gpipe[0]), no_recompute(gpipe[1])
    train(model, gpipe, [torch.randn(7, 4).double() for _ in range(3)])


@devices
def test_a_layer_that_may_do_more_sees_one_micro_batch_after_the_other(devices):
    running, seen = [], []

    def see(x):
        running.append(x)
        seen.append((len(x), len(running)))
        for _ in range(100):
            torch.rand(10, 10) @ torch.rand(10, 10)
        running.pop()

    spy = Spy(see)
    gpipe = GPipe(nn.Sequential(spy, nn.Tanh(), spy), [1, 1, 1], devices=devices(3), chunks=4)
    with torch.no_grad():
        call(gpipe, torch.rand(10, 2))
    assert seen == [(3, 1)] * 4 + [(2, 1)] * 4


@pytest.mark.parametrize('devices', [['cpu', 'cpu'], ['cpu:0', 'cpu:1']])
def test_batch_norm_in_two_partitions(devices):
    """As in the unwrapped model, given one micro-batch after the other."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm).double()
    gpipe = GPipe(
        copy.deepcopy(model), [2, 2], devices=devices, chunks=3, checkpoint='except_last'
    )
    for _ in range(3):
        x = torch.randn(8, 4, dtype=torch.double)
        torch.cat([model(part) for part in micro_batches(x, 3)]).square().sum().backward()
        gpipe(x).square().sum().backward()
    assert_same([*gradients(gpipe), *gpipe.buffers()], [*gradients(model), *model.buffers()])


@pytest.mark.sim
def test_a_layer_keeps_its_attributes_when_several_devices_recompute():
    """In v0.4.0 it kept a recomputation's attributes for good, after 38 of 60 steps."""
    act = nn.Tanh()
    own = act.__dict__
    gpipe = GPipe(
        nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), act) for _ in range(4)]),
        [1, 1, 1, 1],
        chunks=8,
        checkpoint='always',
    )
    for _ in range(20):
        gpipe(torch.rand(16, 4, device='sim:0')).sum().backward()
        assert act.__dict__ is own


@layouts
def test_deferred_batch_norm_in_two_partitions(layout):
    """Each place moves the statistics by its own mini-batch, the first place first."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm).double()
    gpipe = pipe(model, [2, 2], layout, deferred_batch_norm=True)
    assert gpipe[1] is gpipe[3] and type(gpipe[1]) is DeferredBatchNorm
    for _ in range(2):
        x = torch.randn(8, 4, dtype=torch.double)
        inner = model[2](
            torch.cat([copy.deepcopy(norm)(part) for part in micro_batches(model[0](x), 3)])
        )
        norm(model[0](x)), norm(inner)
        call(gpipe, x).sum().backward()
        actual = [gpipe[1].running_mean.cpu(), gpipe[1].running_var.cpu()]
        assert_same(actual, [model[1].running_mean, model[1].running_var])
        assert gpipe[1].num_batches_tracked == norm.num_batches_tracked


@pytest.mark.accelerator
def test_buffers_stay_shared_when_they_move():
    """PyTorch itself makes two of one, as it moves them one by one."""
    a, b = Scale(), Scale()
    b.table = a.table
    gpipe = GPipe(nn.Sequential(a, b), [2], devices=places('a'))
    assert a.table is b.table is gpipe[1].table and a.table.device == gpipe.devices[0]


@layouts
def test_the_pipeline_of_0_0_7(layout):
    """It gets partitions that someone else has put on devices; in 0.0.7, these failed."""
    model = language_model()
    devices = [torch.device(device) for device in devices_of(layout)]
    gpipe = GPipe(copy.deepcopy(model), [2, 3], devices=devices)
    for checkpoint_stop in (0, 2):
        x = tokens(6)
        batches = scatter(x.to(devices[0]), 3)
        legacy.Pipeline(batches, gpipe.partitions, devices, checkpoint_stop=checkpoint_stop).run()
        output, expected = gather(batches), model(x)
        output.square().sum().backward(), expected.square().sum().backward()
        assert_same([output, *gradients(gpipe)], [expected, *gradients(model)])


@pytest.mark.accelerator
def test_a_tensor_lives_where_it_is_used_first():
    first, last = Scale(), Scale()
    last.weight, last.table = first.weight, first.table
    gpipe = GPipe(
        nn.Sequential(nn.Tanh(), first, nn.Tanh(), last), [1, 1, 1, 1], devices=places('acac')
    )
    assert gpipe[1].weight is last.weight and gpipe[1].table is last.table
    assert last.weight.device == last.table.device == torch.device('cpu')


# Models that cannot be wrapped


def nested(layer):
    """Return a pipeline that has a layer."""
    return GPipe(nn.Sequential(layer), [1], devices=['cpu'])


def test_layers_that_cannot_be_shared_between_devices_are_refused(monkeypatch):
    in_two_memories(monkeypatch)
    layer, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    tied.weight = layer.weight
    for first, last, reason in [
        (layer, nested(tied), 'within another GPipe'),
        (nested(layer), tied, 'within another GPipe'),
    ]:
        with pytest.raises(
            ValueError,
            match=f'module with duplicate parameters .*{reason}: '
            r"'0.*weight' on cpu:0 is also '2.*' on cpu:1",
        ):
            GPipe(nn.Sequential(first, nn.Tanh(), last), [1, 2], devices=['cpu:0', 'cpu:1'])
        GPipe(nn.Sequential(first, nn.Tanh(), last), [1, 2], devices=['cpu:0', 'cpu'])


def test_a_layer_that_stashes_can_stand_in_one_place():
    layer = Stash()
    with pytest.raises(TypeError, match="'1' redeclared 'x' as stashable"):
        GPipe(nn.Sequential(layer, layer, Pop()), [2, 1], devices=['cpu', 'cpu'])


@devices
def test_a_layer_of_a_pipeline_can_stand_nowhere_else(devices):
    """In v0.4.0 a worker within waited for a lock that the cell around it held, for good."""
    layer = nn.Tanh()
    inner = GPipe(nn.Sequential(nn.Linear(2, 2), layer), [1, 1], devices=devices(2))
    for other in (layer, nn.Sequential(layer)):
        with pytest.raises(ValueError, match=r"'0\.1' and '1(\.0)?' are one Tanh"):
            GPipe(nn.Sequential(inner, other), [2], devices=devices(1))


@devices
def test_a_pipeline_may_stand_in_two_places(devices):
    inner = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [2], devices=devices(1), chunks=2)
    model = nn.Sequential(inner, nn.Tanh(), inner).double()
    reference = copy.deepcopy(nn.Sequential(*inner, nn.Tanh(), *inner)).cpu()
    where = devices(1) * 2 if devices.are_accelerators else devices(2)
    gpipe = GPipe(model, [1, 2], devices=where, chunks=2)
    x = torch.randn(6, 4, dtype=torch.double)
    reference(x).sum().backward(), call(gpipe, x).sum().backward()
    assert_same(gradients(gpipe), gradients(reference))
