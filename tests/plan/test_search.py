"""Plans: the best candidate within memory, and the model made from a plan."""

import copy
import itertools
import json
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.devices import devices
from torchgpipe import GPipe
from torchgpipe.balance import LayerProfile, Profile, SkipProfile, profile
from torchgpipe.plan import Link, Plan, plan
from torchgpipe.schedule import NAMES

GPUS = ['cuda:0', 'cuda:1']


def made_up(layers, batch=32, seed=0, **others):
    """Make a profile from random numbers."""
    draw = random.Random(seed)
    return Profile(
        tuple(
            LayerProfile(
                str(k),
                draw.random(),
                2 * draw.random(),
                draw.randrange(1000),
                0,
                0,
                draw.randrange(4000),
                draw.randrange(1000),
                **others,
            )
            for k in range(layers)
        ),
        (SkipProfile(1, layers - 2, 100),),
        batch,
        500,
        'cpu',
    )


def test_overhead_of_actions_favours_fewer_actions():
    costs = made_up(9)
    free, paid = (
        plan(costs, devices=GPUS, overhead=dict.fromkeys('FBIWR', seconds))
        for seconds in (0.0, 0.5)
    )
    assert free == plan(costs, devices=GPUS) and paid.chunks < free.chunks
    assert paid.seconds > free.seconds


def test_it_is_the_fastest_of_all():
    """Each schedule, mode and number of chunks by itself, with the same balance."""
    costs = made_up(9)
    found = plan(costs, devices=GPUS)
    singles = [
        plan(costs, devices=GPUS, schedules=[name], chunks=[m], checkpoints=[mode])
        for name in ('plain call', *NAMES)
        for m in (1, 2, 4, 8, 16, 32)
        for mode in ('never', 'always', 'except_last')
    ]
    assert found.seconds == pytest.approx(min(each.seconds for each in singles))
    assert {found.schedule, *(each.schedule for each in found.runners_up)} == {
        'plain call',
        *NAMES,
    }
    seconds = [found.seconds, *(each.seconds for each in found.runners_up)]
    assert seconds == sorted(seconds)


def test_of_equally_fast_ones_that_which_takes_less_memory():
    costs = replace(made_up(6), skips=())
    found = plan(
        costs,
        devices=GPUS,
        schedules=['plain call', 'gpipe', '1f1b'],
        chunks=[8],
        checkpoints=['never'],
    )
    others = [each.schedule for each in found.runners_up]
    assert (found.schedule, others) == ('1f1b', ['gpipe', 'plain call'])
    assert found.seconds == pytest.approx(found.runners_up[1].seconds)


def test_virtual_stages_and_their_devices():
    def devices(name, **options):
        return plan(made_up(9), devices=GPUS, schedules=[name], **options).devices

    assert devices('zb-v') == ('cuda:0', 'cuda:1', 'cuda:1', 'cuda:0')
    assert devices('interleaved') == ('cuda:0', 'cuda:1') * 2
    assert len(devices('looped-bfs', virtual=4, chunks=[2])) in (4, 6, 8)
    with pytest.raises(ValueError, match='nothing to choose from'):
        devices('zb-v', virtual=1)


def test_it_keeps_limits_of_memory():
    for seed in range(6):
        costs = made_up(12, seed=seed)
        options = {'devices': GPUS, 'param_scale': 0.0, 'chunks': [4]}
        free = plan(costs, **options)
        for part in (0.9, 0.7):
            limit = [int(part * size) for size in free.bytes.values()]
            found = plan(costs, memory_limit=limit, **options)
            assert all(size <= most for size, most in zip(found.bytes.values(), limit)), seed
            assert found.seconds >= free.seconds, seed


@pytest.fixture
def no_tries(monkeypatch):
    """Leave out the runs after the search."""
    monkeypatch.setattr('torchgpipe.plan.search.TRIES', 0)


def test_another_balance_where_the_fastest_does_not_fit(no_tries):
    """The first layer is as quick as others, and has more parameters."""
    layers = [LayerProfile(str(k), 1.0, 2.0, 100, 0, 0, 8, 8) for k in range(8)]
    layers[0] = replace(layers[0], parameter_bytes=500)
    costs = Profile(tuple(layers), (), 8, 8, 'cpu')

    def balances(**options):
        found = plan(
            costs, devices=GPUS, schedules=['plain call', '1f1b'], param_scale=1.0, **options
        )
        return [each.balance for each in (found, *found.runners_up)]

    assert balances() == [(4, 4)] * 2
    assert balances(memory_limit=800) == [(3, 5)] * 2
    assert balances(memory_limit=[None, 400]) == [(5, 3)] * 2


