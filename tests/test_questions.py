"""What the questions accept, what they refuse and how, and that nothing is written then."""

import keyword
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.render import (
    ROOT,
    Answers,
    Renderer,
    copier_command,
    data_arguments,
    files,
    load_yaml,
    run_copier,
)
from tests.support.variants import VALUES, Space, combinations

PRESETS = sorted((ROOT / "presets").glob("*.yml"))


def exported(renderer: Renderer, file: str) -> Any:
    """The names that a file in includes/ sets."""
    return renderer.environment.get_template(f"includes/{file}").module


# -- refusals ----------------------------------------------------------------------------------------------------------

# Through the command line, since exit code, last line and an untouched disk are the promise.
REFUSED_ON_THE_COMMAND_LINE: list[tuple[Answers, str]] = [
    ({"gpu_cuont": 4}, "there is no question 'gpu_cuont'; the questions are project_name"),
    ({"num_gpu": 4}, "there is no question 'num_gpu': did you mean num_gpus? The questions are project_name"),
    ({"num_gpus": -1}, "num_gpus must be from 0 (CPU only) to 16"),
    ({"num_gpus": "8.5"}, 'num_gpus must be a whole number such as 4, not "8.5"'),
    ({"project_slug": "../elsewhere"}, "project_slug must be 1 to 40 small letters"),
    ({"package_name": "torch"}, "package_name must not be 'torch'"),
    ({"gpu": "v100", "precision": "bf16"}, "bf16 needs compute capability 8.0 and the NVIDIA V100 has 7.0"),
    ({"gpu": "v100", "torch_stack": "2.14.1-cuda13.0"}, "choose 2.14.1-cuda12.6"),
    ({"precision": "fp8"}, "fp8 needs compute capability 8.9 and the NVIDIA A100 80GB has 8.0"),
    ({"gpu": "none", "backend": "fsdp"}, "backend=fsdp needs a GPU: choose ddp, or a GPU."),
    ({"backend": "fsdp", "sharding": "hybrid"}, "num_machines is 1: choose full, or more machines."),
    ({"num_machines": 2, "checkpoint_volume": "checkpoints"}, "an absolute path that all 2 machines see"),
    ({"deployment": "local", "shm_size": "16gb"}, "shm_size is only for deployment=docker"),
    ({"description": "two\nlines"}, "description must be one line of plain text"),
    ({"deployment": "slurm", "time_limit": "90"}, "time_limit must be hours, minutes and seconds such as 12:00:00"),
    ({"deployment": "kubernetes", "volume_size": "100GB"}, "volume_size must be whole Gi or Ti such as 100Gi or 2Ti"),
]

SLURM: Answers = {"deployment": "slurm"}
KUBERNETES: Answers = {"deployment": "kubernetes"}

