"""accelerate_config.yaml: what `accelerate config` writes for these answers, and what the launcher makes of it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.record_accelerate import CASES, RECORDED, file_name, record
from tests.support.render import ROOT, Answers, Renderer, load_yaml
from tests.support.variants import combinations

PRECISION = {"fp32": "no", "fp16": "fp16", "bf16": "bf16"}


@pytest.fixture(scope="module")
def projects(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Answers, Path]]:
    """Every hardware and precision that gives different files, rendered."""
    folder = tmp_path_factory.mktemp("projects")
    distinct: dict[tuple[Any, ...], Answers] = {}
    for answers in combinations(renderer, ["gpu", "num_gpus", "precision"]):
        distinct.setdefault((answers.get("num_gpus"), answers["precision"]), answers)
    distinct[8, "bf16"] = {"gpu": "h100", "num_gpus": 8, "precision": "bf16"}
    distinct[16, "fp16"] = {"gpu": "v100", "num_gpus": 16, "precision": "fp16"}
    return [
        (answers, renderer.render(answers, folder / str(number))) for number, answers in enumerate(distinct.values())
    ]


def expected(gpus: int, precision: str) -> Any:
    """As recorded; only the number of processes differs with more GPUs."""
    recorded = load_yaml(RECORDED / file_name(min(gpus, 4), PRECISION[precision]))
    return recorded | {"num_processes": max(gpus, 1)}


def test_equals_what_accelerate_config_writes(projects: list[tuple[Answers, Path]]) -> None:
    seen = set()
    for answers, project in projects:
        gpus = answers.get("num_gpus", 0)
        written = (project / "accelerate_config.yaml").read_text()
        assert yaml.safe_load(written) == expected(gpus, answers["precision"]), answers
        # Quoted as accelerate quotes: without quotes `no` is a boolean, which the launcher cannot read.
        assert "mixed_precision: 'no'\n" in written or answers["precision"] != "fp32"
        seen.add((min(gpus, 4), PRECISION[answers["precision"]]))
    assert seen == set(CASES) - {(2, "no")}


def test_cpu_twin_equals_what_accelerate_config_writes(projects: list[tuple[Answers, Path]]) -> None:
    for _, project in projects:
        assert load_yaml(project / "accelerate_config.cpu.yaml") == load_yaml(RECORDED / file_name(2, "no"))


def test_every_string_is_a_string(projects: list[tuple[Answers, Path]]) -> None:
    for _, project in projects:
        for name in ("accelerate_config.yaml", "accelerate_config.cpu.yaml"):
            config = load_yaml(project / name)
            for key in ("mixed_precision", "downcast_bf16", "distributed_type", "rdzv_backend"):
                assert type(config[key]) is str, (name, key)


def test_accelerate_launches_it(projects: list[tuple[Answers, Path]], training_python: Path) -> None:
    files = {
        str(project / name): (answers, name)
        for answers, project in projects
        for name in ("accelerate_config.yaml", "accelerate_config.cpu.yaml")
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "CUDA_"))}
    result = subprocess.run(
        [training_python, ROOT / "tests" / "support" / "check_accelerate.py", *files],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    lock = (ROOT / "includes" / "lock" / "packages.txt").read_text().split()
    assert f"accelerate=={output['versions']['accelerate']}" in lock
    assert output["results"].keys() == files.keys()
    for file, launched in output["results"].items():
        answers, name = files[file]
        gpus = answers.get("num_gpus", 0)
        on_cpu = name == "accelerate_config.cpu.yaml"
        assert launched == {
            "distributed_type": "MULTI_GPU" if on_cpu or gpus > 1 else "NO",
            "workers": 2 if on_cpu else max(gpus, 1),
            "mixed_precision": "no" if on_cpu else PRECISION[answers["precision"]],
            "use_cpu": gpus == 0 and not on_cpu,
            "visible_devices": None,
        }, (answers, name)


def test_the_record_is_of_the_pinned_accelerate(training_python: Path, tmp_path: Path) -> None:
    """The real `accelerate config`, at its prompts, once: a new release that writes other keys shows here."""
    record(str(training_python), 4, "bf16", tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml") == load_yaml(RECORDED / file_name(4, "bf16"))


def test_platform_file(projects: list[tuple[Answers, Path]]) -> None:
    """What the answers expect of the machine, with real types: the generated code reads this file."""
    for answers, project in projects:
        platform, config = load_yaml(project / "platform.yaml"), load_yaml(project / "accelerate_config.yaml")
        gpus = answers.get("num_gpus", 0)
        hardware = platform["hardware"]
        assert hardware["num_gpus"] == gpus
        assert hardware["num_machines"] == config["num_machines"] == 1
        assert config["num_processes"] == max(gpus, 1)
        assert hardware["gpu"] == (answers["gpu"] if gpus else "none")
        for key, kind in {"compute_capability": str, "gpu_memory_gb": int}.items():
            assert type(hardware[key]) is (kind if gpus else type(None)), key
        for key in ("python", "torch", "torchvision", "cuda"):
            assert type(platform["software"][key]) is str, key
        assert type(platform["software"]["min_driver"]) is int
        assert platform["training"] == {"backend": "ddp", "precision": answers["precision"]}
        assert platform["preemption_grace_seconds"] == 120
        assert platform["shm_size_gb"] == 16


def test_platform_file_of_the_default_project(renderer: Renderer, tmp_path: Path) -> None:
    assert load_yaml(renderer.render({}, tmp_path / "project") / "platform.yaml") == {
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
        "training": {"backend": "ddp", "precision": "bf16"},
        "tracker": "tensorboard",
        "preemption_grace_seconds": 120,
        "shm_size_gb": 16,
    }
