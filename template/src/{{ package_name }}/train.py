"""Training: the whole loop, for one process and for many.

How it runs (GPUs, processes, precision, backend) is said by `accelerate_config.yaml`; what it
learns by `model.py`, `data.py` and `configs/*.yaml`. Nothing of that is decided here.
"""

import argparse
import dataclasses
import json
import math
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from . import backend, gpu
from .checkpoint import Checkpoints, Progress, step_name
from .config import TrainConfig, load_config, to_dict
from .data import UNIT, Datasets
from .errors import EXIT_PREEMPTED, SAVED, UserError, leave_note, run
from .errors import describe as describe_failure
from .evaluate import Preempted, evaluate
from .loader import EpochSampler
from .logs import logger, start_logging
from .metrics import MetricsFile
from .model import METRIC, METRIC_MODE
from .optimizer import learning_rate_at, set_learning_rate
from .platform import Platform, load_platform
from .preemption import Preemption
from .randomness import seed_step
from .runfolder import hold_run_folder
from .session import build_parts, leave, start_accelerator
from .staging import prepare_staging
from .tracking import prepare_tracker, start_tracker

if TYPE_CHECKING:
    from .mirror import Mirror


@dataclasses.dataclass
class Run:
    """Everything that the loop works with, after `prepare`."""

    config: TrainConfig
    accelerator: Accelerator
    model: nn.Module
    num_parameters: int
    optimizer: torch.optim.Optimizer
    train_loader: DataLoader[Any]
    eval_loader: DataLoader[Any]
    sampler: EpochSampler
    datasets: Datasets
    checkpoints: Checkpoints
    preemption: Preemption
    metrics: MetricsFile
    progress: Progress
    interval: "Interval"
    total_steps: int
    elapsed_before: float  # seconds of training that went into the run before this start
    started: float = dataclasses.field(default_factory=time.perf_counter)
    logged_samples: int = 0  # of this start, and the seconds of training that they took
    logged_seconds: float = 0.0
    stepped: bool = False  # whether this start has taken a step


def main() -> int:
    """Train, or go on training, the run that the configuration names."""
    config, arguments = load_config(extra=options_of_training())
    platform = load_platform()
    preemption = Preemption()
    prepare_tracker(platform.tracker, config.run_dir)
    accelerator = start_accelerator(
        config,
        log_with=None if platform.tracker == "none" else platform.tracker,
        project_dir=str(config.run_dir),
    )
    preemption.connect()
    with hold_run_folder(accelerator, config.run_dir):
        start_logging(accelerator.is_main_process, config.run_dir)
        current = set_up(config, accelerator, preemption, arguments.resume)
        describe(current, platform)
        if is_finished(current):
            logger.info("nothing to do: raise epochs to train longer, or give another run_name")
            code = 0
        else:
            start_tracker(accelerator, platform.tracker, platform.project, config)
            code = train(current)
        if code == 0:
            report(current)
    preemption.disconnect()
    leave(accelerator)
    return code


def options_of_training() -> argparse.ArgumentParser:
    """What `train` takes besides the keys of the configuration."""
    parser = argparse.ArgumentParser(prog="train", description=main.__doc__, add_help=False)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|CHECKPOINT",
        help="auto: from the newest checkpoint, or fresh if there is none (default); "
        "never: fresh or not at all; else a step or the folder of a checkpoint",
    )
    return parser


