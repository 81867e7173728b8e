"""Plans for a mesh: bounds, steady states, the best of all candidates, reasons, refusals."""

import gc
import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.balance import Profile
from torchgpipe.plan import (
    MACHINES,
    Link,
    MeshPlan,
    ParameterBytes,
    Transformer,
    plan,
    plan_mesh,
    simulate,
)
from torchgpipe.plan.costs import LayerProfile
from torchgpipe.plan.mesh_search import HOPELESS, SCHEDULES, MeshSearch, _Case
from torchgpipe.plan.search import schedule_of
from torchgpipe.schedule.generators import SPLIT, V_SHAPED

H100 = MACHINES['H100']
GPT = Transformer(14, 2048, 16, 50304, 2048)


def case(
    mesh=(1, 4, 1),
    schedule='1f1b',
    virtual=1,
    micro_batch=1,
    recomputation='none',
    data='replicate',
):
    return _Case(mesh, schedule, virtual, micro_batch, recomputation, data)


#: Schedules with their number of stages on a rank.
STAGES = [
    ('1f1b', 1),
    ('gpipe', 1),
    ('interleaved', 2),
    ('interleaved', 3),
    ('looped-bfs', 2),
    ('zb-h1', 1),
    ('zb-h2', 1),
    *((name, 2) for name in V_SHAPED),
]
MESHES = [(2, 4, 2), (1, 5, 1), (4, 2, 4)]
OVERLAPS = [None, (), ('data', 'tensor')]


def test_no_bound_is_above_the_simulation():
    """Each pair of values of two options is there."""
    others = [*product(('none', 'full'), ('replicate', 'shard'), OVERLAPS)]
    for (k, (schedule, virtual)), (n, mesh) in product(enumerate(STAGES), enumerate(MESHES)):
        recomputation, data, overlap = others[(7 * k + 4 * n) % 12]
        one = case(mesh, schedule, virtual, 2, recomputation, data)
        search = MeshSearch(GPT, H100, 2 * 121 * mesh[0], ParameterBytes(), overlap)
        costs, m = search.costs(one), search.chunks(one)
        assert m == 121
        all = simulate(schedule_of(schedule, mesh[1], m, virtual, costs.stops), costs)
        low, bytes = search.bound(one)
        assert 0.5 * all.seconds < low <= all.seconds * (1 + 1e-9), (one, overlap)
        assert bytes <= max(all.peak_bytes), (one, overlap)


@pytest.mark.slow
def test_the_best_of_all():
    """A search with bounds finds the plan that simulating each candidate finds."""
    options = {'machine': H100, 'batch': 64, 'micro_batches': (1, 2, 4), 'virtual': 2}
    found = plan(GPT, mesh=8, **options)
    each = [
        plan(
            GPT,
            mesh=dict(zip(('data', 'pipe', 'tensor'), sizes)),
            machine=H100,
            batch=64,
            schedules=[schedule],
            micro_batches=[micro_batch],
            recomputations=[recomputation],
            shardings=[sharding],
            virtual=2,
        )
        for sizes in product((1, 2, 4, 8), repeat=3)
        if sizes[0] * sizes[1] * sizes[2] == 8
        for schedule in ('1f1b', 'interleaved', *SPLIT)
        if sizes[1] > 1 or schedule == '1f1b'
        for micro_batch in (1, 2, 4)
        if 64 // sizes[0] % micro_batch == 0
        for recomputation in ('none', 'full')
        for sharding in ('replicate', 'shard')
    ]
    assert found.seconds == min(each, key=lambda x: x.seconds).seconds
    by_mesh = {}
    for one in each:
        by_mesh[one.name] = min(one.seconds, by_mesh.get(one.name, one.seconds))
    for one in (found, *found.runners_up):
        if by_mesh[one.name] < HOPELESS * found.seconds:
            assert one.seconds == pytest.approx(by_mesh[one.name])
        assert one.seconds >= by_mesh[one.name] * (1 - 1e-6)
    assert len(found.runners_up) == len(by_mesh) - 1
    assert [x.seconds for x in found.runners_up] == sorted(x.seconds for x in found.runners_up)
    assert found.simulation.seconds == pytest.approx(found.seconds)


