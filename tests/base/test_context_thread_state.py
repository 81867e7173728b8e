"""Thread-local state follows into workers and recomputations, as in the unwrapped model."""

import contextvars
import copy
import gc
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices import cpus
from tests.helpers import STEPS, Spy, WeakLog, assert_same, gradients, nothing, train_both
from tests.marks import MODES
from torchgpipe import GPipe, is_recomputing


def pipe(model, devices, mode, chunks=4):
    """Return the model in two partitions."""
    half = len(model) // 2
    return GPipe(
        model, [half, len(model) - half], devices=devices(2), chunks=chunks, checkpoint=mode
    )


@cpus
def test_grad_and_inference_mode(devices):
    for see, context in [
        (torch.is_grad_enabled, torch.no_grad),
        (torch.is_grad_enabled, torch.enable_grad),
        (torch.is_inference_mode_enabled, torch.inference_mode),
    ]:
        seen = []
        model = nn.Sequential(*[Spy(lambda _: seen.append(see())) for _ in range(2)])
        with context():
            expected = see()
            output = pipe(model, devices, 'always')(torch.rand(4, 1))
            assert output.is_inference() == torch.is_inference_mode_enabled(), (see, context)
        assert seen == [expected] * 8, (see, context)


@cpus
def test_autocast(devices):
    """Outputs, their dtype and gradients equal the unwrapped model's for the same
    micro-batches."""
    for dtype in [torch.bfloat16, torch.float16]:
        for where in ['forward', 'backward']:
            dtypes = []
            model = nn.Sequential(
                nn.Linear(8, 8), Spy(lambda x: dtypes.append(x.dtype)), nn.Linear(8, 8), nn.Tanh()
            )
            gpipe = pipe(model, devices, 'except_last')
            x = torch.rand(8, 8)

            def run(function):
                model.zero_grad()
                with torch.autocast('cpu', dtype) if where == 'forward' else nothing():
                    y = function(x)
                    loss = y.float().square().sum()
                with torch.autocast('cpu', dtype) if where == 'backward' else nothing():
                    loss.backward()
                return y, gradients(model)

            expected, expected_gradients = run(lambda x: torch.cat([model(c) for c in x.chunk(4)]))
            low = dtypes[0]
            dtypes.clear()
            actual, actual_gradients = run(gpipe)
            assert actual.dtype == expected.dtype and set(dtypes) == {low}, (dtype, where)
            assert low == (torch.float32 if where == 'backward' else dtype)
            assert_same([actual, *actual_gradients], [expected, *expected_gradients], 1e-2)
            assert torch.equal(actual, expected), (dtype, where)


@cpus
def test_a_new_weight_is_cast_anew(devices):
    """No stale copy of a weight stays in autocast's cache, from forward or from recomputation."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gpipe = pipe(model, devices, 'always')
    x = torch.rand(4, 4)
    for _ in range(2):
        with torch.autocast('cpu', torch.bfloat16):
            y = gpipe(x)
        y.float().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        outputs = []
        for net in (gpipe, model):  # each with a cache of its own, or both would use a stale copy
            with torch.autocast('cpu', torch.bfloat16), torch.no_grad():
                outputs.append(net(x))
        assert torch.equal(*outputs)


@cpus
def test_a_weight_is_cast_once_per_forward(devices):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gpipe = pipe(model, devices, 'never')
    casts = set()

    def note(module, args, output):
        # addmm ─▶ t ─▶ the cast of the weight
        casts.add(output.grad_fn.next_functions[2][0].next_functions[0][0])

    for layer in model:
        layer.register_forward_hook(note)
    with torch.autocast('cpu', torch.bfloat16):
        gpipe(torch.rand(8, 4))
    assert len(casts) == 2


@cpus
def test_saved_tensor_hooks(devices):
    """Each saved tensor is packed once and unpacked once, also in a recomputation."""
    for mode in MODES:

        def counted():
            counts = {'pack': 0, 'unpack': 0}

            def count(name, x):
                counts[name] += 1
                return x.clone()

            return counts, saved_tensors_hooks(
                lambda x: count('pack', x), lambda x: count('unpack', x)
            )

        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
        gpipe = pipe(model, devices, mode)
        x = torch.rand(4, 4, dtype=torch.double)
        counts, hooks = counted()
        train_both(model, gpipe, x, context=lambda: hooks)
        expected, hooks = counted()
        with hooks:
            output = [model(c.clone().requires_grad_()) for c in x.chunk(4)]
        torch.cat(output).sum().backward()
        counts, hooks = counted()
        with hooks:
            output = gpipe(x.clone().requires_grad_())
        output.sum().backward()
        checkpointed = {'always': 4, 'except_last': 3, 'never': 0}[
            mode
        ] * 2  # cells, one input each
        assert counts['pack'] == expected['pack'] + checkpointed, mode
        assert counts['unpack'] == expected['unpack'] + checkpointed, mode


@cpus
def test_context_variables(devices):
    scale = contextvars.ContextVar('scale', default=1.0)

    class Scale(nn.Module):
        def forward(self, x):
            return (x * scale.get()).sin()

    @contextmanager
    def scaled():
        token = scale.set(3.0)
        try:
            yield
        finally:
            scale.reset(token)  # before backward, so a recomputation has to remember

    model = nn.Sequential(Scale(), nn.Linear(4, 4), Scale(), nn.Linear(4, 4)).double()
    train_both(
        model,
        pipe(model, devices, 'except_last'),
        torch.rand(5, 4, dtype=torch.double),
        context=scaled,
    )


@cpus
def test_the_default_device(devices):
    for mode in ['always', 'never']:
        seen = []

        class Make(nn.Module):
            def forward(self, x):
                seen.append(torch.empty(1).device.type)
                return x * 1

        gpipe = pipe(nn.Sequential(Make(), Make()), devices, mode)
        x = torch.rand(4, 1, requires_grad=True)
        with torch.device('meta'):
            output = gpipe(x)
        output.sum().backward()
        gpipe(x)
        assert seen == ['meta'] * (16 if mode == 'always' else 8) + ['cpu'] * 8


def test_a_pipeline_within_a_recomputation_knows_that_it_is_in_one():
    seen = []
    inner = GPipe(
        nn.Sequential(nn.Identity(), Spy(lambda _: seen.append(is_recomputing()))),
        [1, 1],
        devices=['cpu:0', 'cpu:1'],
        checkpoint='never',
    )
    outer = GPipe(nn.Sequential(inner), [1], devices=['cpu'], checkpoint='always')
    outer(torch.rand(2, 2, requires_grad=True)).sum().backward()
    assert seen == [False, True]


class CountCalls(TorchFunctionMode):
    """Count the calls of a function, and change its result."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.sin:
            self.calls += 1
            output = output * 2
        return output


