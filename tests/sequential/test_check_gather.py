"""Results of ``gather`` over micro-batches, compared with the model by a conversion."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential.test_check_mixing import Loss, Several, contrastive, of_tokens, of_two_kinds
from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import ConversionError, from_stages, to_sequential


def count(x, labels):
    return (labels != 0).sum()


def tokens():
    torch.manual_seed(0)
    return Arguments(torch.randn(8, 6), torch.tensor([3, 0, 0, 0, 1, 2, 5, 4]))


def with_output(x, labels):
    return {'out': x, 'loss': of_tokens(x, labels)}


def test_a_rule_that_is_right_gives_no_warning():
    for loss, gather in [
        (of_tokens, count),
        (with_output, count),
        (with_output, {'loss': count}),
        (with_output, {'loss': 'stack'}),
        (of_tokens, 'stack'),
        (lambda x, labels: (x.square().mean(), of_tokens(x, labels)), ['mean', count]),
    ]:
        sample = tokens()
        layers = to_sequential(Loss(loss), sample, gather=gather)
        GPipe(layers, [1], devices=['cpu'], chunks=3, gather=gather)(*sample.args)


def test_a_rule_without_any_token_in_one_half():
    """The mean of nothing is not looked at."""
    sample = Arguments(torch.randn(4, 6), torch.tensor([3, 1, 0, 0]))
    assert len(to_sequential(Loss(of_tokens), sample, gather=count)) == 1


def test_a_rule_that_is_wrong_is_named():
    for loss, gather in [
        (of_tokens, 'mean'),
        (of_tokens, 'sum'),
        (of_tokens, lambda x, labels: (labels != 3).sum()),
        (lambda x, labels: x.square().mean(), 'sum'),
        (lambda x, labels: x.square().sum(), 'mean'),
        (lambda x, labels: x.square().mean(), count),
        (of_two_kinds, count),
        (contrastive, 'mean'),
    ]:
        for key in [None, 'loss']:
            model = Loss(lambda x, labels: {'loss': loss(x, labels)} if key else loss(x, labels))
            name = r"output\['loss'\]" if key else 'output'
            with pytest.raises(
                ConversionError,
                match=f"^gather gives other numbers .*: {name} by [^,]*[.] Use 'mean'",
            ):
                to_sequential(model, tokens(), gather={'loss': gather} if key else gather)
            with pytest.raises(ConversionError, match='^gather gives'):
                from_stages(
                    model,
                    [lambda m, x, labels: (m.a(x), labels), lambda m, given: m.function(*given)],
                    tokens(),
                    gather={'loss': gather} if key else gather,
                )
            to_sequential(model, tokens(), gather=gather, check_sample=False)


def test_outputs_without_a_rule_get_a_warning():
    model = Loss(lambda x, labels: {'loss': of_tokens(x, labels), 'other': of_tokens(x, labels)})
    with pytest.warns(
        UserWarning,
        match=r"^output\['other'\] is [^,]*, [^,]* for halves\. .*"
        r'to_sequential\(…, gather=…\) as well',
    ):
        to_sequential(model, tokens(), gather={'loss': count})


def test_rules_for_other_tensors_than_scalars():
    """A word alone is for scalars."""
    x = torch.rand(7, 6)
    assert len(to_sequential(Several(False), x, gather='mean')) == 1
    assert (
        len(
            to_sequential(
                Several(False),
                x,
                gather={'norms': 'sum', 'loss': None, 'out': 0, 'best': {1: None}, 'n': 'sum'},
            )
        )
        == 1
    )
    with pytest.raises(ConversionError, match=r"^gather gives .*: output\['norms'\] by [^,]*\. "):
        to_sequential(Several(False), x, gather={'norms': 'mean'})
    with pytest.raises(ConversionError, match='samples of a mini-batch are mixed'):
        to_sequential(Several(True), x, gather={'norms': 'sum', 'loss': 'mean'})


def test_a_loss_that_one_half_does_not_give():
    def loss(x, labels):
        return {'loss': x.square().mean()} if len(x) > 4 else {}

    with pytest.raises(ConversionError, match=r"mixed.*: output\['loss'\], which is not there"):
        from_stages(
            Loss(loss),
            [lambda m, x, y: (m.a(x), y), lambda m, given: loss(*given)],
            tokens(),
            gather={'loss': 'mean'},
        )


def test_rounding_and_random_numbers_are_no_wrong_rule():
    torch.manual_seed(0)
    for loss in (lambda x: x.square().mean() + 1e6 - 1e6, lambda x: F.dropout(x).square().mean()):
        assert len(to_sequential(Loss(loss), torch.randn(8, 6), gather='mean')) == 1


def test_a_rule_that_is_none_is_refused():
    for convert in [
        to_sequential,
        lambda model, x, gather: from_stages(model, [*model], x, gather=gather),
    ]:
        with pytest.raises(ValueError, match="gather must be .*'average'"):
            convert(nn.Sequential(nn.Linear(6, 6)), torch.rand(2, 6), gather='average')


def of_a_router(x, labels):
    """A loss like a router's: a product of means over tokens."""
    share = x.softmax(-1).mean(0)
    return {'loss': x.square().mean(), 'aux_loss': (share * share.detach()).sum() * 4}


ACCEPTED = {'loss': 'mean', 'aux_loss': 'micro-batch mean'}


def test_a_loss_for_each_micro_batch_is_accepted_by_name():
    sample = tokens()
    with pytest.warns(UserWarning, match="gather={'aux_loss': 'micro-batch mean'}"):
        to_sequential(Loss(of_a_router), sample)
    model = Loss(of_a_router)
    layers = to_sequential(model, sample, gather=ACCEPTED)
    pipeline = GPipe(layers, [1], devices=['cpu'], chunks=3, gather=ACCEPTED)
    output = pipeline(*sample.args)
    parts = [
        model(x, labels) for x, labels in zip(*(part.split([3, 3, 2]) for part in sample.args))
    ]
    expected = sum(part['aux_loss'] * size for part, size in zip(parts, [3, 3, 2])) / 8
    assert output['aux_loss'].item() == pytest.approx(expected.item(), rel=1e-6)
    assert output['aux_loss'].item() != pytest.approx(
        model(*sample.args)['aux_loss'].item(), rel=1e-6
    )
    output['aux_loss'].backward()
    gradient = pipeline.get_parameter('0.a.weight').grad
    (expected,) = torch.autograd.grad(expected, [model.a.weight])
    torch.testing.assert_close(gradient, expected)


def test_other_rules_are_still_compared_beside_it():
    with pytest.raises(ConversionError, match=r"output\['loss'\]"):
        to_sequential(Loss(of_a_router), tokens(), gather={**ACCEPTED, 'loss': 'sum'})