# In this process: the same engine, many times.
REFUSED: list[tuple[Answers, str]] = [
    *REFUSED_ON_THE_COMMAND_LINE,
    ({"project_name": ""}, "project_name must not be empty"),
    ({"project_name": "   "}, "project_name must not be empty"),
    ({"project_name": "a\x00b"}, "project_name must be one line"),
    ({"project_name": "a\x85b"}, "project_name must be one line"),
    ({"project_name": "a\u202eb"}, "project_name must be one line"),
    ({"project_name": "a\udc80b"}, "project_name must be one line"),
    ({"project_name": " a"}, "must not start or end with a space"),
    ({"project_name": "a" * 61}, "at most 60 characters, not 61"),
    ({"author_name": ""}, "author_name must not be empty"),
    ({"author_name": "a\rb"}, "author_name must be one line"),
    ({"author_email": "ada at example.com"}, "author_email must be an address"),
    ({"author_email": "ada@example.com\n"}, "author_email must be an address"),
    *(({"project_slug": slug}, "project_slug must be") for slug in ("", "A", "a/b", "-a", "a-", ".", "a" * 41, "a\n")),
    *(({"package_name": name}, "must not be") for name in ("class", "json", "accelerate", "numpy", "yaml", "tests")),
    *(({"package_name": name}, "package_name must be") for name in ("", "a-b", "1x", "Torch", "a" * 61, "é", "a\n")),
    ({"license": "gpl"}, "'gpl' is not in"),
    ({"gpu": "a100"}, "'a100' is not in"),
    ({"gpu": "none", "num_gpus": 4}, "num_gpus must be 0 when gpu is none"),
    *(
        ({"num_gpus": number}, "num_gpus must be")
        for number in (-1, 17, 10**9, 8.7, True, None, "", "four", "1e3", "0x4")
    ),
    ({"num_gpus": 0, "precision": "fp16"}, "fp16 needs a GPU"),
    ({"gpu": "none", "precision": "fp16"}, "fp16 needs a GPU"),
    ({"gpu": "t4", "precision": "bf16"}, "choose fp16 or fp32"),
    ({"precision": "fp4"}, "'fp4' is not in"),
    ({"gpu": "t4", "precision": "fp8"}, "choose fp16 or fp32."),
    ({"gpu": "h100", "num_gpus": 0, "precision": "fp8"}, "fp8 needs a GPU: choose fp32 or bf16, or a GPU."),
    (
        {"gpu": "other", "gpu_capability": "8.8", "precision": "fp8"},
        "the NVIDIA GPU has 8.8: choose bf16, fp16 or fp32.",
    ),
    ({"gpu": "other", "gpu_capability": "7.9", "precision": "bf16"}, "the NVIDIA GPU has 7.9: choose fp16 or fp32."),
    *(
        ({"gpu": "other", "gpu_capability": value}, "gpu_capability must be a compute capability from 5.0 to 12.9")
        for value in ("", "8", "8.61", "sm_86", "4.9", "13.0", "99.9", "-8.0", "8.6\n", "٨.٦")
    ),
    ({"gpu": "other", "gpu_capability": 8.6}, "gpu_capability must be text: put it in quotes"),
    ({"gpu": "other", "gpu_capability": "11.0"}, "none of the PyTorch builds offered here has code for it"),
    ({"gpu": "other", "gpu_capability": "6.1", "torch_stack": "2.14.1-cuda13.0"}, "choose 2.14.1-cuda12.6."),
    ({"gpu_capability": "8.0"}, "gpu_capability is only for gpu=other"),
    ({"gpu_memory_gb": 80}, "gpu_memory_gb is only for gpu=other"),
    *(({"gpu": "other", "gpu_memory_gb": number}, "gpu_memory_gb must be") for number in (3, 1025, "24gb", 24.5, None)),
    *(({"num_machines": number}, "num_machines must be") for number in (0, -1, 1025, "two", 2.5, True, "")),
    ({"gpu": "none", "num_machines": 2}, "num_machines must be 1 without a GPU"),
    ({"num_gpus": 0, "num_machines": 2}, "num_machines must be 1 without a GPU"),
    ({"backend": "horovod"}, "'horovod' is not in"),
    ({"num_gpus": 0, "backend": "deepspeed"}, "backend=deepspeed needs a GPU"),
    ({"gpu": "h100", "precision": "fp8", "backend": "deepspeed"}, "backend=deepspeed cannot train in fp8"),
    ({"sharding": "full"}, "sharding is only for backend=fsdp and backend=deepspeed"),
    ({"gpu": "none", "sharding": "zero3"}, "sharding is only for backend=fsdp and backend=deepspeed"),
    ({"cpu_offload": "none"}, "cpu_offload is only for backend=fsdp and backend=deepspeed"),
    ({"activation_checkpointing": "yes"}, "activation_checkpointing is only for backend=fsdp"),
    ({"backend": "deepspeed", "activation_checkpointing": "no"}, "activation_checkpointing is only for backend=fsdp"),
    ({"backend": "fsdp", "activation_checkpointing": True}, "activation_checkpointing must be 'yes' or 'no' in quotes"),
    ({"backend": "fsdp", "sharding": "zero2"}, "'zero2' is not in ['full', 'grad-op']"),
    ({"backend": "deepspeed", "sharding": "full"}, "'full' is not in ['zero1', 'zero2', 'zero3']"),
    (
        {"backend": "fsdp", "num_gpus": 1, "num_machines": 2, "sharding": "hybrid"},
        "num_gpus is 1: choose full, or more GPUs.",
    ),
    ({"backend": "deepspeed", "num_gpus": 1, "sharding": "zero1"}, "sharding=zero1 has nothing to split on one GPU"),
    ({"backend": "fsdp", "num_gpus": 1, "cpu_offload": "none"}, "choose all, or backend ddp, or more GPUs."),
    ({"backend": "deepspeed", "num_gpus": 1, "cpu_offload": "none"}, "choose optimizer, or backend ddp, or more GPUs."),
    ({"backend": "fsdp", "cpu_offload": "optimizer"}, "cpu_offload=optimizer needs backend deepspeed"),
    (
        {"backend": "deepspeed", "sharding": "zero1", "cpu_offload": "optimizer"},
        "needs sharding zero2 or zero3, and it is zero1: choose none, or zero2.",
    ),
    (
        {"backend": "deepspeed", "sharding": "zero2", "cpu_offload": "all"},
        "needs sharding zero3 to move parameters, and it is zero2: choose optimizer, or zero3.",
    ),
    ({"backend": "deepspeed", "sharding": "zero1", "cpu_offload": "all"}, "and it is zero1: choose none, or zero3."),
    (
        {"num_machines": 2, "deployment": "local", "checkpoint_volume": "runs"},
        "checkpoint_volume must be an absolute path that all 2 machines see",
    ),
    ({"precision": False}, "precision must be text: put it in quotes"),
    ({"gpu": "gb200", "deployment": "docker"}, "docker needs an x86-64 machine"),
    ({"gpu": "b200", "torch_stack": "2.14.1-cuda12.6"}, "runs on compute capability 5.0 to 9.0"),
    ({"torch_stack": "2.12.0-cuda13.0"}, "'2.12.0-cuda13.0' is not in"),
    *(
        ({"checkpoint_volume": volume}, "checkpoint_volume must be a volume name")
        for volume in ("", ".", "a/b", "./a", "/", "/a/../b", "/a b", "/a:b", "$HOME", "a\n")
    ),
    *(
        ({"deployment": "local", "checkpoint_volume": folder}, "checkpoint_volume must be a folder")
        for folder in ("", "..", "../a", "a/../../b", "/", "~/a", "a b", "a\n")
    ),
    ({"checkpoint_volume": "data"}, "checkpoint_volume must not be 'data'"),
    ({"checkpoint_volume": "cache"}, "checkpoint_volume must not be 'cache'"),
    ({"checkpoint_volume": "/etc/checkpoints"}, "checkpoint_volume must not be in /etc"),
    ({"deployment": "local", "checkpoint_volume": "/dev/shm"}, "checkpoint_volume must not be in /dev"),
    ({"deployment": "local", "checkpoint_volume": "src/runs"}, "checkpoint_volume must not be 'src/runs'"),
    ({"preemption_grace_seconds": 29}, "must be from 30 to 3600, not 29"),
    ({"preemption_grace_seconds": 3601}, "must be from 30 to 3600, not 3601"),
    ({"preemption_grace_seconds": "2m"}, "preemption_grace_seconds must be a whole number"),
    *(
        ({"image_registry": registry}, "image_registry must be")
        for registry in ("https://registry.example.com", "registry.example.com/", "Registry.example.com", "a b", "a//b")
    ),
    *(
        ({"base_registry": registry}, "base_registry must be")
        for registry in ("", "https://registry.example.com", "registry.example.com/", "a b")
    ),
    *(
        ({"package_index": index}, "package_index must be")
        for index in ("pypi.example.com", "ftp://a/b", "https://pypi.example.com/a b", "https://pypi.example.com/$(id)")
    ),
    ({"package_index": "https://user:key@pypi.example.com/simple"}, "package_index must hold no user and no password"),
    *(({"shm_size": size}, "shm_size must be whole gigabytes") for size in ("", "16", "7gb", "8.5gb", "64mb", "16GB")),
    ({"jupyter": True}, "jupyter must be 'yes' or 'no' in quotes"),
    ({"jupyter": "maybe"}, "'maybe' is not in"),
    ({"deployment": "local", "ssh": "no"}, "ssh is only for deployment=docker"),
    ({"deployment": "local", "base_registry": "docker.io"}, "base_registry is only for deployment=docker"),
    ({"deployment": "local", "image_registry": ""}, "image_registry is only for deployment=docker"),
    ({"deployment": "slurm", "image_registry": ""}, "or slurm with a container_runtime: leave it out"),
    *(
        ({name: ""}, f"{name} is only for deployment=slurm")
        for name in ("partition", "account", "qos", "time_limit", "constraint", "sbatch_options", "modules")
    ),
    ({"container_runtime": "none"}, "container_runtime is only for deployment=slurm"),
    *(
        (SLURM | {name: value}, f"{name} must be a name as Slurm lists it")
        for name in ("partition", "account", "qos")
        for value in ("a b", "$USER", "a\n#SBATCH --wrap=id", "-x", "a=b", "é", "a" * 64, "a,")
    ),
    (SLURM | {"account": "a,b"}, "account must be a name"),
    *(
        (SLURM | {"time_limit": time}, "time_limit must be hours, minutes and seconds")
        for time in ("60", "12:00", "1-00", "12:60:00", "forever", "12:00:00\n", "1000-00:00:00", "-1:00:00")
    ),
    (SLURM | {"time_limit": "0:05:59"}, "time_limit must be at least 360 seconds"),
    (SLURM | {"time_limit": "1:00:00", "preemption_grace_seconds": 1800}, "must be at least 3720 seconds"),
    *(
        (SLURM | {"constraint": value}, "constraint must be features joined by & or |")
        for value in ("a b", "a&", "|a", "a;b", "$(id)", "a\n", "!a")
    ),
    *(
        (SLURM | {"sbatch_options": value}, "sbatch_options must be options on one line")
        for value in (" --exclusive", "--a  --b", "--a\n--b", "--a\t--b", "--é", "--exclusive ")
    ),
    *(
        (SLURM | {"sbatch_options": value}, "sbatch_options must be long options of sbatch")
        for value in ("-N2", "--mem 4G", "--x=$HOME", "--x=`id`", "--x='a'", "#", "--comment=a#b", "--X", "--x=")
    ),
    (SLURM | {"sbatch_options": "--nodes=2"}, "must not hold --nodes: answer num_machines instead"),
    (SLURM | {"sbatch_options": "--exclusive --time=1"}, "must not hold --time: answer time_limit instead"),
    (SLURM | {"sbatch_options": "--no-requeue"}, "must not hold --no-requeue: the project sets it itself"),
    (SLURM | {"gpu": "gb200", "container_runtime": "pyxis"}, "container_runtime=pyxis needs an x86-64 machine"),
    (SLURM | {"container_runtime": "docker"}, "'docker' is not in"),
    (SLURM | {"container_runtime": "pyxis", "modules": ""}, "modules is only for container_runtime=none"),
    *((SLURM | {"modules": value}, "modules must be names") for value in ("a;id", "a  b", " a", "$(id)", "a\n", "-f")),
    (SLURM | {"shm_size": "16gb"}, "shm_size is only for deployment=docker"),
    (SLURM | {"num_machines": 2, "checkpoint_volume": "runs"}, "an absolute path that all 2 machines see"),
    (SLURM | {"checkpoint_volume": "slurm/logs"}, "checkpoint_volume must not be 'slurm/logs'"),
    ({"gpu": "gb200", "deployment": "kubernetes"}, "kubernetes needs an x86-64 machine"),
    *(
        ({name: value}, f"{name} is only for deployment=kubernetes")
        for name, value in {
            **{"manifest_kind": "job", "namespace": "", "storage_class": "", "volume_size": "1Ti", "data_claim": ""},
            **{"image_pull_secret": "", "node_selector": "", "tolerations": "", "priority_class": "", "queue": ""},
        }.items()
    ),
    (KUBERNETES | {"manifest_kind": "statefulset"}, "'statefulset' is not in"),
    *(
        (KUBERNETES | {"checkpoint_volume": name}, "checkpoint_volume must be the name of a PersistentVolumeClaim")
        for name in ("", "/mnt/checkpoints", "a_b", "A", "-a", "a-", "a" * 64, "a.b", "a\n")
    ),
    *(
        (KUBERNETES | {"namespace": name}, "namespace must be a name as `kubectl get namespaces` lists it")
        for name in ("A", "a_b", "a.b", "-a", "a" * 64, "a\n", "a b")
    ),
    *(
        (KUBERNETES | {name: value}, f"{name} must be a name as kubectl lists it")
        for name in ("storage_class", "data_claim", "image_pull_secret", "priority_class", "queue")
        for value in ("A", "a_b", "a..b", "-a", "a" * 64, "a\n", "$(id)")
    ),
    (
        KUBERNETES | {"data_claim": "a", "checkpoint_volume": "a"},
        "data_claim must not be a, which is the checkpoint_volume",
    ),
    *(
        (KUBERNETES | {"volume_size": size}, "volume_size must be whole Gi or Ti")
        for size in ("", "100", "100GB", "0Gi", "1.5Ti", "100GiB", "-1Gi", "100Gi\n")
    ),
    *(
        (KUBERNETES | {"node_selector": value}, "node_selector must be labels with their values")
        for value in ("a", "a=b,", "a=b, c=d", "a==b", "=b", "a/b/c=d", "a=-b", "a=b\n", "a:b", "a" * 64 + "=b")
    ),
    (KUBERNETES | {"node_selector": "a=b,a=c"}, "node_selector must name each label once"),
    *(
        (KUBERNETES | {"tolerations": value}, "tolerations must be taints as `kubectl describe node` shows them")
        for value in ("a", "a=b", "a:Never", "a:NoSchedule,", "a=b=c:NoExecute", ":NoSchedule", "a:NoSchedule\n")
    ),
    (KUBERNETES | {"shm_size": "64mb"}, "shm_size must be whole gigabytes"),
    (KUBERNETES | {"ssh": "no"}, "ssh is only for deployment=docker"),
    (KUBERNETES | {"partition": ""}, "partition is only for deployment=slurm"),
]


