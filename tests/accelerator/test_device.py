"""The simulated accelerator: it computes the CPU's results asynchronously, as CUDA does."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.accelerator import on

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def synchronized():
    """Start with nothing queued and nothing cached; leave nothing queued."""
    torch.accelerator.empty_cache()
    yield
    accelerator.set_delays()
    accelerator.set_copy_time()
    for device in range(4):
        torch.accelerator.synchronize(device)


def test_accelerator():
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator().type == 'sim'
    assert torch.get_device_module('sim') is torch.sim
    torch.accelerator.set_device_index(2)
    try:
        assert torch.empty(1, device='sim').device == torch.device('sim:2')
        assert torch.sim.current_device() == 2
        with torch.accelerator.device_index(1):
            assert torch.zeros(1, device='sim').device == torch.device('sim:1')
    finally:
        torch.accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match='no device sim:7'):
        torch.empty(1, device='sim:7')


def test_tensors():
    x = torch.arange(12.0).view(3, 4)
    y = x.to('sim:1')
    assert y.device == torch.device('sim:1') and not y.is_cpu and y.is_sim
    for function in (
        lambda t: t.t()[1:] * 2,
        lambda t: t.unfold(1, 2, 1).sum(-1),
        torch.cumsum,
        lambda t: t[t > 5],
        lambda t: torch.cat([t, t.flip(0)]),
        torch.nonzero,
        lambda t: t.reshape(4, 3).softmax(0),
        lambda t: t.expand(2, 3, 4) + 1,
        lambda t: torch.view_as_real(t.to(torch.cfloat)),
        lambda t: t[[0, 2]],
        lambda t: t.view(torch.int32),
        lambda t: torch.stack(t.split(1)),
        lambda t: t.sort(descending=True)[1],
        lambda t: t.unique(),
        lambda t: t[torch.tensor([1, 0])],
        lambda t: t + torch.tensor(2.0),
        lambda t: t.new_zeros(2).resize_(3, 2).fill_(1),
        lambda t: t.std(),
        lambda t: t.chunk(2)[1].mean(0),
        lambda t: t.clone().t_().contiguous(),
        lambda t: torch.einsum('ij,kj->ik', t, t),
        lambda t: t.masked_fill(t > 3, 0),
        lambda t: torch.complex(t, t).conj() * 2,
        lambda t: t._neg_view().clone(),
        lambda t: t[2, 2] / 13 * 0.9 * 0.9,
    ):
        arguments = (0,) if function is torch.cumsum else ()
        expected, actual = function(x, *arguments), function(y, *arguments)
        assert actual.device == y.device
        assert torch.equal(actual.cpu(), expected)
    assert y.sum().item() == 66 and torch.equal(y, y.clone()) and y.tolist() == x.tolist()
    assert "device='sim:1'" in repr(y)


def test_views_share_memory_and_versions():
    x = torch.zeros(4, 4, device='sim:0')
    version = x._version
    x[1].fill_(1)
    x.view(16)[0] = 5
    assert x._version == version + 2
    assert x.sum().item() == 9
    assert x.view(2, 8).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_other_devices_are_refused():
    x = torch.ones(3, 3, device='sim:0')
    for y in (torch.ones(3, 3, device='sim:1'), torch.ones(3, 3)):
        with pytest.raises(RuntimeError, match='same device'):
            x + y
        with pytest.raises(RuntimeError, match='same device'):
            x @ y


def models():
    """Return pairs of a module and an input."""
    torch.manual_seed(1)
    image, words = torch.randn(4, 3, 8, 8), torch.randint(0, 9, (4, 5))
    conv = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.GroupNorm(2, 2),
        nn.Upsample(scale_factor=2),
        nn.Flatten(),
        nn.Linear(512, 3),
    )
    attention = nn.Sequential(
        nn.Embedding(9, 8),
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        nn.LayerNorm(8),
        nn.GELU(),
    )
    return {
        'linear': (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(5, 4)),
        'convolution': (conv, image),
        'attention': (attention, words),
        'lstm': (nn.LSTM(3, 4), torch.randn(5, 2, 3)),
        'gru': (nn.GRU(3, 4, num_layers=2), torch.randn(5, 2, 3)),
    }


def train(model, x, steps=3):
    """Train, and give all numbers that come of it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        output = model(x)
        output = output[0] if isinstance(output, tuple) else output
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
    model.eval()
    last = model(x)
    last = last[0] if isinstance(last, tuple) else last
    return [
        t.detach().cpu()
        for t in (
            last,
            *model.parameters(),
            *model.buffers(),
            *(p.grad for p in model.parameters()),
        )
    ]


def test_training_equals_the_cpu():
    for delay in [0, 50]:
        for name in ['linear', 'convolution', 'attention', 'lstm', 'gru']:
            model, x = models()[name]
            model = model.double()
            x = x.double() if x.is_floating_point() else x
            accelerator.set_delays(0, delay)
            actual = train(copy.deepcopy(model).to('sim:1'), x.to('sim:1'))
            expected = train(model, x)
            for a, b in zip(actual, expected):
                assert a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_kernels_run_later():
    accelerator.sleep(50000)
    x = torch.ones(3, device='sim:0').mul_(2)
    stream = torch.accelerator.current_stream(0)
    assert not stream.query()
    assert x.tolist() == [2, 2, 2]
    assert stream.query()


