"""The order of a step: draws, concurrent backwards, and layers that change when called."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from tests.devices import devices
from tests.equivalence import loss_of
from tests.helpers import in_partitions
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.scheduled import Step
from torchgpipe.schedule import Schedule, make
from torchgpipe.schedule.generators import V_SHAPED


class Meeting:
    """Where a forward and a backward wait for each other, if they can be there together."""

    def __init__(self):
        self.patience, self.is_met = 0, False
        self._forward, self._backward = threading.Event(), threading.Event()

    def forward(self):
        self._forward.set()
        self.is_met |= self._backward.wait(self.patience)
        self._forward.clear()

    def backward(self):
        self._backward.set()
        self.is_met |= self._forward.wait(self.patience)
        self._backward.clear()


class Draw(nn.Module):
    """Draw from the generator of the CPU, or not."""

    def __init__(self, draws, meeting):
        super().__init__()
        self.draws, self.meeting = draws, meeting

    def forward(self, x):
        self.meeting.forward()
        return x * torch.rand(1).item() if self.draws else x * 2


class Slow(torch.autograd.Function):
    """Wait in backward."""

    @staticmethod
    def forward(ctx, x, meeting):
        ctx.meeting = meeting
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.meeting.backward()
        return grad, None


class GoBack(nn.Module):
    """Go back slowly."""

    def __init__(self, meeting):
        super().__init__()
        self.meeting, self.weight = meeting, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Slow.apply(x * self.weight, self.meeting)


@pytest.mark.slow
@devices
@pytest.mark.parametrize('draws', [True, False])
def test_in_v082_a_layer_that_moves_the_generator_in_backward_disturbed_others(devices, draws):
    meeting = Meeting()
    gpipe = in_partitions(
        devices.distinct, Draw(draws, meeting), GoBack(meeting), chunks=4, checkpoint='never'
    )
    x = torch.rand(4, 2, device=devices.first)
    for patience in (0, 0.1 if draws else 3):  # In the first step it is not known who draws.
        meeting.patience = patience
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='1f1b')
    assert meeting.is_met is not draws  # Else they go on beside each other.


@pytest.mark.slow
@devices
def test_a_forward_that_draws_nothing_runs_beside_a_backward_where_others_draw(devices):
    meeting = Meeting()
    layers = nn.Sequential(Draw(False, meeting), nn.Dropout(0.1), GoBack(meeting))
    gpipe = GPipe(layers, [1, 2], devices=devices.distinct(2), chunks=4, checkpoint='never')
    x = torch.rand(4, 2, device=devices.first)
    for patience in (0, 3):  # In the first step it is not known who draws.
        meeting.patience = patience
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='1f1b')
    assert meeting.is_met


class Noise(torch.autograd.Function):
    """Wait in backward, and draw there with a seed of its own, or not."""

    @staticmethod
    def forward(ctx, x, draws, wait):
        ctx.draws, ctx.wait = draws, wait
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            ctx.wait()
            return grad * (torch.rand(1).item() if ctx.draws else 2), None, None


@pytest.mark.slow
@devices
@pytest.mark.parametrize('draws', [True, False])
def test_in_v082_so_did_one_that_draws_in_backward_only(devices, draws):
    class Noisy(nn.Linear):
        def forward(self, x):
            return Noise.apply(super().forward(x), draws, self.wait)

    meeting, layers = Meeting(), [Noisy(2, 2), Noisy(2, 2)]
    layers[0].wait, layers[1].wait = meeting.forward, meeting.backward
    gpipe = GPipe(
        nn.Sequential(*layers), [1, 1], devices=devices.distinct(2), chunks=4, checkpoint='never'
    )
    x = torch.rand(4, 2, device=devices.first)
    for patience in (0, 0.1 if draws else 3):  # In the first step it is not known who draws.
        meeting.patience = patience
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='1f1b')
    assert meeting.is_met is not draws


class Checkpointed(nn.Module):
    """A layer that checkpoints by itself, and puts the generator back for that."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Tanh())

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.parametrize('mode', ['always', 'never'])
def test_dropout_in_checkpoints_of_layers(mode):
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(), nn.Linear(6, 6), Checkpointed())
    x = torch.randn(12, 6)
    for seed in range(5):
        plain = copy.deepcopy(model).double()
        gpipe = GPipe(
            copy.deepcopy(plain), [2, 2], devices=['cpu:0', 'cpu:1'], chunks=4, checkpoint=mode
        )
        torch.manual_seed(seed)
        for part in x.double().chunk(4):
            (loss_of(plain(part), part) / 4).backward()
        torch.manual_seed(seed)
        gpipe.step(x.double(), x.double(), loss_of)
        for expected, found in zip(plain.parameters(), gpipe.parameters()):
            assert torch.allclose(expected.grad, found.grad)


