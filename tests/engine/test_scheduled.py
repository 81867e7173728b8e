"""A step beside concurrent work: other cells, other threads, draws, aliases."""

import copy
import dataclasses
import threading

import pytest
import torch
from torch import nn

from tests.devices import cpus, devices
from tests.equivalence import loss_of
from tests.helpers import Layer, assert_same, gradients, in_two_memories
from tests.project.refusals import REFUSALS
from tests.skip.layers import Pop, Stash
from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.base.structure import bare, leaves_of
from torchgpipe.engine.aliasing import Aliasing
from torchgpipe.engine.gradients import Leaves
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.workers import _in_order
from torchgpipe.schedule import make
from torchgpipe.schedule.generators import V_SHAPED

#: How long a thread waits for another one that the lock keeps away.
SECONDS = 0.3


# --- leaves
# ----------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize('where', ['two partitions', 'a partition and the loss'])
def test_in_v080_a_layer_that_stands_twice_had_the_leaves_of_one_cell_in_another(devices, where):
    """Its gradient got lost in about one step of sixty, and its hooks were called twice."""
    shared, met, entered = nn.Linear(4, 4), threading.Event(), threading.Barrier(2)

    def see(layer, args, output):
        try:
            entered.wait(SECONDS)
            met.set()
        except threading.BrokenBarrierError:
            entered.reset()

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = shared

        def forward(self, output, target):
            return loss_of(self.layer(output), target)

    places = devices.distinct(2)
    layers = [nn.Sequential(shared), nn.Linear(4, 4)] if where[0] == 'a' else [shared, shared]
    if where[0] == 'a' and devices.are_apart:
        pytest.skip('the loss would have a layer of another device')
    model = GPipe(nn.Sequential(*layers), [1, 1], devices=places, chunks=4, checkpoint='never')
    x, y = (torch.randn(8, 4, device=place) for place in (places[0], places[-1]))
    loss_fn = Loss() if where[0] == 'a' else loss_of
    model.step(x, y, loss_fn)  # shows that no layer draws, so that cells run concurrently
    shared.register_forward_hook(see)
    calls = []
    shared.weight.register_hook(calls.append)
    model.step(x, y, loss_fn)
    assert not met.is_set() and len(calls) == 1


@cpus
@pytest.mark.parametrize('where', ['layer', 'loss'])
def test_in_v080_a_step_took_leaves_of_another_one_for_parameters(devices, where):
    """In about two of eight runs, two threads that took a step each lost gradients."""
    reading, taken, threads = threading.Event(), [], []

    def wait(linear, *args):
        if threads and threads[0].ident is None:
            threads[0].start()
            reading.wait(SECONDS)
        return linear(args[0]).square().mean() if where == 'loss' else linear(args[0])

    class Look(Leaves):
        def _leaf_of(self, x, deferred):
            taken.append(id(x))
            if len(taken) == 2 * number:  # which is all that there are, for both
                reading.set()
            return super()._leaf_of(x, deferred)

    def make(layer):
        return GPipe(
            nn.Sequential(layer, nn.Linear(4, 4)).double(), [1, 1], devices=devices(2), chunks=2
        )

    layer = Layer(wait).double()
    if where == 'loss':  # Two models have nothing else in common.
        models, loss_fn = [make(nn.Linear(4, 4)), make(nn.Linear(4, 4))], layer
    else:
        models, loss_fn = [make(layer)] * 2, loss_of
    x, y = torch.randn(2, 4, 4, dtype=torch.double)
    for model in models:
        loss_fn(nn.Sequential(*model)(x), y).backward()
    parameters = {*layer.parameters(), *models[0].parameters(), *models[1].parameters()}
    number = len({*layer.parameters(), *models[0].parameters()})
    expected = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    threads.append(threading.Thread(target=models[1].step, args=(x, y, loss_fn)))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr('torchgpipe.engine.scheduled.Leaves', Look)
        models[0].step(x, y, loss_fn)
        threads[0].join()
    assert {*taken} == {*map(id, parameters)}
    assert_same([parameter.grad for parameter in parameters], expected)


# --- draws
# ----------------------------------------------------------------------------------------


