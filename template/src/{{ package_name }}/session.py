"""The parts that training, evaluation and export all start from."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    parse_flag_from_env,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader

from . import backend
from .collective import FailTogether
from .config import TrainConfig, per_device_batch_size
from .data import Datasets, build_datasets
from .errors import UserError
from .loader import EpochSampler, build_loaders
from .logs import logger
from .model import build_model
from .optimizer import build_optimizer
from .platform import load_platform


@dataclass
class Parts:
    """What `backend.prepare` takes, and the sampler that positions the training loader."""

    datasets: Datasets
    model: nn.Module
    num_parameters: int
    optimizer: torch.optim.Optimizer
    train_loader: DataLoader[Any]
    eval_loader: DataLoader[Any]
    sampler: EpochSampler


def start_accelerator(config: TrainConfig, **options: Any) -> Accelerator:
    """Join the other processes; how many, where and in which precision the launcher has said.

    Raises: UserError when there are fewer GPUs than processes, or these do not see each other.
    """
    check_gpus()
    by_backend = backend.accelerator_options()
    accelerator = Accelerator(
        # As a plugin: the launcher's environment would win over a plain number.
        gradient_accumulation_plugin=GradientAccumulationPlugin(config.gradient_accumulation_steps),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        deepspeed_plugin=by_backend["deepspeed_plugin"],
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=config.find_unused_parameters),
            *by_backend["kwargs_handlers"],
        ],
        **options,
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched but each sees {accelerator.num_processes}: "
            "use ./launch.sh --cpu, or see `make doctor`"
        )
    return accelerator


def check_gpus() -> None:
    """Training on GPUs that are not there would go on, unasked, on the CPU. Raises: UserError."""
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or os.environ.get("DS_ACCELERATOR") == "cpu"
    if on_cpu or not load_platform().has_gpu:
        return
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count()
    if found < wanted:
        raise UserError(
            f"GPUs on this machine: {wanted} needed, {found} found; see `make doctor`, or use "
            "./launch.sh --cpu to do without"
        )


def build_parts(accelerator: Accelerator, config: TrainConfig) -> Parts:
    """Data, model and optimizer, not yet prepared; the same weights on each rank."""
    batch_size = per_device_batch_size(config, accelerator.num_processes)
    backend.hand_over(accelerator, config, batch_size)
    datasets = build_datasets_in_turn(accelerator, config)
    train_loader, eval_loader, sampler = build_loaders(
        datasets, batch_size, config.global_batch_size, config.seed, config.num_workers
    )
    set_seed(config.seed)
    model = build_model(config.model, datasets)
    if config.sync_batchnorm:
        model = with_shared_statistics(model, accelerator)
    if config.compile:
        model.compile(backend=config.compile_backend)  # in place, so no name of a weight changes
    optimizer = build_optimizer(model, config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Parts(datasets, model, num_parameters, optimizer, train_loader, eval_loader, sampler)


def with_shared_statistics(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model with BatchNorm over the samples of all GPUs, where there are several."""
    if accelerator.num_processes == 1:
        return model
    if accelerator.device.type != "cuda":
        logger.info("sync_batchnorm needs GPUs: each process has statistics of its own here")
        return model
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def build_datasets_in_turn(accelerator: Accelerator, config: TrainConfig) -> Datasets:
    """One download for all ranks, on a shared volume and on local disks alike. Collective.

    First the main process reads, then one process of each other machine, then the rest.
    """
    turn = 0 if accelerator.is_main_process else 1 if accelerator.is_local_main_process else 2
    datasets = None
    for now in range(3):
        with FailTogether(accelerator, "could not read the data"):
            if now == turn:
                datasets = build_datasets(config.data)
    assert datasets is not None
    return datasets


def leave(accelerator: Accelerator) -> None:
    """Close the trackers, then the process group. Collective.

    The launcher stops all ranks when one ends with an error code, so they wait for each other.
    """
    if accelerator.is_main_process:
        for tracker in accelerator.trackers:
            tracker.finish()
    accelerator.trackers.clear()
    accelerator.wait_for_everyone()
    accelerator.end_training()
