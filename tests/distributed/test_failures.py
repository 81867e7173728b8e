"""Ranks that raise, die or are stuck: all end, and name the rank, its place and its action."""

import gc
import os
import signal
import sys
import threading
import weakref
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.failing import Fault, endings
from tests.distributed.models import Block, batch
from tests.distributed.test_links import pair  # noqa: F401
from tests.marks import slow
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, failures, init_mesh
from torchgpipe.distributed.failures import (
    EXIT,
    GRACE,
    Monitor,
    RankProgress,
    State,
    Watch,
    Whereabouts,
    blame,
    describe,
    text_of,
    whereabouts,
)
from torchgpipe.distributed.links import Unreachable
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import UnitAction
from torchgpipe.timeline import record

LIMIT = timedelta(seconds=3)

#: The middle one of three, and its place, as all have to name it.
MIDDLE = 'rank 1 (data 0, pipe 1, tensor 0)'


def built(fault=None, at=3, timeout=LIMIT):
    """A model of three stages of two layers, one of which has a fault."""
    layers = [Block() for _ in range(6)]
    if fault is not None:
        layers[at] = fault
    return DistributedGPipe(
        nn.Sequential(*layers),
        [2, 2, 2],
        mesh=init_mesh(pipe=3),
        chunks=2,
        checkpoint='never',
        timeout=timeout,
    )


def steps(model, number=3, loss=F.mse_loss):
    """Take steps."""
    for step in range(number):
        model.step(*batch(step, 4), loss)


def in_layer(release, how, backward=False, at=3, timeout=LIMIT):
    steps(built(Fault(how, backward), at, timeout))


def in_loss(release):
    fault = Fault('raise')

    def loss(output, target):
        fault.happen()
        return F.mse_loss(output, target)

    steps(built(), loss=loss)


def in_hook(release):
    model = built()
    if '2' in model._modules:
        model._modules['2'].register_forward_hook(Fault('raise').happen)
    steps(model)


def named(found, *texts, codes=None):
    """Check that all ranks have ended with an error, and that each one's output has the texts."""
    for rank, (code, text) in enumerate(found):
        assert code is not None, f'rank {rank} is left, having printed {text}'
        assert code != 0, text
        if code > 0:
            for each in texts:
                assert each in text, (rank, text)
    if codes is not None:
        assert [code for code, _ in found] == codes, found


@pytest.mark.parametrize(
    'function, args, tcp, texts',
    [
        (in_layer, ('raise',), False, [MIDDLE, 'partition 1', "layer '3'", 'forward of stage 1']),
        slow(in_layer, ('raise', True), False, [MIDDLE, 'backward of stage 1']),
        slow(in_loss, (), False, ['rank 2 (data 0, pipe 2, tensor 0)', 'stage 2']),
        slow(in_hook, (), False, [MIDDLE, "layer '2'"]),
        slow(in_layer, ('raise', False, 0), True, ['rank 0 (data 0, pipe 0, tensor 0)']),
    ],
)
def test_a_rank_raises(function, args, tcp, texts):
    """In the last row, it is the one that has the store."""
    found = endings(3, function, *args, tcp=tcp)
    named(found, 'it is broken', 'micro-batch 1', *texts)


def two_ranks(release):
    """Two ranks, of which the second one is killed, with the timeout that models have."""
    model = DistributedGPipe(
        nn.Sequential(Block(), Fault('kill')),
        [1, 1],
        chunks=2,
        mesh=init_mesh(pipe=2),
        checkpoint='never',
    )
    steps(model)


@pytest.mark.slow
def test_is_killed_with_a_long_timeout():
    """The other one finds out all the same."""
    (code, text), _ = endings(2, two_ranks, tcp=True, group_timeout=1800)
    assert code == 1 and 'rank 1 (data 0, pipe 1, tensor 0) is gone' in text


class AboutGloo(nn.Module):
    """A layer whose error looks like one of a backend."""

    def forward(self, x):
        raise RuntimeError('gloo is not what this layer likes')


def about_gloo(release):
    steps(built(AboutGloo(), timeout=timedelta(minutes=30)))


def test_an_error_of_a_layer_is_raised_unchanged():
    named(
        endings(3, about_gloo),
        f'{MIDDLE}',
        'is not what this layer likes',
        "layer '3'",
        'forward of stage 1',
    )


