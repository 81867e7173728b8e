"""Buckets: which ones start within a backward, in which order, and with which gradients."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import full
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.distributed.buckets import Arrivals
from torchgpipe.engine.gradients import Leaves
from torchgpipe.shard import sums


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before_it():
    started = []
    arrivals = Arrivals(['ab', 'cd', 'e'], started.append)
    arrivals.arrive('b')
    arrivals.arrive('d')
    arrivals.arrive('c')
    assert not started
    arrivals.arrive('a')
    assert started == ['ab', 'cd']
    arrivals.arrive('a')  # A backward within a layer may add to it again.
    assert started == ['ab', 'cd']
    assert [*arrivals.order] == [*'bdca']


class Log:
    """The collectives of a rank over the data axis, and the layers whose backward begins."""

    def __init__(self):
        self.entries = []
        self._patches = []
        for name in ('all_reduce', 'broadcast'):
            self._patches.append(mock.patch.object(dist, name, self._logged(name)))

    def _logged(self, name):
        collective = getattr(dist, name)

        def call(x, *args, **kwargs):
            if x.dim() == 1:  # The facts of all ranks are a matrix.
                self.entries.append((name, tuple(x.shape)))
            return collective(x, *args, **kwargs)

        return call

    def backward_of(self, layer):
        def forward_hook(_, args, output):
            if output.requires_grad:
                output.register_hook(lambda gradient: self.entries.append('backward'))

        layer.register_forward_hook(forward_hook)

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *raised):
        for patch in self._patches:
            patch.stop()

    def take(self):
        entries, self.entries = self.entries, []
        return entries


def layers(number=4, width=4):
    """Return linear layers, of the same values on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width).double() for _ in range(number)])


def batch(step, samples):
    """Return the input and the target of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, samples, 4, dtype=torch.float64, generator=generator).unbind()


#: The bytes of the parameters of one layer.
LAYER = (4 * 4 + 4) * 8


def trained(module, steps=3, sizes=(4, 4), schedule='1f1b', axes=None, places=None, chunks=2):
    """Train on parts of a mini-batch; return gradients of each step, and collectives of each."""
    axes = axes or {'data': 2}
    mesh = init_mesh(**axes)
    n = 1 if places is None else len(places)
    balance = [len(module) // n] * n
    options = {} if places is None else {'places': places}
    model = DistributedGPipe(module, balance, mesh=mesh, chunks=chunks, compare_every=0, **options)
    rank = mesh.get_local_rank('data')
    gradients = []
    collectives = []
    with mock.patch.object(sums, 'BUCKET', LAYER), Log() as log:
        for layer in model.children():
            log.backward_of(layer)
        for step in range(steps):
            for layer in model.children():
                layer.step = step
            x, target = (part.split(sizes)[rank] for part in batch(step, sum(sizes)))
            model.step(x, target, F.mse_loss, schedule=schedule)
            gradients.append({name: full(x.grad) for name, x in model.named_parameters()})
            model.zero_grad()
            collectives.append(log.take())
    return gradients, collectives


def expected(module, steps=3, samples=8):
    """Return the gradients of each step of the plain module."""
    gradients = []
    for step in range(steps):
        x, target = batch(step, samples)
        module.zero_grad()
        F.mse_loss(module(x), target).backward()
        gradients.append({name: x.grad.clone() for name, x in module.named_parameters()})
    return gradients


def check(results, module, **options):
    """Check the gradients of all ranks."""
    for step, gradients in enumerate(expected(module, **options)):
        for of_rank, _ in results:
            for name, gradient in of_rank[step].items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12)


def check_micro_batches(results, module, sizes):
    """Check the gradients of all ranks, where layers depend on the sizes of micro-batches."""
    for step in range(3):
        x, target = batch(step, sum(sizes))
        module[0].step = step
        module.zero_grad()
        for part, part_target in zip(x.split(sizes), target.split(sizes)):
            (F.mse_loss(module(part), part_target) * len(part) / sum(sizes)).backward()
        for gradients, _ in results:
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(gradients[step][name], parameter.grad)


def test_buckets_start_within_the_last_backward_from_the_second_step_on():
    results = run(2, trained, layers())
    check(results, layers())
    reduction = 'all_reduce', (4 * 4 + 4 + 2,)  # with two flags
    for _, (first, *later) in results:
        assert first == ['backward'] * 8 + [('broadcast', (8,))] + [reduction] * 4
        for entries in later:
            assert entries == ['backward'] * 4 + ['backward', reduction] * 4


def communicating():
    """Train layers of which one may communicate in its backward."""
    module = layers()
    module[1].communicates = True
    return trained(module)


def test_a_single_bucket_waits_for_no_gradient():
    """It is complete when the backward ends, so no hook has to see its gradients."""
    results = run(2, watched)
    assert results == [[True, False, False]] * 2


def watched():
    """Return for each step whether its last backward had hooks."""
    calls = []

    def watch(leaves, only, arrived):
        calls.append(bool(only))
        return watching(leaves, only, arrived)

    watching = Leaves.watch
    model = DistributedGPipe(layers(), [4], mesh=init_mesh(data=2), chunks=2)
    with mock.patch.object(Leaves, 'watch', watch):
        for step in range(3):
            x, target = batch(step, 4)
            model.step(x, target, F.mse_loss)
    return calls


def test_layers_that_communicate_have_no_reduction_beside_their_backward():
    for _, steps in run(2, communicating):
        for entries in steps:
            assert entries[:8] == ['backward'] * 8 and len(entries) == 12


@pytest.mark.parametrize('sizes', [(4, 4), (7, 1), (1, 7)])
@pytest.mark.parametrize(
    'schedule, places',
    [
        ('gpipe', None),
        ('1f1b', None),
        ('zb-h1', [0, 1]),
        ('interleaved', [0, 1, 0, 1]),
        ('zb-v', [0, 1, 1, 0]),
    ],
)
def test_replicas_start_collectives_in_one_order(schedule, places, sizes):
    axes = {'data': 2, 'pipe': 1 if places is None else 2}
    chunks = 4 if places else 2
    results = run(2 * axes['pipe'], trained, layers(), 3, sizes, schedule, axes, places, chunks)
    check(results, layers())
    pipe = axes['pipe']
    for rank in range(pipe):
        one, other = (
            [[entry for entry in step if entry != 'backward'] for step in collectives]
            for _, collectives in (results[rank], results[rank + pipe])
        )
        assert one == other


class Order(nn.Module):
    """Two branches, whose gradients arrive in another order on each rank."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4).double()
        self.second = nn.Linear(4, 4).double()

    def forward(self, x):
        branches = [self.first, self.second]
        if dist.get_rank() == 1:
            branches.reverse()
        for branch in branches:
            x = x + branch(x) - branch(x).detach() + 0.5
        return x


