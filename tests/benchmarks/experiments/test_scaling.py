"""Scaling: all train the same model; the command with a tiny model; rows and pages by hand."""

import json
import sys
from math import prod

import pytest
import torch

from benchmarks.experiments import scaling
from benchmarks.experiments.scaling.meshes import (
    ALONE,
    MESHES,
    TORCHGPIPE,
    Contender,
    Mesh,
    SmallLayers,
    Work,
)
from benchmarks.experiments.scaling.tables import KINDS, mesh_rows, panels, ratio_rows
from benchmarks.experiments.scaling.worker import RATE, Worker, sent, totals
from benchmarks.harness import costs, page
from tests.marks import slow
from torchgpipe.distributed import dry_run
from torchgpipe.trainer import processes
from torchgpipe.trainer.gpt import Sizes

SIZES = Sizes(16, 8, 16, 2, 2, False)
WORK = Work(SIZES, 8, 4, 1)
SMALL = SmallLayers(SmallLayers.sizes_for(2), 8, 8, 2)

TINY = (
    '--layers 2 --width 16 --heads 2 --words 16 --context 8 --batch 4 --chunks 4 --rounds 1'
).split()


def contenders(*names):
    """Return torchgpipe and PyTorch on meshes."""
    own = [Contender(TORCHGPIPE, MESHES[name]) for name in names]
    return [each for one in own for each in (one, one.peer) if each]


def traffic(work, mesh):
    """Return the bytes of a step in a dry run, of the rank that sends most on an axis."""
    with torch.device('meta'):
        module = work.model()
    x, y = work.samples(0, mesh.data)
    report = dry_run(
        module,
        input=x,
        target=y,
        loss_fn=work.loss_of,
        mesh=mesh.axes,
        schedule='1f1b',
        **work.options(mesh),
    )
    most = {}
    for rank in range(mesh.size):
        messages = [('pipe', 'send', size) for _, size in report.messages(rank)]
        others = [(axis, name, size) for name, axis, size in report.collectives(rank)]
        for axis, value in totals([*messages, *others], mesh).items():
            most[axis] = max(most.get(axis, 0.0), value)
    return most


def losses_of_one_process(work, steps):
    """Return the losses of steps with the whole mini-batch at once."""
    model, (x, y) = work.model(), work.samples(0, 1)
    optimizer, found = torch.optim.SGD(model.parameters(), RATE), []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(work.accumulated):
            loss = work.loss_of(model(x), y)
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def mean(answers):
    """Return the mean of the losses that processes have."""
    found = [each for each in answers if each is not None]
    return sum(found) / len(found)


@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
@pytest.mark.parametrize(
    'names, work',
    [
        slow(['data2', 'data2-shard', 'pipe2', 'tensor2'], WORK),
        slow(['data2-pipe2-shard'], WORK),
        slow(['data2', 'data2-shard', 'pipe2'], WORK._replace(accumulated=4)),
        slow(['data2', 'pipe2'], SMALL),
    ],
)
def test_all_train_the_same_model(names, work):
    n = MESHES[names[0]].size
    expected = losses_of_one_process(work, 4)
    with processes.Processes(n, Worker, work, 'cpu', cores=range(n)) as found:
        assert found.call('reference') == [pytest.approx(expected[0]), *[None] * (n - 1)]
        for each in contenders(*names):
            counts = found.call('build', each)
            recorded, stepped = found.call('record', each), found.call('step', each)
            losses = [
                *(mean(rank.losses[k] for rank in counts) for k in range(2)),
                *(mean(rank.loss for rank in step) for step in (recorded, stepped)),
            ]
            assert losses == pytest.approx(expected, rel=1e-5), each.name
            assert all(
                (0 <= rank.bubble < 1) if each.library == TORCHGPIPE else rank.bubble is None
                for rank in recorded
            )
            assert all(rank.peak > 0 for rank in counts)
            if each.library == TORCHGPIPE:  # A dry run knows the traffic of the real run.
                most = {
                    axis: max(rank.sent.get(axis, 0) for rank in counts)
                    for rank in counts
                    for axis in rank.sent
                }
                for axis, size in traffic(work, each.mesh).items():
                    # Replicas reduce once. Shards are also gathered for each mini-batch.
                    times = {'pipe': work.accumulated}.get(axis, 1)
                    if each.mesh.shard and work.accumulated > 1:
                        assert most[axis] > size
                    else:
                        assert most[axis] == pytest.approx(times * size, rel=0.05)
        alone = found.call('build', ALONE)
        assert alone[1:] == found.call('step', ALONE)[1:] == [None] * (n - 1)
        assert alone[0].losses == pytest.approx(
            losses_of_one_process(work._replace(batch=work.alone), 2)
        )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_scaling(run, tmp_path, monkeypatch):
    code, out, _ = run(
        'scaling', *TINY, *'--mesh data2 --mesh pipe2 --kind weak'.split(), '--output', tmp_path
    )
    assert code == 0
    assert (tmp_path / 'scaling.png').exists() and (tmp_path / 'scaling.svg').exists()
    results = json.loads((tmp_path / 'scaling.json').read_text())['results']
    names = ['one process', 'data 2', 'DDP, data 2', 'pipe 2', 'pipelining, pipe 2']
    assert [row['name'] for row in results['rows']] == names and all(name in out for name in names)
    one, data, _, pipe, _ = results['rows']
    assert (one['chunks'], data['chunks'], pipe['chunks']) == (4, 4, 8)
    assert one['speed_up'] == 1 and one['sent'] == {} and one['bubble'] is None
    assert data['tokens_per_second'] == 8 * 8 / data['seconds']
    assert [*data['sent']] == ['data'] and [*pipe['sent']] == ['pipe']
    assert data['cores_per_rank'] == min(1, results['cores'] / 2)
    assert pipe['against']['library'] == 'pipelining'
    check_pages(monkeypatch, tmp_path)


