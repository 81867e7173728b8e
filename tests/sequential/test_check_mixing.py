"""Models that mix the samples of a mini-batch, which micro-batches would not do, are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import Call
from tests.sequential.test_record import Model
from torchgpipe import Arguments, NoChunk
from torchgpipe.sequential import ConversionError, from_stages, to_sequential
from torchgpipe.sequential.check import coarsest_tolerance, compare_parts, differences


class Towers(nn.Module):
    """A contrastive model, as people write it."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)

    def forward(self, image, text):
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return {'image': image, 'text': text, 'logits_per_image': image @ text.t()}


def test_logits_of_each_sample_for_each_other_one():
    """In v0.8.0, such a model was converted, and a pipeline of it gave other logits."""
    with pytest.raises(
        ConversionError,
        match=r'samples of a mini-batch are mixed.*: '
        r"output\['logits_per_image'\] of shapes \(4, 4\), \(4, 4\), in place of "
        r'parts of \(8, 8\)\. .*batch_dim=1.*NoChunk.*contrastive loss',
    ):
        to_sequential(Towers(), Arguments(torch.rand(8, 6), torch.rand(8, 7)))
    layers = to_sequential(
        Towers(), Arguments(torch.rand(8, 6), torch.rand(8, 7)), check_sample=False
    )
    assert len(layers) == 2


class Steps(nn.Module):
    """A model with time steps before the batch dimension."""

    def __init__(self, causal=False, backwards=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 8) for _ in range(2))
        self.causal, self.backwards = causal, backwards

    def forward(self, x):
        mask = None
        if self.causal:
            mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
            mask = mask.t() if self.backwards else mask
        x = self.a(x)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.b(x)


def test_steps_in_time_that_are_taken_for_samples():
    """In v0.8.0, they were cut. One half is right where steps see the others on one side only."""
    for causal, backwards in [(False, False), (True, False), (True, True)]:
        model, x = Steps(causal, backwards), torch.rand(8, 5, 6)
        with pytest.raises(ConversionError, match=r'batch_dim=0.*: output by .*batch_dim=1'):
            to_sequential(model, x)
        if not causal:
            with pytest.raises(ConversionError, match='samples of a mini-batch are mixed'):
                from_stages(model, [model.a, *model.layers, model.b], x)
        assert len(to_sequential(model, x, batch_dim=1)) == 4, (causal, backwards)


def test_values_that_are_equal_for_all_samples():
    model = Model(lambda m, x, y: x * y.mean(0))
    x, y = torch.rand(4, 6), torch.rand(4, 6)
    with pytest.raises(ConversionError, match='samples of a mini-batch are mixed'):
        to_sequential(model, Arguments(x, y))
    assert len(to_sequential(model, Arguments(x, NoChunk(y)))) == 2


def test_arguments_with_the_batch_in_other_dimensions():
    model = Model(lambda m, x, y: x * y.t())
    sample = Arguments(torch.rand(7, 6), torch.rand(6, 7))
    assert len(to_sequential(model, sample, batch_dim=[0, 1])) == 2


def test_samples_that_see_each_other():
    for function in [
        lambda m, x: x / len(x),
        lambda m, x: x - x.mean(0),
        lambda m, x: x.cumsum(0),
        lambda m, x: x.flip(0).cumsum(0).flip(0),
        lambda m, x: x.roll(1, 0),
    ]:
        for size in [2, 5, 8]:
            with pytest.raises(ConversionError, match='samples of a mini-batch are mixed'):
                to_sequential(Model(function), torch.rand(size, 6))


class Several(nn.Module):
    """Outputs of each kind, of which one may be mixed."""

    def __init__(self, mixes):
        super().__init__()
        self.a, self.mixes = nn.Linear(6, 6), mixes

    def forward(self, x):
        x = self.a(x)
        if self.mixes:
            x = x - x.mean(0)
        return {
            'out': x,
            'loss': x.square().mean(),
            'norms': x.square().sum(0),
            'n': 3,
            'best': (x.argmax(1), x > 0),
            'time first': x[None].flip(0).transpose(0, 1),
        }


def test_outputs_without_a_batch_dimension():
    """They follow the rules of a ``GPipe``."""
    assert len(to_sequential(Several(False), torch.rand(7, 6))) == 1
    with pytest.raises(
        ConversionError,
        match=r"output\['out'\] by [^,]*, "
        r"output\['time first'\] by [^,]*\. If the batch",
    ):
        to_sequential(Several(True), torch.rand(7, 6))


def test_plain_values_that_go_by_the_samples():
    """In v0.8.2, a pipeline returned the value of one micro-batch."""
    for plain in [
        lambda x: x.shape[0],
        lambda x: x.shape[0] * x.shape[1],
        lambda x: x.shape,
        lambda x: x.size(0) > 3,
        lambda x: {'n': (None, len(x) / 2)},
        lambda x: x.sum().item(),
    ]:

        class Counts(Model):
            def forward(self, x):
                return super().forward(x), plain(x)

        model = Counts(lambda m, x: x)
        with pytest.raises(
            ConversionError,
            match=r'(?s)plain value .*: output\[1\].* is .* for the '
            'sample and .*, .* for halves. Compute it',
        ):
            to_sequential(model, torch.rand(6, 6))
        with pytest.raises(ConversionError, match='plain value'):
            from_stages(model, [model.a, lambda m, x: (m.b(x), plain(x))], torch.rand(6, 6))