def set_up(
    config: TrainConfig, accelerator: Accelerator, preemption: Preemption, resume: str
) -> Run:
    """Build, prepare, restore. Collective."""
    parts = build_parts(accelerator, config)
    model, optimizer, train_loader, eval_loader = backend.prepare(
        accelerator, parts.model, parts.optimizer, parts.train_loader, parts.eval_loader
    )
    checkpoints = Checkpoints(
        accelerator,
        model,
        config.run_dir,
        config.keep_last,
        config.keep_every,
        prepare_staging(accelerator, optimizer) if config.async_save else None,
        open_mirror(config),
    )
    restored = checkpoints.restore(resume)
    progress = restored or Progress()
    if restored is not None:
        announce_resume(restored, config, accelerator)
    # With another batch size the epoch may be shorter than when it was saved.
    progress.position = min(progress.position, parts.sampler.samples_per_epoch)
    progress.world_size = accelerator.num_processes
    progress.layout = backend.layout(accelerator)
    progress.config = to_dict(config)
    progress.versions = {name: version(name) for name in ("torch", "accelerate")}

    metrics = MetricsFile(config.run_dir / "metrics.csv", METRIC)
    elapsed = 0.0
    if accelerator.is_main_process:
        newest = {"train": progress.step, "eval": progress.evaluated_step or 0}
        elapsed = metrics.restore(lambda row: int(row["step"]) <= newest.get(row["split"], 0))
        (config.run_dir / "config.yaml").write_text(
            yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8"
        )
    return Run(
        config=config,
        accelerator=accelerator,
        model=model,
        num_parameters=parts.num_parameters,
        optimizer=optimizer,
        train_loader=train_loader,
        eval_loader=eval_loader,
        sampler=parts.sampler,
        datasets=parts.datasets,
        checkpoints=checkpoints,
        preemption=preemption,
        metrics=metrics,
        progress=progress,
        interval=reopen_interval(progress, accelerator),
        total_steps=count_steps(progress, config, parts.sampler.samples_per_epoch),
        elapsed_before=elapsed,
    )


def open_mirror(config: TrainConfig) -> "Mirror | None":
    """Where checkpoints are copied to, if anywhere; only then is its library imported."""
    if config.mirror is None:
        return None
    from .mirror import Mirror

    return Mirror(config.mirror, config.run_name, config.keep_last, config.keep_every)


def count_steps(progress: Progress, config: TrainConfig, samples_per_epoch: int) -> int:
    """Optimizer steps of the whole run: those taken, and those that its epochs still hold."""
    samples = (config.epochs - progress.epoch) * samples_per_epoch - progress.position
    total = progress.step + max(samples, 0) // config.global_batch_size
    return total if config.max_steps is None else min(total, config.max_steps)


def train(current: Run) -> int:
    """Loop over epochs until the last step is evaluated and saved. Returns the exit code."""
    config, progress = current.config, current.progress
    bar = tqdm(
        total=current.total_steps,
        initial=progress.step,
        unit="step",
        dynamic_ncols=True,
        # A bar for a person at a terminal; a log file gets lines.
        disable=None if current.accelerator.is_main_process else True,
    )
    try:
        while not is_finished(current):
            train_epoch(current, bar)
            due = (progress.epoch + 1) % config.eval_every_epochs == 0
            evaluated = due or progress.step >= current.total_steps
            if evaluated:
                evaluate_step(current)
            if progress.position == current.sampler.samples_per_epoch:
                progress.epoch, progress.position = progress.epoch + 1, 0
            if evaluated:
                save(current)
        current.checkpoints.finish()
    except Preempted:
        folder = save(current)
        current.checkpoints.finish()
        leave_note(SAVED)
        logger.info(
            f"told to stop ({current.preemption.signal_received or 'by another rank'}): saved "
            f"{folder}; the same command goes on from there"
        )
        return EXIT_PREEMPTED
    finally:
        bar.close()
    return 0


def train_epoch(current: Run, bar: "tqdm[Any]") -> None:
    """Optimizer steps to the end of the epoch or of the run. Collective.

    Raises: Preempted at a step boundary when all ranks agreed to stop.
    """
    config, accelerator, progress = current.config, current.accelerator, current.progress
    if progress.step >= current.total_steps:
        return
    current.sampler.set_position(progress.epoch, progress.position)
    current.interval.start_clock()
    forward_passes = 0
    for batch in current.train_loader:
        with accelerator.accumulate(current.model):
            seed_step(config.seed, accelerator.process_index, progress.step, forward_passes)
            if current.datasets.augment is not None:
                batch = current.datasets.augment(batch)
            learning_rate = learning_rate_at(progress.step, current.total_steps, config)
            set_learning_rate(current.optimizer, learning_rate)
            outputs = current.model(**batch)
            accelerator.backward(outputs["loss"])  # DeepSpeed takes the step in here
            if accelerator.sync_gradients:
                grad_norm = backend.clip_gradients(accelerator, current.model, config.max_grad_norm)
            current.optimizer.step()
            current.optimizer.zero_grad()
        current.interval.add(outputs)
        forward_passes += 1
        if not accelerator.sync_gradients:
            continue

        forward_passes = 0
        progress.step += 1
        progress.position += config.global_batch_size
        progress.samples_seen += config.global_batch_size
        bar.update()
        if not current.stepped:
            current.stepped = True
            logger.info("first step done")
        is_last = progress.step == current.total_steps
        if progress.step % config.log_every_steps == 0 or is_last:
            log_interval(current, learning_rate, grad_norm)
            current.interval = Interval(accelerator.device)
            current.interval.start_clock()
        if is_last:
            return  # evaluated and saved by the caller
        if current.preemption.agreed():
            raise Preempted
        at_end = progress.position == current.sampler.samples_per_epoch
        if config.save_every_steps and progress.step % config.save_every_steps == 0 and not at_end:
            save(current)
    progress.position = current.sampler.samples_per_epoch
    current.interval.stop_clock()


