"""The results of check_parity, and the way it finds them."""

import copy
import random
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.devices import ACCELERATOR, devices, places
from tests.helpers import Call, assert_same
from tests.zoo.stateful import Scale
from torchgpipe import Arguments, NoChunk
from torchgpipe.base.context import context
from torchgpipe.engine.scheduled import Step
from torchgpipe.schedule import make
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.testing import check_parity


class Layer(nn.Linear):
    """A linear layer with a function behind it, which gets the layer as well."""

    def __init__(self, function=lambda layer, x: x):
        super().__init__(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self, super().forward(x).tanh())


def found(*layers, sample=None, **options):
    """Return the parity of a model of these layers between others."""
    model = nn.Sequential(Layer(), *layers, Layer())
    return check_parity(
        model, torch.rand(7, 4) if sample is None else sample, raise_exception=False, **options
    )


def why(*layers, **options):
    """Return the one reason that is found, of a model that differs."""
    parity = found(*layers, **options)
    (reason,) = parity.reasons
    assert not parity.equal
    return reason


@devices
def test_a_model_without_differences(devices):
    sample = torch.rand(7, 4, requires_grad=True)
    parity = found(
        nn.LayerNorm(4),
        sample=sample,
        balance=[1, 2],
        devices=devices(2),
        checkpoint='except_last',
        chunks=4,
        steps=2,
    )
    assert parity.equal and parity.reasons == []
    assert parity.mini_batch.differences == parity.micro_batches.differences == []
    assert parity.mini_batch.tensors == {
        'outputs': 2,
        'gradients': 7,
        'buffers': 0,
        'parameters': 6,
    }
    assert 'on the mini-batch: gradients 7 0' in ' '.join(str(parity).split())


def test_everything_stays_as_it_was():
    model = nn.Sequential(Layer(), nn.BatchNorm1d(4), nn.Dropout())
    before, sample = copy.deepcopy(model), torch.rand(7, 4, requires_grad=True)
    random_state = torch.get_rng_state()
    check_parity(model, sample, raise_exception=False)
    assert torch.equal(torch.get_rng_state(), random_state) and sample.grad is None
    assert_same(model.state_dict().values(), before.state_dict().values(), 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_sample_stays_as_it_was_where_the_model_changes_it():
    sample = torch.randn(7, 4)
    before = sample.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), Layer())
    assert check_parity(model, sample, dtype=None, chunks=1, checkpoint='never').equal
    assert torch.equal(sample, before)


def test_it_raises_the_table():
    model = nn.Sequential(Layer(), nn.BatchNorm1d(4))
    parity = check_parity(model, torch.rand(7, 4), raise_exception=False)
    with pytest.raises(AssertionError) as raised:
        check_parity(model, torch.rand(7, 4))
    assert (
        str(raised.value).splitlines()[2]
        == str(parity).splitlines()[0]
        == ('3 steps in torch.float64, balance [1, 1], 3 chunks, tolerance 4e-11')
    )
    first = parity.mini_batch.differences[0]
    assert (first.kind, first.step) == ('outputs', 1) and first.distance > 0.01
    line = next(line for line in str(parity).splitlines() if 'mini-batch: outputs' in line)
    assert line.split()[-5:] == ['2', '2', f'{first.distance:.1e}', '1', 'output']


def test_batch_normalization():
    for deferred in (False, True):
        parity = found(nn.BatchNorm1d(4), deferred_batch_norm=deferred)
        (reason,) = parity.reasons
        assert "'1' (BatchNorm1d) is the first module to differ: batch norm" in reason
        assert not parity.micro_batches.differences
        moved = [
            each
            for each in parity.mini_batch.differences
            if each.kind == 'buffers' and each.step == 1
        ]
        assert len(moved) == (0 if deferred else 3)
    model = nn.Sequential(Layer(), nn.BatchNorm1d(4)).eval()
    assert check_parity(model, torch.rand(7, 4)).equal


