"""Balances that fit into memory, for a schedule."""

from types import SimpleNamespace

from torchgpipe.balance import LayerProfile, Profile
from torchgpipe.plan.balance import neighbours
from torchgpipe.plan.search import fit


def blocks_of(times, parameters):
    """Return the blocks of a profile of layers with these times and bytes of parameters."""
    return Profile(
        tuple(
            LayerProfile(str(k), time, time, size, 0, 0, 0, 0)
            for k, (time, size) in enumerate(zip(times, parameters))
        ),
        (),
        4,
        0,
        'cpu',
    ).blocks(4, 1.0)


def fitted(schedule, blocks, limits, balance, simulated):
    """Return the balances that were tried, and that which was found."""
    tried = []

    def planned(balance):
        tried.append(balance)
        return SimpleNamespace(
            schedule=schedule,
            checkpoint='always',
            balance=balance,
            bytes=dict(enumerate(simulated(*balance))),
        )

    found = fit(planned(balance), blocks, [*range(len(blocks.passing) + 1)], limits, planned)
    return tried[1:], found and found.balance


def test_virtual_stages_share_the_memory_of_a_device():
    blocks = blocks_of([3, 3, 3, 3, 1, 1, 1, 1], [100] * 8)
    assert fitted(
        'zb-v', blocks, [400, 400], [1, 1, 1, 5], lambda a, b, c, d: [100 * (a + d), 100 * (b + c)]
    ) == ([[2, 2, 2, 2]], [2, 2, 2, 2])


def test_effects_that_only_a_simulation_shows_count():
    blocks = blocks_of([1] * 8, [100] * 8)

    def simulated(a, b):
        return [100 * a + 190, 100 * b + 90]

    assert fitted('1f1b', blocks, [550, 650], [4, 4], simulated) == ([[3, 5]], [3, 5])
    assert fitted('1f1b', blocks, [500, 500], [4, 4], simulated) == ([], None)


def test_neighbours_keep_a_layer_in_each_stage_and_to_edges():
    assert [*neighbours([1, 1, 2], [0, 1, 2, 3, 4])] == [[1, 2, 1]]
    assert [*neighbours([2, 2], [0, 2, 3, 4])] == [[3, 1]]
    assert [*neighbours([1, 3], [0, 2, 3, 4])] == []  # where a cut is at no edge


def test_layers_that_take_no_time():
    blocks = blocks_of([0] * 4, [100] * 4)
    assert fitted('1f1b', blocks, [200, 200], [1, 3], lambda a, b: [100 * a, 100 * b]) == (
        [[2, 2]],
        [2, 2],
    )
