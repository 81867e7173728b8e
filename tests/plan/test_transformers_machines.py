"""Machines: products, collectives, links, and machines as JSON."""

import json
from dataclasses import replace

import pytest

from torchgpipe.plan import MACHINES, Link, Machine
from torchgpipe.plan.transformers import Product

#: A machine with two devices on a host, and numbers that are easy to compute with.
MACHINE = Machine(
    'two',
    {'bfloat16': 1000.0, 'float32': 100.0},
    ((10, 0.5), (1000, 1.0)),
    0.5,
    1e6,
    10.0,
    0.25,
    0.125,
    Link(1.0, 100.0),
    Link(2.0, 10.0),
    devices_per_host=2,
)


def test_a_product_takes_the_longer_of_operations_and_memory():
    small = Product(10, 10, 10)
    assert MACHINE.product_seconds(small) == 0.25 + max(2000 / 500, 300 * 2 / 10)
    large = replace(MACHINE, bandwidth=1e9)
    assert large.product_seconds(small) == 0.25 + 2000 / 500
    assert large.product_seconds(small, 'float32') == 0.25 + 2000 / 50
    assert large.product_seconds(small._replace(batch=3)) == 0.25 + 6000 / 500


def test_shares_lie_on_a_line_over_the_logarithm_of_sizes():
    assert [MACHINE.share(size) for size in (1, 10, 100, 1000, 1e6)] == pytest.approx(
        [0.5, 0.5, 0.75, 1.0, 1.0]
    )


def test_a_gather_is_a_ring_over_the_slowest_link():
    for devices, stride, seconds in [
        (1, 1, 0.0),
        (2, 1, 1.0 + 100 / 2 / 100),
        # The two devices of a host share its links to other hosts.
        (4, 1, 3 * (2.0 + 100 / 4 / 20)),
        # Only one device of each host is in the group.
        (4, 2, 3 * (2.0 + 100 / 4 / 10)),
        (4, 8, 3 * (2.0 + 100 / 4 / 10)),
    ]:
        assert MACHINE.gather(100.0, devices, stride) == pytest.approx(seconds)
        assert MACHINE.all_reduce(100.0, devices, stride) == pytest.approx(2 * seconds)


def test_collectives_may_take_longer_than_half_of_an_all_reduce():
    gloo = replace(MACHINE, gather_ratio=1.5, reduce_scatter_ratio=2.0)
    for devices, stride in [(1, 1), (2, 1), (4, 2)]:
        half = MACHINE.all_reduce(100.0, devices, stride) / 2
        assert MACHINE.gather(100.0, devices, stride) == half
        assert MACHINE.reduce_scatter(100.0, devices, stride) == half
        assert gloo.all_reduce(100.0, devices, stride) == 2 * half
        assert gloo.gather(100.0, devices, stride) == 1.5 * half
        assert gloo.reduce_scatter(100.0, devices, stride) == 2 * half


def test_hosts_are_never_faster_than_their_own_links():
    fast = replace(MACHINE, network=Link(0.0, 1e9))
    assert fast.gather(100.0, 4) == pytest.approx(3 * (1.0 + 25 / 100))


def test_links_of_a_pipeline():
    assert MACHINE.links(2, 1) == MACHINE.host
    host, network = MACHINE.host, MACHINE.network
    assert MACHINE.links(3, 1) == (
        (host, host, network),
        (host, host, network),
        (network, network, host),
    )
    assert MACHINE.links(2, 2) == ((host, network), (network, host))
    free = MACHINE.without_links()
    assert free.links(4, 8)[0][1].seconds(1e9) == free.gather(1e9, 64) == 0.0


def test_machines_survive_json():
    for name in MACHINES:
        machine = MACHINES[name]
        assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine, name
        assert 0.3 < machine.share(8192) < 1, name
        assert machine.network.bandwidth < machine.host.bandwidth, name


def test_refused():
    for change, text in [
        ({'flops': {}}, 'has peaks by dtype'),
        ({'flops': {'bfloat16': 0.0}}, 'has peaks by dtype'),
        ({'shares': ()}, 'shares by ascending sizes'),
        ({'shares': ((8, 0.5), (4, 0.5))}, 'ascending'),
        ({'shares': ((8, 0.0),)}, 'above zero'),
        ({'bandwidth': 0.0}, 'above zero'),
        ({'devices_per_host': 0}, 'above zero'),
        ({'attention_share': 0.0}, 'above zero'),
        ({'bandwidth': -1.0}, "'bandwidth' of a Machine"),
        ({'split': -1.0}, "'split' of a Machine"),
        ({'actions': {'X': 1.0}}, "names 'X'"),
    ]:
        with pytest.raises(ValueError, match=text):
            replace(MACHINE, **change)


def test_not_a_machine():
    with pytest.raises(ValueError, match="this is not a machine, .*: KeyError: 'shares'"):
        Machine.from_dict({})


def test_no_peak_for_a_dtype():
    with pytest.raises(ValueError, match="two has no peak for 'float8', only for bfloat16, float"):
        MACHINE.product_seconds(Product(1, 1, 1), 'float8')
