"""Every machine: all combinations of what decides how training starts, and a list in which each pair of answers occurs.

They are rendered in memory. A file that equals one already checked needs no second check, so each distinct content
goes once to the program that reads it; what only some answers should change is compared over all of them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support.expected import CONFIG, CPU_CONFIG, case_of, cpu_case_of, launched, recorded
from tests.support.render import ROOT, Answers, Files, Renderer, data_arguments, files, run_copier
from tests.support.variants import MACHINE, VALUES, combinations
from tests.test_accelerate_config import check

SECONDS: dict[str, float] = {}  # how long it took, to be printed


class Variant(NamedTuple):
    given: Answers  # what was answered
    answers: Answers  # all questions that are asked, as the project remembers them
    files: Files


@pytest.fixture(scope="module")
def machines(renderer: Renderer) -> list[Variant]:
    started = time.monotonic()
    rendered = [_variant(renderer, given) for given in combinations(renderer, MACHINE)]
    SECONDS["render"] = time.monotonic() - started
    return rendered


@pytest.fixture(scope="module")
def everything(renderer: Renderer, machines: list[Variant], variants: list[Answers]) -> list[Variant]:
    return machines + [_variant(renderer, given) for given in variants]


def _variant(renderer: Renderer, given: Answers) -> Variant:
    rendered = renderer.contents(given)
    written = read_yaml(rendered[".copier-answers.yml"][0])
    return Variant(given, {key: value for key, value in written.items() if not key.startswith("_")}, rendered)


def read_yaml(content: bytes) -> Any:
    return yaml.load(content, Loader=yaml.CSafeLoader)


def distinct(variants: list[Variant], pattern: str, ignored: bytes = rb"\A\Z") -> Iterator[tuple[str, bytes, Answers]]:
    """The name, each content and its answers, of the files whose whole path fits; without what is ignored."""
    seen = set()
    for _, answers, found in variants:
        for name, (content, _) in found.items():
            if re.fullmatch(pattern, name) and (name, shown := re.sub(ignored, b"", content)) not in seen:
                seen.add((name, shown))
                yield name, content, answers


COMMENTS = rb"(?m)^#.*\n"


def on_disk(variants: list[Variant], pattern: str, folder: Path, ignored: bytes = rb"\A\Z") -> dict[Path, Answers]:
    """Each distinct content in a folder of its own, under its own name."""
    paths = {}
    for number, (name, content, answers) in enumerate(distinct(variants, pattern, ignored)):
        path = folder / str(number) / Path(name).name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        paths[path] = answers
    assert paths, pattern
    return paths


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


# -- which combinations there are ------------------------------------------------------------------------------------

CAPABILITY = {
    "v100": 7.0, "t4": 7.5, "rtx-3090": 8.6, "rtx-4090": 8.9, "rtx-5090": 12.0, "a10": 8.6, "a100-40gb": 8.0,
    "a100-80gb": 8.0, "l4": 8.9, "l40s": 8.9, "h100": 9.0, "h200": 9.0, "b200": 10.0, "gb200": 10.0,
    "rtx-pro-6000": 12.0, "other": 8.0, "none": 0.0,
}  # fmt: skip
SHARDING: dict[str, list[str | None]] = {
    "ddp": [None],
    "fsdp": ["full", "grad-op", "hybrid"],
    "deepspeed": ["zero1", "zero2", "zero3"],
}


def makes_sense(
    gpu: str, num_gpus: int, num_machines: int, precision: str, backend: str, sharding: str | None, deployment: str
) -> bool:
    """What a person who knows the field would say."""
    if deployment in ("docker", "kubernetes") and gpu == "gb200":
        return False
    if gpu == "none" or num_gpus == 0:
        return precision in ("fp32", "bf16")
    if CAPABILITY[gpu] < {"fp8": 8.9, "bf16": 8.0}.get(precision, 0):
        return False
    if backend == "deepspeed" and precision == "fp8":
        return False
    if sharding == "hybrid":
        return num_machines > 1 and num_gpus > 1
    return not (sharding == "zero1" and num_gpus * num_machines == 1)


def test_exactly_the_combinations_that_make_sense(renderer: Renderer, machines: list[Variant]) -> None:
    wanted = set()
    counts = itertools.product(VALUES["num_gpus"], VALUES["num_machines"])
    for (num_gpus, num_machines), gpu, precision, deployment in itertools.product(
        counts, CAPABILITY, ("bf16", "fp16", "fp8", "fp32"), ("docker", "local", "slurm", "kubernetes")
    ):
        for backend, shardings in SHARDING.items():
            for sharding in shardings:
                if makes_sense(gpu, num_gpus, num_machines, precision, backend, sharding, deployment):
                    asked_gpus = None if gpu == "none" else num_gpus
                    rest = (num_machines, precision, backend, sharding) if asked_gpus else (None, precision, None, None)
                    wanted.add((gpu, asked_gpus, *rest, deployment))
    assert {tuple(variant.given.get(name) for name in MACHINE) for variant in machines} == wanted
    assert len(machines) == len(wanted) >= 1000


def test_every_pair_of_answers_occurs(renderer: Renderer, variants: list[Answers]) -> None:
    """The greedy list must lose none: compared with the pairs of all combinations, one question more at a time."""
    for one, other in (
        ("gpu", "torch_stack"),
        ("backend", "cpu_offload"),
        ("num_gpus", "sharding"),
        ("precision", "activation_checkpointing"),
        ("deployment", "checkpoint_volume"),
        ("license", "ssh"),
    ):
        found = {(variant[one], variant[other]) for variant in variants if one in variant and other in variant}
        deciding = ["gpu", "num_gpus", "num_machines", "precision", "backend", "sharding", one, other]
        possible = {
            (answers[one], answers[other])
            for answers in combinations(renderer, deciding)
            if one in answers and other in answers
        }
        assert found == possible, (one, other)


# -- which files ------------------------------------------------------------------------------------------------------

ALWAYS = {
    ".copier-answers.yml",
    ".editorconfig",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "LICENSE",
    "Makefile",
    "README.md",
    "accelerate_config.cpu.yaml",
    "accelerate_config.yaml",
    "configs/cifar10.yaml",
    "configs/smoke.yaml",
    "configs/train.yaml",
    "launch.sh",
    "notebooks/monitor.ipynb",
    "platform.yaml",
    "pyproject.toml",
    "requirements/project.in",
    "requirements/project.txt",
    "requirements/template.txt",
    "scripts/check_install.py",
    "scripts/check_tree.sh",
    "scripts/lock.sh",
    "scripts/run.sh",
    "scripts/setup.sh",
    "scripts/smoke.sh",
    "scripts/update.sh",
}
IMAGE = {".dockerignore", "Dockerfile", "scripts/docker.sh", "scripts/pin.sh", "scripts/scan.sh"}
SLURM = {"slurm/job.sh", "slurm/jobs.sh", "slurm/logs/.gitignore", "slurm/train.sbatch"}
KUBERNETES = {
    "job": {"job.yaml", "kustomization.yaml", "volume.yaml"},
    "kubeflow": {"kustomization.yaml", "references.yaml", "runtime.yaml", "trainjob.yaml", "volume.yaml"},
    "helm": {"chart/Chart.yaml", "chart/values.yaml", "chart/values.schema.json", "chart/templates/_parts.tpl"}
    | {f"chart/templates/{name}.yaml" for name in ("config", "job", "service", "volume")},
}
CI = {
    "github": {".github/workflows/ci.yml", "renovate.json"},
    "gitlab": {".gitlab-ci.yml", "renovate.json"},
    "none": set[str](),
}


def expected_files(answers: Answers) -> set[str]:
    source = ROOT / "template" / "src" / "{{ package_name }}"
    expected = ALWAYS | CI[answers["ci"]]
    expected |= {f"src/{answers['package_name']}/{path.name}" for path in source.glob("*.py")}
    expected |= {f"tests/{path.name.removesuffix('.jinja')}" for path in ROOT.glob("template/tests/*.py*")}
    if answers["deployment"] in ("docker", "kubernetes") or answers.get("container_runtime", "none") != "none":
        expected |= IMAGE | ({".github/workflows/image.yml"} if answers["ci"] == "github" else set())
    if answers["deployment"] == "docker":
        expected |= {"compose.yaml"}
    if answers["deployment"] == "slurm":
        expected |= SLURM | ({"slurm/image.sh"} if answers["container_runtime"] != "none" else set())
    if answers["deployment"] == "kubernetes":
        kind = answers["manifest_kind"]
        expected |= {f"kubernetes/{name}" for name in {"jobs.sh"} | KUBERNETES[kind]}
        if kind == "job" and answers.get("num_machines", 1) > 1:
            expected |= {"kubernetes/service.yaml"}
    if answers.get("ssh") == "yes":
        expected |= {"scripts/sshd.sh"}
    if answers.get("backend") == "deepspeed":
        expected |= {"requirements/deepspeed.txt"}
    if answers.get("backend") == "fsdp":
        expected |= {"tests/fsdp_on_cpu/sitecustomize.py"}
    return expected


def test_exactly_the_files_that_the_answers_need(everything: list[Variant]) -> None:
    for variant in everything:
        assert set(variant.files) == expected_files(variant.answers), variant.given


def test_answers_are_remembered_as_given(everything: list[Variant]) -> None:
    for variant in everything:
        assert variant.given.items() <= variant.answers.items()


def test_scripts_can_be_run(everything: list[Variant]) -> None:
    for variant in everything:
        runnable = {name for name, (_, executable) in variant.files.items() if executable}
        assert runnable == {
            name for name in variant.files if re.fullmatch(r"launch\.sh|scripts/.*|slurm/[^/]*|kubernetes/.*\.sh", name)
        }


def test_training_code_is_the_same_for_all_answers(everything: list[Variant]) -> None:
    """Byte for byte, and so are the tests and, but for the batch, the hyper-parameters.

    A test names the package that it imports.
    """
    seen: dict[str, bytes] = {}
    for variant in everything:
        package = variant.answers["package_name"]
        for name, (content, _) in variant.files.items():
            if name.endswith(".py") or name.startswith("configs/"):
                if name.startswith("tests/"):
                    content = re.sub(rf"\b{package}\b".encode(), b"package", content)
                content = re.sub(rb"^global_batch_size: \d+", b"global_batch_size: 1", content, flags=re.MULTILINE)
                same = name.replace(f"src/{package}/", "src/package/")
                assert seen.setdefault(same, content) == content, (variant.given, name)
    assert {"src/package/train.py", "src/package/model.py", "configs/train.yaml"} <= set(seen)


def test_batches_are_shared_out_evenly(renderer: Renderer) -> None:
    """Near that of the recipe, and two samples or more for each process."""
    for num_gpus, num_machines in itertools.product((0, 1, 3, 4, 7, 8, 16), (1, 2, 5, 16, 1024)):
        processes = max(num_gpus * num_machines, 1)
        files = renderer.contents({"num_gpus": num_gpus, "num_machines": num_machines if num_gpus else 1})
        for name, recipe in {"train": 64, "cifar10": 512}.items():
            batch = yaml.safe_load(files[f"configs/{name}.yaml"][0])["global_batch_size"]
            assert batch % processes == 0 and batch >= 2 * processes
            assert batch % 2 == 0, "by ./launch.sh --cpu as well"
            assert recipe <= batch < recipe + 2 * processes or batch == 2 * processes


def test_no_two_variants_are_the_same(machines: list[Variant], capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that changes nothing would be no answer. With no GPU in it, the model does not matter."""
    contents: dict[Any, Answers] = {}
    for variant in machines:
        if variant.given.get("num_gpus") != 0:
            content = tuple((name, file) for name, file in variant.files.items() if name != ".copier-answers.yml")
            assert contents.setdefault(content, variant.given) == variant.given
    assert len(contents) >= 1000
    with capsys.disabled():
        print(f"\n{len(contents):,} distinct variants of {len(machines):,} were rendered in {SECONDS['render']:.0f} s")