class CountOperations(TorchDispatchMode):
    """The same, for operations."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.calls += 1
            output = output * 2
        return output


class Sine(nn.Linear):
    """A linear layer and a sine."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.double)

    def forward(self, x):
        return torch.sin(super().forward(x))


@cpus
def test_in_v030_workers_did_not_see_modes(devices):
    for mode in MODES:
        for Mode in [CountCalls, CountOperations]:
            for until in ['forward', 'backward']:
                model = nn.Sequential(Sine(), Sine(), Sine(), Sine())
                gpipe = pipe(model, devices, mode)
                x = torch.rand(8, 4, dtype=torch.double)
                results = []
                for net in (model, gpipe, gpipe):
                    model.zero_grad()
                    seen = Mode()
                    with seen:
                        output = net(x)
                        forward = seen.calls
                        if until == 'backward':
                            output.sum().backward()
                    if until == 'forward':
                        output.sum().backward()
                    results.append([output, *gradients(model)])
                assert_same(results[1], results[0])
                assert_same(results[2], results[0])
                assert forward == 16, (mode, Mode, until)
                assert seen.calls == 16 + {'always': 16, 'except_last': 12, 'never': 0}[mode]


@cpus
def test_with_modes_and_hooks_cells_run_in_the_order_of_unwrapped_micro_batches(devices):
    seen = []
    model = nn.Sequential(*[Spy(lambda _, k=k: seen.append(k)) for k in range(4)])
    gpipe = pipe(model, devices, 'except_last')
    for _ in range(3):
        for context in (saved_tensors_hooks(id, id), CountCalls()):
            with context:
                gpipe(torch.rand(10, 1))
            assert seen == [0, 1, 2, 3] * 4
            seen.clear()


