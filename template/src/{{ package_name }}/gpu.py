"""What is known about the GPUs: name, memory, utilisation. None wherever there is none.

torch and NVML (nvidia-ml-py) are imported on first use. The functions for the training loop never
raise: a missing figure must not stop a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it; memory in GiB."""

    name: str
    capability: tuple[int, int]
    memory_gb: float


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver as NVML sees it; `num_gpus` counts the whole machine."""

    version: str
    num_gpus: int


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch can use, in its order; empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Gpu(p.name, (p.major, p.minor), p.total_memory / GIB) for p in properties]


def driver() -> Driver | None:
    """The NVIDIA driver; None without a driver or without nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), int(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def gpu_name(device: torch.device | None = None) -> str | None:
    """Model name of `device` (default: the current GPU)."""
    import torch

    return torch.cuda.get_device_name(device) if _is_gpu(device) else None


def gpu_memory_gb(device: torch.device | None = None) -> float | None:
    """Most memory that torch has held on `device` since the start, in GiB."""
    import torch

    return torch.cuda.max_memory_reserved(device) / GIB if _is_gpu(device) else None


def gpu_utilization(device: torch.device | None = None) -> float | None:
    """Share of the last moments in which `device` was busy, in percent.

    None too where NVML cannot tell, such as on a MIG slice.
    """
    import torch

    if not _is_gpu(device):
        return None
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # NVML's own errors, or nvidia-ml-py missing
        return None


def _is_gpu(device: torch.device | None) -> bool:
    import torch

    return torch.cuda.is_available() and (device is None or device.type == "cuda")