def test_plain_values_that_are_the_same_for_halves():
    class Counts(Model):
        def forward(self, x):
            return super().forward(x), x.shape[1], None, float('nan'), x.shape[1:], x.dtype

    assert len(to_sequential(Counts(lambda m, x: x), torch.rand(6, 6))) == 2


def test_one_sample_alone_is_mixed_with_none():
    assert len(to_sequential(Model(lambda m, x: x - x.mean(0)), torch.rand(1, 6))) == 2


def test_normalizations_mix_samples_in_training_by_design():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    for size in (2, 8):
        assert len(to_sequential(model, torch.rand(size, 6))) == 2


def test_random_numbers_in_evaluation_are_no_mixing():
    for function in (lambda m, x: x + torch.randn_like(x), lambda m, x: F.dropout(x)):
        assert len(to_sequential(Model(function), torch.rand(8, 6))) == 2


def test_samples_that_are_put_in_a_list():
    with pytest.raises(ConversionError, match='micro-batches'):
        to_sequential(nn.Sequential(Call(lambda x: [*x])), torch.rand(4, 6), leaves=['0'])


class Net(nn.Module):
    """Convolutions, normalizations and attention, as in models of images."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8)
        self.depth, self.group = nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recur, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        x = self.group(self.depth(F.gelu(self.norm(self.stem(x)))))
        x = x.flatten(2).transpose(1, 2)
        x = self.recur(x + self.attend(x, x, x)[0])[0]
        return self.head(x.amax(1)), F.softmax(x, -1)


def test_rounding_is_no_mixing():
    for dtype in [torch.float, torch.double, torch.bfloat16]:
        for size in [2, 5, 16]:
            torch.manual_seed(size)
            x = torch.randn(size, 3, 15, 15, dtype=dtype)
            assert len(to_sequential(Net().to(dtype), x)) == 5
            with torch.autocast('cpu', dtype=torch.bfloat16, enabled=dtype is torch.float):
                assert len(to_sequential(Net().to(dtype), x)) == 5


def test_rounding_follows_the_least_precise_value():
    x = torch.ones(3)
    single, half = torch.finfo(x.dtype).eps ** (2 / 3), torch.finfo(torch.half).eps ** (2 / 3)
    assert coarsest_tolerance([x, x.double(), x.int()]) == pytest.approx(single)
    assert coarsest_tolerance([x, x.to('meta')]) == pytest.approx(half)  # as on an accelerator
    with torch.autocast('cpu', dtype=torch.half):
        assert coarsest_tolerance([x]) == pytest.approx(half)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('high')
    try:
        assert coarsest_tolerance([x]) == pytest.approx(half)
        assert coarsest_tolerance([x.double()]) < single
    finally:
        torch.set_float32_matmul_precision(precision)
    assert coarsest_tolerance([]) == 0


def test_halves_that_are_no_parts():
    whole, half = torch.arange(12.0).view(4, 3), torch.arange(6.0).view(2, 3)
    assert compare_parts({'x': whole}, [{'x': half}, {'x': half + 6}], [2, 2], 0) == ([], {})
    for parts in ([half[0], half], [half, half[:1]], [half, half[:, :2]], [half, half[None]]):
        (found,), _ = compare_parts({'x': whole}, [{'x': part} for part in parts], [2, 2], 0)
        assert 'in place of parts of (4, 3)' in found
    assert compare_parts({'x': whole}, [{'x': half}, {}], [2, 2], 0) == (
        ['x, which is not there for each'],
        {},
    )
    assert differences({'x': whole}, {'x': whole + 11}, 1.0) == []
    assert differences({'x': whole}, {'x': whole + 11}, 0.9) == ['x by 1.0e+00']


class Deep(nn.Module):
    """Many normalized layers, in which rounding grows."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(20))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(20))

    def forward(self, x):
        for linear, norm in zip(self.linears, self.norms):
            x = norm(torch.tanh(3 * linear(x)))
        return x


def test_rounding_that_grows_in_a_deep_model_is_no_mixture():
    """Halves get other kernels than the whole."""
    for seed in range(3):
        torch.manual_seed(seed)
        to_sequential(Deep(), torch.randn(4, 64))


# --- losses
# -------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A model that returns one number computed from the outputs of all samples."""

    def __init__(self, function):
        super().__init__()
        self.a, self.function = nn.Linear(6, 6), function

    def forward(self, x, *args):
        return self.function(self.a(x), *args)


def contrastive(x, *_):
    x = F.normalize(x, dim=-1)
    return F.cross_entropy(x @ x.roll(1, 1).t() / 0.07, torch.arange(len(x), device=x.device))