def test_parts_add_up_and_links_are_their_reason():
    slow = replace(H100, host=Link(1e-5, 1e9))
    found = plan(GPT, mesh=4, machine=slow, batch=16, virtual=1)
    assert found.mesh['tensor'] == 1
    four = next(x for x in found.runners_up if x.mesh['tensor'] == 4)
    assert four.reason.endswith(': tensor') and four.parts['tensor'] > 0.5 * four.seconds
    for one in (found, *found.runners_up):
        assert all(seconds >= -1e-9 for seconds in one.parts.values()), one.parts
        assert sum(one.parts.values()) == one.seconds
        # All devices together have the work of one device without links.
        assert one.parts['compute'] * 4 == pytest.approx(found.parts['compute'] * 4, rel=0.2)


def test_few_micro_batches_make_a_bubble():
    found = plan(GPT, mesh={'pipe': 4}, machine=H100, batch=4, schedules=['1f1b'])
    assert found.parts['bubble'] > 0.3 * found.seconds
    many = plan(GPT, mesh={'pipe': 4}, machine=H100, batch=64, schedules=['1f1b'])
    assert many.parts['bubble'] < 0.2 * many.seconds


def test_replicas_reduce_gradients():
    for overlap in [False, True]:
        found, one = (
            plan(
                GPT,
                mesh={'data': d},
                machine=H100,
                batch=8 * d,
                shardings=['replicate'],
                overlap=['data'] if overlap else [],
                memory_limit=1e12,
            )
            for d in (64, 1)
        )
        whole = H100.all_reduce(4 * GPT.parameters, 64)
        if overlap:
            assert found.parts['data'] < whole, overlap
        else:
            assert found.parts['data'] == pytest.approx(whole), overlap
            assert found.seconds - one.seconds == pytest.approx(whole), overlap


def test_shards_take_less_memory_and_a_gather():
    whole, parts = (
        plan(GPT, mesh={'data': 8}, machine=H100, batch=64, shardings=[x])
        for x in ('replicate', 'shard')
    )
    saved = 12 * 7 / 8 * GPT.parameters
    assert max(whole.peaks) - max(parts.peaks) == pytest.approx(saved)
    assert parts.parts['update'] == pytest.approx(whole.parts['update'] / 8)
    assert parts.parts['data'] == pytest.approx(
        H100.gather(4 * GPT.parameters, 8) + H100.gather(2 * GPT.parameters, 8)
    )


def test_memory_decides():
    """Less memory: first other settings, then fewer meshes, then none, which says why."""
    free = plan(GPT, mesh=8, machine=H100, batch=64)
    less = plan(GPT, mesh=8, machine=H100, batch=64, memory_limit=8e9)
    assert max(less.peaks) <= 8e9 < max(free.peaks) and less.seconds > free.seconds
    assert less.refused['data 8 × pipe 1 × tensor 1'].endswith(' on a rank, of 7.45 GiB')
    with pytest.raises(
        ValueError,
        match='no plan for this mesh:\ndata 1 .* takes at least .* on a rank, of 954 MiB',
    ):
        plan(GPT, mesh=8, machine=H100, batch=64, memory_limit=1e9)


@pytest.mark.parametrize(
    'options, most', [({'mesh': 16}, 0.05), ({'mesh': {'pipe': 4}, 'memory_limit': 9e9}, 0.08)]
)
def test_bounds_leave_few_candidates(options, most, monkeypatch):
    """A looser bound would give the same plan, after more simulations."""
    calls = {'simulate': 0, 'bound': 0}

    def count(name, method):
        def counted(*args):
            calls[name] += 1
            return method(*args)

        monkeypatch.setattr(MeshSearch, name, counted)

    for name in calls:
        count(name, getattr(MeshSearch, name))
    plan(GPT, machine=H100, batch=64, **options)
    assert 0 < calls['simulate'] <= most * calls['bound']


