"""`accelerate launch`, with signals and exit codes that reach whoever started it.

Takes the arguments of `accelerate launch`. One process is started in place of this one. Several are
watched over by torch's elastic agent; their exit code is passed on with one line that names the
failed rank, and a stop that was saved ends with EXIT_PREEMPTED.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

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


def main(argv: Sequence[str] | None = None) -> int:
    """Start training as the configuration file says. Returns the exit code."""
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    if not (arguments.multi_gpu or arguments.use_fsdp or arguments.use_deepspeed):
        command, environment = prepare_simple_launcher_cmd_env(arguments)
        os.execvpe(command[0], command, environment)

    import torch.distributed.run  # noqa: F401  (the agent, whose loggers are to be quiet)

    # The agent would die of SIGUSR1, which Slurm sends ahead of a time limit.
    signal.signal(signal.SIGUSR1, elastic._terminate_process_handler)
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
                f"error: port {port} is taken on this machine: set MAIN_PROCESS_PORT to a free one, "
                "the same on all machines",
                file=sys.stderr,
            )
            return 1
        except DistError as error:
            where = f"{arguments.main_process_ip}:{arguments.main_process_port}"
            print(
                f"error: the machines did not meet at {where} ({str(error).splitlines()[0]}): start "
                "all of them, with the same MAIN_PROCESS_IP and MAIN_PROCESS_PORT",
                file=sys.stderr,
            )
            return 1
        except SignalException as stop:
            return EXIT_PREEMPTED if note.read_text() == SAVED else 128 + int(stop.sigval)
    return 0


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