def test_a_norm_of_ones_own():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(F.batch_norm(self.a(x), None, None, training=True))

    assert "'1' (Norm) is the first module to differ: what it gives for a sample" in why(Norm())
    inner = why(nn.Sequential(nn.Tanh(), Layer(lambda layer, x: x - x.mean(0)), nn.Tanh()))
    assert "'1.1' (Layer) is the first module to differ: what it gives for a sample" in inner


@devices
def test_random_numbers(devices):
    parity = found(
        nn.Dropout(),
        Layer(lambda layer, x: F.dropout(x, 0.5, layer.training)),
        nn.TransformerEncoderLayer(4, 2, 4, batch_first=True),
        sample=torch.rand(7, 5, 4),
        devices=devices(2),
        checkpoint='except_last',
    )
    assert parity.equal
    (reason,) = parity.reasons
    assert reason == (
        "random numbers are drawn by '1', '2', '3.dropout', '3.dropout1', '3.dropout2', "
        "'3.self_attn', which were in evaluation mode for the comparison on the mini-batch"
    )


def test_random_numbers_and_another_difference():
    parity = found(nn.Dropout(), nn.BatchNorm1d(4))
    assert not parity.micro_batches.differences and parity.mini_batch.differences
    assert 'random numbers' in parity.reasons[0] and "'2' (BatchNorm1d)" in parity.reasons[1]


def test_random_numbers_in_evaluation_mode():
    parity = found(Layer(lambda layer, x: x + torch.randn_like(x)))
    assert parity.equal and parity.mini_batch is None
    assert "in evaluation mode, too, random numbers are drawn by ['1']" in parity.reasons[1]
    assert 'on the mini-batch' in str(parity)


def test_random_numbers_within_a_module_that_draws():
    """The one within is in evaluation mode first, as then it may be the only one."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Dropout(), nn.BatchNorm1d(4)

        def forward(self, x):
            return F.dropout(self.norm(self.inner(x)), 0.5, self.training)

    parity = found(Outer())
    assert "'1', '1.inner', which" in parity.reasons[0] and "'1.norm'" in parity.reasons[1]


def test_a_batch_in_another_dimension():
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0)
    sample = torch.rand(5, 7, 4)
    assert 'dimension 0 is not the batch: with batch_dim=1 the' in why(layer, sample=sample)
    assert found(layer, sample=sample, batch_dim=1).equal
    sample = sample.transpose(0, 1).contiguous()
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    assert 'dimension 1 is not' in why(layer, sample=sample, batch_dim=1)


class Add(nn.Module):
    """Add tables to a sample, in a way that any number of their rows will do."""

    def forward(self, x, *tables, scale=None):
        if isinstance(x, dict):
            x, tables = x['x'], x['tables']
        for table in tables:
            x = x + table.mean(0)
        return x if scale is None else x * scale.mean(0)


def test_tables_that_were_split():
    x, a, b = torch.rand(5, 4), torch.rand(5, 4), torch.rand(5, 4)
    model = nn.Sequential(Add(), Layer())

    def reason(*args, **kwargs):
        return check_parity(model, Arguments(*args, **kwargs), raise_exception=False).reasons

    assert 'args[1] was split, and is the same for all samples: with NoChunk' in reason(x, a)[0]
    assert 'args[1] and args[2] was split' in reason(x, a, b)[0]
    assert "kwargs['scale'] was split" in reason(x, NoChunk(a), scale=b)[0]
    assert reason(x, NoChunk(a), NoChunk(b)) == []
    value = {'x': x, 'tables': [a, b]}
    parity = check_parity(model, value, raise_exception=False)
    assert "input['tables'] was split" in parity.reasons[0]
    assert check_parity(model, value, batch_dim={'tables': None}).equal


class Loss(nn.Module):
    """Return a loss for each micro-batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return {'y': x, 'loss': self.function(x)}


