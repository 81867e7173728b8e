"""Guards as wide as the model: what its way does not depend on may be another in a call."""
import warnings

import pytest
import torch

from tests.devices import cpu_only
from tests.sequential.test_record import Model, check, sample
from torchgpipe.sequential import to_sequential

pytestmark = cpu_only('what is recorded does not depend on devices')


# --- texts
# -------------------------------------------------------------------------------------------------


def see(true, message):
    if not true:
        raise ValueError(message)


def asserted(m, x):
    torch._assert(x.dim() == 2, f'expected (N, 6), got {x.shape}')
    return x


def seen_to(m, x):
    see(
        x.dim() == 2,
        f'expected (N, 6), got {x.shape}, which is {len(x)} of'
        f' {x.shape[1]:3d}')
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


def in_the_same_line(m, x):
    if f'{len(x)}' == '4': print(end=f'{len(x)}')  # noqa: E701
    return x


@pytest.mark.parametrize('function', [asserted, seen_to, warned])
@pytest.mark.filterwarnings('ignore:got')
def test_a_shape_in_a_message_alone_may_be_another(function):
    """In v0.9.0, it was guarded as a text that a program goes by."""
    check(Model(function), sample(), torch.randn(7, 6), torch.randn(1, 6))


@pytest.mark.parametrize('function', [looked_up, kept, kept_by_another_name, in_the_same_line])
def test_a_text_that_a_program_may_go_by_may_not(function):
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
