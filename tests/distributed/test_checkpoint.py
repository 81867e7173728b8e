"""Checkpoints: a training saved in one layout continues unchanged in any other one."""

from math import prod

import pytest
import torch
import torch.distributed as dist

from tests.distributed.failing import Fault
from tests.distributed.saving import LAYOUTS, World, adam, made, steps
from tests.shard.processes import Failure, outcomes, run


def size(layout):
    """How many ranks a layout takes; none if it is in this process."""
    axes = LAYOUTS[layout][0] or {'none': 0}
    return prod(number for axis, number in axes.items() if axis != 'axes')


def save_all(folder, layouts, name):
    return {each: made(each, f'{folder}/{each}', name) for each in layouts}


def load_all(folder, pairs, name):
    """Load, with an optimizer of other options, and go on."""
    found = {}
    for source, layout in pairs:
        world = World(layout, name)
        with torch.no_grad():
            for x in world.model.parameters():
                x.zero_()
        optimizer = adam(world.model, 7.0, betas=(0.1, 0.2))
        world.load(f'{folder}/{source}', optimizer)
        found[source, layout] = steps(world, optimizer, range(2, 4))
    return found


def uninterrupted(name):
    """The losses of four steps in one process."""
    world = World('plain', name)
    optimizer = adam(world.model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return steps(world, optimizer, range(2), scheduler) + steps(world, optimizer, range(2, 4))


def cross(folder, pairs, name='perceptron'):
    """Save in layouts, load in others, with a start of processes for each number of them."""
    expected = uninterrupted(name)
    for function, numbers, key, wanted in (
        (save_all, {source for source, _ in pairs}, lambda each: each, expected[:2]),
        (load_all, pairs, lambda each: each[1], expected[2:]),
    ):
        for world in sorted({size(key(each)) for each in numbers}):
            some = [each for each in sorted(numbers) if size(key(each)) == world]
            found = (
                run(world, function, str(folder), some, name)
                if world
                else [function(str(folder), some, name)]
            )
            for rank in found:
                assert rank == {each: pytest.approx(wanted, rel=1e-9) for each in some}


@pytest.mark.slow
def test_all_layouts(tmp_path):
    """Each one loads what its neighbours in a ring have saved.

    Among them are shards of tensor parallelism, of which replicas have shards, and empty ones.
    """
    ring = ['gpipe', 'pipe', 'replicate', 'tensor', 'shard', 'shard-tensor', 'uneven', 'plain']
    pairs = {*zip(ring, [*ring[1:], ring[0]]), *zip([*ring[1:], ring[0]], ring)}
    pairs |= {('shard', 'tensor'), ('uneven', 'shard'), ('shard', 'shard')}
    cross(tmp_path, pairs | {('shard', 'neighbours'), ('neighbours', 'replicate')})


@pytest.mark.slow
def test_shards_that_wait_on_the_host(tmp_path):
    cross(tmp_path, [('offload', 'offload-one'), ('offload-one', 'offload'), ('shard', 'offload')])


@pytest.mark.slow
def test_tied_weights(tmp_path):
    """The optimizer has a state for one of them in one process, and one on each rank of a mesh."""
    pairs = [('plain', 'shard'), ('shard', 'v'), ('v', 'offload-pipe'), ('offload-pipe', 'plain')]
    cross(tmp_path, [*pairs, ('v', 'plain'), ('plain', 'v'), ('v', 'shard')], 'tied')


@pytest.mark.slow
def test_other_models(tmp_path):
    for name in ('frozen', 'unet'):
        cross(tmp_path / name, [('plain', 'pipe'), ('pipe', 'gpipe')], name)


def ended(folder, how):
    """Save after each step; in the third one something happens on the last rank."""
    world, fault = World('replicate'), Fault(how)
    fault.calls = -3  # A step calls a layer three times: one micro-batch of two is recomputed.
    if dist.get_rank() == 3:
        world.model.get_submodule('7').register_forward_hook(fault.happen)
    optimizer = adam(world.model)
    for step in range(4):
        steps(world, optimizer, [step])
        world.save(folder, optimizer)


def resumed(folder, layout):
    """Go on from the last checkpoint; give the number of steps that it has, and the losses."""
    world = World(layout)
    optimizer = adam(world.model)
    world.load(folder, optimizer)
    done = {int(state['step']) for state in optimizer.state.values()}
    return done, steps(world, optimizer, range(max(done), 4))


@pytest.mark.slow
def test_a_run_that_has_ended_is_resumed(tmp_path):
    """On two ranks and on as many as before, as if nothing had been."""
    plain = World('plain')
    expected = steps(plain, adam(plain.model), range(4))[2:]
    for each in outcomes(4, ended, str(tmp_path / 'model'), 'kill', timeout=30):
        assert isinstance(each, Failure)
    for layout in ('pipe', 'replicate'):
        for found in run(size(layout), resumed, str(tmp_path / 'model'), layout):
            assert found == ({2}, pytest.approx(expected, rel=1e-9))