def test_streams_order():
    a, b = torch.Stream('sim:0'), torch.Stream('sim:0')
    assert a != b and a.device == torch.device('sim:0')
    with on(a):
        assert torch.accelerator.current_stream(0) == a
        accelerator.sleep(20000)
        x = torch.ones(3, device='sim:0')
    b.wait_stream(a)
    with on(b):
        y = x + 1
        assert y.tolist() == [2, 2, 2]
    x.record_stream(b)
    assert torch.accelerator.current_stream(0) == torch.sim.default_stream(0) != a


def test_streams_run_beside_each_other():
    events = [[torch.Event('sim', enable_timing=True) for _ in range(2)] for _ in range(2)]
    for pair in events:
        with on(torch.Stream('sim:0')):
            pair[0].record()
            accelerator.sleep(100000)
            pair[1].record()
    for pair in events:
        pair[1].synchronize()
    (a, b), (c, d) = events
    assert a.elapsed_time(b) >= 100 and c.elapsed_time(d) >= 100
    assert c.elapsed_time(b) > 0 and a.elapsed_time(d) > 0


def stamp(stream=None):
    """Record an event with timing."""
    event = torch.Event('sim:0', enable_timing=True)
    event.record(stream)
    return event


def test_a_kernel_takes_the_time_that_it_is_told_to_take():
    accelerator.set_delays(0, 20000)  # which are no part of it
    begin = stamp()
    accelerator.sleep(300)
    end = stamp()
    end.synchronize()
    assert 0.3 <= begin.elapsed_time(end) < 0.5


def test_a_kernel_takes_the_time_for_which_it_computes():
    stamps = []
    for size in (10, 10, 300):
        x = torch.zeros(size, size, device='sim:0')
        before = stamp()
        x @ x
        stamps.append((before, stamp()))
    torch.accelerator.synchronize(0)
    _, small, large = (before.elapsed_time(after) for before, after in stamps)
    assert 0 < 10 * small < large


def test_a_stream_continues_after_the_event_that_it_waits_for():
    a, b, c = (torch.Stream('sim:0') for _ in range(3))
    begin = stamp(a)
    with on(a):
        accelerator.sleep(2000)
    b.wait_stream(a)
    ends = [stamp(stream) for stream in (a, b, c)]
    torch.accelerator.synchronize(0)
    later = stamp(c)
    later.synchronize()
    assert [begin.elapsed_time(end) >= 2 for end in (*ends, later)] == [True, True, False, True]
    assert ends[0].elapsed_time(ends[1]) == ends[0].elapsed_time(later) == 0


def test_kernels_queued_after_a_wait_begin_later():
    for wait in [
        lambda stream, event: stream.synchronize(),
        lambda stream, event: event.synchronize(),
        lambda stream, event: until(stream.query),
        lambda stream, event: until(event.query),
    ]:
        a, b = torch.Stream('sim:0'), torch.Stream('sim:0')
        with on(a):
            accelerator.sleep(2000)
        end = stamp(a)
        wait(a, end)
        begin = stamp(b)
        begin.synchronize()
        assert end.elapsed_time(begin) == 0


def until(function):
    """Call a function until it says yes."""
    while not function():
        pass


def test_copies_between_devices_take_their_set_time():
    x = torch.zeros(10, device='sim:0')
    stamps = []
    for time in (0, 2000):
        accelerator.set_copy_time(time)
        before = stamp()
        y = x.to('sim:1')
        stamps.append((before, stamp()))
        y + y.clone() + x.cpu().to('sim:1')  # others are as they were
        stamps.append((stamps[-1][1], stamp()))
    torch.accelerator.synchronize(0)
    assert [a.elapsed_time(b) >= 2 for a, b in stamps] == [False, False, True, False]


def test_event():
    event = torch.Event('sim')
    assert event.query()
    accelerator.sleep(20000)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_memory_goes_to_the_next_taker_of_its_stream():
    torch.accelerator.synchronize(0)
    x = torch.ones(1000, device='sim:0')
    place = x.data_ptr()
    del x
    with on(torch.Stream('sim:0')):
        assert torch.empty(1000, device='sim:0').data_ptr() != place
    y = torch.empty(1000, device='sim:0')
    assert y.data_ptr() == place
    assert y.isnan().all()  # poisoned


def test_recorded_memory_is_not_reused_until_it_is_free():
    stream = torch.Stream('sim:0')
    x = torch.ones(5000, device='sim:0')
    place = x.data_ptr()
    with on(stream):
        accelerator.sleep(50000)
    x.record_stream(stream)
    del x
    y = torch.empty(5000, device='sim:0')
    assert y.data_ptr() != place
    stream.synchronize()
    assert torch.empty(5000, device='sim:0').data_ptr() == place


