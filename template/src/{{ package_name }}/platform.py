"""What the answers expect of the machine: `platform.yaml`, read and checked.

The file belongs to the template: `copier update` rewrites it when an answer changes, so nothing
here is edited by hand.
"""

from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from .errors import UserError

FILE_NAME = "platform.yaml"

T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """One machine and how many of them; name, capability and memory are None without a GPU."""

    gpu: str
    gpu_name: str | None
    compute_capability: str | None
    gpu_memory_gb: int | None
    num_gpus: int  # per machine
    num_machines: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability as numbers, (0, 0) without a GPU."""
        major, _, minor = (self.compute_capability or "0.0").partition(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class Software:
    """Versions of the container image; `min_driver` is the first number of the driver version."""

    python: str
    torch: str
    torchvision: str
    cuda: str | None
    min_driver: int | None


@dataclass(frozen=True)
class Training:
    """How training is spread over processes, and its number format."""

    backend: str  # ddp, fsdp or deepspeed
    precision: str  # fp32, fp16, bf16 or fp8
    sharding: str = "none"  # or full, grad-op, hybrid of fsdp; zero1, zero2, zero3 of deepspeed
    cpu_offload: str = "none"  # or optimizer or all
    activation_checkpointing: bool = False


@dataclass(frozen=True)
class Platform:
    """All of `platform.yaml`."""

    project: str
    hardware: Hardware
    software: Software
    training: Training
    tracker: str
    preemption_grace_seconds: int
    shm_size_gb: int  # 0 outside containers

    @property
    def has_gpu(self) -> bool:
        """Whether training runs on GPUs."""
        return self.hardware.num_gpus > 0

    @property
    def num_processes(self) -> int:
        """Processes over all machines: one per GPU, or one without a GPU."""
        return max(self.hardware.num_gpus, 1) * self.hardware.num_machines

    @property
    def mixed_precision(self) -> str:
        """The precision in Accelerate's words."""
        return "no" if self.training.precision == "fp32" else self.training.precision


def find_root() -> Path:
    """Folder that holds `platform.yaml`: this package's project, else upwards from here.

    Raises UserError when there is none.
    """
    here = Path.cwd()
    for folder in (Path(__file__).resolve().parents[2], here, *here.parents):
        if (folder / FILE_NAME).is_file():
            return folder
    raise UserError(f"no {FILE_NAME} in {here} or above: run this from the project's folder")


def load_platform(root: Path | None = None) -> Platform:
    """Read `platform.yaml` of the project at `root`; raises UserError in one sentence."""
    path = (find_root() if root is None else root) / FILE_NAME
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: run this from the project's folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not valid YAML: {reason}") from None
    return _build(Platform, raw, "")


def _build(cls: type[T], raw: Any, where: str) -> T:
    """Make the dataclass `cls` from a mapping, with exact types; `where` names the mapping."""
    if not isinstance(raw, dict):
        raise UserError(f"{FILE_NAME}: {where or 'the file'} should hold keys and values")
    values: dict[str, Any] = {}
    for key, hint in get_type_hints(cls).items():
        name = f"{where}.{key}" if where else key
        if is_dataclass(hint):
            values[key] = _build(hint, raw.get(key), name)  # type: ignore[arg-type]
            continue
        kinds = get_args(hint) or (hint,)
        value = raw.get(key)
        # The exact type: `true` is no number of GPUs, and an unquoted 3.10 is no version.
        if type(value) not in kinds:
            expected = " or ".join(_WORDS[kind] for kind in kinds)
            found = "nothing" if value is None else repr(value)
            raise UserError(f"{FILE_NAME}: {name} should be {expected}, not {found}")
        values[key] = value
    return cls(**values)


_WORDS = {str: "quoted text", int: "a whole number", bool: "true or false", NoneType: "null"}
