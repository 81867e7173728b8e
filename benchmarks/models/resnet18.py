"""ResNet-18 without its last layer (He et al., "Deep Residual Learning", 2015).

====================  ==========================================
head                  conv 7×7/2, bn, ReLU, max pool 3×3/2
stages                2 basic blocks each, of 64, 128, 256, 512 channels
tail                  global average pool, flatten
parameters            11,176,512; 11,689,512 with 1,000 classes
====================  ==========================================
"""

from torch import Tensor, nn

#: The features of an image.
FEATURES = 512


class BasicBlock(nn.Module):
    """Two convolutions, and their input added."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.layers(x) + self.shortcut(x))
        return y


def resnet18() -> nn.Sequential:
    """Make the layers, from images (batch, 3, height, width) to features (batch, 512)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage in range(4):
        out = 64 << stage
        layers += [BasicBlock(channels, out, 1 if stage == 0 else 2), BasicBlock(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten())
