"""The loss of a step: exact whatever it is a mean of, or refused."""

import copy
from fractions import Fraction
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import assert_same, gradients
from torchgpipe import GPipe

#: Three micro-batches of 7 samples: of the second one nothing counts.
PADDED = torch.tensor([1, -100, 3, -100, -100, 2, 0])
WEIGHT = torch.tensor([0.3, 1.7, 0.0, 2.5, 0.9], dtype=torch.double)
PROBABILITIES = torch.rand(7, 5, dtype=torch.double, generator=torch.manual_seed(1)).softmax(1)


def models():
    """Return a model of five classes, and the same in a pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    return model, GPipe(copy.deepcopy(model), [1, 2], devices=['cpu:0', 'cpu:1'], chunks=3)


def step(loss_fn, target=PADDED, **options):
    """Take a step; give the loss, and the gradients."""
    _, gpipe = models()
    x = torch.randn(7, 4, dtype=torch.double)
    return [gpipe.step(x, target, loss_fn, **options), *gradients(gpipe)]


def plain(loss_fn, target=PADDED):
    """Do the same with the model itself."""
    model, _ = models()
    x = torch.randn(7, 4, dtype=torch.double)
    loss = loss_fn(model(x), target)
    loss.backward()
    return [loss.detach(), *gradients(model)]


class Wrapper(nn.Module):
    """A loss of classes within another module."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, output, target):
        return 2 * self.loss(output, target)


class Shifted(nn.CrossEntropyLoss):
    """A loss that is called like one of PyTorch's, and does something else."""

    def forward(self, output, target):
        return super().forward(output[1:], target[1:])


class Focal(nn.CrossEntropyLoss):
    """A mean over samples, of the losses that the class that it comes from gives."""

    def __init__(self):
        super().__init__(reduction='none')

    def forward(self, output, target):
        return super().forward(output, target).square().mean()


