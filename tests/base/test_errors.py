"""Errors: they keep type and traceback, name the culprit, hang nothing and spoil nothing."""

import copy
import signal
import threading
import traceback
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import (
    Call,
    Spy,
    WeakLog,
    assert_same,
    call,
    gradients,
    no_gc,
    threads,
    train_both,
)
from tests.marks import MODES
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.workers import Workers
from torchgpipe.skip.transfer import current_skip_tracker


class Oops(Exception):
    """The error that the layers here raise."""


class Fail(nn.Module):
    """An identity that raises when told to."""

    def __init__(self, when=lambda x: True):
        super().__init__()
        self.when = when

    def forward(self, x):
        if self.when(x):
            raise Oops('from the layer')
        return x


@devices
def test_type_traceback_and_note(devices):
    model = nn.Sequential(
        nn.Identity(), nn.Identity(), nn.Identity(), nn.Sequential(Fail(lambda x: int(x[0]) == 1))
    )
    gpipe = GPipe(model, [1, 1, 2], devices=devices(3), chunks=4)
    with pytest.raises(Oops, match='from the layer') as error:
        gpipe(torch.arange(4.0, device=devices.first))
    device = gpipe.devices[2]
    assert error.value.__notes__ == [f"in partition 2 on {device}, micro-batch 1 of 4, layer '3'"]
    frames = traceback.extract_tb(error.value.__traceback__)
    assert frames[-1].line == "raise Oops('from the layer')"
    assert frames[0].name == 'test_type_traceback_and_note'
    del error


@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_an_error_in_backward_is_named_too(devices, mode):
    gpipe = GPipe(
        nn.Sequential(nn.Linear(2, 2), Fail(lambda x: is_recomputing())),
        [1, 1],
        devices=devices(2),
        chunks=3,
        checkpoint=mode,
    )
    output = gpipe(torch.rand(3, 2, device=devices.first))
    if mode == 'never':
        output.sum().backward()
        return
    with pytest.raises(Oops) as error:
        output.sum().backward()
    device = gpipe.devices[1]
    assert f"in partition 1 on {device}, micro-batch 2 of 3, layer '1'" in error.value.__notes__
    del error


def test_on_one_worker_nothing_starts_after_the_first_failure():
    log = []

    def fail(j):
        def when(x):
            log.append((int(x[0]), j))
            return (int(x[0]), j) in [(2, 0), (1, 1), (0, 2)]

        return when

    gpipe = GPipe(
        nn.Sequential(*[Fail(fail(j)) for j in range(3)]), [1] * 3, devices=['cpu'] * 3, chunks=5
    )
    with pytest.raises(Oops) as error:
        gpipe(torch.arange(5.0))
    assert 'partition 2 ' in error.value.__notes__[0]
    assert log == [(0, 0), (0, 1), (0, 2)]


@devices
def test_the_first_failure_in_clock_order_wins_and_nothing_later_starts(devices):
    log = []
    lock = threading.Lock()

    def fail(j):
        def when(x):
            with lock:
                log.append((int(x[0]), j))
            return (int(x[0]), j) in [(2, 0), (1, 1), (0, 2)]  # all of clock 2

        return when

    gpipe = GPipe(
        nn.Sequential(*[Fail(fail(j)) for j in range(3)]),
        [1] * 3,
        devices=devices.distinct(3),
        chunks=5,
    )
    gpipe(torch.arange(5.0, 10.0, device=devices.first))  # learns that cells may run at once
    for _ in range(30):
        log.clear()
        with pytest.raises(Oops) as error:
            gpipe(torch.arange(5.0, device=devices.first))
        assert 'partition 0 ' in error.value.__notes__[0]
        assert max(i + j for i, j in log) == 2
    del error


