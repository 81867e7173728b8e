"""The report: parts of ranks, equal places in one line, links, uneven ranks, data and picture."""

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

from tests.dry_run.test_rehearsal import linear, small
from torchgpipe.balance import LayerProfile, Profile
from torchgpipe.dry_run.report import Kept
from torchgpipe.plan import plan


def test_the_part_of_a_rank():
    """The tensor axis splits 9 rows into 3, 3, 3 and 0, and the data axis 3 into 2 and 1."""
    kept = Kept('parameters', 'weight', (9, 3), 4, (('tensor', 0), ('data', 0)))
    for data, tensor, rows in ((0, 0, 2), (1, 0, 1), (0, 1, 2), (0, 2, 2), (1, 3, 0)):
        part = kept.part({'data': 2, 'tensor': 4}, {'data': data, 'tensor': tensor})
        assert part == (rows, 3), (data, tensor)


def test_equal_places_have_one_line():
    report = small(
        linear(8), [1] * 8, {'data': 2, 'pipe': 8}, chunks=2, schedule='gpipe', checkpoint='never'
    )
    lines = str(report).splitlines()
    assert lines[0] == '16 ranks: data 2 × pipe 8 × tensor 1; 2 micro-batches'
    assert any(line.startswith('1–6') and '1 … 6' in line for line in lines)
    sends = [line for line in lines if line.startswith('pipe send')]
    assert ['0–6 to pipe +1' in sends[0], '1–7 to pipe -1' in sends[1]] == [True, True]


def test_links_within_hosts_and_between():
    report = small(linear(4), [1] * 4, {'data': 2, 'pipe': 4}, chunks=4, devices_per_host=2)
    sends = {
        (each.source, each.target): each.link
        for each in report.traffic
        if each.operation == 'send'
    }
    assert sends == {
        (0, 1): 'host',
        (1, 0): 'host',
        (1, 2): 'network',
        (2, 1): 'network',
        (2, 3): 'host',
        (3, 2): 'host',
    }
    assert {each.link for each in report.traffic if each.axis == 'data'} == {'network'}
    assert {each.link for each in small().traffic} == {''}


def test_a_mesh_in_which_the_ranks_of_a_stage_are_neighbours():
    axes = ('pipe', 'data', 'tensor')
    mesh = {'data': 2, 'pipe': 2, 'tensor': 2}
    options = {
        'chunks': 2,
        'devices_per_host': 4,
        'tensor_plan': {'0': ColwiseParallel(output_layouts=Replicate())},
    }
    report = small(linear(4), [2, 2], mesh, axes=axes, **options)
    links = {(each.axis, each.link) for each in report.traffic if each.axis != 'all'}
    assert links == {('pipe', 'network'), ('data', 'host'), ('tensor', 'host')}
    assert [(rank.pipe, rank.data, rank.tensor) for rank in report.ranks] == [
        (pipe, data, tensor) for pipe in (0, 1) for data in (0, 1) for tensor in (0, 1)
    ]
    assert report.to_dict()['axes'] == [*axes]
    default = small(linear(4), [2, 2], mesh, **options)
    assert default.totals == report.totals
    assert {each.link for each in default.traffic if each.axis == 'data'} == {'network'}


def test_a_dry_run_of_a_plan_for_other_axes():
    layers = [LayerProfile(str(k), 1.0, 2.0, 0, 0, 0, 0, 4) for k in range(4)]
    mesh = {'data': 2, 'pipe': 2}
    found = plan(
        Profile(tuple(layers), (), 1, 4, 'cpu'),
        mesh=mesh,
        machine='H100',
        batch=8,
        micro_batches=[2],
        shardings=['replicate'],
        axes=('pipe', 'data', 'tensor'),
    )
    found = replace(found, layers=())  # They have other names and sizes.
    assert small(linear(4), found, mesh, axes=found.axes).axes == found.axes
    with pytest.raises(ValueError, match='axes=plan.axes'):
        small(linear(4), found, mesh)
    with pytest.raises(ValueError, match='axes are'):
        small(linear(4), [2, 2], mesh, chunks=2, axes=['tensor', 'data', 'pipe'])


def test_links_of_hosts_that_ranks_do_not_divide():
    """Of two replicas, the second one has its ranks on two hosts of three devices."""
    for mesh, axis in ({'data': 2, 'pipe': 2}, 'pipe'), ({'data': 2, 'tensor': 2}, 'tensor'):
        report = small(
            linear(4),
            [4 // mesh.get('pipe', 1)] * mesh.get('pipe', 1),
            mesh,
            chunks=2,
            devices_per_host=3,
            tensor_plan={'0': ColwiseParallel(output_layouts=Replicate())}
            if axis == 'tensor'
            else None,
        )
        links = {each.link for each in report.traffic if each.axis == axis}
        assert links == {'network'}, axis
    alone = small(linear(4), [2, 2], {'pipe': 2}, chunks=2, devices_per_host=3)
    assert {each.link for each in alone.traffic} == {'host'}


def test_uneven_stages_are_named():
    report = small(linear(4), [3, 1], chunks=4)
    assert any('pipe 0 has 2.' in line for line in report.uneven)
    assert any('needs' in line and 'times the memory' in line for line in report.uneven)


def test_ranks_with_uneven_shards_are_named():
    plan = {'0': ColwiseParallel(output_layouts=Replicate())}
    for width, expected in ((7, ['ranks at pipe 0 have 320 B to 352 B of parameters']), (8, [])):
        report = small(linear(2, width), [2], {'tensor': 2}, width=width, tensor_plan=plan)
        lines = [line.partition(', as a dimension')[0] for line in report.uneven]
        assert [line for line in lines if 'of parameters' in line] == expected


def test_the_report_as_data_and_as_a_picture(tmp_path):
    report = small(chunks=4, optimizer=torch.optim.Adam, memory_limit=1000)
    data = json.loads(json.dumps(report.to_dict()))
    assert [each['rank'] for each in data['ranks']] == [0, 1] and len(data['problems']) == 2
    report.save(tmp_path / 'report.png', 'two ranks')
    assert (tmp_path / 'report.png').stat().st_size > 10000


def test_a_total_is_the_sum_of_its_parts():
    for data in ('replicate', 'shard'):
        report = small(
            mesh={'data': 2, 'pipe': 2},
            chunks=4,
            optimizer=torch.optim.Adam,
            data=data,
            loss=F.l1_loss,
        )
        for rank in report.ranks:
            assert rank.total == (
                rank.parameters
                + rank.gradients
                + rank.optimizer
                + rank.buffers
                + rank.activations
                + rank.messages
                + rank.gathered
            )
            assert (rank.gathered > 0) == (data == 'shard') and rank.activations > 0
        assert report.totals['total'] == sum(rank.total for rank in report.ranks)
        copies = 2 if data == 'replicate' else 1
        assert report.totals['parameters'] == copies * 4 * (8 * 8 + 8) * 4
        assert 'all ranks' in str(report)
