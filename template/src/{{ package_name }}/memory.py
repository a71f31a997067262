"""How much memory a training step takes: measured without weights, data on a GPU or time.

The step runs on fake tensors, which have shapes and types but no content. Every storage that an
operation makes is counted while it lives, so the peak is that of the real step; `estimate` then
says what is left of it on one GPU when a backend shares the work out.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import backend
from .config import TrainConfig
from .data import Batch, Datasets
from .errors import HINTS, TOO_FEW_SAMPLES, UserError
from .loader import build_loaders
from .model import build_model
from .optimizer import build_optimizer
from .platform import Platform

FP32 = 4  # bytes
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,  # the input of each layer, of which only the product is in 8 bit
}

# What is not seen on a CPU: the driver's context with the kernels, NCCL's buffers, and what the
# allocator cannot fill of the blocks that it holds.
CONTEXT = 600 << 20
NCCL = 400 << 20
FRAGMENTATION = 0.05

ZERO_BUCKET = 500_000_000  # elements; DeepSpeed's defaults
ZERO_PREFETCH = 50_000_000


@dataclass(frozen=True)
class Setup:
    """How training is spread over the machines, in the words of `platform.yaml`."""

    num_gpus: int  # per machine; 0: one process on the CPU
    num_machines: int = 1
    precision: str = "fp32"
    backend: str = "ddp"
    sharding: str = "none"
    cpu_offload: str = "none"
    activation_checkpointing: bool = False
    wrap_classes: tuple[str, ...] = ()  # FSDP's units, where the model does not name them itself
    wrap_above: int = 0  # or modules of more parameters than this

    @property
    def num_processes(self) -> int:
        """Over all machines."""
        return max(self.num_gpus, 1) * self.num_machines

    @property
    def num_shards(self) -> int:
        """Processes that hold one copy of the model between them."""
        if self.backend == "ddp":
            return 1
        return self.num_gpus if self.sharding == "hybrid" else self.num_processes

    @property
    def itemsize(self) -> int:
        """Bytes of a weight as the model computes with it."""
        return DTYPES[self.precision].itemsize

    @property
    def gradient_share(self) -> float:
        """Part of the gradients that a process keeps after their reduction."""
        if self.backend == "fsdp":
            # Reduced in 16 bit, kept in the type of the weights.
            return 0 if self.cpu_offload == "all" else FP32 / self.itemsize / self.num_shards
        if self.sharding in ("zero2", "zero3"):
            return 0 if self.cpu_offload != "none" else 1 / self.num_shards
        return 1

    def units(self, model: nn.Module) -> Callable[[nn.Module], bool]:
        """Which modules FSDP shards by themselves, as Accelerate finds them."""
        if self.wrap_above:
            return lambda one: sum(item.numel() for item in one.parameters()) > self.wrap_above
        names = self.wrap_classes or tuple(getattr(model, "_no_split_modules", None) or ())
        return lambda one: type(one).__name__ in names


def setup_of(platform: Platform, accelerate_config: Mapping[str, Any]) -> Setup:
    """What `platform.yaml` says, and `accelerate_config.yaml` of FSDP's units."""
    training = platform.training
    fsdp = accelerate_config.get("fsdp_config") or {}
    classes = str(fsdp.get("fsdp_transformer_layer_cls_to_wrap") or "")
    return Setup(
        num_gpus=platform.hardware.num_gpus,
        num_machines=platform.hardware.num_machines,
        precision=training.precision,
        backend=training.backend,
        sharding=training.sharding,
        cpu_offload=training.cpu_offload,
        activation_checkpointing=training.activation_checkpointing,
        wrap_classes=tuple(name.strip() for name in classes.split(",") if name.strip()),
        wrap_above=int(fsdp.get("fsdp_min_num_params") or 0),
    )


# --- One step, counted ---


class TooFewSamples(UserError):
    """The model needs two samples or more in a forward pass, and this is one."""


