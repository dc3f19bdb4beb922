"""Networks for small images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

NetworkMaker = Callable[[int, int, int], nn.Module]
"""Makes a network from the number of input channels, the image size and the number of classes."""


def small(channels: int, size: int, classes: int) -> nn.Module:
    """Three convolutions, the first two with stride 2: trains at thousands of images/s on a core."""
    width = 16 if channels == 1 else 32
    after = -(-size // 4)
    return nn.Sequential(
        *_convolution(channels, width, kernel=5, stride=2),
        *_convolution(width, 2 * width, stride=2),
        *_convolution(2 * width, 4 * width),
        nn.Flatten(),
        nn.Linear(4 * width * after * after, classes),
    )


def resnet6(channels: int, size: int, classes: int) -> nn.Module:
    """A residual network that a core trains in some 20 ms a step: 5 × 5 stem with stride 2, two blocks."""
    return nn.Sequential(
        *_convolution(channels, 16, kernel=5, stride=2),
        _Residual(16, 32),
        _Residual(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def resnet32(channels: int, size: int, classes: int) -> nn.Module:
    """ResNet-32 for CIFAR, of 0.46 million parameters: He et al., arXiv 1512.03385, section 4.2."""
    blocks: list[nn.Module] = []
    width = 16
    for planes in (16, 32, 64):
        for _ in range(5):
            blocks.append(_Residual(width, planes))
            width = planes
    return nn.Sequential(
        *_convolution(channels, 16),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )


class _Residual(nn.Module):
    """Two convolutions beside a shortcut without parameters ("option A" of the paper)."""

    def __init__(self, width: int, planes: int) -> None:
        super().__init__()
        self._stride = planes // width
        self._more = planes - width
        self.first = nn.Sequential(*_convolution(width, planes, stride=self._stride))
        convolution, norm, _ = _convolution(planes, planes)
        self.second = nn.Sequential(convolution, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (B, width, H, W) to (B, planes, H / stride, W / stride)."""
        shortcut = x[:, :, :: self._stride, :: self._stride]
        shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self._more))
        return F.relu(self.second(self.first(x)) + shortcut)


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
