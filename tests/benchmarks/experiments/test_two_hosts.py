"""Two hosts: the command with a tiny model; plans by hand; where hosts cannot be made."""

import json
import math

import pytest

from benchmarks.experiments import two_hosts
from benchmarks.experiments.scaling.meshes import Mesh, Work
from benchmarks.experiments.two_hosts import (
    SPREADS,
    Spread,
    choice_rows,
    link_rows,
    mean_profile,
    planned,
)
from benchmarks.harness.hosts import why_not
from torchgpipe.balance import LayerProfile, Profile
from torchgpipe.plan import Link, Machine
from torchgpipe.trainer import processes
from torchgpipe.trainer.gpt import Sizes
from torchgpipe.trainer.measuring import RingCosts

WORK = Work(Sizes(16, 8, 16, 4, 2, False), 4, 4, 2)

TINY = '--layers 2 --width 16 --context 8 --batch 4 --chunks 2 --rounds 1'.split()

#: A machine whose arithmetic takes no time.
HOST = Machine('host', {'float32': 1.0}, ((1.0, 1.0),), 1.0, 1e12, 1e12, 0.0, 0.0, Link(), Link())

#: RingCosts on a host, and over the link.
INSIDE = RingCosts(Link(0.0, 1e6), 1.0, 2.0)
BETWEEN = RingCosts(Link(0.0, 1e3), 1.5, 2.0)


def profile(seconds):
    """Return the profile of four layers of 1000 bytes, whose outputs have 10 bytes."""
    layers = [
        LayerProfile(str(k), seconds, 2 * seconds, 1000, 0, 0, 0, 10, 0.0, 0.0) for k in range(4)
    ]
    return Profile(tuple(layers), (), 1, 10, 'cpu')


def test_hosts_of_ranks():
    hosts = {(spread.mesh, spread.over): spread.hosts for spread in SPREADS}
    assert hosts[Mesh(2), 'data'] == hosts[Mesh(pipe=2), 'pipe'] == (0, 1)
    assert hosts[Mesh(2, 2), 'data'] == (0, 0, 1, 1)
    assert hosts[Mesh(2, 2), 'pipe'] == (0, 1, 0, 1)


@pytest.mark.parametrize(
    'spread, over, inside',
    [
        # Seconds of the all-reduces of a rank, by the link that they take; a host with two ranks
        # has half of the link for each. A stage has half of the layers.
        (Spread(Mesh(2), 'data'), 4.0, 0.0),
        (Spread(Mesh(2, 2), 'data'), 4.0, 0.0),
        (Spread(Mesh(2, 2), 'pipe'), 0.0, 2e-3),
        # With half of the bytes, an all-gather of 1.5 and a reduce-scatter of 2 of them.
        (Spread(Mesh(2, shard=True), 'data'), 2.0 * 1.5 + 2.0 * 2, 0.0),
    ],
)
def test_collectives_of_a_plan_take_the_link_of_their_axis(spread, over, inside):
    found = planned(spread, WORK, profile(1e-9), HOST, INSIDE, BETWEEN)
    assert found.parts['data'] == pytest.approx(over + inside, rel=1e-3)


@pytest.mark.parametrize(
    'spread, link',
    [
        (Spread(Mesh(pipe=2), 'pipe'), 1e3),
        (Spread(Mesh(2, 2), 'pipe'), 0.5e3),
        (Spread(Mesh(2, 2), 'data'), 1e6),
    ],
)
def test_messages_of_a_plan_take_the_link_of_their_axis(spread, link):
    found = planned(spread, WORK, profile(1e-9), HOST, INSIDE, BETWEEN)
    # Micro-batches of two samples go one after the other; gradients go back at the same time, but
    # for the last one.
    transfers = WORK.chunks(spread.mesh.data) + 1
    assert found.parts['messages'] == pytest.approx(transfers * 2 * 10 / link, rel=1e-3)


