"""What an error of a conversion, or of a call after it, says of the way out."""
import pytest
import torch
from torch import nn

from tests.devices import cpu_only
from tests.sequential.test_record import Model, halves, sample
from torchgpipe import Arguments
from torchgpipe.sequential import ConversionError, to_sequential

pytestmark = cpu_only('what is recorded does not depend on devices')


class Keyed(Model):
    """What takes keywords of any name."""

    def forward(self, x, **others):
        return super().forward(x) + sum(others.values())


def test_keys_in_another_order_are_named():
    x = sample()
    layers = to_sequential(Keyed(halves), Arguments(x, p=x, q=x))
    assert layers(x, p=x, q=x).shape == x.shape
    with pytest.raises(ValueError, match='give the keys in the order of the sample'):
        layers(x, q=x, p=x)
    with pytest.raises(ValueError, match='convert it with a sample like these'):
        layers(x, p=x)


def test_values_in_the_place_of_the_parameters_of_a_layer():
    def replaced(m, x):
        return torch.func.functional_call(m.a, {'weight': m.a.weight * 2}, (x,))

    with pytest.raises(ConversionError, match='(?s)not called with, as by torch.func.*m.a.weight'):
        to_sequential(Model(replaced), sample())
    model = nn.Sequential(nn.Linear(6, 6), Model(replaced))
    assert len(to_sequential(model, sample(), leaves=['1'])) == 2


def test_a_size_that_cuts_a_table_says_the_way_out():
    tables = [torch.randn(9, 6)]
    model, x = Model(lambda m, x: x + tables[0][:x.shape[1]]), torch.randn(4, 5, 6)
    layers = to_sequential(model, x)
    with pytest.raises(ValueError, match=r'shape\[1\] was 5; it is 4 .*by register_buffer'):
        layers(x[:, :4])
    model = Model(lambda m, x: x + m.tables[:x.shape[1]])
    model.register_buffer('tables', torch.randn(9, 6))
    assert torch.equal(to_sequential(model, x)(x[:, :4]), model(x[:, :4]))


def test_a_causal_mask_says_the_way_out():
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for options in ({}, {'is_causal': True}):
        model = Model(lambda m, x: m.encoder(x, mask=mask, **options))
        model.encoder = nn.TransformerEncoder(block, 2)
        if options:
            assert len(to_sequential(model, torch.randn(4, 5, 6))) > 1
        else:
            with pytest.raises(ConversionError, match="(?s)'encoder'.*elements of a tensor.*"
                                                      'is_causal=True'):
                to_sequential(model, torch.randn(4, 5, 6))