def recorded(release):
    model = built()
    with record(model):
        steps(model, 1)
        if torch.distributed.get_rank() == 1:
            release.wait()
            raise ValueError('it is broken')


@pytest.mark.slow
def test_a_recording_does_not_wait_for_a_rank_that_does_not_come():
    found = endings(3, recorded, stays=[1])
    named(found[::2], MIDDLE, 'is not where the others are', 'a recording')


def stays(release):
    try:
        in_layer(release, 'raise')
    except ValueError:
        release.wait()
        raise


@pytest.mark.slow
def test_raises_and_the_process_stays():
    found = endings(3, stays, stays=[1], tcp=True)
    named(found, MIDDLE, 'it is broken', "layer '3'", 'micro-batch 1', codes=[EXIT, 1, EXIT])


def exits_at_once(release):
    try:
        in_layer(release, 'raise')
    except ValueError:
        os._exit(1)


def test_raises_and_ends_without_its_exit_functions():
    found = endings(3, exits_at_once)
    named(found[::2], MIDDLE, 'raised ValueError: it is broken', codes=[1, 1])


def killed_when_made(release):
    model = built(timeout=timedelta(minutes=30))
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model)


def test_is_killed_as_soon_as_the_model_is_made():
    """By then, it has a link."""
    named(endings(3, killed_when_made)[::2], f'{MIDDLE} is gone', codes=[1, 1])


@pytest.mark.slow
def test_is_killed():
    named(endings(3, in_layer, 'kill', tcp=False), f'{MIDDLE} is gone')


@pytest.mark.slow
@pytest.mark.parametrize('tcp', [False, True])
def test_rank_0_is_killed_which_may_have_the_store(tcp):
    found = endings(3, in_layer, 'kill', False, 0, tcp=tcp)
    named(found, 'rank 0 (data 0, pipe 0, tensor 0)')


@pytest.mark.slow
def test_is_stuck():
    found = endings(3, in_layer, 'stuck', True)
    named(
        found,
        f'{MIDDLE} does not wait, but computes',
        'micro-batch 1',
        'failing.py',
        'backward of stage 1',
    )
    assert found[1][0] == EXIT


def outside(release):
    model = built()
    steps(model, 1)
    if '2' in model._modules:
        release.wait()
    steps(model, 1)


@pytest.mark.slow
def test_is_stuck_outside_of_steps():
    """It gets an error when it comes to a step."""
    found = endings(3, outside, stays=[1])
    named(found, f'{MIDDLE} is not where the others are', 'in outside', codes=[EXIT, 1, EXIT])


