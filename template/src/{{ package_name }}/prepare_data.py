"""Fetch and check the configured data once, before any job needs them."""

from collections.abc import Sized
from typing import cast

from .config import load_config
from .data import UNIT, build_datasets
from .errors import run


def main() -> int:
    """Read the data that the configuration names, downloading them where that is possible."""
    config, _ = load_config()
    datasets = build_datasets(config.data)
    train, evaluation = len(cast(Sized, datasets.train)), len(cast(Sized, datasets.eval))
    print(f"{train:,} {UNIT} to train on, {evaluation:,} to test with")
    return 0


if __name__ == "__main__":
    run(main)