def last(layer, **options):
    """Return the reason for a model that ends in a layer."""
    return check_parity(
        nn.Sequential(Layer(), layer), torch.rand(7, 4), raise_exception=False, **options
    ).reasons


def test_scalars():
    total, mean = Loss(torch.sum), Loss(torch.mean)
    assert last(total, gather='sum') == last(mean, gather='mean') == []
    assert "with gather='sum' the numbers are" in last(total, gather='mean')[0]
    assert "with gather='mean' the numbers are" in last(mean, gather={'loss': 'sum'})[0]


def test_a_mean_over_something_else_than_samples():
    (reason,) = last(Loss(lambda x: x.sum() / (x > 0).sum()), gather='mean')
    assert "'1' (Loss) is the first module to differ: it gives something of a whole" in reason


def test_a_shared_tensor_that_changes_in_place():
    class Grow(nn.Module):
        def forward(self, x, table):
            table.data += 1  # PyTorch does not count it
            return x * table

    model = nn.Sequential(Grow(), Layer())
    sample = Arguments(torch.rand(7, 4), NoChunk(torch.rand(4)))
    (reason,) = check_parity(model, sample, raise_exception=False, checkpoint='never').reasons
    assert "'0' (Grow) is the first module to differ: it changes its input in place" in reason


def test_state_kept_from_call_to_call():
    def count(layer, x):
        layer.calls = getattr(layer, 'calls', 0) + 1
        return x * layer.calls

    assert "'1' (Layer) is the first module to differ: the first micro" in why(Layer(count))


