"""Optimizer and learning-rate schedule."""

import math

import torch
from torch import nn

from .config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The chosen optimizer; biases and normalisation (one dimension or none) are not decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.learning_rate)
    return torch.optim.SGD(
        groups,
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
    )


def learning_rate_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 0).

    A function of the step alone: nothing to save, nothing that counts per process.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
