"""U-Net in a row, with a skip per level (Ronneberger et al., "U-Net", 2015).

::

    level 0   stack, stash ─────────────────────────────────▶ pop, stack, segment
    level 1     pool, stack, stash ───────────────────▶ pop, stack, upsample
      …                           …               …
    bottom                         pool, stack, upsample

A stack is ``B`` blocks of conv 3×3, 2-D dropout, instance norm, leaky ReLU. With depth 5 the model
has 44 B + 21 layers.

==============  ==========  ==============
(B, C)              layers      parameters
==============  ==========  ==============
(5, 64)                241     232,687,328
(6, 72)                285     362,157,516
(11, 128)              505   2,213,834,176
(24, 128)            1,077   4,993,859,008
(24, 160)            1,077   7,802,903,600
(48, 160)            2,133  15,822,206,000
==============  ==========  ==============
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.skip import Namespace, SkipGenerator, Skippable, pop, skippable, stash


@skippable(stash=['skip'])
class Stash(Skippable):
    """Stash the output of an encoder."""

    def forward(self, x: Tensor) -> SkipGenerator:
        yield stash('skip', x)
        return x


@skippable(pop=['skip'])
class PopAndConcatenate(Skippable):
    """Concatenate it with the input from below, which is padded to its size."""

    def forward(self, x: Tensor) -> SkipGenerator:
        skip: Tensor = yield pop('skip')
        height, width = (a - b for a, b in zip(skip.shape[-2:], x.shape[-2:]))
        x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return torch.cat((x, skip), dim=1)


def unet(
    depth: int = 5,
    num_convs: int = 5,
    base_channels: int = 64,
    input_channels: int = 3,
    output_channels: int = 1,
) -> nn.Sequential:
    """Make a U-Net for images of shape ``(batch, input_channels, height, width)``.

    Args:
        depth: Number of levels above the bottom; height and width should be multiples of
            ``2 ** depth``, or they are padded.
        num_convs: ``B``, the number of blocks in a stack.
        base_channels: ``C``, the number of channels of the outermost encoder.
        input_channels: Channels of the images.
        output_channels: Channels of the output, ``(batch, output_channels, height, width)``.

    Returns:
        The model, as in the table of :mod:`benchmarks.models.unet`.
    """
    c = base_channels
    levels = [Namespace() for _ in range(depth)]
    layers: list[nn.Module] = []
    for i, level in enumerate(levels):
        channels = input_channels if i == 0 else c << (i - 1)
        layers += [
            *_stack(channels, c << i, c << i, num_convs),
            Stash().isolate(level),
            nn.MaxPool2d(2),
        ]
    bottom = c << (depth - 1)
    layers += _stack(bottom, 2 * bottom, bottom, num_convs)
    for i, level in reversed([*enumerate(levels)]):
        half = (c << i) // 2
        layers += [
            nn.Upsample(scale_factor=2),
            PopAndConcatenate().isolate(level),
            *_stack(c << (i + 1), half, half, num_convs),
        ]
    layers.append(nn.Conv2d(c // 2, output_channels, 1, bias=False))
    return nn.Sequential(*layers)


def _stack(channels: int, mid: int, out: int, num_convs: int) -> list[nn.Module]:
    widths = [channels, *[mid] * (num_convs - 1), out]
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:]):
        layers += [
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.Dropout2d(0.1),
            nn.InstanceNorm2d(b),
            nn.LeakyReLU(0.01),
        ]
    return layers
