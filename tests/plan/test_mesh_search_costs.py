"""A search over meshes: the costs of a case, and the settings and parts of its plan."""
from dataclasses import replace

import pytest

from tests.plan.test_mesh_search import GPT, H100, case, measured
from torchgpipe.plan import ParameterBytes, plan
from torchgpipe.plan.mesh_search import HOPELESS, MeshSearch, _virtual

#: By a half, so that a group over hosts has a slower link.
HALF = replace(H100, devices_per_host=4)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_costs_of_a_case_by_hand(data, dtype):
    model = replace(GPT, dtype=dtype)
    search = MeshSearch(model, HALF, 64, ParameterBytes(), None, [8, 8])
    costs = search.costs(case((2, 2, 2), '1f1b', 1, 2, 'full', data))
    layers = model.profile(HALF, 2, 2).layers
    assert costs.links == HALF.links(2, 2) == HALF.host and costs.overlap is None
    shards = data == 'shard'
    for k, stage in enumerate(costs.stages):
        number = sum(x.parameter_bytes for x in layers[8 * k:8 * k + 8]) / model.size
        reduction, gather = (HALF.gather(size * number, 2, 4) for size in (4, 2))
        assert stage.reduction == pytest.approx(reduction * (1 if shards else 2))
        assert stage.gather == pytest.approx(gather * shards)
        assert stage.update == pytest.approx(40 * number / (1 + shards) / HALF.bandwidth)
        # All 16 micro-batches of two sequences are there from the start.
        waiting = (not k) * 16 * 8 * 2 * 2048
        assert stage.resident_bytes == pytest.approx(waiting + (10 if shards else 18) * number)
        assert stage.gathered_bytes == pytest.approx(2 * number * shards)
        assert stage.recomputed == 16


def test_links_of_ranks_that_share_layers_lead_to_other_hosts():
    search = MeshSearch(GPT, H100, 64, ParameterBytes(), ('data',))
    costs = search.costs(case((1, 4, 8)))
    assert costs.links == H100.links(4, 8) and costs.link(0, 1) == H100.network and costs.overlap


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('tensor', [1, 2])
def test_one_stage_has_a_tied_weight_once(tied, tensor):
    model = replace(GPT, tied=tied)
    search = MeshSearch(model, H100, 8, ParameterBytes(), ())
    one = search.costs(case((1, 1, tensor))).stages[0]
    number = model.parameters if tensor == 1 else (
        14 * model.block_parameters(2) + model.vocabulary * 2048 / 2 * (2 - tied)
        + 2048 * 2048 + 2 * 2048)
    assert one.update == pytest.approx(40 * number / H100.bandwidth)
    two = search.costs(case((1, 2, tensor))).stages
    more = model.vocabulary * 2048 / tensor * tied
    assert sum(x.update for x in two) == pytest.approx(40 * (number + more) / H100.bandwidth)


def test_a_balance_that_is_given():
    found = plan(GPT, mesh=2, machine=H100, batch=8, balance=[3, 13])
    assert found.balance == (3, 13) and found.mesh['pipe'] == 2
    more = plan(GPT, mesh=2, machine=H100, batch=8, balance=[4, 4, 4, 4])
    assert more.schedule in ('interleaved', 'zb-v') and not more.runners_up


def test_a_split_backward_is_part_of_compute():
    found = plan(measured(1.), mesh={'pipe': 2}, machine=H100, batch=8, schedules=['zb-h1'],
                 micro_batches=[1])
    assert found.parts['compute'] == pytest.approx(sum(
        8 * x.seconds(kind) for x in found.costs.stages for kind in 'FIW') / 2)
    assert found.parts['recomputation'] == 0
    assert found.sequential_seconds == pytest.approx(found.parts['compute'] * 2)


def test_a_full_recomputation_is_its_own_part_and_its_checkpoint():
    found = plan(measured(1.), mesh={'pipe': 2}, machine=H100, batch=8, schedules=['1f1b'],
                 micro_batches=[1], recomputations=['full'])
    assert (found.checkpoint, found.recomputation) == ('always', 'full')
    assert found.parts['compute'] == pytest.approx(8 * 8 * 3 / 2)
    assert found.parts['recomputation'] == pytest.approx(8 * 8 / 2)


def test_places_of_stages_in_a_v():
    found = plan(GPT, mesh={'pipe': 3}, machine=H100, batch=6, schedules=['zb-v'],
                 micro_batches=[1])
    assert found.devices == tuple(f'pipe {k}' for k in (0, 1, 2, 2, 1, 0))