def test_buffers_that_move_with_each_call():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('calls', torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            return x

    parity = found(Counter())
    (reason,) = parity.reasons
    assert "'1.calls' and 0 more" in reason
    assert parity.mini_batch.differences == [('buffers', '1.calls', 1, 2)]


def test_a_backward_that_depends_on_the_batch():
    class Unit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / grad.norm()

    reason = why(Layer(lambda layer, x: Unit.apply(x)))
    assert 'something in backward does not' in reason
    assert reason.endswith("Backward is right until it comes to '1.bias'")


def test_a_difference_of_a_later_step():
    class PendingComparison(nn.BatchNorm1d):
        steps = 0

        def forward(self, x):
            self.steps += len(x)
            return x if self.steps <= 7 else super().forward(x)

    parity = found(PendingComparison(4, track_running_stats=False))
    assert {each.step for each in parity.mini_batch.differences} == {2}
    assert "'1' (PendingComparison) is the first module to differ" in parity.reasons[0]


def test_a_model_that_does_not_repeat_itself():
    layer = Layer(lambda layer, x: x * random.random())
    parity = found(layer, checkpoint='never')
    assert all('has other numbers each time' in reason for reason in parity.reasons)
    assert parity.reasons


class Box:
    """An attribute that a recomputation does not restore."""

    value = 0

    def __deepcopy__(self, memo):
        return Box()


def scale_by(number):
    """Return a layer that scales the gradient of the middle of a model."""

    def function(layer, x):
        if not hasattr(layer, 'box'):
            layer.box = Box()
        return Scale.apply(x, torch.tensor(float(number(layer.box))))

    return Layer(function)


def test_recomputation():
    def number(box):
        box.value += 1
        return 1 + context.recomputing

    parity = found(scale_by(number), checkpoint='always')
    (reason,) = {*parity.reasons}
    assert reason.startswith("recomputation: with checkpoint='never' the numbers are right. A")
    assert reason.endswith("Backward is right until it comes to '1.bias'")
    assert {each.kind for each in parity.micro_batches.differences} >= {'gradients', 'parameters'}


def test_threads():
    local = threading.local()
    local.scale = 2.0
    layer = Layer(lambda layer, x: x * getattr(local, 'scale', 1.0))
    reason = why(layer, checkpoint='never')
    assert reason.startswith('threads: with all partitions on one device')
    assert reason.endswith("'1' (Layer) is the first module to differ")


def test_recomputation_and_threads():
    """One alone is enough for other numbers."""
    local = threading.local()
    local.scale = 2.0
    layer = scale_by(lambda box: context.recomputing or not hasattr(local, 'scale') or 0.5)
    assert why(layer, checkpoint='always').startswith('recomputation and threads')


def test_a_layer_that_asks_whether_it_is_in_a_pipeline():
    layer = Layer(lambda layer, x: x if context.micro_batch is None else x * 2)
    reason = why(nn.Sequential(nn.Tanh(), layer), checkpoint='never')
    assert 'neither recomputation nor threads' in reason
    assert reason.endswith("'1.1' (Layer) is the first module to differ")


def test_a_layer_that_does_so_in_evaluation_mode_alone():
    """Where it is for the comparison on the mini-batch, as it draws in training."""
    layer = Layer(
        lambda layer, x: (
            F.dropout(x) if layer.training else x * (1 + (context.micro_batch is not None))
        )
    )
    parity = found(layer, checkpoint='never')
    assert not parity.micro_batches.differences and parity.mini_batch.differences
    assert 'random numbers' in parity.reasons[0] and 'neither' in parity.reasons[1]


def test_an_error_of_one_of_both():
    for when, form in [
        (lambda: True, 'the unwrapped layers on micro-batches'),
        (lambda: context.micro_batch is not None, 'the wrapped model'),
    ]:

        def fail(layer, x):
            if len(x) < 4 and when():
                raise RuntimeError('this layer fails')
            return x

        with pytest.raises(RuntimeError, match='this layer fails') as raised:
            check_parity(nn.Sequential(Layer(fail), Layer()), torch.rand(7, 4))
        assert raised.value.__notes__[-1] == (
            f'in step 1 of {form}, which check_parity runs in torch.float64'
        )


def test_an_error_and_a_way_out():
    sample = Arguments(torch.rand(5, 5, 4), torch.rand(5, 4))
    with pytest.raises(RuntimeError, match='size of tensor') as raised:
        check_parity(nn.Sequential(Call(torch.add), Layer()), sample)
    assert 'args[1] was split' in raised.value.__notes__[-1]
    with pytest.raises(RuntimeError, match='in place') as raised:
        check_parity(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.rand(7, 4))
    assert raised.value.__notes__[-1] == (
        "with checkpoint='never' it does not raise and the numbers are right"
    )
    with pytest.raises(ValueError, match='no tensor'):
        check_parity(nn.Sequential(Layer()), NoChunk(torch.rand(5, 4)))


def test_the_loss_and_the_optimizer_that_are_given():
    seen = []
    parity = check_parity(
        nn.Sequential(Layer(), nn.Linear(4, 3)),
        torch.rand(7, 4),
        dtype=None,
        steps=2,
        chunks=2,
        loss_fn=lambda y: seen.append(y.dtype) or F.cross_entropy(y, torch.arange(7) % 3),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        tolerance=1e-3,
    )
    assert parity.equal and set(seen) == {torch.float32} and len(seen) == 8
    assert 'tolerance 1e-03' in str(parity)


def test_steps_equal_a_plain_loop():
    seen, losses, x = [], [], torch.rand(7, 4)
    model = nn.Sequential(Layer(), nn.Linear(4, 3))

    def loss_fn(y):
        seen.append(y.square().mean())
        return seen[-1]

    check_parity(model, x, loss_fn=loss_fn, dtype=None)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert [x.item() for x in seen[:6:2]] == pytest.approx([x.item() for x in losses])


def test_complex_and_plain_values():
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('angles', torch.polar(torch.ones(2), torch.rand(2)))

        def forward(self, value):
            z = torch.view_as_complex(value['x'].view(-1, 2, 2)) * self.angles
            return {'z': z, 'n': value['n'], 'none': None}

    take = Call(lambda x: {'x': x, 'n': 3})
    assert check_parity(nn.Sequential(Layer(), take, Turn()), torch.rand(7, 4)).equal


@skippable(stash=['table', 'x'])
class Stash(nn.Module):
    """Stash a sample and a table."""

    def forward(self, x, table):
        yield stash('table', table)
        yield stash('x', x)
        return x * 2, table


@skippable(pop=['table', 'x'])
class Pop(nn.Module):
    """Pop them, and give the table once more."""

    def forward(self, value):
        x = yield pop('x')
        table = yield pop('table')
        return value[0] + x, value[1], table


@devices
def test_skips_and_tables_that_come_out(devices):
    model = nn.Sequential(Stash(), nn.Identity(), Pop())
    assert check_parity(
        model, Arguments(torch.rand(9, 4), NoChunk(torch.rand(3))), [1, 1, 1], devices=devices(3)
    ).equal


def placed(schedule):
    """Return the options of a model that a schedule fits, with a worker for each device."""
    if schedule in ('zb-v', 'v-half', 'v-min'):
        return {'balance': [1, 1, 1, 1], 'devices': ['cpu:0', 'cpu:1', 'cpu:1', 'cpu:0']}
    return {'balance': [2, 2]}


@pytest.mark.parametrize('schedule', ['1f1b', 'zb-h1', 'zb-v'])
def test_a_model_is_trained_by_a_schedule(schedule):
    sample = torch.rand(7, 4, requires_grad=True)
    parity = found(
        nn.Dropout(),
        Layer(),
        sample=sample,
        schedule=schedule,
        checkpoint='except_last',
        **placed(schedule),
    )
    assert parity.equal
    assert parity.micro_batches.tensors['gradients'] == 7
    assert f'schedule {schedule}' in str(parity)


def test_a_schedule_of_ones_own_and_a_target():
    for loss_fn, target in (
        (F.mse_loss, torch.rand(7, 4)),
        (F.cross_entropy, torch.randint(4, (7,))),
    ):
        for schedule in (None, make('zb-h1', 2, 3)):
            assert found(Layer(), schedule=schedule, loss_fn=loss_fn, target=target).equal


def test_losses_that_count():
    """A step knows the losses of PyTorch, and others by a normalizer."""
    for loss_fn, normalizer in [
        (F.cross_entropy, None),
        (nn.CrossEntropyLoss(torch.rand(4).double()), None),
        (lambda output, target: F.cross_entropy(output, target, reduction='sum'), 7),
        (
            lambda output, target: F.cross_entropy(output, target),
            lambda target: (target >= 0).sum(),
        ),
    ]:
        target = torch.tensor([0, 1, 2, -100, 3, -100, 1])
        assert found(
            Layer(), schedule='1f1b', loss_fn=loss_fn, target=target, normalizer=normalizer
        ).equal


def test_a_scalar_of_the_output_is_not_in_the_arbitrary_loss():
    model = nn.Sequential(Layer(), Call(lambda x: {'x': x, 'norm': x.square().mean()}))
    for schedule in (None, '1f1b'):
        assert check_parity(model, torch.rand(7, 4), gather='mean', schedule=schedule).equal


def test_a_split_backward_that_is_wrong(monkeypatch):
    finish = Step._ACTIONS['W']

    def lose_the_first(step, i, j):
        if i == 0:
            step._work.pop((i, j), None)
        finish(step, i, j)

    monkeypatch.setitem(Step._ACTIONS, 'W', lose_the_first)
    assert found(Layer()).equal
    assert found(Layer(), schedule='1f1b').equal
    assert why(Layer(), schedule='zb-h1').startswith(
        "the schedule: with schedule='1f1b' the numbers are right"
    )


def test_a_loss_that_is_no_mean_over_samples():
    reason = why(Layer(), loss_fn=lambda output: output.square().mean().sqrt(), schedule='1f1b')
    assert reason.startswith('the step: with the plain call, and so with the loss of the mini-')
    assert reason.endswith('has to be a mean over samples')


def test_a_loss_of_samples_along_another_dimension():
    """The arbitrary loss is a mean over samples, wherever they are."""
    transposed = Call(lambda x: x.transpose(0, 2))
    assert found(transposed, sample=torch.rand(4, 7, 4), batch_dim=1, schedule='1f1b').equal


def test_a_target_needs_a_loss():
    with pytest.raises(ValueError, match='a target needs a loss_fn'):
        found(target=torch.rand(7, 4))


def test_no_steps_compare_nothing():
    """In v0.8.0, all was equal."""
    for steps in [0, -1]:
        with pytest.raises(ValueError, match=f'steps must be one or more, but is {steps}'):
            found(steps=steps)


def test_the_type_of_the_model():
    """In v0.8.0, rounding in 16 bits was compared with rounding in 32 bits."""
    for dtype in [torch.bfloat16, torch.half, torch.float, torch.double]:
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), nn.LayerNorm(4), Layer()).to(dtype)
        parity = check_parity(model, torch.rand(7, 4, dtype=dtype), dtype=None)
        assert parity.equal, dtype
        assert f'tolerance {torch.finfo(dtype).eps ** (2 / 3):.0e}' in str(parity)


