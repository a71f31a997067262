"""Rendered files are what these answers need, and each is accepted by the program that reads it.

Linters take many files at once: each distinct form of a file is looked at once, in one call.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import bootstrap
from tests.support.render import ROOT, Answers, Files, Renderer

TARGETS = {
    "help", "setup", "doctor", "plan", "data", "smoke", "train", "resume", "checkpoints", "prune", "evaluate",
    "export", "plot", "profile", "logs", "test", "lint", "format", "lock", "update", "clean",
}  # fmt: skip
WORKFLOWS = (".github/workflows/ci.yml", ".github/workflows/image.yml")


class Project(NamedTuple):
    answers: Answers  # all of them, also those that were not asked
    folder: Path


def write(contents: Files, folder: Path) -> Path:
    for name, (content, is_executable) in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if is_executable else 0o644)
    return folder


@pytest.fixture(scope="module")
def projects(renderer: Renderer, variants: list[Answers], tmp_path_factory: pytest.TempPathFactory) -> list[Project]:
    root = tmp_path_factory.mktemp("variants")
    defaults = {"image_registry": "", "shm_size": "16gb", "ssh": "no", "num_gpus": 0, "container_runtime": "none"}
    return [
        Project(defaults | renderer.answer(given), write(renderer.contents(given), root / f"{number:03}"))
        for number, given in enumerate(variants)
    ]


@pytest.fixture(scope="module")
def default(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renderer.render({}, tmp_path_factory.mktemp("default") / "project")


def has_gpu(answers: Answers) -> bool:
    return bool(answers["gpu"] != "none" and answers["num_gpus"] > 0)


def in_container(answers: Answers) -> bool:
    return bool(answers["deployment"] in ("docker", "kubernetes") or answers["container_runtime"] != "none")


def forms(projects: list[Project], name: str) -> Iterator[Project]:
    """One project for each distinct content of this file."""
    seen = set()
    for project in projects:
        path = project.folder / name
        if path.is_file() and path.read_bytes() not in seen:
            seen.add(path.read_bytes())
            yield project


def paths(projects: list[Project], *names: str) -> list[str]:
    found = [str(project.folder / name) for name in names for project in forms(projects, name)]
    assert found, names
    return found


def run(*command: str | Path, cwd: Path = ROOT, code: int = 0, env: Answers | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={name: value for name, value in (os.environ | (env or {})).items() if value},  # empty: not set
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def texts(project: Project) -> dict[str, str]:
    return {
        str(path.relative_to(project.folder)): path.read_bytes().decode()
        for path in sorted(project.folder.rglob("*"))
        if path.is_file() and path.suffix != ".png"
    }


# -- which files, and how they are written -----------------------------------------------------------


def test_text_is_tidy(projects: list[Project]):
    seen = set()
    for project in projects:
        for name, content in texts(project).items():
            if (name, content) in seen:
                continue
            seen.add((name, content))
            assert "\r" not in content, name
            assert content.endswith("\n") or not content, f"{name} has no newline at its end"
            assert not content.endswith("\n\n"), f"{name} ends with an empty line"
            assert not content.startswith("\n"), f"{name} starts with an empty line"
            trailing = re.findall(r"^.*[ \t]$", content, re.MULTILINE)
            assert not trailing, f"{name}: {trailing}"
            if not name.endswith(".py"):
                assert "\n\n\n" not in content, f"{name} has two empty lines"


def test_no_jinja_is_left(projects: list[Project]):
    for project in projects:
        for name, content in texts(project).items():
            if name in ("README.md", ".copier-answers.yml", "pyproject.toml"):  # may hold what the person typed
                content = content.replace("{{ 7*7 }}", "")
            if "/chart/templates/" in name:  # Helm's own
                continue
            assert not re.search(r"\{%|%\}|(?<!\$)\{\{|\{#", content), f"{project.answers}: {name}"


def test_scripts_can_be_run(projects: list[Project]):
    for _, folder in projects:
        for path in [
            folder / "launch.sh",
            *folder.glob("scripts/*"),
            *folder.glob("slurm/*.sh"),
            *folder.glob("kubernetes/*.sh"),
        ]:
            assert path.read_text().startswith("#!/usr/bin/env "), path
            assert path.stat().st_mode & 0o111 == 0o111, path


def test_no_image_or_action_floats(projects: list[Project]):
    for name in ("Dockerfile", "compose.yaml", ".gitlab-ci.yml", *WORKFLOWS):
        for project in forms(projects, name):
            content = (project.folder / name).read_text()
            assert "latest" not in content
            for action in re.findall(r"uses: *(\S+)", content):
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
            for image in re.findall(r"(?:^FROM|image:) (\S+/\S+)", content, re.MULTILINE):
                assert re.search(r":[\w.${}:-]+(@sha256:[0-9a-f]{64})?$", image)


def test_free_text_arrives_unchanged(projects: list[Project]):
    for answers, folder in projects:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["description"] == answers["description"]
        author = {"name": answers["author_name"]}
        if answers["author_email"]:
            author["email"] = answers["author_email"]
        assert project["authors"] == [author]
        assert project["name"] == answers["project_slug"]
        if answers["license"] != "apache-2.0":  # its text names nobody
            assert answers["author_name"] in (folder / "LICENSE").read_text()


# -- their real consumers ---------------------------------------------------------------------------


def test_shell_scripts(projects: list[Project]):
    names = {
        str(path.relative_to(folder))
        for _, folder in projects
        for path in [*folder.glob("scripts/*.sh"), *folder.glob("slurm/*.s*"), *folder.glob("kubernetes/*.sh")]
    }
    scripts = paths(projects, "launch.sh", *sorted(names))
    run("shellcheck", *scripts)
    run("shfmt", "--diff", "--indent=2", *scripts)
    for script in scripts:
        assert "\nset -euo pipefail\n" in Path(script).read_text(), script
        assert not re.search(r"\beval\b", Path(script).read_text()), script


def test_python(projects: list[Project]):
    """With the rules of the project itself, package names included."""
    folders = [str(project.folder) for project in forms(projects, "pyproject.toml")]
    run("ruff", "check", "--no-cache", *folders)
    run("ruff", "format", "--no-cache", "--check", *folders)


def test_yaml(projects: list[Project]):
    names = [
        "accelerate_config.yaml",
        "accelerate_config.cpu.yaml",
        "platform.yaml",
        "compose.yaml",
        ".pre-commit-config.yaml",
        ".gitlab-ci.yml",
        *WORKFLOWS,
        *(f"kubernetes/{name}.yaml" for name in ("job", "kustomization", "runtime", "service", "trainjob", "volume")),
        *(f"kubernetes/chart/{name}.yaml" for name in ("Chart", "values")),
    ]
    run("yamllint", "--strict", "--config-file", ROOT / ".yamllint.yaml", *paths(projects, *names))


def test_pyproject(projects: list[Project]):
    run("validate-pyproject", *paths(projects, "pyproject.toml"))
    for project in forms(projects, "pyproject.toml"):
        needed = tomllib.loads((project.folder / "pyproject.toml").read_text())["project"]["dependencies"]
        locked = re.findall(r"^([\w.-]+)==", (project.folder / "requirements/template.txt").read_text(), re.MULTILINE)
        assert set(needed) - {"torch", "torchvision"} <= set(locked)
        assert not {"torch", "torchvision"} & set(locked)


def test_dockerfiles(projects: list[Project]):
    run("hadolint", "--failure-threshold=style", *paths(projects, "Dockerfile"))
    for project in forms(projects, "Dockerfile"):
        lines = (project.folder / "Dockerfile").read_text().splitlines()
        assert not any("syntax=" in line for line in lines), "that needs the Docker Hub"
        users = [line for line in lines if line.startswith("USER ")]
        assert users and users[-1] == "USER ${UID}:${GID}"
        assert "ARG UID=10001" in lines
        assert [line.split(" AS ")[1] for line in lines if line.startswith("FROM ")] == (
            ["train", "ssh"] if project.answers["ssh"] == "yes" else ["train"]
        )


def compose(project: Project, *arguments: str, **environment: str) -> str:
    return run("docker-compose", *arguments, cwd=project.folder, env=environment)


def test_compose(projects: list[Project]):
    """Read by Compose itself, which refuses unknown keys and wrong types."""
    for project in forms(projects, "compose.yaml"):
        answers = project.answers
        services: dict[str, Any] = yaml.safe_load(compose(project, "--profile", "*", "config"))["services"]
        expected = {"train"}
        if answers["tracker"] in ("tensorboard", "mlflow", "trackio"):
            expected.add(answers["tracker"])
        expected |= {name for name in ("jupyter", "ssh") if answers[name] == "yes"}
        assert set(services) == expected
        for name, service in services.items():
            assert int(service["shm_size"]) == int(answers["shm_size"][:-2]) * 2**30
            assert service["init"] is True
            assert service["user"] == "10001:10001"
            assert not service.get("privileged")
            targets = {volume["target"]: volume for volume in service["volumes"]}
            assert {"/workspace", "/checkpoints", "/data", "/cache"} <= set(targets)
            is_path = answers["checkpoint_volume"].startswith("/")
            assert targets["/checkpoints"]["type"] == ("bind" if is_path else "volume")
            if is_path:
                assert targets["/checkpoints"]["source"] == answers["checkpoint_volume"]
                assert targets["/checkpoints"]["bind"]["create_host_path"] is False
            for port in service.get("ports", []):
                assert port["host_ip"] == "127.0.0.1", f"{name} listens to the network"
            # Machines talk to each other; a service that a person opens stays on its own machine.
            several = has_gpu(answers) and answers["num_machines"] > 1
            assert (service.get("network_mode") == "host") == (several and name == "train")
            given = set(service.get("environment") or {})
            assert ({"MACHINE_RANK", "MAIN_PROCESS_IP", "MAIN_PROCESS_PORT"} <= given) == several

            devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
            if has_gpu(answers) and name in ("train", "jupyter", "ssh"):
                assert devices == [{"driver": "nvidia", "count": answers["num_gpus"], "capabilities": ["gpu"]}]
            else:
                assert not devices


def test_one_number_of_seconds_stops_a_run(projects: list[Project]):
    for answers, folder in projects:
        seconds = answers["preemption_grace_seconds"]
        assert yaml.safe_load((folder / "platform.yaml").read_text())["preemption_grace_seconds"] == seconds
        assert str(seconds) not in (folder / "launch.sh").read_text()
        if answers["deployment"] == "docker":
            train = yaml.safe_load((folder / "compose.yaml").read_text().replace("!reset", ""))["services"]["train"]
            assert train["stop_grace_period"] == f"{seconds + 30}s"


def test_compose_takes_the_person_and_the_image_from_the_environment(default: Path):
    project = Project({}, default)
    text = compose(project, "config", HOST_UID="1234", HOST_GID="5678", IMAGE_TAG="v9", DATA_VOLUME="/mnt/data")
    train = yaml.safe_load(text)["services"]["train"]
    assert train["user"] == "1234:5678"
    assert train["image"] == "my-project:v9"
    assert "/mnt/data" in [volume["source"] for volume in train["volumes"]]


def test_image_tag_says_what_is_inside(renderer: Renderer, default: Path):
    text = (default / "compose.yaml").read_text()
    software = yaml.safe_load((default / "platform.yaml").read_text())["software"]
    version = tomllib.loads((default / "pyproject.toml").read_text())["project"]["version"]
    tag = f"v{version}-torch{software['torch']}-cuda{software['cuda']}-gpu4-bf16"
    assert f"image: my-project:${{IMAGE_TAG:-{tag}}}" in text
    deepspeed = renderer.contents({"backend": "deepspeed"})["compose.yaml"][0].decode()
    assert f"image: my-project:${{IMAGE_TAG:-{tag}-deepspeed}}" in deepspeed


def test_workflows(projects: list[Project]):
    workflows = paths(projects, *WORKFLOWS)
    run("jactionlint", *workflows)
    run("zizmor", "--offline", "--quiet", "--pedantic", *workflows)
    run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    run("check-jsonschema", "--builtin-schema", "vendor.gitlab-ci", *paths(projects, ".gitlab-ci.yml"))
    for workflow in workflows:
        assert "group: ${{ github.workflow }}-${{ github.ref }}" in Path(workflow).read_text()


def test_renovate(projects: list[Project]):
    """By its schema; Renovate itself reads it in `nox -s renovate`."""
    run("check-jsonschema", "--builtin-schema", "vendor.renovate", *paths(projects, "renovate.json"))
    for project in forms(projects, "renovate.json"):
        settings = json.loads((project.folder / "renovate.json").read_text())
        assert ("dockerfile" in settings["enabledManagers"]) == in_container(project.answers)
        locks = {f"requirements/{path.name}" for path in (project.folder / "requirements").glob("*.txt")}
        assert set(settings["ignorePaths"]) == locks - {"requirements/project.txt"}


def test_ci_pushes_images_of_tags_only(renderer: Renderer):
    """With what they were made of; and not at all without a registry."""
    tag = {"github": "$GITHUB_REF_NAME-torch", "gitlab": "$CI_COMMIT_TAG-torch"}
    for ci, name in {"github": WORKFLOWS[1], "gitlab": ".gitlab-ci.yml"}.items():
        for registry in ("", "registry.example.com/team"):
            answers: Answers = {"ci": ci, "image_registry": registry}
            content = renderer.contents(answers)[name][0].decode()
            assert (
                "make smoke-image" if ci == "github" else "./launch.sh --cpu train --config configs/smoke"
            ) in content
            for word in ("--push", "--provenance", "--sbom", "--password-stdin registry.example.com", tag[ci]):
                assert (word in content) == bool(registry), word
        condition = content.index("refs/tags/v" if ci == "github" else 'if [ -n "$CI_COMMIT_TAG" ]')
        assert condition < content.index("docker login") < content.index("--push")


def test_ci_takes_torch_for_the_cpu(projects: list[Project]):
    """The CUDA build does not fit on a hosted runner."""
    for name in (".github/workflows/ci.yml", ".gitlab-ci.yml"):
        for project in forms(projects, name):
            content = (project.folder / name).read_text()
            setup = (project.folder / "scripts/setup.sh").read_text()
            if project.answers["package_index"]:  # which is asked for torch too
                assert "TORCH_INDEX=${TORCH_INDEX:-default}" in setup and "TORCH_INDEX" not in content
                continue
            by_default = "TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" in setup
            assert by_default != bool(re.search(r"TORCH_INDEX.*/whl/cpu", content))
            assert by_default != (has_gpu(project.answers) and not in_container(project.answers))
            for step in ("make lint", "make test", "make smoke", "scripts/check_tree.sh"):
                assert step in content


def test_pre_commit(projects: list[Project]):
    configurations = paths(projects, ".pre-commit-config.yaml")
    run("pre-commit", "validate-config", *configurations)
    for path in configurations:
        content = yaml.safe_load(Path(path).read_text())
        assert {repository["repo"] for repository in content["repos"]} <= {"local", "meta"}, "needs a network"
        assert re.search(content["exclude"], ".copier-answers.yml")


# -- make -------------------------------------------------------------------------------------------


def targets(folder: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (folder / "Makefile").read_text(), re.MULTILINE))


def expected_targets(answers: Answers) -> set[str]:
    wanted = set(TARGETS)
    if answers["tracker"] != "none":
        wanted.add(answers["tracker"])
    if answers["jupyter"] == "yes":
        wanted.add("jupyter")
    if has_gpu(answers):
        wanted |= {"gpus", "gpu-check"}
    if in_container(answers):
        wanted |= {"build", "pin", "scan", "smoke-image"}
        if answers["image_registry"]:
            wanted.add("push")
    if answers["deployment"] == "docker":
        wanted.add("shell")
        if answers["ssh"] == "yes":
            wanted.add("ssh")
    elif answers["deployment"] == "slurm":
        wanted |= {"submit", "status", "cancel"}
        if in_container(answers):
            wanted.add("image")
    elif answers["deployment"] == "kubernetes":
        wanted |= {"submit", "status", "cancel", "shell"}
    return wanted


def test_make_has_the_targets_that_the_answers_give_a_meaning(projects: list[Project]):
    for project in forms(projects, "Makefile"):
        content = (project.folder / "Makefile").read_text()
        found = targets(project.folder)
        assert found == expected_targets(project.answers), project.answers
        assert set(re.findall(r"^\.PHONY: ([\w-]+)$", content, re.MULTILINE)) == found
        assert not re.search(r"^ +\S", content, re.MULTILINE), "a recipe that starts with spaces"
        listed = run("make", "--no-print-directory", cwd=project.folder)
        assert {line.split()[1] for line in listed.splitlines()} == found
        for line in listed.splitlines():
            assert re.fullmatch(r"make [a-z-]+ +[A-Z].+", line)


def test_make_n_of_every_target(projects: list[Project]):
    """Without any tool: nothing but make is on the path."""
    for project in forms(projects, "Makefile"):
        names = sorted(targets(project.folder) - {"help"})
        make = shutil.which("make")
        assert make
        printed = run(
            make,
            "-n",
            "-f",
            project.folder / "Makefile",
            *names,
            cwd=project.folder,
            env={"PATH": "/nowhere", "RUN": "a", "ARGS": "-b"},
        )
        assert "./launch.sh train --config configs/train.yaml --run_name a -b\n" in printed
        by_compose = "scripts/docker.sh compose run --rm train ./launch.sh train" in printed
        assert by_compose == (project.answers["deployment"] == "docker")
        assert "--trust" not in printed


def test_recipes_show_what_they_run_and_hold_no_logic(projects: list[Project]):
    for project in forms(projects, "Makefile"):
        recipes = re.findall(r"^\t(.*)$", (project.folder / "Makefile").read_text(), re.MULTILINE)
        hidden = [line for line in recipes if line.startswith(("@", "-"))]
        assert [line.split()[0] for line in hidden] == ["@awk"], hidden
        assert not [line for line in recipes if re.search(r"&&|\|\||;|\bif |\bfor |\\$", line)]


def test_readme_names_targets_and_files_that_exist(projects: list[Project]):
    for project in forms(projects, "README.md"):
        content = (project.folder / "README.md").read_text()
        code = "\n".join(re.findall(r"`[^`\n]+`|^```.*?^```", content, re.MULTILINE | re.DOTALL))
        named = set(re.findall(r"\bmake ([a-z-]+)", code))
        assert named <= targets(project.folder), project.answers
        first = re.search(r"^```sh\n(.*?)^```", content, re.MULTILINE | re.DOTALL)
        assert first
        train = "make submit" if project.answers["deployment"] in ("slurm", "kubernetes") else "make train"
        steps = ["make build", train] if in_container(project.answers) else ["make setup", train]
        if in_container(project.answers) and train == "make submit":
            steps[0] += " push" if project.answers["image_registry"] else ""
            if project.answers["deployment"] == "slurm":
                steps.insert(1, "make image")
        assert first[1].splitlines() == steps
        for cell in re.findall(r"^\| (`.*?) \|", content.split("## What is where")[1].split("##")[0], re.MULTILINE):
            for path in re.findall(r"`([^`]+)`", cell):
                assert list(project.folder.glob(path)) or list(project.folder.glob(f"src/*/{path}")), path
        assert re.match(r"# .+\n\n.+\n\n", content)
        assert "<b>" not in re.sub(r"\\<", "", content), "a name that turns into markup"


# -- the scripts do what they say -------------------------------------------------------------------


@pytest.fixture
def copy(default: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(default, tmp_path / "project"))


def executable(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


@pytest.fixture
def recorder(copy: Path) -> Path:
    """An environment whose python writes down how it was called."""
    environment = copy / ".venv"
    names = "ACCELERATE_USE_CPU OMP_NUM_THREADS TORCH_ELASTIC_SHUTDOWN_TIMEOUT PYTHONPATH"
    names += " CHECKPOINT_DIR DATA_DIR VIRTUAL_ENV"
    executable(
        environment / "bin/python",
        f'#!/bin/bash\nprintf "%s\\n" "$PWD" "$@"\nfor n in {names}; do echo "$n=${{!n-}}"; done\nexit 75\n',
    )
    executable(environment / "bin/accelerate", "#!/bin/bash\n")
    return copy


CLEAN = {"VIRTUAL_ENV": "", "OMP_NUM_THREADS": "", "VENV": "", "PYTHONPATH": "", "CHECKPOINT_DIR": "", "DATA_DIR": ""}


def test_launch_names_the_configuration_and_passes_arguments_on(recorder: Path, tmp_path: Path):
    arguments = ["--run_name", "a b", "--data.name", "$HOME;`id`"]
    output = run(recorder / "launch.sh", "train", *arguments, cwd=tmp_path, code=75, env=CLEAN).splitlines()
    launch = ["-m", "my_project.launch", "--config_file", "accelerate_config.yaml", "--main_process_port", "0"]
    assert output[: len(launch) + 7] == [str(recorder), *launch, "--module", "my_project.train", *arguments]
    settings = dict(line.split("=", 1) for line in output[len(launch) + 7 :])
    assert settings == {
        "ACCELERATE_USE_CPU": "",
        "OMP_NUM_THREADS": "",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120",
        "PYTHONPATH": str(recorder / "src"),
        "CHECKPOINT_DIR": "checkpoints",
        "DATA_DIR": "data",
        "VIRTUAL_ENV": str(recorder / ".venv"),
    }


def test_launch_on_the_cpu(recorder: Path):
    output = run(recorder / "launch.sh", "--cpu", "evaluate", code=75, env=CLEAN | {"PYTHONPATH": "/other"})
    assert "accelerate_config.cpu.yaml" in output.splitlines()
    assert "ACCELERATE_USE_CPU=true" in output
    assert f"PYTHONPATH={recorder / 'src'}:/other" in output


def test_launch_of_one_cpu_process_takes_all_cores(renderer: Renderer, recorder: Path, tmp_path: Path):
    shutil.copy(renderer.render({"gpu": "none"}, tmp_path / "cpu") / "launch.sh", recorder)
    output = run(recorder / "launch.sh", "train", code=75, env=CLEAN)
    assert re.search(r"^OMP_NUM_THREADS=[1-9]", output, re.MULTILINE)
    assert "OMP_NUM_THREADS=3\n" in run(recorder / "launch.sh", "train", code=75, env=CLEAN | {"OMP_NUM_THREADS": "3"})
    assert "OMP_NUM_THREADS=\n" in run(recorder / "launch.sh", "--cpu", "train", code=75, env=CLEAN)


@pytest.mark.parametrize(
    ("backend", "use_cpu", "python_path"),
    [("ddp", "true", []), ("fsdp", "true", ["tests/fsdp_on_cpu"]), ("deepspeed", "", [])],
)
def test_launch_on_the_cpu_keeps_the_backend(
    renderer: Renderer, recorder: Path, tmp_path: Path, backend: str, use_cpu: str, python_path: list[str]
):
    """Accelerate would make DeepSpeed into DDP when told to use the CPU; DeepSpeed would take GPUs that it sees."""
    shutil.copy(renderer.render({"backend": backend}, tmp_path / backend) / "launch.sh", recorder)
    output = run(recorder / "launch.sh", "--cpu", "train", code=75, env=CLEAN).splitlines()
    assert f"ACCELERATE_USE_CPU={use_cpu}" in output
    assert "PYTHONPATH=" + ":".join(str(recorder / folder) for folder in ["src", *python_path]) in output
    hides_gpus = "export CUDA_VISIBLE_DEVICES='' DS_ACCELERATOR=cpu\n" in (recorder / "launch.sh").read_text()
    assert hides_gpus == (backend == "deepspeed")
    output = run(recorder / "launch.sh", "train", code=75, env=CLEAN).splitlines()
    assert "ACCELERATE_USE_CPU=" in output and f"PYTHONPATH={recorder / 'src'}" in output


@pytest.fixture
def several(renderer: Renderer, recorder: Path, tmp_path: Path) -> Path:
    """The recorder for a project of twelve machines."""
    project = renderer.render({"num_machines": 12}, tmp_path / "several")
    for name in ("launch.sh", "accelerate_config.yaml", "accelerate_config.cpu.yaml"):
        shutil.copy(project / name, recorder)
    return recorder


MACHINE = {"MACHINE_RANK": "11", "MAIN_PROCESS_IP": "node-0.example.com", "MAIN_PROCESS_PORT": "29501"}


@pytest.mark.parametrize(
    ("change", "rank", "address", "port"),
    [
        ({}, "11", "node-0.example.com", "29501"),
        ({"MACHINE_RANK": "0", "MAIN_PROCESS_PORT": ""}, "0", "node-0.example.com", "29500"),
        ({"MACHINE_RANK": "008", "MAIN_PROCESS_IP": "fd00::1"}, "8", "fd00::1", "29501"),
    ],
)
def test_launch_of_several_machines(several: Path, change: Answers, rank: str, address: str, port: str):
    output = run(several / "launch.sh", "train", "-x", code=75, env=CLEAN | MACHINE | change).splitlines()
    machine = ["--machine_rank", rank, "--main_process_ip", address, "--main_process_port", port]
    launch = ["-m", "my_project.launch", "--config_file", "accelerate_config.yaml", *machine]
    assert output[0] == f"machine {rank} of 12 (the first is 0), waiting for the others at {address}:{port}"
    assert output[2 : len(launch) + 5] == [*launch, "--module", "my_project.train", "-x"]


def test_launch_on_the_cpu_needs_one_machine_only(several: Path):
    output = run(several / "launch.sh", "--cpu", "train", code=75, env=CLEAN | dict.fromkeys(MACHINE, "")).splitlines()
    assert output[1:7] == ["-m", "my_project.launch", "--config_file", "accelerate_config.cpu.yaml",
                           "--main_process_port", "0"]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(
            ({"MACHINE_RANK": rank}, f"MACHINE_RANK is '{rank}': set it to the number of this machine, 0 to 11")
            for rank in ("", "12", "-1", "one", "1 2", "99999999999999999999", "a[$(id)]")
        ),
        *(
            ({"MAIN_PROCESS_IP": address}, f"MAIN_PROCESS_IP is '{address}': set it to the address of machine 0")
            for address in ("", "--help", "a b", "a;b")
        ),
        *(
            ({"MAIN_PROCESS_PORT": port}, f"MAIN_PROCESS_PORT is '{port}': set it to a free port of machine 0, 1 to")
            for port in ("0", "65536", "http", "999999")
        ),
    ],
)
def test_launch_of_several_machines_says_what_is_missing(several: Path, change: Answers, sentence: str):
    output = run(several / "launch.sh", "train", code=2, env=CLEAN | MACHINE | change)
    assert output.startswith(f"error: {sentence}") and len(output.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["--cpu"], ["--help"], ["src/train.py"], ["trian"], ["--cpu", "trian"]])
def test_launch_without_a_module_says_how(recorder: Path, arguments: list[str]):
    output = run(recorder / "launch.sh", *arguments, code=2, env=CLEAN)
    assert output.startswith("usage: ./launch.sh ") and len(output.splitlines()) == 1


def test_launch_without_an_environment_says_what_to_do(copy: Path):
    output = run(copy / "launch.sh", "train", code=1, env=CLEAN | {"PATH": "/usr/bin:/bin"})
    assert output.splitlines() == ["error: Accelerate is not installed in this environment: run make setup"]
    output = run(copy / "launch.sh", "train", code=1, env=CLEAN | {"VENV": "/nowhere"})
    assert output.splitlines() == ["error: Accelerate is not installed in /nowhere: run make setup"]


def test_the_active_environment_wins_over_venv_folder_and_make_over_both(recorder: Path, tmp_path: Path):
    """In the container the mounted source brings the host's .venv along."""
    active, named = tmp_path / "active", tmp_path / "named"
    for environment in (active, named):
        executable(environment / "bin/accelerate", "")
        executable(environment / "bin/python", f"#!/bin/bash\necho from {environment.name}\n")
    assert (
        run(
            recorder / "launch.sh",
            "train",
            env=CLEAN | {"PATH": f"{active}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(active)},
        )
        == "from active\n"
    )
    assert (
        run(recorder / "launch.sh", "train", env=CLEAN | {"VIRTUAL_ENV": str(active), "VENV": str(named)})
        == "from named\n"
    )


def test_setup_says_what_is_missing(copy: Path, tmp_path: Path):
    script = copy / "scripts/setup.sh"
    output = run(script, code=1, env={"PYTHON": "/nowhere/python3"})
    assert output.splitlines() == ["error: /nowhere/python3 was not found: install Python 3.11 or newer"]
    bare = executable(
        tmp_path / "bin/python3", '#!/bin/bash\n[[ $* != *ensurepip* ]] && exec /usr/bin/env python3 "$@"\nexit 1\n'
    )
    output = run(script, code=1, env={"PYTHON": str(bare), "VENV": str(tmp_path / "venv")})
    assert len(output.splitlines()) == 1 and "apt-get install python3-venv" in output
    old = executable(
        tmp_path / "bin/python3.8", "#!/bin/bash\n[[ $1 == --version ]] && echo Python 3.8.1\n[[ $1 != -c ]]\n"
    )
    output = run(script, code=1, env={"PYTHON": str(old)})
    assert output.splitlines() == ["error: Python 3.8.1 is too old: make setup PYTHON=python3.11 (or newer)"]


LOCAL = {"deployment": "local"}
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
DEEPSPEED = "install --quiet --require-hashes --no-deps --no-build-isolation -r requirements/deepspeed.txt"


@pytest.mark.parametrize(
    ("answers", "index", "reachable", "taken", "cuda"),
    [
        ({}, "", True, CPU_WHEELS, False),
        ({"backend": "deepspeed"}, "", True, CPU_WHEELS, False),
        ({}, "", False, None, False),
        ({}, "default", True, None, False),
        ({}, "https://mirror.example.com/torch", True, "https://mirror.example.com/torch", False),
        (LOCAL, "", True, "https://download.pytorch.org/whl/cu130", True),
        (LOCAL, "", False, None, True),
        (LOCAL, CPU_WHEELS, True, CPU_WHEELS, False),
        (LOCAL | {"gpu": "none"}, "", True, CPU_WHEELS, False),
    ],
)
def test_setup_installs_torch_then_the_locks_then_checks(
    renderer: Renderer,
    tmp_path: Path,
    answers: Answers,
    index: str,
    reachable: bool,
    taken: str | None,
    cuda: bool,
):
    project = renderer.render(answers, tmp_path / "project")
    python = executable(
        tmp_path / "venv/bin/python",
        f'#!/bin/bash\n[[ $1 != -c ]] && echo "$*" >>{tmp_path}/calls\n'
        f"[[ $* == *urllib* ]] && exit {0 if reachable else 1}\nexit 0\n",
    )
    env = {"PYTHON": str(python), "VENV": str(tmp_path / "venv"), "TORCH_INDEX": index}
    output = run(project / "scripts/setup.sh", env=env)
    assert ("cannot be reached: taking torch from pip's own index" in output) == (not reachable)
    software = yaml.safe_load((project / "platform.yaml").read_text())["software"]
    pip = "-m pip --disable-pip-version-check"
    source = f"--index-url {taken} " if taken else ""
    locks = "-r requirements/template.txt -r requirements/project.txt"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if "--version" not in call] == [
        f"{pip} install {source}torch=={software['torch']} torchvision=={software['torchvision']}",
        f"{pip} install --quiet --require-hashes --no-deps {locks}",
        *([f"{pip} {DEEPSPEED}"] if "backend" in answers else []),
        "scripts/check_install.py" + (" --cuda" if cuda else ""),
    ]
    for lock in sorted((project / "requirements").glob("*.txt")):
        assert run(project / "scripts/setup.sh", env=env) == f"setup: {tmp_path / 'venv'} is up to date\n"
        lock.write_text(lock.read_text() + "# more\n")
        assert "is ready" in run(project / "scripts/setup.sh", env=env), lock