def draws_of(schedule, places, seed=0):
    """Return the numbers that the layer of one partition and the loss draw, a pair of lists."""
    drawn = [], []

    def draw(linear, x):
        drawn[0].append(torch.rand(()).item())
        return linear(x)

    def loss_fn(output, target):
        drawn[1].append(torch.rand(()).item())
        return loss_of(output, target)

    model = GPipe(
        nn.Sequential(*[Layer(draw) if j == 0 else nn.Linear(4, 4) for j in range(4)]),
        [1] * 4,
        devices=places,
        chunks=4,
        checkpoint='never',
    )
    torch.manual_seed(seed)
    x = torch.zeros(8, 4)
    for _ in range(2):
        model.step(x, x, loss_fn, schedule=schedule)
    return drawn


def test_in_v080_draws_of_layers_and_of_the_loss_came_in_any_order():
    for schedule in ['gpipe', '1f1b', 'interleaved', 'looped-bfs', *V_SHAPED]:
        devices = {
            'interleaved': [0, 1] * 2,
            'looped-bfs': [0, 1] * 2,
            **dict.fromkeys(V_SHAPED, [0, 1, 1, 0]),
        }
        places = [f'cpu:{j}' for j in devices.get(schedule, range(4))]
        layers, losses = draws_of(schedule, places)
        torch.manual_seed(0)
        in_order = [torch.rand(()).item() for _ in range(16)]
        # Nothing else drew, and each number went to the same layer or loss as in any other run.
        assert sorted([*layers, *losses]) == sorted(in_order)
        order = [in_order.index(x) for x in layers], [in_order.index(x) for x in losses]
        if schedule in ('gpipe', '1f1b'):  # which admit the order of the micro-batches
            assert order == ([0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15])
        else:
            assert order[0][4:] == [x + 8 for x in order[0][:4]]
            assert order[1][4:] == [x + 8 for x in order[1][:4]]


def test_in_v080_the_order_of_forwards_hung_on_who_else_was_ordered():
    """The ordered stages depend on other threads for a while: a draw there makes them suspect."""
    for ordered in [{2}, {2, 3}, {0, 2, 3}, {0, 1, 2, 3}]:
        for name in ['looped-bfs', 'interleaved', 'zb-v', '1f1b']:
            rows = make(name, 2, 4, 2).rows if name != '1f1b' else make(name, 4, 4).rows
            every = [one for one, _ in _in_order(rows, frozenset(range(4)))[0]]
            pairs, grid, in_order = _in_order(rows, frozenset(ordered))
            expected = [action for action in every if action.stage in ordered]
            assert [one for one, _ in pairs] == expected[: len(pairs)] and in_order == (
                name == '1f1b'
            )
            assert sum(action is not None for row in grid for action in row) == sum(map(len, rows))


# --- aliases
# ----------------------------------------------------------------------------------------


def doubled(linear, x):
    """Change the input in place."""
    return linear(x.mul_(2))


ALIASES = {
    'the batch and a skip, popped later': [Stash(lambda x: (x, x)), Layer(doubled), Pop()],
    'the skip, which is the batch, where it is popped': [
        Stash(lambda x: (x, x)),
        nn.Identity(),
        Pop(lambda x, skip: x + skip.mul_(2)),
    ],
    'the batch, which is a view of the skip': [
        Stash(lambda x: (x, x[:, :])),
        nn.Identity(),
        Layer(doubled),
        Pop(),
    ],
    'a tensor that all share': [
        nn.Identity(),
        Layer(lambda linear, xs: linear(xs[0]) + xs[1].add_(1)),
    ],
    'one that all share, as a skip': [
        Stash(lambda xs: (xs[1], xs[0])),
        Layer(lambda linear, x: linear(x)),
        Pop(lambda x, skip: x + skip.add_(1)),
    ],
}


@devices
def test_in_v080_a_step_let_changes_of_aliases_through(devices):
    """The plain call refused them: one of both would not see the change."""
    for how in ['call', 'step']:
        for name in ALIASES:
            layers = nn.Sequential(
                Layer(lambda linear, x: (linear(x[0]), x[1]) if type(x) is tuple else linear(x)),
                *ALIASES[name],
            )
            model = GPipe(
                layers,
                [2] + [1] * (len(layers) - 2),
                devices=devices(len(layers) - 1),
                chunks=2,
                checkpoint='never',
            )
            x = torch.randn(4, 4, device=devices.first)
            input = (x, NoChunk(x.new_ones(4))) if 'share' in name else x
            target = torch.zeros(4, 4, device=devices(len(layers) - 1)[-1])
            with pytest.raises(RuntimeError, match='in place'):
                model(input) if how == 'call' else model.step(input, target, loss_of)


