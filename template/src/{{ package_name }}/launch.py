"""`accelerate launch`, with signals and exit codes that reach whoever started it.

Takes the arguments of `accelerate launch`. One process is started in place of this one. Several are
watched over by torch's elastic agent; their exit code is passed on with one line that names the
failed rank, and a stop that was saved ends with EXIT_PREEMPTED.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

from accelerate.commands.launch import (
    _validate_launch_command,
    launch_command,
    launch_command_parser,
)
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from .errors import EXIT_PREEMPTED, EXPLAINED, LAUNCHER_VARIABLE, NOTE_VARIABLE, SAVED

# A rank that dies leaves the others waiting for it. This signal, which nothing else sends, ends
# them at once; the agent would ask them with SIGTERM and wait for 30 seconds.
CLOSING = signal.SIGRTMAX

# Each of these has the ranks save and end.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)

# Where DeepSpeed's kernels, which are compiled on their first use, are kept.
KERNELS_VARIABLE = "TORCH_EXTENSIONS_DIR"


_signals: list[int] = []  # that told this process to stop


def main(argv: Sequence[str] | None = None) -> int:
    """Start training as the configuration file says. Returns the exit code."""
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    if not (arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed):
        command, environment = prepare_simple_launcher_cmd_env(arguments)
        os.execvpe(command[0], command, environment)

    if arguments.module:
        arguments.training_script_args.insert(0, arguments.training_script)
        arguments.training_script = f"{__package__}.rank"
    if arguments.use_deepspeed:
        if find_spec("deepspeed") is None:
            print(
                "error: DeepSpeed is not installed in this environment: run make setup, or build "
                "the image again",
                file=sys.stderr,
            )
            return 1
        threads = len(os.sched_getaffinity(0)) * arguments.num_machines // arguments.num_processes
        os.environ.setdefault("OMP_NUM_THREADS", str(max(threads, 1)))
        if KERNELS_VARIABLE not in os.environ:
            os.environ[KERNELS_VARIABLE] = str(_kernels_of_this_machine())
    import torch.distributed.run  # noqa: F401  (the agent, whose loggers are to be quiet)

    # The agent would die of SIGUSR1, which Slurm sends ahead of a time limit, and of a second
    # signal while the ranks save.
    elastic._terminate_process_handler = _stop
    signal.signal(signal.SIGUSR1, _stop)
    # It reports stops and failures with tables and tracebacks of its own code.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    elastic._get_default_signal = lambda: CLOSING
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        note = Path(folder, "note")
        note.touch()
        os.environ[NOTE_VARIABLE] = str(note)
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        arguments.log_dir = arguments.log_dir or folder  # the agent would leave its own behind
        try:
            launch_command(arguments)
        except ChildFailedError as error:
            rank, failure = _cause(error)
            if failure.exitcode != EXIT_PREEMPTED and note.read_text() != EXPLAINED:
                print(f"rank {rank} {_ending(failure.exitcode)}; all were stopped", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except ConnectionError:  # raised by Accelerate when the port of machine 0 is not free
            port = arguments.main_process_port
            print(
                f"error: port {port} is taken on this machine: set MAIN_PROCESS_PORT to a free "
                "one, the same on all machines",
                file=sys.stderr,
            )
            return 1
        except DistError as error:
            where = f"{arguments.main_process_ip}:{arguments.main_process_port}"
            reason = str(error).splitlines()[0]
            print(
                f"error: the machines did not meet at {where} ({reason}): start all of them, with "
                "the same MAIN_PROCESS_IP and MAIN_PROCESS_PORT",
                file=sys.stderr,
            )
            return 1
        except Exception:
            # Not SignalException alone: the agent, met at a bad moment, fails while it cleans up.
            if not _signals:
                raise
            return EXIT_PREEMPTED if note.read_text() == SAVED else 128 + _signals[0]
    return 0


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Begin the shutdown, once: another signal would cut it off while the ranks save."""
    _signals.append(signum)
    for one in STOPPING:  # not SIG_IGN, of which Python complains where a signal waits already
        signal.signal(one, lambda signum, frame: None)
    raise SignalException(f"told to stop by {signal.Signals(signum).name}", signal.Signals(signum))


def _kernels_of_this_machine() -> Path:
    """The folder of compiled kernels, cleared of locks that killed processes left behind.

    A process that finds a lock waits for it without end. That nobody holds a lock can be known of
    processes of this machine only, so each machine has a folder of its own.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "torch_extensions" / socket.gethostname()
    locks = list(folder.glob("*/lock"))
    held = set(_open_files()) if locks else set()
    for lock in locks:
        if str(lock.resolve()) not in held:
            lock.unlink(missing_ok=True)
    return folder


def _open_files() -> Iterator[str]:
    """Files that processes of this machine have open, as far as this user may know."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            yield str(descriptor.readlink())


def _cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how.

    Failures are timed by whole seconds, and a lost rank takes the others along at once: they end
    with an error of their own or are aborted, so any other signal is what began it.
    """
    failures = {
        rank: failure for rank, failure in error.failures.items() if failure.exitcode != -CLOSING
    }
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT:
            return rank, failure
    return min(failures.items(), key=lambda item: item[1].timestamp)


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


if __name__ == "__main__":
    sys.exit(main())