def assert_refused(result: subprocess.CompletedProcess[str], sentence: str, project: Path) -> None:
    assert result.returncode == 1
    assert sentence in result.stderr.strip().splitlines()[-1]
    assert not project.exists()


@pytest.mark.parametrize(("answers", "sentence"), REFUSED_ON_THE_COMMAND_LINE, ids=lambda value: str(value)[:40])
def test_refused_with_data(answers: Answers, sentence: str, template: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    assert_refused(run_copier("copy", "--defaults", *data_arguments(answers), template, project), sentence, project)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpu_cuont: 4", "there is no question 'gpu_cuont'"),
        ("num_gpus: 8.7", "num_gpus must be a whole number such as 4, not 8.7"),  # Copier would take 8
        ("num_gpus:", "num_gpus must be a whole number such as 4, not null"),
        ("tracker: [wandb]", "tracker must be text: put it in quotes"),
        ("description: 2026-12-02", "description must be text: put it in quotes"),
        ("author_email:", "author_email must be text: put it in quotes"),
        ("_subdirectory: tests", "there is no question '_subdirectory'"),
        ("jupyter: yes", "jupyter must be 'yes' or 'no' in quotes"),  # YAML reads true
        ("gpu: v100\ntorch_stack: 2.14.1-cuda13.0", "choose 2.14.1-cuda12.6"),
    ],
)
def test_refused_with_data_file(text: str, sentence: str, template: Path, tmp_path: Path) -> None:
    project, answers = tmp_path / "project", tmp_path / "answers.yml"
    answers.write_text(text)
    assert_refused(run_copier("copy", "--defaults", "--data-file", answers, template, project), sentence, project)