def test_in_v080_a_step_was_off_where_a_skip_stayed_in_another_memory(monkeypatch):
    in_two_memories(monkeypatch)
    layers = nn.Sequential(nn.Linear(4, 4), Stash(lambda x: (x, x)), Layer(doubled), Pop())
    model = GPipe(
        layers, [2, 1, 1], devices=['cpu:0', 'cpu:1', 'cpu:0'], chunks=2, checkpoint='never'
    )
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="which is also the skip tensor 'skip', was changed"):
        model.step(x, x, loss_of)


class Average(nn.Module):
    """Forward a moving average of samples, which changes in place."""

    def __init__(self, view=False):
        super().__init__()
        self.register_buffer('average', torch.zeros(4))
        self.view = view

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.5)
        return x, self.average[:] if self.view else self.average


@cpus
def test_in_v080_a_kept_tensor_changed_before_the_next_partition_used_it(devices):
    for mode in ['always', 'never']:
        for view in [False, True]:
            for how in ['call', 'step', 'no_grad']:
                layers = nn.Sequential(
                    nn.Linear(4, 4), Average(view), Layer(lambda linear, x: x[0] - x[1])
                )
                model = GPipe(layers, [2, 1], devices=devices(2), chunks=3, checkpoint=mode)
                x, y = (
                    torch.randn(6, 4, device=place) for place in (devices.first, model.devices[-1])
                )
                with pytest.raises(
                    RuntimeError, match='partition 0 hands on a tensor that was changed'
                ):
                    if how == 'step':
                        model.step(x, y, loss_of)
                    else:
                        with torch.set_grad_enabled(how == 'call'):
                            model(x)


@cpus
def test_in_v080_a_stashed_tensor_changed_before_the_next_partition_used_it(devices):
    kept = torch.zeros(4, device=devices.first)
    layers = nn.Sequential(
        nn.Linear(4, 4), Stash(lambda x: (kept.add_(1), x)), nn.Identity(), Pop()
    )
    model = GPipe(layers, [2, 1, 1], devices=devices(3), chunks=2, checkpoint='never')
    with pytest.raises(RuntimeError, match='partition 0 hands on a tensor that was changed'):
        model(torch.randn(4, 4, device=devices.first))


@devices
def test_a_partition_may_pass_on_tensors_that_do_not_change(devices):
    class Replace(Average):
        def forward(self, x):
            self.average = self.average.lerp(x.detach().mean(0), 0.5)
            return x, self.average, self.constant

    layers = nn.Sequential(
        nn.Linear(4, 4), Replace(), Layer(lambda linear, x: x[0] - x[1] + x[2])
    ).double()
    layers[1].register_buffer('constant', torch.ones((), dtype=torch.double))
    other, x = copy.deepcopy(layers), torch.randn(6, 4, dtype=torch.double)
    expected = torch.cat([other(part) for part in x.chunk(3)])
    model = GPipe(layers, [2, 1], devices=devices(2), chunks=3)
    assert_same([model(x.to(devices.first))], [expected])


def test_another_tensor_may_have_the_number_of_one_that_is_gone():
    aliasing = Aliasing([Chunk((torch.ones(1),), bare)] * 2, [])
    for k in range(100):
        x = torch.zeros(2)
        if k % 2:
            x.add_(1)
        aliasing.hand_on(0, [x])


# --- errors
# ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that takes no new attributes."""

    code: int


def fail(*args):
    """Raise it."""
    raise Frozen(3)