def test_ranks_of_a_host_share_the_bandwidth_of_its_memory():
    """In an update, a rank of two stages has half of the parameters, and half of the bandwidth."""
    one, two = (
        planned(Spread(mesh, 'data'), WORK, profile(1e-9), HOST, INSIDE, BETWEEN)
        for mesh in (Mesh(2), Mesh(2, 2))
    )
    assert one.parts['update'] == pytest.approx(two.parts['update']) == 20 * 1000 / 1e12


def test_times_of_a_profile_are_means_over_ranks():
    found = mean_profile([profile(1.0), profile(3.0)])
    assert [layer.forward_seconds for layer in found.layers] == [2.0] * 4
    assert [layer.backward_seconds for layer in found.layers] == [4.0] * 4


def test_the_choice_of_the_plan_is_not_always_the_fastest():
    parts = {'data': 0.5, 'messages': 0.0}
    rows = [
        {
            'mesh': name,
            'over': 'data',
            'sent': 2**20,
            'predicted': predicted,
            'measured': measured,
            'quartiles': [measured, measured],
            'parts': parts,
        }
        for name, predicted, measured in [('data 2', 1.0, 2.0), ('pipe 2', 1.25, 1.0)]
    ]
    link = {
        'rate': None,
        'between': BETWEEN._replace(link=BETWEEN.link.to_dict())._asdict(),
        'rows': rows,
    }
    _, choices = choice_rows({'links': [link]})
    assert choices == [
        ['no limit', 'pipe 2, data over the link', 'data 2, data over the link', '2.00']
    ]
    header, (first, _) = link_rows(link)
    assert header[0] == 'no limit: 0 Mbit/s, 0.00 ms'
    assert first == ['data 2', 'data', '1.0', '1000', '2000 (2000 to 2000)', '0.50', '50%']


def test_without_the_right_to_make_hosts_it_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setattr(two_hosts, 'why_not', lambda: 'it takes wings')
    code, out, _ = run('two-hosts', *TINY, '--output', tmp_path)
    assert code == 0 and out == 'skipped: it takes wings\n'
    assert not [*tmp_path.glob('*.json')]


@pytest.mark.parametrize(
    'options, text',
    [
        (['--width', '18'], '--width 18 is not a multiple of the 4 heads'),
        (['--chunks', '3', '--batch', '6'], '--chunks 3'),
        (['--chunks', '4', '--batch', '6'], '--chunks 4 must divide --batch 6'),
        (['--rate', 'fast'], '--rate fast is no rate above zero'),
        (['--rate', '-1mbit'], '--rate -1mbit is no rate above zero'),
        (['--rate', '0mbit'], '--rate 0mbit is no rate above zero'),
        (['--rate', '1meter'], '--rate 1meter'),
    ],
)
def test_bad_options_take_one_line(run, tmp_path, options, text):
    if '--rate' in options and why_not():
        pytest.skip(why_not())
    code, _, error = run('two-hosts', *TINY, *options, '--output', tmp_path)
    assert code == 2 and text in error and error.count('\n') == 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not processes.is_available(), reason='needs gloo')
def test_two_hosts(run, tmp_path, monkeypatch):
    if why_not():
        pytest.skip(why_not())
    monkeypatch.setattr(two_hosts, 'measure_machine', lambda device: HOST)
    monkeypatch.setattr(two_hosts, 'LARGE', 2**16)
    code, out, _ = run('two-hosts', *TINY, '--rate', '50mbit', '--output', tmp_path)
    assert code == 0
    results = json.loads((tmp_path / 'two-hosts.json').read_text())['results']
    (link,) = results['links']
    assert [(row['mesh'], row['over']) for row in link['rows']] == [
        (spread.name, spread.over) for spread in SPREADS
    ]
    for row in link['rows']:
        assert row['measured'] > 0 and math.isfinite(row['predicted']) and row['sent'] > 0
        assert row['mesh'] in out
    assert any(isinstance(part, str) for part in two_hosts.parts(results))