def test_in_v082_a_loss_kept_others_from_layers_that_it_does_not_use():
    """So two models whose losses call a third one, of layers of both, waited for each other."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    one, other = [
        GPipe(nn.Sequential(*layers), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=2)
        for _ in range(2)
    ]
    ended = []

    def loss(output, target):
        thread = threading.Thread(target=other, args=[torch.rand(2, 2)])
        thread.start()
        thread.join(10)
        ended.append(not thread.is_alive())
        return loss_of(output, target)

    one.step(torch.rand(2, 2), torch.rand(2, 2), loss)
    assert ended == [True, True]


class Count(nn.Module):
    """Another function in each call."""

    def __init__(self, changes):
        super().__init__()
        self.changes, self.number = changes, 1
        self.register_buffer('calls', torch.ones(()))

    def forward(self, x):
        if self.changes == 'buffer':
            self.calls += 1
        elif self.changes == 'attribute':
            self.number += 1
        return x * self.calls.item() * self.number


def test_in_v082_a_layer_in_several_partitions_changed_in_another_order():
    """The numbers of the unwrapped model, or an error before a gradient is added."""
    for changes in ['buffer', 'attribute', 'nothing']:
        for schedule in ['gpipe', '1f1b', 'interleaved', 'looped-bfs', *V_SHAPED]:
            for workers in [['cpu', 'cpu'], ['cpu:0', 'cpu:1']]:
                count = Count(changes)
                model = nn.Sequential(count, nn.Linear(3, 3), count, nn.Linear(3, 3)).double()
                x, plain = torch.randn(4, 3).double(), copy.deepcopy(model)
                places = [0, 1, 1, 0] if schedule in V_SHAPED else [0, 1, 0, 1]
                gpipe = GPipe(
                    model,
                    [1] * 4,
                    devices=[workers[place] for place in places],
                    chunks=2,
                    checkpoint='never',
                )
                expected = sum(loss_of(plain(part), part) / 2 for part in x.chunk(2))
                try:
                    loss = gpipe.step(x, x, loss_of, schedule=schedule)
                except RuntimeError as error:
                    assert 'another order' in str(error) and 'Count' in str(error)
                    assert changes != 'nothing' and schedule not in ('gpipe', '1f1b')
                    assert all(parameter.grad is None for parameter in gpipe.parameters())
                else:
                    assert torch.allclose(loss, expected.detach())


@pytest.mark.parametrize('schedule', ['interleaved', 'looped-bfs'])
def test_a_layer_in_one_partition_may_change_where_others_take_turns_with_it(schedule):
    """Its partition goes through micro-batches in order, and backward does not call it."""
    count = Count('buffer')
    gpipe = in_partitions(
        ['cpu:0', 'cpu:1'] * 2,
        nn.Linear(3, 3),
        count,
        nn.Linear(3, 3),
        nn.Linear(3, 3),
        chunks=4,
        checkpoint='never',
    )
    x = torch.randn(4, 3)
    gpipe.step(x, x, loss_of, schedule=schedule)
    assert count.calls == 5


@pytest.mark.parametrize('changes', ['buffer', 'nothing'])
def test_micro_batches_in_another_order(changes):
    text = make('gpipe', 2, 2).to_csv()
    for a, b in (('F0', 'F_'), ('F1', 'F0'), ('F_', 'F1')):
        text = text.replace(a, b)
    gpipe = in_partitions(
        ['cpu:0', 'cpu:1'], Count(changes), nn.Linear(3, 3), chunks=2, checkpoint='never'
    )
    x = torch.randn(4, 3)
    if changes == 'nothing':
        gpipe.step(x, x, F.mse_loss, schedule=Schedule.parse(text))
        return
    with pytest.raises(RuntimeError, match='another order'):
        gpipe.step(x, x, F.mse_loss, schedule=Schedule.parse(text))


@pytest.mark.parametrize('why', ['hooks', 'a shared layer', 'draws', 'nothing'])
def test_whose_forwards_run_one_micro_batch_after_the_other(why, monkeypatch):
    met, ended, run_cell = [], threading.Event(), Step._run_cell

    def run(step, i, j):
        if (i, j) == (0, 1):
            met.append(ended.wait(3 if why == 'nothing' else 0.2))
        run_cell(step, i, j)
        if (i, j) == (1, 0):
            ended.set()

    layers = {
        'a shared layer': [Count('nothing')] * 2,
        'draws': [nn.Dropout(0.1), nn.Dropout(0.1)],
    }.get(why, [nn.Tanh(), nn.Tanh()])
    gpipe = GPipe(
        nn.Sequential(layers[0], nn.Linear(3, 3), layers[1]),
        [2, 1],
        devices=['cpu:0', 'cpu:1'],
        chunks=2,
        checkpoint='never',
    )
    x = torch.randn(4, 3)
    gpipe.step(x, x, loss_of)  # In the first step it is not known who draws.
    monkeypatch.setattr(Step, '_run_cell', run)
    with saved_tensors_hooks(lambda x: x, lambda x: x) if why == 'hooks' else torch.enable_grad():
        gpipe.step(x, x, loss_of)
    assert met == [why == 'nothing']


def test_on_one_worker_forwards_run_in_the_order_of_the_model():
    """This also holds for layers that are known not to draw."""
    log = []

    class Log(nn.Linear):
        def forward(self, x):
            if not is_recomputing():
                log.append(layers.index(self))
            return super().forward(x)

    layers = [Log(3, 3), Log(3, 3)]
    gpipe = GPipe(
        nn.Sequential(*layers), [1, 1], devices=['cpu', 'cpu'], chunks=3, checkpoint='always'
    )
    x = torch.randn(6, 3)
    for _ in range(2):
        gpipe.step(x, x, loss_of, schedule='gpipe')
    assert log == [0, 1] * 6