@pytest.mark.parametrize(("answers", "sentence"), REFUSED, ids=lambda value: ascii(value)[:60])
def test_refused_with_one_sentence(answers: Answers, sentence: str, renderer: Renderer) -> None:
    refusal = renderer.refusal(answers)
    assert sentence in refusal
    assert "\n" not in refusal.strip()


def test_every_refusal_names_its_question_and_ends_as_a_sentence(renderer: Renderer) -> None:
    for answers, _ in REFUSED:
        refusal = renderer.refusal(answers)
        assert any(key in refusal for key in answers), refusal
        assert refusal.endswith((".", "]")), refusal  # "]": Copier's own list of the choices


# -- valid answers -----------------------------------------------------------------------------------------------------


def test_defaults_are_valid_after_all_answers(renderer: Renderer) -> None:
    space = Space(renderer)
    for name in space.names:
        assert list(space.walk([*space.needs[name], name]))
    seen = list(space.looked_at())
    assert {context["gpu"] for _, context, _, _ in seen if "gpu" in context} == set(
        exported(renderer, "gpus.jinja").gpus
    )
    for name, context, values, default in seen:
        if values and default not in values:
            assert name in VALUES, (name, context)
            renderer.question(name, context).validate_answer(default)
    # Also those of questions that are not asked: Copier looks at them all the same.
    for answers in combinations(renderer, ["num_gpus", "num_machines", "backend", "sharding", "deployment"]):
        assert renderer.refusal(answers) == "", answers


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(name=st.text(min_size=1, max_size=60))
def test_any_accepted_project_name_gives_valid_names(renderer: Renderer, name: str) -> None:
    try:
        renderer.question("project_name", {}).validate_answer(name)
    except ValueError:
        return
    slug = renderer.question("project_slug", {"project_name": name}).get_default()
    assert re.fullmatch("[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", slug)
    package = renderer.question("package_name", {"project_slug": slug}).get_default()
    assert package.isidentifier()


@pytest.mark.parametrize(
    ("name", "slug", "package"),
    [
        ("My Project", "my-project", "my_project"),
        ("9lives", "9lives", "project_9lives"),
        ("class", "class", "class_project"),
        ("torch", "torch", "torch_project"),
        ("ÄÖ test", "test", "test_project"),
        ("日本語", "my-project", "my_project"),
        ("--a--b--", "a-b", "a_b"),
        ("x" * 39 + " y", "x" * 39, "x" * 39),
    ],
)
def test_names_from_the_project_name(renderer: Renderer, name: str, slug: str, package: str) -> None:
    answers = renderer.answer({"project_name": name})
    assert (answers["project_slug"], answers["package_name"]) == (slug, package)