def in_replicas(release, *faults):
    mesh = init_mesh(data=2, pipe=2)
    layers = [Block(), Fault(faults[mesh.get_local_rank('data')])]
    steps(
        DistributedGPipe(
            nn.Sequential(*layers), [1, 1], mesh=mesh, chunks=2, timeout=LIMIT, checkpoint='never'
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize('faults', [('raise', 'kill'), ('stuck', 'stuck')])
def test_two_fail(faults):
    found = endings(4, in_replicas, *faults)
    named(
        found,
        *(['it is broken'] if 'raise' in faults else []),
        'micro-batch 1',
        "layer '1'",
        'forward of stage 1',
    )
    for rank in (0, 2):
        assert (
            'rank 1 (data 0, pipe 1, tensor 0)' in found[rank][1]
            or 'rank 3 (data 1, pipe 1, tensor 0)' in found[rank][1]
        )


@pytest.mark.slow
def test_the_group_ends_a_wait_before_the_model_does():
    """The error of a timeout is one that names the rank, too."""
    found = endings(3, in_layer, 'stuck', False, 3, timedelta(minutes=30), group_timeout=3)
    named(
        found,
        f'{MIDDLE} does not wait, but computes',
        'forward of stage 1',
        'micro-batch 1',
        "layer '3'",
    )


def fewer_layers(release):
    rank = torch.distributed.get_rank()
    DistributedGPipe(
        nn.Sequential(*[Block() for _ in range(6)]),
        [2, 2, 2 - (rank == 1)],
        mesh=init_mesh(pipe=3),
        timeout=LIMIT,
    )


def unequal_files(release):
    rows = ['0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1', '0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0']
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        Path('rows.csv').write_text(rows[torch.distributed.get_rank() % 2])
        model = DistributedGPipe(
            nn.Sequential(Block(), Block()),
            [1, 1],
            chunks=2,
            timeout=LIMIT,
            mesh=init_mesh(pipe=2),
        )
        model.step(*batch(0, 4), F.mse_loss, schedule='rows.csv')


@pytest.mark.slow
def test_ranks_have_files_of_one_name_with_other_rows():
    named(endings(2, unequal_files), 'other settings on rank 1')


def unequal_batches(release):
    rank = torch.distributed.get_rank()
    model = DistributedGPipe(
        nn.Sequential(Block(), Block()),
        [1, 1],
        chunks=2,
        timeout=LIMIT,
        mesh=init_mesh(data=2, pipe=2),
    )
    x, target = batch(0, 4)
    model.step(x, target, F.mse_loss)
    model.step(x[:, :3] if rank // 2 else x, target, F.mse_loss)


def no_input(release):
    x, target = batch(0, 4)
    built().step(None, target, F.mse_loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    'function, texts',
    [
        (fewer_layers, [MIDDLE, 'ValueError']),
        (no_input, ['rank 0 (data 0, pipe 0, tensor 0)', 'TypeError', 'in a step']),
    ],
)
def test_ranks_do_not_begin_alike(function, texts):
    named(endings(3, function), *texts)


@pytest.mark.slow
def test_replicas_have_unequal_batches():
    named(
        endings(4, unequal_batches),
        'rank 2 (data 1, pipe 0, tensor 0)',
        'forward of stage 0',
        'micro-batch 0',
        "layer '0'",
    )


def healthy(release):
    steps(built())


def test_nothing_is_printed_when_all_goes_well():
    """Whichever rank ends first, and takes the store along."""
    assert endings(3, healthy, tcp=True) == [(0, '')] * 3


def collected():
    model = built()
    steps(model, 1)
    during = watches()
    x, target = batch(0, 4)
    with pytest.raises(RuntimeError, match='evaluation'):
        model.eval().step(x, target, F.mse_loss)
    model.train()
    steps(model, 1)
    alive = weakref.ref(model)
    torch.distributed.barrier()
    del model
    gc.collect()
    return during, watches(), alive() is None


def watches():
    return sum(thread.name == 'torchgpipe watch' for thread in threading.enumerate())


def test_goes_on_after_an_error_of_all_and_leaves_no_thread():
    assert run(3, collected) == [(1, 0, True)] * 3


def alone():
    DistributedGPipe(nn.Sequential(Block()), [1], mesh=init_mesh()).step(*batch(0, 4), F.mse_loss)
    return watches()


def test_one_process_has_no_thread():
    assert run(1, alone) == [0]


class Frame:
    """A frame that notes whether the garbage collector may run while it is read."""

    def __init__(self, frame, enabled):
        self._frame = frame
        self._enabled = enabled

    def __getattr__(self, name):
        return getattr(self._frame, name)

    @property
    def f_back(self):
        self._enabled.append(gc.isenabled())
        back = self._frame.f_back
        return back and Frame(back, self._enabled)


def test_no_collection_begins_where_frames_are_read(monkeypatch):
    """In Python 3.11, the thread may leave a frame during a collection, and then it crashes."""
    current_frames, enabled = sys._current_frames, []

    def frames():
        enabled.append(gc.isenabled())
        return {thread: Frame(frame, enabled) for thread, frame in current_frames().items()}

    monkeypatch.setattr(sys, '_current_frames', frames)
    assert 'test_failures.py' in whereabouts(threading.get_ident()).text
    assert len(enabled) > 2
    assert not any(enabled)
    assert gc.isenabled()


def test_in_v0_22_a_frame_that_became_another_object_ended_the_watch(monkeypatch):
    """In Python 3.11, ``f_back`` returned a code object about once in 60 jobs of 8 ranks."""
    code = compile('', 'layer.py', 'exec')
    for name in ('f_globals', 'f_back', 'f_code', 'f_lineno'):
        frame = SimpleNamespace(f_globals={}, f_code=code, f_lineno=1, f_back=None)
        delattr(frame, name)
        monkeypatch.setattr(sys, '_current_frames', lambda frame=frame: {7: frame})
        assert whereabouts(7) == Whereabouts(False, 'a line that could not be read'), name


def test_timeouts_are_seconds_or_a_timedelta():
    for timeout in (60, 60.0, timedelta(minutes=1)):
        mesh = init_mesh(device_type='cpu', timeout=timeout)
        model = DistributedGPipe(nn.Sequential(Block()), [1], mesh=mesh, timeout=timeout)
        assert model._watch.patience() == 60, timeout
        torch.distributed.destroy_process_group()


def test_timeouts_of_other_forms_are_refused():
    for timeout, error, text in (
        ('60', TypeError, 'a number of seconds'),
        (True, TypeError, 'a number of seconds'),
        (0, ValueError, 'above zero'),
        (timedelta(0), ValueError, 'above zero'),
        (-1.0, ValueError, 'above zero'),
        (float('inf'), ValueError, 'a finite number'),
        (float('nan'), ValueError, 'a finite number'),
    ):
        for function in (init_mesh, partial(Watch, None)):
            with pytest.raises(error, match=text):
                function(timeout=timeout)


def test_a_thread_that_has_ended_has_no_line():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert whereabouts(thread.ident).text == 'no line, as its thread has ended'


def test_files_of_others_are_waited_for_less_long_after_a_failure():
    """Until the model goes on."""
    watch = DistributedGPipe(nn.Sequential(Block()), [1], mesh=init_mesh(device_type='cpu'))._watch
    assert watch.patience() == 1800
    with pytest.raises(ValueError), watch.run('a step'):
        raise ValueError('it is broken')
    assert watch.patience() == GRACE
    with watch.run('a step'):
        assert watch.patience() == 1800
    torch.distributed.destroy_process_group()


# --- monitors in one process, by a clock that the test turns
# ------------------------------------------------------------------------------------------------


class Room:
    """Monitors of several ranks, and one clock.

    Attributes:
        ended: By rank, the time at which its process would have ended.
    """

    limit = 1800.0

    def __init__(self, monkeypatch, linked, ranks):
        self.now = 100.0
        self.ended = {}
        self.where = {rank: Whereabouts(True, 'start.py:1') for rank in range(ranks)}
        self.silent = set()
        self.turning = 0
        monkeypatch.setattr(failures.time, 'monotonic', lambda: self.now)
        monkeypatch.setattr(failures, 'whereabouts', lambda *args: self.where[self.turning])
        monkeypatch.setattr(
            failures.os, '_exit', lambda code: self.ended.setdefault(self.turning, self.now)
        )
        names = {rank: f'rank {rank}' for rank in range(ranks)}
        self.progress = {rank: RankProgress() for rank in range(ranks)}
        self.monitors = {}
        for rank in range(ranks):
            point = SimpleNamespace(host=f'host {rank // 2}', fileno=linked()[0].fileno)
            self.monitors[rank] = Monitor(self.progress[rank], names, rank, self.limit, point)
            self.monitors[rank]._absent.clear()
            self.progress[rank].begin('a step')
        for rank in range(1, ranks):
            one, other = linked()
            self.monitors[0]._add(rank, one)
            self.monitors[rank]._add(0, other)

    def leave(self, rank):
        """Let a rank end, while the time passes."""
        times = count(self.now, 0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failures.time, 'monotonic', lambda: next(times))
            self.monitors[rank]._leave()

    def turn(self, seconds, period=1.0):
        """Advance the time, and return the failures that end the runs of the ranks."""
        for _ in range(round(seconds / period)):
            self.now += period
            for rank, monitor in self.monitors.items():
                if rank in self.silent or rank in self.ended:
                    continue
                self.turning = rank
                for key, _ in monitor._selector.select(0):
                    key.data()
                monitor._turn()
        return {rank: monitor._text_of_failures() for rank, monitor in self.monitors.items()}


@pytest.fixture
def room(monkeypatch, pair):  # noqa: F811
    """Return a function that makes a room."""
    rooms = []

    def make(ranks):
        rooms.append(Room(monkeypatch, pair, ranks))
        return rooms[-1]

    yield make
    for room in rooms:
        for monitor in room.monitors.values():
            monitor._wake_end.close()
            monitor._bell.close()
            monitor._selector.close()


def test_a_rank_whose_layer_holds_pythons_lock_is_not_gone(room):
    room = room(3)
    room.where[1] = Whereabouts(False, 'layer.py:1')
    room.turn(5)
    room.silent = {1}
    assert not any(room.turn(room.limit - 10).values()) and not room.ended
    room.silent = set()
    for progress in room.progress.values():
        progress.begin('a step')
    assert not any(room.turn(room.limit - 10).values()) and not room.ended


@pytest.mark.parametrize('stuck', [0, 1])
def test_a_stuck_rank_is_named_when_others_have_waited_for_long(room, stuck):
    room = room(3)
    room.where[stuck] = Whereabouts(False, 'layer.py:1')
    room.turn(5)
    start = room.now
    assert not any(room.turn(room.limit - 10).values())
    texts = room.turn(30)
    for rank in range(3):
        assert f'rank {stuck} does not wait, but computes in a step, layer.py:1' in texts[rank]
        assert room.limit - 10 < room.ended[rank] - start < room.limit + GRACE + 5


def test_a_stuck_rank_that_cannot_answer_is_named(room):
    room = room(3)
    room.turn(5)
    room.silent = {1}
    texts = room.turn(room.limit + 30)
    assert 'rank 1 does not answer' in texts[0] and 'rank 2 ' not in texts[0]
    assert {*room.ended} == {0, 2}


def test_a_rank_that_computes_is_not_ended_by_the_failure_of_another(room):
    room = room(3)
    room.where[2] = Whereabouts(False, 'layer.py:1')
    room.progress[1].raised = 1, 'ValueError: it is broken'
    room.progress[1].end()
    texts = room.turn(60)
    assert {*room.ended} == {0}
    assert texts[0] == texts[2] == 'rank 1 raised ValueError: it is broken'
    room.where[2] = Whereabouts(True, 'start.py:1')
    room.turn(10)
    assert {*room.ended} == {0, 2}


def test_a_rank_that_goes_on_after_a_failure_of_an_earlier_run_is_left_alone(room):
    """All ranks raise the error of a wrong argument, and take the next step."""
    room = room(3)
    for progress in room.progress.values():
        progress.raised = progress.run, 'ValueError: wrong'
        progress.end()
    room.turn(3)
    for progress in room.progress.values():
        progress.begin('a step')
    assert not any(room.turn(room.limit - 10).values()) and not room.ended


def test_an_error_is_named_before_the_end_of_another_process(room):
    room = room(4)
    room.monitors[3]._links[0].close()
    assert 'rank 3 is gone' in room.turn(1)[0]
    room.progress[1].raised = 1, 'ValueError: it is broken'
    texts = room.turn(3)
    assert texts[0] == texts[2] == 'rank 1 raised ValueError: it is broken'


def test_the_end_of_a_rank_ends_later_runs_only(room):
    room = room(3)
    monitor = room.monitors[1]
    monitor._links[0].send('left', 1)
    room.silent = {1}
    assert not any(room.turn(30).values()) and not room.ended
    for rank in (0, 2):
        room.progress[rank].begin('a step')
    texts = room.turn(20)
    assert texts[0] == texts[2] == 'rank 1 has ended, and takes no part in later steps and calls'
    assert {*room.ended} == {0, 2}


def link_later(room, pair):  # noqa: F811
    """Take the link of the last rank away; return a function that lets the first one connect."""
    first, last = room.monitors[0], room.monitors[2]
    first._selector.unregister(first._links.pop(2))
    first._absent.add(2)
    last._selector.unregister(last._links.pop(0))
    one, other = pair()

    def connect(rank):
        last._add(0, other)
        return one, 'host 1'

    return connect


def test_a_rank_that_is_linked_later_hears_of_earlier_failures(room, pair):  # noqa: F811
    room = room(3)
    first = room.monitors[0]
    connect = link_later(room, pair)
    first._point.connect = lambda rank: None
    room.progress[1].raised = 1, 'ValueError: it is broken'
    assert not room.turn(3)[2]
    first._point.connect = connect
    first._connect()
    assert room.turn(2)[2] == 'rank 1 raised ValueError: it is broken'


def test_a_rank_that_ends_waits_for_ranks_that_are_not_linked_yet(room, pair):  # noqa: F811
    room = room(3)
    first = room.monitors[0]
    first._point.connect = link_later(room, pair)
    room.leave(0)
    assert room.monitors[2]._links[0].receive()[-1] == ['left', 1]


def test_the_first_rank_passes_errors_on_until_others_have_ended(room):
    room = room(3)
    room.progress[1].raised = 1, 'ValueError: it is broken'
    room.monitors[1]._tell_error()
    room.leave(0)
    kinds = [message[0] for message in room.monitors[2]._links[0].receive()]
    assert kinds == ['left', 'failure']


def test_an_error_has_been_told_when_it_is_raised(room):
    """Its process may then end without exit functions."""
    room = room(2)
    monitor = room.monitors[1]
    monitor._told = SimpleNamespace(
        clear=lambda: None, set=lambda: None, wait=lambda seconds: room.turn(1)
    )
    monitor.tell('ValueError: it is broken')
    ((kind, rank, text, *_),) = room.monitors[0]._links[1].receive()
    assert (kind, rank, text) == ('failure', 1, 'rank 1 raised ValueError: it is broken')


def linked():
    watch = failures.Watch(init_mesh(pipe=2))
    return watch._monitor.linked.is_set()


def test_a_rank_is_linked_when_it_is_watched():
    assert run(2, linked) == [True] * 2


def test_a_rank_that_goes_on_while_others_are_asked_is_left_alone(room):
    room = room(3)
    room.where[1] = Whereabouts(False, 'layer.py:1')
    room.turn(5)
    room.silent = {1}
    room.turn(room.limit - 4)
    assert room.monitors[0]._inquiry is not None
    for rank in (0, 2):
        room.progress[rank].count += 1
    assert not any(room.turn(room.limit - 10).values()) and not room.ended


def test_of_a_lost_host_without_a_known_address_one_rank_is_named(room):
    room = room(4)
    room.monitors[2]._lose(0, Unreachable('timed out'))
    text = room.turn(1)[2]
    assert text.startswith('rank 0 cannot be reached: their host of unknown address')


def test_all_ranks_of_a_lost_host_are_named(room):
    room = room(4)
    for rank, monitor in room.monitors.items():
        monitor._hosts = {other: f'host {other // 2}' for other in room.monitors}
        if rank // 2:
            monitor._lose(0, Unreachable('timed out'))
    room.monitors[0]._lose(2, Unreachable('timed out'))
    texts = room.turn(3)
    for rank in range(4):
        others = 'rank 2, rank 3' if rank < 2 else 'rank 0, rank 1'
        assert texts[rank].startswith(f'{others} cannot be reached: their host host')


def test_a_rank_that_waits_as_all_do_is_listed_with_its_position(room):
    room = room(2)
    texts = room.turn(room.limit + 10)
    for rank in range(2):
        assert f'rank {rank} waits in a step, start.py:1, for' in texts[0]


def test_an_error_in_a_task_does_not_end_the_watch(room, monkeypatch, capsys):
    """It is printed once."""
    room = room(2)

    def fails(*args):
        raise Injected('no')

    monkeypatch.setattr(failures, 'whereabouts', fails)
    monitor = room.monitors[0]
    for _ in range(3):
        monitor._attempt(monitor._turn)
    text = capsys.readouterr().err
    assert text.count('the watch of rank 0 continues after') == 1 and 'Injected: no' in text


class Injected(Exception):
    """An error in the watch."""


def test_a_stuck_process_ends_also_without_stderr(room, monkeypatch):
    room = room(2)
    room.where[1] = Whereabouts(False, 'layer.py:1')
    monkeypatch.setattr(sys, 'stderr', None)
    room.turn(room.limit + 30)
    assert 0 in room.ended


def test_a_busy_rank_is_blamed_before_ranks_that_wait():
    waits = State(3, 9, 'waits', 'a step', 'start.py:1', 9.0)
    for state, expected in (
        (None, 'does not answer'),
        (State(3, 9, 'computes', 'a step', 'layer.py:1', 9.0), 'does not wait, but computes in'),
        (State(2, 9, 'outside', '', 'train.py:1', 9.0), 'is not where the others are, but is'),
    ):
        states = {0: waits} if state is None else {0: waits, 1: state}
        ((rank, text),) = blame(states, [0, 1], 3).items()
        assert rank == 1 and text.startswith(expected), state
    assert [*blame({0: waits, 1: waits}, [0, 1], 3)] == [0, 1]


def test_descriptions_of_actions_and_errors():
    assert describe(None) == ''
    assert describe(Action(1, 'W', 2)) == 'backward to weights of stage 1, micro-batch 2'
    assert describe(UnitAction('UNSHARD', 2)) == 'gather of the parameters of stage 2'
    error = ValueError('x' * 10000)
    assert text_of(error).startswith('ValueError: xxx') and len(text_of(error)) == 4000