class Meter(TorchDispatchMode):
    """Bytes of all storages that operations made and that are alive; gradients apart."""

    def __init__(self, gradient_share: float) -> None:
        super().__init__()
        self.gradient_share = gradient_share
        self.sizes: dict[int, int] = {}  # of storages alive
        self.gradients: set[int] = set()  # which of them are gradients
        self.other = self.kept = 0  # bytes of either kind
        self.peak = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.count, results)
        self.peak = max(self.peak, self.now)
        return results

    @property
    def now(self) -> float:
        """Bytes alive."""
        return self.other + self.gradient_share * self.kept

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.other += self.sizes[key]
            weakref.finalize(storage, self._forget, key)

    def keep_gradient(self, parameter: Tensor) -> None:
        """The gradient of this parameter is complete: from now on it is kept, or a part of it."""
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        if key in self.sizes and key not in self.gradients:
            self.gradients.add(key)
            self.other -= self.sizes[key]
            self.kept += self.sizes[key]

    def _forget(self, key: int) -> None:
        if key in self.gradients:
            self.gradients.remove(key)
            self.kept -= self.sizes.pop(key)
        else:
            self.other -= self.sizes.pop(key)


class FusedAttention(TorchFunctionMode):
    """Attention as a GPU computes it: with dropout too, no matrix of all pairs is kept."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            args, kwargs["dropout_p"] = args[:4], 0.0
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """A training step of one process; sizes in bytes, counts in elements."""

    batch_size: int
    parameters: int
    trained: int
    buffers: int  # bytes
    optimizer_elements: int
    tensors: int  # of model and optimizer, in a checkpoint
    units: tuple[int, ...]  # parameters of each FSDP unit, largest first; the root is not one
    root: int  # parameters of the root unit
    passes: float  # peak of forward and backward, weights and optimizer left out
    update: float  # peak of clipping and of the optimizer, gradients left out too
    on_fake_tensors: bool = True


def measure(
    config: TrainConfig, datasets: Datasets, batch: Batch, batch_size: int, setup: Setup
) -> Step:
    """Run a step of `batch_size` samples and count.

    Args:
        batch: a real batch of at least two samples, or as many as asked for.
    Raises: TooFewSamples.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            inputs = {name: _resize(value, batch_size) for name, value in batch.items()}
            inputs = {name: mode.from_tensor(value) for name, value in inputs.items()}
            return _run(config, datasets, inputs, batch_size, setup)
    except UserError:
        raise
    except Exception as error:
        if TOO_FEW_SAMPLES in str(error):
            raise TooFewSamples(HINTS[TOO_FEW_SAMPLES]) from error
        # What a model does with the content of its tensors has no end of forms.
        return _extrapolate(config, datasets, batch, batch_size, setup)


def first_batch(config: TrainConfig, datasets: Datasets, batch_size: int) -> Batch:
    """The first training batch, read as training reads it."""
    loader, _, _ = build_loaders(datasets, batch_size, config.global_batch_size, config.seed, 0)
    return next(iter(loader))


def _extrapolate(
    config: TrainConfig, datasets: Datasets, batch: Batch, batch_size: int, setup: Setup
) -> Step:
    """Two real steps of few samples on the CPU, and a straight line through them."""

    def run(count: int) -> Step:
        inputs = {name: _resize(value, count).clone() for name, value in batch.items()}
        return _run(config, datasets, inputs, count, setup)

    if batch_size <= 4:
        return replace(run(batch_size), on_fake_tensors=False)
    few, more = run(2), run(4)
    slope = (more.passes - few.passes) / 2
    passes = more.passes + slope * (batch_size - 4)
    return replace(more, batch_size=batch_size, passes=passes, on_fake_tensors=False)


def _resize(value: Any, batch_size: int) -> Any:
    """The first samples of a tensor, or as many as are asked for, repeated."""
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) == batch_size:
        return value
    return value[torch.arange(batch_size) % len(value)]


