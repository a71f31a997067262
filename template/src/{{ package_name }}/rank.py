"""One rank of several: `python -m <package>.rank MODULE [ARGUMENTS…]`, which the launcher starts.

Runs the module as `python -m MODULE` does, and leaves before Python takes itself apart: a thread of
gloo may only then let go of the last message, and would abort the process, since it frees a tensor
of a Python that has gone.
"""

import atexit
import ctypes
import os
import runpy
import signal
import sys
import threading

from .errors import LAUNCHER_VARIABLE

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main() -> None:
    """Run the module that the arguments name, and leave with its exit code."""
    # Without its launcher a rank would wait for the others, which it has not met yet.
    when_launcher_dies(signal.SIGKILL)
    del sys.argv[0]
    for stream in sys.stdout, sys.stderr:  # whole lines, so that those of two ranks do not mix
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    code = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end begins
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def when_launcher_dies(number: signal.Signals) -> None:
    """Have the kernel send this rank a signal when the launcher is killed, which then cannot."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != int(launcher):  # it died before
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