# -- each distinct content, by the program that reads it --------------------------------------------------------------


def read_requirements(content: bytes) -> None:
    for block in re.split(r"\n(?=[^\s#])", content.decode()):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            Requirement(lines[0].removesuffix(" \\"))
            assert len(lines) > 1, f"{lines[0]} has no hash"
            assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines[1:])


READERS: dict[str, Callable[[bytes], Any]] = {
    r".*\.py": ast.parse,
    r"(?!.*/chart/templates/).*\.(yaml|yml)": lambda content: read_yaml(re.sub(rb"!(reset|override)\b", b"", content)),
    r".*\.(ipynb|json)": json.loads,
    r".*\.toml": lambda content: tomllib.loads(content.decode()),
    r"requirements/(template|deepspeed)\.txt": read_requirements,
}


@pytest.mark.parametrize("pattern", READERS)
def test_files_are_read(everything: list[Variant], pattern: str) -> None:
    found = list(distinct(everything, pattern))
    assert found
    for name, content, _ in found:
        assert READERS[pattern](content) or pattern.endswith("txt"), name


def test_text_is_tidy(machines: list[Variant]) -> None:
    for name, content, _ in distinct(machines, ".*"):
        text = content.decode()
        assert "\r" not in text, name
        assert not text or (text.endswith("\n") and not text.endswith("\n\n") and text[0] != "\n"), name
        assert not re.search(r"[ \t]$", text, re.MULTILINE), name
        assert name.endswith(".py") or "\n\n\n" not in text, name
        if "/chart/templates/" in name:  # Helm's own
            continue
        tags = r"\{%|\{#" if name.endswith(".py") else r"\{%|%\}|(?<!\$)\{\{|\{#"
        assert not re.search(tags, text), name


