"""Environment check: is this machine what the answers expect, and what to do where it is not.

Run as `make doctor`, or `python -m <package>.doctor [--cpu]`. Exit code 0 when no line says fail.

Each check is a pair in `CHECKS`: `collect` gathers facts from the machine, `judge` compares them
with `platform.yaml` and gives one line. Judges touch nothing, so tests hand them any machine.
"""

import argparse
import ast
import errno
import importlib
import importlib.metadata
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

from . import gpu
from .all_reduce import AllReduce, all_reduce
from .errors import run
from .platform import Platform, find_root, load_platform

MIN_FREE_GB = 1.0  # less holds no checkpoint
COMFORTABLE_FREE_GB = 10.0
MIN_SHM_GB = 1.0  # the 64 MB of a plain `docker run` kill loader workers and NCCL
USABLE_MEMORY = 0.88  # of the nominal GPU memory; driver and ECC take the rest


class Status(StrEnum):
    """How a line begins."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Line:
    """What was found and, where that is not well, what to do."""

    status: Status
    found: str
    advice: str = ""


def ok(found: str) -> Line:
    """As expected."""
    return Line(Status.OK, found)


def warn(found: str, advice: str) -> Line:
    """Training runs, but something will be missed."""
    return Line(Status.WARN, found, advice)


def fail(found: str, advice: str) -> Line:
    """Training does not run, or does not do what the answers say."""
    return Line(Status.FAIL, found, advice)


def unknown(reason: str) -> Line:
    """Not to be told on this machine."""
    return Line(Status.SKIP, f"unknown: {reason}")


@dataclass(frozen=True)
class Context:
    """Where the checks look; with `cpu` they leave GPUs alone."""

    root: Path
    platform: Platform
    cpu: bool = False
    package: Path = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Check:
    """One line of the report; `on_gpu` checks are left out where the answers ask for no GPU."""

    name: str
    collect: Callable[[Context], Any]
    judge: Callable[[Any, Platform], Line]
    on_gpu: bool = False

    def run(self, context: Context) -> Line:
        """Collect and judge; whatever is raised becomes a fail line."""
        try:
            return self.judge(self.collect(context), context.platform)
        except Exception as error:
            return fail(f"the check itself broke: {describe(error)}", "mend what it names")


def describe(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def change(key: str, value: object = "…") -> str:
    """The command that changes one answer of this project."""
    return f'`make update ARGS="--defaults --vcs-ref :current: --data {key}={value}"`'


# --- Python and packages ---


def collect_python(context: Context) -> tuple[int, int]:
    """Version of the running interpreter."""
    return sys.version_info[:2]


def judge_python(found: tuple[int, int], platform: Platform) -> Line:
    """The version that the packages are locked for."""
    version, wanted = "{}.{}".format(*found), platform.software.python
    if version == wanted:
        return ok(version)
    if found < (3, 11):
        return fail(f"{version} is too old for this code", f"use Python {wanted}")
    return warn(
        f"{version}, while packages are locked for {wanted}",
        f"fine for tests and smoke runs; train with Python {wanted}",
    )


@dataclass(frozen=True)
class TorchFacts:
    """The installed torch and torchvision; `problem` says why torch cannot be imported."""

    version: str = ""
    torchvision: str = ""
    cuda: str | None = None  # None: a build for the CPU
    nccl: str | None = None
    problem: str = ""


@cache
def collect_torch(context: Context) -> TorchFacts:
    """Import torch, the slow part of all this."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return TorchFacts(problem=describe(error))
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return TorchFacts(
        version=torch.__version__,
        torchvision=installed_version("torchvision") or "",
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    )


def installed_version(package: str) -> str | None:
    """Version of an installed package, None when it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_torch(facts: TorchFacts, platform: Platform) -> Line:
    """Torch is the stack's."""
    wanted = platform.software.torch
    if facts.problem:
        return fail(f"cannot be imported: {facts.problem}", f"install torch {wanted}: `make setup`")
    return _judge_version(facts.version, wanted)


