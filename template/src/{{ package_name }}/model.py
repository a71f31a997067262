"""The model: yours to replace.

The training loop asks for three things: a `ModelConfig` whose fields become keys under `model:` in
`configs/*.yaml`, `build_model`, and `METRIC`. The model's `forward` takes a batch as keyword
arguments and returns the loss to minimise and one value per sample for each metric.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Datasets

METRIC = "accuracy"  # decides which checkpoint is the best one
METRIC_MODE = "max"  # or "min"


@dataclass
class ModelConfig:
    """Keys under `model:` in `configs/*.yaml`."""

    width: int = field(default=64, metadata={"help": "channels of the first layer"})
    dropout: float = field(default=0.0, metadata={"help": "before the classifier"})
    label_smoothing: float = field(default=0.0, metadata={"help": "of the training loss"})


class ConvBlock(nn.Sequential):
    """3x3 convolution, batch normalisation, ReLU, and pooling that halves the image if asked."""

    def __init__(self, inputs: int, outputs: int, pool: bool = False) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2) if pool else nn.Identity(),
        )


class Residual(nn.Module):
    """Two blocks around a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvBlock(channels, channels), ConvBlock(channels, channels))

    def forward(self, features: Tensor) -> Tensor:
        return features + self.body(features)


class ResNet9(nn.Module):
    """Small residual network after David Page's DAWNBench entry "How to train your ResNet".

    Takes images of 8x8 pixels and more: uint8 `(B, C, H, W)`, 0 to 255, and int64 labels `(B,)`.
    """

    # FSDP shards these classes one by one, and activation checkpointing computes them again.
    _no_split_modules: ClassVar = ["ConvBlock"]

    mean: Tensor
    std: Tensor

    def __init__(self, config: ModelConfig, datasets: Datasets) -> None:
        super().__init__()
        width = config.width
        self.label_smoothing = config.label_smoothing
        self.register_buffer("mean", torch.tensor(datasets.mean).view(1, -1, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(datasets.std).view(1, -1, 1, 1) * 255)
        self.features = nn.Sequential(
            ConvBlock(datasets.channels, width),
            ConvBlock(width, 2 * width, pool=True),
            Residual(2 * width),
            ConvBlock(2 * width, 4 * width, pool=True),
            ConvBlock(4 * width, 8 * width, pool=True),
            Residual(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(8 * width, datasets.num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        """Class scores `(B, classes)`; with labels also the loss and per-sample metrics `(B,)`."""
        # Normalising here keeps batches small on their way to the device (one byte a pixel), gives
        # every backend the dtype of its weights, and lets an exported model take plain images.
        pixels = (images.to(self.mean.dtype) - self.mean) / self.std
        logits = self.classifier(self.dropout(self.features(pixels)))
        if labels is None:
            return {"logits": logits}
        scores = logits.float()
        losses = F.cross_entropy(scores, labels, reduction="none")
        loss = losses.mean()
        if self.training and self.label_smoothing:
            loss = F.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)
        accuracy = (scores.argmax(dim=1) == labels).float()
        return {"loss": loss, "metrics": {"loss": losses.detach(), METRIC: accuracy}}


def build_model(config: ModelConfig, datasets: Datasets) -> nn.Module:
    """The model for these data, on the CPU, with fresh weights drawn from torch's generator."""
    return ResNet9(config, datasets)