def check_pages(monkeypatch, folder):
    """Check that both pages show stored results, and no results."""
    monkeypatch.setattr(page, 'RESULTS', folder)
    text = page.make_page([scaling])
    assert '## A GPT on several processes' in text and '| pipelining, pipe 2 | 2 |' in text
    assert '(../benchmarks/results/scaling.svg)' in text
    _, where, (_, rows), meaning, text = costs._processes(page._stored('scaling'))
    assert where.startswith('`python -m benchmarks scaling`') and 'one core' in meaning
    assert [row[0] for row in rows] == ['data 2', 'pipe 2'] and rows[1][-1].endswith('pipelining')
    assert 'With `pipe 2`' in text and 'tensor' not in text
    assert not costs._processes({})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_a_contender_with_another_loss_ends_the_run(monkeypatch):
    monkeypatch.setattr(scaling, 'Worker', Wrong)
    with pytest.raises(RuntimeError, match="should be the same.*'DDP, data 2'"):
        scaling.measure(WORK, [ALONE, *contenders('data2')], 1, 'cpu', '')


class Wrong(Worker):
    """A worker in which DDP has half of the loss."""

    def build(self, contender):
        counts = super().build(contender)
        if contender.library != 'DDP':
            return counts
        return counts._replace(losses=[loss / 2 for loss in counts.losses])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_another_environment_has_rows_of_its_own(run, tmp_path):
    options = [*TINY, *'--mesh data2 --kind accumulated --kind small'.split()]
    code, _, _ = run('scaling', *options, '--python', sys.executable, '--output', tmp_path)
    assert code == 0
    results = json.loads((tmp_path / 'scaling.json').read_text())['results']
    (other,) = results['others']
    assert other['torch'] == results['torch'] == torch.__version__
    for rows in (results['rows'], other['rows']):
        kinds = ['accumulated'] * 3 + ['small'] * 3
        assert [(row['kind'], row['name']) for row in rows] == [
            *zip(kinds, ['one process', 'data 2', 'DDP, data 2'] * 2)
        ]


def test_an_environment_in_which_the_command_fails_is_named(run, tmp_path):
    python = tmp_path / 'python'
    python.write_text('#!/bin/sh\nexit 3\n')
    python.chmod(0o755)
    code, _, err = run(
        'scaling',
        *TINY,
        '--mesh',
        'tensor2',
        '--kind',
        'small',
        '--python',
        python,
        '--output',
        tmp_path,
    )
    assert code != 0 and f'ended with code 3 by {python}' in err


