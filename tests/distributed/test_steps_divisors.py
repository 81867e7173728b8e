"""Losses that divide by counts: compared with the normalizer, on all ranks, or refused on all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh

MESHES = [{'data': 2}, {'pipe': 2}, {'data': 2, 'pipe': 2}]


def labelled():
    """Return inputs, and two columns of labels with other numbers of ignored ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 6, (8, 2), generator=generator)
    target[[0, 1], 0] = target[[5, 6, 7], 1] = -100
    return x, target


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def counted(target):
    """Count the labels in the first column."""
    return (target[:, 0] != -100).sum()


def mean(output, target):
    return F.cross_entropy(output, target[:, 0])


def two_means(output, target):
    return mean(output, target) + F.cross_entropy(output, target[:, 1])


def unreduced(output, target):
    return F.cross_entropy(output, target[:, 0], reduction='none')


def sum_by_hand(output, target):
    return unreduced(output, target).sum() / counted(target)


def masked_sum(output, target):
    mask = (target[:, 0] != -100).double()
    return torch.sum(unreduced(output, target) * mask) / mask.sum()


def masked_mean(output, target):
    return unreduced(output, target)[target[:, 0] != -100].mean()


def mean_of_elements(output, target):
    """A mean over samples, of means over elements."""
    other = F.one_hot(target[:, 1].clamp(0), 6).double()
    return F.mse_loss(output, other, reduction='none').mean(1).mean()


def weighted_mean(output, target):
    """A mean over samples, of a mean over labels."""
    return mean(output, target) * counted(target) / len(target)


def unreduced_sum(output, target):
    return unreduced(output, target).sum()


def stepped(axes, chunks, loss, normalizer):
    """Take a step, and return its loss, or the type and text of its error and a later loss."""
    mesh = init_mesh(**axes)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')
    x, target = (part.chunk(replicas)[replica] for part in labelled())
    model = DistributedGPipe(layers(), [2, 1] if 'pipe' in axes else [3], mesh=mesh, chunks=chunks)
    try:
        return model.step(x, target, loss, normalizer=normalizer).item()
    except Exception as error:
        assert all(x.grad is None for x in model.parameters())
        return type(error), str(error), model.step(x, x, F.mse_loss).item()


def world_of(axes):
    return axes.get('data', 1) * axes.get('pipe', 1)


def in_turn(function, axes, cases):
    """Call a function for each case, and return the results."""
    return [function(axes, *case) for case in cases]


RIGHT = [
    (mean, counted),
    (sum_by_hand, counted),
    (masked_sum, counted),
    (masked_mean, counted),
    (mean_of_elements, None),
    (mean_of_elements, len),
    (weighted_mean, len),
]


@pytest.mark.parametrize('axes', MESHES)
def test_a_mean_over_the_count_of_the_normalizer_is_right(axes):
    # A mean over no labels is NaN, whatever it is multiplied by.
    cases = [
        (chunks, loss, normalizer)
        for loss, normalizer in RIGHT
        for chunks in ([1] if loss is weighted_mean else [1, 2, 3])
    ]
    expected = [loss(layers()(labelled()[0]), labelled()[1]).item() for _, loss, _ in cases]
    for losses in run(world_of(axes), in_turn, stepped, axes, cases):
        assert losses == pytest.approx(expected, rel=1e-12)


IGNORED = 'normalizer=lambda target: (target != ignore_index).sum()'

REFUSED = [
    (mean, len, 'normalizer=1'),
    (two_means, counted, 'normalizer=1'),
    (two_means, None, IGNORED),
    (sum_by_hand, None, IGNORED),
    (masked_sum, None, IGNORED),
    (masked_mean, None, IGNORED),
    (masked_mean, len, 'normalizer=1'),
    (unreduced_sum, None, 'give normalizer=1'),
    (unreduced_sum, counted, 'give normalizer=1'),
    (unreduced, None, 'reduce it, as by loss.mean()'),
]


@pytest.mark.parametrize('axes', MESHES)
def test_in_v0_22_other_means_were_silent_or_ended_all_ranks(axes):
    """All ranks raise a ValueError, have no gradients, and the model goes on."""
    later = F.mse_loss(layers()(labelled()[0]), labelled()[0]).item()
    cases = [(2, loss, normalizer) for loss, normalizer, _ in REFUSED]
    for results in run(world_of(axes), in_turn, stepped, axes, cases):
        for (error, message, loss), (*case, text) in zip(results, REFUSED, strict=True):
            assert error is ValueError and text in message, case
            assert loss == pytest.approx(later, rel=1e-12), case


def two_sums(axes, chunks):
    """Do as the error says: sums, divided by counts in the whole mini-batch, normalizer=1."""
    mesh = init_mesh(**axes)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')
    x, target = (part.chunk(replicas)[replica] for part in labelled())
    model = DistributedGPipe(layers(), [2, 1] if 'pipe' in axes else [3], mesh=mesh, chunks=chunks)
    counts = (target != -100).sum(0)
    dist.all_reduce(counts, group=mesh['data'].get_group())

    def loss(output, target):
        sums = [F.cross_entropy(output, target[:, k], reduction='sum') for k in range(2)]
        return sums[0] / counts[0] + sums[1] / counts[1]

    return model.step(x, target, loss, normalizer=1).item()