def test_a_part_of_the_memory_is_for_others_by_default():
    free = plan(GPT, mesh={'data': 8}, machine=H100, batch=64, memory_limit=1e15)
    for memory, fits in ((0.89, True), (0.91, False)):
        machine = replace(H100, memory=max(free.peaks) / memory)
        found = plan(GPT, mesh={'data': 8}, machine=machine, batch=64)
        assert (found.peaks == free.peaks) is fits and max(found.peaks) <= 0.9 * machine.memory


@pytest.mark.slow
def test_a_refusal_has_the_least_memory_that_is_possible():
    def refusal(limit, **options):
        with pytest.raises(ValueError, match='takes at least') as error:
            plan(GPT, mesh={'pipe': 8}, machine=H100, batch=64, memory_limit=limit, **options)
        return str(error.value).rpartition('takes at least ')[2].partition(' on')[0]

    least = min(
        max(
            plan(
                GPT,
                mesh={'pipe': 8},
                machine=H100,
                batch=64,
                recomputations=[r],
                micro_batches=[1],
                schedules=[s],
                memory_limit=1e15,
            ).peaks
        )
        for r in ('none', 'full')
        for s in SCHEDULES
    )
    # In between, some candidates have bounds that fit, and others take less memory than these.
    for part in (0.999, 0.99, 0.9, 0.7, 0.5, 0.3):
        number, unit = refusal(part * least).split()
        assert float(number) * {'GiB': 2**30, 'MiB': 2**20}[unit] <= 1.01 * least


def test_the_plan_runs_within_its_memory_as_simulated():
    found = plan(GPT, mesh=8, machine=H100, batch=64)
    assert found.simulation.peak_bytes == pytest.approx(found.peaks, rel=0.01)
    parts = found.simulation.peak_parts
    assert [sum(x.values()) for x in parts] == pytest.approx(found.simulation.peak_bytes)
    assert {'resident', 'activations'} <= {*parts[0]}


def measured(seconds, tensor=1):
    return Profile(
        tuple(
            LayerProfile(str(k), seconds / tensor, 2 * seconds / tensor, 800, 0, 0, 100, 40)
            for k in range(8)
        ),
        (),
        1,
        40,
        'cpu',
    )


def test_measured_layers():
    found = plan(
        measured(1.0),
        mesh=2,
        machine=H100,
        batch=8,
        state=ParameterBytes(4, 4, 0),
        micro_batches=[1],
    )
    assert found.mesh == {'data': 2, 'pipe': 1, 'tensor': 1}
    assert found.parts['compute'] == pytest.approx(8 * 8 * 3 / 2)
    assert max(found.peaks) == 8 * 2.5 * 800 + 8 * 100 + 4 * 40 + 40 + 2 * 40
    assert found.refused == {
        'data 1 × pipe 1 × tensor 2': 'there is no profile for 2 ranks of '
        'the tensor axis, only for 1'
    }
    both = plan(
        {1: measured(1.0), 2: measured(1.0, 4)}, mesh=2, machine=H100, batch=8, micro_batches=[1]
    )
    assert both.mesh['tensor'] == 2


def test_a_module_is_measured():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    found = plan(model, torch.rand(8, 16), mesh={'pipe': 2}, machine=H100, batch=32, timeout=0.01)
    assert sum(found.balance) == 4 and found.mesh['pipe'] == 2 and found.chunks >= 1
    assert found.layers[0] == ('0', 16 * 17 * 4)


