"""A search over meshes: the costs of a case, and the settings and parts of its plan."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.plan.test_mesh_search import GPT, H100, case, measured
from torchgpipe.balance import LayerProfile, Profile, SkipProfile, profile
from torchgpipe.plan import Link, Machine, MeshPlan, ParameterBytes, Transformer, plan
from torchgpipe.plan.costs import TieProfile
from torchgpipe.plan.mesh_search import HOPELESS, MeshSearch, _virtual

#: By a half, so that a group over hosts has a slower link.
HALF = replace(H100, devices_per_host=4)


def piped(model, pipe=2, **options):
    """Return the plan of a pipeline by 1F1B, with micro-batches of one sample."""
    options = {'machine': H100, 'batch': 8, 'schedules': ['1f1b'], 'micro_batches': [1]} | options
    return plan(model, mesh={'pipe': pipe}, **options)


def test_costs_of_a_case_by_hand():
    for dtype in ['bfloat16', 'float32']:
        for data in ['replicate', 'shard']:
            model = replace(GPT, dtype=dtype)
            search = MeshSearch(model, HALF, 64, ParameterBytes(), None, [8, 8])
            costs = search.costs(case((2, 2, 2), '1f1b', 1, 2, 'full', data))
            layers = model.profile(HALF, 2, 2).layers
            assert costs.links == HALF.links(2, 2) == HALF.host and costs.overlap is None
            shards = data == 'shard'
            for k, stage in enumerate(costs.stages):
                number = sum(x.parameter_bytes for x in layers[8 * k : 8 * k + 8]) / model.size
                reduction, gather = (HALF.gather(size * number, 2, 4) for size in (4, 2))
                assert stage.reduction == pytest.approx(reduction * (1 if shards else 2))
                assert stage.gather == pytest.approx(gather * shards), (dtype, data)
                assert stage.update == pytest.approx(
                    40 * number / (1 + shards) / HALF.bandwidth
                ), (dtype, data)
                # All 16 micro-batches of two sequences are there from the start.
                waiting = (not k) * 16 * 8 * 2 * 2048
                # Other programs keep buffers of gradients.
                assert stage.resident_bytes == pytest.approx(
                    waiting + (10 if shards else 18) * number
                ), (dtype, data)
                assert stage.gradient_bytes == 0
                assert stage.gathered_bytes == pytest.approx(2 * number * shards), (dtype, data)
                assert stage.recomputed == 16, (dtype, data)


def test_gradients_of_an_eager_transformer_come_with_its_first_backward():
    model = replace(GPT, eager=True, dtype='float32')
    for data in ['replicate', 'shard']:
        search = MeshSearch(model, HALF, 64, ParameterBytes(4, 4, 8), None, [8, 8])
        costs = search.costs(case((2, 2, 2), '1f1b', 1, 2, 'full', data))
        layers = model.profile(HALF, 2, 2).layers
        assert costs.messages == 4
        for k, stage in enumerate(costs.stages):
            number = sum(x.parameter_bytes for x in layers[8 * k : 8 * k + 8]) / model.size
            assert stage.gradient_bytes == pytest.approx(4 * number)
            waiting = (not k) * 16 * 8 * 2 * 2048
            kept = 12 if data == 'replicate' else 6
            assert stage.resident_bytes == pytest.approx(waiting + kept * number)
            assert bool(stage.bucket_bytes) == (data == 'replicate' and not stage.tied_bytes)


def test_links_of_ranks_that_share_layers_lead_to_other_hosts():
    search = MeshSearch(GPT, H100, 64, ParameterBytes(), ('data',))
    costs = search.costs(case((1, 4, 8)))
    assert costs.links == H100.links(4, 8) and costs.link(0, 1) == H100.network and costs.overlap


def test_one_stage_has_a_tied_weight_once():
    for tied in [False, True]:
        for tensor in [1, 2]:
            model = replace(GPT, tied=tied)
            search = MeshSearch(model, H100, 8, ParameterBytes(), ())
            one = search.costs(case((1, 1, tensor))).stages[0]
            number = (
                model.parameters
                if tensor == 1
                else (
                    14 * model.block_parameters(2)
                    + model.vocabulary * 2048 / 2 * (2 - tied)
                    + 2048 * 2048
                    + 2 * 2048
                )
            )
            assert one.update == pytest.approx(40 * number / H100.bandwidth), (tied, tensor)
            two = search.costs(case((1, 2, tensor))).stages
            more = model.vocabulary * 2048 / tensor * tied
            assert sum(x.update for x in two) == pytest.approx(
                40 * (number + more) / H100.bandwidth
            ), (tied, tensor)


def test_a_balance_that_is_given():
    found = plan(GPT, mesh=2, machine=H100, batch=8, balance=[3, 13])
    assert found.balance == (3, 13) and found.mesh['pipe'] == 2
    more = plan(GPT, mesh=2, machine=H100, batch=8, balance=[4, 4, 4, 4])
    assert more.schedule in ('interleaved', 'zb-v') and not more.runners_up


def test_a_split_backward_is_part_of_compute():
    found = piped(measured(1.0), schedules=['zb-h1'])
    assert found.parts['compute'] == pytest.approx(
        sum(8 * x.seconds(kind) for x in found.costs.stages for kind in 'FIW') / 2
    )
    assert found.parts['recomputation'] == 0
    assert found.sequential_seconds == pytest.approx(found.parts['compute'] * 2)


def test_a_full_recomputation_is_its_own_part_and_its_checkpoint():
    found = piped(measured(1.0), recomputations=['full'])
    assert (found.checkpoint, found.recomputation) == ('always', 'full')
    assert found.parts['compute'] == pytest.approx(8 * 8 * 3 / 2)
    assert found.parts['recomputation'] == pytest.approx(8 * 8 / 2)


def test_places_of_stages_in_a_v():
    found = piped(GPT, 3, batch=6, schedules=['zb-v'])
    assert found.devices == tuple(f'pipe {k}' for k in (0, 1, 2, 2, 1, 0))


def test_attention_alone_is_recomputed_if_its_scores_are_in_memory():
    for fused, asked, got in [
        (True, ['attention'], 'none'),
        (False, ['attention'], 'attention'),
        (True, ['attention', 'full'], 'full'),
    ]:
        found = plan(
            replace(GPT, fused=fused),
            mesh={'pipe': 2},
            machine=H100,
            batch=8,
            recomputations=asked,
            memory_limit=1e12,
        )
        assert found.recomputation == got


def test_numbers_of_stages_on_a_rank():
    for name, pipe, virtual, numbers in [
        ('1f1b', 4, [1, 2], [1]),
        ('1f1b', 1, [2], [1]),
        ('zb-h1', 1, [1], []),
        ('interleaved', 1, [1, 2], []),
        ('interleaved', 4, [1, 2, 8], [2, 8]),
        ('zb-v', 4, [1, 2, 3], [2]),
    ]:
        assert [*_virtual(name, pipe, virtual)] == numbers


def test_reasons_are_relative_to_the_best():
    found = plan(GPT, mesh=4, machine=H100, batch=16, virtual=1)
    for one in found.runners_up:
        more = {name: seconds - found.parts[name] for name, seconds in one.parts.items()}
        assert one.reason == (f'{one.seconds / found.seconds - 1:.1%}: {max(more, key=more.get)}')


def test_messages_have_the_sizes_that_links_take():
    slow = replace(H100, host=replace(H100.host, bandwidth=1e9))
    machines = slow, slow.without_links()
    found, free = (piped(GPT, 4, machine=machine, batch=16) for machine in machines)
    assert found.parts['messages'] == pytest.approx(found.seconds - free.seconds)
    assert free.parts['messages'] == 0 < found.parts['messages']


def test_replicas_that_share_a_tied_model_take_as_long_as_a_rank_waits():
    """With overlap, a rank waits for the part that its last backward does not hide."""
    found = plan(
        GPT,
        mesh={'data': 64},
        machine=H100,
        batch=64,
        shardings=['shard'],
        overlap=['data'],
        memory_limit=1e12,
    )
    forward, backward = (getattr(found.costs.stages[0], x) for x in ('forward', 'backward'))
    gather, reduction = (H100.gather(size * GPT.parameters, 64) for size in (2, 4))
    assert found.parts['data'] == pytest.approx(
        max(0, gather - forward) + max(0, reduction - backward)
    )


def test_a_split_may_take_longer_than_a_backward():
    layers = tuple(replace(x, input_share=0.75, weight_share=0.5) for x in measured(1.0).layers)
    found = piped(replace(measured(1.0), layers=layers), schedules=['zb-h1'])
    assert found.parts['compute'] == pytest.approx(8 * 8 * (1 + 2 * 1.25) / 2)


def test_collectives_of_the_tensor_axis_are_no_computation():
    for overlap, part in [([], 1), (['tensor'], 4)]:
        found, free = (
            plan(
                GPT,
                mesh={'tensor': 4},
                machine=x,
                batch=8,
                micro_batches=[2],
                recomputations=['none'],
                overlap=overlap,
                memory_limit=1e12,
            )
            for x in (H100, H100.without_links())
        )
        assert found.parts['compute'] == pytest.approx(free.parts['compute']), (overlap, part)
        exchange = H100.all_reduce(2 * 2 * 2048 * 2048, 4)
        assert found.parts['tensor'] == pytest.approx(
            4 * (14 * 4 * exchange / part + 2 * exchange)
        )
        assert free.parts['tensor'] == 0, (overlap, part)


def test_other_meshes_have_messages_as_well():
    found = plan(GPT, mesh=4, machine=H100, batch=64, schedules=['1f1b'])
    near = [
        x for x in found.runners_up if x.mesh['pipe'] > 1 and x.seconds < HOPELESS * found.seconds
    ]
    assert near and all(x.parts['messages'] > 0 for x in near)


def test_a_stage_that_recomputes_has_fewer_layers():
    layers = tuple(
        replace(x, forward_seconds=forward, backward_seconds=backward)
        for x, forward, backward in zip(
            measured(1.0).layers, (4.0, 0.0, 0.0, 0.0), (0.0, 3.0, 3.0, 3.0)
        )
    )
    model = replace(measured(1.0), layers=layers)
    none, full = (piped(model, batch=2, recomputations=[x]) for x in ('none', 'full'))
    assert (none.balance, full.balance) == ((2, 2), (1, 3))


def layer(name, number, size, frozen=0):
    """Return a layer of some parameters, each of some bytes."""
    times, sizes = (1e-3, 2e-3), (number * size, frozen * size, 0, 100, 40)
    return LayerProfile(name, *times, *sizes, trainable_parameters=number - frozen)


def profile_of(*layers, skips=(), ties=()):
    return Profile(layers, skips, 1, 40, 'cpu', ties)


def test_memory_of_all_micro_batches_is_within_the_limit():
    for schedule, virtual in [('gpipe', 1), ('looped-bfs', 2)]:
        options = {
            'mesh': {'pipe': 2},
            'machine': H100,
            'batch': 200,
            'micro_batches': [1],
            'schedules': [schedule],
            'virtual': [virtual],
            'recomputations': ['none'],
        }
        found = plan(measured(1.0), **options)
        assert max(found.peaks) == max(found.simulation.peak_bytes) > 200 * 4 * 100
        assert (
            plan(measured(1.0), memory_limit=max(found.peaks), **options).peaks == found.peaks
        ), (schedule, virtual)
        with pytest.raises(ValueError, match='no plan for this mesh'):
            plan(measured(1.0), memory_limit=max(found.peaks) - 1, **options)


def test_skips_have_bytes_and_messages():
    layers = [layer(str(k), 100, 4) for k in range(4)]
    slow = replace(H100, host=Link(0.0, 1e9))
    without, found = (
        piped(profile_of(*layers, skips=skips), 4, machine=slow, batch=4)
        for skips in ((), (SkipProfile(0, 3, 10**8),))
    )
    assert max(found.peaks) >= max(without.peaks) + 10**8
    assert found.seconds > without.seconds + 0.1 and found.parts['messages'] > 0.1
    assert [*found.costs.skips] == [SkipProfile(0, 3, 10**8)]


def test_frozen_parameters_have_no_gradient_and_no_state():
    for data, kept in [('replicate', 400.0), ('shard', 200.0)]:
        model = profile_of(layer('0', 10**8, 4, 10**8))
        state = ParameterBytes(4, 4, 12)
        one = plan(model, mesh=1, machine=H100, batch=2, state=state)
        assert max(one.peaks) == pytest.approx(400e6, rel=1e-5) and one.parts['update'] == 0
        two = MeshSearch(model, H100, 2, state, None).costs(case((2, 1, 1), data=data)).stages[0]
        assert two.resident_bytes == pytest.approx(kept * 1e6, rel=1e-5)
        assert two.gathered_bytes == (400e6 if data == 'shard' else 0.0)
        assert (two.gather > 0) == (data == 'shard') and two.reduction == two.update == 0


def test_parameters_are_counted_by_the_dtype_of_the_module():
    for dtype in [torch.bfloat16, torch.float32, torch.float64]:
        model = nn.Sequential(nn.Linear(999, 1000), nn.Linear(1000, 1000)).to(dtype)
        found = plan(
            model, torch.rand(2, 999, dtype=dtype), mesh=1, machine=H100, batch=2, timeout=0.01
        )
        assert max(found.peaks) == pytest.approx(18 * 2_001_000, rel=0.02), dtype


def test_a_tied_weight_is_counted_once_on_each_rank():
    """In a V, the first and the last stage are on the same rank."""
    for schedule, virtual, times in [
        ('1f1b', 1, 2),
        ('interleaved', 2, 2),
        ('zb-v', 2, 1),
        ('v-min', 2, 1),
    ]:
        embedding = nn.Embedding(100, 16)
        head = nn.Linear(16, 100, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, nn.Linear(16, 16), nn.Linear(16, 16), head)
        costs = profile(model, torch.zeros(2, 4).long(), timeout=0.0, device='cpu')
        assert costs.ties == (TieProfile((0, 3), 6400, 1600),), (schedule, virtual, times)
        assert Profile.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
        search = MeshSearch(
            costs, H100, 8, ParameterBytes(4, 4, 8), None, [1] * 4 if virtual == 2 else [2, 2]
        )
        stages = search.costs(case((1, 2, 1), schedule, virtual)).stages
        update = ParameterBytes(4, 4, 8).traffic * (1600 * times + 2 * 16 * 17) / H100.bandwidth
        assert sum(x.update for x in stages) == pytest.approx(update), (schedule, virtual, times)
        whole = MeshSearch(costs, H100, 8, ParameterBytes(4, 4, 8), None)
        assert whole.costs(case((1, 1, 1), '1f1b')).stages[0].update == pytest.approx(
            ParameterBytes(4, 4, 8).traffic * (1600 + 2 * 16 * 17) / H100.bandwidth
        ), (schedule, virtual, times)


def test_a_tied_weight_is_counted_once_on_a_device():
    costs = profile_of(
        layer('0', 1000, 4),
        layer('1', 0, 4),
        layer('2', 1000, 4),
        ties=(TieProfile((0, 2), 4000, 1000),),
    )
    one = plan(costs, devices=['cuda:0'], param_scale=2.0, schedules=['gpipe'], chunks=[1])
    both = plan(
        costs, devices=['cuda:0', 'cuda:1'], param_scale=2.0, schedules=['gpipe'], chunks=[1]
    )
    assert sum(x.resident_bytes for x in one.costs.stages) == 2 * 4000 + 40
    assert sum(x.resident_bytes for x in both.costs.stages) == 4 * 4000 + 40


def test_links_of_hosts_that_replicas_do_not_divide():
    """With three devices on a host, each message of any replica counts."""
    for ranks, stride, replicas, crossing in [
        (2, 1, 1, False),
        (2, 1, 2, True),
        (2, 2, 1, True),
        (3, 1, 5, False),
        (2, 3, 1, True),
        (1, 2, 4, False),
    ]:
        odd = replace(H100, devices_per_host=3)
        links = odd.links(ranks, stride, replicas)
        link = links if isinstance(links, Link) else links[0][-1]
        assert link == (odd.network if crossing else odd.host)


def test_groups_of_hosts_that_they_do_not_divide():
    for devices, stride, local in [
        (3, 1, 3),
        (2, 1, 1),
        (1, 2, 1),
        (6, 1, 3),
        (2, 3, 1),
        (4, 1, 1),
    ]:
        odd = replace(H100, devices_per_host=3)
        bandwidth = (
            odd.host.bandwidth
            if local == devices
            else min(odd.host.bandwidth, local * odd.network.bandwidth)
        )
        latency = odd.host.latency if local == devices else odd.network.latency
        seconds = (devices - 1) * (latency + 1e9 / devices / bandwidth)
        assert odd.gather(1e9, devices, stride) == pytest.approx(seconds)


@pytest.mark.parametrize('sharding', ['replicate', 'shard'])
def test_the_outermost_axis_is_over_the_network(sharding):
    """A gather is half of an all-reduce as long, a reduce-scatter is as long as one."""
    machine = replace(H100, devices_per_host=2, reduce_scatter_ratio=2.0)
    host, network = machine.host, machine.network
    pipe_first = {'axes': ('pipe', 'data', 'tensor')}
    costs = {}
    for name, options in [('data', {}), ('pipe', pipe_first)]:
        found = plan(
            measured(1.0),
            mesh={'data': 2, 'pipe': 2},
            machine=machine,
            batch=8,
            schedules=['1f1b'],
            shardings=[sharding],
            **options,
        )
        costs[name] = found.costs
        assert found.axes == options.get('axes', ('data', 'pipe', 'tensor'))
        assert MeshPlan.from_dict(json.loads(json.dumps(found.to_dict()))).axes == found.axes
        assert found.name == 'data 2 × pipe 2 × tensor 1'
    assert costs['data'].links == host
    assert costs['pipe'].links == ((host, network), (network, host))
    for over, link in [('data', network), ('pipe', host)]:
        linked = replace(machine, host=link, network=link)
        for stage in costs[over].stages:
            whole = stage.gradient_bytes
            assert stage.reduction == pytest.approx(linked.all_reduce(whole, 2))


def test_few_devices_are_on_one_host():
    for tensor in (1, 2):
        assert piped(measured(1.0, tensor), 3, batch=3).costs.links == H100.host
    three, eight = (
        plan(Transformer(3, 96, 3, 96, 8), mesh={'tensor': 3}, machine=machine, batch=3)
        for machine in (H100, replace(H100, network=Link(1.0, 1.0)))
    )
    assert three.seconds == eight.seconds


def test_a_profile_without_times():
    zero = replace(
        measured(1.0),
        layers=tuple(
            replace(x, forward_seconds=0.0, backward_seconds=0.0) for x in measured(1.0).layers
        ),
    )
    with pytest.raises(ValueError, match='the profile has no times'):
        plan(zero, mesh=2, machine=H100, batch=8)
    assert plan(zero, devices=['cuda:0', 'cuda:1']).seconds == 0


def test_a_machine_without_limits_in_json():
    free = replace(H100, host=Link(), network=Link())
    again = Machine.from_dict(json.loads(json.dumps(free.to_dict(), allow_nan=False)))
    assert again == free
