"""What differs between the ways to share a model among processes: DDP, FSDP 2 and DeepSpeed.

`accelerate_config.yaml` says which one runs. Everything else in this package is the same for all of
them. What only one of them needs is imported under that one alone: it takes seconds.
"""

import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from .config import TrainConfig
from .errors import UserError

DDP, FSDP, DEEPSPEED = "ddp", "fsdp", "deepspeed"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# A rank that waits this long for the others has lost them.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

# What the table of contents of a sharded checkpoint is made of, by module.
METADATA_CLASSES = {
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}


def launched() -> str:
    """The backend that the launcher asks for."""
    for name in (DEEPSPEED, FSDP):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true":
            return name
    return DDP


class _DeepSpeedPlugin(DeepSpeedPlugin):
    """Accelerate's, which without this could not do without the library transformers."""

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers, where it is installed, that its models will be shared out."""
        if find_spec("transformers") is not None:
            super().set_deepspeed_weakref()


def deepspeed_plugin() -> DeepSpeedPlugin | None:
    """For `Accelerator`: the launcher's settings of DeepSpeed, None for other backends."""
    if launched() != DEEPSPEED:
        return None
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not torch.cuda.is_available():
        # gloo will do; its own way to communicate would be compiled for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return _DeepSpeedPlugin()


def accelerator_options() -> dict[str, Any]:
    """What `Accelerator` has to be told besides what the launcher says, for any backend."""
    if launched() == FSDP:  # of torch about Accelerate, when machines have copies of each other
        warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    # gloo carries DeepSpeed's messages on CPUs; for all else Accelerate finds out.
    carrier = "gloo" if launched() == DEEPSPEED and not torch.cuda.is_available() else None
    group = InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT, backend=carrier)
    return {"deepspeed_plugin": deepspeed_plugin(), "kwargs_handlers": [group]}


def backend_of(accelerator: Accelerator) -> str:
    """The backend that runs; one process by itself counts as DDP."""
    kinds = {DistributedType.FSDP: FSDP, DistributedType.DEEPSPEED: DEEPSPEED}
    return kinds.get(accelerator.distributed_type, DDP)


def layout(accelerator: Accelerator) -> str:
    """How checkpoints are laid out, in words; one of another layout cannot be loaded."""
    backend = backend_of(accelerator)
    if backend == DEEPSPEED:
        return f"DeepSpeed ZeRO {accelerator.deepspeed_plugin.zero_stage}"
    if backend == FSDP:
        kind = accelerator.state.fsdp_plugin.state_dict_type
        return f"FSDP {kind.name.lower().replace('_', ' ')}"
    return "DDP"


def hand_over(accelerator: Accelerator, config: TrainConfig, batch_size: int) -> None:
    """Give DeepSpeed's engine, which takes the step itself, what `configs/*.yaml` says.

    Args:
        batch_size: samples of one forward pass on one process.
    """
    if backend_of(accelerator) != DEEPSPEED:
        return
    accelerator.deepspeed_plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        gradient_clipping=config.max_grad_norm,
        # Its own optimizers that run on the CPU are Adams: they would take the place of any other.
        zero_force_ds_cpu_optimizer=config.optimizer == "adamw",
    )


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *loaders: Any
) -> tuple[Any, ...]:
    """`accelerator.prepare`, and what it leaves to the script. Collective."""
    backend = backend_of(accelerator)
    dtype = DTYPES.get(accelerator.mixed_precision)
    if backend != DDP and dtype is not None:
        choose_precision_by_operation(model, torch.autocast(accelerator.device.type, dtype))
    if backend == FSDP:
        check_blocks(model)
        plugin = accelerator.state.fsdp_plugin
        if plugin.mixed_precision_policy is not None:
            # Losses and metrics stay as precise as the model made them.
            policy = replace(plugin.mixed_precision_policy, output_dtype=None)
            plugin.mixed_precision_policy = policy
        if plugin.activation_checkpointing:
            # Accelerate's own way draws other random numbers in the second pass.
            plugin.activation_checkpointing = False
            plugin.set_auto_wrap_policy(model)
            is_block = fsdp2_prepare_auto_wrap_policy(plugin, model)
            if is_block is None or not checkpoint_activations(model, is_block):
                raise UserError(
                    "activation checkpointing needs to know the blocks of the model: name their "
                    f"classes in {type(model).__name__}._no_split_modules"
                )
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, *loaders)
    if backend == DEEPSPEED and dtype is not None:
        model.register_forward_pre_hook(_cast_to(dtype), with_kwargs=True)
    if isinstance(prepared[0], DistributedDataParallel) and not prepared[0].find_unused_parameters:
        settle_buckets(prepared[0])
    return prepared