class FailBack(torch.autograd.Function):
    """Raise it in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        fail()


@devices
def test_in_v080_an_exception_that_takes_no_attributes_was_another_one(devices):
    """It came out as "cannot assign to field '__traceback__'"."""
    for mode in ['always', 'never']:
        for where in ['layer', 'loss', 'backward', 'tied', 'autocast', 'hooks']:
            for how in ['call', 'step']:
                last = {
                    'backward': lambda linear, x: FailBack.apply(linear(x)),
                    'loss': lambda linear, x: linear(x),
                }.get(where, fail)
                layers = nn.Sequential(nn.Linear(4, 4), Layer(last))
                if where == 'tied':
                    layers[1].linear.weight = layers[0].weight
                model = GPipe(layers, [1, 1], devices=devices(2), chunks=2, checkpoint=mode)
                x = torch.randn(4, 4, device=devices.first)
                target = torch.zeros(4, 4, device=devices(2)[-1])
                loss_fn = fail if where == 'loss' else loss_of
                context = {
                    'autocast': torch.autocast('cpu'),
                    'hooks': torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
                }
                with context.get(where, torch.enable_grad()), pytest.raises(Frozen) as caught:
                    if how == 'step':
                        model.step(x, target, loss_fn)
                    else:
                        loss_fn(model(x), target).backward()
                assert caught.value == Frozen(3)


# --- errors of the call
# ----------------------------------------------------------------------------------------


def sum_of(output, target):
    """Return a loss of any output."""
    return sum(
        leaf.value.float().square().mean()
        for leaf in leaves_of(output)
        if isinstance(leaf.value, torch.Tensor)
    ) + torch.zeros((), requires_grad=True)


#: Errors of the plain call caused by changes before backward, or by work beside its cells.
OF_THE_CALL = (
    'has been modified by an inplace operation between forward and backward',
    'backward through the graph a second time',
    # The last worker is the only one that may communicate in a step.
    'a layer of partition 1 communicates',
)


@pytest.mark.slow
@pytest.mark.parametrize('group', range(10))
def test_step_refuses_the_models_that_the_call_refuses(group):
    for refusal in REFUSALS[group::10]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            compare_refusals(refusal, monkeypatch)


def compare_refusals(refusal, monkeypatch):
    """Run a refused program with the plain call, and with a step in its place."""
    calls, forward = [], GPipe.forward

    def call(model, *args, **kwargs):
        calls.append(args)
        return forward(model, *args, **kwargs)

    def step(model, *args, **kwargs):
        value = args[0] if len(args) == 1 and not kwargs else Arguments(*args, **kwargs)
        model.step(value, None, sum_of, return_output=True)
        return torch.zeros((), requires_grad=True)

    monkeypatch.setattr(GPipe, 'forward', call)
    with pytest.raises(Exception) as refused:
        refusal()
    if not calls or any(text in str(refused.value) for text in OF_THE_CALL):
        return
    monkeypatch.setattr(GPipe, 'forward', step)
    with pytest.raises(type(refused.value)) as again:
        refusal()
    if 'is shared with another partition' not in str(refused.value):  # which is seen sooner there
        assert str(again.value)[:40] == str(refused.value)[:40]


@cpus
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_a_skip_may_be_changed_before_it_is_stashed(devices, mode):
    def before(x):
        y = x * 1
        return y.add_(1), x * 2

    layers = nn.Sequential(nn.Linear(4, 4), Stash(before), nn.Identity(), Pop()).double()
    model = GPipe(layers, [2, 1, 1], devices=devices(3), chunks=2, checkpoint=mode)
    x, y = torch.randn(2, 4, 4, dtype=torch.double)
    loss_of(layers(x), y).backward()
    expected = gradients(layers)
    layers.zero_grad()
    model.step(x, y, loss_of)
    assert_same(gradients(layers), expected)


class Scale(nn.Module):
    """Add a buffer, which doubles each time if it should."""

    def __init__(self, scale, change):
        super().__init__()
        self.register_buffer('scale', scale)
        self.change = change

    def forward(self, x):
        if self.change:
            self.scale.mul_(2)
        return x + self.scale  # which backward does not need


def test_a_tied_buffer_that_changes_in_a_pass():
    for chunks in [2, 3]:
        for how in ['call', 'step']:
            scale = torch.ones(())
            model = GPipe(
                nn.Sequential(nn.Linear(4, 4), Scale(scale, True), Scale(scale, False)),
                [2, 1],
                devices=['cpu:0', 'cpu:1'],
                chunks=chunks,
                checkpoint='never',
            )
            x = torch.randn(6, 4)
            with pytest.raises(RuntimeError, match='is shared with another partition'):
                model(x) if how == 'call' else model.step(x, torch.zeros(6, 4), loss_of)