def test_one_device_has_one_stage():
    found = plan(made_up(6), devices=['cuda:0'])
    assert {len(each.balance) for each in (found, *found.runners_up)} == {1}


def test_multiples_of_the_number_of_devices():
    """Where micro-batches cost nothing, there are as many as can be."""
    found = plan(made_up(6, batch=12), devices=[*GPUS, 'cuda:2'], schedules=['1f1b'])
    assert found.chunks == 12


def test_it_says_how_much_is_missing():
    costs = made_up(8)
    size = sum(layer.parameter_bytes for layer in costs.layers) * 2
    with pytest.raises(
        ValueError,
        match=r'parameters.* take .* KiB, and the limits add up to '
        r'1.95 KiB, which is .* less\. Take larger',
    ):
        plan(costs, devices=GPUS, memory_limit=1000)
    limit = size // 2 + 10
    with pytest.raises(
        ValueError,
        match=r'The closest one .* takes .* on cuda:\d, .* more than '
        r"its limit of .*: '.*' with \d+ chunks, checkpoint",
    ):
        plan(costs, devices=GPUS, memory_limit=limit)


def test_near_the_closest_one_there_may_be_one_that_fits(monkeypatch):
    """Where a cut by bounds is too coarse: it has one bound for both stages of a device."""
    sizes = [300, 100, 100, 20, 20, 100, 20, 20]
    costs = Profile(
        tuple(LayerProfile(str(k), 1.0, 2.0, size, 0, 0, 0, 0) for k, size in enumerate(sizes)),
        (),
        8,
        0,
        'cpu',
    )
    limits = [sum(sizes[:1] + sizes[7:]), sum(sizes[1:7])]
    options = {'devices': GPUS, 'schedules': ['zb-v'], 'param_scale': 1.0}
    found = plan(costs, memory_limit=limits, **options)
    assert [*found.bytes.values()] == limits
    monkeypatch.setattr('torchgpipe.plan.search.TRIES', 0)
    with pytest.raises(ValueError, match='The closest one'):
        plan(costs, memory_limit=limits, **options)


def test_layers_are_measured_with_the_threads_of_a_worker():
    found = []

    class Layer(nn.Linear):
        def forward(self, input):
            found.append(torch.get_num_threads())
            return super().forward(input)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for number, share in ((2, 2), (5, 1), (1, 4)):
            found.clear()
            plan(
                nn.Sequential(*[Layer(2, 2) for _ in range(5)]),
                torch.rand(8, 2),
                devices=[f'cpu:{j}' for j in range(number)],
                timeout=0,
                schedules=['1f1b'],
            )
            assert {*found} == {share} and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


def test_the_plain_call_has_one_thread_for_backward_on_the_cpu():
    layers = tuple(LayerProfile(str(k), 1.0, 2.0, 8, 0, 0, 8, 8) for k in range(2))
    costs = Profile(layers, (), 4, 8, 'cpu')
    options = {'schedules': ['plain call'], 'chunks': [4], 'checkpoints': ['always']}
    on_cpu = plan(costs, devices=['cpu:0', 'cpu:1'], **options)
    # Five clocks of forward, 0.25 s each; eight recomputations and backwards.
    assert on_cpu.seconds == 5 * 0.25 + 8 * 0.75
    on_gpus = plan(costs, devices=GPUS, **options)
    # Five clocks each way; the first recomputation of device 0 is concurrent with device 1's.
    assert on_gpus.seconds == 5 * 0.25 + 0.75 + 4 * 0.75 - 0.25


def test_the_plain_call_has_one_thread_on_the_cpu_only():
    """If one partition is on an accelerator, its lane runs concurrently with the CPU's."""
    layers = tuple(LayerProfile(str(k), 1.0, 2.0, 8, 0, 0, 8, 8) for k in range(2))
    options = {
        'schedules': ['plain call'],
        'chunks': [4],
        'checkpoints': ['always'],
        'links': Link(),
    }
    costs = Profile(layers, (), 4, 8, 'cpu')
    on_both = plan(costs, devices=['cpu', 'cuda:0'], **options)
    assert on_both.seconds == plan(costs, devices=GPUS, **options).seconds


