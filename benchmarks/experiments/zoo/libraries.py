"""Models of libraries, and their arguments.

Architectures of transformers have their default configuration, and samples as in their
documentation.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
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
    'num_hidden_layers': BLOCKS,
    'num_layers': BLOCKS,
    'num_decoder_layers': BLOCKS,
    'encoder_layers': BLOCKS,
    'decoder_layers': BLOCKS,
    'n_layer': BLOCKS,
    'n_layers': BLOCKS,
}

#: The classes of transformers, with the options that differ from the defaults of configs; and
#: the smallest model of each family of timm, that is, of each of its modules. By default, a config
#: has no vocabulary, or a list for all of its blocks, or a padding that is the last of its words.
MODELS: dict[str, Any] = json.loads(Path(__file__).with_name('models.json').read_text())


def _transformers(name: str) -> Case:
    """Make a model by the name of its class."""
    import transformers

    cls: Any = getattr(transformers, name)
    changes = dict(MODELS['transformers'].get(name, {}))
    config = cls.config_class(**changes)
    with torch.device('meta'):
        number = sum(x.numel() for x in cls(config).parameters())
    if number > MOST:
        for key, least in _LEAST.items():
            if vars(config).get(key):
                changes[key] = least
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
        modules: Modules to import, the library itself first.
        names: Returns the names of models.
        case: Returns a model by its name.
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


def _of_images(model: nn.Module, *shape: int) -> Case:
    def images(*shape: int) -> Callable[[int], Tensor]:
        return lambda number: torch.rand(number, *shape)

    return Case(model, images(*shape), images(*shape[:-2], SMALL, SMALL))


def _torchvision_names() -> list[str]:
    from torchvision import models

    names: list[str] = []
    for module in (models, models.segmentation, models.video):
        names += models.list_models(module)
    return names


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
    'timm': Library(['timm'], lambda: MODELS['timm'], _timm),
    'transformers': Library(
        ['transformers', 'transformers.modeling_utils'],
        lambda: [*MODELS['transformers']],
        _transformers,
    ),
}
