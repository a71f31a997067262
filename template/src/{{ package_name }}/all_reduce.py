"""Do processes on this machine reach each other? One all-reduce over new processes.

The doctor starts it. What hangs in a real run (network interfaces, shared memory, links between
GPUs) hangs here too, but ends soon, with the step that was reached.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

IMPORT_TIMEOUT = 180.0  # seconds; a slow disk or a busy machine is no fault
TIMEOUT = 30.0  # seconds for the exchange, once all ranks are ready for it
NUM_ELEMENTS = 2**22  # 16 MiB: enough to leave the path for tiny messages
STEPS = ("starting Python", "importing torch", "joining the group", "summing")


@dataclass(frozen=True)
class AllReduce:
    """How it went; `problem` is empty when all ranks got the right sum."""

    backend: str
    num_processes: int
    seconds: float
    problem: str = ""
    hung_while: str = ""  # one of STEPS, when time ran out


def all_reduce(
    backend: str,
    num_processes: int,
    timeout: float = TIMEOUT,
    import_timeout: float = IMPORT_TIMEOUT,
) -> AllReduce:
    """Sum a tensor over `num_processes` new processes, in limited time (seconds)."""
    source = str(Path(__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(num_processes)]
        try:
            for rank, log in enumerate(logs):
                arguments = [backend, str(rank), str(num_processes), f"{folder}/store"]
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, "-m", f"{__package__}.all_reduce", *arguments],
                        env={**os.environ, "PYTHONPATH": python_path},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                processes.append(process)
            codes, waited = _wait(processes, logs, timeout, import_timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        steps = [_step(log) for log in logs]
        endings = [_last_line(log) for log in logs]
    seconds = time.monotonic() - start
    for rank, code in enumerate(codes):
        if code:
            reason = endings[rank] or f"exit code {code}"
            return AllReduce(backend, num_processes, seconds, f"rank {rank}: {reason}")
    if None in codes:
        step = min(steps, key=STEPS.index)
        problem = f"no answer within {waited:.0f} s, hung while {step}"
        return AllReduce(backend, num_processes, seconds, problem, step)
    return AllReduce(backend, num_processes, seconds)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    logs: Sequence[Path],
    timeout: float,
    import_timeout: float,
) -> tuple[list[int | None], float]:
    """Wait until all have ended, one has failed or time is up.

    Returns: exit codes, None for those that still run, and the seconds of the last wait.
    """
    start, limit, ready = time.monotonic(), import_timeout, False
    while True:
        codes = [process.poll() for process in processes]
        waited = time.monotonic() - start
        if None not in codes or any(codes) or waited > limit:
            return codes, waited
        if not ready and all(STEPS.index(_step(log)) >= 2 for log in logs):
            start, limit, ready = time.monotonic(), timeout, True
        time.sleep(0.05)


def _step(log: Path) -> str:
    """The last step that this rank announced."""
    lines = log.read_text(errors="replace").splitlines()
    return max((step for step in STEPS if step in lines), key=STEPS.index, default=STEPS[0])


def _last_line(log: Path) -> str:
    """What this rank said last, announcements left out."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and line not in STEPS), "")


def _announce(step: str) -> None:
    print(step, flush=True)


def worker(backend: str, rank: int, num_processes: int, store: str) -> None:
    """One rank: leaves with an error when the sum is wrong."""
    _announce(STEPS[1])
    import torch
    from torch import distributed

    _announce(STEPS[2])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=IMPORT_TIMEOUT),
    )
    _announce(STEPS[3])
    numbers = torch.full((NUM_ELEMENTS,), float(rank + 1), device=device)
    distributed.all_reduce(numbers)
    expected = num_processes * (num_processes + 1) / 2
    if not bool((numbers == expected).all()):
        sys.exit(f"the sum is wrong: {numbers.min().item()} instead of {expected}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
