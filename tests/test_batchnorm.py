"""Deferred batch normalization against plain batch normalization on whole mini-batches."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call, in_partitions, micro_batches
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm


def assert_same_statistics(deferred, plain, rtol=1e-12):
    """Compare all buffers."""
    assert deferred.num_batches_tracked == plain.num_batches_tracked
    for name in ('running_mean', 'running_var'):
        actual, expected = getattr(deferred, name), getattr(plain, name)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=rtol, atol=rtol)


def piped(layer, chunks, mode='never', devices=('cpu',)):
    """Return the layer in a pipeline, with deferred batch norm."""
    return in_partitions(
        devices, copy.deepcopy(layer), chunks=chunks, checkpoint=mode, deferred_batch_norm=True
    )


@devices
def test_running_statistics_with_a_varying_number_of_micro_batches(devices):
    for momentum in [0.1, 0.7, None]:
        for layer, shape in [
            (nn.BatchNorm1d, (3,)),
            (nn.BatchNorm1d, (3, 5)),
            (nn.BatchNorm2d, (3, 4, 4)),
            (nn.BatchNorm3d, (3, 2, 2, 2)),
        ]:
            plain = layer(3, momentum=momentum).double()
            gpipe = piped(plain, 4, 'except_last', devices=devices(1))
            for size in (16, 9, 3 if len(shape) > 1 else 8, 16):
                x = torch.randn(size, *shape, dtype=torch.double, requires_grad=True) * 2 + 3
                plain(x)
                call(gpipe, x).sum().backward()
                assert_same_statistics(gpipe[0], plain)
            gpipe.eval(), plain.eval()
            assert torch.allclose(call(gpipe, x).cpu(), plain(x), rtol=0, atol=1e-12)


@devices
def test_each_micro_batch_is_normalised_by_itself(devices):
    plain = nn.BatchNorm2d(3).double()
    gpipe = piped(plain, 4, devices=devices(1))
    x = torch.randn(8, 3, 4, 4, dtype=torch.double)
    expected = torch.cat([copy.deepcopy(plain)(c) for c in micro_batches(x, 4)])
    assert_same([call(gpipe, x)], [expected])


@devices
def test_float_types(devices):
    for dtype, rtol in [
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 4e-3),
    ]:
        plain = nn.BatchNorm2d(3).to(dtype)
        gpipe = piped(plain, 4, devices=devices(1))
        x = torch.randn(8, 3, 4, 4).to(dtype)
        for _ in range(3):
            assert call(gpipe, x).dtype == plain(x).dtype
        assert_same_statistics(gpipe[0], plain, rtol)


@devices
def test_low_precision_input_with_float32_statistics(devices):
    plain = nn.BatchNorm2d(3)
    gpipe = piped(plain, 4, devices=devices(1))
    x = torch.randn(8, 3, 4, 4).bfloat16()
    plain(x), call(gpipe, x)
    assert_same_statistics(gpipe[0], plain, 1e-5)


@devices
def test_a_large_mean_does_not_cancel_the_variance(devices):
    plain = nn.BatchNorm1d(1)
    gpipe = piped(plain, 8, devices=devices(1))
    x = torch.randn(64, 1) * 0.01 + 1000
    plain(x), call(gpipe, x)
    true = 0.9 + 0.1 * x.double().var().item()
    assert gpipe[0].running_var.item() == pytest.approx(true, rel=1e-5)
    naive = x.square().mean() - x.mean().square()  # the wrong formula
    assert naive.item() != pytest.approx(x.double().var().item(), rel=0.5)


@devices
def test_a_layer_in_evaluation_mode_stays_as_it_is(devices):
    plain = nn.BatchNorm1d(3).double()
    gpipe = piped(plain, 4, 'except_last', devices=devices(1))
    gpipe[0].eval(), plain.eval()
    x = torch.randn(8, 3, dtype=torch.double) + 5
    assert torch.allclose(call(gpipe, x).cpu(), plain(x), rtol=0, atol=1e-12)
    assert_same_statistics(gpipe[0], plain)
    assert gpipe[0].num_batches_tracked == 0


@devices
def test_a_layer_with_frozen_parameters_tracks(devices):
    plain = nn.BatchNorm1d(3).double().requires_grad_(False)
    gpipe = piped(plain, 4, 'except_last', devices=devices(1))
    x = torch.randn(8, 3, dtype=torch.double)
    plain(x), call(gpipe, x)
    assert_same_statistics(gpipe[0], plain)
    assert not call(gpipe, x).requires_grad


@devices
def test_a_failed_mini_batch_leaves_nothing_for_the_next(devices):
    def fail(module, args):
        if args[0][0, 0] > 50:
            raise ZeroDivisionError

    plain = nn.BatchNorm1d(2).double()
    gpipe = piped(plain, 4, devices=devices(1))
    gpipe[0].register_forward_pre_hook(fail)
    x = torch.randn(8, 2, dtype=torch.double)
    bad = torch.cat([x[:4], x[4:] + 100])
    with pytest.raises(ZeroDivisionError):
        call(gpipe, bad)
    assert gpipe[0].num_batches_tracked == 0
    plain(x), call(gpipe, x)
    assert_same_statistics(gpipe[0], plain)


@devices
def test_a_layer_that_is_called_twice_moves_twice(devices):
    class Twice(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            self.norm(x)
            self.norm(x * 3 + 1)
            return x

    plain = Twice(nn.BatchNorm1d(3).double())
    gpipe = piped(plain, 4, devices=devices(1))
    for _ in range(2):
        x = torch.randn(8, 3, dtype=torch.double)
        plain(x), call(gpipe, x)
    assert gpipe[0].norm.num_batches_tracked == 4
    assert_same_statistics(gpipe[0].norm, plain.norm)


class Skip(nn.Module):
    """A block that some micro-batches skip, as with stochastic depth."""

    def __init__(self, norm, skips):
        super().__init__()
        self.norm = norm
        self.skips = skips

    def forward(self, x):
        return x if int(x[0, 0]) in self.skips else x + self.norm(x)


@devices
def test_a_block_that_some_micro_batches_skip(devices):
    """In v0.3.0, if the last one skipped, statistics stood still and leaked into the next."""
    for skips in [{3}, {0}, {0, 3}, {1, 2}, {0, 1, 2}, {0, 1, 2, 3}]:
        plain = nn.BatchNorm1d(2).double()
        gpipe = piped(Skip(plain, skips), 4, 'except_last', devices=devices(1))
        for scale in (100, 1, 10):
            x = torch.randn(8, 2, dtype=torch.double) * scale
            x[:, 0] = torch.arange(4).repeat_interleave(2)
            seen = torch.cat([c for c in x.chunk(4) if int(c[0, 0]) not in skips] or [x[:0]])
            if len(seen):
                plain(seen)
            call(gpipe, x.requires_grad_()).sum().backward()
            assert_same_statistics(gpipe[0].norm, plain)


@devices
def test_a_pipeline_within_a_layer_is_part_of_the_outer_mini_batch(devices):
    """In v0.3.0, statistics moved once per micro-batch of the outer pipeline."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    # An accelerator's partition has all that is in it on that accelerator.
    of_inner = devices(1) * 2 if devices.are_accelerators else devices(2)
    inner = GPipe(
        copy.deepcopy(plain),
        [1, 2],
        devices=of_inner,
        chunks=2,
        checkpoint='except_last',
        deferred_batch_norm=True,
    )
    outer = in_partitions(devices, inner, nn.Identity(), chunks=2, checkpoint='except_last')
    for _ in range(3):
        x = torch.randn(8, 3, dtype=torch.double)
        plain[1](plain[0](x))
        call(outer, x).sum().backward()
    assert_same_statistics(inner[1], plain[1])
    assert inner[2].num_batches_tracked == 3


