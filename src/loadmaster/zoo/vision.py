"""Vision models of our own: ResNet-50 and VGG-16, as their papers give them.

He et al., Deep residual learning (CVPR 2016), table 1, 50 layers, the stride in the 3x3 convolution.
Simonyan and Zisserman, Very deep convolutional networks (ICLR 2015), configuration D.
"""

from collections.abc import Sequence

import torch
from torch import nn

Pair = int | tuple[int, int]


class ConvNorm(nn.Sequential):
    """Convolution, batch norm and, unless it ends a residual branch, a rectifier."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Pair, *, stride: int = 1, padding: Pair = 0, act: bool = True
    ) -> None:
        conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        norm = nn.BatchNorm2d(outputs)
        super().__init__(conv, norm, nn.ReLU(inplace=True)) if act else super().__init__(conv, norm)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 and the identity (or a projection) around them."""

    def __init__(self, inputs: int, width: int, *, stride: int, expansion: int = 4) -> None:
        super().__init__()
        outputs = width * expansion
        self.branch = nn.Sequential(
            ConvNorm(inputs, width, 1),
            ConvNorm(width, width, 3, stride=stride, padding=1),
            ConvNorm(width, outputs, 1, act=False),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride=stride, act=False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both ways, added."""
        y = self.branch(x)
        y += self.shortcut(x)
        return self.act(y)


class ResNet(nn.Module):
    """A stem, stages of bottlenecks, and a classifier."""

    def __init__(
        self, depths: Sequence[int] = (3, 4, 6, 3), *, width: int = 64, num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, width, 7, stride=2, padding=3), nn.MaxPool2d(3, stride=2, padding=1)
        )
        stages, inputs = [], width
        for at, depth in enumerate(depths):
            inner = width * 2**at
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(inputs, inner, stride=2 if at and block == 0 else 1))
                inputs = 4 * inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        y = self.pool(self.stages(self.stem(x)))
        return self.classifier(torch.flatten(y, 1))


class Vgg(nn.Module):
    """Stages of 3x3 convolutions with a pool after each, and three linear layers."""

    def __init__(
        self,
        depths: Sequence[int] = (2, 2, 3, 3, 3),
        *,
        width: int = 64,
        hidden: int = 4096,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inputs = 3
        for at, depth in enumerate(depths):
            outputs = width * min(2**at, 8)
            for _ in range(depth):
                parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            parts.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*parts)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * 49, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))
