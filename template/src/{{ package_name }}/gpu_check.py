"""What only GPUs can show, tried out on them: precision, training, resuming, links, memory, speed.

Run as `make gpu-check`, or `python -m <package>.gpu_check [--cpu]`. Each line is ok, warn, fail or
skip (not shown here); `gpu-check/summary.json` on the checkpoint volume keeps the figures. With
--cpu the same steps run in two processes without a GPU, which tests this file and no GPU.

Every part is started through launch.sh, as training is, so it meets the project's own launcher,
configuration and backend. Exit code 0 without failures, 1 with some, 2 without a GPU.
"""

import argparse
import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from . import backend
from .checkpoint import step_name
from .config import TrainConfig, load_config, per_device_batch_size
from .data import UNIT, build_datasets
from .doctor import Line, Status, fail, ok, paint, use_colors, warn
from .errors import run
from .export import WEIGHTS
from .gpu import GIB, visible_gpus
from .memory import estimate, first_batch, measure, setup_of
from .plan import read_accelerate_config
from .platform import Platform, find_root, load_platform
from .profile import take_passes
from .session import build_parts, leave, start_accelerator

EXIT_NO_GPU = 2
TIMEOUT = 900  # seconds of one part
STEPS = 48  # of a trained run
HALF = STEPS // 2
WARMUP, TIMED = 5, 20  # optimizer steps
BYTES = 256 << 20  # of the tensor that is summed over the GPUs
SLOW_LINK = 5.0  # GB/s; PCIe 3 has more
MEMORY_ERROR = 0.25
Passes = Generator[int, None, None]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")