class Sometimes(nn.Module):
    """A layer whose parameters a micro-batch of one sample does not use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.linear(x) if len(x) > 1 else x


class Closure(nn.Module):
    """A layer that also uses the weight of another one, which is no parameter of it."""

    def __init__(self, other):
        super().__init__()
        self._weights = [other.weight]

    def forward(self, x):
        return F.linear(x, self._weights[0])


def closures():
    """Return layers of which the second one uses the weight of the third one in a list."""
    torch.manual_seed(0)
    first, other, last = [nn.Linear(4, 4).double() for _ in range(3)]
    return nn.Sequential(first, Closure(other), other, last)


def dynamic():
    """Return layers whose gradients arrive in other orders on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(Order(), Order())


def sometimes():
    """Return layers of which one has no gradient in a micro-batch of one sample."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4).double(), Sometimes(), nn.Linear(4, 4).double())


def same_order():
    """Return the collectives of a rank whose gradients arrive in another order than others'."""
    return trained(dynamic())


def test_a_replica_follows_the_order_of_the_first_one():
    results = run(2, same_order)
    collectives = [
        [[entry for entry in step if entry != 'backward'] for step in steps]
        for _, steps in results
    ]
    assert collectives[0] == collectives[1]
    for step in range(3):
        for name, gradient in results[0][0][step].items():
            torch.testing.assert_close(gradient, results[1][0][step][name])


def with_sometimes():
    """Train with micro-batches of two samples on a replica, and of one on the other one."""
    return trained(sometimes(), sizes=(4, 2))


def test_a_parameter_without_a_gradient_in_the_last_backward_is_reduced_after_it():
    results = run(2, with_sometimes)
    one, other = ([[e for e in step if e != 'backward'] for step in s] for _, s in results)
    assert one == other
    check_micro_batches(results, sometimes(), [2, 2, 1, 1])


