"""Thread-local state follows into workers and recomputations, as in the unwrapped model."""
import contextvars
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.helpers import DEVICES, MODES, Spy, assert_same, gradients, nothing, train_both
from torchgpipe import GPipe, is_recomputing
from torchgpipe.ambient import Ambient

devices = pytest.mark.parametrize('devices', list(DEVICES.values()), ids=list(DEVICES))
modes = pytest.mark.parametrize('mode', MODES)


def pipe(model, devices, mode, chunks=4):
    """Give the model in two partitions."""
    half = len(model) // 2
    return GPipe(model, [half, len(model) - half], devices=devices(2), chunks=chunks,
                 checkpoint=mode)


@devices
@pytest.mark.parametrize('see, context', [
    (torch.is_grad_enabled, torch.no_grad), (torch.is_grad_enabled, torch.enable_grad),
    (torch.is_inference_mode_enabled, torch.inference_mode)])
def test_grad_and_inference_mode(devices, see, context):
    seen = []
    model = nn.Sequential(*[Spy(lambda _: seen.append(see())) for _ in range(2)])
    with context():
        expected = see()
        output = pipe(model, devices, 'always')(torch.rand(4, 1))
        assert output.is_inference() == torch.is_inference_mode_enabled()
    assert seen == [expected] * 8


@devices
@modes
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('where', ['forward', 'backward', 'both'])
def test_autocast(devices, mode, dtype, where):
    """Outputs, their dtype and gradients are those of the same micro-batches unwrapped."""
    dtypes = []
    model = nn.Sequential(nn.Linear(8, 8), Spy(lambda x: dtypes.append(x.dtype)),
                          nn.Linear(8, 8), nn.Tanh())
    gpipe = pipe(model, devices, mode)
    x = torch.rand(8, 8)

    @contextmanager
    def autocast(*places):
        with torch.autocast('cpu', dtype) if where in places else nothing():
            yield

    def run(function):
        model.zero_grad()
        with autocast('forward', 'both'):
            y = function(x)
            loss = y.float().square().sum()
            if where == 'both':
                loss.backward()
        if where != 'both':
            with autocast('backward'):
                loss.backward()
        return y, gradients(model)

    expected, expected_gradients = run(lambda x: torch.cat([model(c) for c in x.chunk(4)]))
    low = dtypes[0]
    dtypes.clear()
    actual, actual_gradients = run(gpipe)
    assert actual.dtype == expected.dtype and set(dtypes) == {low}
    assert low == (torch.float32 if where == 'backward' else dtype)
    assert_same([actual, *actual_gradients], [expected, *expected_gradients], 1e-2)
    assert torch.equal(actual, expected)


@devices
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
        with torch.autocast('cpu', torch.bfloat16), torch.no_grad():
            assert torch.equal(gpipe(x), model(x))


@devices
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


@devices
@modes
def test_saved_tensor_hooks(devices, mode):
    """Each saved tensor is packed once and unpacked once, also in a recomputation."""
    def counted():
        counts = {'pack': 0, 'unpack': 0}

        def count(name, x):
            counts[name] += 1
            return x.clone()

        return counts, saved_tensors_hooks(lambda x: count('pack', x),
                                           lambda x: count('unpack', x))

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
    checkpointed = {'always': 4, 'except_last': 3, 'never': 0}[mode] * 2  # cells, one input each
    assert counts['pack'] == expected['pack'] + checkpointed
    assert counts['unpack'] == expected['unpack'] + checkpointed


@devices
@modes
def test_save_on_cpu(devices, mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    train_both(model, pipe(model, devices, mode), torch.rand(5, 4, dtype=torch.double),
               context=save_on_cpu)


@devices
@modes
def test_context_variables(devices, mode):
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
    train_both(model, pipe(model, devices, mode), torch.rand(5, 4, dtype=torch.double),
               context=scaled)


@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_the_default_device(devices, mode):
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


def counting(devices, mode):
    """Give a pipeline, and what it notes: the number of intra-op threads of each layer's call."""
    seen = []
    model = nn.Sequential(*[Spy(lambda _: seen.append(torch.get_num_threads()))
                            for _ in range(2)])
    return pipe(model, devices, mode), seen


@devices
def test_the_number_of_intra_op_threads(devices):
    gpipe, seen = counting(devices, 'never')
    for number in (1, 2, 1):
        torch.set_num_threads(number)
        gpipe(torch.rand(4, 1))
    assert seen == [1] * 8 + [2] * 8 + [1] * 8


@devices
def test_a_recomputation_has_as_many_intra_op_threads_as_the_first_pass(devices):
    gpipe, seen = counting(devices, 'always')
    output = gpipe(torch.rand(4, 1, requires_grad=True))
    torch.set_num_threads(3)
    output.sum().backward()
    assert seen == [1] * 16 and torch.get_num_threads() == 3


def test_a_pipeline_within_a_recomputation_knows_that_it_is_in_one():
    seen = []
    inner = GPipe(nn.Sequential(nn.Identity(), Spy(lambda _: seen.append(is_recomputing()))),
                  [1, 1], devices=['cpu:0', 'cpu:1'], checkpoint='never')
    outer = GPipe(nn.Sequential(inner), [1], devices=['cpu'], checkpoint='always')
    outer(torch.rand(2, 2, requires_grad=True)).sum().backward()
    assert seen == [False, True]


def test_hooks_that_an_interrupt_left_behind_are_dropped():
    mine = saved_tensors_hooks(lambda x: x, lambda x: x)
    with mine:
        ambient = Ambient.capture()
        for _ in range(3):
            torch._C._autograd._push_saved_tensors_default_hooks(id, id)
        ambient.repair()
        assert Ambient.capture().hooks == ambient.hooks
    assert Ambient.capture().hooks is None


def test_a_captured_state_is_taken_back_afterwards():
    with torch.no_grad(), torch.autocast('cpu', torch.float16, cache_enabled=False):
        ambient = Ambient.capture()
    before = Ambient.capture()
    inside = ambient.run(Ambient.capture)
    after = Ambient.capture()
    assert (inside.grad, inside.autocast) == (False, ambient.autocast) != (True, before.autocast)
    assert (after.grad, after.autocast) == (before.grad, before.autocast)
