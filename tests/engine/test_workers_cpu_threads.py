"""Workers on the CPU divide its cores; a cell that waits for its turn has all of them."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.devices import ACCELERATOR
from tests.helpers import Spy
from torchgpipe import GPipe

CPUS = ['cpu:0', 'cpu:1', 'cpu:2']


def spying(devices=CPUS, function=lambda x: x, **options):
    """Return a pipeline, and a list of the intra-op threads of its calls.

    The pipeline has run once, so that it is known whether its layers draw random numbers.
    """
    seen = []

    def spy(x):
        seen.append(torch.get_num_threads())
        function(x)

    model = nn.Sequential(*[Spy(spy) for _ in devices])
    gpipe = GPipe(model, [1] * len(devices), devices=devices, chunks=3, **options)
    call(gpipe)
    seen.clear()
    return gpipe, seen


def call(gpipe):
    """Go forward."""
    return gpipe(torch.rand(3, 1, device=gpipe.devices[0].type, requires_grad=True))


def test_workers_divide_the_threads_of_the_caller():
    for number, share in [(6, 2), (7, 2), (3, 1), (2, 1), (1, 1)]:
        gpipe, seen = spying()
        torch.set_num_threads(number)
        call(gpipe)
        assert seen == [share] * 9 and torch.get_num_threads() == number


def test_a_change_of_the_caller_s_number_follows():
    gpipe, seen = spying()
    for number in (6, 9, 6):
        torch.set_num_threads(number)
        call(gpipe)
    assert seen == [2] * 9 + [3] * 9 + [2] * 9


def test_no_more_workers_divide_them_than_there_are_micro_batches():
    for chunks, share in [(1, 6), (2, 3), (3, 2), (4, 2)]:
        gpipe, seen = spying()
        gpipe.chunks = chunks
        torch.set_num_threads(6)
        gpipe(torch.rand(4, 1))
        assert seen == [share] * 3 * chunks


def test_cells_that_take_turns_have_all_of_them_where_the_first_micro_batch_tells():
    seen = []

    def draw(x):
        seen.append(torch.get_num_threads())
        torch.rand(1)

    gpipe = GPipe(nn.Sequential(Spy(draw), Spy(draw), Spy(draw)), [1] * 3, devices=CPUS, chunks=3)
    torch.set_num_threads(6)
    call(gpipe)
    assert seen == [2] * 3 + [6] * 6


@pytest.mark.parametrize('devices', [['cpu'], ['cpu', 'cpu:0']])
def test_one_worker_has_all(devices):
    gpipe, seen = spying(devices)
    torch.set_num_threads(4)
    call(gpipe)
    assert set(seen) == {4}


@pytest.mark.accelerator
@pytest.mark.parametrize(
    'devices, share', [([ACCELERATOR, 'cpu'], 4), ([ACCELERATOR, 'cpu:0', 'cpu:1', 'cpu:0'], 2)]
)
def test_workers_of_accelerators_count_for_nothing(devices, share):
    gpipe, seen = spying(devices)
    torch.set_num_threads(4)
    call(gpipe)
    assert set(seen) == {share}


def test_a_recomputation_has_as_many_as_its_first_pass():
    gpipe, seen = spying(checkpoint='always')
    torch.set_num_threads(6)
    output = call(gpipe)
    torch.set_num_threads(3)
    output.sum().backward()
    assert seen == [2] * 18 and torch.get_num_threads() == 3


def number_of_a_new_thread():
    """Return the intra-op threads with which a thread begins."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_begin_with_the_state_that_they_have_without_workers():
    gpipe, seen = spying()
    torch.set_num_threads(6)
    call(gpipe)
    assert set(seen) == {2} and number_of_a_new_thread() == 6


def test_only_the_caller_has_more_than_a_share():
    """A worker's OpenMP team would stay, and let the teams of others sleep between kernels."""
    for chunks, function, workers in [
        (3, id, {'cpu:0', 'cpu:1'}),
        (1, id, set()),
        (3, F.dropout, set()),
    ]:
        seen = []

        def note(x):
            seen.append((threading.current_thread().name, torch.get_num_threads()))
            function(x)

        torch.set_num_threads(6)
        gpipe = GPipe(
            nn.Sequential(*[Spy(note) for _ in CPUS]), [1] * 3, devices=CPUS, chunks=chunks
        )
        for _ in range(2):  # At first it is not known whether they draw.
            seen.clear()
            gpipe(torch.rand(3, 1))
            assert {number for name, number in seen if name != 'MainThread'} <= {2}
        assert {name for name, _ in seen} == {'MainThread', *(f'torchgpipe-{w}' for w in workers)}


@pytest.mark.parametrize('mode', ['always', 'never'])
def test_cells_that_draw_take_turns_and_have_all(mode):
    gpipe, seen = spying(function=F.dropout, checkpoint=mode)
    torch.set_num_threads(6)
    call(gpipe).sum().backward()
    assert set(seen) == {6}


def test_under_hooks_of_the_user_s_likewise():
    gpipe, seen = spying()
    torch.set_num_threads(6)
    with saved_tensors_hooks(id, id):
        call(gpipe)
    assert set(seen) == {6}
