"""Loaders whose order can be named: epoch and position in it, nothing else.

The order of samples is a pure function of (seed, epoch). A run that resumes at a position goes on
with exactly the samples that were still to come, whatever the number of processes or workers, and
without replaying what was read before.
"""

import signal
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Sampler

from .data import Batch, Datasets
from .errors import UserError
from .preemption import SIGNALS
from .randomness import fold


class EpochSampler(Sampler[int]):
    """Each epoch a new permutation; the samples that fill no whole global batch sit this one out.

    Args:
        num_samples: size of the data set.
        global_batch_size: samples of one optimizer step over all processes.
        seed: of the order.
    Raises: UserError when there is not one whole batch.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        if num_samples < global_batch_size:
            raise UserError(
                f"{num_samples} training samples make no batch of {global_batch_size}, so there "
                "would be zero steps: give more data, or a smaller global_batch_size"
            )
        self.num_samples = num_samples
        self.samples_per_epoch = num_samples // global_batch_size * global_batch_size
        self.seed = seed
        self.epoch = 0
        self.position = 0

    def set_position(self, epoch: int, position: int) -> None:
        """Where the next iteration starts: the epoch, and the samples of it already seen."""
        self.epoch = epoch
        self.position = position

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(fold(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        yield from order[self.position : self.samples_per_epoch].tolist()

    def __len__(self) -> int:
        return self.samples_per_epoch - self.position


def build_loaders(
    datasets: Datasets,
    batch_size: int,
    global_batch_size: int,
    seed: int,
    num_workers: int,
) -> tuple[DataLoader[Batch], DataLoader[Batch], EpochSampler]:
    """Loaders for training and evaluation, to be given to `accelerator.prepare`.

    Args:
        batch_size: samples of one forward pass on one process.
    Returns: training loader, evaluation loader, and the sampler that positions the former.
    Raises: UserError when the data have no length: an order that goes on from any sample, and as
        many batches on each rank, can be had of samples that have numbers only.
    """
    for data in (datasets.train, datasets.eval):
        if not isinstance(data, Sized):
            raise UserError(
                f"{type(data).__name__} has no length: give data.py a map-style dataset, with "
                "__len__ and __getitem__"
            )
    sampler = EpochSampler(len(cast(Sized, datasets.train)), global_batch_size, seed)
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": datasets.collate,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        "worker_init_fn": leave_signals_to_the_parent,
    }
    train_loader = DataLoader(datasets.train, sampler=sampler, drop_last=True, **common)
    eval_loader = DataLoader(datasets.eval, shuffle=False, **common)
    return train_loader, eval_loader, sampler


def leave_signals_to_the_parent(worker: int) -> None:
    """A request to stop goes to the whole process group; loading must outlast the saving."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
