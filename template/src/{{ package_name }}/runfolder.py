"""One run folder, one job at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator

from .collective import FailTogether
from .errors import UserError

LOCK = ".lock"


@contextmanager
def hold_run_folder(accelerator: Accelerator, run_dir: Path) -> Iterator[None]:
    """Make the run's folder and keep other jobs out of it. Collective.

    The lock is the kernel's: it ends with the process that holds it, however that dies.
    Raises: UserError when the folder cannot be written, or another job trains in it.
    """
    with ExitStack() as held:
        with FailTogether(accelerator, f"cannot write to {run_dir}"):
            if accelerator.is_main_process:
                run_dir.mkdir(parents=True, exist_ok=True)
                held.enter_context(hold(run_dir))
                probe = run_dir / ".write-test"
                probe.write_bytes(b"0" * 4096)
                probe.unlink()
        yield


@contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Be the one process that changes this folder. Raises: UserError when another one does."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another job is training in {run_dir}: wait for it, or give another run_name"
            ) from None
        yield
    finally:
        os.close(descriptor)
