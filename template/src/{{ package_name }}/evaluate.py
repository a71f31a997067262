"""Evaluation: each sample counted once, on all ranks together."""

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from . import backend, checkpoint
from .config import load_config
from .errors import UserError, run
from .logs import logger, start_logging
from .preemption import Preemption
from .session import build_parts, leave, start_accelerator


class Preempted(Exception):
    """All ranks agreed to stop."""


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader[Any],
    preemption: Preemption | None = None,
) -> dict[str, float]:
    """Mean of each metric over the whole evaluation set. Collective.

    The last batch is padded so that all ranks have as many; `gather_for_metrics` drops the copies.
    Raises: Preempted when all ranks agreed to stop meanwhile.
    """
    totals: torch.Tensor | None = None
    names: list[str] = []
    count = 0
    backend.share_buffers(accelerator, model)
    model.eval()
    for batch in loader:
        if preemption is not None and preemption.agreed():
            raise Preempted
        with torch.no_grad():
            metrics = model(**batch)["metrics"]
        names = list(metrics)
        values = torch.stack([metrics[name].float() for name in names], dim=1)  # (B, metrics)
        values = accelerator.gather_for_metrics(values)
        totals = values.double().sum(dim=0) + (0 if totals is None else totals)
        count += len(values)
    model.train()
    if totals is None:
        raise UserError("the evaluation set is empty: give it at least one sample")
    return dict(zip(names, (totals / count).tolist(), strict=True))


def main() -> int:
    """Evaluate a checkpoint of a run and print its metrics."""
    parser = argparse.ArgumentParser(prog="evaluate", description=main.__doc__, add_help=False)
    parser.add_argument("--checkpoint", default=checkpoint.BEST, help="best, latest, step or path")
    config, arguments = load_config(extra=parser)
    folder = checkpoint.open_intact(config.run_dir, arguments.checkpoint)
    config.optimizer = checkpoint.read_progress(folder).config.get("optimizer", config.optimizer)
    accelerator = start_accelerator(config)
    start_logging(accelerator.is_main_process)
    parts = build_parts(accelerator, config)
    model, _, loader = backend.prepare(accelerator, parts.model, parts.optimizer, parts.eval_loader)
    checkpoint.load_state(accelerator, model, folder)
    metrics = evaluate(accelerator, model, loader)
    logger.info(
        f"{folder}: " + ", ".join(f"test {name} {value:.4f}" for name, value in metrics.items())
    )
    leave(accelerator)
    return 0


if __name__ == "__main__":
    run(main)
