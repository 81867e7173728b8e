"""Architectures of transformers, by their default configs, and samples as their documentation has.

The inputs of a model depend on the names of its arguments. They are ids with a tokenizer's mask,
in rows padded to one length, images, sound, or the outputs of a processor.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.zoo.convert import Case
from torchgpipe import Arguments

#: Of texts.
LENGTH = 16
#: Of a sound: half a second.
SAMPLES = 8000
#: Largest number of parameters of a default model. Larger ones get fewer blocks and words.
MOST = 80_000_000
BLOCKS, WORDS = 2, 1000
_LEAST = {
    'vocab_size': WORDS,
    **dict.fromkeys(
        (
            'num_hidden_layers',
            'num_layers',
            'num_decoder_layers',
            'encoder_layers',
            'decoder_layers',
            'n_layer',
            'n_layers',
        ),
        BLOCKS,
    ),
}

#: Classes, and options that differ from the defaults of their configs.
NAMES: dict[str, dict[str, Any]] = dict.fromkeys(
    """
AlbertForMaskedLM BertForMaskedLM BertForSequenceClassification BigBirdForMaskedLM
CamembertForMaskedLM CanineForSequenceClassification ConvBertForMaskedLM Data2VecTextForMaskedLM
DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM
EsmForMaskedLM FlaubertWithLMHeadModel FNetForMaskedLM FunnelForMaskedLM IBertForMaskedLM
LayoutLMForMaskedLM LongformerForMaskedLM MobileBertForMaskedLM ModernBertForMaskedLM
MPNetForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM RobertaForMaskedLM
RoFormerForMaskedLM SqueezeBertForMaskedLM XLMRobertaForMaskedLM XLMWithLMHeadModel
XLNetLMHeadModel YosoForMaskedLM BioGptForCausalLM BloomForCausalLM CodeGenForCausalLM
FalconForCausalLM GemmaForCausalLM Gemma2ForCausalLM GPT2LMHeadModel GPTJForCausalLM
GPTNeoForCausalLM GPTNeoXForCausalLM LlamaForCausalLM MistralForCausalLM OlmoForCausalLM
OPTForCausalLM PhiForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM StableLmForCausalLM
BartForConditionalGeneration LEDForConditionalGeneration M2M100ForConditionalGeneration
MarianMTModel MT5ForConditionalGeneration PegasusForConditionalGeneration
T5ForConditionalGeneration BeitForImageClassification CLIPModel ConvNextForImageClassification
DeiTForImageClassification Dinov2ForImageClassification ResNetForImageClassification
SegformerForImageClassification SwinForImageClassification ViTForImageClassification
ViTMAEForPreTraining ASTForAudioClassification HubertForCTC Wav2Vec2ForCTC
WhisperForConditionalGeneration""".split(),
    {},
)
# By default, one has no vocabulary, and some have a list for all of their blocks, or their padding
# is the last of their words.
NAMES['EsmForMaskedLM'] = {'vocab_size': 33, 'pad_token_id': 1, 'mask_token_id': 32}
NAMES['LongformerForMaskedLM'] = {'attention_window': 512}
NAMES['GPTNeoForCausalLM'] = {'num_layers': BLOCKS, 'attention_types': [[['global', 'local'], 1]]}
NAMES['MarianMTModel'] = NAMES['ModernBertForMaskedLM'] = {'pad_token_id': 0}


def case(name: str) -> Case:
    """Make a model by the name of its class."""
    import transformers

    cls: Any = getattr(transformers, name)
    changes = NAMES.get(name, {})
    config = cls.config_class(**changes)
    with torch.device('meta'):
        number = sum(x.numel() for x in cls(config).parameters())
    if number > MOST:
        changes = {
            **changes,
            **{key: least for key, least in _LEAST.items() if vars(config).get(key)},
        }
        config = cls.config_class(**changes)
    model = cls(config)
    sample = partial(sample_of, model)
    note = ', '.join(f'{key}={value}' for key, value in changes.items())
    return Case(model, sample, sample, note)


def sample_of(model: Any, size: int) -> Arguments:
    """Return a sample of a number of rows for a model."""
    names = inspect.signature(model.forward).parameters
    arguments = {}
    for key, make in _INPUTS.items():
        if _is_called_with(key, model, names):
            arguments[key] = make(model.config, size)
    return Arguments(**arguments)


def _is_called_with(key: str, model: Any, names: Any) -> bool:
    if key == 'attention_mask':
        return key in names and 'input_ids' in names  # Sounds of one length have none.
    return key in names and (key != 'decoder_input_ids' or model.config.is_encoder_decoder)


def _ids(config: Any, size: int) -> Tensor:
    most = getattr(config.get_text_config(), 'vocab_size', 1000)  # Or it takes any characters.
    return torch.randint(5, most, (size, LENGTH))


def _mask(config: Any, size: int) -> Tensor:
    """Return a mask of rows of several lengths, the first one without padding."""
    lengths = LENGTH - torch.arange(size) % 4 * 3
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def _pixels(config: Any, size: int) -> Tensor:
    config = getattr(config, 'vision_config', config)
    height, width = (getattr(config, 'image_size', 224),) * 2
    return torch.rand(size, getattr(config, 'num_channels', 3), height, width)


def _features(config: Any, size: int) -> Tensor:
    return torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)


def _sound(config: Any, size: int) -> Tensor:
    if hasattr(config, 'num_mel_bins'):
        return torch.randn(size, config.max_length, config.num_mel_bins)
    return torch.randn(size, SAMPLES)


_INPUTS: dict[str, Callable[[Any, int], Tensor]] = {
    'input_ids': _ids,
    'attention_mask': _mask,
    'pixel_values': _pixels,
    'input_values': _sound,
    'input_features': _features,
    'decoder_input_ids': _ids,
}
