"""The pods of a rendered Job train together, lose one of them, and go on.

Of the rendered files nothing is edited but the CPU twin of the configuration, which gets two machines. Podman plays
the node (tests/support/pods.py), `make submit DRY_RUN=yes` says what would be applied.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import bootstrap
from tests.support.manifests import Object, read
from tests.support.pods import Node, missing
from tests.support.render import Answers, Renderer

GRACE = 30
SAVED = 75
ANSWERS: Answers = {
    **{"deployment": "kubernetes", "gpu": "t4", "num_gpus": 2, "num_machines": 2, "precision": "fp16"},
    **{"tracker": "none", "ci": "none", "shm_size": "8gb", "preemption_grace_seconds": GRACE},
}
OPTIONS = "--max_steps 60 --save_every_steps 5 --log_every_steps 5"


class Project:
    """A rendered project on a node that has its image."""

    def __init__(self, folder: Path, node: Node) -> None:
        self.folder = folder
        self.node = node

    def manifests(self, run: str) -> list[Object]:
        """What `make submit` would apply for a rehearsal of this run."""
        command = ["make", "--silent", "submit", "DRY_RUN=yes", "CPU=yes", f"RUN={run}", f"ARGS={OPTIONS}"]
        done = subprocess.run([*command, "CONFIG=configs/smoke.yaml"], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return read(done.stdout[done.stdout.index("apiVersion:") :])

    def run_folder(self, run: str) -> Path:
        return self.node.volume("my-project-checkpoints") / run

    def step(self, run: str) -> int:
        latest = self.run_folder(run) / "latest"
        return int(latest.read_text().strip().removeprefix("step-")) if latest.exists() else 0

    def weights(self, run: str) -> dict[str, str]:
        """The hashes of what the newest checkpoint holds of the model and its optimizer."""
        folder = self.run_folder(run) / (self.run_folder(run) / "latest").read_text().strip()
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        return {name: str(file) for name, file in manifest["files"].items() if name.startswith("state/")}


@pytest.fixture(scope="module")
def project(renderer: Renderer, training_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    assert os.geteuid() == 0, "pods need root: nox -s kubernetes asks for it"
    assert not missing(), f"{missing()} are not installed: nox -s kubernetes installs them"
    folder = renderer.render(ANSWERS, tmp_path_factory.mktemp("kubernetes") / "my-project")
    config = folder / "accelerate_config.cpu.yaml"
    text = (
        config.read_text().replace("num_machines: 1", "num_machines: 2").replace("num_processes: 2", "num_processes: 4")
    )
    config.write_text(text)
    node = Node(Path(os.environ.get("PODMAN_FOLDER", bootstrap.BUILD / "podman")))
    node.stop()
    node.start()
    try:
        base = (folder / "Dockerfile").read_text().split("FROM ")[1].split()[0]
        version = ".".join(map(str, sys.version_info[:2]))
        node.import_base_image(base, training_python.parents[1] / f"lib/python{version}/site-packages")
        project = Project(folder, node)
        image = project.manifests("image")[-1]["spec"]["template"]["spec"]["containers"][0]["image"]
        node.build(folder, f"localhost/{image}", *build_flags(node.folder))
        yield project
    finally:
        node.stop()
        node.podman("volume", "rm", "--all", "--force", check=False)


def build_flags(folder: Path) -> list[str]:
    """pip's settings of this machine, where it has some."""
    settings = {"index-url": os.environ.get("PIP_INDEX_URL"), "cert": os.environ.get("PIP_CERT")}
    lines = [f"{name} = {value}\n" for name, value in settings.items() if value]
    if not lines:
        return []
    file = folder / "pip.conf"
    file.write_text("".join(["[global]\n", *lines]))
    flags = [f"--volume={file}:/etc/pip.conf:ro"]
    return flags + ([f"--volume={settings['cert']}:{settings['cert']}:ro"] if settings["cert"] else [])


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> dict[str, str]:
    """How a run ends that is left alone."""
    names = project.node.play(project.manifests("alone"))
    codes = project.node.wait(names)
    logs = [project.node.log(name) for name in names]
    assert codes == [0, 0], logs
    assert "machine 1 of 2 (the first is 0), waiting for the others at my-project-alone-0.my-project:29500" in logs[1]
    assert project.step("alone") == 60
    project.node.remove(names)
    return project.weights("alone")


def wait_for_step(project: Project, run: str, step: int) -> None:
    deadline = time.monotonic() + 120
    while project.step(run) < step:
        assert time.monotonic() < deadline, [project.node.log(f"my-project-{run}-{index}") for index in (0, 1)]
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pod_dies_and_the_run_ends_the_same(project: Project, undisturbed: dict[str, str], victim: int):
    """As when a node is lost: the other pod fails, and the Job starts both again."""
    run = f"killed-{victim}"
    names = project.node.play(project.manifests(run))
    wait_for_step(project, run, 10)
    project.node.podman("kill", "--signal", "KILL", f"{names[victim]}-train")
    codes = project.node.wait(names, 120)
    assert codes[victim] == 128 + signal.SIGKILL and codes[1 - victim] not in (0, SAVED), codes
    assert 10 <= project.step(run) < 60
    project.node.remove(names)

    names = project.node.play(project.manifests(run))
    assert project.node.wait(names) == [0, 0]
    assert project.weights(run) == undisturbed
    project.node.remove(names)


def test_a_drained_pod_has_all_of_them_save(project: Project, undisturbed: dict[str, str]):
    """The signal comes to one pod; all end with the exit code that the Job does not count."""
    names = project.node.play(project.manifests("drained"))
    wait_for_step(project, "drained", 10)
    project.node.podman("stop", "--time", str(GRACE + 30), f"{names[1]}-train")
    assert project.node.wait(names, GRACE) == [SAVED, SAVED]
    project.node.remove(names)

    names = project.node.play(project.manifests("drained"))
    assert project.node.wait(names) == [0, 0]
    assert project.weights("drained") == undisturbed
    project.node.remove(names)


def test_the_pod_is_as_restricted_as_it_says(project: Project, undisturbed: dict[str, str]):
    documents = project.manifests("looked-at")
    pod = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    look = "id -u; touch /workspace/a; touch /opt/a; touch /cache/a /tmp/a /data/a /checkpoints/a && echo written; "
    pod["command"], pod["args"] = (
        ["bash", "-c"],
        [look + "grep ^CapEff /proc/self/status; df -m --output=size /dev/shm"],
    )
    names = project.node.play(documents)
    project.node.wait(names)
    lines = project.node.log(names[0]).splitlines()
    project.node.remove(names)
    assert "10001" in lines and "written" in lines
    assert sum("Read-only file system" in line for line in lines) == 2
    assert "CapEff:\t0000000000000000" in lines
