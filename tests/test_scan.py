"""What Checkov finds in rendered projects is what the documentation gives a reason for, and nothing else.

It reads the Dockerfile, the workflows and, as kubectl would apply them, the manifests.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import bootstrap
from tests.support.manifests import Object, job_of
from tests.support.render import Answers, Renderer
from tests.test_kubernetes_files import KUBERNETES, Manifests

SCANNER = bootstrap.BUILD / "scan-venv" / "bin" / "checkov"
KINDS = ("job", "helm", "kubeflow")
CLUSTER: Answers = KUBERNETES | {"namespace": "ml", "image_registry": "registry.example.com/ml"}
PROJECTS: dict[str, Answers] = {
    "docker": {"jupyter": "yes", "ssh": "yes"},
    "docker-gitlab": {"ci": "gitlab", "num_gpus": 1, "image_registry": "registry.example.com/ml"},
    "cpu": {"gpu": "none"},
}


def scan(folder: Path) -> tuple[int, set[str]]:
    """How many checks passed, and the numbers of those that did not."""
    command: list[str | Path] = [
        SCANNER,
        "--directory",
        folder,
        "--quiet",
        "--compact",
        "--skip-download",
        "--output",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    reports = json.loads(done.stdout)
    reports = reports if isinstance(reports, list) else [reports]
    assert not any(report["summary"]["parsing_errors"] for report in reports), done.stdout
    failed = {check["check_id"] for report in reports for check in report["results"]["failed_checks"]}
    return sum(report["summary"]["passed"] for report in reports), failed


def as_applied(documents: list[Object]) -> list[Object]:
    """In the namespace that the tools are told, and with the Job that Kubeflow makes."""
    metadata = {"name": "train", "namespace": CLUSTER["namespace"]}
    others = [document for document in documents if document["kind"] not in ("Job", "TrainingRuntime", "TrainJob")]
    for document in others:
        document["metadata"]["namespace"] = CLUSTER["namespace"]
    return [*others, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_of(documents)}]


def explained(page: str) -> set[str]:
    """Checks that a page gives a reason for."""
    return set(re.findall(r"\((CKV\w*)\)", (bootstrap.ROOT / "docs" / page).read_text()))


@pytest.fixture(scope="module")
def found(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What was found, by page of the documentation."""
    root = tmp_path_factory.mktemp("scan")
    found: dict[str, set[str]] = {"kubernetes.md": set(), "docker.md": set()}
    for kind in KINDS:
        made = Manifests(renderer, CLUSTER | {"manifest_kind": kind}, root / kind)
        applied = root / f"{kind}-applied"
        applied.mkdir()
        (applied / "all.yaml").write_text(yaml.safe_dump_all(as_applied(made.documents)))
        passed, failed = scan(applied)
        print(f"{kind}: {passed} passed, {sorted(failed)} failed")
        assert passed > 60
        found["kubernetes.md"] |= failed
    for name, answers in PROJECTS.items():
        passed, failed = scan(renderer.render(answers, root / name))
        print(f"{name}: {passed} passed, {sorted(failed)} failed")
        assert passed > 60
        found["docker.md"] |= failed
    return found


@pytest.mark.parametrize("page", ["kubernetes.md", "docker.md"])
def test_each_finding_has_a_reason_and_each_reason_a_finding(found: dict[str, set[str]], page: str):
    assert found[page] == explained(page)


def test_a_weakness_is_found(renderer: Renderer, tmp_path: Path):
    project = renderer.render(PROJECTS["docker"], tmp_path / "project")
    file = project / "Dockerfile"
    file.write_text(re.sub(r"^USER .*$", "USER root", file.read_text(), flags=re.MULTILINE))
    assert "CKV_DOCKER_8" in scan(project)[1]