def test_memory_statistics():
    torch.accelerator.empty_cache()
    before, reserved = torch.sim.memory_allocated(3), torch.sim.memory_reserved(3)
    torch.sim.reset_peak_memory_stats(3)
    x = torch.empty(1 << 20, dtype=torch.uint8, device='sim:3')
    y = torch.empty(1 << 20, dtype=torch.uint8, device='sim:3')
    assert torch.sim.memory_allocated(3) - before == 2 << 20
    del x
    assert torch.sim.memory_allocated(3) - before == 1 << 20
    assert torch.sim.max_memory_allocated(3) - before == 2 << 20
    assert torch.sim.memory_reserved(3) - reserved == 2 << 20
    torch.sim.reset_peak_memory_stats('sim:3')
    assert torch.accelerator.max_memory_allocated(3) - before == 1 << 20
    assert torch.sim.memory_allocated(2) == torch.accelerator.memory_allocated(2)
    del y
    torch.accelerator.empty_cache()
    assert torch.sim.memory_reserved(3) == reserved


def test_out_of_memory():
    accelerator.set_memory_limit(torch.sim.memory_reserved(0) + (1 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError, match='sim:0'):
            torch.empty(2 << 20, dtype=torch.uint8, device='sim:0')
    finally:
        accelerator.set_memory_limit(8 << 30)


def test_generators():
    torch.manual_seed(3)
    x, y = torch.rand(5, device='sim:0'), torch.randn(5, device='sim:0')
    z = torch.rand(5, device='sim:1')
    assert torch.equal(x.cpu(), z.cpu()) and not torch.equal(x, y)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device='sim:0'), x)
    state = torch.sim.get_rng_state('sim:0')
    a = torch.nn.functional.dropout(torch.ones(100, device='sim:0'))
    assert not torch.equal(torch.sim.get_rng_state('sim:0'), state)
    torch.sim.set_rng_state(state, 'sim:0')
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100, device='sim:0')), a)
    own = torch.Generator('sim:0').manual_seed(9)
    b = torch.rand(5, device='sim:0', generator=own)
    assert torch.equal(torch.rand(5, device='sim:0', generator=own.manual_seed(9)), b)
    with pytest.raises(RuntimeError, match='device type for generator'):
        torch.rand(5, device='sim:0', generator=torch.Generator())
    with torch.random.fork_rng([0], device_type='sim'):
        c = torch.randperm(9, device='sim:0')
    assert torch.equal(torch.randperm(9, device='sim:0'), c)


def test_autocast():
    layer = nn.Linear(3, 3).to('sim:0')
    x = torch.ones(2, 3, device='sim:0')
    with torch.autocast('sim', dtype=torch.bfloat16):
        assert torch.is_autocast_enabled('sim')
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert y.softmax(0).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_errors_come_at_synchronization():
    x = torch.ones(3, 3, device='sim:0')
    y = nn.functional.embedding(torch.tensor([7], device='sim:0'), x)
    with pytest.raises(IndexError):
        torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(0)
    assert y.shape == (1, 3)


def test_errors_of_shapes_come_at_once():
    x = torch.ones(3, 3, device='sim:0')
    with pytest.raises(RuntimeError):
        x @ torch.ones(2, 2, device='sim:0')


def test_copies():
    for a in ('cpu', 'sim:0', 'sim:1'):
        for b in ('cpu', 'sim:0', 'sim:1'):
            x = torch.randn(3, 4, device=a).t()
            y = torch.empty(4, 3, dtype=torch.float64, device=b).copy_(x)
            assert torch.equal(y.cpu(), x.cpu().double())
    x = torch.ones(3)
    y = x.to('sim:0', non_blocking=True)
    x.fill_(2)
    assert y.tolist() == [1, 1, 1]


def test_a_copy_to_the_cpu_that_may_be_late_is_nan_until_then():
    stream = torch.accelerator.current_stream(0)
    x = torch.ones(3, device='sim:0')
    accelerator.sleep(50000)
    y = x.to('cpu', non_blocking=True)
    assert y.isnan().all() or stream.query()
    stream.synchronize()
    assert y.tolist() == [1, 1, 1]


def test_pickle_deepcopy_and_save():
    x = torch.randn(3, device='sim:1')
    assert torch.equal(copy.deepcopy(x), x)
    assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    file = io.BytesIO()
    torch.save(nn.Linear(2, 2).to('sim:1').state_dict(), file)
    file.seek(0)
    assert torch.load(file)['weight'].device == torch.device('sim:1')
    file.seek(0)
    assert torch.load(file, map_location='cpu')['weight'].device == torch.device('cpu')


def test_backward_runs_in_a_thread_of_each_device():
    import threading

    seen = []
    x = torch.ones(3, device='sim:1', requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(threading.get_ident()))
    y.sum().backward()
    assert seen and seen[0] != threading.get_ident()
    assert x.grad.tolist() == [2, 2, 2]
