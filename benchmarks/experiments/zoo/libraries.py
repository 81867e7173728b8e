"""Models of libraries, and their arguments.

Architectures of transformers have their default configuration, and samples as in their
documentation.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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


class Library(NamedTuple):
    """Models of a library.

    Attributes:
        modules: Modules to import, the library itself first. names: Lists models. case: Makes one
        by its name.
    """

    modules: Sequence[str]
    names: Callable[[], Sequence[str]]
    case: Callable[[str], Case]


#: Of videos.
FRAMES = 16
#: Models of segmentation take any size, and are shown one of 520², which takes minutes.
SEGMENTED = 224
#: To train with, in models that take any size.
SMALL = 64

#: The smallest model of each family, that is, of each of timm's modules.
TIMM = """
beit_base_patch16_224 halonet_h1 mobileone_s1 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
convnext_zepto_rms cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny
deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small
efficientformer_l1 efficientformerv2_s0 mobilenetv2_035 efficientvim_m1 efficientvit_b0
efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny
gemma4_vit_167m ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny
hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4
lcnetv2_small levit_128s lowformer_b0 mambaout_femto maxvit_pico_rw_256 poolformerv2_s12
gmlp_ti16_224 mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mvitv2_tiny
naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny nextvit_small nf_regnet_b0 pit_ti_224
pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50
resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1
skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11
visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224
samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception
xception41p xcit_nano_12_p8_224
""".split()


def _of_images(model: nn.Module, *shape: int) -> Case:
    def images(*shape: int) -> Callable[[int], Tensor]:
        return lambda number: torch.rand(number, *shape)

    return Case(model, images(*shape), images(*shape[:-2], SMALL, SMALL))


def _torchvision_names() -> list[str]:
    from torchvision import models

    return [
        name
        for module in (models, models.segmentation, models.video)
        for name in models.list_models(module)
    ]


def _torchvision(name: str, **changes: Any) -> Case:
    from torchvision import models

    if name in models.list_models(models.segmentation):
        return _of_images(
            models.get_model(name, weights=None, weights_backbone=None), 3, SEGMENTED, SEGMENTED
        )
    # The smallest that one of its checkpoints is for, as the largest may be for another config.
    crop = min(weights.transforms().crop_size for weights in models.get_model_weights(name))
    height, width = (crop * 2)[:2]
    frames = [FRAMES] if name in models.list_models(models.video) else []
    case = _of_images(models.get_model(name, weights=None, **changes), 3, *frames, height, width)
    return case._replace(without_heads=partial(_torchvision, name, aux_logits=False))


def _timm(name: str) -> Case:
    import timm

    model: Any = timm.create_model(name)
    return _of_images(model, *model.pretrained_cfg['input_size'])


LIBRARIES = {
    'torchvision': Library(['torchvision'], _torchvision_names, _torchvision),
    'timm': Library(['timm'], lambda: TIMM, _timm),
    'transformers': Library(
        ['transformers', 'transformers.modeling_utils'],
        lambda: [*NAMES],
        case,
    ),
}
