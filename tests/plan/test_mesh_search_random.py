"""Plans of random models on random meshes: the account of a mesh is the one of the simulation."""

import random
from dataclasses import replace

import pytest

from torchgpipe.balance import LayerProfile, Profile, SkipProfile
from torchgpipe.plan import MACHINES, Link, ParameterBytes, Transformer, plan, simulate
from torchgpipe.plan.costs import TieProfile
from torchgpipe.plan.mesh_search import MeshSearch, _cases
from torchgpipe.plan.search import schedule_of
from torchgpipe.schedule import NAMES

STATES = [ParameterBytes(), ParameterBytes(4, 4, 8), ParameterBytes(8, 8, 16)]


def random_layer(draw, index):
    """Return a layer of one of three dtypes, of which some or all may be frozen."""
    size = draw.choice([2, 4, 8])
    number = draw.choice([0, 100, 1000, 10**5, 10**7]) * draw.randint(1, 5)
    frozen = draw.choice([0, 0, number, number // 3])
    layer = LayerProfile(
        str(index),
        draw.choice([0, 1e-3, 5e-3]) * draw.random() + 1e-5,
        draw.random() * 1e-2,
        number * size,
        frozen * size,
        draw.choice([0, 1000]),
        draw.randint(0, 10**8),
        draw.randint(1, 10**7),
        forward_overhead=draw.choice([0, 1e-4]),
        backward_bytes=draw.choice([0, 10**6]),
        trainable_parameters=number - frozen if draw.random() < 0.8 else None,
    )
    if draw.random() < 0.5:
        share = draw.random()
        layer = replace(layer, input_share=share, weight_share=1 - share + 0.1 * draw.random())
    return layer


def random_profile(draw):
    layers = [random_layer(draw, index) for index in range(draw.randint(2, 9))]
    if draw.random() < 0.4:  # a head with most of the parameters
        layers[-1] = replace(
            layers[-1],
            parameter_bytes=4 * 10**8,
            frozen_bytes=0,
            trainable_parameters=10**8,
            forward_seconds=draw.random() * 0.03,
        )
    skips = [
        SkipProfile(*sorted(draw.sample(range(len(layers)), 2)), draw.randint(1, 10**8))
        for _ in range(draw.choice([0, 0, 1, 2]))
    ]
    trained = [
        index
        for index, layer in enumerate(layers)
        if layer.trainable_parameters and layer.parameter_bytes - layer.frozen_bytes >= 200
    ]
    ties = []
    if len(trained) > 1 and draw.random() < 0.4:
        ties = [TieProfile((trained[0], trained[-1]), 200, 25)]
    return Profile(
        tuple(layers),
        tuple(skips),
        draw.choice([1, 2, 4]),
        draw.randint(1, 10**7),
        'cpu',
        tuple(ties),
    )


def random_machine(draw):
    host = Link(draw.choice([0, 1e-5, 1e-3]), draw.choice([1e9, 1e10, 3e11]))
    network = Link(1e-5, draw.choice([1e8, 1e9, 1e11]))
    return replace(
        MACHINES['H100'], host=host, network=network, devices_per_host=draw.choice([1, 2, 3, 8])
    )


def test_bounds_and_plans_of_random_models():
    for seed in range(64, 128):
        draw = random.Random(seed)
        profile, machine, state = random_profile(draw), random_machine(draw), draw.choice(STATES)
        data, pipe = draw.choice(
            [(1, 2), (2, 2), (3, 2), (1, 4), (2, 3), (4, 1), (1, 3), (2, 4), (1, 1), (2, 1)]
        )
        overlap = draw.choice([None, None, None, (), ('data',)])
        size, chunks = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 5, 8, 13, 24, 60])
        batch = data * size * chunks
        if pipe > len(profile.layers):
            continue
        search = MeshSearch(profile, machine, batch, state, overlap)
        cases = [
            *_cases(
                search,
                (data, pipe, 1),
                batch,
                [*NAMES],
                [1, 2, 3],
                [size],
                ['none', 'full'],
                ['replicate', 'shard'],
            )
        ]
        for case in draw.sample(cases, min(6, len(cases))):
            found = search.simulate(case, search.costs(case))
            seconds, bytes = search.bound(case)
            assert 0 < seconds <= found.seconds * (1 + 1e-9), (seed, case)
            assert bytes <= max(found.peak_bytes) * (1 + 1e-9), (seed, case)
        if seed % 3:
            continue
        limit, schedules = draw.choice([1e12, 1e9, 3e8]), draw.sample([*NAMES], 3)
        try:
            best = plan(
                profile,
                mesh={'data': data, 'pipe': pipe},
                machine=machine,
                batch=batch,
                overlap=overlap,
                micro_batches=[size],
                memory_limit=limit,
                schedules=schedules,
                state=state,
            )
        except ValueError as error:
            assert 'no plan for this mesh' in str(error)
            continue
        m = best.chunks
        whole = simulate(
            schedule_of(best.schedule, pipe, m, len(best.balance) // pipe, best.costs.stops),
            best.costs,
        )
        assert best.seconds == pytest.approx(whole.seconds, rel=1e-9)
        assert best.peaks == whole.peak_bytes and max(best.peaks) <= limit


def test_the_fastest_candidate_of_a_random_model():
    """Also of a model whose last layer has most of the parameters."""
    for seed in range(12):
        draw = random.Random(seed)
        profile, machine = random_profile(draw), random_machine(draw)
        sizes = {'data': 2, 'pipe': 2}
        options = {'machine': machine, 'batch': 16, 'micro_batches': [1, 2], 'virtual': 2}
        best = plan(profile, mesh=sizes, memory_limit=1e12, **options)
        search = MeshSearch(profile, machine, 16, ParameterBytes(), None)
        cases = _cases(
            search,
            (2, 2, 1),
            16,
            ['1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'zb-v', 'v-half', 'v-min'],
            [1, 2],
            [1, 2],
            ['none', 'full'],
            ['replicate', 'shard'],
        )
        assert best.seconds == pytest.approx(
            min(search.simulate(case, search.costs(case)).seconds for case in cases), rel=1e-9
        ), seed


def test_bounds_of_eager_transformers():
    for dtype in ('float32', 'bfloat16'):
        model = Transformer(6, 256, 4, 512, 128, dtype=dtype, sequence_parallel=True, eager=True)
        search = MeshSearch(model, MACHINES['H100'], 32, ParameterBytes(4, 4, 8), None)
        for sizes in ((1, 2, 1), (2, 2, 2), (1, 4, 2)):
            cases = _cases(
                search,
                sizes,
                32,
                [*NAMES],
                [1, 2],
                [1, 4],
                ['none', 'full'],
                ['replicate', 'shard'],
            )
            for case in cases:
                found = search.simulate(case, search.costs(case))
                seconds, bytes = search.bound(case)
                assert 0 < seconds <= found.seconds * (1 + 1e-9), case
                assert bytes <= max(found.peak_bytes) * (1 + 1e-9), case