def both_ways(x, *_):
    logits = x @ x.sin().t()
    places = torch.arange(len(x))
    return {'loss': (F.cross_entropy(logits, places) + F.cross_entropy(logits.t(), places)) / 2}


def sum_of_contrasts(x, *_):
    return F.cross_entropy(x @ x.sin().t(), torch.arange(len(x)), reduction='sum')


def repelled(x, *_):
    """Return the loss of SimCLR, for pairs of neighbours."""
    similar = F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).t()
    similar = similar.masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.arange(len(x)).roll(1))


def of_all_pairs(x, *_):
    return torch.pdist(x).exp().neg().sum() * 1e-3


def test_a_loss_that_compares_samples():
    """In v0.8.2, such a model was converted without a word, if it gave nothing but the loss."""
    for size in [3, 5, 8]:
        for loss in [contrastive, both_ways, sum_of_contrasts, repelled, of_all_pairs]:
            torch.manual_seed(0)
            with pytest.raises(
                ConversionError,
                match=r'samples of a mini-batch are mixed.*: output[^ ]*, '
                r'[^ ]+ for the sample and [^ ]+, [^ ]+ for halves',
            ):
                to_sequential(Loss(loss), torch.randn(size, 6))


def test_a_loss_that_is_a_mean_or_a_sum():
    for dtype in [torch.float, torch.double, torch.bfloat16]:
        for size in [2, 5, 8]:
            for loss in [
                lambda x: x.square().mean(),
                lambda x: x.square().sum(),
                lambda x: x.mean(1).sum(0, True),
                lambda x: {'out': x, 'loss': F.cross_entropy(x, x.argmin(1))},
                lambda x: (x.square().mean(), x.square().sum(), torch.ones(())),
                lambda x: x.square().mean() - x.square().mean().item(),
            ]:
                torch.manual_seed(0)
                assert (
                    len(to_sequential(Loss(loss).to(dtype), torch.randn(size, 6, dtype=dtype)))
                    == 1
                )


def of_tokens(x, labels):
    return F.cross_entropy(x, labels, ignore_index=0)


def of_two_kinds(x, labels):
    """Return a sum of two means with different weights. It need not be between the sums of
    halves."""
    weight = torch.linspace(0.1, 1, 6, dtype=x.dtype)
    return F.cross_entropy(x, labels, ignore_index=0) + F.cross_entropy(x, 5 - labels, weight)


def with_decay(x, labels):
    return F.cross_entropy(x, labels, reduction='sum') + 3


def test_a_loss_that_is_a_mean_by_other_weights_is_warned_of():
    """As no rule of a pipeline gives it."""
    for loss in [
        of_tokens,
        of_two_kinds,
        with_decay,
        lambda x, labels: of_tokens(x, labels).exp(),
        lambda x, labels: (x - labels[:, None]).square().mean().sqrt(),
    ]:
        for seed in range(5):
            torch.manual_seed(seed)
            sample = Arguments(torch.randn(8, 6), torch.tensor([3, 0, 0, 0, 1, 2, 5, 4]))
            with pytest.warns(
                UserWarning, match="^output is .* for the sample .*gather={'loss'"
            ) as found:
                assert len(to_sequential(Loss(loss), sample)) == 1
            assert found[0].filename == __file__, (loss, seed)


def test_a_loss_that_may_be_a_weighted_mean_gets_a_warning():
    """A repeated sample is neither farther away nor another variance."""
    for loss in [
        lambda x: x.var(0, unbiased=False).sum(),
        lambda x: torch.cdist(x, x).amax(1).mean(),
    ]:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match='A loss that compares samples'):
            to_sequential(Loss(loss), torch.randn(8, 6))


def test_a_loss_without_any_token_in_one_half():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match='nan for halves'):
        to_sequential(Loss(of_tokens), Arguments(torch.randn(4, 6), torch.tensor([3, 1, 0, 0])))


def test_a_loss_of_no_more_samples_than_it_knows():
    """A half is repeated three times over, which is more than the sample."""

    def known(x, labels):
        assert len(x) <= 4
        return contrastive(x)

    with pytest.warns(UserWarning, match='A loss that compares samples'):
        to_sequential(Loss(known), Arguments(torch.randn(4, 6), torch.arange(4)))


def test_numbers_of_halves():
    def unsure(whole, halves, sizes):
        found, unsure = compare_parts(whole, halves, sizes, 1e-6)
        assert len(found) == halves.count({})
        return unsure

    one = {'x': torch.tensor(1.0)}
    assert unsure(one, [one, one], [2, 1]) == {}
    three, seven = {'x': torch.tensor(3.0)}, {'x': torch.tensor(7.0)}
    assert unsure(three, [one, seven], [2, 1]) == {}  # weighted
    assert unsure(three, [one, seven], [1, 1]) == {'x': '3 for the sample and 1, 7 for halves'}
    assert unsure(three, [one, {}], [1, 1]) == {}
    assert unsure({'x': torch.tensor(3)}, [{'x': torch.tensor(1)}] * 2, [1, 1]) == {}
