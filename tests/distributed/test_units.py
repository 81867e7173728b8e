"""Units: parameters that wait on the host are gathered for one stage at a time."""

import gc
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.models import batch, full, perceptron, tied
from tests.distributed.saving import OFFLOAD, PLAN
from tests.distributed.test_model import alone, check, trained
from tests.marks import slow
from tests.shard.processes import Failure, outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.distributed.steps import Steps
from torchgpipe.distributed.units import Unit, UnitState, group_stages
from torchgpipe.shard import sums


def made(layers, stages, axes, **options):
    """Make a model whose parameters wait on the host."""
    return DistributedGPipe(
        layers,
        [len(layers) // stages] * stages,
        mesh=init_mesh(**axes),
        **{'chunks': 2, **OFFLOAD, **options},
    )


def share(*tensors):
    """Give the part of this replica, of two."""
    return [x.chunk(2)[dist.get_rank()] for x in tensors]


# --- numbers
# ---------------------------------------------------------------------------------------------

CASES = [
    (1, {}, 8, 'tied', 'gpipe', {'checkpoint': 'always'}),
    (2, {'data': 2}, 4, 'tied', '1f1b', {'checkpoint': 'never'}),
    (2, {'pipe': 2}, 4, 'unet', 'interleaved', {}),
    (2, {'pipe': 2}, 4, 'tied', 'zb-v', {'places': [0, 1, 1, 0]}),
    (4, {'data': 2, 'pipe': 2}, 4, 'tied', 'interleaved', {'checkpoint': 'always'}),
    slow(2, {'data': 2}, 8, 'frozen', 'looped-bfs', {'checkpoint': 'always'}),
    slow(4, {'data': 2, 'pipe': 2}, 8, 'tied', 'looped-bfs', {}),
    slow(4, {'data': 2, 'tensor': 2}, 2, 'perceptron', 'looped-bfs', {'tensor_plan': PLAN}),
]


@pytest.mark.parametrize('ranks, axes, stages, name, schedule, options', CASES)
def test_results_equal_one_process(ranks, axes, stages, name, schedule, options):
    """Losses, norms, gradients, and parameters after three steps of AdamW with clipping."""
    places, sizes = options.pop('places', None), (8, 6, 12)
    found = run(
        ranks,
        trained,
        axes,
        name,
        stages,
        places,
        {'schedule': schedule, 'sizes': sizes},
        {**OFFLOAD, **options},
        True,
    )
    check(found, alone(name, sizes=sizes))


def test_replicas_with_one_stage_on_each_rank_may_have_any_numbers_of_micro_batches():
    found = run(4, trained, {'data': 2, 'pipe': 2}, 'tied', 2, None, {'sizes': (8, 3)}, OFFLOAD)
    check(found, alone('tied', sizes=(8, 3)))


def other_numbers():
    """Take a step in which replicas have two micro-batches and one."""
    model = made(perceptron(), 4, {'data': 2})
    model.step(*(x.split([2, 1])[dist.get_rank()] for x in batch(0, 3)), F.mse_loss)


def test_replicas_that_gather_in_turn_have_the_same_number_of_micro_batches():
    for each in outcomes(2, other_numbers):
        assert isinstance(each, Failure) and 'or gather parameters of one stage' in each.text


def evaluated(axes):
    """Evaluate on replicas with other numbers of micro-batches, one of them without any."""
    model = made(tied(), 4, axes).eval()
    number = model._rank.mesh.data.rank
    x, target = batch(0, 8)
    parts = [slice(0, 3), slice(3, 8)], [slice(0, 8), None]
    found = []
    for each in (part[number] for part in parts):
        given = (None, None) if each is None else (x[each], target[each])
        found.append(model.evaluate(*given, F.mse_loss))
    return (
        found,
        model(x[parts[0][number]]),
        [unit for unit in model._rank.units.values() if unit.state is not UnitState.SHARDED],
    )


def test_evaluations_of_replicas_with_other_numbers_of_micro_batches():
    ((expected, output, _),) = run(1, evaluated, {})
    del expected[0]  # One replica has had its part only.
    for found, own, gathered in run(4, evaluated, {'data': 2, 'pipe': 2}):
        assert [each for each in found] == [expected[0]] * 2 or all(
            torch.allclose(loss, expected[0][0], rtol=1e-12) and count == expected[0][1]
            for loss, count in found
        )
        assert not gathered


# --- lifetimes
# -------------------------------------------------------------------------------------------


def neighbours():
    """Return layers of which the last two stages of four have a weight in common."""
    model = perceptron()
    model[7].up = model[5].up
    return model


def followed(make, axes, schedule, **options):
    """Return the calls that gather, free and reduce units in a step and a call."""
    model = made(make(), 4, axes, chunks=4, **options)
    units = {unit: j for j, unit in reversed(model._rank.units.items())}
    calls, ends = [], []

    def noted(name, text):
        function = getattr(Unit, name)

        def call(unit, *args):
            calls.append(f'{text}{units[unit]}')
            grads = [weakref.ref(grad.untyped_storage()) for _, grad in (args or ((),))[0]]
            function(unit, *args)
            assert all(each() is None for each in grads)
            ends.extend(grads)

        setattr(Unit, name, call)

    def look(*args):
        """See that no more than one unit is whole, and no gradient of others is."""
        whole = {j for unit, j in units.items() for x in unit.seen if x.untyped_storage().nbytes()}
        assert len(whole) == 1

    for name, text in (('gather', '+'), ('free', '-'), ('reduce', 'G')):
        noted(name, text)
    wait = Unit.wait

    def remember(unit):
        wait(unit)
        unit.seen = [*unit.managed()]

    Unit.wait = remember
    for unit in units:
        unit.seen = []
    for layer in model:
        layer.register_forward_hook(look)
    x, target = batch(0, 4)
    model.step(x, target, F.mse_loss, schedule=schedule)
    step = ' '.join(calls)
    calls.clear()
    model(x)
    assert all(isinstance(x, DTensor) for x in model.parameters())
    assert not any(x.untyped_storage().nbytes() for unit in units for x in unit.seen)
    return step, ' '.join(calls), len(ends)


def test_a_rank_has_the_parameters_of_one_stage_at_a_time():
    """Each is gathered twice in a step, but the last one; and its gradients leave at once."""
    for checkpoint in ('never', 'always'):
        ((step, call, ends),) = run(
            1, partial(followed, checkpoint=checkpoint), perceptron, {}, 'looped-bfs'
        )
        assert step == '+0 -0 +1 -1 +2 -2 +3 G3 -3 +2 G2 -2 +1 G1 -1 +0 G0 -0', checkpoint
        assert call == '+0 -0 +1 -1 +2 -2 +3 -3'
        assert ends == 4 * 8


def test_other_schedules_gather_more_often():
    ((step, _, _),) = run(1, followed, perceptron, {}, '1f1b')
    assert step.count('+') == step.count('-') > 7 and step.count('G') == 4


def test_stages_with_a_parameter_in_common_are_gathered_together():
    ((step, _, _),) = run(1, followed, neighbours, {}, 'looped-bfs')
    assert step == '+0 -0 +1 -1 +2 G2 -2 +1 G1 -1 +0 G0 -0'


def test_gradients_of_tied_weights_leave_in_the_end():
    """The first, the third and the last stage have a parameter in common, on two ranks."""
    first, last = run(2, followed, tied, {'pipe': 2}, 'looped-bfs')
    assert first[0] == '+0 G0 -0'
    assert last[0] == '+1 -1 +3 -3 +1 G1 -1 +3 G3 -3'


def test_groups():
    one = nn.Linear(2, 2)
    stages = {0: one, 2: nn.Linear(2, 2), 4: nn.Tanh(), 6: nn.Sequential(one)}
    assert sorted(group_stages(stages)) == [[0, 6], [2], [4]]
    assert sorted(group_stages(stages, {2, 6})) == [[0, 2, 6], [4]]


class Peak(TorchDispatchMode):
    """Counts bytes of memories that exist, as large as they are at the time."""

    def __init__(self):
        super().__init__()
        self.known, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(output):
            if type(x) is torch.Tensor and x.layout is torch.strided:
                storage = x.untyped_storage()
                self.known.setdefault(storage._cdata, weakref.ref(storage))
        there = {key: each for key, each in self.known.items() if each() is not None}
        self.known = there
        self.peak = max(self.peak, sum(each().nbytes() for each in there.values()))
        return output


def peak(axes, stages, options):
    """Give the peak of bytes in three steps with 14 layers, of which a bucket has three."""

    def layer():
        return nn.Linear(96, 96)

    with mock.patch.object(sums, 'BUCKET', 3 * 4 * (96 * 96 + 96)), Peak() as found:
        model = DistributedGPipe(
            [layer] * 14, [14 // stages] * stages, mesh=init_mesh(**axes), chunks=2, **options
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            gc.collect()
            model.step(torch.ones(2, 96), torch.ones(2, 96), F.mse_loss, schedule='looped-bfs')
            optimizer.step()
            optimizer.zero_grad()
    return found.peak / (14 * 4 * (96 * 96 + 96))


@pytest.mark.slow
def test_two_replicas_have_half_the_memory_of_one_process():
    (whole,) = run(1, peak, {}, 1, {})
    shards = run(2, peak, {'data': 2}, 14, OFFLOAD)
    assert whole > 4 and max(shards) < 0.55 * 4, (whole, shards)


def test_replicas_reduce_gradients_without_a_second_set_of_them():
    peaks = run(2, peak, {'data': 2}, 1, {})
    assert max(peaks) < 4 + 3.5 / 14, peaks


# --- other parts of a step
# ---------------------------------------------------------------------------------------------


def gradients(model):
    """Return the gradients of a rank."""
    return {name: full(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def accumulated(axes, make):
    """Give the gradients of two steps, one of them without a reduction, and of each alone."""
    model, found = made(make(), 4, axes), []
    data = model._rank.mesh.data
    steps = [[x.chunk(data.size)[data.rank] for x in batch(step, 8)] for step in range(2)]
    with model.no_sync():
        model.step(*steps[0], F.mse_loss, schedule='looped-bfs')
        assert not gradients(model)
    model.step(*steps[1], F.mse_loss, schedule='looped-bfs')
    found.append(gradients(model))
    model.zero_grad()
    for step in steps:  # They are added to gradients that are there.
        model.step(*step, F.mse_loss, schedule='looped-bfs')
    return [*found, gradients(model)]


@pytest.mark.parametrize(
    'axes, make', [({}, tied), ({'data': 2}, perceptron), slow({'data': 2, 'pipe': 2}, tied)]
)
def test_steps_without_reduction_are_added_up(axes, make):
    ranks = axes.get('data', 1) * axes.get('pipe', 1)
    for several, each in run(ranks, accumulated, axes, make):
        assert several.keys() == each.keys() != set()
        for name, grad in several.items():
            torch.testing.assert_close(grad, each[name], rtol=1e-12, atol=1e-12)


def waiting(model):
    """Return the names of the parameters whose gradients are not reduced yet."""
    records = model._rank.replicas.records
    return {record.name for record in records if record.gradient is not None}


def failing():
    """Fail at the end of a step, when stages have reduced their gradients."""
    model, total = made(perceptron(), 4, {'data': 2}), Steps._total
    step = partial(model.step, *share(*batch(0, 8)), F.mse_loss)
    step()
    with model.no_sync():
        step()
    before, pending = gradients(model), waiting(model)

    def fails(*args):
        raise ValueError('it is broken')

    Steps._total = fails
    with pytest.raises(ValueError, match='it is broken'):
        step()
    Steps._total = total
    assert all(isinstance(x, DTensor) for x in model.parameters())
    after = gradients(model)
    assert all(torch.equal(grad, after[name]) for name, grad in before.items())
    assert waiting(model) == pending != set()


def test_a_step_that_fails_leaves_gradients_as_they_were():
    run(2, failing)


class Bounded(nn.Embedding):
    """An embedding that changes its weight in its forward."""

    def __init__(self):
        super().__init__(6, 6, max_norm=0.1)

    def forward(self, x):
        return super().forward(x.argmax(1))


class Behind(nn.Linear):
    """A layer that changes its weight, and that has no version."""

    def forward(self, x):
        self.weight.data.mul_(1.1)
        return super().forward(x)


def writing(layer):
    """Take a step with a layer that writes to a parameter."""
    model = made([layer, lambda: nn.Linear(6, 6)], 2, {'data': 2}, checkpoint='never')
    x, target = (each.float() for each in share(*batch(0, 8)))
    model.step(x, target, F.mse_loss, schedule='looped-bfs')


@pytest.mark.parametrize('layer', [Bounded, partial(Behind, 6, 6)])
def test_a_layer_that_changes_a_parameter_is_refused(layer):
    assert any(
        isinstance(each, Failure) and "changed '0.weight' in its forward" in each.text
        for each in outcomes(2, writing, layer)
    )


def beside(make, axes, name):
    """Give gradients where the loss has a parameter of the last stage in a closure."""
    model = made(make(), 4, axes)
    data = model._rank.mesh.data
    pair = [x.chunk(data.size)[data.rank] for x in batch(0, 8)]

    def loss_fn(output, target):
        return F.mse_loss(output, target) * model.get_parameter(name).exp().mean()

    model.step(*pair, loss_fn, schedule='looped-bfs')
    found = gradients(model)
    model.zero_grad()
    with model.no_sync():
        model.step(*pair, loss_fn, schedule='looped-bfs')
    model.zero_grad()
    model.step(*pair, loss_fn, schedule='looped-bfs')
    return found, gradients(model)


def test_a_loss_may_use_a_parameter_of_the_last_stage_in_a_closure():
    for found, again in run(2, beside, perceptron, {'data': 2}, '7.up.bias'):
        assert len(found) == 32
        for name, grad in found.items():
            torch.testing.assert_close(again[name], grad, rtol=1e-12, atol=1e-12)


def test_a_loss_may_use_a_tied_weight_in_a_closure():
    (first, _), (last, _) = run(2, beside, tied, {'pipe': 2}, '7.weight')
    torch.testing.assert_close(first['0.weight'], last['7.weight'], rtol=0, atol=0)


def mixed():
    """Give types in layers, and of gradients."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model = made([partial(nn.Linear, 6, 6) for _ in range(4)], 4, {'data': 2}, mp_policy=policy)
    types = set()
    for layer in model:
        layer.register_forward_hook(lambda layer, x, y: types.add((layer.weight.dtype, y.dtype)))
    output = model.step(*(x.float() for x in share(*batch(0, 8))), F.mse_loss, return_output=True)[
        1
    ]
    return types, {x.grad.dtype for x in model.parameters()}, output.dtype


def test_types_follow_a_policy():
    for each in run(2, mixed):
        assert each == ({(torch.bfloat16, torch.bfloat16)}, {torch.float32}, torch.float32)


# --- parameters that FSDP2 cannot gather


class Odd(nn.Module):
    """A layer with a second parameter."""

    def __init__(self, other):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(8)), other

    def forward(self, x):
        return x * self.weight + self.other.to(x).sum()


def ungatherable():
    """Make models whose last stage cannot be gathered; return the errors."""
    mesh, errors = init_mesh(data=2, pipe=2), []
    for options in {}, {'mp_policy': MixedPrecisionPolicy(torch.bfloat16)}, OFFLOAD:
        for other in torch.ones(8, dtype=torch.float64), torch.empty(0, 8):
            layers = nn.Sequential(nn.Linear(8, 8), Odd(nn.Parameter(other)))
            try:
                DistributedGPipe(layers, [1, 1], mesh=mesh, **{'data': 'shard', **options})
            except Exception as error:
                errors.append(f'{type(error).__name__}: {error}')
    # A frozen parameter may have another dtype.
    frozen = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)
    model = DistributedGPipe(
        nn.Sequential(nn.Linear(8, 8), Odd(frozen)), [1, 1], mesh=mesh, data='shard'
    )
    model.step(torch.ones(4, 8), torch.ones(4, 8), F.mse_loss)
    return errors


@pytest.mark.slow
def test_parameters_that_cannot_be_gathered_are_refused_when_the_model_is_made():
    for errors in run(4, ungatherable):
        assert len(errors) == 6
        for dtypes, empty in zip(errors[::2], errors[1::2]):
            assert "'1.other' is torch.float64" in dtypes or 'failed on rank' in dtypes
            assert "'1.other' is empty" in empty or 'failed on rank' in empty