class Interval:
    """Sums between two rows of figures, kept on the device so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.sums: torch.Tensor = torch.zeros(2, device=device)  # loss, metric
        self.forward_passes = 0
        self.samples = 0
        self.seconds = 0.0
        self.clock: float | None = None

    def add(self, outputs: dict[str, Any]) -> None:
        """Count the loss and metric of one forward pass of this rank."""
        metric = outputs["metrics"][METRIC]
        self.sums += torch.stack([outputs["loss"].detach().float(), metric.float().mean()])
        self.forward_passes += 1
        self.samples += len(metric)

    def start_clock(self) -> None:
        """Training goes on."""
        self.clock = time.perf_counter()

    def stop_clock(self) -> None:
        """Something else follows, such as a save or an evaluation."""
        if self.clock is not None:
            self.seconds += time.perf_counter() - self.clock
            self.clock = None


def log_interval(current: Run, learning_rate: float, grad_norm: Any) -> None:
    """Write one row of figures: means over all ranks since the last row. Collective."""
    accelerator, progress, interval = current.accelerator, current.progress, current.interval
    means = accelerator.reduce(interval.sums / interval.forward_passes, reduction="mean")
    loss, metric = means.tolist()
    interval.stop_clock()
    samples = interval.samples * accelerator.num_processes
    current.logged_samples += samples
    current.logged_seconds += interval.seconds
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {progress.step}: lower learning_rate, set max_grad_norm, "
            "or look at the data; checkpoints of earlier steps are intact"
        )
    row = {
        METRIC: metric,
        "loss": loss,  # last, since the metric may be the loss
        "learning_rate": learning_rate,
        "grad_norm": backend.norm_value(grad_norm),
        "samples_per_second": samples / interval.seconds,
        "gpu_memory_gb": gpu.gpu_memory_gb(accelerator.device),
        "gpu_utilization": gpu.gpu_utilization(accelerator.device),
    }
    record(current, "train", row)
    logger.info(
        f"step {progress.step}/{current.total_steps}  epoch {progress.epoch + 1}  "
        + "".join(f"{name} {row[name]:.4f}  " for name in dict.fromkeys(["loss", METRIC]))
        + f"{row['samples_per_second']:,.0f} {UNIT}/s"
        + ("" if row["gpu_memory_gb"] is None else f"  {row['gpu_memory_gb']:.1f} GB")
        + ("" if row["gpu_utilization"] is None else f"  GPU {row['gpu_utilization']:.0f} %")
    )


def evaluate_step(current: Run) -> None:
    """Evaluate after this step and note whether it is the best so far. Collective."""
    progress = current.progress
    scores = evaluate(current.accelerator, current.model, current.eval_loader, current.preemption)
    if not all(math.isfinite(score) for score in scores.values()):
        raise UserError(
            f"evaluation at step {progress.step} gave {scores}: nothing was saved; lower "
            "learning_rate or look at the data"
        )
    score, best = scores[METRIC], progress.best_value
    if best is None or (score > best if METRIC_MODE == "max" else score < best):
        progress.best_step, progress.best_value = progress.step, score
    progress.evaluated_step, progress.scores = progress.step, scores
    record(current, "eval", {METRIC: score, "loss": scores.get("loss")})
    logger.info(
        f"step {progress.step}/{current.total_steps}  epoch {progress.epoch + 1}  "
        + "  ".join(f"test {name} {value:.4f}" for name, value in scores.items())
    )


def save(current: Run) -> Path:
    """Save this step, the open interval of figures included. Collective. Returns the folder.

    With `async_save` it need not be there yet.
    """
    progress, interval = current.progress, current.interval
    interval.stop_clock()
    progress.interval_forward_passes = interval.forward_passes
    progress.interval_sums = gather_object([interval.sums.tolist()])
    folder = current.checkpoints.save(progress)
    interval.start_clock()
    return folder


def reopen_interval(progress: Progress, accelerator: Accelerator) -> Interval:
    """The interval of figures as it was when the checkpoint was saved."""
    interval = Interval(accelerator.device)
    sums = torch.tensor(progress.interval_sums)
    if len(sums):
        same_ranks = len(sums) == accelerator.num_processes
        own = sums[accelerator.process_index] if same_ranks else sums.mean(dim=0)
        interval.sums += own.to(accelerator.device)
        interval.forward_passes = progress.interval_forward_passes
    return interval


def record(current: Run, split: str, row: dict[str, Any]) -> None:
    """One row into `metrics.csv` and the tracker."""
    progress = current.progress
    if current.accelerator.is_main_process:
        elapsed = current.elapsed_before + time.perf_counter() - current.started
        current.metrics.append(
            {
                "step": progress.step,
                "epoch": progress.epoch,
                "samples_seen": progress.samples_seen,
                "split": split,
                "elapsed_seconds": elapsed,
                **row,
            }
        )
    current.accelerator.log(
        {f"{split}/{key}": value for key, value in row.items() if value is not None},
        step=progress.step,
    )


def announce_resume(progress: Progress, config: TrainConfig, accelerator: Accelerator) -> None:
    """Say where the run goes on, and what is not as it was."""
    logger.info(
        f"going on from {config.run_dir / step_name(progress.step)} "
        f"(epoch {progress.epoch + 1}, {progress.position} {UNIT} into it)"
    )
    if progress.world_size != accelerator.num_processes:
        logger.info(
            f"saved by {progress.world_size} processes, now {accelerator.num_processes}: the order "
            f"of {UNIT} goes on, random numbers of a step differ"
        )
    before, now = progress.config, json.loads(json.dumps(to_dict(config)))
    for key in now:
        if key in before and before[key] != now[key]:
            logger.info(f"{key} was {before[key]} and is now {now[key]}")


def describe(current: Run, platform: Platform) -> None:
    """Say what is about to run, in the words of the configuration."""
    config, accelerator = current.config, current.accelerator
    logger.info(
        f"run {config.run_name!r}: {current.sampler.num_samples:,} {UNIT}, "
        f"{current.num_parameters:,} parameters, "
        f"{current.total_steps} steps of {config.global_batch_size} {UNIT}"
    )
    logger.info(
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, "
        f"{backend.layout(accelerator)}, precision requested: "
        f"{platform.mixed_precision}, launched: {accelerator.mixed_precision}, "
        f"effective: {backend.effective_precision(accelerator, current.model)}"
    )


def is_finished(current: Run) -> bool:
    """Whether the last step is evaluated; what is evaluated is saved."""
    progress = current.progress
    return progress.step >= current.total_steps and progress.evaluated_step == progress.step


def report(current: Run) -> None:
    """Draw the curves and say what came out."""
    if not current.accelerator.is_main_process:
        return
    from .plot import draw_curves

    progress, run_dir = current.progress, current.config.run_dir
    try:
        draw_curves(run_dir / "metrics.csv", run_dir / "loss.png")
    except OSError as error:  # the run is finished all the same
        logger.warning(f"no loss curve: {describe_failure(error)}")
    figures = {f"test {METRIC}": f"{progress.scores[METRIC]:.4f} (best {progress.best_value:.4f})"}
    if current.logged_samples:
        figures[f"{UNIT}/s"] = f"{current.logged_samples / current.logged_seconds:,.0f}"
    figures["checkpoint"] = str(run_dir / step_name(progress.step))
    figures["loss curve"] = str(run_dir / "loss.png")
    logger.info(f"run {current.config.run_name!r} is finished after {progress.step} steps")
    for name, value in figures.items():
        logger.info(f"  {name:<16}{value}")


if __name__ == "__main__":
    run(main)