def check_blocks(model: nn.Module) -> None:
    """FSDP splits the blocks that a model names, one by one. Raises: UserError when it has none."""
    found = {type(module).__name__ for module in model.modules()}
    for name in getattr(model, "_no_split_modules", None) or ():
        if name not in found:
            raise UserError(
                f"{type(model).__name__}._no_split_modules names {name}, and no module of the "
                "model is of that class: name the class of its repeated blocks"
            )


def settle_buckets(model: DistributedDataParallel) -> None:
    """Have DDP choose its buckets of gradients before the first step. Collective.

    It chooses them anew after the first backward pass of a start. More than two numbers round to
    another sum in another order, which the place in a bucket decides: a run that was stopped would
    end with other bits than one that was not. So this is that first pass, of gradients that are 0.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.reducer.prepare_for_backward([])
    zeros = [parameter.sum() * 0 for parameter in parameters]
    torch.stack([zero.float() for zero in zeros]).sum().backward()
    model.reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None


def choose_precision_by_operation(model: Any, autocast: torch.autocast) -> None:
    """Have a model whose weights get 16 bits compute as DDP does, whose weights have 32."""
    model.forward = autocast(model.forward)
    norms: list[Any] = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:  # its statistics have 32 bits, so its weights must have them too
        norm.forward = partial(_with_weights_in_fp32, norm, norm.forward)


def _with_weights_in_fp32(
    module: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Tensor
) -> Tensor:
    weights = dict(module._parameters)
    in_fp32: Any = {name: None if one is None else one.float() for name, one in weights.items()}
    module._parameters.update(in_fp32)
    try:
        return forward(inputs)
    finally:
        module._parameters.update(weights)


def checkpoint_activations(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> bool:
    """Have the model's blocks computed again in the backward pass instead of kept from the forward.

    The second pass draws the same random numbers as the first and leaves the statistics of
    normalisation alone. Returns: whether there was any block.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    found = False
    for name, child in model.named_children():
        if is_block(child):
            wrapped = checkpoint_wrapper(child, context_fn=partial(_contexts_of_passes, child))
            setattr(model, name, wrapped)
            found = True
        else:
            found |= checkpoint_activations(child, is_block)
    return found


def _contexts_of_passes(block: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), _statistics_kept(block)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, num_batches_tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, num_batches_tracked


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that gives a model of 16 bits its inputs in 16 bits, as FSDP does by itself."""

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating else value

    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return tuple(map(cast, inputs)), {name: cast(value) for name, value in named.items()}

    return hook


def clip_gradients(accelerator: Accelerator, model: nn.Module, limit: float) -> Any:
    """Clip to the norm `limit`, or 0 for no clipping; between the backward pass and the step.

    Returns: the norm before, for `norm_value`, without waiting for the device.
    """
    if limit == 0:
        return None
    if backend_of(accelerator) == DEEPSPEED:  # it clipped, and took the step, in `backward`
        return accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm()
    return accelerator.clip_grad_norm_(model.parameters(), limit)


def norm_value(norm: Any) -> float | None:
    """The norm as a number. Collective."""
    if norm is None:
        return None
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def share_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Give all ranks the main one's buffers, such as statistics of BatchNorm. Collective.

    DDP does it in each forward pass; before an evaluation or a save, it is enough.
    """
    if accelerator.num_processes > 1 and backend_of(accelerator) != DDP:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)


def effective_precision(accelerator: Accelerator, model: nn.Module) -> str:
    """The precision that operations really have, which may not be the one asked for."""
    asked: str = accelerator.mixed_precision
    if asked == "fp16" and accelerator.device.type == "cpu" and not accelerator.is_fsdp2:
        return "no"
    if asked == "fp8":
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        in_fp8 = sum(type(module).__name__ == "Float8Linear" for module in linears)
        return f"fp8 in {in_fp8} of {len(linears)} linear layers, else bf16"
    return asked


