"""The data: yours to replace.

The training loop asks for a `DataConfig` whose fields become keys under `data:` in
`configs/*.yaml`, and for `build_datasets`. Loading in batches, order, sharding over processes and
resuming are the loop's business (see loader.py).
"""

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from .errors import UserError

Batch = dict[str, Tensor]
UNIT = "images"  # what is counted in the log


@dataclass
class DataConfig:
    """Keys under `data:` in `configs/*.yaml`."""

    name: str = field(
        default="digits", metadata={"help": "digits, fashion-mnist, cifar10 or synthetic"}
    )
    dir: str | None = field(
        default=None, metadata={"help": "folder of the files; default: $DATA_DIR or ./data"}
    )
    augment: bool = field(default=True, metadata={"help": "random shifts, flips where they fit"})
    num_samples: int = field(default=4096, metadata={"help": "training images of synthetic"})


@dataclass
class Datasets:
    """What a run learns from and is judged by."""

    train: Dataset[Any]
    eval: Dataset[Any]
    channels: int
    num_classes: int
    mean: Sequence[float]  # per channel, of pixels scaled to 0..1
    std: Sequence[float]
    # Changes a training batch on the device, in each forward pass. The loop seeds torch's
    # generator before each call, so draw from it and a resumed run repeats the same changes.
    augment: Callable[[Batch], Batch] | None = None
    # Makes a batch of samples; None takes torch's default.
    collate: Callable[[Any], Batch] | None = None