def judge_torchvision(facts: TorchFacts, platform: Platform) -> Line:
    """Torchvision is the stack's: it only works with the torch that it was built for."""
    wanted = platform.software.torchvision
    if not facts.torchvision:
        return fail("not installed", f"install torchvision {wanted}: `make setup`")
    return _judge_version(facts.torchvision, wanted)


def _judge_version(version: str, wanted: str) -> Line:
    if version.split("+")[0] == wanted:  # without the build, such as +cu130
        return ok(version)
    return fail(
        f"{version} instead of {wanted}",
        f"run `make setup` or build the image again; another stack: {change('torch_stack')}",
    )


@dataclass(frozen=True)
class LockFacts:
    """Versions by package, as locked in `requirements/` and as installed."""

    locked: Mapping[str, str]
    installed: Mapping[str, str | None]


def collect_lock(context: Context) -> LockFacts:
    """Read the lock and look each package up."""
    from packaging.requirements import Requirement

    files = [context.root / "requirements" / name for name in ("template.txt", "deepspeed.txt")]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    lines = re.findall(r"^[\w.-]+==[^\\\n]+", text, re.MULTILINE)
    pins = [Requirement(line) for line in lines]
    locked = {
        pin.name: str(pin.specifier).removeprefix("==")
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()  # some are for other systems only
    }
    return LockFacts(locked, {name: installed_version(name) for name in locked})


def judge_lock(facts: LockFacts, platform: Platform) -> Line:
    """Packages are the locked ones; another Accelerate may read the configuration differently."""
    if "accelerate" not in facts.locked:
        return fail("accelerate is not in requirements/template.txt", "restore that file with git")
    other = {
        name: f"{name} {facts.installed.get(name) or 'missing'} instead of {version}"
        for name, version in facts.locked.items()
        if facts.installed.get(name) != version
    }
    advice = "run `make setup` or build the image again"
    if "accelerate" in other:
        return fail(other["accelerate"], advice)
    if other:
        shown = ", ".join(list(other.values())[:3])
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        return warn(shown + more, advice)
    version = facts.locked["accelerate"]
    return ok(f"accelerate {version}, all {len(facts.locked)} packages as locked")