@pytest.mark.parametrize('axes', MESHES)
def test_the_way_out_for_several_means(axes):
    x, target = labelled()
    expected = two_means(layers()(x), target).item()
    for losses in run(world_of(axes), in_turn, two_sums, axes, [(1,), (3,)]):
        assert losses == pytest.approx([expected] * 2, rel=1e-12)


def evaluated(axes, loss):
    mesh = init_mesh(**axes)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')
    x, target = (part.chunk(replicas)[replica] for part in labelled())
    model = DistributedGPipe(layers(), [2, 1] if 'pipe' in axes else [3], mesh=mesh, chunks=2)
    try:
        model.eval().evaluate(x, target, loss)
    except Exception as error:
        return type(error), str(error)


def test_all_ranks_refuse_the_loss_of_an_evaluation():
    for axes in MESHES:
        cases = [(masked_mean,), (unreduced,)]
        for results in run(world_of(axes), in_turn, evaluated, axes, cases):
            assert [error for error, _ in results] == [ValueError] * 2, axes


# --- replicas of other sizes, loops and metrics
# ----------------------------------------------------------------------------------


def loop_over_samples(output, target):
    """A mean over samples of a loss of each."""
    losses = [F.cross_entropy(output[i], target[i, 1].clamp(0)) for i in range(len(target))]
    return sum(losses) / len(target)


def stacked_losses(output, target):
    return torch.stack(
        [
            F.cross_entropy(output[i : i + 1], target[i : i + 1, 1].clamp(0))
            for i in range(len(target))
        ]
    ).mean()


def with_metrics(output, target):
    """A mean over samples, beside means that have no gradient."""
    mean(output.detach(), target)
    with torch.no_grad():
        masked_mean(output, target)
    return F.mse_loss(output, torch.zeros_like(output))


def half_of_a_sum(output, target):
    return F.cross_entropy(output, target[:, 1].clamp(0), reduction='sum') / 2


def equal_counts(output, target):
    """A mean over the same number of labels on each replica, of five and three samples."""
    labels = target[:, 1].clamp(0).clone()
    labels[: len(target) - 3] = -100
    return F.cross_entropy(output, labels)


def of_other_sizes(axes, loss, normalizer, chunks):
    x, target = (part.split([5, 3])[dist.get_rank()] for part in labelled())
    model = DistributedGPipe(layers(), [3], mesh=init_mesh(**axes), chunks=chunks)
    try:
        return model.step(x, target, loss, normalizer=normalizer).item()
    except ValueError:
        return 'refused'


def test_a_mean_over_samples_is_accepted_in_other_forms():
    losses = [loop_over_samples, stacked_losses, with_metrics]
    cases = [(x, normalizer, k) for x in losses for normalizer in (None, len) for k in (1, 2)]
    expected = [case[0](layers()(labelled()[0]), labelled()[1]).item() for case in cases]
    for results in run(2, in_turn, of_other_sizes, {'data': 2}, cases):
        assert results == pytest.approx(expected, rel=1e-12)


def test_in_v0_22_equal_divisors_of_replicas_of_other_sizes_were_silent():
    losses = [half_of_a_sum, equal_counts]
    cases = [(loss, normalizer, 1) for loss in losses for normalizer in (None, len)]
    assert run(2, in_turn, of_other_sizes, {'data': 2}, cases) == [['refused'] * 4] * 2


def test_one_word_and_a_constant_may_stand_between_a_mean_and_its_weight():
    def weighted(output, target):
        return mean(output, target) / len(target) * counted(target)

    model = GPipe(layers(), [2, 1], devices=['cpu', 'cpu'], chunks=2)
    x, target = (part[2:] for part in labelled())
    expected = weighted(layers()(x), target).item()
    assert model.step(x, target, weighted, normalizer=len).item() == pytest.approx(
        expected, rel=1e-12
    )


def other_layers(axes, orders):
    """Make a model whose layers are in another order on each rank."""
    names = orders[dist.get_rank() % 2]
    found = nn.Sequential(*(nn.ParameterDict({name: torch.ones(2)}) for name in names))
    DistributedGPipe(found, [1, 1], mesh=init_mesh(**axes))


@pytest.mark.parametrize('axes', [{'pipe': 2}, {'pipe': 2, 'data': 2}])
def test_in_v0_22_ranks_with_other_orders_of_layers_were_not_compared(axes):
    """As by a conversion of a forward over a set."""
    for result in outcomes(world_of(axes), other_layers, axes, ['ab', 'ba']):
        assert isinstance(result, Failure)
        assert 'have other models' in result.text and 'sorted(…)' in result.text