def test_the_coarsest_type_of_all():
    """In v0.8.0, the tolerance used PyTorch's default type."""

    def tolerance(layer, dtype):
        text = str(
            check_parity(
                nn.Sequential(layer, nn.Tanh()),
                torch.rand(6, 4, dtype=dtype),
                dtype=None,
                raise_exception=False,
            )
        )
        return text.partition('tolerance ')[2].split()[0]

    class Cast(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.register_buffer('by', torch.ones(4, dtype=dtype))

        def forward(self, x):
            return x.to(self.by.dtype) * self.by

    assert tolerance(nn.ReLU(), torch.bfloat16) == tolerance(Cast(torch.bfloat16), torch.double)
    assert tolerance(nn.Identity(), torch.complex64) == '2e-05'
    assert tolerance(nn.Linear(4, 4).double(), torch.double) == '4e-11'


def test_a_model_with_nothing_to_train():
    assert check_parity(nn.Sequential(nn.Tanh()), torch.rand(7, 4)).equal


def test_buffers_and_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.BatchNorm1d(4).eval(), Layer())
    options = {'optimizer': lambda parameters: torch.optim.SGD(parameters, 0.1)}
    assert check_parity(model, torch.arange(9), [1, 2], **options).equal


@pytest.mark.accelerator
def test_the_generators_of_accelerators_stay_as_they_were():
    module, where = torch.get_device_module(ACCELERATOR), places('aac')
    state, target = module.get_rng_state(where[0]), torch.rand(7, 4)
    parity = found(
        nn.Dropout(),
        nn.BatchNorm1d(4).eval(),
        devices=where,
        balance=[1, 2, 1],
        loss_fn=lambda y: (y - target).square().mean(),
    )
    assert parity.equal and "drawn by '1'" in parity.reasons[0]
    assert torch.equal(module.get_rng_state(where[0]), state)


@pytest.mark.accelerator
def test_an_accelerator_that_several_partitions_draw_from():
    where = f'{ACCELERATOR}:0'
    for on, both in (([where, 'cpu', where], True), ([where] * 3, False)):
        parity = found(nn.Dropout(), devices=on, balance=[1, 1, 1])
        assert parity.equal
        assert ('and on the micro-batches' in parity.reasons[0]) is both


@pytest.mark.slow
def test_it_is_not_imported_with_the_package():
    code = 'import sys, torchgpipe; print("torchgpipe.testing" in sys.modules)'
    assert (
        subprocess.run(
            [sys.executable, '-c', code], capture_output=True, text=True, check=True
        ).stdout
        == 'False\n'
    )