def collect_compiler(context: Context) -> Sequence[str]:
    """What is missing of that which compiles for torch."""
    compiler = os.environ.get("CXX", "c++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(compiler) else [f"the C++ compiler {compiler}"]
    return missing if header.is_file() else [*missing, str(header)]


def judge_compiler(missing: Sequence[str], platform: Platform) -> Line:
    """DeepSpeed compiles its optimizer for the CPU; torch.compile needs a compiler too."""
    if not missing:
        return ok("there, with Python's headers")
    found = f"{' and '.join(missing)} not found"
    if platform.training.backend != "deepspeed" or platform.training.cpu_offload == "none":
        return ok(f"{found}: nothing but compile: true would need it")
    return fail(
        f"{found}, and DeepSpeed compiles its AdamW for the CPU",
        "install them (Debian, Ubuntu: build-essential, python3-dev)",
    )


# --- GPUs ---


@dataclass(frozen=True)
class GpuFacts:
    """What torch and the driver say about GPUs; `looked` is False with --cpu."""

    gpus: Sequence[gpu.Gpu] = ()
    driver: gpu.Driver | None = None
    cuda: str | None = None  # that torch is built for
    arch_list: Sequence[str] = ()  # that torch is compiled for: sm_80, sm_90a, compute_120
    nccl: str | None = None
    warning: str = ""  # torch's own words on why there is no GPU
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    in_container: bool = False
    looked: bool = True


@cache
def collect_gpus(context: Context) -> GpuFacts:
    """Ask torch and NVML."""
    if context.cpu:
        return GpuFacts(looked=False)
    facts = collect_torch(context)
    if facts.problem:
        return GpuFacts(driver=gpu.driver(), warning="torch cannot be imported")
    import torch

    with warnings.catch_warnings(record=True) as caught:  # "driver is too old" is a warning
        warnings.simplefilter("always")
        gpus = tuple(gpu.visible_gpus())
        arch_list = tuple(torch.cuda.get_arch_list())
    return GpuFacts(
        gpus=gpus,
        driver=gpu.driver(),
        cuda=facts.cuda,
        arch_list=arch_list,
        nccl=facts.nccl,
        warning=" ".join(str(caught[0].message).split()) if caught else "",
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        in_container=in_container(),
    )


def in_container() -> bool:
    """Whether this is a Docker, Podman, Apptainer or Kubernetes container."""
    files = ("/.dockerenv", "/run/.containerenv", "/.singularity.d")
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(Path(file).exists() for file in files)


def judge_cuda(facts: GpuFacts, platform: Platform) -> Line:
    """Torch is built for the stack's CUDA."""
    wanted = platform.software.cuda
    if not facts.looked:
        return _unknown_gpu(facts, f"training needs torch for CUDA {wanted}")
    if facts.cuda is None:
        return fail(
            f"this torch is built for the CPU, not for CUDA {wanted}",
            "train in the image, or install torch from PyTorch's wheels for this CUDA",
        )
    if facts.cuda != wanted:
        return warn(
            f"{facts.cuda} instead of {wanted}",
            f"train in the image, or choose the stack you have: {change('torch_stack')}",
        )
    return ok(facts.cuda)


def judge_driver(facts: GpuFacts, platform: Platform) -> Line:
    """The driver is new enough for the stack's CUDA."""
    wanted, cuda = platform.software.min_driver or 0, platform.software.cuda
    if not facts.looked or not facts.driver:
        return _unknown_gpu(facts, f"CUDA {cuda} needs driver {wanted} or newer")
    if int(facts.driver.version.split(".")[0]) < wanted:
        return fail(
            f"{facts.driver.version} is too old for CUDA {cuda}",
            f"install driver {wanted} or newer on the host, or choose a stack with an older CUDA: "
            + change("torch_stack"),
        )
    return ok(facts.driver.version)


def judge_gpu_count(facts: GpuFacts, platform: Platform) -> Line:
    """As many GPUs as the answers say."""
    found, wanted = len(facts.gpus), platform.hardware.num_gpus
    if not facts.looked:
        return _unknown_gpu(facts, f"training expects {_gpus(wanted)}")
    if not found:
        reason, advice = _why_no_gpu(facts)
        return fail(f"this project expects {_gpus(wanted)}, none is visible: {reason}", advice)
    if found < wanted:
        hidden = facts.visible_devices is not None
        free = f"widen CUDA_VISIBLE_DEVICES={facts.visible_devices}" if hidden else "add GPUs"
        return fail(
            f"{found} visible, {wanted} expected",
            f"{free}, or train with fewer: {change('num_gpus', found)}",
        )
    if found > wanted:
        advice = f"to use all: {change('num_gpus', found)}"
        return warn(f"{found} visible, {wanted} expected: the rest stays idle", advice)
    return ok(f"{found} visible")


def _why_no_gpu(facts: GpuFacts) -> tuple[str, str]:
    """The likely reason, and what to do."""
    if facts.warning:
        return facts.warning, "see the lines on torch, CUDA and driver"
    if facts.visible_devices is not None:
        return f"CUDA_VISIBLE_DEVICES is {facts.visible_devices!r}", "unset it"
    if facts.driver and facts.cuda is None:
        reason = f"the driver sees {facts.driver.num_gpus}, but this torch is built for the CPU"
        return reason, "see the line on CUDA"
    if facts.driver:
        reason = f"the driver sees {facts.driver.num_gpus}, torch sees none"
        return reason, "see the line on the driver; a restart of the machine often helps"
    if facts.in_container:
        return "the container was given none", (
            "start it with GPUs; the host needs the NVIDIA Container Toolkit for that"
        )
    return "no NVIDIA driver answers", (
        "run this on the training machine, or check this one for smoke runs with --cpu"
    )


def judge_gpu_model(facts: GpuFacts, platform: Platform) -> Line:
    """The model of the answers, and only one."""
    wanted = platform.hardware.gpu_name or platform.hardware.gpu
    if not facts.gpus:
        return _unknown_gpu(facts, f"{wanted} is expected")
    models = Counter(one.name for one in facts.gpus)
    if len(models) > 1:
        listing = ", ".join(f"{count} x {name}" for name, count in models.items())
        return warn(f"different models: {listing}", "each step waits for the slowest")
    model = facts.gpus[0].name
    if not _same_model(model, wanted):
        return warn(f"{model} instead of {wanted}", f"if it stays: {change('gpu')}")
    return ok(model)


def _same_model(model: str, wanted: str) -> bool:
    """Whether the driver's name holds each word of ours, brand and memory size left aside."""
    brands = {"nvidia", "geforce", "tesla", "gpu"}

    def words(name: str) -> set[str]:
        every = re.findall(r"[a-z0-9]+", name.lower())
        return {word for word in every if word not in brands and not re.match(r"\d+gb$", word)}

    return words(wanted) <= words(model)


def judge_gpu_memory(facts: GpuFacts, platform: Platform) -> Line:
    """Each GPU has the memory of the answers."""
    wanted = platform.hardware.gpu_memory_gb or 0
    if not facts.gpus:
        return _unknown_gpu(facts, f"{wanted} GB each are expected")
    least = min(one.memory_gb for one in facts.gpus)
    if least < wanted * USABLE_MEMORY:
        advice = "if it runs out, lower global_batch_size or raise gradient_accumulation_steps"
        return warn(f"{least:.0f} GB, {wanted} GB expected", advice)
    return ok(f"{least:.0f} GB each")


def judge_capability(facts: GpuFacts, platform: Platform) -> Line:
    """Torch holds code for these GPUs, and they are no older than the answers say."""
    wanted = platform.hardware.compute_capability
    if not facts.gpus:
        return _unknown_gpu(facts, f"{wanted} is expected")
    oldest = min(facts.gpus, key=lambda one: one.capability)
    compiled = " ".join(facts.arch_list) or "no GPU"
    for one in facts.gpus:
        if not any(_runs(arch, one.capability) for arch in facts.arch_list):
            return fail(
                f"{_dotted(one.capability)} ({one.name}), but this torch is compiled for "
                f"{compiled}",
                f"choose a stack that covers it: {change('torch_stack')}",
            )
    if oldest.capability < platform.hardware.capability:
        return warn(
            f"{_dotted(oldest.capability)}, {wanted} expected",
            f"precision and stack were chosen for a newer GPU: {change('gpu')}",
        )
    return ok(f"{_dotted(oldest.capability)}, torch is compiled for {compiled}")


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` (sm_80, sm_90a, compute_120) runs on a GPU of this capability."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if not match:
        return False
    kind, major, minor, suffix = match.groups()
    version = int(major), int(minor)
    if suffix == "a":  # for this one chip
        return version == capability
    if kind == "compute" and not suffix:  # PTX, compiled when first used
        return version <= capability
    return version[0] == capability[0] and version[1] <= capability[1]


def judge_precision(facts: GpuFacts, platform: Platform) -> Line:
    """The precision of the answers is one that the hardware has."""
    precision = platform.training.precision
    if not platform.has_gpu:
        if precision == "fp16":
            return fail("fp16 needs a GPU", change("precision", "bf16"))
        return ok(f"{precision} on the CPU")
    if not facts.gpus:
        return _unknown_gpu(facts, f"{precision} is expected")
    oldest = min(one.capability for one in facts.gpus)
    # The chip decides: torch's is_bf16_supported() says yes to slow emulation too.
    possible = ["fp32"] + ["fp16"] * (oldest >= (7, 0)) + ["bf16"] * (oldest >= (8, 0))
    if precision not in possible:
        return fail(
            f"{precision} is not in hardware of compute capability {_dotted(oldest)}",
            change("precision", possible[-1]),
        )
    return ok(f"{precision} (possible: {', '.join(possible)})")


def judge_nccl(facts: GpuFacts, platform: Platform) -> Line:
    """Torch has the library through which GPUs talk."""
    if not facts.looked:
        return _unknown_gpu(facts, "GPUs talk through NCCL")
    if facts.nccl is None:
        return fail("this torch has no NCCL", "train in the image, or install torch's CUDA build")
    return ok(facts.nccl)


def _unknown_gpu(facts: GpuFacts, expected: str) -> Line:
    return unknown(f"{'no GPU here' if facts.looked else 'no look at GPUs'}; {expected}")


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


# --- The machine around them ---


def collect_all_reduce(context: Context) -> AllReduce:
    """NCCL with one process per GPU, or gloo with two processes."""
    gpus = len(collect_gpus(context).gpus) if context.platform.has_gpu else 0
    return all_reduce("nccl", gpus) if gpus else all_reduce("gloo", 2)


def judge_all_reduce(facts: AllReduce, platform: Platform) -> Line:
    """The processes got their sum in time."""
    who = f"{_processes(facts.num_processes)} over {facts.backend}"
    if not facts.problem:
        return ok(f"{who} in {facts.seconds:.1f} s")
    if facts.backend == "gloo":
        advice = (
            "the host name must resolve to this machine (`hostname -i`); "
            "GLOO_SOCKET_IFNAME=lo picks the interface by hand"
        )
    else:
        advice = (
            "run again with NCCL_DEBUG=INFO; if NCCL_P2P_DISABLE=1 helps, the direct link between "
            "GPUs is broken (PCIe ACS or IOMMU); see shared memory too"
        )
    if facts.hung_while in ("starting Python", "importing torch"):
        advice = "the disk with the packages is slow or the machine is busy: run again"
    return fail(f"{who}: {facts.problem}", advice)


@dataclass(frozen=True)
class ShmFacts:
    """Size of /dev/shm in GiB; None where the system has no such thing."""

    size_gb: float | None
    in_container: bool
    uses_gpu: bool


def collect_shm(context: Context) -> ShmFacts:
    """Size of the file system that loader workers and NCCL pass data through."""
    shm = Path("/dev/shm")
    size_gb = shutil.disk_usage(shm).total / gpu.GIB if shm.is_dir() else None
    return ShmFacts(size_gb, in_container(), context.platform.has_gpu and not context.cpu)


def judge_shm(facts: ShmFacts, platform: Platform) -> Line:
    """Shared memory is enough for loader workers, and in a container what the answers say."""
    wanted = platform.shm_size_gb
    if facts.size_gb is None:
        return unknown("this system has no /dev/shm")
    found = f"{facts.size_gb:.2g} GB in /dev/shm"
    advice = f"start the container with `--shm-size {wanted or 8}g`"
    if not facts.in_container:
        advice = f"as root: `mount -o remount,size={wanted or 8}G /dev/shm`"
    if facts.size_gb < MIN_SHM_GB:
        found += ": loader workers die of a bus error"
        return fail(found, advice) if facts.uses_gpu else warn(found, advice)
    if facts.in_container and facts.size_gb < wanted * 0.99:
        return warn(f"{found}, {wanted} GB expected", advice)
    return ok(found)


@dataclass(frozen=True)
class FolderFacts:
    """A folder that was tried out; `error` is the errno of what failed, 0 when nothing did."""

    path: Path
    error: int = 0
    free_gb: float = 0.0
    mount_point: str = "/"
    file_system: str = ""
    in_container: bool = False
    user: tuple[int, int] = (0, 0)  # uid and gid


def collect_checkpoints(context: Context) -> FolderFacts:
    """Do with the folder what a checkpoint does: make, write, flush, rename. Leaves no trace."""
    path = context.root / (os.environ.get("CHECKPOINT_DIR") or "checkpoints")
    user = os.getuid(), os.getgid()
    missing = [folder for folder in (path, *path.parents) if not _exists(folder)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            _write_like_a_checkpoint(path)
            free_gb = shutil.disk_usage(path).free / gpu.GIB
            mount_point, file_system = mount_of(path)
        finally:
            for folder in missing:
                folder.rmdir()
    except OSError as error:
        return FolderFacts(path, error.errno or errno.EIO, user=user)
    return FolderFacts(path, 0, free_gb, mount_point, file_system, in_container(), user)


def _exists(path: Path) -> bool:
    """Whether there is something; also where this user may not look."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _write_like_a_checkpoint(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
        unfinished = Path(scratch, "step.tmp")
        unfinished.mkdir()
        with (unfinished / "state").open("wb") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(Path(scratch, "step"))
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def mount_of(path: Path) -> tuple[str, str]:
    """Mount point and type of the file system that holds `path`."""
    best = ("/", "")
    target, table = path.resolve(), Path("/proc/self/mounts")
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else ():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if target.is_relative_to(point) and len(point) >= len(best[0]):  # the last one is on top
            best = (point, kind)
    return best


def judge_checkpoints(facts: FolderFacts, platform: Platform) -> Line:
    """Checkpoints can be written, have room, and outlive the container."""
    path, (uid, gid) = facts.path, facts.user
    if facts.error:
        give = f"as root: `mkdir -p {path} && chown {uid}:{gid} {path}`"
        advice = {
            errno.EACCES: give,
            errno.EPERM: give,
            errno.EROFS: "mount it writable, or set CHECKPOINT_DIR to another folder",
            errno.ENOSPC: "free some space, or set CHECKPOINT_DIR to another folder",
        }.get(facts.error, "set CHECKPOINT_DIR to a folder that can be written")
        return fail(f"{path} cannot be written: {os.strerror(facts.error)}", advice)
    room = f"{facts.free_gb:.0f} GB free in {path}"
    if facts.free_gb < MIN_FREE_GB:
        room = f"{facts.free_gb:.2g} GB free in {path}"
        return fail(f"{room}: too little for a checkpoint", "free some space, or lower keep_last")
    if facts.file_system in ("tmpfs", "ramfs"):
        advice = "set CHECKPOINT_DIR to a folder on a disk"
        return warn(f"{path} is in memory: checkpoints are lost at the end", advice)
    if facts.in_container and facts.mount_point == "/":
        advice = f"mount a volume at {path}"
        return warn(f"{path} is lost with the container", advice)
    if facts.free_gb < COMFORTABLE_FREE_GB:
        return warn(room, "free some space, or lower keep_last")
    return ok(room)


@dataclass(frozen=True)
class DataFacts:
    """The data folder as this user may use it."""

    path: Path
    exists: bool
    readable: bool
    writable: bool  # or can be made


def collect_data(context: Context) -> DataFacts:
    """Look at the folder without making it."""
    path = context.root / (os.environ.get("DATA_DIR") or "data")
    nearest = next(folder for folder in (path, *path.parents) if _exists(folder))
    readable = os.access(path, os.R_OK | os.X_OK)
    return DataFacts(path, _exists(path), readable, os.access(nearest, os.W_OK | os.X_OK))


def judge_data(facts: DataFacts, platform: Platform) -> Line:
    """Data can be read, or be put there."""
    if facts.exists and not facts.readable:
        return fail(f"{facts.path} cannot be read", f"let uid {os.getuid()} read it")
    if facts.exists:
        return ok(f"{facts.path}{'' if facts.writable else ' (read only)'}")
    if facts.writable:
        return ok(f"{facts.path} does not exist yet, `make data` makes it")
    return warn(f"{facts.path} does not exist", "make it, mount it, or set DATA_DIR")


# --- Files of this project ---


@dataclass(frozen=True)
class ConfigFacts:
    """An Accelerate configuration as Accelerate's own loader reads it."""

    file: str
    distributed_type: str = ""
    num_processes: Any = None
    num_machines: Any = None
    mixed_precision: Any = None
    use_cpu: bool = False
    problem: str = ""


def collect_config(file: str, context: Context) -> ConfigFacts:
    """Load `file` from the project's folder."""
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        config = load_config_from_file(str(context.root / file))
    except Exception as error:  # the loader raises whatever the content leads to
        return ConfigFacts(file, problem=describe(error))
    return ConfigFacts(
        file,
        distributed_type=str(getattr(config.distributed_type, "value", config.distributed_type)),
        num_processes=config.num_processes,
        num_machines=config.num_machines,
        mixed_precision=config.mixed_precision,
        use_cpu=config.use_cpu,
    )


def judge_config(facts: ConfigFacts, platform: Platform) -> Line:
    """`accelerate_config.yaml` does what the answers say."""
    if problem := _judge_any_config(facts):
        return problem
    wanted, found = platform.num_processes, facts.num_processes
    if found != wanted:
        text = f"{facts.file}: num_processes is {found}, the answers make {wanted}"
        advice = f"set it to {wanted} (GPUs x machines), or {change('num_gpus')}"
        return warn(text, advice) if found < wanted else fail(text, advice)
    if facts.mixed_precision != platform.mixed_precision:
        return warn(
            f"{facts.file}: mixed_precision is {facts.mixed_precision!r}, the answers say "
            f"{platform.training.precision}",
            f"change it there and in the answers: {change('precision')}",
        )
    if facts.use_cpu and platform.has_gpu:
        return fail(f"{facts.file}: use_cpu leaves the GPUs idle", "set `use_cpu: false`")
    if wanted > 1 and facts.distributed_type == "NO":
        text = f"{facts.file}: distributed_type NO starts one process, not {wanted}"
        return fail(text, "set `distributed_type: MULTI_GPU`")
    return ok(_summary(facts))


def judge_cpu_config(facts: ConfigFacts, platform: Platform) -> Line:
    """`accelerate_config.cpu.yaml` runs anywhere: more than one process, plain fp32."""
    if problem := _judge_any_config(facts):
        return problem
    if facts.num_processes < 2 or facts.distributed_type == "NO":
        text = f"{facts.file}: one process tests nothing distributed"
        return warn(text, "set `num_processes: 2` and `distributed_type: MULTI_GPU`")
    if facts.mixed_precision == "fp16":
        text = f"{facts.file}: fp16 quietly becomes fp32 on the CPU"
        return warn(text, "set `mixed_precision: 'no'`")
    return ok(_summary(facts))


def _judge_any_config(facts: ConfigFacts) -> Line | None:
    if facts.problem:
        return fail(f"Accelerate cannot load {facts.file}: {facts.problem}", "restore it with git")
    if not isinstance(facts.mixed_precision, str):
        text = f"{facts.file}: mixed_precision is {facts.mixed_precision!r}, not text"
        return fail(text, "put it in quotes: `mixed_precision: 'no'`")
    if type(facts.num_processes) is not int or facts.num_processes < 1:
        text = f"{facts.file}: num_processes is {facts.num_processes!r}"
        return fail(text, "give a whole number, GPUs x machines")
    return None


def _summary(facts: ConfigFacts) -> str:
    precision = f"mixed_precision {facts.mixed_precision!r}"
    return f"{facts.file}: {_processes(facts.num_processes)}, {precision}"


TRACKER_MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


def collect_tracker(context: Context) -> str:
    """Import the tracker; what went wrong, empty when nothing did."""
    try:
        importlib.import_module(TRACKER_MODULES.get(context.platform.tracker, "sys"))
    except Exception as error:
        return describe(error)
    return ""


def judge_tracker(problem: str, platform: Platform) -> Line:
    """The tracker of the answers can be imported."""
    tracker = platform.tracker
    if problem:
        advice = f"run `make setup` or build the image again; without it: {change('tracker')}"
        return fail(f"{tracker} cannot be imported: {problem}", advice)
    return ok("none, metrics.csv and loss.png only" if tracker == "none" else tracker)


USER_FILES = ("model.py", "data.py")  # updates of the template leave them alone


def collect_sources(context: Context) -> list[str]:
    """Faults of your files: what the other files import from them, or how they call it.

    Nothing is run, so that a broken import elsewhere hides no fault.
    """
    faults = []
    trees: dict[str, ast.Module] = {}
    for path in sorted(context.package.glob("*.py")):
        try:
            trees[path.name] = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            faults.append(f"{path.name} is not Python: {error}")
    for file in USER_FILES:
        if not (context.package / file).exists():
            faults.append(f"{file} is missing")
        elif file in trees:
            faults += _faults(file, trees)
    return faults


def _faults(file: str, trees: Mapping[str, ast.Module]) -> list[str]:
    defined = _top_level(trees[file])
    faults = []
    for user, tree in trees.items():
        for name in _imported(tree, file.removesuffix(".py")):
            if name not in defined:
                faults.append(f"{file} has no {name}, which {user} imports")
                continue
            least, most = defined[name] or (0, math.inf)
            for given in _calls(tree, name):
                if not least <= given <= most:
                    faults.append(f"{file}: {name} does not take the {given} that {user} gives it")
    return faults


def _top_level(tree: ast.Module) -> dict[str, tuple[int, float] | None]:
    """Names that a file defines; of functions, how many arguments they take at least and most."""
    names: dict[str, tuple[int, float] | None] = {}
    for node in ast.walk(tree):  # deeper ones too: a definition may stand under an `if`
        match node:
            case ast.FunctionDef(name=name, args=ast.arguments() as found):
                most = len(found.posonlyargs) + len(found.args)
                least = most - len(found.defaults)
                names[name] = least, most if found.vararg is None else math.inf
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names[name] = None
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name: None for alias in aliases}
    return names


def _imported(tree: ast.Module, module: str) -> list[str]:
    """Names that a file takes `from .module import …`."""
    return [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module == module
        for alias in node.names
    ]


def _calls(tree: ast.Module, name: str) -> list[int]:
    """How many arguments each plain call of `name` gives."""
    return [
        len(node.args)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and not node.keywords
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]


def judge_sources(faults: Sequence[str], platform: Platform) -> Line:
    """Your model and data fit this version of the training loop."""
    if faults:
        return fail(
            "; ".join(faults), "add or change that; the head of the file tells the contract"
        )
    return ok("model.py and data.py have what the other files take from them")


CHECKS: Sequence[Check] = (
    Check("Python", collect_python, judge_python),
    Check("torch", collect_torch, judge_torch),
    Check("torchvision", collect_torch, judge_torchvision),
    Check("packages", collect_lock, judge_lock),
    Check("compiler", collect_compiler, judge_compiler),
    Check("CUDA", collect_gpus, judge_cuda, on_gpu=True),
    Check("driver", collect_gpus, judge_driver, on_gpu=True),
    Check("GPUs", collect_gpus, judge_gpu_count, on_gpu=True),
    Check("GPU model", collect_gpus, judge_gpu_model, on_gpu=True),
    Check("GPU memory", collect_gpus, judge_gpu_memory, on_gpu=True),
    Check("compute capability", collect_gpus, judge_capability, on_gpu=True),
    Check("precision", collect_gpus, judge_precision),
    Check("NCCL", collect_gpus, judge_nccl, on_gpu=True),
    Check("all-reduce", collect_all_reduce, judge_all_reduce),
    Check("shared memory", collect_shm, judge_shm),
    Check("checkpoints", collect_checkpoints, judge_checkpoints),
    Check("data", collect_data, judge_data),
    Check("configuration", partial(collect_config, "accelerate_config.yaml"), judge_config),
    Check("CPU twin", partial(collect_config, "accelerate_config.cpu.yaml"), judge_cpu_config),
    Check("tracker", collect_tracker, judge_tracker),
    Check("your files", collect_sources, judge_sources),
)


# --- The report ---


def examine(context: Context, checks: Iterable[Check]) -> Counter[Status]:
    """Run the checks, print a line each as it is known, and count them by status."""
    relevant = [check for check in checks if context.platform.has_gpu or not check.on_gpu]
    width = max(len(check.name) for check in relevant)
    colors = use_colors()
    counts: Counter[Status] = Counter()
    for check in relevant:
        line = check.run(context)
        counts[line.status] += 1
        print(f"{paint(line.status, colors)}  {check.name:{width}}  {line.found}", flush=True)
        if line.advice:
            print(f"{'':{width + 8}}-> {line.advice}", flush=True)
    return counts


def use_colors() -> bool:
    """Only on a terminal, and not when NO_COLOR asks for none."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(status: Status, colors: bool) -> str:
    """The status, four characters wide."""
    code = {Status.OK: 32, Status.WARN: 33, Status.FAIL: 31, Status.SKIP: 36}[status]
    return f"\033[{code}m{status:4}\033[0m" if colors else f"{status:4}"


def main(argv: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Check the project at `root` (default: this one). Raises: UserError for platform.yaml."""
    parser = argparse.ArgumentParser(description="Is this machine what the answers expect?")
    parser.add_argument("--cpu", action="store_true", help="check for CPU runs, leave GPUs alone")
    arguments = parser.parse_args(argv)
    root = root or find_root()
    counts = examine(Context(root, load_platform(root), arguments.cpu), CHECKS)
    failures = counts[Status.FAIL]
    print(
        f"\n{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {failures} failed, "
        f"{counts[Status.SKIP]} unknown here"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
