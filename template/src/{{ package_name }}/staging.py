"""A copy of the training state in memory, from which it is saved while training goes on.

Its memory is kept from save to save, and is as large as model and optimizer state. Only DDP, where
the main process has all of it, is staged; sharded backends write from all ranks at once instead.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from torch import nn

from . import backend
from .errors import UserError


def prepare_staging(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> "Staging":
    """Memory for `async_save`. Raises: UserError where the state is shared out among ranks."""
    if backend.backend_of(accelerator) != backend.DDP:
        raise UserError(
            f"async_save is for DDP, and this is {backend.layout(accelerator)}, whose ranks write "
            "their parts at once: set async_save: false"
        )
    return Staging(optimizer)


class Staging:
    """Memory for the state of one model and its optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._memory: dict[tuple[Any, ...], torch.Tensor] = {}

    def stage(self, accelerator: Accelerator, model: nn.Module, folder: Path) -> Callable[[], Any]:
        """Copy the state. Returns: what writes the copy, as `accelerator.save_state` would.

        Ranks that have nothing but their own random state write it here and now.
        """
        write = partial(
            save_accelerator_state,
            str(folder),
            schedulers=[],
            dataloaders=[],
            process_index=accelerator.process_index,
            step=accelerator.step,
        )
        if not accelerator.is_main_process:
            write(model_states=[], optimizers=[])
            return lambda: None
        scaler = accelerator.scaler
        state = {
            "model": accelerator.get_state_dict(model),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        copied = self._copy(state, (), {})
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return partial(
            write,
            model_states=[copied["model"]],
            optimizers=[_saved(copied["optimizer"])],
            scaler=None if scaler is None else _saved(copied["scaler"]),
        )

    def _copy(self, value: Any, path: tuple[Any, ...], done: dict[Any, torch.Tensor]) -> Any:
        """The same structure with tensors of its own; shared weights stay shared."""
        if isinstance(value, torch.Tensor):
            identity = (value.data_ptr(), value.shape, value.stride()) if value.numel() else path
            if identity not in done:
                done[identity] = self._place(value, path).copy_(value.detach(), non_blocking=True)
            return done[identity]
        if isinstance(value, dict):
            copied = ((key, self._copy(one, (*path, key), done)) for key, one in value.items())
            # By its type Accelerate knows a model's state, of which it saves shared weights once.
            return OrderedDict(copied) if isinstance(value, OrderedDict) else dict(copied)
        if isinstance(value, list | tuple):
            return type(value)(self._copy(one, (*path, i), done) for i, one in enumerate(value))
        return value

    def _place(self, value: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        memory = self._memory.get(path)
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            pinned = value.device.type == "cuda"
            memory = torch.empty_like(value, device="cpu", pin_memory=pinned)
            self._memory[path] = memory
        return memory


def _saved(state: Any) -> SimpleNamespace:
    """What is asked for its `state_dict`."""
    return SimpleNamespace(state_dict=lambda: state)