def test_rows_of_each_kind():
    unsuited = {
        kind: [name for name, mesh in MESHES.items() if not scaling._is_suited(mesh, kind)]
        for kind in KINDS
    }
    tensor = ['tensor2', 'tensor4', 'data2-pipe2-tensor2']
    assert unsuited['strong'] == unsuited['weak'] == []
    assert unsuited['accumulated'] == tensor
    assert {*unsuited['small']} == {*tensor, 'data2-shard', 'data4-shard', 'data2-pipe2-shard'}
    assert scaling._work('weak', 2, WORK).tokens == 2 * WORK.tokens
    assert scaling._work('accumulated', 2, WORK).tokens == 4 * WORK.tokens
    small = scaling._work('small', 4, WORK)
    assert small.balance(4) == [20] * 4 and len(small.model()) == 80
    assert small.samples(1, 2)[0].shape == (4, 32, 48)


def test_times_by_hand():
    own, ddp = contenders('data2')
    times = [
        {ALONE: 6.0, own: 4.0, ddp: 2.0},
        {ALONE: 9.0, own: 5.0, ddp: 10.0},
        {ALONE: 5.0, own: 5.0, ddp: 5.0},
    ]
    row = scaling._row(own, times, WORK)
    assert (row['seconds'], row['speed_up'], row['share']) == (5.0, 3.0, 1.5)
    assert row['tokens_per_second'] == 64 / 5 and row['chunks'] == 4
    row = scaling._row(ALONE, times, WORK)
    assert (row['speed_up'], row['tokens_per_second'], row['chunks']) == (1.0, 32 / 6, 4)
    against = scaling._against(own, times, {own: 30, ddp: 60})
    assert against == {
        'library': 'DDP',
        'memory': 0.5,
        'times_as_fast': 1.0,
        'quartiles': [0.75, 1.5],
    }
    assert scaling._against(ddp, times, {own: 30, ddp: 60}) is None
    assert scaling._against(own, times, {own: 30}) is None


def test_names_and_peers():
    assert [str(mesh) for mesh in MESHES.values()] == [
        'data 2',
        'data 2, shard',
        'pipe 2',
        'tensor 2',
        'data 4',
        'data 4, shard',
        'pipe 4',
        'tensor 4',
        'data 2 × pipe 2, shard',
        'data 2 × pipe 2 × tensor 2',
    ]
    peers = [Contender(TORCHGPIPE, mesh).peer for mesh in MESHES.values()]
    assert [each and each.name for each in peers] == [
        'DDP, data 2',
        'FSDP2, data 2',
        'pipelining, pipe 2',
        None,
        'DDP, data 4',
        'FSDP2, data 4',
        'pipelining, pipe 4',
        None,
        'pipelining + FSDP2, data 2 × pipe 2',
        None,
    ]
    assert ALONE.name == str(Mesh()) == 'one process' and ALONE.peer is None


def test_replicas_share_the_samples():
    whole, _ = WORK.samples(0, 1)
    assert torch.cat([WORK.samples(place, 4)[0] for place in range(4)]).equal(whole)
    x, y = WORK.samples(1, 2)
    assert x.shape == y.shape == (4, 8) and x[:, 1:].equal(y[:, :-1])
    assert WORK.balance(1) == [4] and WORK.balance(2) == [2, 2]
    assert WORK._replace(sizes=SIZES._replace(depth=5)).balance(4) == [2, 2, 1, 2]
    assert WORK.balance(4) == [1, 1, 1, 1]


def test_bytes_of_rings():
    assert sent('_reduce_scatter_base', 100, 4) == sent('all_gather_into_tensor', 100, 4) == 75
    assert sent('all_reduce', 100, 2) == 100 and sent('recv_', 100, 2) == 0
    assert totals(
        [
            ('data', 'allreduce', 8),
            ('pipe', 'send', 3),
            ('pipe', 'recv_', 3),
            ('data', 'allreduce', 2),
            ('tensor', 'recv_', 9),
        ],
        Mesh(2, 2),
    ) == {'data': 10, 'pipe': 3}


def test_data_sends_gradients_and_shards():
    with torch.device('meta'):
        parameters = sum(map(prod, (x.shape for x in WORK.model().parameters())))
    # A reduction sends as much as a reduce-scatter and a gather.
    expected = {'data': pytest.approx(2 * 0.75 * 4 * parameters, rel=0.05)}
    assert traffic(WORK, Mesh(4)) == expected
    assert traffic(WORK, Mesh(4, shard=True)) == expected