def test_outside_of_a_pipeline_every_so_many_calls_make_a_mini_batch():
    plain = nn.BatchNorm2d(3).double()
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=4)
    assert isinstance(deferred, DeferredBatchNorm)
    for _ in range(2):
        x = torch.randn(8, 3, 4, 4, dtype=torch.double)
        plain(x)
        for chunk in x.chunk(4):
            deferred(chunk)
        assert_same_statistics(deferred, plain)


def test_conversion_shares_parameters_and_keeps_the_rest():
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=0.3).eval()
    module = nn.Sequential(
        nn.Linear(1, 1),
        nn.Sequential(norm),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.SyncBatchNorm(2),
    )
    same = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks=4)
    assert same is module
    deferred = module[1][0]
    assert type(deferred) is DeferredBatchNorm
    assert deferred.weight is norm.weight and deferred.running_var is norm.running_var
    assert (deferred.eps, deferred.momentum, deferred.training) == (1e-3, 0.3, False)
    assert type(module[2]) is nn.BatchNorm1d and type(module[3]) is nn.SyncBatchNorm
    again = DeferredBatchNorm.convert_deferred_batch_norm(deferred, chunks=4)
    assert again is deferred
    assert DeferredBatchNorm.convert_deferred_batch_norm(deferred, chunks=2).chunks == 2


@devices
def test_without_affine_parameters(devices):
    plain = nn.BatchNorm1d(3, affine=False).double()
    gpipe = piped(plain, 2, devices=devices(1))
    x = torch.randn(8, 3, dtype=torch.double)
    plain(x), call(gpipe, x)
    assert_same_statistics(gpipe[0], plain)
    assert not list(gpipe.parameters())


def test_conversion_of_a_layer_in_two_places_and_of_hooks():
    norm = nn.BatchNorm1d(3)
    calls = []
    norm.register_forward_hook(lambda *args: calls.append(1))
    module = nn.Module()
    module.a = module.b = norm
    DeferredBatchNorm.convert_deferred_batch_norm(module)
    assert module.a is module.b and type(module.a) is DeferredBatchNorm
    module.a(torch.rand(2, 3))
    assert calls == [1]


def test_a_layer_with_parametrizations_is_refused():
    norm = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(norm, 'weight', nn.Identity())
    with pytest.raises(ValueError, match='parametrizations'):
        DeferredBatchNorm.convert_deferred_batch_norm(nn.Sequential(norm))


def test_in_v007_an_unfinished_mini_batch_was_saved():
    state = nn.BatchNorm1d(3).state_dict()
    state.update(sum=torch.zeros(3), sum_squares=torch.zeros(3))
    DeferredBatchNorm(3).load_state_dict(state)


def test_a_lazy_layer_is_refused():
    with pytest.raises(ValueError, match='LazyBatchNorm1d does not know'):
        DeferredBatchNorm.convert_deferred_batch_norm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_an_input_without_channels_is_refused():
    with pytest.raises(ValueError, match=r'\(N, C\).*got \(3,\)'):
        DeferredBatchNorm(3)(torch.rand(3))


@devices
def test_without_deferring_the_statistics_differ(devices):
    """The counterpart of the tests above: they can fail."""
    plain = nn.BatchNorm1d(3).double()
    gpipe = in_partitions(devices, copy.deepcopy(plain), chunks=4)
    x = torch.randn(8, 3, dtype=torch.double)
    plain(x), call(gpipe, x)
    with pytest.raises(AssertionError):
        assert_same_statistics(gpipe[0], plain)
