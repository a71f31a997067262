"""Rendered projects do what their README promises, on this CPU: set up, train, test, lint.

That a project learns is read from its metrics; an exit code shows only that nothing crashed.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import bootstrap
from tests.support.environments import venv_for
from tests.support.render import copier_command, data_arguments, export

CHECKPOINTS = Path(__file__).parent / "checkpoints"  # by the version that wrote them

# Real digits: a run that learns nothing gets 10 %.
ACCURACY = 0.97

# Each of these runs training code that the others don't: its own tracker, its own way to start.
PROJECTS: dict[str, dict[str, str]] = {
    "default": {},
    "cpu": {
        "gpu": "none",
        "deployment": "local",
        "precision": "bf16",
        "tracker": "none",
        "checkpoint_volume": "runs",
        "ci": "none",
        "license": "proprietary",
    },
    "mlflow": {"tracker": "mlflow", "gpu": "v100", "jupyter": "yes", "ci": "gitlab"},
    "trackio": {"tracker": "trackio", "deployment": "local", "gpu": "h100"},
    "wandb": {"tracker": "wandb", "num_gpus": "1", "ssh": "yes"},
}
# Where trackers keep what they record, in the checkpoint folder.
RECORDS = {
    "tensorboard": "*/**/events.out.tfevents.*",
    "wandb": "*/wandb/offline-run-*",
    "mlflow": "*/mlflow_run_id",
    "trackio": "trackio/*.db",
}
# Nothing of the surroundings may decide what a project does.
DROPPED = ("PYTHONPATH", "VIRTUAL_ENV", "CHECKPOINT_DIR", "DATA_DIR", "CONFIG", "RUN", "ARGS")
DROPPED_PREFIXES = ("ACCELERATE_", "MAKE", "MLFLOW_", "TRACKIO_", "WANDB_")

Render = Callable[[str], Path]
Smoke = Callable[[str], tuple[Path, Path, str]]


def environment(project: Path) -> dict[str, str]:
    """What its commands see: nothing of the surroundings, and the packages that its answers ask for."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    }
    return kept | {"VENV": str(venv_for(project)), "PYTHON": bootstrap.base_python()}


