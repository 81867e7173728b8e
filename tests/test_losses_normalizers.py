"""The elements in the mean of a loss: found from its calls, for any loss of PyTorch's."""

import inspect
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import assert_same
from tests.test_losses import PADDED, PROBABILITIES, WEIGHT, models, plain, step
from torchgpipe import GPipe
from torchgpipe.divisors import BY_WEIGHT, defaults_of
from torchgpipe.shard.nn import ParallelCrossEntropyLoss
from torchgpipe.shard.nn.functional import parallel_cross_entropy

#: Of 7 samples, each with 5 values and their weights.
WEIGHTED = torch.stack([PROBABILITIES, PROBABILITIES.flip(0).square()], 1)
LABELS = torch.tensor([1, 0, 3, 3, 4, 2, 0])
SUM = partial(F.mse_loss, reduction='sum')


def of_module(**options):
    """Return a loss with a linear layer in it, the same each time."""
    if not hasattr(nn, 'LinearCrossEntropyLoss'):
        pytest.skip('this PyTorch has none')
    torch.manual_seed(2)
    return nn.LinearCrossEntropyLoss(5, 5, dtype=torch.double, **options)


def same(loss_fn, target, **options):
    """Compare a step with the model itself."""
    assert_same(step(loss_fn, target, **options), plain(loss_fn, target))


# --- losses of classes
# ----------------------------------------------------------------------------------------


def test_a_linear_loss_of_classes():
    """It averaged samples, and was NaN where all labels of a micro-batch are ignored."""
    for options in [{}, {'weight': WEIGHT}, {'ignore_index': 3}, {'weight': WEIGHT, 'bias': True}]:
        for target in [PADDED, LABELS, PROBABILITIES]:
            for around in [lambda loss: loss, partial]:
                if 'ignore_index' in options and target is not LABELS:
                    target = LABELS.flip(0)
                loss_fn = of_module(**options)
                found = step(around(loss_fn), target)
                gradient = loss_fn.linear.weight.grad
                loss_fn.zero_grad()
                assert_same(
                    [*found, gradient], [*plain(loss_fn, target), loss_fn.linear.weight.grad]
                )


def test_a_linear_loss_of_classes_within_a_function():
    """It was averaged over samples."""
    loss_fn = of_module()
    with pytest.raises(ValueError, match="a loss of PyTorch's in loss_fn divides by what it co"):
        step(lambda *given: loss_fn(*given), PADDED)
    same(lambda *given: loss_fn(*given), LABELS)
    same(lambda *given: loss_fn(*given), PADDED, normalizer=lambda target: (target >= 0).sum())


def test_a_linear_loss_that_adds_up():
    with pytest.raises(ValueError, match='the loss adds up samples'):
        step(of_module(reduction='sum'), LABELS)
    with pytest.raises(ValueError, match='the loss adds up samples'):
        step(lambda *given: of_module(reduction='sum')(*given), LABELS)


def test_a_micro_batch_without_a_call():
    """It was not compared with the others: none was."""

    def guarded(output, target):
        return F.cross_entropy(output, target) if (target >= 0).any() else output.sum() * 0

    with pytest.raises(ValueError, match="a loss of PyTorch's in loss_fn divides by what it co"):
        step(guarded, PADDED)
    same(guarded, LABELS)


# --- sums
# ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings('ignore:size_average and reduce args will be deprecated')
def test_a_function_that_returns_a_sum():
    """It was averaged."""
    for loss_fn in [
        SUM,
        F.l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.kl_div,
        F.soft_margin_loss,
    ]:
        for options in ({'reduction': 'sum'}, {'size_average': False}):
            if {*options} <= {*inspect.signature(loss_fn).parameters}:

                def call(output, target, options=options):
                    return loss_fn(output.sigmoid(), target, **options)

                with pytest.raises(
                    ValueError, match='the loss adds up samples .*; give normalizer=1'
                ):
                    step(call, PROBABILITIES)
                same(call, PROBABILITIES, normalizer=1)


def in_place(output, target):
    """Make a mean of a sum."""
    loss = SUM(output, target)
    loss *= 1 / len(target)
    return loss


def divided_in_place(output, target):
    """Make a mean of a sum, by an operator."""
    loss = SUM(output, target)
    loss /= len(target)
    return loss


def with_norm(output, target, weight=torch.ones(3, requires_grad=True), count=6):
    """Add something that is not over samples."""
    norm = F.l1_loss(weight, torch.zeros(3), reduction='sum') / count
    return SUM(output, target) / len(target) + norm + F.mse_loss(weight, weight * 2, weight=weight)


def test_a_sum_within_a_mean_over_samples():
    """A transform of a loss of classes was an error of PyTorch's."""
    for loss_fn in [
        in_place,
        divided_in_place,
        with_norm,
        lambda output, target: SUM(output, target) / output.numel(),
        lambda output, target: 2 * SUM(output, target).div(torch.tensor(len(target))) + 1,
        lambda output, target: SUM(output, target) / target.new_ones(len(target)).sum(),
        lambda output, target: (SUM(output, target) / torch.full((5,), len(target))).mean(),
        lambda output, target: torch.vmap(lambda x, y: SUM(x, y) / x.numel())(
            output, target
        ).mean(),
        lambda output, target: torch.vmap(F.cross_entropy)(output, target.argmax(1)).mean(),
    ]:
        same(loss_fn, PROBABILITIES)


