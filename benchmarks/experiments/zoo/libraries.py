"""Models of libraries, and their arguments."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.experiments.zoo import architectures
from benchmarks.experiments.zoo.convert import Case


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
    crop = min(each.transforms().crop_size for each in models.get_model_weights(name))
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
        lambda: [*architectures.NAMES],
        architectures.case,
    ),
}
