"""Random numbers: exact in recomputation, the same from run to run, or an error."""
import gc

import pytest
import torch
from torch import nn

from tests.helpers import DEVICES, MODES, assert_same, gradients
from torchgpipe import GPipe
from torchgpipe.randomness import Quiet, RandomState

devices = pytest.mark.parametrize('devices', list(DEVICES.values()), ids=list(DEVICES))


class Dropouts(nn.Dropout):
    """A layer that draws often, so that a race would show."""

    def __init__(self):
        super().__init__(0.01)

    def forward(self, x):
        """Drop out twenty times."""
        for _ in range(20):
            x = super().forward(x)
        return x


@devices
@pytest.mark.parametrize('mode', MODES)
def test_recomputation_draws_what_the_first_pass_drew(devices, mode):
    gpipe = GPipe(nn.Sequential(Dropouts(), Dropouts(), Dropouts()), [1] * 3, devices=devices(3),
                  chunks=5, checkpoint=mode)
    for _ in range(20):
        x = torch.rand(10, 20, requires_grad=True)
        output = gpipe(x)
        output.sum().backward()
        assert torch.equal(output == 0, x.grad == 0)
        assert torch.allclose(output, x * x.grad)


@pytest.mark.parametrize('mode', MODES)
def test_a_seed_gives_the_same_numbers_on_one_worker_or_many(mode):
    results = []
    for make in (*DEVICES.values(), *DEVICES.values()):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), Dropouts()) for _ in range(3)])
        gpipe = GPipe(model, [1] * 3, devices=make(3), chunks=4, checkpoint=mode)
        for _ in range(3):
            gpipe(torch.rand(8, 8)).sum().backward()
        results.append(gradients(gpipe))
    for result in results[1:]:
        assert_same(result, results[0], 0)


def test_a_partition_that_begins_to_draw_is_noticed_and_runs_in_turn_from_then_on():
    class Maybe(nn.Module):
        on = False

        def forward(self, x):
            return x * torch.rand(1) if self.on else x

    gpipe = GPipe(nn.Sequential(Maybe(), Maybe()), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=3)
    x = torch.rand(3, 1)
    gpipe(x)
    Maybe.on = True
    with pytest.raises(RuntimeError, match=r'partitions \[0, 1\] ran at the same time.*'
                                           r"devices=\['cpu', 'cpu'\]"):
        gpipe(x)
    torch.manual_seed(5)
    first = gpipe(x)
    torch.manual_seed(5)
    assert torch.equal(gpipe(x), first)


def test_dropout_in_evaluation_does_not_keep_training_from_being_exact():
    gpipe = GPipe(nn.Sequential(Dropouts(), Dropouts()), [1, 1], devices=['cpu:0', 'cpu:1'],
                  chunks=4, checkpoint='always')
    x = torch.rand(8, 4, requires_grad=True)
    gpipe.eval()(x)
    output = gpipe.train()(x)
    output.sum().backward()
    assert torch.allclose(output, x * x.grad)


@pytest.mark.parametrize('layer', [
    lambda p: nn.Dropout2d(p), lambda p: nn.LSTM(1, 1, 2, dropout=p), lambda p: nn.RReLU(),
    lambda p: nn.MultiheadAttention(2, 1, dropout=p),
    lambda p: nn.Sequential(nn.TransformerEncoderLayer(2, 1, 2, dropout=p))])
def test_layers_that_are_known_to_draw_do_so_in_training_only(layer):
    quiet, partition = Quiet(), nn.Sequential(nn.Linear(1, 1), layer(0.5))
    assert quiet.key(0, partition) not in quiet
    assert quiet.key(0, partition.eval()) in quiet
    assert quiet.key(0, partition[:1].train()) in quiet


def test_what_was_seen_counts_more_than_what_is_known():
    quiet = Quiet()
    key = quiet.key(0, nn.Sequential(nn.Dropout(0.)))
    quiet.learn(key, True)
    assert key in quiet
    quiet.distrust(key)
    quiet.learn(key, True)
    assert key not in quiet


def test_a_state_that_was_not_used_is_forgotten():
    cpu = torch.device('cpu')
    state = RandomState(cpu)
    state.settle()
    assert state.cpu is None
    state = RandomState(cpu)
    drawn = torch.rand(1)
    state.settle()
    with state.restored():
        assert torch.equal(torch.rand(1), drawn)
    assert not torch.equal(torch.rand(1), drawn)


@pytest.mark.cuda
@pytest.mark.parametrize('mode', MODES)
def test_dropout_on_cuda(mode):
    gpipe = GPipe(nn.Sequential(Dropouts(), Dropouts()), [1, 1], devices=['cuda', 'cpu'],
                  chunks=4, checkpoint=mode)
    x = torch.rand(8, 16, device='cuda', requires_grad=True)
    output = gpipe(x)
    output.sum().backward()
    assert torch.allclose(output.cuda(), x * x.grad)


def test_two_workers_at_the_generator_do_not_wait_for_each_other_for_ever():
    """Saving a state may start the garbage collector, which lets go of the GIL."""
    class Cyclic(nn.Module):
        def forward(self, x):
            for _ in range(20):  # garbage that only the collector can free, with tensors in it
                cycle = [x * 1, None]
                cycle[1] = cycle
            return x

    gpipe = GPipe(nn.Sequential(*[nn.Sequential(Cyclic(), nn.Linear(2, 2)) for _ in range(3)]),
                  [1] * 3, devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=8, checkpoint='always')
    before = gc.get_threshold()
    gc.set_threshold(7)
    try:
        for _ in range(150):
            gpipe(torch.rand(8, 2)).sum().backward()
    finally:
        gc.set_threshold(*before)


def test_drawing_without_checkpoints_is_an_error_once_and_then_the_same_in_each_run():
    class Maybe(nn.Module):
        on = False

        def forward(self, x):
            return x + torch.rand(1) if self.on else x

    gpipe = GPipe(nn.Sequential(Maybe(), Maybe()), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=3,
                  checkpoint='never')
    x = torch.rand(3, 1)
    gpipe(x)
    Maybe.on = True
    with pytest.raises(RuntimeError, match='ran at the same time'):
        gpipe(x)
    results = []
    for _ in range(20):
        torch.manual_seed(5)
        results.append(gpipe(x))
    assert all(torch.equal(result, results[0]) for result in results)
