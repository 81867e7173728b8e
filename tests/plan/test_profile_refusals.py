"""Models that cannot be profiled or balanced raise an error that says why."""

import pytest
import torch
from torch import nn

from tests.skip.layers import Stash
from torchgpipe.balance import balance_by_size, balance_by_time, profile


def test_bad_input():
    for function in [
        profile,
        lambda *args, **kwargs: balance_by_time(1, *args, **kwargs),
        lambda *args, **kwargs: balance_by_size(1, *args, **kwargs),
    ]:
        model, sample = nn.Sequential(nn.Linear(3, 3)), torch.rand(2, 3)
        no_sequence, no_pop = nn.ModuleList([nn.Linear(3, 3)]), nn.Sequential(Stash())
        for given, device, error, text in [
            ((model, 'text'), 'cpu', TypeError, 'expected Tensor, but got str'),
            ((model, (sample, {1})), 'cpu', TypeError, 'expected Tensor, but got set'),
            ((no_sequence, sample), 'cpu', TypeError, 'must be nn.Sequential'),
            ((no_pop, sample), 'cpu', TypeError, 'stash and pop do not match'),
            ((model, sample.to('meta')), 'cpu', ValueError, "sample is on 'meta'"),
            ((model, sample), 'cuda:99', ValueError, "device 'cuda:99' is not on this machine"),
            ((model, sample), 'gpu', ValueError, "device 'gpu' is not on this machine"),
        ]:
            with pytest.raises(error, match=text):
                function(*given, device=device)
        with pytest.raises(RuntimeError) as error:
            function(model, torch.rand(2, 4), device='cpu')
        assert error.value.__notes__ == ["while layer '0' was profiled on cpu with 2 samples"]
        with pytest.raises(RuntimeError) as error:
            function(nn.Sequential(nn.Embedding(3, 3)), torch.rand(2, 4), device='cpu')
        assert "layer '0'" in error.value.__notes__[0], function
        model(sample).sum().backward()
        with pytest.raises(ValueError, match="some parameter already has gradient: '0.weight'"):
            function(model, sample, device='cpu')


def test_bad_numbers():
    for call, error, message in [
        (lambda m, x: balance_by_time(0, m, x, device='cpu'), ValueError, 'positive'),
        (lambda m, x: balance_by_size(0, m, x, device='cpu'), ValueError, 'positive'),
        (
            lambda m, x: balance_by_time(2, m, x, device='cpu'),
            ValueError,
            '1 layers cannot be cut into 2',
        ),
        (
            lambda m, x: balance_by_size(2, m, x, device='cpu'),
            ValueError,
            '1 layers cannot be cut into 2',
        ),
        (lambda m, x: balance_by_size(1, m, x, chunks=0, device='cpu'), ValueError, 'chunks'),
        (
            lambda m, x: balance_by_size(1, m, x, param_scale=-1, device='cpu'),
            ValueError,
            'param_scale',
        ),
        (lambda m, x: balance_by_time(1, m, x, timeout=-1, device='cpu'), ValueError, 'timeout'),
        (lambda m, x: profile(m, x, timeout=float('nan'), device='cpu'), ValueError, 'timeout'),
        (lambda m, x: profile(m, x[:0], device='cpu'), ValueError, 'batch is empty'),
        (lambda m, x: profile(m, x, device='meta'), ValueError, "'meta'"),
        (lambda m, x: profile(m[0], x, device='cpu'), TypeError, 'must be nn.Sequential'),
        (lambda m, x: balance_by_time('1', m, x, device='cpu'), TypeError, 'must be an integer'),
        (lambda m, x: balance_by_time(True, m, x, device='cpu'), TypeError, 'must be an integer'),
        (
            lambda m, x: balance_by_time(1, m[0], x, device='cpu'),
            TypeError,
            'must be nn.Sequential',
        ),
        (
            lambda m, x: balance_by_size(1, m, x, param_scale=float('inf'), device='cpu'),
            ValueError,
            'param_scale',
        ),
        (lambda m, x: profile(m, x, timeout=float('inf'), device='cpu'), ValueError, 'timeout'),
    ]:
        with pytest.raises(error, match=message):
            call(nn.Sequential(nn.Linear(3, 3)), torch.rand(2, 3))


def test_the_name_of_the_package_before():
    with pytest.raises(ImportError, match='torchgpipe.balance'):
        import torchgpipe_balancing  # noqa: F401
