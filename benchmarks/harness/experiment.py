"""Experiments: settings of a model, and the published figures of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from benchmarks.models import amoebanetd, resnet101, unet

#: The source of the figures that an experiment reproduces; others are there to compare.
OURS = 'torchgpipe 0.0.7'

#: No model can take smaller images: the last convolutions would see a single pixel.
LEAST_RESOLUTION = 64

#: All models halve an image five times.
RESOLUTION_STEP = 32

_BUILDERS: dict[str, Callable[..., nn.Sequential]] = {
    'resnet101': resnet101,
    'amoebanetd': lambda layers, filters: amoebanetd(num_layers=layers, num_filters=filters),
    'unet': lambda convs, channels: unet(num_convs=convs, base_channels=channels),
}


@dataclass(frozen=True)
class Model:
    """A model of :mod:`benchmarks.models`, by its kind and its size.

    >>> str(Model('unet', (5, 64))), str(Model('resnet101'))
    ('unet (5, 64)', 'resnet101')
    """

    kind: str
    size: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f'{self.kind} {self.size}' if self.size else self.kind

    def build(self) -> nn.Sequential:
        """Make it, on the current default device."""
        return _BUILDERS[self.kind](*self.size)


@dataclass(frozen=True)
class Setting:
    """One line of a published table.

    Attributes:
        name: The name for the option ``--setting``.
        model: The model.
        batch: Samples of a mini-batch.
        chunks: Micro-batches of a mini-batch.
        balance: Layers of each partition; empty for the model without GPipe.
        checkpoint: The option of GPipe.
        published: Figure by source; ``None`` where the source ran out of memory.
        spread: The ± of figures that have one, by source.
        details: Figures in addition to the main one, by name and by source.
        off: The features that an ablation switches off.
    """

    name: str
    model: Model
    batch: int
    chunks: int = 1
    balance: tuple[int, ...] = ()
    checkpoint: str = 'except_last'
    published: Mapping[str, float | None] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    off: tuple[str, ...] = ()

    def __len__(self) -> int:
        return max(1, len(self.balance))

    def scaled_batch(self, scale: float) -> int:
        """Return the samples of a mini-batch at a fraction of the published size."""
        return max(1, round(self.batch * scale))


@dataclass(frozen=True)
class Experiment:
    """A published table.

    Attributes:
        name: The command.
        title: The title, in one line.
        figure: The name of its figures.
        unit: The unit of its figures.
        resolution: Height and width of the images.
        settings: Its lines; the first is the baseline of the ratios.
        optimizer: ``'SGD'`` or ``'RMSprop'``.
    """

    name: str
    title: str
    figure: str
    unit: str
    resolution: int
    settings: tuple[Setting, ...]
    optimizer: str = 'SGD'

    @property
    def baseline(self) -> Setting:
        """The setting that ratios relate to."""
        return self.settings[0]

    def setting(self, name: str) -> Setting:
        """Find a setting by its name."""
        return next(setting for setting in self.settings if setting.name == name)

    def published_ratio(self, setting: Setting, source: str) -> float | None:
        """Relate a published figure to the source's own baseline, if it has both."""
        figure = setting.published.get(source)
        base = self.baseline.published.get(source)
        return figure / base if figure and base else None

    def scaled_resolution(self, scale: float) -> int:
        """Return the height and width of images at a fraction of the published size."""
        steps = round(self.resolution * scale / RESOLUTION_STEP)
        return max(LEAST_RESOLUTION, steps * RESOLUTION_STEP)