def test_shell_scripts(machines: list[Variant], tmp_path: Path) -> None:
    scripts = on_disk(machines, r".*\.(sh|sbatch)", tmp_path)
    run("shellcheck", *scripts)
    run("shfmt", "--diff", "--indent=2", *scripts)


def test_dockerfiles(machines: list[Variant], tmp_path: Path) -> None:
    run("hadolint", "--failure-threshold=style", *on_disk(machines, "Dockerfile", tmp_path))
    for variant in machines:
        if "Dockerfile" in variant.files:
            base = re.search(r"^FROM (\S+) AS train$", variant.files["Dockerfile"][0].decode(), re.MULTILINE)
            assert base
            tag, _, digest = base[1].partition("@")
            torch, _, cuda = variant.answers["torch_stack"].partition("-")
            flavour = "devel" if variant.answers.get("backend") == "deepspeed" else "runtime"
            assert tag == f"docker.io/pytorch/pytorch:{torch}-{cuda}-cudnn9-{flavour}", variant.given
            assert flavour == "runtime" or not digest, "the digest is another image's"


def test_yaml_is_tidy(machines: list[Variant], tmp_path: Path) -> None:
    names = r"(compose|accelerate_config|accelerate_config\.cpu|kubernetes/(chart/)?\w+)\.yaml"
    run("yamllint", "--strict", "--config-file", ROOT / ".yamllint.yaml", *on_disk(machines, names, tmp_path, COMMENTS))


