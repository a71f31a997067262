"""accelerate_config.yaml: what `accelerate config` writes for these answers, and what the launcher makes of it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.expected import CONFIG, CPU_CONFIG, case_of, cpu_case_of, launched, recorded
from tests.support.record_accelerate import RECORDED, Case, cases, record
from tests.support.render import ROOT, Answers, Renderer, load_yaml
from tests.support.variants import combinations

QUESTIONS = [
    "gpu", "num_gpus", "num_machines", "precision", "backend", "sharding", "cpu_offload", "activation_checkpointing",
]  # fmt: skip
LARGE: list[Answers] = [
    {"gpu": "h100", "num_gpus": 8, "num_machines": 16, "precision": "fp8", "backend": "fsdp", "sharding": "hybrid"},
    {"gpu": "b200", "num_gpus": 8, "num_machines": 1024, "precision": "bf16", "backend": "ddp"},
    {
        "gpu": "v100",
        "num_gpus": 16,
        "num_machines": 3,
        "precision": "fp16",
        "backend": "deepspeed",
        "sharding": "zero1",
    },
]


class Project(NamedTuple):
    answers: Answers
    files: dict[str, str]


def texts(renderer: Renderer, answers: Answers) -> dict[str, str]:
    contents = renderer.contents(answers)
    return {name: contents[name][0].decode() for name in (CONFIG, CPU_CONFIG, "platform.yaml")}


@pytest.fixture(scope="module")
def projects(renderer: Renderer) -> list[Project]:
    """Every way to train that gives different files."""
    distinct: dict[tuple[Any, ...], Answers] = {}
    for answers in [*combinations(renderer, QUESTIONS), *LARGE]:
        distinct.setdefault(tuple(answers.get(name) for name in QUESTIONS[1:]), answers)
    return [Project(answers, texts(renderer, answers)) for answers in distinct.values()]


def test_equals_what_accelerate_config_writes(projects: list[Project]) -> None:
    for answers, files in projects:
        assert yaml.safe_load(files[CONFIG]) == recorded(case_of(answers)), answers
        # Quoted as accelerate quotes: without quotes `no` is a boolean, which the launcher cannot read.
        assert "mixed_precision: 'no'\n" in files[CONFIG] or answers["precision"] != "fp32"


def test_cpu_twin_equals_what_accelerate_config_writes(projects: list[Project]) -> None:
    for answers, files in projects:
        assert yaml.safe_load(files[CPU_CONFIG]) == recorded(cpu_case_of(answers)), answers


def test_keys_are_in_the_order_of_accelerate_config(projects: list[Project]) -> None:
    def sorted_keys(mapping: Any) -> bool:
        return list(mapping) == sorted(mapping) and all(map(sorted_keys, filter(is_mapping, mapping.values())))

    def is_mapping(value: Any) -> bool:
        return isinstance(value, dict)

    for answers, files in projects:
        for name in (CONFIG, CPU_CONFIG):
            assert sorted_keys(yaml.safe_load(files[name])), (answers, name)


def test_every_recorded_file_is_used(projects: list[Project]) -> None:
    assert {path.name for path in RECORDED.iterdir()} == {case.file_name for case in cases()}
    found = [yaml.safe_load(files[name]) for _, files in projects for name in (CONFIG, CPU_CONFIG)]
    for path in RECORDED.iterdir():
        config = load_yaml(path)
        for key in ("main_process_ip", "main_process_port"):
            config.pop(key, None)
        assert config in found, path.name


def test_every_string_is_a_string(projects: list[Project]) -> None:
    for _, files in projects:
        for name in (CONFIG, CPU_CONFIG):
            config = yaml.safe_load(files[name])
            for key in ("mixed_precision", "downcast_bf16", "distributed_type", "rdzv_backend"):
                assert type(config[key]) is str, (name, key)


def check(python: Path, names: list[str]) -> Any:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "CUDA_"))}
    result = subprocess.run(
        [python, ROOT / "tests" / "support" / "check_accelerate.py", *names],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_accelerate_launches_it(projects: list[Project], training_python: Path, tmp_path: Path) -> None:
    """Its loader, launcher and plugins, and torchrun's reading of what the launcher hands over."""
    expected: dict[str, tuple[str, Case]] = {}
    for number, (answers, files) in enumerate(projects):
        for name, case in ((CONFIG, case_of(answers)), (CPU_CONFIG, cpu_case_of(answers))):
            path = tmp_path / f"{number}-{name}"
            path.write_text(files[name])
            expected.setdefault(files[name], (str(path), case))
    output = check(training_python, [path for path, _ in expected.values()])
    lock = (ROOT / "includes" / "lock" / "packages.txt").read_text().split()
    assert f"accelerate=={output['versions']['accelerate']}" in lock
    assert len(output["results"]) == len(expected)
    for file, case in expected.values():
        assert output["results"][file] == launched(case), case


