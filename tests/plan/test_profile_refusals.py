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
        model = nn.Sequential(nn.Linear(3, 3))
        with pytest.raises(TypeError, match='expected Tensor, but got str'):
            function(model, 'text', device='cpu')
        with pytest.raises(TypeError, match='expected Tensor, but got set'):
            function(model, (torch.rand(2, 3), {1}), device='cpu')
        with pytest.raises(TypeError, match='must be nn.Sequential'):
            function(
                nn.Linear(3, 3), torch.rand(2, 3), device='cpu'
            ) if function is profile else function(
                nn.ModuleList([nn.Linear(3, 3)]), torch.rand(2, 3), device='cpu'
            )
        with pytest.raises(TypeError, match='stash and pop do not match'):
            function(nn.Sequential(Stash()), torch.rand(2, 3), device='cpu')
        with pytest.raises(ValueError, match="sample is on 'meta'"):
            function(model, torch.rand(2, 3, device='meta'), device='cpu')
        with pytest.raises(ValueError, match="device 'cuda:99' is not on this machine"):
            function(model, torch.rand(2, 3), device='cuda:99')
        with pytest.raises(ValueError, match="device 'gpu' is not on this machine"):
            function(model, torch.rand(2, 3), device='gpu')
        with pytest.raises(RuntimeError) as error:
            function(model, torch.rand(2, 4), device='cpu')
        assert error.value.__notes__ == ["while layer '0' was profiled on cpu with 2 samples"]
        with pytest.raises(RuntimeError) as error:
            function(nn.Sequential(nn.Embedding(3, 3)), torch.rand(2, 4), device='cpu')
        assert "layer '0'" in error.value.__notes__[0], function
        model(torch.rand(2, 3)).sum().backward()
        with pytest.raises(ValueError, match="some parameter already has gradient: '0.weight'"):
            function(model, torch.rand(2, 3), device='cpu')


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
