"""Ranks that raise, die or are stuck: all end, and name the rank, its place and its action."""

import gc
import os
import sys
import threading
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.failing import Fault, endings
from tests.distributed.models import Block, batch
from tests.marks import slow
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.distributed import watch as watchers
from torchgpipe.distributed.reports import Record
from torchgpipe.distributed.watch import (
    EXIT,
    GRACE,
    SILENCE,
    Own,
    WatchThread,
    Whereabouts,
    whereabouts,
)
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
    assert 'test_watch.py' in whereabouts(threading.get_ident()).text
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


class Injected(Exception):
    """An error in a line of the watch."""


class Injector:
    """Raises in one line of the watch after the other, once each; as ``sys.settrace`` calls it."""

    def __init__(self):
        self.lines, self.next, self.raised = [], None, set()

    def __call__(self, frame, event, argument):
        names = ('loop', '_attempt', 'text_of')
        is_watch = frame.f_code.co_filename.endswith(('distributed/watch.py', 'reports.py'))
        return self.line if is_watch and frame.f_code.co_name not in names else None

    def line(self, frame, event, argument):
        """Raise if this is the next line."""
        place = frame.f_code.co_filename, frame.f_lineno
        if event == 'line' and place not in self.lines:
            self.lines.append(place)
        if event == 'line' and place == self.next:
            self.next = None
            self.raised.add(place)
            raise Injected(f'line {place[1]}')
        return self.line


@pytest.mark.slow
def test_no_error_in_a_line_of_the_watch_ends_it(monkeypatch, capsys):
    """Each line raises in some of 4,000 turns; later, a failed rank is still named.

    Each forty turns are another action of the step, which waits longer than it may.
    """
    monkeypatch.setattr(Room, 'limit', 20.0)
    room, injector, generator, turns = Room(monkeypatch, 3), Injector(), Random(0), 0
    seen = set()
    monkeypatch.setattr(watchers, 'whereabouts', whereabouts)
    watcher, own = room.watchers[0], room.own[0]

    def wait(seconds):
        """Take the other ranks' turns, and choose the next line."""
        nonlocal turns
        turns += 1
        room.now += 1
        own.count = turns // 40
        situation = own.count % 4
        own.error = '' if situation == 1 else None
        own.inside = situation != 2
        watcher._answered.clear()
        room.said[1] = record_of(beat=0 if situation == 3 else turns, run=own.run)
        room.said[2] = record_of(beat=turns, run=own.run)
        lines = [x for x in injector.lines if x not in injector.raised] or injector.lines
        injector.next = generator.choice(lines) if lines else None
        watcher._stops = turns == 4_000
        if watcher._stops:
            seen.update(injector.lines)
        sys.settrace(injector)  # An error in it has ended the tracing.

    def record_of(beat, run, state='waits', error='', raised_in=0):
        return Record(beat, run, state, 1.0, 'a step', 'line', error, raised_in, '')

    monkeypatch.setattr(watcher, '_wake', SimpleNamespace(wait=wait, clear=int, set=int))
    monkeypatch.setattr(watchers.time, 'monotonic', lambda: room.now)
    before, room.turning = sys.gettrace(), 0
    sys.settrace(injector)
    try:
        watcher.loop()
    finally:
        sys.settrace(before)
    assert turns == 4_000
    assert seen == injector.raised and len(seen) > 60
    text = capsys.readouterr().err
    assert 'the watch of rank 0 continues after tests.distributed.test_watch.Injected' in text

    own.error, own.inside, own.thread = '', True, 0
    watcher._answered.clear()
    for beat in range(20):
        room.said[1] = record_of(beat, own.run, 'failed', 'ValueError: it is broken', own.run)
        room.now += 1
        watcher.turn(room.now)
    assert 'rank 1 raised ValueError: it is broken' in own.found


def test_a_stuck_process_ends_also_without_stderr(monkeypatch):
    room = Room(monkeypatch, 2)
    room.where[1] = Whereabouts(False, 'layer.py:1')
    monkeypatch.setattr(sys, 'stderr', None)
    room.turn(room.limit + 30)
    assert 0 in room.ended


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
        for function in (init_mesh, partial(watchers.Watch, None)):
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


# --- by a clock that the test turns
# ------------------------------------------------------------------------------------------------