@devices
def test_on_one_worker_later_cells_of_the_clock_do_not_start(devices):
    log = []
    first, second = devices.distinct(2)
    gpipe = GPipe(
        nn.Sequential(
            Spy(lambda x: None),
            Fail(lambda x: int(x[0]) == 0),
            Spy(lambda x: log.append(int(x[0]))),
        ),
        [1] * 3,
        devices=[first, second, second],
        chunks=3,
    )
    with pytest.raises(Oops):
        gpipe(torch.arange(3.0, device=devices.first))
    assert log == []


@devices
def test_a_cell_does_not_start_when_one_before_it_in_its_clock_failed_on_another_worker(devices):
    log = []
    first, second = devices.distinct(2)

    def wait(x):
        if int(x[0]) == 1:  # during the failure; a worker runs its next task afterwards
            gpipe._engine.workers.submit([(gpipe.devices[0], int)])[0].result()

    gpipe = GPipe(
        nn.Sequential(
            Fail(lambda x: int(x[0]) == 2), Spy(wait), Spy(lambda x: log.append(int(x[0])))
        ),
        [1] * 3,
        devices=[first, second, second],
        chunks=3,
    )
    gpipe(torch.arange(3.0, 6.0, device=devices.first))  # learns that cells may run at once
    log.clear()
    with pytest.raises(Oops):
        gpipe(torch.arange(3.0, device=devices.first))
    assert log == []


@pytest.mark.slow
@devices
def test_a_hundred_failures_then_a_success(devices):
    state = {'at': None}
    generator = torch.Generator().manual_seed(0)

    def when(j):
        def matches(x):
            return state['at'] is not None and state['at'] == (int(x[0, 4]), j)

        return matches

    class Layer(nn.Module):
        def __init__(self, j):
            super().__init__()
            self.fail = Fail(when(j))

        def forward(self, x):
            return self.fail(x)

    gpipe = GPipe(
        nn.Sequential(*[Layer(j) for j in range(3)]), [1] * 3, devices=devices(3), chunks=4
    )
    x = torch.cat([torch.rand(4, 4), torch.arange(4.0)[:, None]], 1).to(devices.first)
    assert_same([gpipe(x)], [x], 0)
    before = threads()
    for _ in range(100):
        i, j = (int(torch.randint(n, (), generator=generator)) for n in (4, 3))
        state['at'] = i, j
        with pytest.raises(Oops) as error:
            gpipe(x)
        assert f'partition {j} ' in error.value.__notes__[0]
        assert f'micro-batch {i} ' in error.value.__notes__[0]
    del error
    state['at'] = None
    assert_same([gpipe(x)], [x], 0)
    assert threads() == before


@devices
def test_a_failure_keeps_no_tensor_alive(devices):
    gpipe = GPipe(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), Fail(lambda x: len(x) == 1)),
        [1, 2],
        devices=devices(2),
        chunks=2,
        checkpoint='always',
    )
    log = WeakLog(*list(gpipe)[:2])
    try:
        gpipe(torch.rand(3, 2, device=devices.first))
    except Oops:
        pass
    assert log.alive() == 0


@devices
def test_keyboard_interrupt_while_cells_run(devices, ctrl_c):
    """Ctrl-C reaches the caller, whichever thread runs the cell; then the model works again."""
    interrupt = threading.Event()

    def see(x):
        if interrupt.is_set() and int(x[0]) == 1:
            interrupt.clear()
            signal.raise_signal(signal.SIGINT)

    gpipe = GPipe(nn.Sequential(Spy(see), nn.Identity()), [1, 1], devices=devices(2), chunks=4)
    x = torch.arange(4.0, device=devices.first)
    assert_same([gpipe(x)], [x], 0)
    before = len(threads())
    for _ in range(50):
        interrupt.set()
        with pytest.raises(KeyboardInterrupt):
            gpipe(x)
        assert_same([gpipe(x)], [x], 0)
    assert len(threads()) == before