def test_lock_keeps_pins_and_leaves_torch_out(copy: Path):
    executable(copy / ".venv/bin/accelerate", "")
    executable(
        copy / ".venv/bin/uv",
        """#!/bin/bash
while (($#)); do
  case $1 in
    --constraint | --excludes) echo "$1: $(head -1 "$2")" >&2 ;;
    --no-emit-package) [[ $2 == accelerate ]] && echo "left out: $2" >&2 ;;
    --output-file) echo "made: $2 from $3" >&2 ;;
  esac
  shift
done
""",
    )
    output = run("make", "--no-print-directory", "lock", cwd=copy, env=CLEAN).splitlines()
    pins = (copy / "requirements/template.txt").read_text()
    first = re.search(r"^\S+==[^ ;]+", pins, re.MULTILINE)
    assert first
    assert output[:-1] == [
        "scripts/run.sh scripts/lock.sh",
        f"--constraint: {first[0]}",
        "--excludes: torch",
        "left out: accelerate",
        "made: requirements/project.txt from requirements/project.in",
    ]


def modules(folder: Path, copy: Path, **changes: str) -> Path:
    """Stand-ins for torch and torchvision as platform.yaml names them, with changes."""
    software = yaml.safe_load((copy / "platform.yaml").read_text())["software"]
    for name in ("torch", "torchvision"):
        code = f"__version__ = '{software[name]}+cpu'\nclass version: cuda = None\n"
        executable(folder / name / "__init__.py", changes.get(name, code))
    return folder