@dataclass
class Bench:
    """Where the parts run, and what they found."""

    root: Path
    platform: Platform
    config: TrainConfig
    folder: Path
    cpu: bool
    facts: dict[str, Any] = field(default_factory=dict)  # ends up in the summary

    @property
    def precision(self) -> str:
        """What accelerate_config.yaml, or its CPU twin, has the processes compute with."""
        return "fp32" if self.cpu else self.platform.training.precision

    @property
    def has_first_machine(self) -> bool:
        """Whether this is the machine that writes."""
        return os.environ.get("MACHINE_RANK", "0") == "0"

    def launch(self, module: str, *options: str) -> str:
        """Start a module on all processes. Returns what it said when it failed, else nothing."""
        command = [str(self.root / "launch.sh"), *(["--cpu"] if self.cpu else []), module]
        log = self.folder / "log.txt"
        with log.open("a", encoding="utf-8") as output:
            start = output.tell()
            try:
                code = subprocess.run(
                    [*command, *options],
                    env={**os.environ, "CHECKPOINT_DIR": str(self.folder)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT,
                ).returncode
            except subprocess.TimeoutExpired:
                return f"no end after {TIMEOUT} s"
        lines = log.read_text(encoding="utf-8", errors="replace")[start:].split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return "" if code == 0 else (said or [f"exit code {code}"])[-1]

    def part(self, name: str, *options: str) -> dict[str, Any]:
        """Run a part of this file on all processes. Returns its figures, or its `problem`."""
        figures = self.folder / "part.json"
        if self.has_first_machine:
            figures.unlink(missing_ok=True)
        problem = self.launch("gpu_check", "--part", name, "--figures", str(figures), *options)
        if problem:
            return {"problem": problem}
        found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
        return found


def main() -> int:
    """Try out on all GPUs what a machine without one cannot show."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=main.__doc__, add_help=False)
    parser.add_argument("--cpu", action="store_true", help="two CPU processes: tests the check")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--precision", help=argparse.SUPPRESS)
    config, arguments = load_config(extra=parser)
    if arguments.part:
        return work(config, arguments)
    if not arguments.cpu and not visible_gpus():
        print(
            "error: gpu-check needs a GPU: run it on the training machine, or try its steps on "
            "this CPU with --cpu",
            file=sys.stderr,
        )
        return EXIT_NO_GPU
    folder = config.run_dir.parent.absolute() / "gpu-check"
    bench = Bench(find_root(), load_platform(), config, folder, arguments.cpu)
    if bench.has_first_machine:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    # What was asked for on the command line goes on to every part.
    bench.facts["options"] = [word for word in sys.argv[1:] if word != "--cpu"]
    return examine(bench)


def examine(bench: Bench) -> int:
    """Run all checks, print a line each, and write the summary."""
    colors, width = use_colors(), max(map(len, CHECKS))
    lines: dict[str, Line] = {}
    for name, check in CHECKS.items():
        try:
            line = check(bench)
        except (OSError, KeyError, ValueError) as error:
            line = fail(f"{type(error).__name__}: {error}", f"see {bench.folder / 'log.txt'}")
        lines[name] = line
        print(f"{paint(line.status, colors)}  {name:{width}}  {line.found}", flush=True)
        if line.advice:
            print(f"{'':{width + 8}}-> {line.advice}", flush=True)
    counts = Counter(line.status for line in lines.values())
    summary = bench.folder / "summary.json"
    if bench.has_first_machine:
        content = {
            "lines": {name: dataclasses.asdict(line) for name, line in lines.items()},
            "figures": bench.facts,
        }
        summary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    print(
        f"\n{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, "
        f"{counts[Status.FAIL]} failed, {counts[Status.SKIP]} not shown; figures in {summary}"
    )
    return 1 if counts[Status.FAIL] else 0


def not_shown(found: str) -> Line:
    """This machine has no say in it."""
    return Line(Status.SKIP, f"not shown: {found}")


NOT_MEASURED = not_shown("the processes ended before, see precision")


# --- The checks, in the process that starts the parts ---


def check_precision(bench: Bench) -> Line:
    """The products of matrices are made in the number format that the answers ask for."""
    facts = bench.facts["measured"] = bench.part("measure", *bench.facts["options"])
    if "problem" in facts:
        return _broken(facts["problem"], bench.folder)
    return judge_precision(facts, bench.platform.training.precision, bench.cpu)


def judge_precision(facts: Mapping[str, Any], wanted: str, cpu: bool) -> Line:
    """`products` counts matrix products by their number format."""
    products: Mapping[str, int] = facts["products"]
    found = ", ".join(f"{count} in {name}" for name, count in products.items()) or "none"
    if cpu:
        return not_shown(f"matrix products on the CPU: {found}; {wanted} is asked for")
    name = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}[wanted]
    if wanted == "fp8" and name not in products:
        return warn(
            f"no layer computes in fp8: {found}",
            "torchao converts linear layers whose sizes divide by 16, the first and the last left "
            "alone: bf16 does the same for a model without them",
        )
    if name not in products:
        return fail(
            f"{wanted} is asked for, but matrix products are: {found}",
            "compare mixed_precision in accelerate_config.yaml with the answers; see `make doctor`",
        )
    if wanted == "fp32" and facts["tf32"]:
        return ok(f"{found}, multiplied as TF32")
    return ok(found)


def check_training(bench: Bench) -> Line:
    """Some steps on all processes, after which the loss is lower."""
    start = time.monotonic()
    problem = bench.launch("train", *_training(bench, "whole"))
    if problem:
        return _broken(problem, bench.folder)
    with (bench.folder / "whole" / "metrics.csv").open(newline="", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["split"] == "train"]
    bench.facts["training"] = {"losses": losses, "seconds": time.monotonic() - start}
    return judge_training(losses, bench.platform.training.backend)


def judge_training(losses: Sequence[float], backend: str) -> Line:
    """Losses of a short run, first to last."""
    found = f"{backend}, loss {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps"
    if losses[-1] < losses[0]:
        return ok(found)
    return fail(found, "lower learning_rate, or give another configuration: CONFIG=configs/…")


def _training(bench: Bench, run_name: str) -> list[str]:
    steps = ("--max_steps", str(STEPS), "--save_every_steps", str(HALF), "--keep_every", str(HALF))
    long = ("--epochs", "100000", "--log_every_steps", "4", "--eval_every_epochs", "100000")
    return [*bench.facts["options"], *long, *steps, "--run_name", run_name]


def check_resume(bench: Bench) -> Line:
    """A run that goes on from its middle ends with the same weights, bit for bit."""
    whole, halved = bench.folder / "whole", bench.folder / "halved"
    if not (whole / step_name(STEPS)).is_dir():
        return not_shown("no run to go on with")
    if bench.has_first_machine:
        shutil.copytree(whole / step_name(HALF), halved / step_name(HALF))
    problem = bench.launch("train", *_training(bench, "halved"))
    if problem:
        return _broken(problem, bench.folder)
    same, repeats = _weights(bench, "halved") == _weights(bench, "whole"), True
    if not same:  # does anything repeat on this machine?
        problem = bench.launch("train", *_training(bench, "again"))
        if problem:
            return _broken(problem, bench.folder)
        repeats = _weights(bench, "again") == _weights(bench, "whole")
    bench.facts["resume"] = {"same": same, "repeats": repeats}
    return judge_resume(same, repeats)


def _weights(bench: Bench, run_name: str) -> bytes:
    """A run's last weights, exported: files of checkpoints differ by more than their tensors."""
    output = bench.folder / run_name / "export"
    options = ("--run_name", run_name, "--checkpoint", str(STEPS), "--output", str(output))
    problem = bench.launch("export", *bench.facts["options"], *options)
    if problem:
        raise ValueError(f"{run_name} cannot be exported: {problem}")
    return (output / WEIGHTS).read_bytes()


def judge_resume(same: bool, repeats: bool) -> Line:
    """`repeats`: whether two runs without a stop are alike."""
    if same:
        return ok(f"stopped at step {HALF}, resumed, the same bits at step {STEPS}")
    if repeats:
        return fail(
            "a resumed run ends with other weights than one without a stop",
            "something random is not seeded by the step: look at model.py and data.py",
        )
    return warn(
        "resumed, with other last bits; so have two runs without a stop",
        "kernels of this GPU add in no fixed order: set CUBLAS_WORKSPACE_CONFIG=:4096:8 and call "
        "torch.use_deterministic_algorithms(True) in model.py if bits matter",
    )


def check_links(bench: Bench) -> Line:
    """How fast the processes sum a large tensor."""
    facts = bench.facts["measured"]
    return NOT_MEASURED if "problem" in facts else judge_links(facts)


def judge_links(facts: Mapping[str, Any]) -> Line:
    """`gb_per_second` is NCCL's bus bandwidth: what each link carries."""
    speed, count = facts["gb_per_second"], facts["num_processes"]
    if count == 1:
        return not_shown("one process sums nothing")
    found = f"{speed:.1f} GB/s over {facts['backend']}, {count} processes"
    if facts["backend"] != "nccl":
        return not_shown(found)
    if speed < SLOW_LINK:
        return warn(found, "see `nvidia-smi topo -m` and NCCL_DEBUG=INFO for the path it takes")
    return ok(found)


def check_memory(bench: Bench) -> Line:
    """What a GPU held at most, against `make plan`."""
    facts = bench.facts["measured"]
    if "problem" in facts:
        return NOT_MEASURED
    setup = setup_of(bench.platform, read_accelerate_config(bench.root))
    datasets = build_datasets(bench.config.data)
    size = per_device_batch_size(bench.config, setup.num_processes)
    step = measure(bench.config, datasets, first_batch(bench.config, datasets, size), size, setup)
    planned = facts["planned"] = estimate(step, setup).counted
    return judge_memory(planned, facts["allocated"], facts["reserved"])


def judge_memory(planned: float, allocated: float | None, reserved: float | None) -> Line:
    """Bytes; None on a CPU."""
    if allocated is None or reserved is None:
        return not_shown(f"{planned / GIB:.2f} GB planned, no GPU to measure")
    error = planned / allocated - 1
    found = (
        f"{allocated / GIB:.2f} GB measured (allocator {reserved / GIB:.2f}), "
        f"{planned / GIB:.2f} GB planned: {100 * error:+.0f} %"
    )
    if abs(error) > MEMORY_ERROR:
        return warn(found, "trust the measured figure; small models are mostly workspaces")
    return ok(found)


def check_speed(bench: Bench) -> Line:
    """The chosen precision against fp32 and TF32."""
    asked = dict.fromkeys(("fp32",) if bench.cpu else ("fp32", "tf32", bench.precision))
    speeds = {name: _speed(bench, "--precision", name) for name in asked}
    bench.facts["speed"] = speeds
    for figures in speeds.values():
        if "problem" in figures:
            return _broken(figures["problem"], bench.folder)
    rates = {name: figures["samples_per_second"] for name, figures in speeds.items()}
    return judge_speed(rates, bench.precision, bench.cpu)


def judge_speed(rates: Mapping[str, float], chosen: str, cpu: bool) -> Line:
    """Samples per second by precision."""
    found = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()) + f" {UNIT}/s"
    if cpu:
        return not_shown(f"on the CPU {found}")
    if rates[chosen] < rates["fp32"]:
        return warn(found, "a small model waits for its launches: a larger batch, or fp32")
    return ok(found)