class Wall:
    """A board without a store."""

    gone = goes_with_us = False

    def __init__(self, room, rank):
        self.room, self.rank = room, rank

    def say(self, record, news):
        """Write it down."""
        self.room.said[self.rank] = record
        self.room.news += news
        return self.room.news

    def leave(self, record, lasts):
        """Write it down."""
        self.say(record, True)

    def read(self):
        """Return the entries of the others."""
        return {rank: each for rank, each in self.room.said.items() if rank != self.rank}


class Room:
    """Watchers of several ranks with the timeout that models have, and one clock."""

    limit = 1800.0

    def __init__(self, monkeypatch, ranks):
        self.said, self.news, self.now, self.ended = {}, 0, 100.0, {}
        self.where = {rank: Whereabouts(True, 'start.py:1') for rank in range(ranks)}
        self.own = {rank: Own() for rank in range(ranks)}
        self.watchers, self.silent = {}, set()
        monkeypatch.setattr(
            watchers, 'names_of', lambda mesh: {rank: f'rank {rank}' for rank in range(ranks)}
        )
        monkeypatch.setattr(watchers, 'whereabouts', lambda *args: self.where[self.turning])
        monkeypatch.setattr(watchers, 'Board', lambda names: Wall(self, self.turning))
        monkeypatch.setattr(torch.distributed, 'get_rank', lambda: self.turning)
        monkeypatch.setattr(
            watchers.os, '_exit', lambda code: self.ended.setdefault(self.turning, self.now)
        )
        for rank in range(ranks):
            self.turning = rank
            self.watchers[rank] = WatchThread(self.own[rank], None, self.limit)
            self.own[rank].begin('a step')

    def turn(self, seconds, period=1.0):
        """Advance the time, and return the findings of the watchers."""
        for _ in range(round(seconds / period)):
            self.now += period
            for rank, each in self.watchers.items():
                if rank not in self.silent and rank not in self.ended:
                    self.turning = rank
                    each.turn(self.now)
        return {rank: each._found for rank, each in self.watchers.items()}


def test_a_rank_whose_layer_holds_pythons_lock_is_not_gone(monkeypatch):
    room = Room(monkeypatch, 3)
    room.where[1] = Whereabouts(False, 'layer.py:1')
    room.turn(5)
    room.silent = {1}
    assert not any(room.turn(room.limit - 10).values()) and not room.ended
    room.silent = set()
    for own in room.own.values():
        own.begin('a step')
    assert not any(room.turn(room.limit - 10).values()) and not room.ended


@pytest.mark.parametrize('silent', [False, True])
def test_a_stuck_rank_is_named_when_others_have_waited_for_long(monkeypatch, silent):
    room = Room(monkeypatch, 3)
    room.where[1] = Whereabouts(False, 'layer.py:1')
    room.turn(5)
    room.silent = {1} if silent else set()
    start = room.now
    assert not any(room.turn(room.limit - 10).values())
    found = room.turn(30)
    for rank in (0, 2):
        assert 'rank 1 ' in found[rank] and 'layer.py:1' in found[rank]
        assert room.limit - 10 < room.ended[rank] - start < room.limit + SILENCE + GRACE + 3
    assert (1 in room.ended) is not silent


def test_a_dead_rank_is_distinguished_from_waiting_ranks(monkeypatch):
    """Also where no backend says so, and it has waited as well, before."""
    room = Room(monkeypatch, 3)
    room.turn(5)
    room.silent = {1}
    found = room.turn(room.limit + 30)
    assert 'rank 1 is gone' in found[0] and 'rank 2 ' not in found[0]
    assert {*room.ended} == {0, 2}


def test_a_rank_that_is_gone_is_named_within_ten_seconds_also_far_from_it(monkeypatch):
    """The backend tells its neighbour, and that one the others."""
    room = Room(monkeypatch, 4)
    room.turn(5)
    room.silent, start = {1}, room.now
    room.own[0].error = ''  # The backend has raised something.
    room.watchers[0]._answered.clear()
    while not room.watchers[0]._answered.is_set():
        room.turn(0.1, 0.1)
    assert room.own[0].found.startswith('rank 1 is gone')
    room.own[0].end()
    found = room.turn(10)
    for rank in (2, 3):
        assert 'rank 0 has found that rank 1 is gone' in found[rank]
        assert room.ended[rank] - start < 10
