"""Failures that a person can mend: one sentence, no traceback."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

EXIT_ERROR = 1
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved, start again to continue

# File by which a rank tells the launcher how it ended; the launcher makes the name.
NOTE_VARIABLE = "LAUNCH_NOTE"
EXPLAINED = "explained"
SAVED = "saved"

# Errors of libraries that have a well-known cure.
HINTS = {
    "Expected to have finished reduction": "some parameters got no gradient in this step: set "
    "find_unused_parameters: true in the configuration, or remove them from the model",
    "out of memory": "raise gradient_accumulation_steps to make each forward pass smaller "
    "(global_batch_size stays), or take a smaller model",
    "unable to open shared memory object": "/dev/shm is too small for the loader processes: raise "
    "shm_size, or lower num_workers",
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
        traceback.print_exc()
        for text, cure in HINTS.items():
            if text in str(error):
                print(f"hint: {cure}", file=sys.stderr, flush=True)
    # At once: an orderly exit would wait for the process group, and so for the other ranks.
    sys.stdout.flush()
    os._exit(EXIT_ERROR)


def leave_note(text: str) -> None:
    """Tell the launcher, if there is one, how this rank ends."""
    note = os.environ.get(NOTE_VARIABLE)
    if note:
        Path(note).write_text(text, encoding="utf-8")