def check_compile(bench: Bench) -> Line:
    """The chosen precision with torch.compile."""
    how = ["--compile_backend", "eager"] if bench.cpu else []
    options = ["--precision", bench.precision, "--compile", "true", *how]
    figures = bench.facts["compile"] = _speed(bench, *options)
    before = bench.facts["speed"][bench.precision].get("samples_per_second")
    return judge_compile(figures, before, bench.cpu)


def judge_compile(figures: Mapping[str, Any], before: float | None, cpu: bool) -> Line:
    """Samples per second with, and before without, torch.compile."""
    if "problem" in figures:
        return warn(f"does not compile: {figures['problem']}", "leave `compile: false`")
    rate = figures["samples_per_second"]
    if cpu:
        return not_shown(f"on the CPU {rate:,.0f} {UNIT}/s, without inductor")
    if before is None:
        return ok(f"{rate:,.0f} {UNIT}/s")
    found = f"{rate:,.0f} {UNIT}/s, {rate / before:.2f} times as fast as without"
    return ok(found) if rate > before else warn(found, "leave `compile: false`")


def _speed(bench: Bench, *options: str) -> dict[str, Any]:
    return bench.part("speed", *bench.facts["options"], *options)


def _broken(problem: str, folder: Path) -> Line:
    return fail(problem, f"see {folder / 'log.txt'}")


