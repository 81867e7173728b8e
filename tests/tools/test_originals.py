"""Models of transformers that are run by the pipeline made from them, tied weights and all.

The unwrapped model with the same tool, seeds and batches gives the expected results.
"""

import contextlib
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.utils.data import DataLoader

from tests.tools.models import assert_equal
from tests.tools.rows import works
from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import to_sequential

pytestmark = [pytest.mark.usefixtures('no_state')]

WORDS = {'vocab_size': 20, 'bos_token_id': 0, 'eos_token_id': 0, 'use_cache': False}
PROMPT = torch.tensor([[3, 4, 5]])


def gpt2():
    """Return a model with one table of words for its first layer and its head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **WORDS,
        )
    )


def llama():
    """Return a model that computes some numbers in float32, whatever it is in itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            **WORDS,
        )
    )


def model_of(make):
    """Return one that is always the same."""
    torch.manual_seed(0)
    return make().double()


def rows(number, seed=1):
    """Return samples: padded, and the first of them without labels for all tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (number, 6), generator=generator)
    mask = (torch.arange(6) < torch.randint(2, 7, (number, 1), generator=generator)).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :2] = -100
    return [
        dict(zip(('input_ids', 'attention_mask', 'labels'), row)) for row in zip(ids, mask, labels)
    ]


def stacked(samples):
    """Return samples as a batch."""
    return {name: torch.stack([row[name] for row in samples]) for name in samples[0]}


def loss_of(model, batch):
    """Return the loss of a batch."""
    return model(**batch, num_items_in_batch=(batch['labels'][:, 1:] != -100).sum()).loss


@contextlib.contextmanager
def in_place(model, piped):
    """Let a model be run by a pipeline, or by itself."""
    if not piped:
        yield None
        return
    sample = Arguments(**stacked(rows(4)), num_items_in_batch=torch.tensor(9.0))
    layers = to_sequential(model, sample)
    pipeline = GPipe(
        layers,
        [2, len(layers) - 3, 1],
        devices=['cpu:0', 'cpu:1', 'cpu:2'],
        chunks=3,
        gather={'loss': 'sum'},
    )
    with pipeline.in_place_of(model):
        yield pipeline


def trainer(model, folder, **options):
    """Return a Trainer that evaluates and saves every second step."""
    from transformers import Trainer, TrainingArguments

    arguments = {
        'use_cpu': True,
        'per_device_train_batch_size': 5,
        'per_device_eval_batch_size': 4,
        'max_steps': 4,
        'learning_rate': 0.05,
        'report_to': [],
        'disable_tqdm': True,
        'logging_steps': 1,
        'save_strategy': 'steps',
        'save_steps': 2,
        'eval_strategy': 'steps',
        'eval_steps': 2,
        **options,
    }
    return Trainer(
        model=model,
        train_dataset=rows(18),
        eval_dataset=rows(7, seed=2),
        data_collator=stacked,
        args=TrainingArguments(output_dir=folder, **arguments),
    )


def by_trainer(make, folder, piped, checkpoint=None, **options):
    """Return the model, its Trainer, and the Trainer's log: losses, norms, predictions."""
    model = model_of(make)
    with in_place(model, piped):
        run = trainer(model, folder, **options)
        run.train(resume_from_checkpoint=checkpoint)
        notes = [
            entry[name]
            for entry in run.state.log_history
            for name in ('loss', 'grad_norm', 'eval_loss')
            if name in entry
        ]
        predictions = run.predict(run.eval_dataset).predictions
        run.save_model(folder / 'end')
    return model, run, [*notes, *predictions.flatten()]


@works(
    'transformers',
    '`Trainer` with a model of transformers that a pipeline runs '
    '[in place of](huggingface.md#with-a-trainer): `num_items_in_batch`, accumulation, '
    '`evaluate`, `predict`, `load_best_model_at_end`, `save_model`, `resume_from_checkpoint` '
    'with the pipeline or without; `from_pretrained`, `generate`',
    'transformers',
)
@pytest.mark.parametrize('make', [gpt2, llama])
@pytest.mark.parametrize(
    'options', [{'load_best_model_at_end': True}, {'gradient_accumulation_steps': 2}], ids=str
)
def test_trainer(make, options, tmp_path):
    folders = tmp_path / 'by itself', tmp_path / 'by a pipeline'
    (expected, plain, notes), (model, run, own_notes) = (
        by_trainer(make, folder, piped, **options) for folder, piped in zip(folders, (0, 1))
    )
    assert_equal(model, expected)
    assert len(notes) > 8 and own_notes == pytest.approx(notes, abs=2e-6)  # in float32
    again = type(model).from_pretrained(folders[1] / 'end', dtype=torch.double)
    assert_equal(again, model)
    ways = {'max_new_tokens': 4, 'do_sample': False}
    assert torch.equal(again.generate(PROMPT, **ways), model.generate(PROMPT, **ways))
    best = [each.state.best_model_checkpoint or '' for each in (plain, run)]
    assert best[0].rpartition('-')[2] == best[1].rpartition('-')[2]
    if not best[0]:
        for folder, piped in ((folders[1], False), (folders[0], True), (folders[1], True)):
            resumed, *_ = by_trainer(
                make, tmp_path / 'again', piped, folder / 'checkpoint-2', **options
            )
            assert_equal(resumed, expected)


