"""A dry run has the sizes, messages, collectives and memory of the real run."""

import sys
import threading
from functools import partial
from math import prod

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.dry_run.real import SIZE, WIDTH, arguments, real
from tests.helpers import Call
from tests.marks import slow_after
from tests.shard.processes import run
from tests.skip.layers import Pop, StashLinear
from torchgpipe import NoChunk
from torchgpipe.distributed import DistributedGPipe, dry_run, init_mesh
from torchgpipe.dry_run.virtual import REPEATS, VirtualRank
from torchgpipe.schedule import make
from torchgpipe.schedule.generators import V_SHAPED
from torchgpipe.sequential import from_stages, to_sequential
from torchgpipe.skip import Namespace

#: Models, sizes of the mesh (data, pipe, tensor), schedules and uses of parameters. Each
#: schedule runs in a pipeline, and each model on each axis.
CASES = [
    ('equal', (1, 2, 1), '1f1b', 'replicate'),
    ('dictionaries', (1, 1, 2), 'gpipe', 'replicate'),
    ('tied', (2, 1, 1), 'zb-h1', 'shard'),
    ('skips', (1, 4, 1), 'v-min', 'replicate'),
    ('tied', (1, 2, 2), 'v-half', 'replicate'),
    ('dictionaries', (2, 2, 1), 'zb-v', 'shard'),
    ('skips', (2, 2, 1), 'interleaved', 'shard'),
    ('tied', (2, 2, 1), 'gpipe', 'replicate'),
    ('equal', (2, 2, 2), 'zb-h1', 'shard'),
    ('skips', (2, 1, 2), '1f1b', 'replicate'),
    ('dictionaries', (1, 2, 1), 'zb-h1', 'replicate'),
    ('equal', (2, 1, 1), 'interleaved', 'replicate'),
]


def dry(model, mesh, schedule, data, checkpoint='except_last', **more):
    """Return the report of a case."""
    module, balance, options = arguments(model, mesh, schedule, data, checkpoint)
    x = torch.empty(SIZE, WIDTH, dtype=torch.float64, device='meta')
    return dry_run(
        module,
        balance,
        x,
        x,
        F.mse_loss,
        mesh=mesh,
        schedule=schedule,
        optimizer=torch.optim.AdamW,
        **options,
        **more,
    )


@pytest.mark.parametrize('model, sizes, schedule, data', slow_after(3, CASES))
def test_sizes_messages_collectives_and_peaks_are_the_real_ones(model, sizes, schedule, data):
    mesh = dict(zip(('data', 'pipe', 'tensor'), sizes))
    case = model, mesh, schedule, data
    report = dry(*case)
    for rank, facts in zip(report.ranks, run(prod(mesh.values()), real, *case), strict=True):
        parts, shapes, sends, collectives, counted, allocated = facts
        assert {name: getattr(rank, name) for name in parts} == parts
        assert report.shapes(rank.rank) == shapes
        assert report.messages(rank.rank) == sends
        assert report.collectives(rank.rank) == collectives
        peak = rank.total - rank.parameters - rank.optimizer - rank.buffers
        assert peak == pytest.approx(counted, rel=0.05)
        assert allocated is None or peak == pytest.approx(allocated, rel=0.1)