def run(command: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run(
        shlex.split(command),
        cwd=cwd,
        env=environment(cwd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    print(f"$ {command}\n{done.stdout}")
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders a project on its first use, commits it and installs what it needs."""
    template = export(tmp_path_factory.mktemp("template") / "copier-accelerate")
    made: dict[str, Path] = {}

    def render(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("projects") / name
            answers = data_arguments(PROJECTS.get(name, {}))
            copy = copier_command("copy", "--quiet", "--defaults", *answers, template, folder)
            run(" ".join(copy), template)
            for command in ("init --quiet", "add --all", "commit --quiet --message Start"):
                run(f"git {command}", folder)
            run("make setup", folder)
            made[name] = folder
        return made[name]

    return render


@pytest.fixture(scope="module")
def smoked(project: Render) -> Smoke:
    """The project, the folder of its first smoke run and what that printed."""
    done: dict[str, tuple[Path, Path, str]] = {}

    def smoke(name: str) -> tuple[Path, Path, str]:
        if name not in done:
            folder = project(name)
            output = run("make smoke", folder)
            [run_folder] = run_folders(folder)
            done[name] = folder, run_folder, output
        return done[name]

    return smoke


def metrics(run_folder: Path) -> list[dict[str, str]]:
    with (run_folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def learned(run_folder: Path) -> None:
    """The loss fell and the test images are recognised."""
    rows = metrics(run_folder)
    train = [float(row["loss"]) for row in rows if row["split"] == "train"]
    accuracies = [float(row["accuracy"]) for row in rows if row["split"] == "eval"]
    assert train[-1] < train[0] / 3, f"training loss went from {train[0]} to {train[-1]}"
    assert ACCURACY <= max(accuracies) <= 1, f"accuracy on test data: {accuracies}"
    losses = [float(row["loss"]) for row in rows if row["split"] == "eval"]
    assert losses[-1] < 0.5, f"loss on test data: {losses}"


def run_folders(project: Path) -> list[Path]:
    """Where runs were written, whatever the answers call it."""
    return sorted(path.parent for path in project.rglob("metrics.csv"))


def unchanged(project: Path) -> None:
    assert run("git status --porcelain", project) == ""


@pytest.mark.parametrize("name", PROJECTS)
def test_smoke_run_learns_and_leaves_the_tree_clean(smoked: Smoke, name: str):
    folder, run_folder, output = smoked(name)
    learned(run_folder)

    # What a person sees at the end: accuracy, speed, and where to look.
    end = "\n".join(output.splitlines()[-12:])
    accuracy = re.search(r"accuracy\D*([\d.]+) ?(%?)", end)
    assert accuracy, end
    assert float(accuracy[1]) / (100 if accuracy[2] else 1) >= ACCURACY
    speed = re.search(r"images/s\s+([\d,.]+)", end)
    assert speed and float(speed[1].replace(",", "")) > 0, end
    named = [folder / path for path in re.findall(r"[\w./-]*/(?:step-\d{8}|loss\.png)", end)]
    assert {path.name[:5] for path in named} == {"step-", "loss."}, end
    for path in named:
        assert path.exists(), path
    assert (run_folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    unchanged(folder)


@pytest.mark.parametrize("name", PROJECTS)
def test_the_tracker_has_the_run(smoked: Smoke, name: str):
    """The one that was chosen, and no other; offline."""
    folder, run_folder, _ = smoked(name)
    chosen = PROJECTS[name].get("tracker", "tensorboard")
    records = {tracker for tracker, pattern in RECORDS.items() if list(run_folder.parent.glob(pattern))}
    assert records == {chosen} - {"none"}
    unchanged(folder)


@pytest.mark.parametrize(("name", "precision"), [("default", "bf16"), ("mlflow", "fp16")])
def test_smoke_run_uses_two_processes_and_says_in_which_precision(smoked: Smoke, name: str, precision: str):
    _, run_folder, _ = smoked(name)
    said = f"2 process(es) on cpu, DDP, precision requested: {precision}, launched: no, effective: no"
    assert said in (run_folder / "train.log").read_text()


def test_smoke_trains_again(smoked: Smoke):
    """A second `make smoke` starts anew instead of finding itself done."""
    folder, run_folder, output = smoked("default")
    again = run("make smoke", folder)
    assert "first step done" in output and "first step done" in again
    learned(run_folder)
    unchanged(folder)


def test_one_process_in_bf16(project: Render):
    """The way that a machine without a GPU trains for real: its own configuration, not the CPU twin."""
    folder = project("cpu")
    run("make train CONFIG=configs/smoke.yaml RUN=one-process ARGS='--epochs 8'", folder)
    run_folder = next(path for path in run_folders(folder) if path.name == "one-process")
    learned(run_folder)
    assert "bf16" in (run_folder / "train.log").read_text()
    unchanged(folder)


def test_ranks_that_do_not_see_each_other_say_so(project: Render):
    """Started by torchrun on a machine without a GPU, each takes itself for the only one."""
    folder = project("cpu")
    options = "--config configs/smoke.yaml --run_name alone"
    command = f"scripts/run.sh torchrun --nproc_per_node 2 -m my_project.train {options}"
    output = run(command, folder, code=1)
    assert "error: 2 processes were launched but each sees 1: use ./launch.sh --cpu" in output
    assert "alone" not in [path.name for path in run_folders(folder)]


def test_a_persons_own_accelerate_config_changes_nothing(project: Render, tmp_path: Path):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_processes: 7\nmixed_precision: bf16\n")
    options = "--config configs/smoke.yaml --run_name own --max_steps 1"
    output = run(f"env HF_HOME={tmp_path} ./launch.sh --cpu train {options}", project("default"))
    assert "2 process(es) on cpu, DDP, precision requested: bf16, launched: no, effective: no" in output


def test_compiled_with_accumulation(project: Render):
    """By inductor, which writes C++ here and code for a GPU there."""
    folder = project("default")
    options = "--gradient_accumulation_steps 2 --compile true --run_name compiled"
    run(f"./launch.sh --cpu train --config configs/smoke.yaml {options}", folder)
    learned(next(path for path in run_folders(folder) if path.name == "compiled"))
    unchanged(folder)


@pytest.fixture(scope="session")
def fashion_mnist() -> Path:
    """60,000 real images, from Debian's package dataset-fashion-mnist; nothing is installed."""
    folder = bootstrap.BUILD / "fashion-mnist"
    images = folder / "usr/share/datasets/fashion-mnist"
    if not images.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "--quiet", "update"], check=False, capture_output=True)
        run("apt-get --quiet download dataset-fashion-mnist", folder)
        [package] = folder.glob("*.deb")
        run(f"dpkg --extract {package.name} .", folder)
    return images


def test_fashion_mnist_from_a_mounted_folder(project: Render, fashion_mnist: Path):
    folder = project("default")
    data = f"--data.name fashion-mnist --data.dir {fashion_mnist}"
    options = f"--config configs/smoke.yaml --run_name fashion --max_steps 80 --model.width 8 {data}"
    listed = run(f"scripts/run.sh python -m my_project.prepare_data {data}", folder)
    assert "60,000 images to train on, 10,000 to test with" in listed
    run(f"./launch.sh --cpu train {options} --global_batch_size 250", folder)
    [run_folder] = [path for path in run_folders(folder) if path.name == "fashion"]
    [accuracy] = [float(row["accuracy"]) for row in metrics(run_folder) if row["split"] == "eval"]
    assert accuracy > 0.6, accuracy  # a third of an epoch; chance is 0.1
    shutil.rmtree(run_folder)
    unchanged(folder)


def test_evaluate_and_export(smoked: Smoke):
    folder, run_folder, _ = smoked("default")
    options = f"--config configs/smoke.yaml --run_name {run_folder.name}"
    evaluated = run(f"./launch.sh --cpu evaluate --checkpoint best {options}", folder)
    found = re.search(r"accuracy ([\d.]+)", evaluated)
    assert found, evaluated
    best = max(float(row["accuracy"]) for row in metrics(run_folder) if row["split"] == "eval")
    assert float(found[1]) == pytest.approx(best, abs=1e-3)
    run(f"./launch.sh --cpu export --checkpoint best --output exported {options}", folder)
    assert {path.name for path in (folder / "exported").iterdir()} == {"model.safetensors", "facts.json", "README.md"}
    load = re.findall(r"^```python\n(.*?)^```", (folder / "exported/README.md").read_text(), re.MULTILINE | re.DOTALL)
    script = load[0].replace("configs/train.yaml", "configs/smoke.yaml").replace('"model.', '"exported/model.')
    run(f"scripts/run.sh python -c {shlex.quote(script)}", folder)
    shutil.rmtree(folder / "exported")
    unchanged(folder)


@pytest.mark.parametrize("version", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_checkpoint_of_an_earlier_version_loads(project: Render, version: str):
    """Each was written by the template of that version: `--run_name old --max_steps 30 --model.width 1`."""
    folder, run_folder = project("default"), project("default") / "checkpoints" / "old"
    shutil.copytree(CHECKPOINTS / version, run_folder)
    options = "--config configs/smoke.yaml --run_name old --model.width 1"
    [step] = run_folder.glob("step-*")
    scores = json.loads((step / "progress.json").read_text())["scores"]
    evaluated = run(f"./launch.sh --cpu evaluate --checkpoint {step.name} {options}", folder)
    assert f"test accuracy {scores['accuracy']:.4f}" in evaluated
    assert f"going on from checkpoints/old/{step.name}" in run(
        f"./launch.sh --cpu train {options} --max_steps 40", folder
    )
    shutil.rmtree(run_folder)


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_the_projects_own_tests_pass(project: Render, name: str):
    output = run("make test", project(name))
    closing = re.search(r"(\d+) passed", output)
    assert closing and int(closing[1]) > 0
    assert not re.search(r"\d+ (skipped|xfailed|deselected)", output)
    unchanged(project(name))


def commands(heading: str) -> list[str]:
    """What docs/your-own.md has a person type under a heading."""
    page = (bootstrap.ROOT / "docs" / "your-own.md").read_text()
    [block] = re.findall(r"```sh\n(.*?)```", page.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.DOTALL)
    return block.replace("ADDRESS", str(bootstrap.ROOT)).splitlines()


def test_your_own_model(project: Render):
    folder = project("your-own")
    for command in commands("Your model and data"):
        output = run(f"bash -c {shlex.quote(command)}", folder)
    assert re.search(r"\d+ passed", output), "the last command is make test"
    losses = {
        name: [float(row["loss"]) for row in metrics(folder / "checkpoints" / name) if row["split"] == "eval"]
        for name in ("smoke", "text")
    }
    assert all(after[-1] < after[0] for after in losses.values()), losses
    assert losses["text"][-1] < 2.5, "a text whose bytes all were equally likely would have 5.5"


def test_your_own_script(project: Render):
    folder = project("your-own")
    copy, on_cpu, _ = commands("Your own script")
    run(f"bash -c {shlex.quote(copy)}", folder)
    [accuracy] = re.findall(r"test accuracy ([\d.]+)", run(f"bash -c {shlex.quote(on_cpu)}", folder))
    assert float(accuracy) > 0.8
    script = folder / "src" / "my_project" / "finetune.py"
    script.write_text(script.read_text() + "\nraise SystemExit(3)\n")
    assert "ended with exit code" in run("./launch.sh --cpu finetune", folder, code=3)
    script.write_text("import sys\nprint(__name__, sys.argv[1:], __spec__.name)\n")
    lines = run("./launch.sh --cpu finetune --a 1", folder).splitlines()
    assert lines == ["__main__ ['--a', '1'] my_project.finetune"] * 2


def test_the_scripts_of_the_page_for_beginners(project: Render):
    """docs/distributed-training.md: each script started alone, then on two ranks, prints what the page says."""
    page = (bootstrap.ROOT / "docs" / "distributed-training.md").read_text()
    alone, _, together = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)[0].partition("\n")
    names = re.findall(r"`src/my_project/(\w+)\.py`", page)
    assert names[:2] == ["hello", "gradient"]
    on_two_ranks, of_one, of_both, *_ = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    folder = project("your-own")
    said = []
    for name, content in zip(names, re.findall(r"```python\n(.*?)```", page, re.DOTALL), strict=False):
        (folder / "src" / "my_project" / f"{name}.py").write_text(content)
        for command in (alone, together):
            output = run(f"env {command.replace('hello', name).strip()}", folder)
            said.append(sorted(output.splitlines()))
        run(f"scripts/run.sh ruff check src/my_project/{name}.py", folder)
    assert said[1:] == [sorted(text.splitlines()) for text in (on_two_ranks, of_one, of_both)]


@pytest.mark.parametrize(("name", "needed"), [("default", 4), ("wandb", 1)])
def test_gpus_that_are_missing_are_not_replaced_by_a_cpu(project: Render, name: str, needed: int):
    # Hidden, should this machine have some.
    command = "env CUDA_VISIBLE_DEVICES= ./launch.sh train --config configs/smoke.yaml --run_name none"
    output = run(command, project(name), code=1)
    assert [line for line in output.splitlines() if line.startswith("error: ")] == [
        f"error: GPUs on this machine: {needed} needed, 0 found; see `make doctor`, or use ./launch.sh --cpu to do "
        "without"
    ]
    assert "Traceback" not in output
    assert "none" not in [path.name for path in run_folders(project(name))]


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_the_projects_own_linters_find_nothing(project: Render, name: str):
    run("make lint", project(name))
    unchanged(project(name))


@pytest.mark.parametrize("name", ["default", "cpu"])
def test_doctor_on_a_cpu(project: Render, name: str):
    # Of a project that trains in a container, `make doctor` looks at the container.
    command = {"default": "scripts/run.sh python -m my_project.doctor --cpu", "cpu": "make doctor ARGS=--cpu"}
    output = run(command[name], project(name))
    assert re.search(r"[1-9]\d* ok, .* 0 failed", output)
