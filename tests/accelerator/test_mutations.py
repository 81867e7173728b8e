"""No line that waits, records or chooses a stream is there in vain: without it, a program fails.

The programs are in :mod:`tests.accelerator.programs`, the lines in
:mod:`tests.accelerator.mutations`.
"""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch

import torchgpipe
from tests import accelerator
from tests.accelerator.mutations import MUTATIONS
from tests.accelerator.programs import IN_MODES, OTHERS, without_grad
from tests.marks import MODES

pytestmark = pytest.mark.sim

#: Of delays.
SEEDS = range(5)

#: Those without a mode are the same in all modes.
PROGRAMS = {
    f'{program.__name__} {mode}': partial(program, mode) for program in IN_MODES for mode in MODES
}
PROGRAMS.update((program.__name__, program) for program in OTHERS)

#: The ends of names of programs that are much the same in another mode.
SLOW = tuple(f' {mode}' for mode in MODES[1:])

#: Calls that wait, record, or choose a stream or a device.
CALLS = {
    *'_wait copy_streams current_stream device_index new_stream record_event'.split(),
    *'record_stream set_device_index set_stream synchronize torch.Stream'.split(),
    *'use_device use_stream wait_stream Wait.apply'.split(),
}


@pytest.fixture
def no_race():
    """Let these tests race."""


@pytest.fixture(autouse=True)
def own_streams():
    """Leave those streams and that device current that were."""
    yield
    for device in range(4):
        torch.accelerator.set_stream(torch.sim.default_stream(device))
    torch.accelerator.set_device_index(0)


def notices(program, seed):
    """Return whether a program fails or races."""
    accelerator.set_delays(seed, 200)
    with accelerator.detection(lines=False) as races:
        try:
            program()
        except (AssertionError, RuntimeError, AttributeError):
            return True  # An AttributeError: another thread has released a recomputation.
        finally:
            for device in range(4):
                torch.accelerator.synchronize(device)
        return bool(races())


@pytest.mark.parametrize(
    'program',
    [
        pytest.param(program, id=name, marks=pytest.mark.slow if name.endswith(SLOW) else ())
        for name, program in PROGRAMS.items()
    ],
)
def test_the_programs_are_right(program):
    for seed in SEEDS[:3]:
        accelerator.set_delays(seed, 200)
        with accelerator.no_race():
            program()


@pytest.mark.parametrize('mutation', MUTATIONS, ids=str)
def test_a_mutation_is_noticed(mutation, monkeypatch):
    mutated = mutation.force(monkeypatch)
    noticed = any(notices(mutation.program, seed) for seed in SEEDS)
    assert mutated.calls and noticed


def test_a_mutation_that_changes_nothing_is_not_noticed(monkeypatch):
    mutation = MUTATIONS[0]._replace(new=f'mutated({MUTATIONS[0].old})')
    mutated = mutation.force(monkeypatch)
    assert not any(notices(without_grad, seed) for seed in SEEDS) and mutated.calls


def calls_of(path):
    """Return such calls in a file of the package, with the function that they are in."""
    module = '.'.join(path.relative_to(Path(torchgpipe.__file__).parents[1]).with_suffix('').parts)

    def visit(node, name):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if CALLS & {called, called.rpartition('.')[2]}:
                yield name, ast.unparse(node)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = f'{name}.{node.name}'
        for child in ast.iter_child_nodes(node):
            yield from visit(child, name)

    return visit(ast.parse(path.read_text()), module)


def without_mutation(mutations):
    """Return the calls in the package that no mutation takes out."""
    taken = [(f'{m.function.__module__}.{m.function.__qualname__}', m.old) for m in mutations]
    folder = Path(torchgpipe.__file__).parent
    calls = [
        call
        for part in ('engine', 'skip')
        for path in sorted((folder / part).rglob('*.py'))
        for call in calls_of(path)
    ]
    return [
        (name, text)
        for name, text in calls
        if not any(name == where and (text in old or old in text) for where, old in taken)
    ]


def test_there_is_a_mutation_for_every_call():
    assert without_mutation(MUTATIONS) == []
    assert (
        'torchgpipe.engine.backward_order.copy_tensor',
        'use_stream(source)',
    ) in without_mutation(MUTATIONS[1:])
