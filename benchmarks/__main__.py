"""Speed as ratios, both sides in one run, taking turns: `nox -s bench`.

copy        `copier copy` of the default project        against `copier --help`
first step  the smoke run's way to its first optimizer  against `accelerate launch` of a script that
            step, on two CPU processes                  does nothing else
save        a checkpoint of 500 MB, hashed and flushed  against `torch.save`, flushed
async_save  how long it holds up training               against `torch.save`, flushed

Prints medians and ratios, writes build/benchmarks.json, exits 1 when a ratio is over its target.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bootstrap
from tools.sources import export

COPIER = bootstrap.TOOLS_VENV / "bin" / "copier"
FIRST_STEP = "first step done"
TARGETS = {"copy": 2.5, "first step": 1.3, "save": 1.15, "async_save": 0.25}


def seconds(command: list[str], cwd: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def seconds_until(line_with: str, command: list[str], cwd: Path, env: dict[str, str]) -> float:
    """The time from the start of the command to the line; what comes after it is cut off."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if line_with in line:
                taken = time.perf_counter() - started
                break
        else:
            raise SystemExit(f"error: {command} never printed {line_with!r}:\n{''.join(seen)}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return taken


def take_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    for measure in sides.values():
        measure()  # fills caches of both sides alike
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        # Each side goes first every other time.
        for name in list(sides)[:: 1 if number % 2 else -1]:
            times[name].append(sides[name]())
    return times


def installed(python: Path, *packages: str) -> dict[str, str]:
    script = "import sys, json, importlib.metadata as m; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    printed = subprocess.run([python, "-c", script, *packages], capture_output=True, text=True, check=True)
    return json.loads(printed.stdout)


def committed_template(scratch: Path) -> Path:
    """The work tree as people copy it: committed, and packed as hosts keep repositories."""
    template = export(scratch / "template")
    environment = {**bootstrap.IDENTITY, **os.environ}
    for command in (
        ["git", "init", "--quiet"],
        ["git", "add", "--all"],
        ["git", "commit", "--quiet", "--message", "template"],
        ["git", "repack", "-a", "-d", "--quiet"],
    ):
        subprocess.run(command, cwd=template, check=True, env=environment)
    return template


def copy(template: Path, project: Path) -> list[str]:
    return [
        *(str(COPIER), "copy", "--quiet", "--defaults", "--vcs-ref", "HEAD"),
        *(str(template), str(project)),
    ]


def measure_copy(scratch: Path, template: Path, rounds: int) -> dict[str, list[float]]:
    def copied() -> float:
        project = scratch / "copied"
        taken = seconds(copy(template, project), scratch)
        shutil.rmtree(project)
        return taken

    helped = [str(COPIER), "--help"]
    sides = {"copier copy": copied, "copier --help": lambda: seconds(helped, scratch)}
    return take_turns(sides, rounds)


def ready_project(scratch: Path, template: Path) -> Path:
    """The default project, whose environment is up."""
    project = scratch / "project"
    if not project.exists():
        subprocess.run(copy(template, project), check=True)
        make = ["make", "--no-print-directory", "setup", f"VENV={bootstrap.TRAINING_VENV}"]
        subprocess.run(make, cwd=project, check=True)
    return project


def measure_first_step(scratch: Path, template: Path, rounds: int) -> dict[str, list[float]]:
    project = ready_project(scratch, template)
    bin_folder = bootstrap.TRAINING_VENV / "bin"
    environment = {**os.environ, "PATH": os.pathsep.join([str(bin_folder), os.environ["PATH"]])}
    environment["VENV"] = str(bootstrap.TRAINING_VENV)
    environment.pop("PYTHONPATH", None)
    smoke = ["./launch.sh", "--cpu", "train", "--config", "configs/smoke.yaml", "--resume", "never"]
    bare = ["accelerate", "launch", "--config_file", "accelerate_config.cpu.yaml"]
    bare.append(str(bootstrap.ROOT / "benchmarks" / "bare.py"))
    on_cpu = {**environment, "ACCELERATE_USE_CPU": "true"}

    def smoked() -> float:
        shutil.rmtree(project / "checkpoints", ignore_errors=True)
        return seconds_until(FIRST_STEP, smoke, project, environment)

    sides = {
        "launch.sh --cpu train": smoked,
        "accelerate launch bare.py": lambda: seconds_until(FIRST_STEP, bare, project, on_cpu),
    }
    return take_turns(sides, rounds)


def measure_checkpoints(scratch: Path, template: Path, rounds: int) -> dict[str, list[float]]:
    project = ready_project(scratch, template)
    script = bootstrap.ROOT / "benchmarks" / "checkpoints.py"
    printed = subprocess.run(
        [bootstrap.TRAINING_VENV / "bin" / "python", script, str(rounds), scratch / "checkpoints"],
        env={**os.environ, "PYTHONPATH": str(project / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return json.loads(printed.splitlines()[-1])


def result(times: dict[str, list[float]], name: str, side: str, against: str) -> dict[str, Any]:
    medians = {key: statistics.median(times[key]) for key in (side, against)}
    return {
        "ratio": round(medians[side] / medians[against], 3),
        "target": TARGETS[name],
        "median_seconds": {key: round(value, 3) for key, value in medians.items()},
        "seconds": {key: [round(value, 3) for value in times[key]] for key in medians},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s bench --", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side")
    parser.add_argument("--output", type=Path, default=bootstrap.BUILD / "benchmarks.json")
    options = parser.parse_args()

    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        template = committed_template(scratch)
        for name, measure in (("copy", measure_copy), ("first step", measure_first_step)):
            times = measure(scratch, template, options.rounds)
            results[name] = result(times, name, *times)
        saving = measure_checkpoints(scratch, template, options.rounds)
        for name in ("save", "async_save"):
            results[name] = result(saving, name, name, "torch.save")

    late = []
    for name, found in results.items():
        sides = ", ".join(f"{side} {value:.2f} s" for side, value in found["median_seconds"].items())
        verdict = "ok" if found["ratio"] <= found["target"] else "over the target"
        late += [name] if verdict != "ok" else []
        print(f"{name}: {found['ratio']:.2f} (at most {found['target']}: {verdict}); {sides}")
    others = {side: round(statistics.median(seconds), 3) for side, seconds in saving.items()}
    print("500 MB: " + ", ".join(f"{side} {seconds:.2f} s" for side, seconds in others.items()))
    machine = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": installed(COPIER.with_name("python"), "copier")
        | installed(bootstrap.TRAINING_VENV / "bin" / "python", "torch", "accelerate"),
        "rounds": options.rounds,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"machine": machine, "results": results, "checkpoint_seconds": others}, indent=2) + "\n"
    )
    print(f"written to {options.output}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