@devices
def test_keyboard_interrupt_waits_for_the_cells_under_way(devices, ctrl_c):
    ended = []

    def slow(x):
        if int(x[0]) == 2:
            signal.raise_signal(signal.SIGINT)
            ended.append('partition 0')

    gpipe = GPipe(
        nn.Sequential(Spy(slow), nn.Identity()), [1, 1], devices=devices.distinct(2), chunks=4
    )
    with pytest.raises(KeyboardInterrupt):
        gpipe(torch.arange(4.0, device=devices.first))
    assert ended == ['partition 0']


@devices
def test_keyboard_interrupt_stops_the_workers_and_keeps_nothing_alive(
    devices, ctrl_c, monkeypatch
):
    log, stopping = [], threading.Event()
    first, second = devices.distinct(2)

    def interrupt(x):
        if len(x) == 1:  # in micro-batch 1, before partition 1 on the same worker
            # One that comes just before the main thread starts to wait does not wake it up.
            for _ in range(100):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if stopping.wait(0.2):
                    break
            log.append('partition 0')

    gpipe = GPipe(
        nn.Sequential(
            nn.Linear(2, 2),
            Spy(interrupt),
            Spy(lambda x: log.append('partition 1')),
            nn.Identity(),
        ),
        [2, 1, 1],
        devices=[first, first, second],
        chunks=2,
    )
    gpipe[1].see, gpipe[2].see, sees = id, id, (gpipe[1].see, gpipe[2].see)
    gpipe(torch.rand(3, 2, device=devices.first))  # At first cells that may draw come one by one.
    gpipe[1].see, gpipe[2].see = sees
    alive = WeakLog(gpipe[0])
    real = Workers.stop
    monkeypatch.setattr(Workers, 'stop', lambda self: (stopping.set(), real(self)))
    with no_gc(), suppress(KeyboardInterrupt):
        gpipe(torch.rand(3, 2, device=devices.first))
    assert log == ['partition 0']  # it has ended, and none has started after it
    assert alive.alive() == 0


@devices
def test_keyboard_interrupt_in_a_cell_of_the_caller_waits_for_concurrent_cells(devices, ctrl_c):
    log, started, raised = [], threading.Event(), threading.Event()

    def interrupt(x):
        assert started.wait(20)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raised.set()

    def beside(x):
        if len(x) == 1:
            started.set()
            assert raised.wait(20)
            log.append('partition 0')

    gpipe = GPipe(
        nn.Sequential(Spy(beside), Spy(interrupt)), [1, 1], devices=devices.distinct(2), chunks=2
    )
    gpipe.eval()
    for known in (True, False):  # At first nothing runs beside a cell that may draw.
        gpipe[0].see, gpipe[1].see = (id, id) if known else (beside, interrupt)
        try:
            gpipe(torch.rand(3, 2, device=devices.first))
        except KeyboardInterrupt:
            assert not known
    assert log == ['partition 0']


@devices
def test_keyboard_interrupt_comes_before_a_failure_beside_it(devices, ctrl_c):
    barrier = threading.Barrier(2)

    def fail(x):
        if len(x) == 1:
            barrier.wait(20)
            raise Oops

    def interrupt(x):
        if len(x) == 2:
            barrier.wait(20)
            raise KeyboardInterrupt

    gpipe = GPipe(nn.Sequential(Spy(id), Spy(id)), [1, 1], devices=devices.distinct(2), chunks=2)
    x = torch.rand(3, 2, device=devices.first)
    gpipe(x)
    gpipe[0].see, gpipe[1].see = fail, interrupt
    with pytest.raises(KeyboardInterrupt):
        gpipe(x)


@devices
def test_other_exceptions_pass_too(devices):
    for error in [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration]:

        def see(x):
            raise error

        gpipe = GPipe(nn.Sequential(nn.Identity(), Spy(see)), [1, 1], devices=devices(2), chunks=2)
        with pytest.raises(error):
            gpipe(torch.rand(2, device=devices.first))


