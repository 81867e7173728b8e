"""Guards as wide as the model: values that its control flow does not use may differ in a call."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential.test_record import Model, check, in_a_pipeline, sample
from torchgpipe.sequential import ConversionError, to_sequential

# --- texts
# -------------------------------------------------------------------------------------------------


def asserted(m, x):
    torch._assert(x.dim() == 2, f'expected (N, 6), got {x.shape}')
    return x


def asserted_in_lines(m, x):
    torch._assert(
        x.dim() == 2, f'expected (N, 6), got {x.shape}, which is {len(x)} of {x.shape[1]:3d}'
    )
    return x


def warned(m, x):
    warnings.warn('got %s' % (x.shape,))
    return x


def looked_up(m, x):
    return getattr(m, f'scaled_{len(x)}', torch.neg)(x)


def kept(m, x):
    names = []
    names.append(f'scaled_{len(x)}')
    return getattr(m, names[0], torch.neg)(x)


def kept_by_another_name(m, x):
    names = []
    see = names.append
    see(f'scaled_{len(x)}')
    return getattr(m, names[0], torch.neg)(x)


def scale_by(x, number):
    x.mul_(float(number))


def handed_on(m, x):
    x = x.clone()
    scale_by(x, f'{len(x)}')
    return x


def in_a_condition(m, x):
    torch._assert({'4': True, '7': False}[f'{len(x)}'], 'neither')
    return x


def in_the_same_line(m, x):
    if f'{len(x)}' == '4':
        print(end=f'{len(x)}')
    return x


@pytest.mark.filterwarnings('ignore:got')
def test_a_shape_in_a_message_alone_may_be_another():
    """In v0.9.0, it was guarded as a text that a program goes by."""
    for function in [asserted, asserted_in_lines, warned]:
        check(Model(function), sample(), torch.randn(7, 6), torch.randn(1, 6))


def test_a_text_that_a_program_may_go_by_may_not():
    for function in [
        looked_up,
        kept,
        kept_by_another_name,
        handed_on,
        in_a_condition,
        in_the_same_line,
    ]:
        layers = to_sequential(Model(function), sample(), check_sample=False)
        with pytest.raises(ValueError, match='was 4; it is 7 now'):
            layers(torch.randn(7, 6))


def test_an_assertion_of_pytorch_s_is_one():
    def function(m, x):
        torch._assert(x.sum().isfinite(), 'not finite')
        return asserted(m, x)

    layers = to_sequential(Model(function), sample())
    with pytest.raises(ValueError, match=r'dim\(\) == 2 was True; it is False now'):
        layers(torch.randn(4, 3, 6))
    with pytest.raises(AssertionError, match='not finite'):
        layers(sample() / 0)
    assert len(to_sequential(Model(asserted))) == 2


# --- elements of tensors
# -------------------------------------------------------------------------------------------------


def asserted_elements(m, x):
    assert x.isfinite().all()
    assert not x.isnan().any() and x.numel(), 'not a number'
    return x


def asserted_number(m, x):
    assert x.isfinite().sum().item() == x.numel()
    return x


def raised(m, x):
    if not x.isfinite().all():
        raise ValueError('not finite')
    return x


def checked(m, x):
    torch._check(x.isfinite().all().item(), lambda: 'not finite')
    return x


def checked_all(m, x):
    finite = x.isfinite()
    torch._check_tensor_all(finite() if callable(finite) else finite)
    return x


def test_elements_by_which_a_program_raises_only():
    """In v0.10.0, these were refused."""
    for function in [asserted_number, raised, checked, checked_all]:
        layers = check(Model(function), sample(), torch.randn(7, 6), torch.randn(1, 6))
        in_a_pipeline(layers, sample())
        with pytest.raises(ValueError, match='goes the way .* was (True|False); it is .* now'):
            layers(sample() / 0)


def in_one_of_two_ways(m, x):
    assert x.sum() > 0 or x.sum() < 0
    return x


def in_a_chain(m, x):
    if 9 < x.max() < 8:
        raise ValueError
    return x


def in_any(m, x):
    assert any((x[0].sum() > 0, x[0].sum() < 0))
    return x


def in_any_of_a_list(m, x):
    some = any
    assert some(each > 0 for each in (x[0].sum(), -x[0].sum()))
    return x


def in_a_list(m, x):
    if x[0].sum().item() not in (-x[0].sum(), x[0].sum()):
        raise ValueError
    return x


def of_a_choice(m, x):
    assert True if x.sum() > 0 else x.sum() <= 0
    return x


def with_another_way(m, x):
    if x.sum() == 0:
        raise ValueError
    else:
        return x


def with_a_way_before(m, x):
    if x.sum() == 0:
        x = x + 1
        raise ValueError
    return x


def test_elements_by_which_a_program_may_do_more():
    """Of several truths, others might let it go on."""
    for function in [
        asserted_elements,
        in_one_of_two_ways,
        in_a_chain,
        in_any,
        in_any_of_a_list,
        in_a_list,
        of_a_choice,
        with_another_way,
        with_a_way_before,
    ]:
        with pytest.raises(ConversionError, match='by the elements of a tensor'):
            to_sequential(Model(function), sample())


# --- one sample
# -------------------------------------------------------------------------------------------------


def rows_of(x):
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def expanded(m, x):
    rows = rows_of(x)
    if len(x) != len(rows):
        rows = rows.expand(len(x), -1)
    if len(x) > 1:
        x = x.contiguous().view(len(x), x.size(1))
    return x + rows


def expanded_for_three(m, x):
    return x + (rows_of(x).expand(len(x), -1) if len(x) > 2 else rows_of(x))


def doubled(m, x):
    return x * 2 if len(x) > 1 else x


class Counts(nn.BatchNorm1d):
    """A layer that counts its calls, and returns its input."""

    def __init__(self):
        super().__init__(6)
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x


def squared(m, x):
    return x * x if len(x) > 1 else x * 2


def changed(m, x):
    return x.add_(1) if len(x) > 1 else x


def dropped(m, x):
    return F.dropout(x, 0.5, m.training) if len(x) > 1 else x


def called(m, x):
    return m.counts(x) if len(x) > 1 else x


def sparse(m, x):
    return x.to_sparse().to_dense() if len(x) > 1 and not x.is_meta else doubled(m, x)


def once_more(m, x):
    return x if len(x) > 1 else x * 2


def detached(m, x):
    y = x * m.counts.weight
    return y.detach() if len(x) > 1 else y


def conjugated(m, x):
    y = torch.complex(x, x + 1)
    return torch.view_as_real((y.conj() if len(x) > 1 else y).resolve_conj())[..., 1]


def test_one_sample_for_which_another_way_gives_the_memory_and_not_the_value():
    for function in [detached, conjugated]:
        model = Model(function)
        model.counts = Counts()
        layers = to_sequential(model, sample(), check_sample=False)
        with pytest.raises(ValueError, match='> 1 was True; it is False now'):
            layers(torch.randn(1, 6))


def nothing_in_training(m, x):
    return x * 0 if len(x) == 1 and m.training else x


def test_one_sample_for_which_the_other_mode_goes_another_way():
    layers = to_sequential(Model(nothing_in_training).eval(), sample()).train()
    with pytest.raises(ValueError, match='== 1 was False; it is True now'):
        layers(torch.randn(1, 6))


def test_one_sample_for_which_another_way_does_the_same():
    """In v0.9.0, a sample of two was refused, and a micro-batch of one after a sample of four."""
    for size in [2, 4]:
        others = [torch.randn(n, 6) for n in (1, 3, 4, 7)]
        layers = check(Model(expanded), sample()[:size], *others)
        assert len(layers) == 2, size
        in_a_pipeline(layers, torch.randn(3, 6))


def test_effects_of_the_other_branch_are_checked_in_each_call():
    layers = to_sequential(Model(expanded_for_three), sample(), check_sample=False)
    for n in (1, 3, 9):
        layers(torch.randn(n, 6))
    with pytest.raises(ValueError, match='> 2 was True; it is False now'):
        layers(torch.randn(2, 6))


def test_one_sample_for_which_another_way_does_something_else():
    for device in ['cpu', 'meta']:
        for function in [doubled, squared, changed, dropped, called, sparse, once_more]:
            model = Model(function).to(device)
            model.counts = Counts()
            layers = to_sequential(model.eval(), sample().to(device)).train()
            layers(torch.randn(3, 6, device=device))
            with pytest.raises(ValueError, match='> 1 was True; it is False now'):
                layers(torch.randn(1, 6, device=device))


class Maybe(nn.Module):
    """A module that returns something, or nothing."""

    gives = False

    def forward(self, x):
        return x if self.gives else None


def test_a_leaf_that_gives_nothing_is_asked_in_each_call():
    model = Model(lambda m, x: x if m.maybe(x) is None else x + m.maybe(x))
    model.maybe = Maybe()
    layers = to_sequential(model, sample(), leaves=['maybe'])
    assert torch.equal(layers(sample()), model(sample()))
    model.maybe.gives = True
    with pytest.raises(ValueError, match='the result of a layer was None'):
        layers(sample())
