"""What records random operations and repeats them, by itself, beside threads that draw too."""
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices import cpu_only
from torchgpipe.engine.checkpoint import draws
from torchgpipe.engine.checkpoint import random_operations as operations
from torchgpipe.engine.edges import Pipeline
from torchgpipe.engine.microbatches import cut
from torchgpipe.engine.partition import Engine

cpu = torch.device('cpu')


@pytest.fixture
def disturb(monkeypatch):
    """Return what lets another thread draw right after the next so many looks at the generator."""
    left, real = [0], operations.state_of

    def state(generator=torch.default_generator):
        result = real(generator)
        if left[0] and generator is torch.default_generator:
            left[0] -= 1
            torch.rand(1)
        return result

    monkeypatch.setattr(operations, 'state_of', state)

    def begin(number):
        left[0] = number
        return left

    return begin


FUNCTIONS = {
    'new tensors': lambda: F.dropout(torch.ones(100)) + torch.rand(100),
    'a change in place': lambda: F.rrelu(-torch.ones(100), training=True, inplace=True)}


@pytest.mark.parametrize('number', [0, 1, 3])
@pytest.mark.parametrize('function', list(FUNCTIONS.values()), ids=list(FUNCTIONS))
def test_a_draw_of_another_thread_within_an_operation(function, number, disturb):
    """It is found out, and the operation runs again."""
    cell = draws.Draws(cpu, operations.Recorder())
    left = disturb(number)
    first = cell.first_pass(function)
    assert left == [0]
    now = torch.get_rng_state()
    assert torch.equal(cell.replay(function), first)
    assert torch.equal(torch.get_rng_state(), now)


def test_draws_of_other_threads_without_end_are_an_error(disturb):
    disturb(-1)
    with pytest.raises(RuntimeError, match='another thread drew .* torch.Generator of its own'):
        operations.Recorder().run(lambda: torch.rand(3))


def test_an_operation_that_draws_nothing_is_not_recorded():
    recorder = operations.Recorder()
    recorder.run(lambda: torch.rand(0))
    assert recorder.draws == {}


def test_a_recorder_is_let_go_of_when_it_has_recorded():
    """One that watches has copies of parameters, and the graph owns what was recorded."""
    recorder = operations.Recorder()
    ref, cell = weakref.ref(recorder), draws.Draws(cpu, recorder)
    del recorder
    cell.first_pass(lambda: torch.rand(3))
    assert ref() is None


def test_more_numbers_than_in_the_first_pass_are_another_path():
    cell = draws.Draws(cpu, operations.Recorder())
    cell.first_pass(lambda: torch.rand(3))
    with pytest.raises(RuntimeError, match='drew more or fewer numbers'):
        cell.replay(lambda: torch.rand(5))


@pytest.mark.parametrize('function, other', [
    (lambda: torch.rand(0), False), (lambda: torch.rand(0, device='meta'), False),
    (lambda: torch.rand(3, device='meta'), False), (lambda: torch.ones(2).sin(), False),
    (lambda: torch.rand(3), True), (lambda: F.dropout(torch.ones(3)), True)],
    ids=['no number', 'no number elsewhere', 'elsewhere', 'does not say', 'draws', 'a twin draws'])
def test_draws_of_another_thread_are_not_taken_for_those_of_a_recomputation(
        function, other, disturb):
    replayer = operations.Replayer({}, {torch.ops.aten.sin.default})
    disturb(-1)
    if other:
        with pytest.raises(RuntimeError, match='random numbers where the first pass drew none'):
            replayer.run(function)
    else:
        replayer.run(function)


def draw(number):
    """Return what it means to draw so many numbers from the CPU's generator."""
    before = torch.get_rng_state()
    torch.rand(number)
    return operations.Draw(before, torch.get_rng_state(), cpu)