def test_the_record_is_of_the_pinned_accelerate(training_python: Path, tmp_path: Path) -> None:
    """The real `accelerate config`, at its prompts, once: a new release that writes other keys shows here."""
    case = Case(8, "bf16", 2, "fsdp", "hybrid", "all", True)
    record(str(training_python), case, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml") == load_yaml(RECORDED / case.file_name)


def test_platform_file(projects: list[Project]) -> None:
    """What the answers expect of the machine, with real types: the generated code reads this file."""
    for answers, files in projects:
        platform, config = yaml.safe_load(files["platform.yaml"]), yaml.safe_load(files[CONFIG])
        case = case_of(answers)
        gpus = answers.get("num_gpus", 0)
        hardware = platform["hardware"]
        assert hardware["num_gpus"] == gpus
        assert hardware["num_machines"] == config["num_machines"] == case.machines
        assert config["num_processes"] == max(gpus, 1) * case.machines
        assert hardware["gpu"] == (answers["gpu"] if gpus else "none")
        for key, kind in {"compute_capability": str, "gpu_memory_gb": int}.items():
            assert type(hardware[key]) is (kind if gpus else type(None)), key
        for key in ("python", "torch", "torchvision", "cuda"):
            assert type(platform["software"][key]) is str, key
        assert type(platform["software"]["min_driver"]) is int
        assert platform["training"] == {
            "backend": case.backend,
            "precision": answers["precision"],
            "sharding": case.sharding,
            "cpu_offload": case.cpu_offload,
            "activation_checkpointing": case.activation_checkpointing,
        }
        assert platform["preemption_grace_seconds"] == 120
        assert platform["shm_size_gb"] == (0 if answers["gpu"] == "gb200" else 16)


def test_platform_file_of_the_default_project(renderer: Renderer, tmp_path: Path) -> None:
    project = renderer.render({}, tmp_path / "project")
    assert load_yaml(project / "platform.yaml") == {
        "project": "my-project",
        "hardware": {
            "gpu": "a100-80gb",
            "gpu_name": "NVIDIA A100 80GB",
            "compute_capability": "8.0",
            "gpu_memory_gb": 80,
            "num_gpus": 4,
            "num_machines": 1,
        },
        "software": {"python": "3.12", "torch": "2.14.1", "torchvision": "0.29.1", "cuda": "13.0", "min_driver": 580},
        "training": {
            "backend": "ddp",
            "precision": "bf16",
            "sharding": "none",
            "cpu_offload": "none",
            "activation_checkpointing": False,
        },
        "tracker": "tensorboard",
        "preemption_grace_seconds": 120,
        "shm_size_gb": 16,
    }


def test_platform_file_of_another_gpu(renderer: Renderer) -> None:
    answers = {"gpu": "other", "gpu_capability": "8.9", "gpu_memory_gb": 20, "num_gpus": 2}
    hardware = yaml.safe_load(texts(renderer, answers)["platform.yaml"])["hardware"]
    assert hardware == {
        "gpu": "other",
        "gpu_name": "NVIDIA GPU",
        "compute_capability": "8.9",
        "gpu_memory_gb": 20,
        "num_gpus": 2,
        "num_machines": 1,
    }
