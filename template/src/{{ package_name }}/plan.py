"""Does it fit? Memory and volume of a run, before a job is queued.

Run as `make plan`, or `python -m <package>.plan [--config FILE] [--key value …]`. Nothing is
trained, and no GPU is needed. Exit code 0 when it fits, 1 when it does not.
"""

import argparse
import functools
import os
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from .checkpoint import complete_checkpoints, size_of
from .config import TrainConfig, load_config, per_device_batch_size
from .data import UNIT, Batch, Datasets, build_datasets
from .doctor import USABLE_MEMORY, change
from .errors import UserError, run
from .gpu import GIB
from .loader import EpochSampler
from .memory import (
    Estimate,
    Setup,
    Step,
    TooFewSamples,
    checkpoint_bytes,
    estimate,
    first_batch,
    measure,
    setup_of,
)
from .platform import Platform, find_root, load_platform

MAX_SUGGESTIONS = 4
MAX_GPUS = 1024


@dataclass
class Planner:
    """Estimates for one configuration under any setup; equal steps are measured once."""

    config: TrainConfig
    platform: Platform
    datasets: Datasets
    process: float  # bytes of this process with the data in memory

    def __post_init__(self) -> None:
        self._step = functools.cache(self._measure)

    def _measure(self, batch_size: int, accumulates: bool, setup: Setup) -> Step:
        config = replace(self.config, gradient_accumulation_steps=2 if accumulates else 1)
        return measure(config, self.datasets, self._batch, batch_size, setup)

    @functools.cached_property
    def _batch(self) -> Batch:
        return first_batch(self.config, self.datasets, min(self.config.global_batch_size, 64))

    def step(self, config: TrainConfig, setup: Setup) -> Step:
        """One step of this configuration. Raises: UserError when the batch cannot be shared."""
        batch_size = per_device_batch_size(config, setup.num_processes)
        return self._step(batch_size, config.gradient_accumulation_steps > 1, setup)

    def estimate(self, config: TrainConfig, setup: Setup) -> Estimate:
        """Memory of one GPU, or of the process on a CPU."""
        return estimate(self.step(config, setup), setup, self.process)

    @property
    def limit(self) -> float:
        """Bytes of a GPU that training can use, or of this machine."""
        if self.platform.has_gpu:
            return (self.platform.hardware.gpu_memory_gb or 0) * GIB * USABLE_MEMORY
        return machine_memory()

    def fits(self, config: TrainConfig, setup: Setup) -> bool:
        """Whether the estimate is below the limit."""
        return self.estimate(config, setup).total <= self.limit

    @functools.cached_property
    def fewest_samples(self) -> int:
        """What a forward pass needs: one sample, or two where there is BatchNorm."""
        try:
            self._step(1, False, Setup(num_gpus=1))
        except TooFewSamples:
            return 2
        return 1


def main() -> int:
    """Estimate memory and volume of a run, and say whether they are there."""
    parser = argparse.ArgumentParser(prog="plan", description=main.__doc__, add_help=False)
    config, _ = load_config(extra=parser)
    root, platform = find_root(), load_platform()
    datasets = build_datasets(config.data)
    planner = Planner(config, platform, datasets, memory_in_use())
    setup = setup_of(platform, read_accelerate_config(root))
    step = planner.step(config, setup)
    found = planner.estimate(config, setup)
    print(_head(config, setup, step))
    print_memory(found, planner.limit, setup, step, config)
    volume = plan_volume(config, datasets, step, setup)
    print_volume(volume)
    advice = list(memory_advice(planner, config, setup)) if found.total > planner.limit else []
    advice += volume.advice
    if not advice:
        print("\nfits")
        return 0
    print("\ndoes not fit: try one of these")
    for line in advice:
        print(f"  {line}")
    return 1


def read_accelerate_config(root: Path) -> dict[str, object]:
    """`accelerate_config.yaml` as it stands. Raises: UserError when it cannot be read."""
    path = root / "accelerate_config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path.name} cannot be read ({reason}): restore it with git") from error
    return content if isinstance(content, dict) else {}


def memory_in_use() -> float:
    """Bytes of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))


def machine_memory() -> float:
    """Bytes of this machine's memory, or of the part that a container may use."""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup", file)
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            limits.append(float(text))
    return min(limits)


# --- Memory ---


def _head(config: TrainConfig, setup: Setup, step: Step) -> str:
    where = f"{setup.num_gpus} GPU(s)" if setup.num_gpus else "the CPU"
    if setup.num_machines > 1:
        where += f" x {setup.num_machines} machines"
    how = [setup.backend, setup.precision]
    if setup.sharding != "none":
        how.insert(1, setup.sharding)
    if setup.cpu_offload != "none":
        how.append(f"offload {setup.cpu_offload}")
    if setup.activation_checkpointing:
        how.append("activation checkpointing")
    return (
        f"run {config.run_name!r} on {where}, {' '.join(how)}: "
        f"{step.parameters:,} parameters, {step.batch_size} {UNIT} a forward pass"
    )


