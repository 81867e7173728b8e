"""Random numbers of a cell by themselves, beside threads that draw too."""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.base.locks import generator_lock
from torchgpipe.engine.checkpoint.random import Drawing, DrawMonitor, Draws, Recorder
from torchgpipe.engine.microbatches import cut
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.plain_call import PlainCall

cpu = torch.device('cpu')
UNKNOWN, NO, YES = Drawing

FUNCTIONS = {
    'new tensors': lambda: F.dropout(torch.ones(100)) + torch.rand(100),
    'a change in place': lambda: F.rrelu(-torch.ones(100), training=True, inplace=True),
}


def known():
    """Return the draws of a cell whose layers were seen to draw."""
    return Draws([torch.default_generator])


def watched():
    """Return the draws of a first cell."""
    return Draws([], Recorder())


def test_the_same_numbers_again():
    for make in [known, watched]:
        for function in list(FUNCTIONS.values()):
            draws = make()
            first = draws.first_pass(function)
            torch.rand(3)
            now = torch.get_rng_state()
            for _ in range(2):
                assert torch.equal(draws.replay(function), first)
                assert torch.equal(torch.get_rng_state(), now)
            held = draws.replay(lambda: (function(), generator_lock._is_owned())[1])
            assert held and not generator_lock._is_owned()


@pytest.mark.parametrize('make', [known, watched])
def test_the_generator_is_not_restored_for_layers_that_draw_nothing(make):
    draws = make()
    draws.first_pass(lambda: torch.rand(0))
    before = torch.rand(1), torch.get_rng_state()
    assert draws.replay(lambda: torch.equal(torch.get_rng_state(), before[1]))
    assert not draws.replay(generator_lock._is_owned)


def test_a_generator_that_no_module_has():
    own = torch.Generator()
    draws = Draws([], recorder := Recorder())
    first = draws.first_pass(lambda: torch.rand(3, generator=own))
    now = own.get_state()
    assert torch.equal(draws.replay(lambda: torch.rand(3, generator=own)), first)
    assert torch.equal(own.get_state(), now)
    assert not recorder.draws and len(recorder.generators) == 1


@pytest.mark.parametrize('again', [lambda: torch.rand(5), lambda: torch.rand(3) + torch.rand(1)])
def test_other_numbers_than_in_the_first_pass_are_an_error(again):
    """Another thread has drawn, in either pass."""
    draws, now = known(), torch.get_rng_state()
    draws.first_pass(lambda: torch.rand(3))
    now = torch.get_rng_state()
    with pytest.raises(RuntimeError, match='another thread drew .* torch.Generator of its own'):
        draws.replay(again)
    assert torch.equal(torch.get_rng_state(), now)


def test_draws_of_another_thread_do_not_count_for_the_first_cell():
    draws, recorder = Draws([], recorder := Recorder()), recorder

    def function():
        torch.default_generator.set_state(torch.Generator().manual_seed(5).get_state())

    draws.first_pass(function)  # as another thread may, between two operations
    assert not recorder.draws and not draws.states


def test_a_cell_that_was_not_known_to_draw():
    monitor = DrawMonitor()
    draws = Draws([], None, monitor)
    draws.first_pass(lambda: torch.rand(3))
    draws.replay(lambda: torch.rand(3))  # not looked at yet
    assert monitor.check()
    draws.replay(lambda: torch.ones(3).sin())
    with pytest.raises(RuntimeError, match='random numbers where the first pass was not known'):
        draws.replay(lambda: F.dropout(torch.ones(3)))


def test_a_recorder_is_let_go_of_when_it_has_recorded():
    """One that watches has copies of parameters, and the graph owns the draws."""
    recorder = Recorder()
    ref, cell = weakref.ref(recorder), Draws([], recorder)
    del recorder
    cell.first_pass(lambda: torch.rand(3))
    assert ref() is None


@pytest.mark.parametrize(
    'before, after, expected',
    [
        ([NO, NO], None, [('at once', 0, 3)]),
        ([UNKNOWN, NO], [NO, NO], [('at once', 0, 1), ('at once', 1, 3)]),
        ([UNKNOWN, UNKNOWN], [NO, YES], [('at once', 0, 1), ('in order', 1, 3)]),
        ([YES, NO], None, [('in order', 0, 3)]),
        ([NO, YES], None, [('in order', 0, 3)]),
    ],
)
def test_no_cell_runs_beside_one_that_draws(before, after, expected, monkeypatch):
    """It could begin to draw, and the generator would not tell."""
    partitions = [nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())]
    pipeline, log = (
        PlainCall(Engine(partitions, [cpu, torch.device('cpu:1')]), cut(torch.ones(3, 2), 3)[0]),
        [],
    )

    def note(how, *which):
        log.append((how, *which))
        for run, known in zip(pipeline._runs, after or before):
            run.cells.draws = known

    pipeline._runs = [SimpleNamespace(cells=SimpleNamespace(draws=each)) for each in before]
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
def test_a_mode_of_the_user_sees_the_same_operations_with_a_recorder(function):
    with Log() as expected:
        function()
    with Log() as actual:
        Recorder().run(function)
    assert actual.seen == expected.seen


def test_operations_of_others_are_looked_at():
    library = torch.library.Library('torchgpipe_itself', 'FRAGMENT')
    library.define('hidden(Tensor x) -> Tensor')
    library.impl('hidden', lambda x: x + torch.rand(()), 'CPU')
    recorder = Recorder()
    with torch._C._AutoDispatchBelowAutograd():
        recorder.run(lambda: torch.ops.torchgpipe_itself.hidden(torch.ones(1)))
    assert recorder.draws


@pytest.mark.filterwarnings('ignore')
def test_layers_that_are_compiled_stay_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()  # Dynamo counts compilations of its own wrapper.
    compiled = torch.compile(torch.sin, backend=backend)
    Recorder().run(lambda: compiled(torch.ones(3)))
    assert len(graphs) == 1


@pytest.mark.filterwarnings('ignore')
@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, 'supports_higher_order_operators'),
    reason='this PyTorch takes no operators of higher order in any mode',
)
def test_operators_of_higher_order():
    recorder = Recorder()
    output = recorder.run(
        lambda: torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
    )
    assert output.tolist() == [2, 2]
