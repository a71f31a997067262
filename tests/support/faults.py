# mypy: ignore-errors
"""Goes into a copy of a generated project as `faults.py`: kills a process at a named point of saving.

FAULT is RANK:WHOM:POINT. At the first such point in this start, this rank kills WHOM: itself, the launcher, or all
processes of the job. Points are `meet`, before the ranks know each other, and the operations on the checkpoint volume,
with digits of names left out.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from . import checkpoint, staging

FAULT, REACHED = os.environ.get("FAULT", ""), os.environ.get("FAULT_REACHED", "")


def reach(point: str) -> None:
    rank, whom, wanted = (FAULT or "::").split(":")
    if rank != os.environ.get("RANK", "0") or re.sub(r"\d", "", wanted) != re.sub(r"\d", "", point):
        return
    Path(REACHED).write_text(point)
    launcher, me = os.getppid(), os.getpid()
    others = [one for one in processes() if one not in (launcher, me)] if whom == "all" else []
    for process in [*others, *([] if whom == "rank" else [launcher]), *([] if whom == "launcher" else [me])]:
        os.kill(process, signal.SIGKILL)
    time.sleep(1)  # without its launcher a rank is told to stop, saves and ends; or is killed, if it has yet to start


def processes() -> list[int]:
    """Of this job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"FAULT_REACHED={REACHED}".encode() in variables:
            found.append(int(path.parent.name))
    return found


def wrap(owner: Any, name: str, tell: Callable[..., str], after: bool = False) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not after:
            reach(tell(*arguments, **options))
        result = original(*arguments, **options)
        if after:
            reach(tell(*arguments, **options))
        return result

    setattr(owner, name, wrapped)


if FAULT:
    wrap(Accelerator, "__init__", lambda *_, **__: "meet")
    wrap(Accelerator, "save_state", lambda *_, **__: "state")
    wrap(Accelerator, "save_state", lambda *_, **__: "state written", after=True)
    wrap(staging, "save_accelerator_state", lambda *_, **__: "state")
    wrap(staging, "save_accelerator_state", lambda *_, **__: "state written", after=True)
    wrap(checkpoint, "_write", lambda path, text: f"write {path.name}")
    wrap(checkpoint, "_flush", lambda path: f"flush {path.name}")
    wrap(Path, "rename", lambda old, new: f"rename {old.name} {Path(new).name}")
    wrap(Path, "replace", lambda old, new: f"replace {Path(new).name}")
    wrap(shutil, "rmtree", lambda path, **_: f"remove {Path(path).name}")