class Scaled(nn.Module):
    """A mean over samples, with a parameter that is called as class weights are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.double))

    def forward(self, output, target):
        return (output * self.weight).square().mean()


def of_logarithms(output, target, **options):
    """Return the loss of logarithms of probabilities."""
    return F.nll_loss(output.log_softmax(1), target, **options)


# --- means over counted elements
# ----------------------------------------------------------------------------------------


def test_counts_of_pytorch_losses_of_classes():
    """In v0.8.0, functions and partials counted samples; modules were refused."""
    for loss_fn in [
        F.cross_entropy,
        partial(F.cross_entropy, weight=WEIGHT),
        partial(partial(F.cross_entropy, weight=WEIGHT), label_smoothing=0.1),
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.3).forward,
        partial(nn.CrossEntropyLoss(WEIGHT)),
    ]:
        for target in [PADDED, PADDED.clamp(0), PROBABILITIES]:
            assert_same(step(loss_fn, target), plain(loss_fn, target))


def test_class_numbers():
    """In v0.8.0, functions and partials counted samples. Class numbers in bytes are no mask."""
    for dtype, loss_fn in [
        (torch.long, partial(F.cross_entropy, ignore_index=3, label_smoothing=0.2)),
        (torch.long, F.nll_loss),
        (torch.uint8, partial(F.nll_loss, weight=WEIGHT, ignore_index=0)),
        (torch.uint8, nn.NLLLoss(WEIGHT, ignore_index=3)),
    ]:
        target = torch.tensor([1, 0, 3, 3, 4, 2, 0], dtype=dtype)
        assert_same(step(loss_fn, target), plain(loss_fn, target))


def test_a_loss_that_calls_one_of_classes():
    """In v0.8.0, a function was taken at its word: gradients were wrong, up to NaN."""
    for loss_fn in [
        lambda output, target: F.cross_entropy(output, target),
        lambda output, target: F.cross_entropy(output, target.clamp(0), WEIGHT) + 1,
        lambda output, target: F.cross_entropy(output[target >= 0], target[target >= 0]),
        of_logarithms,
        partial(of_logarithms, weight=WEIGHT),
        Wrapper(nn.CrossEntropyLoss()),
    ]:
        target = torch.tensor([1, -100, 3, -100, 4, 2, 0])
        with pytest.raises(
            ValueError, match="a loss of PyTorch's in loss_fn divides by what it co"
        ):
            step(loss_fn, target)
        _, gpipe = models()
        with pytest.raises(ValueError, match='normalizer=lambda target'):
            gpipe.step(torch.randn(7, 4).double(), target, loss_fn)
        assert gradients(gpipe) == [None] * 4


def test_a_loss_that_calls_one_of_classes_where_all_count_the_same():
    """It may be called with padding, if there is as much in each sample."""
    for loss_fn in [
        lambda output, target: F.cross_entropy(output, target),
        lambda output, target: F.cross_entropy(output, target, torch.ones(5).double()),
        lambda output, target: (
            F.cross_entropy(output, target.clamp(0)) + F.mse_loss(output, torch.zeros_like(output))
        ),
        lambda output, target: (
            F.cross_entropy(output, target.clamp(0), WEIGHT, reduction='sum') / len(target)
        ),
        lambda output, target: F.cross_entropy(output, output.detach().square(), WEIGHT),
        Wrapper(nn.CrossEntropyLoss()),
    ]:
        _, gpipe = models()
        x, target = torch.randn(7, 4, dtype=torch.double), PADDED.clamp(0)
        found = gpipe.step(x, target, loss_fn)
        by_hand = sum(loss_fn(gpipe(x)[k : k + 1], target[k : k + 1]) / 7 for k in range(7))
        assert_same([found], [by_hand.detach()])


def test_padding_of_the_same_length():
    def loss_fn(output, target):
        return F.cross_entropy(output.reshape(-1, 5), target.reshape(-1))

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5)).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=3)
    x = torch.randn(7, 3, 4, dtype=torch.double)
    target = torch.randint(5, (7, 3))
    target[:, -1] = -100
    loss = loss_fn(model(x), target)
    loss.backward()
    assert_same(
        [gpipe.step(x, target, loss_fn), *gradients(gpipe)], [loss.detach(), *gradients(model)]
    )


def test_a_normalizer_is_taken_at_its_word():
    def loss_fn(output, target):
        return F.cross_entropy(output, target, ignore_index=3) * (target != 3).sum() / len(target)

    target = torch.tensor([1, 3, 3, 4, 4, 2, 0])
    assert_same(step(loss_fn, target, normalizer=len), plain(loss_fn, target))
    assert_same(
        step(
            lambda *given: F.cross_entropy(*given),
            PADDED,
            normalizer=lambda target: (target >= 0).sum(),
        ),
        plain(F.cross_entropy),
    )


@pytest.mark.filterwarnings('ignore:The .grad attribute of a Tensor that is not a leaf')
def test_a_compiled_loss_is_not_looked_into():
    """On one device: in other threads, PyTorch 2.11 ends a process of pytest as it compiles."""
    loss_fn = torch.compile(
        lambda output, target: F.cross_entropy(output, target) + 1, backend='eager', fullgraph=True
    )
    model, gpipe = models()
    x, target = torch.randn(7, 4, dtype=torch.double), PADDED.clamp(0)
    gpipe = GPipe(nn.Sequential(*gpipe), [1, 2], devices=['cpu', 'cpu'], chunks=3)
    loss = loss_fn(model(x), target)
    loss.backward()
    assert_same(
        [gpipe.step(x, target, loss_fn), *gradients(gpipe)], [loss.detach(), *gradients(model)]
    )


def test_functions_with_the_names_of_pytorch_losses():
    """In v0.8.0, functions were not looked at, nor targets but tensors."""
    for loss_fn, target, name in [
        (Shifted(), PADDED, 'Shifted'),
        (Shifted(WEIGHT), PADDED.clamp(0), 'Shifted'),
        (Shifted(), {'labels': PADDED, 'rate': PROBABILITIES}, 'Shifted'),
    ]:
        with pytest.raises(ValueError, match=f'^{name} divides by what it counts in a target'):
            step(loss_fn, target)


def test_other_means_are_over_samples():
    """In v0.8.0, all that had a weight was taken for a loss of classes, and refused."""
    for loss_fn, target in [
        (Focal(), PADDED),
        (Scaled(), PADDED),
        (nn.BCEWithLogitsLoss(WEIGHT), PROBABILITIES),
        (partial(F.binary_cross_entropy_with_logits, weight=WEIGHT), PROBABILITIES),
        (nn.MSELoss(), PROBABILITIES),
        (partial(F.kl_div, reduction='batchmean'), PROBABILITIES),
    ]:
        assert_same(step(loss_fn, target), plain(loss_fn, target))


def test_sums():
    """In v0.8.0, sums of functions were averaged, and counts of targets divided them wrongly."""
    for loss_fn in [
        partial(F.cross_entropy, reduction='sum'),
        partial(F.mse_loss, reduction='sum'),
        nn.MSELoss(reduction='sum'),
        nn.MSELoss(reduction='sum').forward,
        partial(partial(F.mse_loss), reduction='sum'),
        partial(nn.MSELoss(reduction='sum')),
    ]:
        for normalizer in [None, len]:
            target = PADDED.clamp(0) if 'cross' in str(loss_fn) else PROBABILITIES
            with pytest.raises(
                ValueError, match='the loss adds up samples .*; give normalizer=1, or'
            ):
                step(loss_fn, target, normalizer=normalizer)
            assert_same(step(loss_fn, target, normalizer=1), plain(loss_fn, target))


@pytest.mark.filterwarnings('ignore:size_average and reduce args will be deprecated')
def test_sums_by_their_old_names():
    """In v0.8.0, they were averaged."""
    for options in ({'size_average': False}, {'size_average': False, 'reduce': True}):
        with pytest.raises(ValueError, match='the loss adds up samples'):
            step(partial(F.mse_loss, **options), PROBABILITIES)
    with pytest.raises(ValueError, match='the loss is one of each sample'):
        step(partial(F.mse_loss, reduce=False), PROBABILITIES)
    assert_same(
        step(partial(F.mse_loss, reduction='sum', size_average=True), PROBABILITIES),
        plain(F.mse_loss, PROBABILITIES),
    )


def test_losses_of_samples():
    """In v0.8.0, micro-batches of one sample passed for scalars."""
    for loss_fn in [
        partial(F.cross_entropy, reduction='none'),
        nn.CrossEntropyLoss(reduction='none'),
    ]:
        for options in [{}, {'normalizer': 1}, {'normalizer': len}]:
            _, gpipe = models()
            gpipe.chunks = 7
            with pytest.raises(
                ValueError, match="each sample .reduction='none'., and a step takes a sca"
            ):
                gpipe.step(torch.randn(7, 4).double(), PADDED, loss_fn, **options)


def test_settings_of_something_else():
    """A name that old losses have, too; and a method of a module that is no loss itself."""

    class Trainer(nn.Module):
        reduction = 'sum'

        def loss(self, output, target, reduce=True):
            return output.square().mean()

    trainer = Trainer()
    assert_same(step(trainer.loss), plain(trainer.loss))


def test_parameters_of_a_loss_within_a_partial():
    """In v0.8.0, they were none of the step's: a hook saw the gradient of each micro-batch."""
    loss_fn = Scaled()
    calls = []
    loss_fn.weight.register_post_accumulate_grad_hook(calls.append)
    found = step(partial(loss_fn))
    assert len(calls) == 1
    expected = copy.deepcopy(loss_fn)
    expected.weight.grad = None
    assert_same(found, plain(expected))
    assert_same([loss_fn.weight.grad], [expected.weight.grad])