def test_json():
    machine = replace(H100, split=0.0, actions={})  # Then a pipeline is first.
    found = plan(GPT, mesh=4, machine=machine, batch=16)
    again = MeshPlan.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert hash(again) == hash(found) and {found: 1}[again]
    assert again == found and again.runners_up == found.runners_up and str(again) == str(found)
    for wrong in (
        {'devices': found.devices[1:]},
        {'chunks': 3},
        {'parts': {}},
        {'mesh': {}},
        {'balance': [0, *found.balance[1:]]},
        {'schedule': 'none'},
        {'order': '0F0'},
        {'checkpoint': 'some'},
        {'mesh': {'data': '4', 'pipe': 1, 'tensor': 1}},
        {'mesh': {'data': 2, 'pipe': 3, 'tensor': 1}},
        {'devices': []},
        {'recomputation': 'half'},
        {'data': 'copy'},
        {'axes': ['tensor', 'data', 'pipe']},
        {'axes': ['data', 'data', 'tensor']},
        {'peaks': [1.0, 2.0, 3.0]},
        {'schedule': 'zb-h1'},
        {'schedule': 'searched'},
        {'chunks': '1'},
        {'micro_batch': 0},
    ):
        with pytest.raises(ValueError, match='this is not a plan'):
            MeshPlan.from_dict({**found.to_dict(), **wrong})


def test_a_split_backward_and_actions_have_costs():
    """A pipeline that splits is the fastest of its mesh only if that costs little."""

    def first(**costs):
        machine = replace(H100, **costs)
        return plan(GPT, mesh={'pipe': 4}, machine=machine, batch=16)

    free, split = first(split=0.0, actions={}), first(split=0.5, actions={})
    assert free.schedule == 'zb-v' and split.schedule not in SPLIT
    assert split.seconds > free.seconds
    slow = first(split=0.0, actions=dict.fromkeys('FBIWR', 0.05))
    assert slow.seconds > 2 * free.seconds and slow.chunks < free.chunks


def test_text_and_picture(tmp_path):
    found = plan(GPT, mesh=4, machine=H100, batch=16, memory_limit=25e9)
    text = str(found)
    assert text.count('\n') > 4 and 'the first: compute' in text
    assert all(x.reason in text for x in found.runners_up)
    assert all(f'{name}: {why}' in text for name, why in found.refused.items())
    assert found.draw().get_suptitle() == found.name
    figure = found.draw('a title')
    assert figure.get_suptitle() == 'a title'
    assert [axes.get_xlabel() for axes in figure.axes] == [
        'seconds of a step',
        'place along the pipe axis',
    ]
    figure.savefig(tmp_path / 'plan.svg')


def test_a_plan_for_a_mesh_is_not_for_one_process():
    found = plan(measured(1.0), mesh=2, machine=H100, batch=8)
    with pytest.raises(ValueError, match='this plan is for the processes of a mesh'):
        GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))), found)


