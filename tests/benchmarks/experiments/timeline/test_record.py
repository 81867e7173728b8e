"""Recorded timelines: every cell once, in an order that is possible."""
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.experiments import timeline
from benchmarks.experiments.timeline.record import Box, Recorder, record, utilisation
from benchmarks.harness import epochs
from benchmarks.harness.campaign import campaign
from benchmarks.harness.published import UNET_TIMELINE
from tests.benchmarks import tiny
from tests.devices import ACCELERATOR
from torchgpipe import GPipe
from torchgpipe.stream import CPUStream


def boxes_of(checkpoint, devices, m=4):
    """Record a step of a pipeline of three partitions."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    gpipe = GPipe(model, [2, 2, 2], devices=devices, chunks=m, checkpoint=checkpoint)
    x = torch.rand(2 * m, 8, device=gpipe.devices[0])
    return record(gpipe, lambda: gpipe(x).sum().backward())


def cells(boxes, kind):
    """Give (i, j) of the boxes of a kind, by start."""
    return [(box.i, box.j) for box in boxes if box.kind == kind]


@pytest.mark.parametrize('devices', [['cpu'] * 3, ['cpu:0', 'cpu:1', 'cpu:2']])
@pytest.mark.parametrize('checkpoint, again', [('never', 0), ('except_last', 3), ('always', 4)])
def test_each_cell_has_its_boxes(devices, checkpoint, again):
    boxes = boxes_of(checkpoint, devices)
    everything = {(i, j) for i in range(4) for j in range(3)}
    for kind, expected in (('forward', everything), ('backward', everything),
                           ('recomputation', {(i, j) for i, j in everything if i < again})):
        found = cells(boxes, kind)
        assert set(found) == expected
        assert kind == 'backward' or len(found) == len(expected)
    at = {(box.kind, box.i, box.j): box for box in reversed(boxes)}  # the first of each
    for i, j in everything:
        if j:
            assert at['forward', i, j - 1].end <= at['forward', i, j].start
            assert at['backward', i, j].start <= at['backward', i, j - 1].start
        if i:
            assert at['forward', i - 1, j].end <= at['forward', i, j].start
            assert at['backward', i, j].start <= at['backward', i - 1, j].start
        if i < again:
            assert at['recomputation', i, j].end <= at['backward', i, j].start
    assert boxes[0].start == 0 and all(box.start < box.end for box in boxes)
    assert 0 < utilisation(boxes, devices) <= 1
    assert_nothing_at_once([box for box in boxes if box.kind != 'forward'])


def assert_nothing_at_once(boxes):
    """Check that what one thread has done does not overlap."""
    assert all(one.end <= other.start for one, other in zip(boxes, boxes[1:]))


@pytest.mark.parametrize('checkpoint', ['always', 'never'])
def test_cells_that_take_turns_in_backward_do_not_overlap(checkpoint):
    gpipe = GPipe(tiny.UNET.build(), [20, 20, 25], devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=8,
                  checkpoint=checkpoint)
    x = torch.rand(8, 3, 64, 64)
    boxes = record(gpipe, lambda: gpipe(x).sum().backward())
    assert_nothing_at_once([box for box in boxes if box.kind != 'forward'])
    # They do take turns, or this test would show nothing.
    assert len(cells(boxes, 'backward')) > 3 * 8


def test_nothing_stays_behind():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    gpipe = GPipe(model, [1, 1], devices=['cpu', 'cpu'])
    boxes = record(gpipe, lambda: gpipe(torch.rand(2, 2)).sum().backward())
    gpipe(torch.rand(2, 2)).sum().backward()
    assert set(cells(boxes, 'backward')) == {(0, 0), (0, 1)}
    assert len(cells(boxes, 'forward')) == 2  # not those of the second call


def test_utilisation():
    boxes = [Box('forward', 0, 0, 0., 1.), Box('forward', 1, 0, 1., 2.),
             Box('copy', 0, 0, 0., 2.), Box('backward', 1, 0, 2., 3.),
             Box('backward', 0, 0, 3., 4.)]
    assert utilisation(boxes, ['a', 'b']) == .5
    assert utilisation(boxes, ['a', 'a']) == 1


def test_a_copy_within_a_memory_is_none():
    recorder = Recorder([torch.device('cpu')])
    with recorder.recording():
        assert recorder.copy(torch.ones(1), CPUStream, CPUStream, CPUStream) == 1
    assert recorder.boxes() == []


@pytest.mark.accelerator
def test_copies_and_streams():
    boxes = boxes_of('always', [f'{ACCELERATOR}:0', 'cpu', f'{ACCELERATOR}:0'])
    assert {box.kind for box in boxes} == {'forward', 'recomputation', 'backward', 'copy'}
    assert len([box for box in boxes if box.kind == 'copy']) == 2 * 2 * 4
    assert all(box.start <= box.end for box in boxes)
    # Partitions on one device share copy streams: the way back to 0 looks like the way on to 2.
    assert {(box.i, box.j) for box in boxes if box.kind == 'copy'} == {
        (i, j) for i in range(4) for j in (1, 2)}


def test_the_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(epochs, 'SAMPLES', 4)
    options = tiny.options(tiny.TIMELINE, tmp_path, scale=1.)
    campaign(tiny.TIMELINE, options, timeline.measure)
    written = json.loads((tmp_path / 'tiny-timeline.json').read_text())['results']['settings']
    assert [result['setting'] for result in written] == [
        'nothing', 'dependency', 'streams', 'portals']
    for result in written:
        assert result['ratio'] > 0 and 0 < result['details']['utilisation, %'] <= 100
        assert result['details']['memory, GiB'] > 0
        png, svg, trace = (tmp_path / name for name in result['files'])
        assert png.read_bytes().startswith(b'\x89PNG') and '<svg' in svg.read_text()
        events = json.loads(trace.read_text())['traceEvents']
        assert {event['cat'] for event in events if event['ph'] == 'X'} == {
            'forward', 'recomputation', 'backward'}
        for kind, number in (('forward', 12), ('recomputation', 9), ('backward', 12)):
            assert len({event['name'] + str(event['tid']) for event in events
                        if event.get('cat') == kind}) == number
        assert [event['args']['name'] for event in events if event['ph'] == 'M'][0] == \
            'partition 0 on cpu:0'
    assert 'utilisation, %' in capsys.readouterr().out


def test_without_published_figures_there_is_no_column_for_them(tmp_path, capsys):
    experiment = replace(tiny.TIMELINE, settings=(
        replace(tiny.TIMELINE.settings[3], published={}, details={}),))
    campaign(experiment, tiny.options(experiment, tmp_path, settings=experiment.settings),
             lambda experiment, setting, options, result: result.update(figure=1.))
    header = capsys.readouterr().out.splitlines()[2]
    assert header.split() == ['setting', 'batch', 'chunks', 'throughput,', 'samples/s', 'ratio']


def test_other_models_have_nothing_published():
    assert timeline.experiment_for('unet') is UNET_TIMELINE
    for name, layers in (('resnet101', 370), ('amoebanetd', 24)):
        experiment = timeline.experiment_for(name)
        assert experiment.name == f'{name}-timeline' and experiment.sources == []
        for setting in experiment.settings:
            assert setting.model.kind == name and sum(setting.balance) == layers
