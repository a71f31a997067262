"""A trace of a few training steps: where the time of a step goes."""

import argparse
from collections.abc import Generator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from . import backend
from .config import TrainConfig, load_config
from .errors import UserError, run
from .logs import logger, start_logging
from .randomness import seed_step
from .session import Parts, build_parts, leave, start_accelerator

WARMUP_STEPS = 3


def main() -> int:
    """Record training steps: a trace of each rank for Perfetto, a table of what costs most."""
    parser = argparse.ArgumentParser(prog="profile", description=main.__doc__, add_help=False)
    parser.add_argument("--steps", type=int, default=5, help="forward passes to record")
    config, arguments = load_config(extra=parser)
    if arguments.steps < 1:
        raise UserError(f"--steps is {arguments.steps}: give 1 or more")
    accelerator = start_accelerator(config)
    start_logging(accelerator.is_main_process)
    parts = build_parts(accelerator, config)
    model, optimizer, loader = backend.prepare(
        accelerator, parts.model, parts.optimizer, parts.train_loader
    )
    folder = config.run_dir / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"rank{accelerator.process_index}.json"
    activities = [ProfilerActivity.CPU]
    if accelerator.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    wanted = WARMUP_STEPS + arguments.steps
    passes = take_passes(accelerator, config, parts, model, optimizer, loader)
    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=WARMUP_STEPS - 1, active=arguments.steps),
        record_shapes=True,
    ) as profiler:
        for _ in range(wanted):
            next(passes)
            profiler.step()
    profiler.export_chrome_trace(str(trace))
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=50)
    if accelerator.is_main_process:
        (folder / "summary.txt").write_text(table, encoding="utf-8")
    logger.info(table)
    logger.info(f"traces in {folder}; open one in https://ui.perfetto.dev")
    leave(accelerator)
    return 0


def take_passes(
    accelerator: Accelerator,
    config: TrainConfig,
    parts: Parts,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
) -> Generator[int, None, None]:
    """Train without end, and without what surrounds a step; yields the number of forward passes.

    Args:
        model, optimizer, loader: as `backend.prepare` gave them back.
    """
    done = 0
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                seed_step(config.seed, accelerator.process_index, done)
                if parts.datasets.augment is not None:
                    batch = parts.datasets.augment(batch)
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            yield done
        parts.sampler.set_position(parts.sampler.epoch + 1, 0)


if __name__ == "__main__":
    run(main)