def full_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """All weights in full precision, named as in a fresh model. Collective.

    Names of shared weights get the same tensor. Returns: nothing but on the main process.
    """
    named = accelerator.unwrap_model(model).state_dict(keep_vars=True)
    if backend_of(accelerator) == DEEPSPEED:
        found = _deepspeed_weights(accelerator, named)
    else:
        found = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return {}
    first_name: dict[int, str] = {}
    return {name: found[first_name.setdefault(id(value), name)] for name, value in named.items()}


def _deepspeed_weights(accelerator: Accelerator, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's copies in 32 bits, each put together from all ranks."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, value in named.items():
        full = safe_get_full_fp32_param(value) if value.requires_grad else None
        if full is None:  # a buffer, or not trained
            is_parameter = isinstance(value, nn.Parameter)
            with zero.GatheredParameters([value]) if is_parameter else nullcontext():
                full = value.detach().clone()
        if accelerator.is_main_process:
            found[name] = (full.float() if full.is_floating_point() else full).cpu()
    return found


def shapes(accelerator: Accelerator, model: nn.Module) -> dict[str, list[int]]:
    """Names and whole shapes of the weights, as in a fresh model."""
    state = accelerator.unwrap_model(model).state_dict(keep_vars=True)
    return {name: list(getattr(value, "ds_shape", value.shape)) for name, value in state.items()}


def check_layout(accelerator: Accelerator, folder: Path, saved: str, world_size: int) -> None:
    """Refuse a checkpoint that this backend cannot read.

    Args:
        saved: layout of the checkpoint, empty when it does not say.
        world_size: processes that saved it.
    Raises: UserError.
    """
    if saved and saved != layout(accelerator):
        raise UserError(
            f"{folder} was saved with {saved}, which {layout(accelerator)} cannot read: go on with "
            "the accelerate_config.yaml it was saved with, or give another run_name"
        )
    if backend_of(accelerator) == DEEPSPEED and world_size != accelerator.num_processes:
        raise UserError(
            f"{folder} was saved by {world_size} processes, and DeepSpeed cannot share it among "
            f"{accelerator.num_processes}: start {world_size} again, or give another run_name"
        )


@contextmanager
def saving(accelerator: Accelerator) -> Iterator[None]:
    """Context in which the state is saved: failures are those that any backend has."""
    with _plain_errors() if backend_of(accelerator) == FSDP else nullcontext():
        yield


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch's sharded checkpoints fail with what is no Exception, so that nobody catches it."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{type(failure).__name__}: {failure}") from failure


@contextmanager
def loading(accelerator: Accelerator, state: Path) -> Iterator[None]:
    """Context in which the state of a checkpoint is loaded and nothing in it can run code.

    Raises: UserError when it holds more than data.
    """
    try:
        with saving(accelerator), data_only(backend_of(accelerator), state):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(f"{state} holds more than data, so it was not loaded: {error}") from error


@contextmanager
def data_only(backend: str, state: Path) -> Iterator[None]:
    """Context in which torch loads data and nothing else, whatever the caller asks for.

    Raises: UnpicklingError when a file below `state` holds something else.
    """
    for file in state.rglob(".metadata"):  # of FSDP; torch unpickles it unasked
        with file.open("rb") as content:
            _MetadataReader(content).load()
    classes = _deepspeed_classes() if backend == DEEPSPEED else []
    before = os.environ.get(FORCE_WEIGHTS_ONLY)
    os.environ[FORCE_WEIGHTS_ONLY] = "1"  # DeepSpeed asks torch for the opposite
    try:
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        del os.environ[FORCE_WEIGHTS_ONLY]
        if before is not None:
            os.environ[FORCE_WEIGHTS_ONLY] = before


def _deepspeed_classes() -> list[Any]:
    """What DeepSpeed's checkpoints hold besides tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


class _MetadataReader(pickle.Unpickler):
    """Reads the table of contents of a sharded checkpoint, made of a few known classes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)