def with_closure():
    """Train layers of which one uses the weight of another one directly."""
    return trained(closures())


def test_a_gradient_that_arrives_after_its_bucket_is_added():
    results = run(2, with_closure)
    check(results, closures())
    for _, steps in results:
        # The second step reduces the late part again. Later ones reduce all of it once.
        count = [len([e for e in step if e[0] == 'all_reduce']) for step in steps]
        assert count[1] > count[0] == count[2], count


class User(nn.Module):
    """A layer that uses the parameters of a layer of another stage, from the second step on."""

    def __init__(self, other):
        super().__init__()
        self._others = [other]
        self.first = nn.Linear(4, 4).double()

    def forward(self, x):
        x = self.first(x)
        return self._others[0].linear(x) if self.step else x


def used_later():
    """Return layers of which the first one uses the parameters of one in a later stage."""
    torch.manual_seed(0)
    other = Sometimes()
    return nn.Sequential(User(other), other)


def with_later_use():
    """Train two stages on a rank; a replica has no gradient of a weight in its last backward."""
    return trained(used_later(), sizes=(3, 4), schedule='interleaved', places=[0, 0])


def test_a_gradient_that_arrives_in_the_backward_of_another_stage_starts_no_bucket():
    results = run(2, with_later_use)
    one, other = ([[e for e in step if e != 'backward'] for step in s] for _, s in results)
    assert one == other
    check_micro_batches(results, used_later(), [2, 1, 2, 2])


class Freezing(nn.Linear):
    """A layer that freezes its bias in its third forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            self.bias.requires_grad_(False)
        return super().forward(x)


def frozen():
    """Train a layer that freezes its bias within the second step; return what requires grad."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4).double(), Freezing(4, 4).double())
    model = DistributedGPipe(module, [2], mesh=init_mesh(data=2), chunks=2, compare_every=0)
    requires_grad = []
    for step in range(3):
        x, target = (part.chunk(2)[dist.get_rank()] for part in batch(step, 8))
        model.step(x, target, F.mse_loss)
        requires_grad.append(model[1].bias.requires_grad)
    return requires_grad


def test_a_layer_may_freeze_a_parameter_within_a_step():
    assert run(2, frozen) == [[True, False, False]] * 2


class Strided(nn.Module):
    """A layer with weights of the usual strides, and of other ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        weights = torch.randn(2, 4, 4, dtype=torch.float64)
        self.usual = nn.Parameter(weights[0])
        self.other = nn.Parameter(weights[1].t().contiguous().t())

    def forward(self, x):
        return x @ self.usual @ self.other


def strides():
    """Return the strides and the memory of each gradient."""
    module = Strided()
    model = DistributedGPipe(nn.Sequential(module), [1], mesh=init_mesh(data=2), chunks=2)
    x, target = batch(0, 4)
    model.step(x, target, F.mse_loss)
    usual, other = model.get_parameter('0.usual').grad, model.get_parameter('0.other').grad
    sizes = [x.untyped_storage().nbytes() for x in (usual, other)]
    return usual.stride(), other.stride(), sizes


def test_gradients_are_views_of_their_bucket_if_their_parameters_have_the_usual_strides():
    flags = 2
    bucket = 8 * (16 + 16 + flags)
    assert run(2, strides) == [((4, 1), (1, 4), [bucket, 8 * 16])] * 2


class Odd(nn.Module):
    """A layer with parameters of three numbers each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(4)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


def odd_sizes(data):
    """Return the gradients, and the places of them in memory relative to 16 bytes."""
    model = DistributedGPipe(nn.Sequential(Odd()), [1], mesh=init_mesh(data=data), chunks=2)
    number = dist.get_rank() if data > 1 else 0
    x = torch.arange(12.0).view(4, 3).chunk(data)[number]
    model.step(x, x.sin(), F.mse_loss)
    gradients = [parameter.grad for parameter in model.parameters()]
    before = gradients[1].clone()
    gradients[0].zero_()
    assert gradients[1].equal(before)
    return gradients[1:], [gradient.data_ptr() % 16 for gradient in gradients]


def test_gradients_of_any_size_are_aligned_and_apart():
    ((expected, _),) = run(1, odd_sizes, 1)
    for gradients, places in run(2, odd_sizes, 2):
        torch.testing.assert_close(gradients, expected)
        assert places == [0] * 4
