"""The checkpoints of a run: a table of them, and what can go.

Run as `make checkpoints`, or `python -m <package>.checkpoints [--prune] [--keep_last N]`.
"""

import argparse
import shutil
from datetime import datetime
from pathlib import Path

from .checkpoint import (
    ASIDE,
    complete_checkpoints,
    find_damage,
    read_pointers,
    read_progress,
    retired,
    size_of,
)
from .config import load_config
from .errors import UserError, run
from .runfolder import hold


def main() -> int:
    """List the checkpoints of a run, each file of them checked, or remove old ones."""
    parser = argparse.ArgumentParser(prog="checkpoints", description=main.__doc__, add_help=False)
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove all but the newest keep_last, the best and multiples of keep_every, and what "
        "unfinished saves left",
    )
    config, arguments = load_config(extra=parser)
    if not config.run_dir.is_dir():
        raise UserError(f"there is no run in {config.run_dir}: check run_name")
    if arguments.prune:
        with hold(config.run_dir):
            prune(config.run_dir, config.keep_last, config.keep_every)
    return show(config.run_dir)


def show(run_dir: Path) -> int:
    """Print the table. Returns: 1 when a checkpoint is damaged."""
    folders = complete_checkpoints(run_dir)
    if not folders:
        print(f"no checkpoint in {run_dir} yet")
        return 0
    pointed = read_pointers(run_dir)
    damaged = 0
    print(f"{'step':>10}  {'saved':<16}  {'size':>10}  {'intact':<6}  scores")
    for folder in folders:
        damage = find_damage(folder)
        damaged += bool(damage)
        names = "".join(f"  {name}" for name, target in pointed.items() if target == folder)
        print(
            f"{int(folder.name.removeprefix('step-')):>10,}  "
            f"{datetime.fromtimestamp(folder.stat().st_mtime):%Y-%m-%d %H:%M}  "
            f"{size_of(folder) / 2**20:>7,.1f} MB  {'no' if damage else 'yes':<6}  "
            + (damage or describe_scores(folder))
            + names
        )
    print(f"{len(folders)} in {run_dir}: {sum(map(size_of, folders)) / 2**20:,.1f} MB")
    return int(damaged > 0)


def describe_scores(folder: Path) -> str:
    """Of the evaluation that belongs to the step, if there was one."""
    progress = read_progress(folder)
    if progress.evaluated_step != progress.step:
        return "not evaluated"
    return ", ".join(f"{name} {value:.4f}" for name, value in progress.scores.items())


def prune(run_dir: Path, keep_last: int, keep_every: int) -> None:
    """Remove what the retention does not keep; nobody may train in the folder meanwhile."""
    kept = {folder.name for folder in read_pointers(run_dir).values()}
    names = [folder.name for folder in complete_checkpoints(run_dir)]
    leftovers = [*run_dir.glob("step-*.tmp"), *run_dir.glob(f"step-*{ASIDE}")]
    for name in retired(names, keep_last, keep_every, kept):
        doomed = run_dir / f"{name}.tmp"  # a half-removed one must not look like a checkpoint
        shutil.rmtree(doomed, ignore_errors=True)
        leftovers.append((run_dir / name).rename(doomed))
    for folder in leftovers:
        shutil.rmtree(folder)
        print(f"removed {folder.with_suffix('') if folder.suffix == '.tmp' else folder}")


if __name__ == "__main__":
    run(main)
