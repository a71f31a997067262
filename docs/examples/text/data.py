"""A text, cut into windows of bytes."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .errors import UserError

Batch = dict[str, Tensor]
UNIT = "sequences"  # what is counted in the log


@dataclass
class DataConfig:
    """Keys under `data:` in `configs/*.yaml`."""

    file: str = field(default=argparse.__file__, metadata={"help": "any text"})
    length: int = field(default=128, metadata={"help": "bytes of a sequence"})


@dataclass
class Datasets:
    """What a run learns from and is judged by."""

    train: Dataset[Any]
    eval: Dataset[Any]
    length: int
    vocabulary: int = 256
    augment: Callable[[Batch], Batch] | None = None
    collate: Callable[[Any], Batch] | None = None


class Windows(Dataset[Batch]):
    """Overlapping windows of a text; the targets are the tokens moved by one."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length
        self.stride = max(length // 4, 1)

    def __len__(self) -> int:
        return (len(self.text) - self.length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> Batch:
        start = index * self.stride
        window = self.text[start : start + self.length + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def build_datasets(config: DataConfig) -> Datasets:
    """The first nine tenths to learn from, the rest to be judged by.

    Raises: UserError when the text is missing or too short.
    """
    path = Path(config.file)
    if not path.is_file():
        raise UserError(f"{path} is missing: name a text with data.file")
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    if len(text) - cut <= config.length:
        raise UserError(f"{path} is too short for sequences of {config.length} bytes")
    return Datasets(
        train=Windows(text[:cut], config.length),
        eval=Windows(text[cut:], config.length),
        length=config.length,
    )
