"""Convolutional networks as people write them: with no regard to pipelines or to tracing."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels, width, stride=1):
        super().__init__()
        out = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """By default ResNet-50 (arXiv 1512.03385), with the stride in the 3×3 convolutions."""

    def __init__(self, depths=(3, 4, 6, 3), width=64, num_classes=1000):
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        for k, depth in enumerate(depths):
            setattr(self, f'layer{k + 1}', self._stage(depth, width << k, 1 if k == 0 else 2))
        self.stages = len(depths)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.inplanes, num_classes)

    def _stage(self, depth, width, stride):
        blocks = []
        for k in range(depth):
            blocks.append(Bottleneck(self.inplanes, width, stride if k == 0 else 1))
            self.inplanes = width * Bottleneck.expansion
        return nn.Sequential(*blocks)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for k in range(self.stages):
            x = getattr(self, f'layer{k + 1}')(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


def divisible(value, by=8):
    """Round to a multiple, and not down by more than a tenth."""
    rounded = max(by, int(value + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * value else rounded


class ConvNormActivation(nn.Sequential):
    def __init__(self, channels, out, kernel, stride=1, groups=1, activation=nn.Hardswish):
        layers = [
            nn.Conv2d(channels, out, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out, eps=0.001, momentum=0.01),
        ]
        if activation is not None:
            layers.append(activation(inplace=True))
        super().__init__(*layers)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels):
        super().__init__()
        squeezed = divisible(channels // 4)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = F.relu(self.fc1(scale), inplace=True)
        scale = F.hardsigmoid(self.fc2(scale), inplace=True)
        return scale * x


class InvertedResidual(nn.Module):
    def __init__(self, channels, kernel, expanded, out, excite, activation, stride):
        super().__init__()
        self.use_res_connect = stride == 1 and channels == out
        layers = []
        if expanded != channels:
            layers.append(ConvNormActivation(channels, expanded, 1, activation=activation))
        layers.append(ConvNormActivation(expanded, expanded, kernel, stride, expanded, activation))
        if excite:
            layers.append(SqueezeExcitation(expanded))
        layers.append(ConvNormActivation(expanded, out, 1, activation=None))
        self.block = nn.Sequential(*layers)

    def forward(self, x):
        result = self.block(x)
        if self.use_res_connect:
            result += x
        return result


#: Kernel, expanded channels, channels, squeeze and excitation, activation, stride.
LARGE = [
    (3, 16, 16, False, 'RE', 1),
    (3, 64, 24, False, 'RE', 2),
    (3, 72, 24, False, 'RE', 1),
    (5, 72, 40, True, 'RE', 2),
    (5, 120, 40, True, 'RE', 1),
    (5, 120, 40, True, 'RE', 1),
    (3, 240, 80, False, 'HS', 2),
    (3, 200, 80, False, 'HS', 1),
    (3, 184, 80, False, 'HS', 1),
    (3, 184, 80, False, 'HS', 1),
    (3, 480, 112, True, 'HS', 1),
    (3, 672, 112, True, 'HS', 1),
    (5, 672, 160, True, 'HS', 2),
    (5, 960, 160, True, 'HS', 1),
    (5, 960, 160, True, 'HS', 1),
]


class MobileNetV3(nn.Module):
    """By default MobileNetV3-Large (arXiv 1905.02244)."""

    def __init__(self, rows=LARGE, width=1.0, hidden=1280, num_classes=1000, dropout=0.2):
        super().__init__()
        channels = divisible(16 * width)
        layers = [ConvNormActivation(3, channels, 3, 2)]
        for kernel, expanded, out, excite, activation, stride in rows:
            expanded, out = divisible(expanded * width), divisible(out * width)
            activation = nn.Hardswish if activation == 'HS' else nn.ReLU
            layers.append(
                InvertedResidual(channels, kernel, expanded, out, excite, activation, stride)
            )
            channels = out
        layers.append(ConvNormActivation(channels, 6 * channels, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, hidden),
            nn.Hardswish(inplace=True),
            nn.Dropout(p=dropout, inplace=True),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


class DenseLayer(nn.Module):
    def __init__(self, channels, growth, bn_size, drop_rate):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, bn_size * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bn_size * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bn_size * growth, growth, 3, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def forward(self, input):
        features = [input] if isinstance(input, Tensor) else input
        squeezed = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        new = self.conv2(self.relu2(self.norm2(squeezed)))
        if self.drop_rate > 0:
            new = F.dropout(new, p=self.drop_rate, training=self.training)
        return new


class DenseBlock(nn.ModuleDict):
    def __init__(self, depth, channels, growth, bn_size, drop_rate):
        super().__init__()
        for k in range(depth):
            self[f'denselayer{k + 1}'] = DenseLayer(
                channels + k * growth, growth, bn_size, drop_rate
            )

    def forward(self, x):
        features = [x]
        for name, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """By default DenseNet-121 (arXiv 1608.06993)."""

    def __init__(
        self, depths=(6, 12, 24, 16), growth=32, bn_size=4, num_classes=1000, dropout=0.0
    ):
        super().__init__()
        channels = 2 * growth
        self.features = nn.Sequential(
            OrderedDict(
                [
                    ('conv0', nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)),
                    ('norm0', nn.BatchNorm2d(channels)),
                    ('relu0', nn.ReLU(inplace=True)),
                    ('pool0', nn.MaxPool2d(3, stride=2, padding=1)),
                ]
            )
        )
        for k, depth in enumerate(depths):
            self.features.add_module(
                f'denseblock{k + 1}', DenseBlock(depth, channels, growth, bn_size, dropout)
            )
            channels += depth * growth
            if k != len(depths) - 1:
                self.features.add_module(
                    f'transition{k + 1}',
                    nn.Sequential(
                        OrderedDict(
                            [
                                ('norm', nn.BatchNorm2d(channels)),
                                ('relu', nn.ReLU(inplace=True)),
                                ('conv', nn.Conv2d(channels, channels // 2, 1, bias=False)),
                                ('pool', nn.AvgPool2d(2, stride=2)),
                            ]
                        )
                    ),
                )
                channels //= 2
        self.features.add_module('norm5', nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x):
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


class UNet(nn.Module):
    """U-Net (arXiv 1505.04597) with padding, batch normalization, and bilinear upsampling."""

    def __init__(self, depth=4, width=64, channels=3, num_classes=2):
        super().__init__()
        self.down, self.reduce, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for k in range(depth):
            self.down.append(self.twice(width << (k - 1) if k else channels, width << k))
        self.middle = self.twice(width << (depth - 1), width << depth)
        for k in reversed(range(depth)):
            self.reduce.append(nn.Conv2d(width << (k + 1), width << k, 1))
            self.up.append(self.twice(width << (k + 1), width << k))
        self.pool = nn.MaxPool2d(2)
        self.out = nn.Conv2d(width, num_classes, 1)

    @staticmethod
    def twice(channels, out):
        layers = []
        for k in (channels, out):
            layers += [
                nn.Conv2d(k, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for reduce, block in zip(self.reduce, self.up):
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode='bilinear', align_corners=False)
            x = torch.cat([skip, reduce(x)], dim=1)
            x = block(x)
        return self.out(x)
