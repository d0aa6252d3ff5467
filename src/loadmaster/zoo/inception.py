"""Inception-V3 without its auxiliary head.

Szegedy et al., Rethinking the inception architecture for computer vision (CVPR 2016).
"""

import torch
from torch import nn

from loadmaster.zoo.vision import ConvNorm


class Branches(nn.Module):
    """Ways through a block, side by side, joined along the channels."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every way's output, joined."""
        return torch.cat([way(x) for way in self.ways], 1)


def _pool_branch(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNorm(inputs, outputs, 1))


def _figure_5(inputs: int, pool: int) -> nn.Module:
    """35 x 35: the 5x5 convolution as two of 3x3."""
    return Branches(
        ConvNorm(inputs, 64, 1),
        nn.Sequential(ConvNorm(inputs, 48, 1), ConvNorm(48, 64, 5, padding=2)),
        nn.Sequential(
            ConvNorm(inputs, 64, 1), ConvNorm(64, 96, 3, padding=1), ConvNorm(96, 96, 3, padding=1)
        ),
        _pool_branch(inputs, pool),
    )


def _reduce_to_17(inputs: int) -> nn.Module:
    return Branches(
        ConvNorm(inputs, 384, 3, stride=2),
        nn.Sequential(ConvNorm(inputs, 64, 1), ConvNorm(64, 96, 3, padding=1), ConvNorm(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, stride=2),
    )


def _row_conv(inputs: int, outputs: int) -> ConvNorm:
    return ConvNorm(inputs, outputs, (1, 7), padding=(0, 3))


def _column_conv(inputs: int, outputs: int) -> ConvNorm:
    return ConvNorm(inputs, outputs, (7, 1), padding=(3, 0))


def _figure_6(width: int) -> nn.Module:
    """17 x 17: 7x7 convolutions as a row and a column."""
    return Branches(
        ConvNorm(768, 192, 1),
        nn.Sequential(ConvNorm(768, width, 1), _row_conv(width, width), _column_conv(width, 192)),
        nn.Sequential(
            ConvNorm(768, width, 1),
            _column_conv(width, width),
            _row_conv(width, width),
            _column_conv(width, width),
            _row_conv(width, 192),
        ),
        _pool_branch(768, 192),
    )


def _reduce_to_8() -> nn.Module:
    return Branches(
        nn.Sequential(ConvNorm(768, 192, 1), ConvNorm(192, 320, 3, stride=2)),
        nn.Sequential(
            ConvNorm(768, 192, 1),
            _row_conv(192, 192),
            _column_conv(192, 192),
            ConvNorm(192, 192, 3, stride=2),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _fork(inputs: int) -> nn.Module:
    return Branches(
        ConvNorm(inputs, 384, (1, 3), padding=(0, 1)), ConvNorm(inputs, 384, (3, 1), padding=(1, 0))
    )


def _figure_7(inputs: int) -> nn.Module:
    """8 x 8: filter banks made wider."""
    return Branches(
        ConvNorm(inputs, 320, 1),
        nn.Sequential(ConvNorm(inputs, 384, 1), _fork(384)),
        nn.Sequential(ConvNorm(inputs, 448, 1), ConvNorm(448, 384, 3, padding=1), _fork(384)),
        _pool_branch(inputs, 192),
    )


class InceptionV3(nn.Module):
    """For images of 299 x 299."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, 32, 3, stride=2),
            ConvNorm(32, 32, 3),
            ConvNorm(32, 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            ConvNorm(64, 80, 1),
            ConvNorm(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.blocks = nn.Sequential(
            _figure_5(192, 32),
            _figure_5(256, 64),
            _figure_5(288, 64),
            _reduce_to_17(288),
            *(_figure_6(width) for width in (128, 160, 160, 192)),
            _reduce_to_8(),
            _figure_7(1280),
            _figure_7(2048),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout()
        self.classifier = nn.Linear(2048, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        y = self.pool(self.blocks(self.stem(x)))
        return self.classifier(self.dropout(torch.flatten(y, 1)))