def test_compose(machines: list[Variant], tmp_path: Path) -> None:
    for path in on_disk(machines, r"compose\.yaml", tmp_path):
        run("docker-compose", "--file", path, "--profile", "*", "config", "--quiet", cwd=path.parent)


def test_workflows(machines: list[Variant], tmp_path: Path) -> None:
    run("jactionlint", *on_disk(machines, r"\.github/.*\.yml", tmp_path))


def test_makefiles(machines: list[Variant], tmp_path: Path) -> None:
    for path in on_disk(machines, "Makefile", tmp_path):
        names = re.findall(r"^([a-z]+):", path.read_text(), re.MULTILINE)
        assert {"train", "setup"} <= set(names)
        run("make", "--no-print-directory", "--dry-run", *names, cwd=path.parent)


# -- what the answers ask for ----------------------------------------------------------------------------------------


def test_configurations_follow_the_answers(everything: list[Variant]) -> None:
    """As `accelerate config` writes them; test_accelerate_config.py looks closer at the same files."""
    wanted = functools.lru_cache(maxsize=None)(recorded)
    for _, answers, found in everything:
        assert read_yaml(found[CONFIG][0]) == wanted(case_of(answers)), answers
        assert read_yaml(found[CPU_CONFIG][0]) == wanted(cpu_case_of(answers)), answers


def test_packages_follow_the_answers(everything: list[Variant]) -> None:
    for _, answers, found in everything:
        locked = set(re.findall(rb"^([\w.-]+)==", found["requirements/template.txt"][0], re.MULTILINE))
        deepspeed = answers.get("backend") == "deepspeed"
        assert b"accelerate" in locked
        assert not locked & {b"torch", b"torchvision", b"deepspeed"}
        assert (b"torchao" in locked) == (answers["precision"] == "fp8")
        assert ({b"ninja", b"hjson", b"einops"} <= locked) == deepspeed
        assert b"\n    --hash=" in found["requirements/deepspeed.txt"][0] if deepspeed else True
        setup = found["scripts/setup.sh"][0]
        assert (b"--no-build-isolation" in setup) == (b"DS_BUILD_OPS=0" in setup) == deepspeed


def test_accelerate_launches_them(everything: list[Variant], training_python: Path, tmp_path: Path) -> None:
    """Each distinct configuration, comments aside, through accelerate's own loader, launcher and plugins."""
    cases = {}
    for name, case_of_file in ((CONFIG, case_of), (CPU_CONFIG, cpu_case_of)):
        for path, answers in on_disk(everything, re.escape(name), tmp_path / name, COMMENTS).items():
            cases[str(path)] = case_of_file(answers)
    results = check(training_python, list(cases))["results"]
    assert results == {path: launched(case) for path, case in cases.items()}


# -- the fast route against the real one -------------------------------------------------------------------------------


def test_in_memory_equals_the_command_line(machines: list[Variant], template: Path, tmp_path: Path) -> None:
    """One of each backend and of each precision, from the middle of the list."""
    sample: dict[Any, Variant] = {}
    for variant in machines[len(machines) // 2 :] + machines:
        for kind in (variant.answers.get("backend"), variant.answers["precision"], variant.answers.get("sharding")):
            sample.setdefault(kind, variant)
    chosen = {repr(variant.given): variant for variant in sample.values()}
    for number, variant in enumerate(chosen.values()):
        project = tmp_path / str(number)
        result = run_copier("copy", "--defaults", "--quiet", *data_arguments(variant.given), template, project)
        assert result.returncode == 0, result.stderr
        assert files(project) == variant.files, variant.given
