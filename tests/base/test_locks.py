"""Several threads on one model, or on models that share layers: their cells are serialized."""

import copy
import threading

import pytest
import torch
from torch import nn

from tests.devices import cpus, devices
from tests.helpers import Call, assert_same, call, gradients
from torchgpipe import GPipe
from torchgpipe.base.locks import _Several, layer_lock


def run_at_once(*functions):
    """Run functions in threads of their own; raise the first error."""
    errors = []
    barrier = threading.Barrier(len(functions))

    def run(function):
        barrier.wait(20)
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Count(nn.Module):
    """A layer that counts its calls in a buffer, and whose output depends on it not at all."""

    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls = self.calls + 1
        return x.sin()


def make():
    """Return a model with state."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        Count(),
        nn.BatchNorm1d(8, momentum=None),
        nn.Tanh(),
        nn.Linear(8, 4),
        Count(),
    ).double()


def test_forward_passes_and_steps_of_one_model_exclude_each_other():
    """Or a forward pass would find the leaves of a step in place of parameters."""
    for mode in ['always', 'never']:
        free = []

        def look(x):
            thread = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
            thread.start()
            thread.join()
            return x

        gpipe = GPipe(
            nn.Sequential(nn.Linear(4, 4), Call(look)),
            [1, 1],
            devices=['cpu:0', 'cpu:1'],
            chunks=2,
            checkpoint=mode,
        )
        x, lock = torch.rand(4, 4), gpipe._engine.lock
        gpipe(x)
        gpipe.step(x, x, lambda output, target: (output - target).square().mean())
        assert free and not any(free), mode


@devices
def test_two_threads_train_one_model(devices):
    """In v0.3.0, 47 of 72 steps were counted, and buffers were replaced for good."""
    model = make()
    gpipe = GPipe(model, [3, 3], devices=devices(2), chunks=3, checkpoint='except_last')
    x = torch.randn(9, 4, dtype=torch.double)
    call(gpipe, x).sum().backward()
    one = gradients(gpipe)
    gpipe.zero_grad()
    buffers = {name: id(buffer) for name, buffer in model.named_buffers() if 'calls' not in name}

    def train():
        for _ in range(12):
            call(gpipe, x).sum().backward()

    run_at_once(train, train)
    assert model[1].calls.item() == model[5].calls.item() == 3 * 25
    assert model[2].num_batches_tracked == 3 * 25
    assert {
        name: id(buffer) for name, buffer in model.named_buffers() if 'calls' not in name
    } == buffers
    assert_same(gradients(gpipe), [24 * grad for grad in one], 1e-9)


@cpus
def test_a_server_that_evaluates_while_it_trains(devices):
    model = make()
    trained = GPipe(model, [3, 3], devices=devices(2), chunks=3, checkpoint='except_last')
    server = GPipe(nn.Sequential(*model), [2, 2, 2], devices=devices(3), chunks=2)
    x = torch.randn(9, 4, dtype=torch.double)

    def train():
        for _ in range(10):
            call(trained, x).sum().backward()

    def serve():
        for _ in range(30):
            with torch.no_grad():
                call(server, x)

    run_at_once(train, serve)
    assert model[1].calls == model[5].calls == 10 * 3 + 30 * 2


@devices
def test_deferred_batch_norm_in_two_threads(devices):
    """In v0.3.0 it was off by 2.3 to 3.0: both had one place for their unfinished mini-batches."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)).double()
    gpipe = GPipe(
        copy.deepcopy(plain),
        [1, 1],
        devices=devices(2),
        chunks=3,
        checkpoint='except_last',
        deferred_batch_norm=True,
    )
    batches = [torch.randn(9, 4, dtype=torch.double) * k + k for k in range(1, 9)]
    for x in batches:
        plain(x)
    run_at_once(
        *[lambda k=k: [call(gpipe, x).sum().backward() for x in batches[k::2]] for k in (0, 1)]
    )
    assert gpipe[1].num_batches_tracked == 8
    assert_same(
        [gpipe[1].running_mean, gpipe[1].running_var],
        [plain[1].running_mean, plain[1].running_var],
    )


@devices
def test_a_retained_graph_in_two_threads(devices):
    """In v0.3.0, advice about pipelines within pipelines."""
    gpipe = GPipe(make(), [3, 3], devices=devices(2), chunks=3, checkpoint='always')
    x = torch.randn(9, 4, dtype=torch.double)
    loss = call(gpipe, x).sum()
    loss.backward(retain_graph=True)
    one = gradients(gpipe)
    for _ in range(10):
        gpipe.zero_grad()
        run_at_once(*[lambda: loss.backward(retain_graph=True)] * 2)
        assert_same(gradients(gpipe), [2 * grad for grad in one], 1e-9)


def test_models_that_share_layers_in_another_order_do_not_wait_for_each_other():
    a, b, c = (nn.Linear(4, 4) for _ in range(3))
    one = GPipe(nn.Sequential(a, b, c), [1, 2], devices=['cpu', 'cpu'], chunks=4)
    two = GPipe(nn.Sequential(b, a, c), [2, 1], devices=['cpu:0', 'cpu:1'], chunks=4)
    three = GPipe(
        nn.Sequential(c, nn.Linear(4, 4), a, b), [3, 1], devices=['cpu', 'cpu'], chunks=4
    )

    def train(gpipe):
        for _ in range(50):
            gpipe(torch.rand(8, 4)).sum().backward()

    run_at_once(*[lambda gpipe=gpipe: train(gpipe) for gpipe in (one, two, three)])


def test_each_layer_has_a_lock_of_its_own():
    a, b, c = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def take(*layers, may):
        lock = layer_lock(layers)

        def try_it():
            assert lock.acquire(blocking=False) is may
            if may:
                lock.release()

        run_at_once(try_it)

    both = layer_lock([a, b])
    with both, both:
        take(a, may=False)
        take(b, may=False)
        take(c, may=True)
    for layer in (a, b):
        take(layer, may=True)
    with layer_lock([b]):  # after both were in one group
        take(a, may=True)


def test_several_locks_are_taken_in_one_order():
    log = []

    class Lock:
        def acquire(self):
            log.append(self)

        def release(self):
            log.remove(self)

    orders, locks = [], [Lock() for _ in range(5)]
    for given in (locks, locks[::-1]):
        with _Several(given):
            orders.append(log.copy())
        assert log == []
    assert orders[0] == orders[1] and len(orders[0]) == 5


def test_a_thread_interrupted_while_it_waits_for_a_lock_holds_none():
    log = []

    class Lock:
        def acquire(self):
            if len(log) == 2:
                raise KeyboardInterrupt
            log.append(self)

        def release(self):
            log.remove(self)

    with pytest.raises(KeyboardInterrupt), _Several([Lock() for _ in range(5)]):
        raise AssertionError
    assert log == []
