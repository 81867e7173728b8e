"""AmoebaNet-D (Real et al., "Regularized Evolution", arXiv 1802.01548), a cell per layer.

Each cell takes the last output and the one before it, as a tuple, and gives a tuple alike::

    stem ─▶ 2 reductions ─▶ L/3 normal ─▶ reduction ─▶ L/3 normal ─▶ reduction ─▶ L/3 normal
                                             ─▶ average pool (7×7 of 224²), flatten, linear

Channels start at D/4 and double with each reduction. A cell combines *states*: 0 and 1 are
its inputs, brought to its number of channels, and each further one is the sum of two operations on
earlier ones. A normal cell concatenates states 0, 3, 4, 6, as the reference code in TensorFlow
does, whose parameter counts the GPipe paper has; the text of Real et al. says 4, 5, 6.

==========  ========  ===============
(L, D)        layers      parameters
==========  ========  ===============
(18, 208)         24     81,505,540
(18, 256)         24    122,470,120
(18, 416)         24    319,024,120
(18, 544)         24    542,734,840
(36, 544)         42  1,055,832,376
(72, 512)         78  1,844,858,344
==========  ========  ===============

The first README of torchgpipe had other counts, from 89,745,302 for (6, 208) on: of an earlier
builder, which was wrong.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

States = tuple[Tensor, Tensor]
Operation = Callable[[int, int], nn.Module]


def _relu_conv_bn(
    a: int, b: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(a, b, kernel, stride, padding, bias=False), nn.BatchNorm2d(b)
    )


class FactorizedReduction(nn.Module):
    """Halve an image by two 1×1 convolutions, the second of the image shifted by a pixel."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(a, b // 2, 1, stride=2, bias=False)
        self.conv2 = nn.Conv2d(a, b // 2, 1, stride=2, bias=False)
        self.shift = nn.ZeroPad2d((0, 1, 0, 1))
        self.bn = nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        shifted = self.shift(x)[:, :, 1:, 1:]
        return self.bn(torch.cat([self.conv1(x), self.conv2(shifted)], dim=1))


def _none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def _avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _relu_conv_bn(channels, channels, stride=(stride, stride))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    quarter = channels // 4
    return nn.Sequential(
        _relu_conv_bn(channels, quarter),
        _relu_conv_bn(quarter, quarter, (3, 3), (stride, stride)),
        _relu_conv_bn(quarter, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    quarter = channels // 4
    return nn.Sequential(
        _relu_conv_bn(channels, quarter),
        _relu_conv_bn(quarter, quarter, (1, 7), (1, stride)),
        _relu_conv_bn(quarter, quarter, (7, 1), (stride, 1)),
        _relu_conv_bn(quarter, channels),
    )


# (earlier state, operation), two for each of the states 2 to 6.
NORMAL: list[tuple[int, Operation]] = [
    (1, _conv_1x1),
    (1, _avg_pool_3x3),
    (1, _none),
    (0, _conv_1x7_7x1),
    (0, _conv_1x1),
    (0, _conv_1x7_7x1),
    (2, _avg_pool_3x3),
    (2, _none),
    (1, _avg_pool_3x3),
    (5, _conv_1x1),
]
NORMAL_OUTPUT = [0, 3, 4, 6]

REDUCTION: list[tuple[int, Operation]] = [
    (0, _max_pool_2x2),
    (0, _avg_pool_3x3),
    (2, _none),
    (1, _conv_3x3),
    (2, _conv_1x7_7x1),
    (2, _avg_pool_3x3),
    (3, _none),
    (1, _max_pool_2x2),
    (2, _avg_pool_3x3),
    (3, _conv_1x1),
]
REDUCTION_OUTPUT = [4, 5, 6]


class Stem(nn.Module):
    """Images to the first pair of states."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> States:
        x = self.bn(self.conv(self.relu(x)))
        return x, x


class Cell(nn.Module):
    """A normal cell or a reduction.

    Args:
        last: Channels of the last output.
        before: Channels of the output before.
        channels: Channels of each state.
        reduction: Whether it halves the image.
        after_reduction: Whether the last cell did.
    """

    def __init__(
        self, last: int, before: int, channels: int, reduction: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        self.last = _relu_conv_bn(last, channels)
        self.before: nn.Module = nn.Identity()
        if after_reduction:
            self.before = FactorizedReduction(before, channels)
        elif before != channels:
            self.before = _relu_conv_bn(before, channels)
        operations, self.output = (
            (REDUCTION, REDUCTION_OUTPUT) if reduction else (NORMAL, NORMAL_OUTPUT)
        )
        self.indices = [index for index, _ in operations]
        self.operations = nn.ModuleList(
            [make(channels, 2 if reduction and index < 2 else 1) for index, make in operations]
        )

    def forward(self, input: States) -> States:
        last, before = input
        states = [self.last(last), self.before(before)]
        pairs = list(zip(self.indices, self.operations))
        for (a, one), (b, other) in zip(pairs[::2], pairs[1::2]):
            states.append(one(states[a]) + other(states[b]))
        return torch.cat([states[k] for k in self.output], dim=1), last


class Classifier(nn.Module):
    """The last output to logits."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)  # 7×7 for images of 224²
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, input: States) -> Tensor:
        return self.fc(self.flatten(self.pool(input[0])))


def amoebanetd(
    num_classes: int = 1000, num_layers: int = 18, num_filters: int = 208
) -> nn.Sequential:
    """Make an AmoebaNet-D (L, D) for images of shape ``(batch, 3, 224, 224)``.

    Args:
        num_classes: Size of the output, ``(batch, num_classes)``.
        num_layers: ``L``, the number of normal cells, divisible by 3.
        num_filters: ``D``, the channels of the first normal cells, divisible by 4.

    Returns:
        L + 6 layers, as in the table of :mod:`benchmarks.models.amoebanetd`.

    Raises:
        ValueError: ``num_layers`` is not divisible by 3, or ``num_filters`` not by 16.
    """
    if num_layers % 3 or num_filters % 16:
        raise ValueError(
            'num_layers must be divisible by 3 and num_filters by 16, but they are '
            f'{num_layers} and {num_filters}'
        )
    channels = num_filters // 4
    layers: list[nn.Module] = [Stem(channels)]
    last = before = channels
    after_reduction = False
    normal = [False] * (num_layers // 3)
    for reduction in [True, True, *normal, True, *normal, True, *normal]:
        channels *= 2 if reduction else 1
        layers.append(Cell(last, before, channels, reduction, after_reduction))
        width = len(REDUCTION_OUTPUT if reduction else NORMAL_OUTPUT)
        last, before, after_reduction = channels * width, last, reduction
    layers.append(Classifier(last, num_classes))
    return nn.Sequential(*layers)
