"""Put configuration files through accelerate's own loader, launcher and plugins; runs where torch and accelerate are.

    python check_accelerate.py FILE…      prints one JSON object: file → what accelerate makes of it

Nothing is started: it stops where `accelerate launch` would start processes. What they would find in their
environment is given to the plugins that they build from it.
"""

import json
import sys
from argparse import Namespace
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.distributed.run
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils import launch as launch_utils

# Another machine than the first one: only there does the launcher look for the port.
SEVERAL_MACHINES = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29511"]
FP8 = [f"ACCELERATE_FP8_{name}" for name in ("BACKEND", "ENABLE_FSDP_FLOAT8_ALL_GATHER", "PAD_INNER_DIM")]
ONE_MACHINE = ["--main_process_port", "0"]


def launched(file: str) -> dict[str, Any]:
    config = load_config_from_file(file)
    machines = SEVERAL_MACHINES if config.num_machines > 1 else ONE_MACHINE
    arguments = launch_command_parser().parse_args(["--config_file", file, *machines, "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    found: dict[str, Any] = {"distributed_type": str(config.distributed_type.value), "machines": 1, "workers": 1}
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, environment = launch_utils.prepare_deepspeed_cmd_env(arguments)
        assert command is None, f"DeepSpeed's own launcher would be started: {command}"
        found |= elastic(arguments)
    elif arguments.use_fsdp or arguments.multi_gpu:
        environment = launch_utils.prepare_multi_gpu_env(arguments)
        found |= elastic(arguments)
    else:
        _, environment = launch_utils.prepare_simple_launcher_cmd_env(arguments)
    with patch_environment(**environment):
        return found | {
            "mixed_precision": environment["ACCELERATE_MIXED_PRECISION"],
            "use_cpu": environment.get("ACCELERATE_USE_CPU", "False") == "True",
            "visible_devices": environment.get("CUDA_VISIBLE_DEVICES"),
            "fsdp": fsdp() if "ACCELERATE_USE_FSDP" in environment else None,
            "parallelism": parallelism() if "ACCELERATE_USE_PARALLELISM_CONFIG" in environment else None,
            "deepspeed": deepspeed() if "ACCELERATE_USE_DEEPSPEED" in environment else None,
            "fp8": {key: environment[key] for key in FP8 if key in environment},
        }


def elastic(arguments: Namespace) -> dict[str, Any]:
    """How torchrun understands what the launcher hands over."""
    arguments = launch_utils._filter_args(
        arguments,
        torch.distributed.run.get_args_parser(),
        ["--training_script", arguments.training_script, "--training_script_args", arguments.training_script_args],
    )
    config, _, _ = torch.distributed.run.config_from_args(arguments)
    found = {"machines": config.max_nodes, "workers": config.nproc_per_node * config.max_nodes}
    if config.max_nodes > 1:
        found |= {"rank": config.rdzv_configs["rank"], "endpoint": config.rdzv_endpoint}
    return found


def fsdp() -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin()
    return {
        "version": plugin.fsdp_version,
        "reshard_after_forward": plugin.reshard_after_forward,
        "cpu_offload": type(plugin.cpu_offload).__name__,
        "auto_wrap_policy": getattr(plugin.auto_wrap_policy, "__name__", None),
        "classes_to_wrap": plugin.transformer_cls_names_to_wrap,
        "state_dict_type": plugin.state_dict_type.name,
        "activation_checkpointing": plugin.activation_checkpointing,
        "cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
    }


def parallelism() -> dict[str, Any]:
    config = ParallelismConfig()
    return {
        "replicate": config.dp_replicate_size,
        "shard": config.dp_shard_size,
        "total": config.total_size,
        "mesh": config._get_mesh(),
    }


def deepspeed() -> dict[str, Any]:
    plugin = DeepSpeedPlugin()
    zero = plugin.deepspeed_config["zero_optimization"]
    return {
        "zero_stage": zero["stage"],
        "offload_optimizer": zero["offload_optimizer"]["device"],
        "offload_param": zero["offload_param"]["device"],
        "gather_16bit_weights": zero["stage3_gather_16bit_weights_on_model_save"],
        "gradient_clipping": plugin.deepspeed_config["gradient_clipping"],
        "gradient_accumulation_steps": plugin.deepspeed_config["gradient_accumulation_steps"],
        "zero3_init": plugin.zero3_init_flag,
    }


def main() -> None:
    # To look at a configuration for fp8, torchao need not be there; to train with it, it must.
    with mock.patch.object(launch_utils, "is_fp8_available", return_value=True):
        results = {file: launched(file) for file in sys.argv[1:]}
    versions = {"accelerate": accelerate.__version__, "torch": torch.__version__}
    print(json.dumps({"versions": versions, "results": results}))


if __name__ == "__main__":
    main()