class ImageTensor(Dataset[Batch]):
    """Images held in memory and fetched by whole batches: uint8 `(N, C, H, W)`, labels `(N,)`."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"images": self.images[index], "labels": self.labels[index]}

    def __getitems__(self, indices: list[int]) -> Batch:
        """One gather for the whole batch, many times faster than one image at a time."""
        chosen = torch.as_tensor(indices)
        return {"images": self.images[chosen], "labels": self.labels[chosen]}


def build_datasets(config: DataConfig) -> Datasets:
    """Read the chosen data, downloading them first where that is possible.

    Raises: UserError for an unknown name or files that are missing and cannot be had.
    """
    if config.name not in BUILDERS:
        raise UserError(f"data.name is {config.name!r}: choose from {', '.join(BUILDERS)}")
    folder = Path(config.dir or os.environ.get("DATA_DIR") or "data")
    return BUILDERS[config.name](config, folder)


def digits(config: DataConfig, folder: Path) -> Datasets:
    """1,797 handwritten digits of 8x8 pixels that scikit-learn carries; every fifth is for tests.

    Source: E. Alpaydin and C. Kaynak, UCI Machine Learning Repository.
    """
    # The file alone: importing scikit-learn takes longer than all else before the first step.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.from_numpy(numpy.loadtxt(str(file), delimiter=","))  # 64 pixels and the label
    images = (table[:, :64] * (255 / 16)).round().to(torch.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].long()
    test = torch.arange(len(images)) % 5 == 0
    return Datasets(
        train=ImageTensor(images[~test], labels[~test]),
        eval=ImageTensor(images[test], labels[test]),
        channels=1,
        num_classes=10,
        mean=[0.305],
        std=[0.376],
        augment=random_crop(1) if config.augment else None,
        collate=_whole_batch,
    )


def fashion_mnist(config: DataConfig, folder: Path) -> Datasets:
    """60,000 images of clothes, 28x28 pixels; 10,000 for tests.

    Takes torchvision's own layout below `folder`, or the four gzipped files right in it.
    """
    from torchvision.datasets import FashionMNIST
    from torchvision.datasets.mnist import read_image_file, read_label_file

    parts: dict[str, ImageTensor]
    if all((folder / name).exists() for name, _ in FashionMNIST.resources):
        parts = {
            part: ImageTensor(
                _read_idx(folder / f"{stem}-images-idx3-ubyte.gz").unsqueeze(1),
                _read_idx(folder / f"{stem}-labels-idx1-ubyte.gz").long(),
            )
            for part, stem in (("train", "train"), ("eval", "t10k"))
        }
    else:
        _fetch(lambda: FashionMNIST(str(folder), download=True), "Fashion-MNIST", folder)
        raw = folder / "FashionMNIST" / "raw"
        parts = {
            part: ImageTensor(
                read_image_file(str(raw / f"{stem}-images-idx3-ubyte")).unsqueeze(1),
                read_label_file(str(raw / f"{stem}-labels-idx1-ubyte")),
            )
            for part, stem in (("train", "train"), ("eval", "t10k"))
        }
    return Datasets(
        train=parts["train"],
        eval=parts["eval"],
        channels=1,
        num_classes=10,
        mean=[0.2860],
        std=[0.3530],
        augment=_chain(random_crop(2), random_flip) if config.augment else None,
        collate=_whole_batch,
    )


def cifar10(config: DataConfig, folder: Path) -> Datasets:
    """50,000 colour photographs of ten kinds of things, 32x32 pixels; 10,000 for tests.

    Torchvision's own files, checked by its checksums.
    """
    from torchvision.datasets import CIFAR10

    def read(train: bool) -> ImageTensor:
        source = _fetch(lambda: CIFAR10(str(folder), train, download=True), "CIFAR-10", folder)
        images = torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous()
        return ImageTensor(images, torch.tensor(source.targets))

    return Datasets(
        train=read(True),
        eval=read(False),
        channels=3,
        num_classes=10,
        mean=[0.4914, 0.4822, 0.4465],
        std=[0.2470, 0.2435, 0.2616],
        augment=_chain(random_crop(4), random_flip) if config.augment else None,
        collate=_whole_batch,
    )


def synthetic(config: DataConfig, folder: Path) -> Datasets:
    """Noise around ten fixed patterns, 32x32 pixels in colour: for timing, needs no file."""
    if config.num_samples < 1:
        raise UserError(f"data.num_samples is {config.num_samples}: give 1 or more")
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 128, (10, 3, 32, 32), generator=generator)

    def draw(count: int) -> ImageTensor:
        labels = torch.arange(count) % 10
        noise = torch.randint(0, 128, (count, 3, 32, 32), generator=generator)
        return ImageTensor((patterns[labels] + noise).to(torch.uint8), labels)

    return Datasets(
        train=draw(config.num_samples),
        eval=draw(max(config.num_samples // 4, 1)),
        channels=3,
        num_classes=10,
        mean=[0.5] * 3,
        std=[0.2] * 3,
        augment=None,
        collate=_whole_batch,
    )


BUILDERS: dict[str, Callable[[DataConfig, Path], Datasets]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "synthetic": synthetic,
}


def random_crop(padding: int) -> Callable[[Batch], Batch]:
    """Shift each image by up to `padding` pixels; the border is reflected."""

    def crop(batch: Batch) -> Batch:
        images = batch["images"]
        count, channels, height, width = images.shape
        # Reflection is not implemented for bytes.
        padded = F.pad(images.float(), [padding] * 4, mode="reflect").to(images.dtype)
        shift = torch.randint(0, 2 * padding + 1, (2, count, 1), device=images.device)
        rows = shift[0] + torch.arange(height, device=images.device)
        columns = shift[1] + torch.arange(width, device=images.device)
        sample = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
        cropped = padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
        return {**batch, "images": cropped}

    return crop


def random_flip(batch: Batch) -> Batch:
    """Mirror half of the images."""
    images = batch["images"]
    mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return {**batch, "images": torch.where(mirrored, images.flip(3), images)}


def _chain(*steps: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
    def augment(batch: Batch) -> Batch:
        for step in steps:
            batch = step(batch)
        return batch

    return augment


def _whole_batch(batch: Batch) -> Batch:
    """`__getitems__` made the batch already."""
    return batch


def _read_idx(path: Path) -> Tensor:
    """Bytes of a gzipped idx file, in the shape that its head gives.

    Distributions pack the files anew, so what is checked is gzip's own checksum of the content.
    Raises: UserError when the file is damaged.
    """
    try:
        content = gzip.decompress(path.read_bytes())
        # The fourth byte counts the dimensions; one big-endian size each follows.
        start = 4 + 4 * content[3]
        shape = struct.unpack(f">{content[3]}I", content[4:start])
        return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)
    except (
        OSError,
        EOFError,
        zlib.error,
        struct.error,
        IndexError,
        ValueError,
        RuntimeError,
    ) as error:
        raise UserError(f"{path} is damaged ({error}): fetch it again") from error


def _fetch(read: Callable[[], Any], name: str, folder: Path) -> Any:
    try:
        return read()
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{name} is not in {folder.absolute()} and could not be downloaded ({reason}): put its "
            "files there, or name their folder with data.dir or DATA_DIR"
        ) from error