# --- numbers
# ----------------------------------------------------------------------------------------

SUM = partial(F.mse_loss, reduction='sum')
NUMBERS = [
    7,
    numpy.float32(7),
    numpy.int64(7),
    Fraction(7),
    torch.tensor(7),
    torch.tensor([7.0], dtype=torch.bfloat16),
]


def test_numbers_are_exact():
    """In v0.8.0, tensors of integers divided in float32: 2e-8 off in float64."""
    for number in NUMBERS:
        found = step(SUM, PROBABILITIES, normalizer=number)
        expected = plain(lambda *given: SUM(*given) / 7, PROBABILITIES)
        for x, y in zip(found, expected):
            assert torch.allclose(x, y, rtol=1e-14, atol=1e-16) and x.dtype == torch.double


def test_counts_are_exact():
    """In v0.8.0, they were divided in float32."""
    expected = plain(F.cross_entropy)
    for count in (
        lambda target: (target != -100).sum(),
        lambda target: int((target != -100).sum()),
        lambda target: (target != -100).sum(dtype=torch.float)[None],
        lambda target: numpy.int32((target != -100).sum()),
    ):
        found = step(F.cross_entropy, normalizer=count)
        for x, y in zip(found, expected):
            assert torch.allclose(x, y, rtol=1e-14, atol=1e-16)