def test_a_sum_divided_by_its_count():
    """It was averaged over samples."""
    for divide in [
        lambda loss, count: loss / count,
        lambda loss, count: 2 * loss.div(count) + 1,
        lambda loss, count: torch.true_divide(loss, count.clamp(1)),
        lambda loss, count: loss / max(int(count), 1),
        lambda loss, count: torch.div(loss, other=count),
        lambda loss, count: loss.div_(count),
        lambda loss, count: loss / 7,
    ]:

        def loss_fn(output, target):
            return divide(F.cross_entropy(output, target, reduction='sum'), (target >= 0).sum())

        with pytest.raises(ValueError, match='loss_fn divides by what it counts in a target'):
            step(loss_fn, PADDED)


def test_a_sum_divided_by_its_count_with_a_normalizer():
    def loss_fn(output, target):
        return SUM(output, target) / target.square().sum()

    with pytest.raises(ValueError, match='loss_fn divides by what it counts in a target'):
        step(loss_fn, PROBABILITIES)
    same(loss_fn, PROBABILITIES, normalizer=lambda target: target.square().sum())


def test_a_count_is_found_however_arguments_are_passed():
    for loss_fn in [
        lambda y, target: F.cross_entropy(input=y, target=target, ignore_index=-100),
        lambda y, target: F.cross_entropy(y, target, None, None, -100),
        lambda y, target: F.cross_entropy(
            target=target, input=y, ignore_index=-100, weight=WEIGHT
        ),
    ]:
        with pytest.raises(ValueError, match="a loss of PyTorch's in loss_fn divides by what"):
            step(loss_fn, PADDED)


def test_sums_are_let_go():
    """A sum that is kept would hold the graph of its micro-batch."""
    seen = []

    def loss_fn(output, target):
        assert not any(each() is not None for each in seen[:-1])
        loss = SUM(output, target)
        seen.append(weakref.ref(loss))
        return loss / len(target)

    _, gpipe = models()
    gpipe.step(torch.randn(7, 4).double(), PROBABILITIES, loss_fn, schedule='1f1b')
    assert len(seen) == 3 and not any(each() is not None for each in seen)


# --- weights of elements
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('loss_fn', BY_WEIGHT)
def test_means_by_weights(loss_fn):
    """They were averaged over samples; of ``l1_loss``, PyTorch lost the weight in a mode."""

    def call(output, target):
        return loss_fn(output, target[:, 0], weight=target[:, 1])

    with pytest.raises(ValueError, match="a loss of PyTorch's in loss_fn divides by what it co"):
        step(call, WEIGHTED)
    same(call, WEIGHTED, normalizer=lambda target: target[:, 1].sum())


def test_weights_that_are_the_same_for_all_samples():
    """Sums of weights are compared as they are, not rounded."""
    for loss_fn in [*BY_WEIGHT, F.huber_loss]:
        for weight in [WEIGHT, WEIGHT.bfloat16()]:
            same(
                lambda output, target: loss_fn(
                    output, target, weight=weight.expand_as(output).double()
                ),
                PROBABILITIES,
            )
            same(
                lambda output, target: (
                    loss_fn(output, target, reduction='sum', weight=(target.square()))
                    / len(target)
                ),
                PROBABILITIES,
            )


def test_other_means_are_not_by_weights():
    same(lambda output, target: F.huber_loss(output, target[:, 0], weight=target[:, 1]), WEIGHTED)
    same(
        lambda output, target: F.binary_cross_entropy_with_logits(
            output, target[:, 0], target[:, 1]
        ),
        WEIGHTED,
    )


def test_which_means_are_by_weights():
    """Those that do not change if all weights are twice as large."""
    for loss_fn in filter(inspect.isfunction, vars(F).values()):
        parameters = defaults_of(loss_fn) or {}
        if 'weight' not in parameters or 'linear_weight' in parameters:
            continue
        x, target = torch.tensor([[0.2, 0.7], [0.4, 0.3]]), torch.ones(2, 2)
        if loss_fn in (F.cross_entropy, F.nll_loss, F.multi_margin_loss):
            target = torch.tensor([0, 1])
        weight = torch.ones_like(x if target.dim() == 2 else x[0])
        is_by_weight = torch.allclose(
            loss_fn(x, target, weight=weight), loss_fn(x, target, weight=2 * weight)
        )
        assert is_by_weight == (loss_fn in BY_WEIGHT or 'ignore_index' in parameters)


def test_the_loss_of_a_split_vocabulary_follows_its_settings():
    """Directly, its labels are counted; within a function, its divisors are watched."""
    target = torch.tensor([0, 1, -100, -100, -100, 1])
    model = GPipe(nn.Sequential(nn.Linear(4, 3)), [1], devices=['cpu'], chunks=2)
    x = torch.randn(6, 4)
    expected = F.cross_entropy(model[0](x), target)

    loss = model.step(x, target, parallel_cross_entropy)
    torch.testing.assert_close(loss, expected.detach())
    module = ParallelCrossEntropyLoss()
    torch.testing.assert_close(model.step(x, target, module), expected.detach())
    with pytest.raises(ValueError, match='divides by what it counts in a target'):
        model.step(x, target, lambda y, labels: parallel_cross_entropy(y, labels))
    loss = model.step(
        x,
        target,
        lambda y, labels: parallel_cross_entropy(y, labels),
        normalizer=lambda labels: (labels != -100).sum(),
    )
    torch.testing.assert_close(loss, expected.detach())
