"""Recorded timelines: every action is there, in its lane, in an order that is possible."""

import math
from importlib import import_module

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.clock import Clock, Timed
from tests.devices import ACCELERATOR, devices
from tests.marks import MODES
from torchgpipe import GPipe
from torchgpipe.base.context import context
from torchgpipe.engine import workers as workers_module
from torchgpipe.engine.observer import observers
from torchgpipe.engine.streams import current_stream
from torchgpipe.schedule import make
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.timeline import record, recorder

M, N = 4, 3

#: How many micro-batches are computed again.
AGAIN = {'never': 0, 'except_last': M - 1, 'always': M}


class Broken(nn.Module):
    """Raise for some micro-batch, in forward or in backward."""

    def __init__(self, when):
        super().__init__()
        self.when = when
        self.times = 0

    def forward(self, x):
        self.times += 1
        if self.when == 'forward' and self.times == 3:
            raise ValueError('broken')
        y = x * 1
        if self.when == 'backward' and self.times == 3:
            y.register_hook(self.fail)
        return y

    def fail(self, grad):
        """Fail in backward."""
        raise ValueError('broken')


def broken(when):
    """Return layers of which the fourth is broken."""
    first, third, fifth = (nn.Linear(8, 8) for _ in range(3))
    return [first, nn.Tanh(), third, Broken(when), fifth, nn.Tanh()]