def results_by_hand():
    """Return results of two meshes, one of which has no contender."""

    def row(kind, name, processes, **values):
        mesh = {'data': 1, 'pipe': 1, 'tensor': 1, 'shard': False}
        return {
            'kind': kind,
            'rounds': 16,
            'name': name,
            'library': TORCHGPIPE,
            **mesh,
            'processes': processes,
            'cores_per_rank': min(1, 2 / processes),
            'chunks': 4,
            'seconds': 0.5,
            'tokens_per_second': 100.0 * processes**0.5,
            'speed_up': 1.5,
            'share': 0.75,
            'memory': 2**20,
            'sent': {},
            'bubble': None,
            'against': None,
            **values,
        }

    against = {
        'library': 'DDP',
        'memory': 0.5,
        'times_as_fast': 1.25,
        'quartiles': [1.0, 1.5],
    }
    newest = row('strong', 'data 2', 2, data=2, against={**against, 'times_as_fast': 0.75})
    rows = [
        row('strong', 'one process', 1, library='plain PyTorch'),
        row('strong', 'data 2', 2, data=2, sent={'data': 2**21}, bubble=0.0, against=against),
        row('strong', 'one process', 1, library='plain PyTorch'),
        row('strong', 'tensor 4', 4, tensor=4, sent={'tensor': 2**22}, bubble=0.25),
    ]
    return {
        'torch': '2.13.0',
        'model': SIZES._asdict(),
        'batch': 4,
        'chunks': 4,
        'device': 'cpu',
        'cores': 2,
        'rows': rows,
        'others': [{'torch': '2.13.0', 'rows': []}, {'torch': '2.13.0', 'rows': [newest]}],
    }


def test_tables_by_hand():
    header, rows = mesh_rows(results_by_hand(), 'strong')
    assert [row[0] for row in rows] == ['one process', 'data 2', 'tensor 4']
    assert dict(zip(header, rows[2])) == {
        'strong scaling': 'tensor 4',
        'processes': '4',
        'cores per rank': '0.5',
        'micro-batches': '4',
        'ms per step': '500',
        'tokens/s': '200',
        'speed-up': '1.50',
        'of n': '0.75',
        'of cores': '0.75',
        'memory, MiB': '1.0',
        'sent, MiB': 'tensor 4.0',
        'bubble, %': '25',
    }
    assert ratio_rows(results_by_hand()) == (
        ['torchgpipe', 'torch', 'strong, times as fast', 'strong, memory'],
        [
            ['data 2, against DDP', '2.13.0', '1.25 (1.00 to 1.50)', '0.50'],
            ['data 2, against DDP', '2.13.0', '0.75 (1.00 to 1.50)', '0.50'],
        ],
    )
    (panel,) = panels(results_by_hand())
    assert panel.curves['ideal on 2 cores'] == ([1, 2, 4], [1, 2, 2])
    assert panel.curves['tensor'] == ([1, 4], [1, 1.5])
    assert panel.curves['pipe'] == ([1], [1])


def test_parts_by_hand():
    text, strong, rows, ratios = scaling.SECTIONS[0].parts(results_by_hand())
    assert 'There are 16 rounds.' in text
    assert 'processes beyond the 2 cores share them' in text and 'same mini-batch' in strong
    assert len(rows[1]) == 3 and len(ratios[1]) == 2


def test_a_wrong_option_gets_one_clear_line(run):
    for args, reason in [
        (['--heads', '5'], '--width 256 is not a multiple'),
        (['--chunks', '3'], '--batch 8'),
        (['--chunks', '2', '--mesh', 'data4'], 'the 4 replicas of data4'),
        (['--heads', '2', '--mesh', 'tensor4'], 'the 4 ranks of tensor4'),
        (['--layers', '1', '--mesh', 'pipe4'], 'the stages of pipe4'),
        (['--device', 'nothing'], 'no devices of type nothing'),
        (['--mesh', 'data3'], "'data3'"),
        (['--output', '/proc/nothing'], '/proc/nothing'),
    ]:
        code, out, err = run('scaling', *args)
        assert code != 0 and not out
        assert reason in err and err.startswith('Error: ') and err.count('\n') == 1
