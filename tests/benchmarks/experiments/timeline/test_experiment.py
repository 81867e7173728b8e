"""The ablation with its timelines: pictures, traces and numbers of each setting."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.experiments import timeline
from benchmarks.harness import job
from benchmarks.harness.campaign import campaign
from benchmarks.harness.published import EXPERIMENTS
from tests.benchmarks import tiny
from torchgpipe import GPipe
from torchgpipe.timeline import record


def test_cells_that_take_turns_in_backward_do_not_overlap():
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())])
    gpipe = GPipe(
        model, [8, 8, 8], devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=8, checkpoint='always'
    )
    x = torch.rand(64, 32)
    with record(gpipe) as recorded:
        gpipe(x).sum().backward()
    boxes = [each for each in recorded.actions if each.action.kind != 'F']
    assert all(one.end <= other.start for one, other in zip(boxes, boxes[1:]))
    # They do take turns, or this test would show nothing.
    assert len([box for box in boxes if box.action.kind == 'B']) > 3 * 8


@pytest.mark.slow
def test_the_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, 'SAMPLES', 4)
    options = tiny.options(tiny.TIMELINE, tmp_path, scale=1.0)
    campaign(tiny.TIMELINE, options, timeline.measure)
    written = json.loads((tmp_path / 'tiny-timeline.json').read_text())['results']['settings']
    names = [result['setting'] for result in written]
    assert names == ['nothing', 'dependency', 'streams', 'portals']
    for result in written:
        assert result['ratio'] > 0 and 0 < result['details']['utilisation, %'] <= 100
        assert result['details']['memory, GiB'] > 0
        png, svg, trace = (tmp_path / name for name in result['files'])
        assert png.read_bytes().startswith(b'\x89PNG') and '<svg' in svg.read_text()
        events = json.loads(trace.read_text())['traceEvents']
        boxes = [event for event in events if event['ph'] == 'X']
        assert {box['cat'] for box in boxes} == {'forward', 'recomputation', 'backward'}
        for kind, number in (('forward', 12), ('recomputation', 9), ('backward', 12)):
            places = {box['name'] + str(box['tid']) for box in boxes if box['cat'] == kind}
            assert len(places) == number
        assert [event['args']['name'] for event in events if event['ph'] == 'M'][0] == 'cpu:0'
    assert 'utilisation, %' in capsys.readouterr().out


def test_without_published_figures_there_is_no_column_for_them(tmp_path, capsys):
    experiment = replace(
        tiny.TIMELINE, settings=(replace(tiny.TIMELINE.settings[3], published={}, details={}),)
    )
    campaign(
        experiment,
        tiny.options(experiment, tmp_path, settings=experiment.settings),
        lambda experiment, setting, options, result: result.update(figure=1.0),
    )
    header = capsys.readouterr().out.splitlines()[2]
    assert header.split() == ['setting', 'batch', 'chunks', 'throughput,', 'samples/s', 'ratio']


def test_other_models_have_nothing_published():
    assert timeline.experiment_for('unet') is EXPERIMENTS['unet-timeline']
    for name, layers in (('resnet101', 370), ('amoebanetd', 24)):
        experiment = timeline.experiment_for(name)
        assert experiment.name == f'{name}-timeline'
        assert not any(setting.published for setting in experiment.settings)
        for setting in experiment.settings:
            assert setting.model.kind == name and sum(setting.balance) == layers