@pytest.mark.parametrize(
    ("changes", "options", "sentences"),
    [
        ({}, [], []),
        ({"torch": "__version__ = '1.0.0'"}, [], [r"torch is 1\.0\.0, platform\.yaml names [\d.]+"]),
        ({"torchvision": "raise RuntimeError('no\\nnms')"}, [], ["torch and torchvision do not work together: no nms"]),
        ({}, ["--cuda"], [r"torch was built for CUDA None, platform\.yaml names [\d.]+: set TORCH_INDEX .*"]),
    ],
)
def test_check_install_compares_torch(
    copy: Path, tmp_path: Path, changes: dict[str, str], options: list[str], sentences: list[str]
):
    path = str(modules(tmp_path / "modules", copy, **changes))
    script = copy / "scripts/check_install.py"
    output = run(sys.executable, script, *options, code=1 if sentences else 0, env={"PYTHONPATH": path}).splitlines()
    assert len(output) == len(sentences)
    for line, sentence in zip(output, sentences, strict=True):
        assert re.fullmatch(f"error: {sentence}", line)


def test_check_install_in_the_image(copy: Path, tmp_path: Path):
    """An environment on top of the base image's packages: torch has to stay where it was."""
    environment = tmp_path / "venv"
    run(bootstrap.base_python(), "-m", "venv", "--system-site-packages", "--without-pip", environment)
    site = next(environment.glob("lib/python*/site-packages"))
    shutil.copytree(Path(yaml.__file__).parent, site / "yaml")
    executable(site / "pip.py", "")  # pip check finds nothing
    command = [environment / "bin/python", copy / "scripts/check_install.py"]
    base = modules(tmp_path / "base", copy)
    assert run(*command, env={"PYTHONPATH": str(base)}) == ""
    modules(site, copy)
    output = run(*command, code=1, env={"PYTHONPATH": ""}).splitlines()
    assert output == [f"error: {name} was installed over the base image's" for name in ("torch", "torchvision")]