@pytest.mark.parametrize('fused, asked, got', [
    (True, ['selective'], 'none'), (False, ['selective'], 'selective'),
    (True, ['selective', 'full'], 'full')])
def test_attention_alone_is_recomputed_if_its_scores_are_in_memory(fused, asked, got):
    found = plan(replace(GPT, fused=fused), mesh={'pipe': 2}, machine=H100, batch=8,
                 recomputations=asked, memory_limit=1e12)
    assert found.recomputation == got


@pytest.mark.parametrize('name, pipe, virtual, numbers', [
    ('1f1b', 4, [1, 2], [1]), ('1f1b', 1, [2], [1]), ('zb-h1', 1, [1], []),
    ('interleaved', 1, [1, 2], []), ('interleaved', 4, [1, 2, 8], [2, 8]),
    ('zb-v', 4, [1, 2, 3], [2])])
def test_numbers_of_stages_on_a_rank(name, pipe, virtual, numbers):
    assert [*_virtual(name, pipe, virtual)] == numbers


def test_reasons_are_relative_to_the_best():
    found = plan(GPT, mesh=4, machine=H100, batch=16, virtual=1)
    for one in found.runners_up:
        more = {name: seconds - found.parts[name] for name, seconds in one.parts.items()}
        assert one.reason == (f'{one.seconds / found.seconds - 1:.1%}: '
                              f'{max(more, key=more.get)}')


def test_messages_are_what_links_take():
    slow = replace(H100, host=replace(H100.host, bandwidth=1e9))
    found, free = (plan(GPT, mesh={'pipe': 4}, machine=x, batch=16, schedules=['1f1b'],
                        micro_batches=[1]) for x in (slow, slow.without_links()))
    assert found.parts['messages'] == pytest.approx(found.seconds - free.seconds)
    assert free.parts['messages'] == 0 < found.parts['messages']


def test_replicas_that_share_a_tied_model_take_as_long_as_a_rank_waits():
    """With overlap, a rank waits for the part that its last backward does not hide."""
    found = plan(GPT, mesh={'data': 64}, machine=H100, batch=64, shardings=['shard'],
                 overlap=['data'], memory_limit=1e12)
    forward, backward = (getattr(found.costs.stages[0], x) for x in ('forward', 'backward'))
    gather, reduction = (H100.gather(size * GPT.parameters, 64) for size in (2, 4))
    assert found.parts['data'] == pytest.approx(
        max(0, gather - forward) + max(0, reduction - backward))


def test_a_split_may_take_longer_than_a_backward():
    layers = tuple(replace(x, input_share=.75, weight_share=.5) for x in measured(1.).layers)
    found = plan(replace(measured(1.), layers=layers), mesh={'pipe': 2}, machine=H100, batch=8,
                 schedules=['zb-h1'], micro_batches=[1])
    assert found.parts['compute'] == pytest.approx(8 * 8 * (1 + 2 * 1.25) / 2)


@pytest.mark.parametrize('overlap, part', [([], 1), (['tensor'], 4)])
def test_collectives_of_the_tensor_axis_are_no_computation(overlap, part):
    found, free = (plan(GPT, mesh={'tensor': 4}, machine=x, batch=8, micro_batches=[2],
                        recomputations=['none'], overlap=overlap, memory_limit=1e12)
                   for x in (H100, H100.without_links()))
    assert found.parts['compute'] == pytest.approx(free.parts['compute'])
    exchange = H100.all_reduce(2 * 2 * 2048 * 2048, 4)
    assert found.parts['tensor'] == pytest.approx(4 * (14 * 4 * exchange / part + 2 * exchange))
    assert free.parts['tensor'] == 0


def test_other_meshes_have_messages_as_well():
    found = plan(GPT, mesh=4, machine=H100, batch=64, schedules=['1f1b'])
    near = [x for x in found.runners_up if x.mesh['pipe'] > 1
            and x.seconds < HOPELESS * found.seconds]
    assert near and all(x.parts['messages'] > 0 for x in near)


def test_a_stage_that_recomputes_has_fewer_layers():
    layers = tuple(replace(x, forward_seconds=forward, backward_seconds=backward) for x, forward,
                   backward in zip(measured(1.).layers, (4., 0., 0., 0.), (0., 3., 3., 3.)))
    none, full = (plan(replace(measured(1.), layers=layers), mesh={'pipe': 2}, machine=H100,
                       batch=2, schedules=['1f1b'], micro_batches=[1], recomputations=[x])
                  for x in ('none', 'full'))
    assert (none.balance, full.balance) == ((2, 2), (1, 3))