def by_accelerate(piped, folder):
    """Return a model, trained with a loop of Accelerate's that is saved and goes on."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), model_of(gpt2)
    with in_place(model, piped):
        prepared, optimizer, loader = accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.05),
            DataLoader(rows(20), 5, collate_fn=stacked),
        )
        for epoch in range(3):
            if epoch == 1:
                accelerator.save_state(folder / 'state')
            if epoch == 2:  # The changes of epoch 1 do not count.
                accelerator.load_state(folder / 'state')
            for batch in loader:
                with accelerator.accumulate(prepared):
                    accelerator.backward(loss_of(prepared, batch))
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.save_model(prepared, folder / 'end')
    return model


@works(
    'Accelerate',
    'a model of transformers that a pipeline runs in place of: `prepare`, '
    '`accumulate`, `clip_grad_norm_`, `save_state`, `load_state`, `save_model`, autocast',
    'accelerate',
)
@pytest.mark.skipif(find_spec('transformers') is None, reason="pip install -e '.[tools]'")
def test_accelerate(tmp_path):
    from safetensors.torch import load_file

    expected, model = (by_accelerate(piped, tmp_path / str(piped)) for piped in (0, 1))
    assert_equal(model, expected)
    files = [load_file(tmp_path / str(piped) / 'end/model.safetensors') for piped in (0, 1)]
    assert [*files[0]] == [*files[1]] and 'lm_head.weight' not in files[0]
    again = model_of(gpt2)
    with in_place(again, True) as pipeline:
        pipeline.load_state_dict(files[1])  # One name of tied weights is enough.
    assert_equal(again, expected)


@pytest.mark.tools
@pytest.mark.filterwarnings('ignore')
def test_autocast_of_accelerate():
    pytest.importorskip('transformers'), pytest.importorskip('accelerate')
    from accelerate import Accelerator

    model, dtypes = model_of(gpt2).float(), []
    with in_place(model, True) as pipeline:
        pipeline[-1].register_forward_hook(lambda layer, x, y: dtypes.append(y.logits.dtype))
        accelerator, batch = Accelerator(cpu=True, mixed_precision='bf16'), stacked(rows(5))
        assert loss_of(accelerator.prepare(model), batch).dtype == torch.float
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert loss_of(model, batch).dtype == torch.float
        with pytest.raises(ValueError, match='prepare it within'):
            pipeline.in_place_of(accelerator.prepare(model_of(gpt2))).__enter__()
    assert dtypes == [torch.bfloat16] * 3 + [torch.float] * 3


def by_lightning(piped, folder, steps, checkpoint=None):
    """Return a model and the metrics logged by Lightning; keep the best and the last one."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            loss = loss_of(self.model, batch)
            self.log('loss', loss)
            return loss

        def validation_step(self, batch, index):
            self.log('eval', loss_of(self.model, batch), batch_size=len(batch['labels']))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    loader = partial(DataLoader, batch_size=5, collate_fn=stacked)
    keeper = ModelCheckpoint(dirpath=folder, monitor='eval', filename='best')
    run = lightning.Trainer(
        accelerator='cpu',
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[keeper],
        max_epochs=-1,
        max_steps=steps,
        gradient_clip_val=0.5,
        val_check_interval=2,
    )
    module = Module(model_of(gpt2))
    with in_place(module.model, piped):
        run.fit(module, loader(rows(20)), loader(rows(7, seed=2)), ckpt_path=checkpoint)
        run.save_checkpoint(folder / 'last.ckpt')
        notes = [*map(float, run.callback_metrics.values()), float(keeper.best_model_score)]
        run.validate(module, loader(rows(7, seed=2)), ckpt_path='best', verbose=False)
    return module.model, [*notes, float(run.callback_metrics['eval'])]


@works(
    'Lightning',
    'a model of transformers that a pipeline runs in place of: `fit`, `log`, '
    '`validate`, clipping, the best checkpoint, `ckpt_path` with the pipeline or without',
    'lightning',
)
@pytest.mark.skipif(find_spec('transformers') is None, reason="pip install -e '.[tools]'")
def test_lightning(tmp_path):
    (expected, notes), (model, own_notes) = (
        by_lightning(piped, tmp_path / str(piped), 4) for piped in (0, 1)
    )
    assert_equal(model, expected)
    assert len(notes) == 4 and own_notes == pytest.approx(notes, abs=2e-6)
    ends = [
        by_lightning(piped, tmp_path / f'{start}{piped}', 6, tmp_path / start / 'last.ckpt')[0]
        for start, piped in (('0', 0), ('0', 1), ('1', 0), ('1', 1))
    ]
    for end in ends[1:]:
        assert_equal(end, ends[0])