class AddOne(nn.Module):
    """A layer that works on its input in place."""

    def forward(self, x):
        return x.add_(1)


@devices
def test_an_in_place_change_that_autograd_would_not_catch(devices):
    for layers, culprit in [
        ([AddOne(), nn.Linear(2, 2)], '0'),
        ([nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(2, 2)], '1'),
        ([nn.Identity(), nn.Unflatten(1, (1, 2)), nn.Sequential(AddOne()), nn.Linear(2, 2)], '2'),
    ]:
        for mode, chunks in [('always', 1), ('always', 4), ('except_last', 4)]:
            gpipe = GPipe(
                nn.Sequential(*layers, nn.Linear(2, 2)),
                [len(layers), 1],
                devices=devices(2),
                chunks=chunks,
                checkpoint=mode,
            )
            output = gpipe(torch.rand(8, 2, device=devices.first))
            with pytest.raises(
                RuntimeError,
                match=f"layer '{culprit}' of partition 0 on "
                f'{gpipe.devices[0]}.*changed the '
                "input of the partition in place.*'never'",
            ):
                output.sum().backward()


@devices
def test_an_in_place_change_by_an_unknown_layer(devices):
    class NeedsGrad(nn.Module):
        def forward(self, x):
            if not torch.is_grad_enabled():
                raise RuntimeError('needs grad')
            return x

    gpipe = GPipe(
        nn.Sequential(NeedsGrad(), AddOne(), nn.Linear(2, 2)),
        [3],
        devices=devices(1),
        checkpoint='always',
    )
    output = gpipe(torch.rand(8, 2, device=devices.first))
    with pytest.raises(RuntimeError, match='^a layer of partition 0 on .* changed the input'):
        output.sum().backward()


@devices
def test_an_in_place_change_between_a_stash_and_its_pop_leaves_no_skip_behind(devices):
    gpipe = GPipe(
        nn.Sequential(Stash(), AddOne(), Pop(), nn.Linear(2, 2)),
        [4],
        devices=devices(1),
        checkpoint='always',
    )
    output = gpipe(torch.rand(8, 2, device=devices.first))
    with pytest.raises(RuntimeError, match="layer '1' of partition 0"):
        output.sum().backward()
    assert current_skip_tracker().tensors == {}


@devices
def test_an_in_place_change_of_one_of_two_inputs(devices):
    class Multiply(nn.Module):
        def forward(self, input):
            a, b = input
            b.add_(1)
            return a * b

    gpipe = GPipe(nn.Sequential(Multiply()), [1], devices=devices(1), checkpoint='always')
    a = torch.tensor([1.0], requires_grad=True, device=devices.first)
    output = gpipe((a, torch.tensor([1.0], device=devices.first)))
    with pytest.raises(RuntimeError, match="layer '0' of partition 0"):
        output.backward()
    assert a.grad is None


@devices
def test_an_in_place_change_behind_the_back_of_autograd(devices):
    class Sneaky(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                x.mul_(2)
            return super().forward(x)

    gpipe = GPipe(
        nn.Sequential(nn.Linear(2, 2), Sneaky(2, 2)),
        [1, 1],
        devices=devices(2),
        checkpoint='always',
    )
    with pytest.raises(RuntimeError, match="layer '1' of partition 1"):
        gpipe(torch.rand(4, 2, device=devices.first)).sum().backward()


@devices
def test_an_in_place_change_of_an_input_that_requires_grad(devices):
    for model, balance, culprit in [
        ([nn.Linear(1, 1), nn.ReLU(inplace=True)], [1, 1], "layer '1' of partition 1"),
        (
            [nn.Linear(1, 1), nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))],
            [1, 1],
            "layer '1' of partition 1",
        ),
        (
            [Stash(), nn.Linear(1, 1), nn.ReLU(inplace=True), Pop()],
            [2, 2],
            'the input of a checkpointed micro-batch',
        ),
    ]:
        # Its cause is autograd's "a leaf Variable that requires grad …", because a recomputation
        # starts from a leaf.
        gpipe = GPipe(nn.Sequential(*model), balance, devices=devices(2), checkpoint='always')
        output = gpipe(torch.rand(1, 1, device=devices.first))
        with pytest.raises(
            RuntimeError, match=culprit + r'.* in place.*\(inplace=False\)'
        ) as error:
            output.backward()
        (note,) = error.value.__context__.__notes__
        assert f"in partition 1 on {gpipe.devices[1]}, micro-batch 0 of 1, layer '" in note