def linear(number=4, width=8):
    """Return equal layers on the meta device."""
    with torch.device('meta'):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def small(module=None, balance=(2, 2), mesh=None, size=8, loss=F.mse_loss, width=8, **options):
    """Make a dry run of a small model."""
    x = torch.empty(size, width)
    return dry_run(
        linear() if module is None else module,
        balance,
        x,
        x,
        loss,
        mesh={'pipe': 2} if mesh is None else mesh,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'schedule, checkpoint',
    [('1f1b', 'always'), ('interleaved', 'never'), ('zb-h1', 'always'), ('v-half', 'never')],
)
def test_a_few_micro_batches_and_equal_places_stand_for_all(schedule, checkpoint, monkeypatch):
    """With many micro-batches, a part of them runs; of equal stages, one."""
    pipe, stages = 4, 4 * (1 + (schedule in ('interleaved', *V_SHAPED)))
    options = {
        'mesh': {'pipe': pipe, 'data': 2},
        'schedule': schedule,
        'size': 25,
        'chunks': 12,
        'checkpoint': checkpoint,
        'optimizer': torch.optim.AdamW,
        'width': 16,
    }
    if schedule in V_SHAPED:
        options['places'] = [*range(pipe), *reversed(range(pipe))]
    report = small(linear(16, 16), [16 // stages] * stages, **options)
    monkeypatch.setattr('torchgpipe.dry_run.virtual.REPEATS', 30)
    monkeypatch.setattr(
        'torchgpipe.dry_run.rehearsal._like',
        lambda model, skeleton, plan: [*range(pipe)],
    )
    whole = small(linear(16, 16), [16 // stages] * stages, **options)
    for one, other in zip(report.ranks, whole.ranks, strict=True):
        assert report.messages(one.rank) == whole.messages(one.rank)
        assert report.collectives(one.rank) == whole.collectives(one.rank)
        assert report.shapes(one.rank) == whole.shapes(one.rank)
        assert one.total == pytest.approx(other.total, rel=0.01)
    assert report.stages == whole.stages and report.traffic == whole.traffic


def test_time_does_not_grow_with_the_number_of_micro_batches():
    calls = []
    model = nn.Sequential(*linear(3), Call(lambda x: calls.append(len(x)) or x))
    small(model, size=20, chunks=20, checkpoint='never')
    assert calls == [1] * REPEATS


def test_equal_stages_that_recompute_other_micro_batches_are_not_alike():
    """As a schedule has it for one of four: it needs less, and the others as much as without."""

    def totals(recomputed):
        schedule = make('gpipe', 4, 3).recomputing(recomputed)
        report = small(
            linear(16),
            [4] * 4,
            {'pipe': 4},
            size=48,
            chunks=3,
            checkpoint='never',
            schedule=schedule,
        )
        return [rank.total for rank in report.ranks]

    without, own = totals([0] * 4), totals([0, 0, {0, 1}, 0])
    assert own[2] < without[2] and [*own[:2], own[3]] == [*without[:2], without[3]]


@pytest.fixture
def ranks_made(monkeypatch):
    """Return a list that gets an element for each rank that a dry run makes."""
    made, make = [], VirtualRank.__init__
    monkeypatch.setattr(VirtualRank, '__init__', lambda *args: made.append(0) or make(*args))
    return made


def test_stages_of_a_model_are_alike_if_their_functions_are(ranks_made):
    """A function is compared by its state, in which a name of a module means its place."""
    for function, number in (
        (lambda k: lambda model, x: call(k, model, x), 6),
        (lambda k: partial(call, k), 6),
        (lambda k: Callee(f'{k}'), 3),
        (lambda k: f'{k}', 3),
    ):
        ranks_made.clear()
        with torch.device('cpu'):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        values = [function(k) for k in range(6)]
        stages = [model[int(x)] if isinstance(x, str) else x for x in values]
        module = from_stages(model, stages, torch.zeros(2, 8))
        report = small(module, [1] * 6, {'pipe': 6}, chunks=2)
        assert len(ranks_made) == number, values
        assert [[*report.shapes(rank)] for rank in range(6)] == [
            [f'{k}.{k}.weight', f'{k}.{k}.bias'] for k in range(6)
        ]


class Shared:
    """An object that copies of a layer share."""

    def __init__(self, value):
        self.value = value

    def __deepcopy__(self, memo):
        return self


def nested(depth, times, cyclic=False):
    """Return lists in lists."""
    innermost = found = []
    for _ in range(depth):
        found = [found] * times
    innermost += [found] * cyclic
    return found


def test_attributes_of_any_form_are_compared(ranks_made):
    for depth, times, cyclic, number in (
        (2, 2, False, 3),
        (2, 2, True, 3),
        (60, 2, False, 3),
        (9999, 1, False, 6),
    ):
        ranks_made.clear()
        module = linear(6)
        for layer in module:
            layer.value = Shared(nested(depth, times, cyclic))
        small(module, [1] * 6, {'pipe': 6}, chunks=2)
        assert len(ranks_made) == number, (depth, times, cyclic)


class Callee:
    """A function with a state."""

    def __init__(self, name):
        self.name = name

    def __call__(self, model, x):
        return model.get_submodule(self.name)(x)


def call(k, model, x):
    """Call a layer."""
    return model.get_submodule(f'{k}')(x)


def test_layers_that_get_other_inputs_are_not_alike():
    """The second place gets a wider input than the third, although their layers are equal."""

    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x).repeat(2, 1) if len(x) == 2 else super().forward(x)[:2]

    with torch.device('meta'):
        layers = [nn.Linear(8, 8), Wide(8, 8), Wide(8, 8), Wide(8, 8), Wide(8, 8), nn.Linear(8, 8)]
    report = small(nn.Sequential(*layers), [1] * 6, {'pipe': 6}, 8, lambda y, t: y.sum(), chunks=4)
    sent = [{bytes for to, bytes in report.messages(rank) if to > rank} for rank in range(6)]
    assert sent == [{64}, {128}, {64}, {128}, {64}, set()]


def test_stages_with_other_checkpoints_are_not_alike():
    report = small(
        linear(5),
        [1] * 5,
        {'pipe': 5},
        chunks=2,
        checkpoint=['never', 'never', 'always', 'never', 'never'],
    )
    assert [each.backward_flops for each in report.stages] == [1024, 2048, 3072, 2048, 2048]


class Window(nn.Linear):
    """A layer whose work depends on an attribute."""

    def __init__(self, times):
        super().__init__(8, 8)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = super().forward(x)
        return x


class Twice(nn.Linear):
    """A layer with the attributes of a linear layer, and twice its work."""

    def forward(self, x):
        return super().forward(super().forward(x))


def test_stages_with_other_types_names_or_attributes_are_not_alike():
    for one, other in (
        (lambda: nn.Linear(8, 8), lambda: Twice(8, 8)),
        (lambda: WithPart('once'), lambda: WithPart('twice')),
        (lambda: Window(1), lambda: Window(2)),
    ):
        with torch.device('meta'):
            module = nn.Sequential(one(), one(), other(), one(), other(), one())
        report = small(module, [1] * 6, {'pipe': 6}, chunks=2, checkpoint='never')
        assert [each.forward_flops // 1024 for each in report.stages] == [1, 1, 2, 1, 2, 1]


def test_stages_with_other_parts_along_the_tensor_axis_are_not_alike():
    plan = {'2': ColwiseParallel(output_layouts=Replicate())}
    report = small(linear(6), [1] * 6, {'pipe': 6, 'tensor': 2}, chunks=2, tensor_plan=plan)
    assert [report.shapes(2 * k)[f'{k}.weight'] for k in range(6)] == [
        (8, 8),
        (8, 8),
        (4, 8),
        (8, 8),
        (8, 8),
        (8, 8),
    ]


def skips():
    """Return equal stages that send skips over different distances."""
    near, far = Namespace(), Namespace()
    return [
        nn.Linear(8, 8),
        StashLinear(8).isolate(far),
        StashLinear(8).isolate(near),
        Pop().isolate(near),
        nn.Linear(8, 8),
        Pop().isolate(far),
        nn.Linear(8, 8),
    ]


def ties():
    """Return equal stages, of which some share a parameter."""
    layers = [nn.Linear(8, 8) for _ in range(7)]
    layers[2].weight = layers[4].weight
    return layers


def test_stages_with_skips_and_ties_are_not_alike(monkeypatch):
    def reports():
        for layers in (skips, ties):
            with torch.device('meta'):
                module = nn.Sequential(*layers())
            report = small(module, [1] * 7, {'pipe': 7}, chunks=2)
            yield [(report.messages(k), rank.total) for k, rank in enumerate(report.ranks)]

    few = [*reports()]
    monkeypatch.setattr(
        'torchgpipe.dry_run.rehearsal._like', lambda model, skeleton, plan: [*range(7)]
    )
    assert few == [*reports()]


class WithPart(nn.Module):
    """A layer whose work depends on the name of its part."""

    def __init__(self, name):
        super().__init__()
        self._parts = nn.ModuleDict({name: nn.Linear(8, 8)})

    def forward(self, x):
        for _ in range(1 + ('twice' in self._parts)):
            for part in self._parts.values():
                x = part(x)
        return x


class Named(WithPart):
    """Such a layer with attributes of all kinds."""

    def __init__(self, name):
        super().__init__(name)
        self._lock, self.mask = threading.Lock(), torch.ones(8, device='cpu')
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        with self._lock:
            return self.norm(super().forward(x) * self.mask)


def test_stages_with_other_names_and_layers_of_all_kinds():
    names = ('once', 'once', 'twice', 'once', 'twice', 'once')
    functions = [partial(Named, name) for name in names]
    report = small(
        functions, [1] * 6, {'pipe': 6}, chunks=2, checkpoint='always', deferred_batch_norm=True
    )
    assert [each.forward_flops // 1024 for each in report.stages] == [1, 1, 2, 1, 2, 1]


def test_frozen_parameters_and_shared_inputs():
    class Add(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[0]) + pair[1], pair[1]

    with torch.device('meta'):
        module = nn.Sequential(Add(8, 8), Add(8, 8))
    module[1].bias.requires_grad_(False)
    pair = torch.empty(8, 8), NoChunk(torch.empty(8))
    report = dry_run(
        module,
        [1, 1],
        pair,
        torch.empty(8, 8),
        lambda y, t: F.mse_loss(y[0], t),
        mesh={'pipe': 2},
        chunks=4,
        compare_every=5,
    )
    assert [each.gradients for each in report.ranks] == [288, 256]
    assert report.messages(0)[0] == (1, 64) and report.messages(0)[1] == (1, 32)


def test_a_loss_that_counts_has_no_values_to_compare():
    """The divisors of a loss in a function are not compared. Micro-batches have two sizes."""

    def loss(y, target):
        return F.nll_loss(y, torch.zeros(len(y), dtype=torch.long))

    assert small(size=7, chunks=2, loss=loss).ranks


def test_flops_equal_the_unwrapped_model():
    from torch.utils.flop_counter import FlopCounterMode

    report = small(checkpoint='never', chunks=4)
    with FlopCounterMode(display=False) as counter:
        F.mse_loss(
            linear()(torch.empty(8, 8, device='meta')), torch.empty(8, 8, device='meta')
        ).backward()
    assert (
        sum(each.forward_flops + each.backward_flops for each in report.stages)
        == counter.get_total_flops()
    )
    assert sum(each.forward_flops for each in report.stages) == 4 * 2 * 8**3


def test_outputs_of_the_last_stage_are_not_kept():
    """In v0.17.0, the last rank kept the outputs of all micro-batches until the end of a step."""

    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x).repeat(1, 1000)

    def memory(chunks):
        return (
            small(
                nn.Sequential(nn.Linear(8, 8), Wide(8, 8)),
                [1, 1],
                size=2 * chunks,
                loss=lambda y, t: y.sum(),
                chunks=chunks,
            )
            .ranks[1]
            .activations
        )

    with torch.device('meta'):
        assert memory(20) < memory(4) + 2 * 8000 * 4


def test_two_dry_runs_are_equal_and_leave_nothing():
    hook = sys.excepthook
    options = {'mesh': {'data': 2, 'pipe': 2}, 'chunks': 4, 'optimizer': torch.optim.AdamW}
    module = linear()
    before = [id(x) for x in module.parameters()]
    assert small(module, **options).to_dict() == small(module, **options).to_dict()
    assert [id(x) for x in module.parameters()] == before and not dist.is_initialized()
    assert all(x.is_meta for x in module.parameters()) and sys.excepthook is hook


class Heads(nn.Linear):
    """A layer that splits its output into three heads."""

    def forward(self, x):
        return super().forward(x).view(len(x), 3, -1).flatten(1)


WRONG = [
    ({'mesh': {'pipe': 2}, 'processes': 3}, 'takes 2 processes, but there are 3'),
    ({'mesh': {'pip': 2}}, r"this one has \['pip'\]"),
    ({'mesh': {'pipe': 0}}, 'pipe=0'),
    ({'balance': [2, 3]}, 'balance'),
    ({'module': [nn.ReLU, 3]}, 'makes a layer, but this is a list with a int in it'),
    ({'module': [nn.ReLU(), nn.ReLU]}, 'makes a layer, but this is a list with a ReLU in it'),
    ({'places': [0, 0]}, 'takes at least one of 2 stages'),
    (
        {'mesh': {'pipe': 2, 'tensor': 2}, 'tensor_plan': {'*.c_fc': ColwiseParallel()}},
        "tensor_plan names '\\*.c_fc', but no module",
    ),
    ({'mesh': {'pipe': 2, 'tensor': 2}}, 'tensor_plan says of no layer'),
    (
        {'schedule': 'interleaved', 'balance': [1] * 5, 'module': linear(5)},
        "'interleaved' takes 2 partitions on each device, but there are 5",
    ),
    ({'schedule': 'zb-v'}, r'put them in this order: places=\[0, 0\]'),
    ({'size': 0}, 'the batch is empty'),
    (
        {'loss': lambda y, t: F.mse_loss(y, t) * (1 if y.sum() > 0 else 2)},
        'reads values of a tensor',
    ),
    ({'loss': lambda y, t: y[y > 0].mean()}, 'reads values of a tensor'),
    ({'data': 'sharded'}, 'data must be one of'),
    ({'devices_per_host': 0}, 'devices_per_host must be a number above zero'),
    ({'memory_limit': '80GiB'}, "above zero, but is '80GiB'"),
]


def test_wrong_configurations_raise_the_errors_of_a_real_run():
    for options, text in WRONG:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
            small(**options)
        assert not dist.is_initialized()


class Reads(nn.Module):
    """A layer that reads values by NumPy."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return x * float(self.read(x.detach()))


def test_a_layer_that_reads_values_is_refused():
    for read in (
        lambda x: x.numpy().sum(),
        lambda x: numpy.asarray(x).sum(),
        lambda x: x.tolist()[0][0],
        lambda x: x.numpy(force=True).sum(),
    ):
        with pytest.raises(RuntimeError, match='reads values of a tensor'):
            small(nn.Sequential(*linear(2), Reads(read)), [2, 1])
    assert numpy.asarray(torch.ones(2)).sum() == 2


def test_a_module_that_has_values_needs_as_much_as_one_without():
    def module():
        layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU())
        layers[2].register_buffer('expanded', torch.ones(1).expand(8))
        return layers

    with torch.device('meta'):
        empty = module()
    for axis, plan in (
        ('data', None),
        ('tensor', {'0': ColwiseParallel(output_layouts=Replicate())}),
    ):
        one, other = (
            small(layers, mesh={axis: 2, 'pipe': 2}, tensor_plan=plan, optimizer=torch.optim.AdamW)
            for layers in (module(), empty)
        )
        assert one.to_dict() == other.to_dict(), axis


def test_a_converted_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.other(torch.relu(self.one(x))) + x

    layers = to_sequential(Model(), torch.rand(8, 8))
    report = small(layers, [1, len(layers) - 1], {'data': 2, 'pipe': 2})
    assert sum(rank.parameters for rank in report.ranks) == 2 * 2 * 72 * 4


def real_run_first():
    plan = {'0': ColwiseParallel(output_layouts=Replicate())}
    model = DistributedGPipe(linear(), [4], mesh=init_mesh(tensor=2), tensor_plan=plan)
    model.step(torch.ones(4, 8), torch.ones(4, 8), F.mse_loss)
    dist.destroy_process_group()
    return [
        small(balance=[4], mesh={'tensor': 2, 'data': data}, tensor_plan=plan).ranks[0].parameters
        for data in (1, 2)
    ]


@pytest.mark.slow
def test_a_dry_run_after_a_real_run_of_the_same_mesh():
    first, second = run(2, real_run_first)
    assert first == second and first[0] == first[1] > 0


def test_heads_that_ranks_cannot_share_raise_the_error_of_the_layer():
    with torch.device('meta'):
        module = nn.Sequential(nn.Linear(8, 8), Heads(8, 12))
    with pytest.raises(RuntimeError, match=r'shape .*\n.*partition 1|view') as caught:
        small(module, [1, 1], {'pipe': 2, 'tensor': 2}, tensor_plan={'1': ColwiseParallel()})
    assert "in layer '1'" in str(caught.value) or caught.value.__notes__


def test_a_skip_to_an_earlier_stage_is_an_error():
    from tests.distributed.models import Down, Out

    with pytest.raises(TypeError, match='pop'):
        small(nn.Sequential(Out(8), Down(8)), [1, 1])


def test_a_rank_beyond_its_memory_is_named():
    report = small(memory_limit=2e3, optimizer=torch.optim.AdamW)
    assert len(report.problems) == 2 and 'rank 0 (pipe 0) needs' in report.problems[0]
    assert 'more than the limit of 1.95 KiB: optimizer take the most' in report.problems[0]
    assert small(memory_limit=1 << 20).problems == ()


def test_dtensor_uses_no_group_of_a_dry_run_afterwards():
    """Its plans hold meshes. A mesh of a later run is equal, but has other groups."""
    plan = {'0': ColwiseParallel(), '1': RowwiseParallel()}
    for mesh in ({'tensor': 2}, {'data': 2, 'tensor': 2}):
        small(linear(2), [2], mesh, tensor_plan=plan)
        assert _get_python_sharding_prop_cache_info().currsize == 0


def test_an_initialized_group_is_refused():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match='in a process of its own'):
            small()
    finally:
        dist.destroy_process_group()
