"""A model that is run by the pipeline made from it: all else of it is its own."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from tests.devices import places
from tests.helpers import assert_same, gradients
from tests.sequential.transformers import GPT, GPTConfig
from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import to_sequential

# A mean over tokens, which is counted.
pytestmark = pytest.mark.filterwarnings('ignore:output.loss is')

IDS = torch.arange(28).view(4, 7) % 11
MASK = (torch.arange(7) < torch.tensor([[7], [5], [6], [3]])).long()
BATCH = {'input_ids': IDS, 'attention_mask': MASK, 'labels': IDS.masked_fill(MASK == 0, -100)}


def gpt(dropout=0.0, width=4):
    """Return a model of language, always the same, with a head that is tied."""
    torch.manual_seed(0)
    return GPT(
        GPTConfig(vocab_size=11, n_positions=8, n_embd=width, n_layer=2, n_head=2, dropout=dropout)
    ).double()


def count(input_ids, attention_mask, labels):
    """Count the labels in the mean of the loss."""
    return (labels[:, 1:] != -100).sum()


def pipeline_of(model, devices=('cpu:0', 'cpu:1'), **options):
    """Return a pipeline made from that."""
    device = model.lm_head.weight.device
    layers = to_sequential(model, Arguments(**{name: x.to(device) for name, x in BATCH.items()}))
    return GPipe(
        layers, [len(layers) - 3, 3], devices=devices, chunks=3, gather={'loss': count}, **options
    )


def calls_of(pipeline):
    """Return a list that grows with each micro-batch."""
    calls = []
    pipeline[0].register_forward_hook(lambda *_: calls.append(0))
    return calls


class Count(nn.Module):
    """Has a buffer in the model itself, which it changes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer('number', torch.zeros(()))

    def forward(self, x):
        y = self.first(x)
        self.number.add_(1)
        return self.last(y)


def test_results_equal_the_model():
    model, reference = gpt(), gpt()
    model.hf_device_map = reference.hf_device_map = {'': 'cpu'}
    names = [*model.state_dict()]
    pipeline = pipeline_of(model)
    calls = calls_of(pipeline)
    with pipeline.in_place_of(model):
        output, expected = model(**BATCH), reference(**BATCH)
        assert type(output) is type(expected)
        assert_same(output, expected)
        output.loss.backward(), expected.loss.backward()
        assert_same(gradients(model), gradients(reference))
        assert [*model.state_dict()] == names and len(calls) >= 3
        assert inspect.signature(model.forward) == inspect.signature(reference.forward)
    calls.clear()
    assert_same(model(**BATCH), reference(**BATCH))
    assert not calls and model.__dict__.keys() == reference.__dict__.keys()
    assert model.hf_device_map is reference.hf_device_map


def test_modes_follow_the_model():
    for frozen in [False, True]:
        model, reference = gpt(0.5), gpt(0.5).eval()
        pipeline = pipeline_of(model)
        with pipeline.in_place_of(model):
            for mode in (True, False, True):
                model.train(mode)
                if frozen:
                    model.transformer.eval()
                alike = torch.equal(model(**BATCH).logits, model(**BATCH).logits)
                assert alike is (frozen or not mode)
                assert pipeline.training is pipeline.partitions[0].training is mode, frozen
                if alike:
                    assert_same(model(**BATCH), reference(**BATCH))


@pytest.mark.slow
def test_a_copy_has_a_pipeline_of_its_own():
    model = gpt()
    pipeline = pipeline_of(model)
    calls = calls_of(pipeline)
    with pipeline.in_place_of(model):
        expected = model(**BATCH)
        twin = copy.deepcopy(model)
        calls.clear()
        assert_same(twin(**BATCH), expected)
        assert len(calls) == 3  # hooks are copied, but objects they hold are not
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(**BATCH).logits.any()
        assert_same(model(**BATCH), expected)
        assert_same(pickle.loads(pickle.dumps(gpt()))(**BATCH), expected)


