"""Put configuration files through accelerate's own loader and launcher; runs where torch and accelerate are.

    python check_accelerate.py FILE…      prints one JSON object: file → what accelerate makes of it

Nothing is started: it stops where `accelerate launch` would start processes.
"""

import json
import sys
from typing import Any

import accelerate
import torch
import torch.distributed.run
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env


def launched(file: str) -> dict[str, Any]:
    config = load_config_from_file(file)
    arguments = launch_command_parser().parse_args(["--config_file", file, "--main_process_port", "0", "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    workers = 1
    if arguments.multi_gpu:
        environment = prepare_multi_gpu_env(arguments)
        arguments = _filter_args(
            arguments,
            torch.distributed.run.get_args_parser(),
            ["--training_script", arguments.training_script, "--training_script_args", arguments.training_script_args],
        )
        elastic, _, _ = torch.distributed.run.config_from_args(arguments)
        workers = elastic.nproc_per_node * elastic.max_nodes
    else:
        _, environment = prepare_simple_launcher_cmd_env(arguments)
    return {
        "distributed_type": str(config.distributed_type.value),
        "workers": workers,
        "mixed_precision": environment["ACCELERATE_MIXED_PRECISION"],
        "use_cpu": environment.get("ACCELERATE_USE_CPU", "False") == "True",
        "visible_devices": environment.get("CUDA_VISIBLE_DEVICES"),
    }


def main() -> None:
    results = {file: launched(file) for file in sys.argv[1:]}
    versions = {"accelerate": accelerate.__version__, "torch": torch.__version__}
    print(json.dumps({"versions": versions, "results": results}))


if __name__ == "__main__":
    main()
