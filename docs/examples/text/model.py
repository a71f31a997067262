"""A small GPT that reads bytes."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Datasets

METRIC = "accuracy"  # of the next byte; decides which checkpoint is the best one
METRIC_MODE = "max"


@dataclass
class ModelConfig:
    """Keys under `model:` in `configs/*.yaml`."""

    width: int = field(default=256, metadata={"help": "size of the embedding"})
    layers: int = field(default=4, metadata={"help": "transformer blocks"})
    heads: int = field(default=4, metadata={"help": "attention heads"})
    dropout: float = field(default=0.1, metadata={"help": "in each block"})


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised before and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        qkv = self.qkv(self.norm_attention(stream)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        stream = stream + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return stream + self.mlp(self.norm_mlp(stream))


class GPT(nn.Module):
    """Predicts each byte from those before it. Embedding and output share their weights."""

    _no_split_modules: ClassVar = ["Block"]

    def __init__(self, config: ModelConfig, datasets: Datasets) -> None:
        super().__init__()
        self.embed = nn.Embedding(datasets.vocabulary, config.width)
        self.position = nn.Embedding(datasets.length, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, datasets.vocabulary, bias=False)
        self.output.weight = self.embed.weight
        for parameter in (self.embed.weight, self.position.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        """Scores `(B, T, vocabulary)` of int64 tokens `(B, T)`; with targets loss and metrics."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.embed(tokens) + self.position(positions)
        logits = self.output(self.norm(self.blocks(stream)))
        if targets is None:
            return {"logits": logits}
        scores = logits.float().transpose(1, 2)
        losses = F.cross_entropy(scores, targets, reduction="none").mean(dim=1)
        accuracy = (scores.argmax(dim=1) == targets).float().mean(dim=1)
        return {"loss": losses.mean(), "metrics": {"loss": losses.detach(), METRIC: accuracy}}


def build_model(config: ModelConfig, datasets: Datasets) -> nn.Module:
    """The model for these data, on the CPU, with fresh weights drawn from torch's generator."""
    return GPT(config, datasets)