@pytest.fixture
def repository(copy: Path) -> Path:
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        run("git", *arguments, cwd=copy)
    return copy


def test_a_fresh_project_is_a_clean_tree(repository: Path):
    assert run(repository / "scripts/check_tree.sh") == ""


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("new.txt", "", "neither committed nor ignored"),
        ("README.md", "<<<<<<< before updating\na\n=======\nb\n>>>>>>> after updating\n", "conflict markers"),
        ("launch.sh.rej", "", "rejected changes"),
    ],
)
def test_check_tree_finds_what_an_update_left(repository: Path, name: str, content: str, sentence: str):
    (repository / name).write_text(content)
    if sentence != "neither committed nor ignored":
        run("git", "add", "-A", cwd=repository)
        run("git", "commit", "-qm", "update", cwd=repository)
    output = run(repository / "scripts/check_tree.sh", code=1)
    assert sentence in output and name in output


def test_what_training_writes_is_ignored(repository: Path):
    for name in (
        "checkpoints/main/metrics.csv",
        "data/raw.gz",
        ".venv/bin/python",
        "loss.png",
        "src/my_project/__pycache__/a.pyc",
        ".env",
    ):
        executable(repository / name, "")
    assert run("git", "status", "--porcelain", cwd=repository) == ""


def test_update_needs_git_a_clean_tree_and_copier(copy: Path, tmp_path: Path):
    script = copy / "scripts/update.sh"
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    assert "copier was not found" in run(script, code=1, env={"PATH": "/usr/bin:/bin"})
    executable(tmp_path / "bin/copier", '#!/bin/bash\nprintf "%s|" "$@"\n')
    assert "needs a git repository" in run(script, code=1, env=env)
    for arguments in (["init", "-q"], ["add", "-A"]):
        run("git", *arguments, cwd=copy)
    assert "needs a clean work tree" in run(script, code=1, env=env)
    run("git", "commit", "-qm", "start", cwd=copy)
    output = run(script, "--defaults", "--data", "num_gpus=8", env=env)
    assert output == "update|--defaults|--data|num_gpus=8|"
    output = run(script, "--data", "num_gpus=8", env=env)
    assert output == "update|--defaults|--data|num_gpus=8|", "nobody is there to be asked"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [(".", False), ("../template", False), ("/nowhere", False), (str(ROOT), True), ("https://example.org/a.git", True)],
)
def test_update_says_where_the_template_is_sought(repository: Path, tmp_path: Path, source: str, is_found: bool):
    answers = repository / ".copier-answers.yml"
    answers.write_text(re.sub(r"^_src_path: .*$", f"_src_path: {source}", answers.read_text(), flags=re.MULTILINE))
    run("git", "commit", "-qam", "moved", cwd=repository)
    executable(tmp_path / "bin/copier", "#!/bin/bash\necho updated\n")
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    output = run(repository / "scripts/update.sh", code=0 if is_found else 1, env=env)
    if is_found:
        assert output == "updated\n"
    else:
        assert output.startswith(f"error: the template is not at '{source}', seen from here: write its address")


@pytest.mark.parametrize(
    ("docker", "sentence"),
    [
        (None, "Docker was not found: install Docker Engine"),
        ("[[ $1 != compose ]]", "Docker's Compose plugin is missing: install docker-compose-plugin"),
        ("[[ $1 == compose ]]", "Docker's daemon does not answer: start it"),
    ],
)
def test_docker_says_what_is_missing(copy: Path, tmp_path: Path, docker: str | None, sentence: str):
    for tool in ("bash", "env", "dirname"):
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(found)
    if docker:
        executable(tmp_path / "bin/docker", f"#!/bin/bash\n{docker}\n")
    output = run(copy / "scripts/docker.sh", "compose", "run", "train", code=1, env={"PATH": str(tmp_path / "bin")})
    assert output.startswith(f"error: {sentence}") and output.count("\n") == 1


def test_docker_passes_everything_on(copy: Path, tmp_path: Path):
    executable(tmp_path / "bin/docker", '#!/bin/bash\nprintf "%s|" "$PWD" "$@"\n')
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    output = run(copy / "scripts/docker.sh", "compose", "run", "--rm", "train", "a b", cwd=tmp_path, env=env)
    assert output == f"{copy}|compose|run|--rm|train|a b|"
