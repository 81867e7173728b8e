"""Where modules, parameters and buffers stand, and which partitions are serialized for it."""

import torch
from torch import nn

from tests.helpers import in_two_memories
from torchgpipe import GPipe, no_recompute
from torchgpipe.base.locks import layer_lock
from torchgpipe.engine.microbatches import cut
from torchgpipe.engine.partition import (
    Engine,
    all_modules,
    modules_of,
    only_computes,
    shared_modules,
    shared_slots,
)
from torchgpipe.engine.plain_call import PlainCall


class Own(nn.Module):
    """A layer of the user's own, of which nothing is known."""

    def forward(self, x):
        return x


def test_all_modules_are_in_the_order_of_pytorch():
    shared = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inner = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=['cpu'])
    outer = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared, inner, shared[0])
    outer.register_module('nothing', None)
    assert all_modules(outer) == [*outer.modules()]


def test_modules_within_a_pipeline_are_its_own():
    inner = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=['cpu'])
    outer = nn.Sequential(nn.ReLU(), nn.Sequential(inner))
    assert list(modules_of(outer)) == [outer, outer[0], outer[1], inner]


def test_a_module_that_stands_in_one_partition_twice_is_not_shared():
    a, b = nn.Tanh(), nn.Tanh()
    partitions = [nn.Sequential(a, nn.Sequential(a)), nn.Sequential(b), nn.Sequential(b)]
    assert shared_modules(partitions) == {b: (1, 2)}


def test_a_place_without_a_tensor_is_not_shared():
    partitions = [nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(2)]
    assert shared_slots(partitions) == [{}, {}]


def test_shared_tensors_are_listed_in_the_later_partitions():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
    b.weight = a.weight
    d = nn.BatchNorm1d(2)
    d.running_var = c.running_var
    partitions = [nn.Sequential(a, c), nn.Sequential(b), nn.Sequential(d, b)]
    assert shared_slots(partitions) == [
        {},
        {(b, 'weight'): True},
        {(d, 'running_var'): True, (b, 'weight'): True, (b, 'bias'): False},
    ]


def with_hook():
    """Return a layer whose weight is made by a hook."""
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(print)
    return layer


def with_forward():
    """Return a layer that does something else."""
    layer = nn.Linear(2, 2)
    layer.forward = print
    return layer


def test_layers_that_do_not_change_when_called():
    for module, expected in [
        (nn.ReLU(), True),
        (nn.Dropout(), True),
        (nn.Linear(2, 2), True),
        (nn.LSTM(2, 2), True),
        (nn.Embedding(2, 2), True),
        (nn.Embedding(2, 2, max_norm=1.0), False),
        (nn.BatchNorm1d(2), False),
        (nn.LazyLinear(2), False),
        (with_hook(), False),
        (with_forward(), False),
        (Own(), False),
    ]:
        assert only_computes(module) is expected


def serialized(*layers):
    """Return the partitions, one layer each, that run in an order with others."""
    engine = Engine([nn.Sequential(layer) for layer in layers])
    return [partition.j for partition in engine.partitions if partition.serialized]


def test_partitions_with_a_module_in_common_take_turns():
    own, known = Own(), nn.Linear(2, 2)
    assert serialized(nn.Sequential(own), nn.ReLU(), nn.Sequential(own), Own()) == [0, 2]
    assert serialized(known, nn.Sequential(known), nn.ReLU()) == []


def held(lock):
    """Return the locks behind a lock of layers."""
    return {*getattr(lock, 'locks', [lock])}


def test_locks_of_shared_layers():
    own, known, other = Own(), nn.Tanh(), Own()
    a, b = [nn.Sequential(nn.Linear(2, 2), own, known), nn.Sequential(nn.Linear(2, 2), own, known)]
    c = nn.Sequential(other)
    engine = Engine([nn.Sequential(a), nn.Sequential(b), nn.Sequential(c)])
    first, second, third = engine.partitions
    assert len(held(first.lock) & held(second.lock)) == 1
    both = held(first.lock) | held(second.lock)
    # `lock_alone` also has the lock of `known`, for callers that replace its parameters.
    assert held(first.lock_alone) == held(second.lock_alone) == both | held(layer_lock([known]))
    assert third.lock is third.lock_alone and not held(third.lock) & held(first.lock_alone)


def test_a_module_that_gets_copies_of_its_parameters_is_for_one_at_a_time(monkeypatch):
    in_two_memories(monkeypatch)
    linear, tanh = nn.Linear(2, 2), nn.Tanh()
    devices = [torch.device('cpu:0'), torch.device('cpu:1')]
    for known, number in [(linear, 1), (tanh, 0)]:
        engine = Engine([nn.Sequential(nn.ReLU(), known) for _ in devices], devices)
        first, second = engine.partitions
        assert len(held(first.lock) & held(second.lock)) == number
        assert not first.serialized and not second.serialized


def test_a_module_that_is_kept_out_of_recomputation_is_for_one_at_a_time():
    """It has another forward for as long as a cell runs."""
    known = nn.Tanh()
    engine = Engine(
        [nn.Sequential(nn.Linear(2, 2), known) for _ in range(2)],
        [torch.device('cpu:0'), torch.device('cpu:1')],
    )
    first = engine.partitions[0]
    for lock in (first.lock, first.lock_alone):
        pipeline = PlainCall(engine, cut(torch.rand(2, 2), chunks=2)[0], [range(2)] * 2)
        assert pipeline._runs[0].held is lock
        no_recompute(known)


def test_a_partition_of_shared_layers_only_has_a_lock():
    known = nn.Linear(2, 2)
    engine = Engine([nn.Sequential(known), nn.Sequential(known)])
    first, second = (held(partition.lock) for partition in engine.partitions)
    assert first and second and not first & second