def test_refused():
    for options, error, text in [
        ({'mesh': 0}, ValueError, 'mesh must be a positive integer, but is 0'),
        ({'mesh': 1.5}, TypeError, 'mesh must be an integer'),
        ({'mesh': {'expert': 2}}, ValueError, r"axes of .*, but this one has \['expert'\]"),
        ({'mesh': {'data': 0}}, ValueError, 'data must be a positive integer'),
        (
            {'machine': 'H1000'},
            ValueError,
            "there is no machine 'H1000'; there are A100, H100, B200",
        ),
        ({'batch': 0}, ValueError, 'batch must be a positive integer'),
        (
            {'batch': 3},
            ValueError,
            'data 2 × pipe 1 × tensor 1: 2 replicas cannot share 3 samples',
        ),
        ({'schedules': ['1f2b']}, ValueError, r"schedules are of .*, but are \['1f2b'\]"),
        ({'schedules': []}, ValueError, 'schedules are of'),
        ({'recomputations': ['some']}, ValueError, 'recomputations are of'),
        ({'shardings': ['both']}, ValueError, 'shardings are of'),
        ({'axes': ('tensor', 'data', 'pipe')}, ValueError, r"axes are \('data', 'pipe', 'tensor"),
        ({'axes': None}, ValueError, 'but these are None'),
        ({'axes': {'data', 'pipe', 'tensor'}}, ValueError, 'but these are {'),
        ({'axes': ('data', 'tensor')}, ValueError, r"but these are \('data', 'tensor'\)"),
        ({'overlap': ['pipe']}, ValueError, r"overlap are of \('data', 'tensor'\)"),
        ({'micro_batches': [3]}, ValueError, r'no micro-batch of \[3\] divides the 8 samples'),
        (
            {'mesh': {'pipe': 17}},
            ValueError,
            '17 ranks have a stage each, but there are 16 at most',
        ),
        ({'mesh': {'tensor': 3}}, ValueError, '3 ranks cannot share 16 heads'),
        (
            {'mesh': {'pipe': 9}, 'schedules': ['zb-v']},
            ValueError,
            r"none of .*'zb-v'.* runs on 9 ranks, "
            r'with \[1, 2, 3, 4\] stages on each and 16 at most',
        ),
        ({'mesh': {'pipe': 2}, 'balance': [8, 7]}, ValueError, r'16 layers, but is \[8, 7\]'),
        ({'mesh': {'pipe': 2}, 'balance': [16, 0]}, ValueError, 'must divide 16 layers'),
        ({'mesh': {'pipe': 2}, 'balance': [5, 5, 6]}, ValueError, 'runs on 2 ranks'),
        ({'machine': None}, ValueError, 'there is no machine None'),
        ({'micro_batches': [0]}, ValueError, 'micro_batches must be a positive integer, but is 0'),
        ({'virtual': 0}, ValueError, 'virtual must be a positive integer, but is 0'),
        ({'virtual': [2, 0]}, ValueError, 'virtual must be a positive integer, but is 0'),
        ({'recomputations': []}, ValueError, 'recomputations are of'),
        ({'memory_limit': float('nan')}, ValueError, 'memory_limit must be a number of bytes'),
        ({'memory_limit': '80GiB'}, ValueError, 'memory_limit must be a number of bytes'),
    ]:
        with pytest.raises(error, match=text):
            plan(GPT, **{'mesh': {'data': 2}, 'machine': H100, 'batch': 16} | options)


def test_the_garbage_collector_pauses(monkeypatch):
    seen = []
    simulated = MeshSearch.simulate
    monkeypatch.setattr(
        MeshSearch, 'simulate', lambda *args: seen.append(gc.isenabled()) or simulated(*args)
    )
    before = gc.isenabled()
    try:
        for change, enabled in ((gc.disable, False), (gc.enable, True)):
            change()
            plan(GPT, mesh=2, machine=H100, batch=2)
            with pytest.raises(ValueError, match='no plan'):
                plan(GPT, mesh=2, machine=H100, batch=2, memory_limit=1)
            assert {*seen} == {False} and gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


def test_devices_or_a_mesh():
    for options in {}, {'devices': ['cpu'], 'mesh': 2}:
        with pytest.raises(TypeError, match='give one of devices=… and mesh=…'):
            plan(nn.Sequential(nn.Linear(1, 1)), torch.ones(1, 1), **options)
    with pytest.raises(TypeError, match=r'measured with a sample: plan\(module, sample, …\)'):
        plan(nn.Sequential(nn.Linear(1, 1)), mesh=2, machine=H100, batch=2)
    with pytest.raises(TypeError, match="for a module, a profile or a Transformer, not 'gpt2'"):
        plan('gpt2', mesh=2, machine=H100, batch=2)
    with pytest.raises(ValueError, match="^H100 has no peak for 'int8'"):
        plan(replace(GPT, dtype='int8'), mesh=2, machine=H100, batch=2)


@pytest.mark.slow
def test_gpt3_on_many_devices():
    """Megatron's way is near: tensor parallel within a host, pipelines over hosts."""
    gpt3 = Transformer(96, 12288, 96, 51200, 2048)
    found = plan_mesh(
        gpt3,
        mesh=4096,
        machine='H100',
        batch=1024,
        virtual=1,
        schedules=['1f1b'],
        micro_batches=[1, 2],
    )
    assert 2 <= found.mesh['tensor'] <= 8 and found.mesh['pipe'] >= 8
    assert max(found.peaks) <= H100.memory
