"""A run of a generated project that is killed again and again, and what is left of it each time."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.test_smoke import environment

FAULTS = Path(__file__).with_name("faults.py")
TIMEOUT = 180
TIMES = ("samples_per_second", "elapsed_seconds")
# What is wrong with each complete checkpoint of a run, by name: not by the project's own code, and without torch.
FIND_DAMAGE = """
import json, sys, xxhash
from pathlib import Path
found = {}
for manifest in sorted(Path(sys.argv[1]).glob("step-????????/MANIFEST.json")):
    files = json.loads(manifest.read_text())["files"]
    hashes = {name: xxhash.xxh3_128_hexdigest((manifest.parent / name).read_bytes()) for name in files}
    found[manifest.parent.name] = [name for name in files if hashes[name] != files[name]["xxh3_128"]]
print(json.dumps(found))
"""
# Where the newest one stands, and a hash of each of its tensors.
READ_STATE = """
import hashlib, json, sys, torch
sys.path.insert(0, "tests")
from pathlib import Path
from conftest import read_state
from my_project.checkpoint import complete_checkpoints, read_progress
newest = complete_checkpoints(Path(sys.argv[1]))[-1]
progress = read_progress(newest)
print(json.dumps({
    "step": progress.step,
    "samples_seen": progress.samples_seen,
    "state": {
        name: hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
        for name, value in read_state(newest).items() if value.numel()
    },
}))
"""


def prepare(project: Path) -> None:
    """Have the project reach the points of saving at which it can be killed."""
    package = project / "src" / "my_project"
    shutil.copy(FAULTS, package)
    script = package / "train.py"
    script.write_text(script.read_text().replace("\nif __name__ ==", "\nfrom . import faults\n\nif __name__ =="))


@dataclass
class Run:
    """One run, `name`, of a project."""

    project: Path
    name: str
    options: str

    @property
    def folder(self) -> Path:
        return self.project / "checkpoints" / self.name

    def start(self, fault: str = "") -> subprocess.Popen[bytes]:
        self.reached.unlink(missing_ok=True)
        said = (self.project / f"{self.name}.txt").open("ab")
        command = f"./launch.sh --cpu train --config configs/smoke.yaml --run_name {self.name} {self.options}"
        return subprocess.Popen(
            command.split(),
            cwd=self.project,
            env=environment(self.project) | {"FAULT": fault, "FAULT_REACHED": str(self.reached)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for it, and for every process that it started. Returns the exit code."""
        try:
            code = process.wait(TIMEOUT)
            deadline = time.monotonic() + 30
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not self.processes(), f"left over after {code}: {self.said()}"
            return code
        finally:
            for one in self.processes():
                os.kill(one, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The living ones of the run, each of which has this in its environment."""
        mark, found = f"FAULT_REACHED={self.reached}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except OSError:
                continue  # gone, or somebody else's
            if mark in variables:
                found.append(int(path.parent.name))
        return found

    @property
    def reached(self) -> Path:
        """The file that tells that the fault was reached."""
        return self.project / f"{self.name}-reached"

    def said(self) -> str:
        return (self.project / f"{self.name}.txt").read_text(errors="replace")[-4000:]

    def damage(self) -> dict[str, list[str]]:
        """Damaged files of each complete checkpoint."""
        return self._ask(FIND_DAMAGE)

    def check_nothing_is_lost(self, complete: int, what: str) -> int:
        """All checkpoints are intact, and no fewer than before. Returns their number."""
        damage = self.damage()
        assert not any(damage.values()), f"{what}: {damage}"
        assert len(damage) >= min(complete, 2), f"{what}: one is lost, {damage}"
        return len(damage)

    def _ask(self, script: str) -> Any:
        command = ["scripts/run.sh", "python", "-c", script, str(self.folder)]
        printed = subprocess.check_output(command, cwd=self.project, env=environment(self.project), text=True)
        return json.loads(printed.splitlines()[-1])  # DeepSpeed says something before

    def result(self) -> dict[str, Any]:
        """What must be the same however often a run was killed."""
        return {**self._ask(READ_STATE), "rows": self.rows()}

    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "metrics.csv").open() as file:
            return [{key: row[key] for key in row if key not in TIMES} for row in csv.DictReader(file)]


def kill_at_a_random_instant(run: Run, seconds: float, generator: random.Random) -> tuple[str, int]:
    """Start, and kill a rank, the launcher or all after up to so many seconds. Returns whom, and the exit code."""
    process = run.start()
    whom = generator.choice(["rank", "launcher", "all"])
    deadline = time.monotonic() + generator.uniform(0, seconds)
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    if process.poll() is not None:
        return "nobody", run.end(process)
    others = [one for one in run.processes() if one != process.pid]
    chosen = {"rank": generator.sample(others, min(len(others), 1)), "launcher": [process.pid], "all": others}[whom]
    for one in [*chosen, *([process.pid] if whom == "all" or not chosen else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    code = run.end(process)
    return whom if code else "nobody", code  # it may have been at its end already