def test_what_takes_no_generator_draws_as_much_as_before_or_nothing():
    """Nothing, where it was another thread that drew in the first pass."""
    recorded = draw(3)
    now = torch.get_rng_state()
    for number in (0, 3):
        operations._with_default_moved(recorded, lambda: torch.rand(number))
    for number in (2, 4):
        with pytest.raises(RuntimeError, match='another thread drew'):
            operations._with_default_moved(recorded, lambda: torch.rand(number))
    assert torch.equal(torch.get_rng_state(), now)


def test_nobody_looks_at_the_generator_while_it_is_moved_back():
    def take():
        taken = operations._lock.acquire(blocking=False)
        if taken:
            operations._lock.release()
        return taken

    def take_elsewhere():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(take).result()

    assert not operations._with_default_moved(draw(0), take_elsewhere)
    assert take_elsewhere()


@cpu_only('it is about a generator that devices share')
@pytest.mark.parametrize('before, after, expected', [
    ([False, False], None, [('at once', 0, 3)]),
    ([None, False], [False, False], [('at once', 0, 1), ('at once', 1, 3)]),
    ([None, None], [False, True], [('at once', 0, 1), ('in order', 1, 3)]),
    ([True, False], None, [('in order', 0, 3)]), ([False, True], None, [('in order', 0, 3)])])
def test_no_cell_runs_beside_one_that_draws(before, after, expected, monkeypatch):
    """It could begin to draw, and the generator would not tell."""
    partitions = [nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())]
    pipeline, log = Pipeline(Engine(partitions, [cpu, torch.device('cpu:1')]),
                             cut(torch.ones(3, 2), 3)[0]), []

    def note(how, *which):
        log.append((how, *which))
        for cells, known in zip(pipeline._cells, after or before):
            cells.draws = known

    pipeline._cells = [SimpleNamespace(draws=each) for each in before]
    monkeypatch.setattr(pipeline, '_run_at_once', partial(note, 'at once'))
    monkeypatch.setattr(pipeline, '_run_in_order', partial(note, 'in order'))
    pipeline._run_cells()
    assert log == expected


class Log(TorchDispatchMode):
    """Note operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('function', list(FUNCTIONS.values()), ids=list(FUNCTIONS))
def test_a_mode_of_the_user_s_sees_what_it_sees_without_a_recorder(function):
    with Log() as expected:
        function()
    with Log() as actual:
        operations.Recorder().run(function)
    assert actual.seen == expected.seen


def test_an_operation_on_another_device_is_given_no_generator():
    with Log() as log:
        operations.Replayer({}, set()).run(lambda: torch.rand(3, device='meta'))
    assert log.seen == [torch.ops.aten.rand.default]


def test_operations_of_others_are_looked_at_while_they_are_not_known(monkeypatch):
    library = torch.library.Library('torchgpipe_itself', 'FRAGMENT')
    library.define('plain(Tensor x) -> Tensor')
    library.impl('plain', torch.sin, 'CPU')
    looks, real = [], operations.state_of
    monkeypatch.setattr(operations, 'state_of', lambda *args: (looks.append(1), real(*args))[1])
    for random, number in [(None, 2), ((), 0), ([torch.ops.torchgpipe_itself.plain.default], 2)]:
        looks.clear()
        operations.Recorder(random).run(lambda: torch.ops.torchgpipe_itself.plain(torch.ones(1)))
        assert len(looks) == number


@pytest.mark.filterwarnings('ignore')
def test_layers_that_are_compiled_stay_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()  # Dynamo counts what it has compiled of its own wrapper.
    compiled = torch.compile(torch.sin, backend=backend)
    operations.Recorder().run(lambda: compiled(torch.ones(3)))
    assert len(graphs) == 1


@pytest.mark.filterwarnings('ignore')
@pytest.mark.skipif(not hasattr(TorchDispatchMode, 'supports_higher_order_operators'),
                    reason='this PyTorch takes no operators of higher order in any mode')
def test_operators_of_higher_order():
    recorder = operations.Recorder()
    output = recorder.run(lambda: torch.cond(
        torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),)))
    assert output.tolist() == [2, 2]