def pipeline(devices, mode='except_last', n=N, layers=(), **options):
    """Make a pipeline of two layers a partition, or of others."""
    torch.manual_seed(0)
    layers = layers or [layer for _ in range(n) for layer in (nn.Linear(8, 8), nn.Tanh())]
    places = devices(n) if callable(devices) else devices
    return GPipe(
        nn.Sequential(*layers),
        [len(layers) // n] * n,
        devices=places,
        chunks=M,
        checkpoint=mode,
        **options,
    )


def batch(model):
    """Return an input for it."""
    torch.manual_seed(1)
    return torch.rand(2 * M, 8, device=model.devices[0])


def call(model):
    """Do a step by the plain call."""
    model(batch(model)).sum().backward()


def step(model, **options):
    """Do a step by a schedule."""
    model.step(batch(model), None, lambda output, _: output.sum(), normalizer=1, **options)


def recorded(model, function, **options):
    """Record a step."""
    with record(model) as timeline:
        function(model, **options)
    return timeline


def spans(timeline):
    """Return when actions begin and end by their text, all boxes of one taken together."""
    found = {}
    for _, action, start, end in timeline.actions:
        before = found.get(str(action), (start, end))
        found[str(action)] = min(before[0], start), max(before[1], end)
    return found


def check(timeline, again, halves=False):
    """Check that all actions are recorded, each after the actions that it waits for."""
    found = spans(timeline)
    back = 'I' if halves else 'B'
    kinds = ['F', 'I', 'W'] if halves else ['F', 'B']
    expected = {f'{j}{kind}{i}' for i in range(M) for j in range(N) for kind in kinds}
    assert set(found) == expected | {f'{j}R{i}' for i in range(again) for j in range(N)}
    for i in range(M):
        for j in range(N):
            forward, backward = found[f'{j}F{i}'], found[f'{j}{back}{i}']
            assert forward[1] <= backward[0]
            if j:
                assert found[f'{j - 1}F{i}'][1] <= forward[0]
                assert backward[0] <= found[f'{j - 1}{back}{i}'][0]
            if halves:
                assert backward[1] <= found[f'{j}W{i}'][0]
            if i < again:
                assert forward[1] <= found[f'{j}R{i}'][0] <= backward[0]
    assert timeline.start == 0 and 0 < timeline.utilisation <= 1


@devices
def test_the_plain_call(devices):
    for mode in MODES:
        model = pipeline(devices, mode)
        timeline = recorded(model, call)
        check(timeline, AGAIN[mode])
        for kind in 'FR':
            boxes = [each.action for each in timeline.actions if each.action.kind == kind]
            assert len(boxes) == len(set(boxes)), mode


@devices
def test_a_step(devices):
    for mode in MODES:
        for schedule in ['gpipe', '1f1b']:
            timeline = recorded(pipeline(devices, mode), step, schedule=schedule)
            check(timeline, AGAIN[mode])
            actions = [each.action for each in timeline.actions]
            assert len(actions) == len(set(actions)), (mode, schedule)


@devices
def test_a_step_of_halves(devices):
    for mode in MODES:
        timeline = recorded(pipeline(devices, mode), step, schedule='zb-h1')
        check(timeline, AGAIN[mode], halves=True)


@devices
def test_lanes_are_devices(devices):
    a, b = devices.distinct(2)
    model = pipeline([a, b, a, b], 'never', n=4)
    for function, options in ((call, {}), (step, {'schedule': 'interleaved'})):
        timeline = recorded(model, function, **options)
        assert timeline.devices == (a, b)
        places = {(each.device, each.action.stage) for each in timeline.actions}
        assert places == {(0, 0), (1, 1), (0, 2), (1, 3)}
        # Wide enough for the label of the shortest action, however slow the others are.
        shortest = min(each.end - each.start for each in timeline.actions)
        assert '2F0' in timeline.text(math.ceil(5 * timeline.seconds / shortest))


@devices
def test_boxes_of_a_lane_follow_its_row(devices):
    devices.distinct(N)
    timeline = recorded(pipeline(devices, 'never'), step)
    for lane, row in enumerate(make('1f1b', N, M).rows):
        boxes = [each for each in timeline.actions if each.device == lane]
        assert [each.action for each in boxes] == [*row]
        assert all(one.end <= other.start for one, other in zip(boxes, boxes[1:]))


@devices
def test_inference(devices):
    model = pipeline(devices).eval()
    with record(model) as timeline, torch.no_grad():
        model(batch(model))
    assert sorted(map(str, (each.action for each in timeline.actions))) == sorted(
        f'{j}F{i}' for i in range(M) for j in range(N)
    )


@pytest.fixture
def clock(monkeypatch):
    """Let the recorder look at a clock that the layers move."""
    clock = Clock()
    monkeypatch.setattr(import_module('torchgpipe.timeline.recorder'), 'time', clock)
    return clock


def timed_layers(clock):
    """Return layers that take 1 and 2 seconds in forward, and 3 and 5 in backward."""
    return [Timed(clock, lambda _: 1.0, lambda _: 3.0), Timed(clock, lambda _: 2.0, lambda _: 5.0)]


def boxes_of(timeline):
    """Return text, start and end of boxes."""
    return [(str(action), start, end) for _, action, start, end in timeline.actions]


def test_times_of_the_plain_call(clock):
    model = pipeline(['cpu', 'cpu'], 'except_last', 2, timed_layers(clock))
    model.chunks = 2
    clock.now = 100.0
    with record(model) as timeline:
        loss = model(torch.ones(2, 1)).sum()
        clock.now += 10
        loss.backward()
        clock.now += 10  # Such as an optimizer: no action runs.
    assert boxes_of(timeline) == [
        ('0F0', 0.0, 1.0),
        ('1F0', 1.0, 3.0),
        ('0F1', 3.0, 4.0),
        ('1F1', 4.0, 6.0),
        ('1B1', 16.0, 21.0),
        ('0B1', 21.0, 24.0),
        ('1R0', 24.0, 26.0),
        ('1B0', 26.0, 31.0),
        ('0R0', 31.0, 32.0),
        ('0B0', 32.0, 35.0),
    ]
    assert timeline.seconds == 35 and timeline.utilisation == 25 / 35


def test_times_of_a_step(clock):
    model = pipeline(['cpu', 'cpu'], 'except_last', 2, timed_layers(clock))
    model.chunks = 2

    def loss_fn(output, _):
        clock.now += 0.5
        return output.sum()

    with record(model) as timeline:
        model.step(torch.ones(2, 1), None, loss_fn, normalizer=1, schedule='gpipe')
    assert boxes_of(timeline) == [
        ('0F0', 0.0, 1.0),
        ('1F0', 1.0, 3.5),
        ('0F1', 3.5, 4.5),
        ('1F1', 4.5, 7.0),
        ('1B1', 7.0, 12.0),
        ('0B1', 12.0, 15.0),
        ('1R0', 15.0, 17.0),
        ('1B0', 17.0, 22.0),
        ('0R0', 22.0, 23.0),
        ('0B0', 23.0, 26.0),
    ]


@devices
def test_recording_changes_no_number(devices):
    for function in [call, step]:
        models = [pipeline(devices, 'except_last') for _ in range(2)]
        recorded(models[0], function)
        function(models[1])
        for one, other in zip(models[0].parameters(), models[1].parameters()):
            assert torch.equal(one.grad, other.grad), function


@devices
def test_recording_asks_in_no_layers_name(devices):
    """Attributes of a layer that asks in which pass it is are left as it sets them."""
    context.asked = False
    recorded(pipeline(devices, 'always'), call)
    assert not context.asked


def assert_nothing_observes(model):
    """Check that no recorder is left."""
    engine = model._engine
    assert observers == [] and engine.observer is None
    assert all(partition.observer is None for partition in engine.partitions)


@devices
def test_an_error_leaves_nothing_behind(devices):
    for function in [call, step]:
        for when in ['forward', 'backward']:
            model = pipeline(devices, 'never', layers=broken(when))
            timeline = None
            with pytest.raises(ValueError, match='broken'):
                with record(model) as timeline:
                    function(model)
            assert timeline.actions == (), (function, when)
            assert_nothing_observes(model)
            check(recorded(model, function), 0)


@pytest.mark.parametrize('mode, again', [('never', 0), ('always', M)])
@devices
def test_a_graph_that_lives_longer_has_no_hook(devices, mode, again, monkeypatch):
    model = pipeline(devices, mode)
    with record(model) as timeline:
        loss = model(batch(model)).sum()
    assert_nothing_observes(model)
    assert {each.action.kind for each in timeline.actions} == {'F'}
    monkeypatch.setattr(recorder, 'stamp', None)
    loss.backward()
    call(model)


@devices
def test_two_backward_passes(devices):
    """Of one graph that is retained: each has its boxes."""
    model = pipeline(devices, 'never')
    with record(model) as timeline:
        loss = model(batch(model)).sum()
        loss.backward(retain_graph=True)
        between = len(timeline.actions)
        loss.backward()
    assert between == 0
    backward = [each.action for each in timeline.actions if each.action.kind == 'B']
    assert all(backward.count(action) >= 2 for action in backward)
    check(timeline, 0)


@devices
def test_a_step_that_fails_within_a_recording(devices):
    model = pipeline(devices, 'never', layers=broken('forward'))
    with record(model) as timeline:
        with pytest.raises(ValueError, match='broken'):
            step(model)
        call(model)
    found = [str(each.action) for each in timeline.actions]
    assert {f'{j}{kind}{i}' for i in range(M) for j in range(N) for kind in 'FB'} == {*found}


@pytest.mark.parametrize('mode', ['never', ['never', 'always']])
def test_a_backward_that_fails_within_a_recording(clock, mode):
    layers = [Broken('backward'), Timed(clock, lambda _: 2.0, lambda _: 5.0)]
    layers[0].times = 2
    model = pipeline(['cpu', 'cpu'], mode, 2, layers)
    x = torch.ones(1, 1, requires_grad=True)
    with record(model) as timeline:
        with pytest.raises(ValueError, match='broken'):
            model(x).sum().backward()
        clock.now += 10
        model(x).sum().backward()
    assert [
        end - start for _, action, start, end in timeline.actions if action == (1, 'B', 0)
    ] == [5.0]


@skippable(stash=['skip'])
class Stash(nn.Linear):
    """Stash a function of the input, whose gradient comes before the output's gradient."""

    def forward(self, x):
        yield stash('skip', x * 2)
        return super().forward(x)


@skippable(pop=['skip'])
class Pop(nn.Linear):
    """Add the stashed tensor, or return only it."""

    def __init__(self, only=False):
        super().__init__(8, 8)
        self.only = only

    def forward(self, x):
        skip = yield pop('skip')
        return skip if self.only else super().forward(x) + skip


@devices
def test_skips(devices):
    for function in [call, step]:
        layers = [nn.Linear(8, 8), nn.Tanh(), Stash(8, 8), nn.Tanh(), nn.Linear(8, 8), Pop()]
        check(recorded(pipeline(devices, 'except_last', layers=layers), function), M - 1)


def test_the_backward_of_a_cell_ends_where_a_skip_comes_in():
    """Beyond are the nodes of the partition that stashed it."""
    layers = [nn.Linear(8, 8), Stash(8, 8), nn.Linear(8, 8), Pop()]
    gpipe = GPipe(
        nn.Sequential(*layers), [2, 1, 1], devices=['cpu'] * 3, chunks=1, checkpoint='never'
    )
    with record(gpipe) as timeline:
        gpipe(torch.rand(2, 8)).sum().backward()
    kinds = [(action.kind, action.stage) for _, action, *_ in timeline.actions]
    assert sorted(kinds) == [(kind, j) for kind in 'BF' for j in range(3)]


@devices
def test_only_a_skip_has_a_gradient(devices):
    for function in [call, step]:
        layers = [
            nn.Linear(8, 8),
            Stash(8, 8),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Tanh(),
            Pop(only=True),
        ]
        found = spans(recorded(pipeline(devices, 'never', layers=layers), function))
        assert set(found) >= {f'{j}F{i}' for j in range(N) for i in range(M)}, function


class Pair(nn.Linear):
    """Return a tensor, and one beside it; forwarded if it comes from another such layer."""

    def forward(self, value):
        x, y = value if isinstance(value, tuple) else (value, None)
        x = super().forward(x)
        return x, x * 2 if y is None else y


class Sum(nn.Module):
    """Add both."""

    def forward(self, value):
        return value[0] + value[1]


@devices
def test_several_tensors_between_cells(devices):
    for places in (devices, [devices.first] * N):
        model = pipeline(
            places,
            'never',
            layers=[nn.Tanh(), Pair(8, 8), Pair(8, 8), Pair(8, 8), Sum(), nn.Linear(8, 8)],
        )
        with record(model) as timeline:
            loss = model(batch(model)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        check(timeline, 0)
        for lane in range(len(timeline.devices)):
            boxes = [each for each in timeline.actions if each.device == lane]
            assert all(one.end <= other.start for one, other in zip(boxes, boxes[1:]))
        if devices.are_accelerators:
            assert len(timeline.actions) == 3 * M * N
        check(recorded(model, step), 0)


@pytest.mark.accelerator
def test_copies():
    for function in [call, step]:
        model = pipeline([f'{ACCELERATOR}:0', 'cpu', f'{ACCELERATOR}:0'], 'always')
        timeline = recorded(model, function)
        assert timeline.devices == (f'{ACCELERATOR}:0', 'cpu:0'), function
        assert sorted(each[:3] for each in timeline.copies) == sorted(
            [(0, 1, i) for i in range(M)] * 2 + [(1, 0, i) for i in range(M)] * 2
        ), function
        assert all(each.start <= each.end for each in timeline.copies), function


@pytest.mark.accelerator
def test_copies_on_streams_that_are_the_same(monkeypatch):
    """A pool of streams reuses them when all are given out."""
    monkeypatch.setattr(workers_module, 'new_stream', current_stream)
    timeline = recorded(pipeline([f'{ACCELERATOR}:0', 'cpu'], 'never', 2), call)
    assert [each.micro_batch for each in timeline.copies] == [*range(M), *reversed(range(M))]


@pytest.mark.sim
def test_clocks_start_together():
    """However busy devices are when the recording begins, and when it ends."""
    model = pipeline(['sim:0', 'sim:1', 'sim:2'], 'never')
    call(model)
    with torch.accelerator.device_index(1):
        accelerator.sleep(50_000)
    check(recorded(model, call), 0)


@pytest.mark.accelerator
def test_copies_of_shared_tensors_belong_to_no_micro_batch():
    if torch.accelerator.device_count() < 2:
        pytest.skip('needs 2 accelerators')
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers[1].weight = layers[0].weight
    model = pipeline([f'{ACCELERATOR}:0', f'{ACCELERATOR}:1'], 'never', 2, layers)
    assert {each.micro_batch for each in recorded(model, call).copies} == {*range(M)}