def test_defaults_suit_the_machine(renderer: Renderer) -> None:
    def chosen(**given: Any) -> tuple[Any, ...]:
        answers = renderer.answer(given)
        return answers["precision"], answers["torch_stack"], answers["deployment"]

    assert chosen() == ("bf16", "2.14.1-cuda13.0", "docker")
    assert chosen(gpu="v100") == ("fp16", "2.14.1-cuda12.6", "docker")
    assert chosen(gpu="t4") == ("fp16", "2.14.1-cuda13.0", "docker")
    assert chosen(gpu="gb200") == ("bf16", "2.14.1-cuda13.0", "local")
    assert chosen(gpu="none") == ("fp32", "2.14.1-cuda13.0", "docker")
    assert chosen(gpu="t4", num_gpus=0) == ("fp32", "2.14.1-cuda13.0", "docker")
    assert chosen(gpu="other", gpu_capability="6.1") == ("fp16", "2.14.1-cuda12.6", "docker")
    assert chosen(gpu="other", gpu_capability="12.1") == ("bf16", "2.14.1-cuda13.0", "docker")
    accepted = {"num_gpus": 0, "num_machines": 1, "backend": "ddp"}  # though not asked
    assert not accepted.keys() & renderer.answer({"gpu": "none", **accepted}).keys()


def test_defaults_suit_the_backend(renderer: Renderer) -> None:
    def chosen(**given: Any) -> tuple[Any, ...]:
        answers = renderer.answer(given)
        return tuple(answers.get(name) for name in ("sharding", "cpu_offload", "activation_checkpointing"))

    assert chosen() == (None, None, None)
    assert chosen(backend="fsdp") == ("full", "none", "no")
    assert chosen(backend="deepspeed") == ("zero2", "none", None)
    assert chosen(backend="fsdp", num_gpus=1) == ("full", "all", "no")
    assert chosen(backend="deepspeed", num_gpus=1) == ("zero2", "optimizer", None)
    assert chosen(backend="deepspeed", num_gpus=1, num_machines=2) == ("zero2", "none", None)
    assert renderer.answer({"num_machines": 2})["checkpoint_volume"] == "/mnt/checkpoints"


def test_what_is_possible_on_each_gpu(renderer: Renderer) -> None:
    """The facts themselves: a slip in a table or a rule shows here."""
    possible: dict[str, set[Any]] = {}
    for answers in combinations(renderer, ["gpu", "precision", "torch_stack"]):
        possible.setdefault(answers["gpu"], set()).add((answers["precision"], answers["torch_stack"]))
    cuda = {gpu: {stack.partition("-")[2] for _, stack in found} for gpu, found in possible.items()}
    bf16 = {gpu for gpu, found in possible.items() if any(precision == "bf16" for precision, _ in found)}
    blackwell = {"rtx-5090", "b200", "gb200", "rtx-pro-6000"}
    assert set(possible) - bf16 == {"v100", "t4"}
    fp8 = {gpu for gpu, found in possible.items() if any(precision == "fp8" for precision, _ in found)}
    assert fp8 == {"rtx-4090", "l4", "l40s", "h100", "h200"} | blackwell
    assert {gpu for gpu, found in cuda.items() if "cuda12.6" not in found} == blackwell
    assert {gpu for gpu, found in cuda.items() if "cuda13.0" not in found} == {"v100"}
    assert {stack for _, stack in possible["v100"]} == {"2.14.1-cuda12.6", "2.13.0-cuda12.6", "2.8.0-cuda12.8"}
    assert not any(precision == "fp16" for precision, _ in possible["none"])


def test_driver_of_a_stack(renderer: Renderer) -> None:
    driver = exported(renderer, "rules.jinja").driver
    assert driver("2.14.1-cuda13.0", "a100-80gb", "") == "580"
    assert driver("2.8.0-cuda12.8", "a100-80gb", "") == "525"
    assert driver("2.8.0-cuda12.8", "rtx-5090", "") == "570"
    assert driver("2.8.0-cuda12.8", "other", "10.3") == "570"
    assert driver("2.14.1-cuda12.6", "none", "") == "525"


HOSTILE = [
    'O\'Neil "X"',
    "emoji 🚀🧪",
    "# not a comment",
    "{{ 7*7 }}{% raw %}",
    "${HOME} $(id) `id` \\n %s",
    "a: b, [c], {d}, !e, &f, *g",
    "- yes",
    "<script>alert(1)</script>",
    "null",
    "3.10",
    "] ''' \"\"\"",
    "é\u0301 ﷺ \U0001f468\u200d\U0001f469",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str, renderer: Renderer, tmp_path: Path) -> None:
    answers = {"project_name": text, "description": text, "author_name": text}
    project = renderer.render(answers, tmp_path / "project")
    written = load_yaml(project / ".copier-answers.yml")
    assert {key: written[key] for key in answers} == answers
    # Rendered from its own answers the project is the same: what an update relies on.
    again = {key: value for key, value in written.items() if not key.startswith("_")}
    assert files(renderer.render(again, tmp_path / "again")) == files(project)


@pytest.mark.parametrize("slug", ["123", "1e5", "no", "null", "0-9"])
def test_names_that_yaml_could_misread(slug: str, renderer: Renderer, tmp_path: Path) -> None:
    project = renderer.render({"project_slug": slug}, tmp_path / "project")
    assert load_yaml(project / "platform.yaml")["project"] == slug


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets(preset: Path, renderer: Renderer) -> None:
    answers = load_yaml(preset)
    assert renderer.refusal(answers) == ""
    assert answers.items() <= renderer.answer(answers).items()
    assert not answers.keys() & {"project_name", "project_slug", "package_name", "description"}


