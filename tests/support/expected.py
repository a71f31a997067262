"""What the answers mean to accelerate: the file that `accelerate config` writes, and what the launcher makes of it."""

from dataclasses import replace
from typing import Any

from tests.support.record_accelerate import RECORDED, Case
from tests.support.render import Answers, load_yaml

CONFIG, CPU_CONFIG = "accelerate_config.yaml", "accelerate_config.cpu.yaml"
PRECISION = {"fp32": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def case_of(answers: Answers) -> Case:
    """These answers as a case; questions that were not asked are missing in them."""
    machines = answers.get("num_machines", 1)
    return Case(
        gpus=answers.get("num_gpus", 0) * machines,
        precision=PRECISION[answers["precision"]],
        machines=machines,
        backend=answers.get("backend", "ddp"),
        sharding=answers.get("sharding", "none"),
        cpu_offload=answers.get("cpu_offload", "none"),
        activation_checkpointing=answers.get("activation_checkpointing") == "yes",
    )


def cpu_case_of(answers: Answers) -> Case:
    """Its twin for two processes on the CPU: FSDP offloads on GPUs only, and one machine has no hybrid."""
    case = replace(case_of(answers), gpus=2, machines=1, precision="no")
    if case.backend == "fsdp":
        case = replace(case, cpu_offload="none", sharding="full" if case.sharding == "hybrid" else case.sharding)
    return case


def recorded(case: Case) -> Any:
    """What `accelerate config` wrote for this way of training.

    Precisions were recorded with DDP on one machine, everything else in bf16 on four GPUs of one machine or of each
    of two: the numbers and the precision are put in. What only the launch knows is left out.
    """
    machines = min(case.machines, 2)
    form = case
    if case.backend != "ddp" or machines > 1:
        form = replace(case, gpus=4 * machines, machines=machines, precision="bf16")
    elif case.gpus > 1:
        form = replace(case, gpus=4)
    file: dict[str, Any] = load_yaml(RECORDED / form.file_name)
    file |= {
        "mixed_precision": case.precision,
        "num_machines": case.machines,
        "num_processes": max(case.gpus, 1),
    }
    if case.precision == "fp8":
        fp8 = Case(4, "fp8", backend="fsdp", sharding="full") if case.backend == "fsdp" else Case(4, "fp8")
        file["fp8_config"] = load_yaml(RECORDED / fp8.file_name)["fp8_config"]
    if case.sharding == "hybrid":
        file["parallelism_config"] |= {
            "parallelism_config_dp_replicate_size": case.machines,
            "parallelism_config_dp_shard_size": case.gpus // case.machines,
        }
    for key in ("main_process_ip", "main_process_port"):
        file.pop(key, None)
    return file


def launched(case: Case) -> dict[str, Any]:
    """What check_accelerate.py reports of its file, as far as the answers decide it."""
    several = case.backend != "ddp" or case.gpus > 1
    names = {"ddp": "MULTI_GPU" if several else "NO", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
    found: dict[str, Any] = {
        "distributed_type": names[case.backend],
        "machines": case.machines,
        "workers": max(case.gpus, 1),
        "mixed_precision": case.precision,
        "use_cpu": case.gpus == 0,
        "visible_devices": None,
        "fsdp": None,
        "parallelism": None,
        "deepspeed": None,
        "fp8": {},
    }
    if case.machines > 1:
        found |= {"rank": 1, "endpoint": "10.0.0.1:29511"}
    if case.backend == "fsdp":
        found["fsdp"] = {
            "version": 2,
            "reshard_after_forward": case.sharding != "grad-op",
            "cpu_offload": "CPUOffloadPolicy" if case.cpu_offload == "all" else "OffloadPolicy",
            "auto_wrap_policy": "transformer_auto_wrap_policy",
            "classes_to_wrap": None,  # the model's own _no_split_modules
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": case.activation_checkpointing,
            "cpu_ram_efficient_loading": False,
        }
    if case.sharding == "hybrid":
        gpus = case.gpus // case.machines
        found["parallelism"] = {
            "replicate": case.machines,
            "shard": gpus,
            "total": case.gpus,
            "mesh": [["dp_replicate", "dp_shard"], [case.machines, gpus]],
        }
    if case.backend == "deepspeed":
        found["deepspeed"] = {
            "zero_stage": int(case.sharding.removeprefix("zero")),
            "offload_optimizer": "none" if case.cpu_offload == "none" else "cpu",
            "offload_param": "cpu" if case.cpu_offload == "all" else "none",
            "gather_16bit_weights": case.sharding == "zero3",
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": 1,
            "zero3_init": False,
        }
    if case.precision == "fp8":
        found["fp8"] = {
            "ACCELERATE_FP8_BACKEND": "AO",
            "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": str(case.backend == "fsdp"),
            "ACCELERATE_FP8_PAD_INNER_DIM": "True",
        }
    return found