@pytest.mark.accelerator
def test_on_devices():
    devices = places('aa')
    model, reference = gpt(), gpt()
    pipeline = pipeline_of(model, devices)
    batch = {name: x.to(devices[0]) for name, x in BATCH.items()}
    with pipeline.in_place_of(model):
        found, expected = map(dict.fromkeys, (model.hf_device_map.values(), pipeline.devices))
        assert [*found] == [*expected]
        assert len(model.hf_device_map) == len(pipeline)
        output, expected = model(**batch), reference(**BATCH)
        assert (output.loss.device, output.logits.device) == (*pipeline.devices,)
        assert_same(output, expected)
        output.loss.backward(), expected.loss.backward()
        assert_same(gradients(model), gradients(reference))


@pytest.mark.accelerator
def test_buffers_that_were_moved():
    model, x = Count(), torch.rand(6, 3)
    pipeline = GPipe(to_sequential(model, x), [1, 1], devices=places('aa'), chunks=3)
    with pipeline.in_place_of(model):
        model(x.to(pipeline.devices[0]))
    assert model.number.item() == pipeline.state_dict()['0.number'].item() == 3


def test_parameters_of_a_model_on_meta():
    expected = gpt()
    with torch.device('meta'):
        model = gpt()
    pipeline = pipeline_of(
        model, weights={**dict(expected.named_buffers()), **expected.state_dict()}
    )
    with pipeline.in_place_of(model):
        assert_same(model(**BATCH), expected(**BATCH))
    assert_same(model(**BATCH), expected(**BATCH))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_another_model():
    model = gpt()
    pipeline = pipeline_of(model)
    with pytest.raises(ValueError, match=r"only one of both has \['transformer.wte.weight'"):
        pipeline.in_place_of(gpt()).__enter__()
    model.transformer.h[1].attn.bias = model.transformer.h[1].attn.bias.clone()
    with pytest.raises(ValueError, match=r"has \['transformer.h.1.attn.bias'\], 1 in all"):
        pipeline.in_place_of(model).__enter__()
    model = gpt()
    pipeline = pipeline_of(model)
    model.transformer.h[0].register_parameter('adapter', nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"has \['transformer.h.0.adapter'\], 1 in all: convert"):
        pipeline.in_place_of(model).__enter__()
    del model.transformer.h[0].adapter
    pipeline.get_submodule('3').register_parameter('adapter', nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"has \['adapter'\]"):
        pipeline.in_place_of(model).__enter__()


def test_tensors_that_are_replaced_meanwhile():
    for change in [
        lambda model: setattr(model, 'number', torch.ones(())),
        lambda model: setattr(model, 'last', nn.Linear(3, 2)),
        lambda model: setattr(model, 'more', nn.Linear(3, 2)),
        lambda model: delattr(model, 'last'),
        lambda model: model.load_state_dict(Count().state_dict(), assign=True),
        lambda model: model.half(),
    ]:
        model = Count()
        gpipe = GPipe(to_sequential(model, torch.rand(4, 3)), [1, 1], devices=['cpu', 'cpu'])
        with gpipe.in_place_of(model):
            model(torch.rand(4, 3))
            change(model)
            with pytest.raises(
                RuntimeError, match=r'only one of both has \[.* replaced, added or'
            ):
                model(torch.rand(4, 3))


@pytest.mark.slow
def test_a_call_unlike_the_sample():
    model = gpt()
    with pipeline_of(model).in_place_of(model):
        with pytest.raises(ValueError, match='like those of the sample') as found:
            model(IDS)
    assert 'as generate() does, comes after' in found.value.__notes__[-1]
    assert model(IDS).loss is None


def test_another_model_on_meta():
    pipeline = pipeline_of(gpt())
    with torch.device('meta'):
        for other in (gpt(width=8), gpt().float()):
            with pytest.raises(ValueError, match='only one of both has'):
                pipeline.in_place_of(other).__enter__()


def test_a_model_with_a_forward_of_its_own():
    model = gpt()
    pipeline = pipeline_of(model)
    with pipeline.in_place_of(model):
        with pytest.raises(ValueError, match='another forward than its class'):
            pipeline.in_place_of(model).__enter__()