def print_memory(
    found: Estimate, limit: float, setup: Setup, step: Step, config: TrainConfig
) -> None:
    """The table of one GPU, or of the process."""
    notes = {
        "optimizer": config.optimizer,
        "activations": "" if step.on_fake_tensors else "from two small real steps",
        "communication": "buckets, gathered weights",
        "reserve": "CUDA, NCCL, allocator" if setup.num_gpus else "Python, torch, the data",
    }
    print(f"\npeak memory of {'each GPU' if setup.num_gpus else 'the process'}")
    for name in found.rows:
        size = getattr(found, name)
        if size:
            print(f"  {name:<15}{_size(size):>10}  {notes.get(name, '')}".rstrip())
    nominal = " of GPU memory that can be used" if setup.num_gpus else " of this machine"
    print(f"  {'total':<15}{_size(found.total):>10}  of {_size(limit)}{nominal}")
    if found.host:
        print(f"  {'offloaded':<15}{_size(found.host):>10}  in the memory of each machine")


def memory_advice(planner: Planner, config: TrainConfig, setup: Setup) -> Iterator[str]:
    """Changes after which it fits, each tried out; the smallest changes first."""
    found: list[str] = []
    alone: int | None = None  # forward passes a step that would do without any other change
    for changes, other in (({}, setup), *_other_setups(planner.platform, setup)):
        options = []
        passes = _accumulation(planner, config, other)
        if not changes:
            alone = passes
        elif passes == alone:  # more accumulation is enough
            continue
        if passes is not None:
            if passes != config.gradient_accumulation_steps:
                options.append(f"--gradient_accumulation_steps {passes}")
            if changes:
                options.append(_answers(changes))
            smaller = replace(config, gradient_accumulation_steps=passes)
            total = planner.estimate(smaller, other).total
            found.append(f"{' and '.join(options)}  ({_size(total)})")
        if not changes and (batch := _smaller_batch(planner, config, setup)):
            total = planner.estimate(replace(config, global_batch_size=batch), setup).total
            found.append(f"--global_batch_size {batch}  ({_size(total)}; another training)")
        if len(found) >= MAX_SUGGESTIONS:
            break
    yield from found
    if not found:
        yield _more_gpus(planner, config, setup)


def _accumulation(planner: Planner, config: TrainConfig, setup: Setup) -> int | None:
    """The fewest forward passes a step with which this global batch fits."""
    share, rest = divmod(config.global_batch_size, setup.num_processes)
    first = config.gradient_accumulation_steps
    most = share // planner.fewest_samples
    passes = [] if rest else [n for n in range(first, most + 1) if share % n == 0]

    def fits(count: int) -> bool:
        return planner.fits(replace(config, gradient_accumulation_steps=count), setup)

    index = bisect_left(passes, True, key=fits)
    return passes[index] if index < len(passes) else None


def _smaller_batch(planner: Planner, config: TrainConfig, setup: Setup) -> int | None:
    """The largest smaller global batch that fits as it is."""
    shares = setup.num_processes * config.gradient_accumulation_steps
    fewest = planner.fewest_samples
    low, high = fewest - 1, config.global_batch_size // shares  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if planner.fits(replace(config, global_batch_size=middle * shares), setup):
            low = middle
        else:
            high = middle
    return low * shares if low >= fewest else None


def _other_setups(platform: Platform, setup: Setup) -> Iterator[tuple[dict[str, str], Setup]]:
    """Answers to change, and what they make of the setup; gentle ones first."""
    if not platform.has_gpu:
        return
    several = setup.num_processes > 1
    fsdp, full = {"backend": "fsdp"}, {"backend": "fsdp", "sharding": "full"}
    zero2 = {"backend": "deepspeed", "sharding": "zero2"}
    zero3 = {"backend": "deepspeed", "sharding": "zero3"}
    best = "bf16" if platform.hardware.capability >= (8, 0) else "fp16"
    table: list[tuple[bool, dict[str, str]]] = [
        (setup.precision == "fp32" and platform.hardware.capability >= (7, 0), {"precision": best}),
        (several, fsdp | {"sharding": "grad-op"}),
        (several, full),
        (several and setup.precision != "fp8", zero3),
        (several, full | {"activation_checkpointing": "yes"}),
        (setup.precision != "fp8", zero2 | {"cpu_offload": "optimizer"}),
        (True, full | {"cpu_offload": "all"}),
        (setup.precision != "fp8", zero3 | {"cpu_offload": "all"}),
    ]
    for possible, changes in table:
        other = setup
        if "backend" in changes:
            other = replace(other, cpu_offload="none", activation_checkpointing=False)
        fields: dict[str, Any] = dict(changes)
        if "activation_checkpointing" in changes:
            fields["activation_checkpointing"] = True
        other = replace(other, **fields)
        if possible and other != setup:
            yield changes, other


