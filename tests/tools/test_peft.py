"""peft: adapters on layers, whichever partition they are in."""

import pytest
import torch

from tests.tools.models import assert_equal, plain, samples, sgd, train, wrapped
from tests.tools.rows import works


def adapt(model):
    """Return a model with new adapters, always the same, on a layer and on a part of one."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(
        r=2, target_modules=['0', '2.0'], modules_to_save=['3'], init_lora_weights='gaussian'
    )
    return get_peft_model(model, config)


@works(
    'peft',
    '`get_peft_model(GPipe(…), LoraConfig(…))`: layers and their submodules get '
    'adapters; `modules_to_save`; train, `save_pretrained`, `PeftModel.from_pretrained`, '
    '`merge_and_unload`',
    'peft',
)
def test_adapters(tmp_path):
    from peft import PeftModel

    expected, model = adapt(plain()), adapt(wrapped())
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert train(model, sgd(model)) == pytest.approx(train(expected, sgd(expected)), abs=1e-12)
    assert_equal(model, expected)
    assert len(before) == 6 and not any(
        torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before
    )
    model.save_pretrained(tmp_path)
    inputs = samples()[0]
    for base in (plain(), wrapped(), wrapped([1, 2, 1])):
        loaded = PeftModel.from_pretrained(base, tmp_path)
        assert_equal(loaded, expected)
        assert (loaded(inputs) - expected(inputs)).abs().max() <= 1e-12
        merged = loaded.merge_and_unload()
        assert type(merged) is type(base)
        assert (merged(inputs) - expected(inputs)).abs().max() <= 1e-12