CHECKS: dict[str, Callable[[Bench], Line]] = {
    "precision": check_precision,
    "training": check_training,
    "resume": check_resume,
    "all-reduce": check_links,
    "memory": check_memory,
    "speed": check_speed,
    "compile": check_compile,
}


# --- The parts, in every process ---


class Products(TorchDispatchMode):
    """Counts products of matrices, convolutions too, by the number format of what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            _, factor, *_ = (one for one in tree_iter(args) if isinstance(one, torch.Tensor))
            self.counts[number_format(factor)] += 1
        return func(*args, **(kwargs or {}))


def number_format(tensor: torch.Tensor) -> str:
    """Such as bfloat16; float8 whatever its variant, torchao's wrapped tensors included."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "float8" if "float8" in (name[:6], type(tensor).__name__[:6].lower()) else name


def work(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """One part, on this rank of all; the first rank writes the figures. Collective."""
    asked = arguments.precision
    if asked:
        # Before Accelerate reads what the launcher took from accelerate_config.yaml.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no" if asked in ("fp32", "tf32") else asked
        torch.set_float32_matmul_precision("high" if asked == "tf32" else "highest")
    accelerator = start_accelerator(config)
    parts = build_parts(accelerator, config)
    model, optimizer, loader = backend.prepare(
        accelerator, parts.model, parts.optimizer, parts.train_loader
    )
    passes = take_passes(accelerator, config, parts, model, optimizer, loader)
    figures: dict[str, Any] = {}
    for one in PARTS[arguments.part]:
        figures |= one(accelerator, config, passes)
    passes.close()
    figures |= {"num_processes": accelerator.num_processes, "device": accelerator.device.type}
    if accelerator.is_main_process:
        arguments.figures.write_text(json.dumps(figures), encoding="utf-8")
    leave(accelerator)
    return 0


def measure_precision(accelerator: Any, config: TrainConfig, passes: Passes) -> dict[str, Any]:
    """Which products one forward and backward pass makes."""
    with Products() as products:
        next(passes)
    return {"products": products.counts, "tf32": torch.backends.cuda.matmul.allow_tf32}


def measure_links(accelerator: Any, config: TrainConfig, passes: Passes) -> dict[str, Any]:
    """Bus bandwidth of an all-reduce."""
    count = accelerator.num_processes
    backend = torch.distributed.get_backend() if count > 1 else "none"
    numbers = torch.ones(BYTES // 4, device=accelerator.device)
    tries = TIMED if backend == "nccl" else 2
    for number in range(WARMUP + tries if backend == "nccl" else 1 + tries):
        if number == (WARMUP if backend == "nccl" else 1):
            _wait(accelerator)
            start = time.perf_counter()
        if count > 1:
            torch.distributed.all_reduce(numbers)
    _wait(accelerator)
    seconds = (time.perf_counter() - start) / tries
    return {"gb_per_second": 2 * (count - 1) / count * BYTES / seconds / 1e9, "backend": backend}


def measure_memory(accelerator: Any, config: TrainConfig, passes: Passes) -> dict[str, Any]:
    """Most bytes of a GPU in use during training; the first step makes the optimizer's state."""
    for _ in range(3 * config.gradient_accumulation_steps):
        next(passes)
    if accelerator.device.type != "cuda":
        return {"allocated": None, "reserved": None}
    found = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    peaks = accelerator.gather(torch.tensor([found], device=accelerator.device)).amax(dim=0)
    return dict(zip(("allocated", "reserved"), peaks.tolist(), strict=True))


def measure_speed(accelerator: Any, config: TrainConfig, passes: Passes) -> dict[str, Any]:
    """Samples per second over all processes."""
    for _ in range(WARMUP * config.gradient_accumulation_steps):
        next(passes)
    _wait(accelerator)
    start = time.perf_counter()
    for _ in range(TIMED * config.gradient_accumulation_steps):
        next(passes)
    _wait(accelerator)
    seconds = time.perf_counter() - start
    return {"samples_per_second": TIMED * config.global_batch_size / seconds}


def _wait(accelerator: Any) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    accelerator.wait_for_everyone()


Measure = Callable[[Any, TrainConfig, Passes], dict[str, Any]]
# Memory first: the others use some too.
PARTS: dict[str, tuple[Measure, ...]] = {
    "measure": (
        measure_memory,
        measure_precision,
        measure_links,
    ),  # memory before the others use it
    "speed": (measure_speed,),
}

if __name__ == "__main__":
    run(main)