@cpus
def test_a_checkpoint_around_a_pipeline(devices):
    """In v0.3.0, of 40 backwards on workers 16 were silently wrong, and 24 raised."""
    for reentrant in [False, True]:
        model = nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.Sigmoid()
        ).double()
        reference = copy.deepcopy(model)
        gpipe = pipe(model, devices, 'except_last')
        for _ in range(10):
            x = torch.rand(9, 4, dtype=torch.double, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            reference.zero_grad(), gpipe.zero_grad()
            reference(y).square().sum().backward()
            torch.utils.checkpoint.checkpoint(
                gpipe, x, use_reentrant=reentrant
            ).square().sum().backward()
            assert_same([x.grad, *gradients(gpipe)], [y.grad, *gradients(reference)])


@cpus
def test_a_pipeline_within_a_checkpointed_layer(devices):
    """In v0.3.0 it was refused: its workers saved tensors in any order."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.BatchNorm1d(4)).double()
    reference = copy.deepcopy(model)
    inner = GPipe(model, [2, 2], devices=devices(2), chunks=1, checkpoint='except_last')
    outer = GPipe(
        nn.Sequential(inner, nn.Linear(4, 4).double()),
        [1, 1],
        devices=devices(2),
        chunks=1,
        checkpoint='always',
    )
    reference = nn.Sequential(reference, copy.deepcopy(outer[1]))
    for _ in range(5):
        results = []
        for net in (reference, outer):
            net.zero_grad()
            torch.manual_seed(3)
            net(torch.rand(6, 4, dtype=torch.double)).square().sum().backward()
            results.append([*gradients(net), *net.buffers()])
        assert_same(results[1], results[0])


@cpus
def test_mutation_on_saved_tensors_is_refused(devices):
    """With workers, gradients were wrong now and then; after a change of the input, always."""
    for call in [lambda gpipe, x: gpipe(x), lambda gpipe, x: gpipe.step(x, x, nn.MSELoss())]:
        gpipe = pipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), devices, 'except_last')
        x = torch.rand(4, 4)
        with allow_mutation_on_saved_tensors():
            with pytest.raises(RuntimeError, match='allow_mutation_on_saved_tensors'):
                call(gpipe, x)
            with torch.no_grad():
                gpipe(x)  # which saves nothing
        call(gpipe, x)


def test_mutation_on_saved_tensors_misses_parts_without_a_pipeline():
    """Where this fails, and addresses that are used again do no harm, it need not be refused."""
    weight = torch.ones((), requires_grad=True)
    with allow_mutation_on_saved_tensors():
        x = torch.ones(4)
        y = x[2:] * weight
        x.zero_()
        y.sum().backward()
    assert weight.grad == 0  # and not 2


TRANSFORMS = {
    'grad': lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    'jacrev': lambda f, x: torch.func.jacrev(f)(x),
    'jvp': lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    'vmap': lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1])),
}


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@cpus
def test_in_v030_transforms_gave_zeros_on_workers(devices):
    for transform in TRANSFORMS:
        for mode in ['always', 'never']:
            model = nn.Sequential(Sine(), Sine(), Sine(), Sine())
            x = torch.rand(4, 4, dtype=torch.double)
            gpipe = pipe(model, devices, mode)
            if mode == 'never' and devices(2)[0] == devices(2)[1]:
                assert_same([TRANSFORMS[transform](gpipe, x)], [TRANSFORMS[transform](model, x)])
            else:
                with pytest.raises(RuntimeError, match=r'a transform of torch\.func'):
                    TRANSFORMS[transform](gpipe, x)


@cpus
def test_no_step_is_taken_within_a_transform(devices):
    gpipe = pipe(nn.Sequential(Sine(), Sine()), devices, 'never')

    def step(x):
        return gpipe.step(x, None, lambda output, _: output.sum())

    with pytest.raises(RuntimeError, match=r'a transform of torch\.func'):
        torch.func.grad(step)(torch.rand(4, 4))


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@cpus
def test_forward_mode_differentiation_is_refused(devices):
    gpipe = pipe(nn.Sequential(Sine(), Sine(), Sine(), Sine()), devices, 'never')
    x = torch.rand(4, 4, dtype=torch.double)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match='forward'):
        gpipe(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.filterwarnings('ignore')
@cpus
def test_in_v030_a_trace_held_constants(devices):
    for trace in [
        torch.jit.trace,
        lambda net, x: make_fx(net)(x),
        lambda net, x: torch.export.export(net, (x,)),
    ]:
        gpipe = pipe(nn.Sequential(Sine(), Sine()), devices, 'never')
        with pytest.raises(Exception, match='cannot be traced'):
            trace(gpipe, torch.rand(4, 4, dtype=torch.double))


@cpus
@pytest.mark.parametrize(
    'step, box',
    [
        (STEPS['backward'], lambda x: x),
        (STEPS['backward'], lambda x: {'outputs': [x]}),
        (STEPS['no backward'], lambda x: {'outputs': [x]}),
        (STEPS['no grad'], lambda x: x),
    ],
)
def test_the_last_output_in_a_context_variable(devices, step, box):
    """In v0.3.0 each step's output stayed alive, by the context of the next one."""
    last = contextvars.ContextVar('last')
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    gpipe = pipe(model, devices, 'except_last')
    gpipe.register_forward_hook(lambda module, args, output: (last.set(box(output)), None)[1])
    log = WeakLog(gpipe)

    def run():
        for _ in range(8):
            step(gpipe)

    contextvars.copy_context().run(run)
    gc.collect()
    # Nothing is left of a context that is gone. Another one keeps the state of the last two steps.
    assert log.alive() == 0
    context = contextvars.copy_context()
    context.run(run)
    assert log.alive() <= 4