def test_counts_leave_the_type_of_the_loss():
    """In v0.8.0, counts in float64 made it one."""
    model = nn.Sequential(nn.Linear(4, 5))
    loss = GPipe(model, [1], devices=['cpu'], chunks=3).step(
        torch.randn(7, 4),
        PADDED,
        F.cross_entropy,
        normalizer=lambda target: (target != -100).sum(dtype=torch.double),
    )
    assert loss.dtype == torch.float


BAD = [
    float('inf'),
    float('nan'),
    -1,
    True,
    1j,
    'all',
    torch.tensor(True),
    torch.ones(2),
    torch.tensor(7.0, requires_grad=True),
    numpy.bool_(True),
]


def test_a_number_that_divides_nothing():
    """In v0.8.0, 0 was a ZeroDivisionError, and infinity gave no gradients."""
    for number in [*BAD, 0, torch.tensor(0)]:
        with pytest.raises(
            ValueError, match='normalizer must be a function, or a finite number abo'
        ):
            step(SUM, PROBABILITIES, normalizer=number)


def test_a_count_that_counts_nothing():
    """In v0.8.0, negative ones and NaN went into gradients."""
    for number in [*BAD, None]:
        with pytest.raises(
            ValueError, match='normalizer must count how much of the target of a mic'
        ):
            step(F.cross_entropy, normalizer=lambda target: number if target[0] < 0 else 2)


def test_no_class_counts():
    with pytest.raises(ValueError, match='the loss by itself, counts nothing in the whole target'):
        step(F.cross_entropy, torch.full((7,), -100))


# --- values that are no loss
# ----------------------------------------------------------------------------------------


def test_a_complex_loss():
    """In v0.8.0, it was taken, and the plain call refuses it."""
    with pytest.raises(ValueError, match='real numbers, but gave a tensor of torch.complex128 of'):
        step(lambda output, target: output.sum() * 1j)


def test_a_scale_that_gives_no_loss():
    """In v0.8.0, a number was an AttributeError."""
    for scale, error, what in [
        (
            lambda loss: loss.item(),
            ValueError,
            'scale must give a scalar tensor .* but gave float',
        ),
        (lambda loss: loss[None].expand(2), ValueError, r'scale must give .* of shape \(2,\)'),
        (lambda loss: loss.detach() * 2, RuntimeError, 'scale has detached the loss'),
    ]:
        with pytest.raises(error, match=what) as raised:
            step(F.cross_entropy, PADDED, scale=scale)
        assert 'in the loss of micro-batch' in raised.value.__notes__[0]


def test_in_v080_a_micro_batch_with_nothing_to_learn_from_was_refused():
    """As one without any object, for a detector."""

    def loss_fn(output, target):
        return output.square().mean() if target.any() else torch.zeros((), dtype=torch.double)

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x, y = torch.randn(6, 4, dtype=torch.double), torch.zeros(6, 4)
    y[:2] = 1
    (loss_fn(layers(x[:2]), y[:2]) / 3).backward()
    expected = gradients(layers)
    layers.zero_grad()
    model = GPipe(layers, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=3)
    model.step(x, y, loss_fn)
    assert_same(gradients(layers), expected)
    with pytest.raises(RuntimeError, match='the loss does not require grad'):
        model.step(x, y * 0, loss_fn)