def test_the_plain_call_has_the_gradient_of_the_whole_output():
    for m in [1, 4]:
        layers = tuple(LayerProfile(str(k), 1.0, 2.0, 8, 0, 0, 16, 80) for k in range(2))
        options = {'devices': GPUS, 'chunks': [m], 'checkpoints': ['never']}
        one, other = (
            plan(Profile(layers, (), 4, 8, 'cpu'), schedules=[name], **options).bytes
            for name in ('plain call', 'gpipe')
        )
        assert one['cuda:0'] == other['cuda:0'] and one['cuda:1'] == other['cuda:1'] + 80, m


def test_another_batch():
    costs = made_up(4, forward_overhead=0.0)
    twice = plan(costs, devices=GPUS, batch=64, chunks=[4])
    assert twice.seconds == pytest.approx(2 * plan(costs, devices=GPUS, chunks=[4]).seconds)
    assert twice.batch_size == 64
    layer = LayerProfile('0', 1.0, 2.0, 0, 0, 0, 8, 8, None, 1.0, 2.0)
    fixed = Profile((layer,), (), 8, 8, 'cpu')
    assert plan(fixed, devices=['cuda:0'], batch=80, chunks=[1]).seconds == 3


def test_links():
    slow = plan(made_up(9), devices=GPUS, links=Link(latency=1.0), schedules=['1f1b'])
    fast = plan(made_up(9), devices=GPUS, schedules=['1f1b'])
    assert slow.seconds > fast.seconds + 1


def test_bad_input():
    for options, what in [
        ({'devices': []}, 'devices must be one or more'),
        ({'devices': ['cpu', 'cpu:0']}, 'each of them once'),
        ({'devices': ['nowhere']}, "unknown device 'nowhere'"),
        ({'devices': GPUS, 'schedules': ['none']}, "there is no schedule 'none'; there are plain"),
        ({'devices': GPUS, 'schedules': []}, 'there is nothing to choose from'),
        ({'devices': GPUS, 'chunks': [0]}, 'chunks must be a positive integer, but is 0'),
        ({'devices': GPUS, 'batch': 0}, 'batch must be a positive integer, but is 0'),
        ({'devices': GPUS, 'checkpoints': ['some']}, 'checkpoint is not one of'),
        ({'devices': GPUS, 'memory_limit': [1]}, 'memory_limit has 1 entries for 2 devices'),
        ({'devices': GPUS, 'memory_limit': -1}, 'memory_limit must be a number of bytes'),
        (
            {'devices': [f'cuda:{k}' for k in range(7)]},
            'shorter .* partitions: 6 layers cannot be cut into 7',
        ),
    ]:
        with pytest.raises(ValueError, match=what):
            plan(made_up(6), **options)
    for options, what in [
        ({'devices': GPUS, 'batch': True}, 'batch must be an integer, but is True'),
        ({'devices': 'cuda:0'}, "devices must be a sequence of devices: .'cuda:0'."),
    ]:
        with pytest.raises(TypeError, match=what):
            plan(made_up(6), **options)


@pytest.mark.slow
def test_many_layers_and_sixteen_devices():
    overheads = {'changes': None, 'forward_overhead': 1e-4, 'backward_overhead': 1e-4}
    found = plan(made_up(100, 256, **overheads), devices=[f'cuda:{k}' for k in range(16)])
    assert found.speed_up > 8