def _run(
    config: TrainConfig, datasets: Datasets, batch: Batch, batch_size: int, setup: Setup
) -> Step:
    """Two optimizer steps as train.py takes them; the second one counts."""
    on_gpu = setup.num_gpus > 0
    meter = Meter(setup.gradient_share)
    with contextlib.ExitStack() as modes:
        if on_gpu:
            modes.enter_context(FusedAttention())
        modes.enter_context(meter)
        model = build_model(config.model, datasets).train()
        units, root = _units(model, setup)
        if setup.backend != "ddp" and setup.precision != "fp32":
            _convert(model, DTYPES[setup.precision])  # what it computes with; sharded are 32 bits
            backend.choose_precision_by_operation(model, _autocast(setup))
        if setup.activation_checkpointing:
            backend.checkpoint_activations(model, setup.units(model))
        optimizer = build_optimizer(model, config)
        for group in optimizer.param_groups:
            group["foreach"] = on_gpu  # torch's own choice on a GPU
        trained = [item for group in optimizer.param_groups for item in group["params"]]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(meter.keep_gradient)
        for value in batch.values():
            tree_map_only(Tensor, meter.count, value)
        passes = min(config.gradient_accumulation_steps, 2)
        for _ in range(2):
            meter.peak = meter.now
            for _ in range(passes):
                changed = batch if datasets.augment is None else datasets.augment(batch)
                with _autocast(setup):
                    outputs = model(**changed)
                (outputs["loss"] / passes).backward()
            peak_of_passes = meter.peak
            meter.peak = meter.now
            if config.max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            peak_of_update = meter.peak - setup.gradient_share * meter.kept
            optimizer.zero_grad()
    weights = _bytes(model.parameters())
    buffers = _bytes(model.buffers())
    state = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    kept = weights + buffers + _bytes(state)
    saved = [*model.parameters(), *model.buffers()]
    saved += [one for values in optimizer.state.values() for one in values.values()]
    return Step(
        batch_size=batch_size,
        parameters=sum(item.numel() for item in model.parameters()),
        trained=sum(item.numel() for item in trained),
        buffers=buffers,
        optimizer_elements=sum(value.numel() for value in state),
        tensors=len(saved),
        units=tuple(sorted(units.values(), reverse=True)),
        root=root,
        passes=peak_of_passes - kept,
        update=peak_of_update - kept,
    )


def _autocast(setup: Setup) -> torch.autocast:
    return torch.autocast("cpu", DTYPES[setup.precision], enabled=setup.precision != "fp32")


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights in this type, in place (`Module.to` cannot do it with fake tensors)."""
    made: dict[int, nn.Parameter] = {}  # shared ones stay shared
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in made:
                    data = parameter.detach().to(dtype)
                    made[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def _units(model: nn.Module, setup: Setup) -> tuple[dict[str, int], int]:
    """Modules that FSDP shards by themselves, with the parameters that are theirs alone."""

    is_unit = setup.units(model)
    names = [name for name, module in model.named_modules() if name and is_unit(module)]
    sizes = dict.fromkeys(names, 0)
    root = 0
    for name, parameter in model.named_parameters():
        owners = [unit for unit in names if name.startswith(f"{unit}.")]
        if owners:
            sizes[max(owners, key=len)] += parameter.numel()
        else:
            root += parameter.numel()
    return sizes, root


def _bytes(tensors: Any) -> int:
    """Of the storages, shared ones counted once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


# --- What one GPU, its machine and a checkpoint hold ---


@dataclass(frozen=True)
class Estimate:
    """Peak on one GPU (or of the one process on a CPU), in bytes."""

    weights: float
    optimizer: float
    gradients: float
    activations: float  # and temporaries, as far as they need more than the gradients' place
    communication: float
    reserve: float
    host: float = 0.0  # of a machine's memory, by offloading
    rows: tuple[str, ...] = (
        "weights",
        "optimizer",
        "gradients",
        "activations",
        "communication",
        "reserve",
    )

    @property
    def total(self) -> float:
        """The peak."""
        return sum(getattr(self, name) for name in self.rows)

    @property
    def counted(self) -> float:
        """The peak of what torch allocates, without the reserve."""
        return self.total - self.reserve


