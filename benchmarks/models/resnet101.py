"""ResNet-101 as 370 layers in a row (He et al., "Deep Residual Learning", 2015).

A bottleneck is eleven layers; its shortcut is a skip::

    stash ─▶ conv 1×1, bn, ReLU ─▶ conv 3×3, bn, ReLU ─▶ conv 1×1, bn ─▶ pop, add ─▶ ReLU
      └────────────────────────── (conv 1×1, bn) ────────────────────────────┘

====================  ==========================================
head                  conv 7×7/2, bn, ReLU, max pool 3×3/2
stages                3, 4, 23, 3 bottlenecks of 64 … 512 planes
tail                  global average pool, flatten, linear
parameters            44,549,160 with 1,000 classes
====================  ==========================================
"""

from torch import Tensor, nn

from torchgpipe.skip import Namespace, SkipGenerator, Skippable, pop, skippable, stash

STAGES = (3, 4, 23, 3)
EXPANSION = 4
WIDTH = 64


@skippable(stash=['identity'])
class Identity(Skippable):
    """Stash the input of a bottleneck."""

    def forward(self, x: Tensor) -> SkipGenerator:
        yield stash('identity', x)
        return x


@skippable(pop=['identity'])
class Residual(Skippable):
    """Add the input of a bottleneck, brought to the shape of its output."""

    def __init__(self, downsample: nn.Module | None) -> None:
        super().__init__()
        self.downsample = downsample

    def forward(self, x: Tensor) -> SkipGenerator:
        identity = yield pop('identity')
        return x + (identity if self.downsample is None else self.downsample(identity))


def resnet101(num_classes: int = 1000) -> nn.Sequential:
    """Make a ResNet-101 for images of shape ``(batch, 3, height, width)``.

    Args:
        num_classes: Size of the output, ``(batch, num_classes)``.

    Returns:
        370 layers; with 1,000 classes 44,549,160 parameters. Stride 2 is on the 3×3 convolution.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, WIDTH, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = WIDTH
    for stage, blocks in enumerate(STAGES):
        planes = WIDTH << stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers += _bottleneck(channels, planes, stride)
            channels = planes * EXPANSION
    layers += [nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(channels, num_classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode='fan_out', nonlinearity='relu')
    return model


def _bottleneck(channels: int, planes: int, stride: int) -> list[nn.Module]:
    out = planes * EXPANSION
    downsample = None
    if stride != 1 or channels != out:
        downsample = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )
    block = Namespace()
    return [
        Identity().isolate(block),
        nn.Conv2d(channels, planes, 1, bias=False),
        nn.BatchNorm2d(planes),
        nn.ReLU(),
        nn.Conv2d(planes, planes, 3, stride, 1, bias=False),
        nn.BatchNorm2d(planes),
        nn.ReLU(),
        nn.Conv2d(planes, out, 1, bias=False),
        nn.BatchNorm2d(out),
        Residual(downsample).isolate(block),
        nn.ReLU(),
    ]