def _answers(changes: dict[str, str]) -> str:
    """The command that changes these answers of the project."""
    (key, value), *others = changes.items()
    data = "".join(f" --data {other}={choice}" for other, choice in others)
    return change(key, value).removesuffix('"`') + data + '"`'


def _more_gpus(planner: Planner, config: TrainConfig, setup: Setup) -> str:
    """What to do when nothing of this machine is enough."""
    if not setup.num_gpus:
        return "a smaller model: even the smallest batch needs more memory than there is"
    sharded = replace(setup, backend="fsdp", sharding="full", cpu_offload="none", num_machines=1)
    count = setup.num_processes * 2
    while count <= MAX_GPUS:
        fewest = count * planner.fewest_samples
        least = replace(config, global_batch_size=fewest, gradient_accumulation_steps=1)
        if planner.fits(least, replace(sharded, num_gpus=count)):
            return f"a smaller model, or {count} GPUs with backend=fsdp and sharding=full"
        count *= 2
    return "a smaller model: the smallest batch needs more than sharded GPUs have"


# --- Volume ---


@dataclass(frozen=True)
class Volume:
    """What the checkpoints of a run take, in bytes."""

    folder: Path
    checkpoint: float
    kept: int  # at most at a time, the one being written included
    free: float  # what this run holds already counted as free
    explanation: str
    advice: list[str]

    @property
    def needed(self) -> float:
        """Bytes for all that are there at a time."""
        return self.checkpoint * self.kept


def plan_volume(config: TrainConfig, datasets: Datasets, step: Step, setup: Setup) -> Volume:
    """Count the checkpoints that the retention keeps, and look for their place."""
    size = checkpoint_bytes(step, setup)
    saved = saved_steps(config, len(cast(Sized, datasets.train)))

    def kept(keep_last: int, keep_every: int) -> int:
        multiples = [one for one in saved[:-keep_last] if keep_every and one % keep_every == 0]
        # The newest, the best, and the one that is being written before an older one goes.
        return min(len(saved), len(multiples) + keep_last + 2)

    now = kept(config.keep_last, config.keep_every)
    free = free_bytes(config.run_dir)
    advice: list[str] = []
    if now * size > free:
        if config.keep_every and kept(config.keep_last, 0) * size <= free:
            least = next(
                factor * config.keep_every
                for factor in range(2, len(saved) + 2)
                if kept(config.keep_last, factor * config.keep_every) * size <= free
            )
            advice.append(f"--keep_every {least}, or 0")
        for keep_last in range(config.keep_last - 1, 0, -1):
            if kept(keep_last, config.keep_every) * size <= free:
                advice.append(f"--keep_last {keep_last}")
                break
        advice.append(
            f"freeing {_size(now * size - free)} on {_existing(config.run_dir)}, or another "
            "volume: CHECKPOINT_DIR"
        )
    explanation = f"keep_last {config.keep_last}, the best, the one being written"
    if config.keep_every:
        explanation += f", multiples of {config.keep_every}"
    return Volume(config.run_dir, size, now, free, explanation, advice)


def saved_steps(config: TrainConfig, num_samples: int) -> list[int]:
    """Steps after which the run saves, first to last."""
    sampler = EpochSampler(num_samples, config.global_batch_size, config.seed)
    per_epoch = sampler.samples_per_epoch // config.global_batch_size
    last = min(config.epochs * per_epoch, config.max_steps or config.epochs * per_epoch)
    evaluated = config.eval_every_epochs * per_epoch
    steps = set(range(evaluated, last, evaluated))
    if config.save_every_steps:
        steps |= set(range(config.save_every_steps, last, config.save_every_steps))
    return sorted(steps | {last})


def free_bytes(run_dir: Path) -> float:
    """Free space of the checkpoint volume; what this run's checkpoints hold is its own."""
    own = sum(map(size_of, complete_checkpoints(run_dir)))
    return float(shutil.disk_usage(_existing(run_dir)).free + own)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    path = folder.absolute()
    return next(one for one in (path, *path.parents) if os.path.isdir(one))


def print_volume(volume: Volume) -> None:
    """The table of the checkpoint volume."""
    print(f"\ncheckpoints in {volume.folder}")
    print(f"  {'each':<15}{_size(volume.checkpoint):>10}")
    print(f"  {'at a time':<15}{volume.kept:>10}  {volume.explanation}")
    print(f"  {'total':<15}{_size(volume.needed):>10}  of {_size(volume.free)} free")


def _size(size: float) -> str:
    if size >= GIB / 10:
        return f"{size / GIB:,.2f} GB"
    return f"{size / 2**20:,.1f} MB"


if __name__ == "__main__":
    run(main)