def test_fast_rendering_equals_the_command_line(
    renderer: Renderer, variants: list[Answers], template: Path, tmp_path: Path
) -> None:
    sample = [{}, *variants[:: len(variants) // 3], load_yaml(PRESETS[0])]
    for number, answers in enumerate(sample):
        result = run_copier(
            "copy", "--defaults", "--quiet", *data_arguments(answers), template, tmp_path / f"real-{number}"
        )
        assert result.returncode == 0, result.stderr
        assert files(renderer.render(answers, tmp_path / f"fast-{number}")) == files(tmp_path / f"real-{number}")


@pytest.mark.parametrize(
    ("answers", "commands"),
    [
        ({"deployment": "local"}, "make setup && make train"),
        ({"deployment": "slurm"}, "make setup && make submit"),
        ({"deployment": "slurm", "container_runtime": "pyxis"}, "make build && make image && make submit"),
        (
            {"deployment": "slurm", "container_runtime": "pyxis", "image_registry": "example.com/team"},
            "make build push && make image && make submit",
        ),
        ({"deployment": "kubernetes"}, "make build && make submit"),
        ({"deployment": "kubernetes", "image_registry": "example.com/team"}, "make build push && make submit"),
    ],
)
def test_what_is_to_be_typed_next(template: Path, tmp_path: Path, answers: Answers, commands: str) -> None:
    result = run_copier("copy", "--defaults", *data_arguments(answers), template, tmp_path / "project")
    assert result.returncode == 0, result.stderr
    assert f"\n  {commands}\n" in result.stderr


def test_preset_with_data_file(template: Path, renderer: Renderer, tmp_path: Path) -> None:
    preset = ROOT / "presets" / "server-4xa100-40gb-fp16.yml"
    result = run_copier("copy", "--defaults", "--data-file", preset, template, tmp_path / "project")
    assert result.returncode == 0, result.stderr
    assert files(tmp_path / "project") == files(renderer.render(load_yaml(preset), tmp_path / "fast"))
    assert "make build && make train" in result.stderr
    assert "on each of" not in result.stderr


def test_preset_of_a_cluster_says_how_to_submit(template: Path, tmp_path: Path) -> None:
    preset = ROOT / "presets" / "cluster-2x8xh100.yml"
    result = run_copier("copy", "--defaults", "--data-file", preset, template, tmp_path / "project")
    assert result.returncode == 0, result.stderr
    assert "make setup && make submit" in result.stderr
    assert "on each of the 2 machines" not in result.stderr


def test_several_machines_without_slurm_say_that_each_takes_part(template: Path, tmp_path: Path) -> None:
    result = run_copier("copy", "--defaults", "--data", "num_machines=2", template, tmp_path / "project")
    assert result.returncode == 0, result.stderr
    assert "Both run on each of the 2 machines: README.md" in result.stderr


def test_an_organisations_settings_are_defaults(
    template: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for questions that other answers make moot: those must not show in any file."""
    seen = {"gpu": "none", "deployment": "local", "author_name": "Example Team"}
    moot = {"num_gpus": 8, "num_machines": 4, "gpu_capability": "9.0", "backend": "fsdp", "sharding": "hybrid"}
    moot |= {"cpu_offload": "optimizer", "activation_checkpointing": "yes"}
    moot |= {"ssh": "yes", "shm_size": "64gb", "image_registry": "registry.example.com"}
    moot |= {"base_registry": "registry.example.com"}
    moot |= {"partition": "gpu", "account": "team-1", "qos": "high", "time_limit": "12:00:00", "constraint": "a100"}
    moot |= {"sbatch_options": "--exclusive", "container_runtime": "apptainer", "modules": "cuda"}
    moot |= {"manifest_kind": "job", "namespace": "ml", "storage_class": "fast", "volume_size": "2Ti", "queue": "q"}
    moot |= {"data_claim": "data", "image_pull_secret": "key", "node_selector": "a=b", "tolerations": "a:NoSchedule"}
    moot |= {"priority_class": "low"}
    settings_file = tmp_path / "settings.yml"
    settings_file.write_text(yaml.safe_dump({"defaults": seen | moot}))
    monkeypatch.setenv("COPIER_SETTINGS_PATH", str(settings_file))
    result = run_copier("copy", "--defaults", template, tmp_path / "project")
    assert result.returncode == 0, result.stderr
    monkeypatch.undo()
    assert files(tmp_path / "project") == files(renderer.render(seen, tmp_path / "expected"))


OLDER_V100 = {"gpu": "v100", "num_gpus": 1, "deployment": "local", "precision": "fp16", "torch_stack": "2.8.0-cuda12.8"}
HYBRID = {"num_machines": 2, "backend": "fsdp", "sharding": "hybrid", "activation_checkpointing": "yes"}


@pytest.mark.parametrize(
    ("first", "change", "fresh"),
    [
        ({}, OLDER_V100, OLDER_V100),
        # What the new answers rule out, or no longer ask, takes its default and leaves nothing behind.
        ({"backend": "deepspeed", "sharding": "zero3", "cpu_offload": "all"}, {"backend": "ddp"}, {}),
        (
            HYBRID,
            {"num_machines": 1, "backend": "deepspeed"},
            {"backend": "deepspeed", "checkpoint_volume": "/mnt/checkpoints"},
        ),
        ({}, {"num_machines": 2}, {"num_machines": 2, "checkpoint_volume": "/mnt/checkpoints"}),
    ],
    ids=["machine", "backend", "machines-and-backend", "more-machines"],
)
def test_an_answer_can_be_changed_later(
    first: Answers, change: Answers, fresh: Answers, template: Path, renderer: Renderer, tmp_path: Path
) -> None:
    """The guards know the answers file of an update: its `_commit`, and questions that are no longer asked."""
    source, project = tmp_path / "template", tmp_path / "project"
    shutil.copytree(template, source)

    def git(folder: Path, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)

    for command in (["init"], ["add", "--all"], ["commit", "--message=Template"], ["tag", "v1.0.0"]):
        git(source, *command)
    assert run_copier("copy", "--defaults", *data_arguments(first), source, project).returncode == 0
    for command in (["init"], ["add", "--all"], ["commit", "--message=Project"]):
        git(project, *command)
    result = run_copier("update", "--defaults", "--vcs-ref", ":current:", *data_arguments(change), project)
    assert result.returncode == 0, result.stderr
    answers = load_yaml(project / ".copier-answers.yml")
    assert {name: value for name, value in answers.items() if not name.startswith("_")} == renderer.answer(fresh)
    expected = files(renderer.render(fresh, tmp_path / "fresh"))
    updated = {name: file for name, file in files(project).items() if not name.startswith(".git/")}
    del expected[".copier-answers.yml"], updated[".copier-answers.yml"]  # it names where it came from
    assert updated == expected


# -- at the prompts ----------------------------------------------------------------------------------------------------


class Prompts:
    """`copier copy` on a terminal, read as a person sees it: the screen, not the bytes that draw it."""

    def __init__(self, *arguments: str | Path) -> None:
        command = copier_command("copy", *arguments)
        lines, columns = 100, 250
        self.child = pexpect.spawn(command[0], command[1:], encoding="utf-8", dimensions=(lines, columns))
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.Stream(self.screen)

    def expect(self, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while text not in "\n".join(self.screen.display):
            assert time.monotonic() < deadline, f"{text!r} is not on the screen:\n" + "\n".join(self.screen.display)
            self._read()

    def _read(self) -> bool:
        try:
            self.stream.feed(self.child.read_nonblocking(65536, timeout=0.2))
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        return True

    def type(self, text: str) -> None:
        self.child.send(text)

    def enter(self, text: str = "") -> None:
        self.child.send(f"{text}\r")

    def replace(self, text: str) -> None:
        """Ctrl-U empties the line, which holds the default."""
        self.child.send(f"\x15{text}\r")

    def finish(self, seconds: float = 30) -> int:
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, "still waiting:\n" + "\n".join(self.screen.display)
        self.child.close()
        return -1 if self.child.exitstatus is None else self.child.exitstatus


def help_line(renderer: Renderer, name: str, answers: Answers) -> str:
    """What the prompt shows first."""
    return renderer.question(name, answers).get_message().split("\n")[0].strip()[:60]


def test_prompts_with_enter_give_the_defaults(template: Path, renderer: Renderer, tmp_path: Path) -> None:
    prompts = Prompts(template, tmp_path / "project")
    defaults = renderer.answer({})
    for name in defaults:
        prompts.expect(help_line(renderer, name, defaults))
        prompts.enter()
    assert prompts.finish() == 0
    assert files(tmp_path / "project") == files(renderer.render({}, tmp_path / "defaults"))


def test_prompts_refuse_with_the_sentence_and_ask_again(template: Path, renderer: Renderer, tmp_path: Path) -> None:
    given = {name: value for name, value in renderer.answer({}).items() if name not in ("package_name", "num_gpus")}
    prompts = Prompts(*data_arguments(given), template, tmp_path / "project")
    prompts.expect(help_line(renderer, "package_name", given))
    for wrong, sentence in (
        ("torch", "package_name must not be 'torch'"),
        ("class", "package_name must not be 'class'"),
    ):
        prompts.replace(wrong)
        prompts.expect(sentence)
    prompts.replace("vision")
    prompts.expect(help_line(renderer, "num_gpus", given))
    prompts.replace("17")
    prompts.expect("num_gpus must be from 0 (CPU only) to 16")
    prompts.replace("8")
    assert prompts.finish() == 0
    answers = load_yaml(tmp_path / "project" / ".copier-answers.yml")
    assert (answers["package_name"], answers["num_gpus"]) == ("vision", 8)


def test_prompts_show_why_a_choice_is_not_possible(template: Path, renderer: Renderer, tmp_path: Path) -> None:
    fixed = {"gpu": "v100", "precision": "fp16", "torch_stack": "2.14.1-cuda12.6"}
    given = {name: value for name, value in renderer.answer(fixed).items() if name not in ("precision", "torch_stack")}
    prompts = Prompts(*data_arguments(given), template, tmp_path / "project")
    prompts.expect("(bf16 needs compute capability 8.0 and the NVIDIA V100 has 7.0: choose fp16 or fp32.)")
    prompts.enter()
    prompts.expect("(2.14.1-cuda13.0 runs on compute capability 7.5 to 12.0 and the NVIDIA V100 has 7.0")
    prompts.type("\x1b[A")  # up from the default goes past the impossible ones, round to the last
    prompts.enter()
    assert prompts.finish() == 0
    answers = load_yaml(tmp_path / "project" / ".copier-answers.yml")
    assert (answers["precision"], answers["torch_stack"]) == ("fp16", "2.8.0-cuda12.8")


@pytest.mark.parametrize(
    ("fixed", "question", "reasons"),
    [
        ({"gpu": "t4"}, "precision", ["bf16 needs compute capability 8.0", "fp8 needs compute capability 8.9"]),
        ({"num_gpus": 0}, "precision", ["fp16 needs a GPU: choose fp32 or bf16, or a GPU.", "fp8 needs a GPU"]),
        ({"gpu": "h100", "precision": "fp8"}, "backend", ["backend=deepspeed cannot train in fp8: choose fsdp or ddp"]),
        ({"backend": "fsdp"}, "sharding", ["sharding=hybrid splits inside a machine and copies between machines"]),
        ({"backend": "fsdp", "num_gpus": 1, "num_machines": 2}, "sharding", ["sharding=hybrid splits among the GPUs"]),
        ({"backend": "deepspeed", "num_gpus": 1}, "sharding", ["sharding=zero1 has nothing to split on one GPU"]),
        (
            {"backend": "fsdp", "num_gpus": 1},
            "cpu_offload",
            ["cpu_offload=none leaves fsdp nothing to do on one GPU", "cpu_offload=optimizer needs backend deepspeed"],
        ),
        (
            {"backend": "deepspeed", "sharding": "zero1"},
            "cpu_offload",
            ["cpu_offload=optimizer needs sharding zero2 or zero3", "cpu_offload=all needs sharding zero3"],
        ),
        ({"gpu": "gb200"}, "deployment", ["docker needs an x86-64 machine", "kubernetes needs an x86-64 machine"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_prompts_show_why_for_each_rule(
    fixed: Answers, question: str, reasons: list[str], template: Path, renderer: Renderer, tmp_path: Path
) -> None:
    """All reasons are on the screen, each beside its choice; Enter takes a default that is possible."""
    given = {name: value for name, value in renderer.answer(fixed).items() if name != question}
    prompts = Prompts(*data_arguments(given), template, tmp_path / "project")
    for reason in reasons:
        prompts.expect(f"({reason}")
    disabled = [reason for reason in renderer.choices(question, given).values() if reason]
    assert len(disabled) == len(reasons)
    prompts.enter()
    assert prompts.finish() == 0
    answers = load_yaml(tmp_path / "project" / ".copier-answers.yml")
    assert answers[question] == renderer.answer(fixed)[question]


def test_prompts_for_another_gpu_and_several_machines(template: Path, renderer: Renderer, tmp_path: Path) -> None:
    asked = ("gpu_capability", "gpu_memory_gb", "num_machines", "checkpoint_volume")
    fixed = {"gpu": "other", "num_gpus": 8}
    given = {name: value for name, value in renderer.answer(fixed).items() if name not in asked}
    prompts = Prompts(*data_arguments(given), template, tmp_path / "project")
    for name, wrong, sentence, right in (
        ("gpu_capability", "sm_90", "gpu_capability must be a compute capability", "9.0"),
        ("gpu_memory_gb", "2", "gpu_memory_gb must be from 4 to 1024", "96"),
        ("num_machines", "1025", "num_machines must be from 1 to 1024", "2"),
        ("checkpoint_volume", "checkpoints", "an absolute path that all 2 machines see", "/shared/checkpoints"),
    ):
        prompts.expect(help_line(renderer, name, given))
        prompts.replace(wrong)
        prompts.expect(sentence)
        prompts.replace(right)
        given[name] = int(right) if right.isdigit() else right
    assert prompts.finish() == 0
    answers = load_yaml(tmp_path / "project" / ".copier-answers.yml")
    assert [answers[name] for name in asked] == ["9.0", 96, 2, "/shared/checkpoints"]


def test_prompts_refuse_an_unknown_answer_before_asking(template: Path, tmp_path: Path) -> None:
    prompts = Prompts("--data", "gpu_cuont=4", template, tmp_path / "project")
    prompts.expect("there is no question 'gpu_cuont'")
    assert prompts.finish() == 1
    assert not (tmp_path / "project").exists()


# -- copier.yml and the tables -----------------------------------------------------------------------------------------

KNOWN_SETTINGS = {
    "_min_copier_version", "_subdirectory", "_envops", "_skip_if_exists", "_exclude",
    "_message_before_copy", "_message_after_copy", "_message_before_update", "_message_after_update",
}  # fmt: skip
KNOWN_ATTRIBUTES = {"type", "help", "default", "choices", "validator", "when", "placeholder"}


def test_copier_yml_has_only_what_copier_knows_and_we_use(renderer: Renderer) -> None:
    documents = (ROOT / "copier.yml").read_text().split("\n---\n")
    included = re.findall(r"^!include (\S+)$", "\n".join(documents[1:]), flags=re.MULTILINE)
    assert set(yaml.safe_load(documents[0])) == KNOWN_SETTINGS  # no tasks, migrations or extensions: no --trust
    assert sorted(included) == sorted(f"questions/{path.name}" for path in (ROOT / "questions").iterdir())
    names = [name for file in included for name in load_yaml(ROOT / file)]
    assert names == list(renderer.questions) == list(dict.fromkeys(names))
    for name, question in renderer.questions.items():
        assert set(question) <= KNOWN_ATTRIBUTES, name
        assert {"type", "help", "default"} <= set(question), name
        assert question["type"] in {"str", "int"}, f"{name}: Copier reads any text as a bool"
        assert name in VALUES or question.get("choices"), f"{name}: no values to test in tests/support/variants.py"


def test_rules_know_the_questions(renderer: Renderer) -> None:
    rules = exported(renderer, "rules.jinja")
    assert rules.questions == list(renderer.questions)
    assert not set(rules.retired) & set(rules.questions)
    of_type_int = [name for name, question in renderer.questions.items() if question["type"] == "int"]
    assert list(rules.whole_numbers) == of_type_int
    with_yes = [name for name in renderer.questions if "yes" in renderer.choices(name, renderer.answer({}))]
    assert rules.yes_or_no == with_yes


def test_tables(renderer: Renderer) -> None:
    gpus, stacks = exported(renderer, "gpus.jinja").gpus, exported(renderer, "stacks.jinja").stacks
    builds = exported(renderer, "stacks.jinja").cuda_builds
    for gpu, row in gpus.items():
        assert re.fullmatch("[a-z0-9-]+", gpu)
        assert row["capability"] is None or re.fullmatch(r"\d+\.\d", row["capability"]), gpu
        assert gpu in ("none", "other") or row["memory_gb"] > 0, gpu
    for stack, row in stacks.items():
        assert stack == f"{row['torch']}-cuda{row['cuda']}"
        assert row["cuda"] in builds
        assert re.fullmatch("(sha256:[0-9a-f]{64})?", row["digest"]), stack
        assert row["python"] == ("3.11" if tuple(map(int, row["torch"].split("."))) < (2, 10) else "3.12"), stack
    digests = [row["digest"] for row in stacks.values() if row["digest"]]
    assert len(digests) == len(set(digests))


def test_reserved_names(renderer: Renderer) -> None:
    reserved = exported(renderer, "reserved.jinja")
    own = {name for name in sys.stdlib_module_names if not name.startswith("_")} | set(
        filter(str.islower, keyword.kwlist)
    )
    assert own <= set(reserved.python_names)
    assert {"torch", "torchvision", "yaml", "sklearn", "src", "tests"} <= set(reserved.project_names)
