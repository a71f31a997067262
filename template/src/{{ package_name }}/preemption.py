"""A request to stop, agreed on by all ranks.

A scheduler, a container engine or a person sends a signal to some process of the job. Here it sets
a flag; the flag is reduced over the ranks at each step boundary, so that all of them save the same
step. The reduction runs on the CPU beside the step and is read at the next boundary, so it costs no
synchronisation with the GPU.
"""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .rank import when_launcher_dies

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Preemption:
    """Catches the signals for the life of the process; a second one changes nothing."""

    def __init__(self) -> None:
        self.signal_received: str | None = None
        self._flag = torch.zeros(1)
        self._work: dist.Work | None = None
        self._group: Any = None
        for one in SIGNALS:
            signal.signal(one, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_received = self.signal_received or signal.Signals(number).name

    def connect(self) -> None:
        """Make the process group of the reduction. Collective; once the ranks know each other."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        when_launcher_dies(signal.SIGTERM)  # from now on there may be something to save

    def agreed(self) -> bool:
        """Whether any rank had been told to stop when this was last called. Collective."""
        if self._group is None:
            return self.signal_received is not None
        stop = False
        if self._work is not None:
            self._work.wait()
            stop = bool(self._flag.item())
        self._flag.fill_(self.signal_received is not None)
        self._work = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return stop

    def disconnect(self) -> None:
        """Wait for the reduction under way. Collective; before the process group goes."""
        if self._work is not None:
            self._work.wait()
            self._work = None