def estimate(step: Step, setup: Setup, process: float = 0.0) -> Estimate:
    """What a step takes on one GPU under this setup; without one, on top of `process` bytes."""
    rule: Callable[[Step, Setup], Estimate] = {
        "ddp": _ddp,
        "fsdp": _fsdp,
        "deepspeed": _deepspeed,
    }[setup.backend]
    found = rule(step, setup)
    if setup.num_gpus == 0:
        return replace(found, reserve=process)
    nccl = NCCL if setup.num_processes > 1 else 0
    return replace(found, reserve=CONTEXT + nccl + FRAGMENTATION * found.total)


def _peak(step: Step, gradients: float, update: float) -> float:
    """Activations, or what the optimizer needs, where they exceed the gradients' place."""
    return max(step.passes, gradients + update) - gradients


def _ddp(step: Step, setup: Setup) -> Estimate:
    gradients = FP32 * step.trained
    return Estimate(
        weights=FP32 * step.parameters + step.buffers,
        optimizer=FP32 * step.optimizer_elements,
        gradients=gradients,
        activations=_peak(step, gradients, step.update),
        communication=gradients if setup.num_processes > 1 else 0,  # buckets beside the gradients
        reserve=0,
    )


def _fsdp(step: Step, setup: Setup) -> Estimate:
    share = 1 / setup.num_shards
    weights, optimizer = FP32 * step.parameters * share, FP32 * step.optimizer_elements * share
    gradients = FP32 * step.trained * share
    update = step.update * FP32 / setup.itemsize * share
    # While one unit computes, the next one arrives. The root stays whole.
    gathered = step.root + sum(step.units[:2])
    if setup.sharding == "grad-op":
        gathered = step.parameters
    reduced = max((*step.units[:1], step.root))  # gradients on their way, as one block
    communication = setup.itemsize * (gathered + reduced)
    if setup.cpu_offload == "all":
        host = (weights + optimizer + gradients + update) * setup.num_gpus
        activations = step.passes
        return Estimate(step.buffers, 0, 0, activations, communication, 0, host)
    activations = _peak(step, gradients, update - communication)  # all sharded again by then
    weights += step.buffers
    return Estimate(weights, optimizer, gradients, activations, communication, 0)


def _deepspeed(step: Step, setup: Setup) -> Estimate:
    share, item = 1 / setup.num_shards, setup.itemsize
    weights = item * step.parameters * (share if setup.sharding == "zero3" else 1)
    # ZeRO keeps weights in fp32 for the optimizer, whatever the model computes with.
    optimizer = FP32 * (step.trained + step.optimizer_elements) * share
    gradients = item * step.trained * (1 if setup.sharding == "zero1" else share)
    update = FP32 * step.trained * share + step.update * FP32 / item * share
    communication = item * ZERO_BUCKET
    if setup.sharding == "zero3":
        communication += item * min(step.parameters, 2 * sum(step.units[:1]) + ZERO_PREFETCH)
    host = 0.0
    if setup.cpu_offload != "none":
        host = optimizer + FP32 * step.trained * share
        optimizer = update = 0
        gradients *= setup.sharding == "zero1"
    if setup.cpu_offload == "all":
        host, weights = host + weights, 0
    return Estimate(
        weights + step.buffers,
        optimizer,
        gradients,
        _peak(step, gradients, update),
        communication,
        0,
        host * setup.num_gpus,
    )


def checkpoint_bytes(step: Step, setup: Setup) -> float:
    """Size of one checkpoint, over all processes: weights, optimizer, random states."""
    weights = FP32 * step.parameters
    optimizer = FP32 * step.optimizer_elements
    if setup.backend == "deepspeed":
        weights = setup.itemsize * step.parameters
        optimizer += FP32 * step.trained
    if setup.backend == "fsdp":
        optimizer += step.tensors * setup.num_processes * PIECE
    return weights + step.buffers + optimizer + setup.num_processes * RANDOM_STATES + SMALL_FILES


RANDOM_STATES = 16 << 10  # of one process: Python, NumPy, torch, the GPU
PIECE = 1850  # about: head and entry of one piece of a tensor, in a sharded checkpoint
SMALL_FILES = 16 << 10  # manifest, progress, heads of the others
