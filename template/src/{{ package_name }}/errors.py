"""Failures that a person can mend: one sentence, no traceback."""

import errno
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

EXIT_ERROR = 1
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved, start again to continue

# File by which a rank tells the launcher how it ended; the launcher makes the name.
NOTE_VARIABLE = "LAUNCH_NOTE"
LAUNCHER_VARIABLE = "LAUNCHER_PID"
EXPLAINED = "explained"
SAVED = "saved"

ALMOST_FULL = 1 << 20  # bytes

TOO_FEW_SAMPLES = "Expected more than 1 value per channel when training"

# Errors of libraries that have a well-known cure.
HINTS = {
    "Expected to have finished reduction": "some parameters got no gradient in this step: set "
    "find_unused_parameters: true in the configuration, or remove them from the model",
    TOO_FEW_SAMPLES: "BatchNorm does not learn from one sample: raise global_batch_size, or lower "
    "gradient_accumulation_steps, for two or more in each forward pass",
    "requires the cpu_adam op": "DeepSpeed compiles its optimizer for the CPU: install a C++ "
    "compiler and Python's headers (Debian, Ubuntu: build-essential, python3-dev)",
    "out of memory": "raise gradient_accumulation_steps to make each forward pass smaller "
    "(global_batch_size stays), or take a smaller model",
    "unable to open shared memory object": "/dev/shm is too small for the loader processes: raise "
    "shm_size, or lower num_workers",
}

# What a rank meets when another one has died; which one, and why, the launcher says.
LOST_CONNECTION = re.compile(r"Connection (closed|reset) by peer|Broken pipe")

ADVICE = {
    errno.ENOSPC: "the volume is full: free some space, or lower keep_last",
    errno.EDQUOT: "the quota is used up: free some space, or lower keep_last",
    errno.EROFS: "the volume is read-only: mount it writable",
    errno.EACCES: "permission denied: make the folder writable for this user",
}


class UserError(Exception):
    """Something the person who started the program can put right; the message says how."""


def run(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and leave with its exit code."""
    try:
        sys.exit(main() or 0)
    except UserError as error:
        # All ranks find the same fault. The first of a machine says it; the others would end the
        # job before it does, so they wait to be stopped.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(10)
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave_note(EXPLAINED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in ADVICE:
            print(f"error: {error.filename}: {describe(error)}", file=sys.stderr, flush=True)
            leave_note(EXPLAINED)
            os._exit(EXIT_ERROR)
        if isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)):
            rank = os.environ.get("RANK", "0")
            print(f"rank {rank} lost its connection to another rank", file=sys.stderr, flush=True)
            os._exit(EXIT_ERROR)
        traceback.print_exc()
        for text, cure in HINTS.items():
            if text in str(error):
                print(f"hint: {cure}", file=sys.stderr, flush=True)
    # At once: an orderly exit would wait for the process group, and so for the other ranks.
    sys.stdout.flush()
    os._exit(EXIT_ERROR)


def describe(error: BaseException, volume: Path | None = None) -> str:
    """What went wrong with a volume, and what to do, in a few words."""
    number = getattr(error, "errno", None)
    text = " ".join(str(error).split()) or type(error).__name__
    if number is None and volume is not None and shutil.disk_usage(volume).free < ALMOST_FULL:
        number = errno.ENOSPC  # torch and safetensors report a full disk by errors of their own
    return ADVICE.get(number or 0, text)


def leave_note(text: str) -> None:
    """Tell the launcher, if there is one, how this rank ends."""
    note = os.environ.get(NOTE_VARIABLE)
    if note:
        with suppress(OSError):  # it has gone
            Path(note).write_text(text, encoding="utf-8")
