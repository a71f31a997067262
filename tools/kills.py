"""Kill runs of a generated project at random instants, resume them, and compare their ends: `nox -s kills -- 1000`.

So many kills of a rank, the launcher or all processes, dealt out evenly to DDP, DDP that saves in the background,
ZeRO 2, ZeRO 3 and FSDP 2. Each run is started again until it is finished. Then every tensor of its last checkpoint and
every row of its figures must be those of a run that was left alone. After each kill all checkpoints must be intact, and
no fewer than before. Prints a table; exits 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.support.kills import Run, kill_at_a_random_instant
from tests.support.render import copier_command, data_arguments, export
from tests.test_smoke import environment
from tests.test_smoke_backends import ANSWERS, WAYS, change

OPTIONS = "--max_steps 56 --log_every_steps 5 --save_every_steps 3 --keep_last 2"
KINDS = {
    "ddp": ("ddp", ""),
    "ddp, async_save": ("ddp", "--async_save true"),
    "zero2": ("zero2", ""),
    "zero3": ("zero3", ""),
    "fsdp": ("fsdp", ""),
}


def make(scratch: Path, name: str) -> Path:
    """A project of this way, set up."""
    way, template, project = WAYS[name], scratch / "template", scratch / name
    if not template.exists():
        export(template)
    if not project.exists():
        answers = data_arguments(ANSWERS[way.backend])
        copy = copier_command("copy", "--quiet", "--defaults", *answers, template, project)
        for command, folder in ((copy, scratch), (["make", "setup"], project)):
            subprocess.run(command, cwd=folder, env=environment(folder), check=True, stdout=subprocess.DEVNULL)
        change(project, way.config)
    return project


def kill(scratch: Path, kind: str, wanted: int, generator: random.Random) -> dict[str, int]:
    """So many kills of one kind, over as many runs as it takes. Returns how often whom, and the number of runs."""
    name, options = KINDS[kind]
    expected = Run(make(scratch, name), "whole", OPTIONS)
    started = time.monotonic()
    assert expected.end(expected.start()) == 0, expected.said()
    seconds = time.monotonic() - started
    seen = {"rank": 0, "launcher": 0, "all": 0, "runs": 0}
    while sum(seen.values()) - seen["runs"] < wanted:
        run = replace(expected, name=f"run-{seen['runs']}", options=f"{OPTIONS} {options}")
        complete, whom = 0, ""
        while whom != "nobody":
            whom, code = kill_at_a_random_instant(run, seconds, generator)
            complete = run.check_nothing_is_lost(complete, kind)
            if whom == "nobody":
                assert code == 0, run.said()
            else:
                seen[whom] += 1
        assert run.result() == expected.result(), f"{kind}: another end than a run left alone"
        seen["runs"] += 1
        shutil.rmtree(run.folder)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s kills --", description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="all kills of this kind")
    options = parser.parse_args()
    kinds = [options.only] if options.only else list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            generator = random.Random(f"{options.seed} {kind}")
            seen = kill(Path(folder), kind, -(-options.kills // len(kinds)), generator)
            kills = sum(seen.values()) - seen["runs"]
            print(
                f"{kind}: {kills} kills ({seen['rank']} of a rank, {seen['launcher']} of the launcher, "
                f"{seen['all']} of all) in {seen['runs']} runs; no checkpoint lost, every end the same bit for bit",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