@devices
def test_an_in_place_change_without_checkpointing_is_as_without_a_pipeline(devices):
    for chunks in [1, 3]:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)).double()
        gpipe = GPipe(
            copy.deepcopy(model), [1, 2], devices=devices(2), chunks=chunks, checkpoint='never'
        )
        train_both(model, gpipe, torch.randn(5, 2, dtype=torch.double))


@devices
@pytest.mark.parametrize('mode', MODES)
def test_an_in_place_change_that_spoils_the_partition_before_is_caught(devices, mode):
    # The exponential function saves its result.
    model = nn.Sequential(nn.Linear(2, 2), Call(torch.exp), Call(lambda x: x.mul_(2))).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), checkpoint=mode)
    x = torch.rand(3, 2, dtype=torch.double)
    if devices.are_apart and mode != 'always':  # Only a copy is changed.
        model[2].forward = lambda x: x * 2
        train_both(model, gpipe, x)
        return
    with pytest.raises(RuntimeError, match='inplace operation|partition in place'):
        call(gpipe, x).sum().backward()


@devices
def test_a_note_that_an_exception_does_not_take(devices):
    """In v0.3.0 it came out as the AttributeError of the note."""

    class Frozen(Exception):
        def __setattr__(self, name, value):
            raise AttributeError('frozen')

    def see(x):
        raise Frozen('from the layer')

    gpipe = GPipe(nn.Sequential(Spy(see)), [1], devices=devices(1))
    with pytest.raises(Frozen, match='from the layer'):
        gpipe(torch.rand(2, device=devices.first))


def test_sparse_tensors_between_partitions():
    """In v0.3.0, errors of PyTorch's from within the library."""
    for workers in [['cpu'] * 2, ['cpu:0', 'cpu:1']]:

        class Sparse(nn.Linear):
            def forward(self, x):
                y = super().forward(x)
                return y.to_sparse(), y

        class Dense(nn.Linear):
            def forward(self, xs):
                sparse, dense = xs
                return super().forward(sparse.to_dense() + dense)

        model = nn.Sequential(Sparse(2, 2), Dense(2, 2)).double()
        gpipe = GPipe(
            copy.deepcopy(model), [1, 1], devices=workers, chunks=2, checkpoint='except_last'
        )
        x = torch.rand(4, 2, dtype=torch.double)
        model(x).sum().backward()
        gpipe(x).sum().backward()
        assert_same(gradients(gpipe), gradients(model))
        gpipe.zero_grad()
        gpipe.step(x, x, lambda y, _: y.sum(), normalizer=1, schedule='1f1b')
        assert_same(gradients(gpipe), gradients(model))
        with pytest.raises(ValueError, match='input is sparse'):
            gpipe(x.to_sparse())


@devices
def test_another_shape_of_an_output_in_recomputation(devices):
    """In v0.3.0, "size mismatch" of PyTorch's."""

    last = Call(lambda x: torch.cat([x, x]) if is_recomputing() else x)
    model = nn.Sequential(nn.Linear(2, 2), last)
    gpipe = GPipe(model, [1, 1], devices=devices(2), checkpoint='always')
    output = gpipe(torch.rand(3, 2, device=devices.first))
    with pytest.raises(RuntimeError, match=r'its output 0 is .* of shape \(6, 2\)'):
        output.sum().backward()