def stack():
    """Return equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*itertools.chain(*[(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]))


def squares(output, target):
    """Return the mean of squares, in operations that each device has."""
    return (output - target).square().mean()


@devices
def test_a_model_made_by_a_plan(devices):
    for name in ('plain call', '1f1b', 'zb-h1', 'interleaved', 'zb-v'):
        train_by_a_plan(devices, name)


def train_by_a_plan(devices, name):
    """Compare the gradients of a step with those of the model."""
    x, target = torch.rand(2, 16, 8, device=devices.first, dtype=torch.float64).unbind()
    module = stack().double()
    places = devices.distinct(2)
    found = plan(
        module,
        x,
        devices=places,
        schedules=[name],
        chunks=[4],
        timeout=0.0,
        checkpoints=['except_last'],
    )
    expected = stack().double().to(devices.first)
    loss = squares(expected(x), target)
    loss.backward()
    model = GPipe(module, found)
    assert (model.balance, model.chunks, model.checkpoint) == (
        list(found.balance),
        4,
        'except_last',
    )
    assert [*map(str, model.devices)] == [*found.devices]
    for model in (model, copy.deepcopy(model)):
        model.zero_grad()
        y = target.to(model.devices[-1])
        found = model.step(x, y, squares, schedule='auto')
        assert torch.allclose(found.cpu(), loss.detach().cpu(), rtol=0, atol=1e-12)
        for own, other in zip(model.parameters(), expected.parameters()):
            assert torch.allclose(own.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)


@pytest.mark.slow
@devices
def test_a_searched_order(devices):
    """It is faster than named schedules in the same memory, and survives JSON."""
    layers = [LayerProfile(str(k), 1.0 + k % 3, 2.0 + k % 2, 4, 0, 0, 100, 10) for k in range(8)]
    profile = Profile(tuple(layers), (), 16, 10, 'cpu')
    places = devices.distinct(2)
    found = plan(
        profile,
        devices=places,
        chunks=[8],
        memory_limit=130,
        overhead={},
        schedules=['1f1b', 'zb-h1', 'searched'],
    )
    assert found.schedule == 'searched' and found.checkpoint == 'never'
    assert max(found.bytes.values()) <= 130
    assert found.seconds < 0.97 * min(each.seconds for each in found.runners_up)
    found = Plan.from_dict(json.loads(json.dumps(found.to_dict())))
    assert 'W7' in found.order and 'searched' in str(found)
    module = stack().double()
    x, target = torch.rand(2, 16, 8, device=devices.first, dtype=torch.float64).unbind()
    expected = copy.deepcopy(module).to(devices.first)
    squares(expected(x), target).backward()
    sizes = [sum(x.nbytes for x in layer.parameters()) for layer in module]
    model = GPipe(module, replace(found, layers=tuple(zip(map(str, range(8)), sizes))))
    model.step(x, target.to(model.devices[-1]), squares, schedule='auto')
    for own, other in zip(model.parameters(), expected.parameters()):
        assert torch.allclose(own.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_an_order_is_searched_where_no_named_schedule_fits():
    layers = [LayerProfile(str(k), 1.0, 2.0, 4, 0, 0, 120, 16) for k in range(8)]
    options = {
        'devices': ['cpu:0', 'cpu:1'],
        'chunks': [4],
        'checkpoints': ['never'],
        'memory_limit': 200,
    }
    profile = Profile(tuple(layers), (), 8, 16, 'cpu')
    with pytest.raises(ValueError, match='no plan keeps the memory limit'):
        plan(profile, schedules=['1f1b'], **options)
    for others in ['plain call'], []:  # The costs of the plain call are others.
        found = plan(profile, schedules=[*others, 'searched'], **options)
        assert found.schedule == 'searched' and max(found.bytes.values()) <= 200
        assert found.costs.stages[-1].resident_bytes == 8 * found.balance[-1]
    del options['memory_limit']  # The plain call is as fast as fill and drain.
    found = plan(profile, schedules=['plain call', 'gpipe', 'searched'], **options)
    assert found.schedule == 'searched'
    assert found.costs.stages[-1].resident_bytes == 8 * found.balance[-1]


def test_plans_that_a_model_refuses():
    sample = torch.rand(8, 8)
    found = plan(stack(), sample, devices=['cpu:0', 'cpu:1'], timeout=0.0, schedules=['1f1b'])
    for options in ({'chunks': 2}, {'devices': ['cpu', 'cpu']}, {'checkpoint': 'never'}):
        with pytest.raises(ValueError, match='a plan says devices, chunks, checkpoint and keep'):
            GPipe(stack(), found, **options)
    with pytest.raises(ValueError, match='profile of another module'):
        GPipe(nn.Sequential(*stack(), nn.ReLU()), found)
    model = GPipe(stack(), found.balance, devices=found.devices)
    with pytest.raises(ValueError, match="schedule='auto' is that of a plan"):
        model.step(sample, sample, nn.functional.mse_loss, schedule='auto')


def test_a_given_profile_is_as_good_as_the_model():
    module = stack()
    costs = profile(module, torch.rand(8, 8), device='cpu', timeout=0.0)
    found = plan(costs, devices=['cpu:0', 'cpu:1'], chunks=[2])
    assert found.layers == tuple((layer.name, layer.parameter_bytes) for layer in costs.layers)
    assert GPipe(module, found).chunks == 2
