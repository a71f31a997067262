"""Randomness of a step as a pure function of (seed, rank, step).

Dropout and augmentation of step 1000 are then the same whether the run got there in one go or was
resumed a hundred times. Ranks draw different numbers.
"""

import random

import numpy as np
import torch


def fold(*numbers: int) -> int:
    """Mix integers into one seed of 63 bits (NumPy's SeedSequence)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_step(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of the GPU included."""
    seed = fold(*numbers)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
