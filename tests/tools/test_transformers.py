"""transformers.Trainer: a pipeline within a model that returns its loss."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.tools.models import RATE, STEPS, assert_equal, plain, samples, train, wrapped
from tests.tools.rows import works
from torchgpipe import GPipe

pytestmark = [pytest.mark.usefixtures('no_state')]


class Model(nn.Module):
    """A model as the Trainer wants it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        logits = self.net(x)
        return (
            {'logits': logits}
            if labels is None
            else {'loss': cross_entropy(logits, labels), 'logits': logits}
        )


def trainer(model, folder, **options):
    """Return a Trainer that takes the batches in their order."""
    from transformers import Trainer, TrainingArguments

    inputs, labels = samples()
    data = [{'x': x, 'labels': label} for x, label in zip(inputs, labels)]
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=5,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type='constant',
        weight_decay=0.0,
        max_grad_norm=0,
        optim='sgd',
        report_to=[],
        save_strategy='no',
        disable_tqdm=True,
        seed=0,
        train_sampling_strategy='sequential',
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)


def expected():
    """Return the unwrapped model after all steps."""
    model = plain()
    train(model, torch.optim.SGD(model.parameters(), RATE))
    return model


@works(
    'transformers',
    '`Trainer.train` of a model that has a `GPipe`; `save_model`, `evaluate`',
    'transformers',
)
def test_train(tmp_path):
    from safetensors.torch import load_file

    model = Model(wrapped())
    run = trainer(model, tmp_path)
    run.train()
    assert_equal(model.net, expected())
    run.save_model(tmp_path / 'end')
    loaded = Model(plain())
    loaded.load_state_dict(load_file(tmp_path / 'end' / 'model.safetensors'))
    assert_equal(loaded.net, expected())
    inputs, labels = samples()
    loss = cross_entropy(expected()(inputs), labels).item()
    assert run.evaluate()['eval_loss'] == pytest.approx(loss, abs=1e-6)


@works(
    'transformers', 'a model with several devices in `hf_device_map` is not moved', 'transformers'
)
def test_a_device_map(tmp_path, monkeypatch):
    monkeypatch.setattr(GPipe, '_apply', lambda self, *args: pytest.fail('it is moved'))
    model = Model(wrapped())
    model.hf_device_map = {f'net.{k}': f'cuda:{k // 2}' for k in range(4)}
    run = trainer(model, tmp_path)
    assert run.is_model_parallel and run.args.n_gpu <= 1
    run.train()
    assert_equal(model.net, expected())
