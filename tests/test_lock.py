"""The locks: what is stored, for which machines, and what of it a project gets."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.render import ROOT, Answers, Renderer
from tools import lock

PACKAGES = (ROOT / "includes" / "lock" / "packages.txt").read_text()


@pytest.fixture(scope="module")
def groups(renderer: Renderer) -> dict[str, list[str]]:
    module: Any = renderer.environment.get_template("includes/lock/groups.jinja").module
    return module.groups


def test_lock_is_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "lock.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_every_locked_package_is_used(groups: dict[str, list[str]]) -> None:
    stored = {block.partition("==")[0] for block in PACKAGES.split("\n\n")}
    assert stored == set(itertools.chain.from_iterable(groups.values()))
    assert not stored & {"torch", "torchvision", "triton"}


FILES = {
    "pkg-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": True,
    "pkg-1-cp312-cp312-manylinux_2_28_aarch64.whl": True,
    "pkg-1-cp38-abi3-macosx_11_0_arm64.whl": True,
    "pkg-1-cp313-cp313-macosx_10_13_universal2.whl": True,
    "pkg-1-cp314-cp314t-manylinux_2_28_x86_64.whl": False,  # without the interpreter's lock
    "pkg-1-cp310-cp310-manylinux_2_17_x86_64.whl": False,
    "pkg-1-cp311-cp311-musllinux_1_2_x86_64.whl": False,
    "pkg-1-cp311-cp311-macosx_10_9_x86_64.whl": False,
    "pkg-1-cp311-cp311-win_amd64.whl": False,
    "pkg-1-cp311-cp311-manylinux_2_17_s390x.whl": False,
}


@pytest.mark.parametrize("everywhere", [True, False])
def test_only_files_of_supported_machines_are_stored(everywhere: bool) -> None:
    """The source, too, but only where a machine finds no wheel."""
    files = FILES | ({"pkg-1-py3-none-any.whl": True} if everywhere else {})
    wheels = [{"url": f"https://example.com/{name}", "hashes": {"sha256": name}} for name in files]
    package = {"name": "pkg", "wheels": wheels, "sdist": {"hashes": {"sha256": "source"}}}
    kept = {name for name, wanted in files.items() if wanted} | (set() if everywhere else {"source"})
    assert set(lock.hashes(package, lock.SUPPORTED)) == kept
    linux = [machine for machine in lock.SUPPORTED if machine.marker_environment["sys_platform"] == "linux"]
    assert not {name for name in lock.hashes(package, linux) if "macosx" in name}


@pytest.mark.parametrize(
    ("answers", "chosen"),
    [
        ({}, {"tensorboard"}),
        *(({"tracker": tracker}, {tracker}) for tracker in ("wandb", "mlflow", "trackio")),
        ({"tracker": "none", "jupyter": "yes"}, {"jupyter"}),
        ({"tracker": "none", "backend": "fsdp"}, set()),
        ({"tracker": "none", "backend": "deepspeed"}, {"deepspeed"}),
        ({"tracker": "none", "gpu": "h100", "precision": "fp8"}, {"fp8"}),
    ],
)
def test_a_project_gets_what_it_needs(
    answers: Answers, chosen: set[str], renderer: Renderer, groups: dict[str, list[str]]
) -> None:
    text = renderer.contents(answers)["requirements/template.txt"][0].decode()
    names = re.findall(r"^([a-z0-9][a-z0-9._-]*)==\S+", text, flags=re.MULTILINE)
    wanted = {name for group in {"base", "dev", *chosen} for name in groups[group]}
    assert names == sorted(wanted - {"deepspeed"})
    for block in re.split(r"\n(?=[a-z0-9])", text)[1:]:
        assert "--hash=sha256:" in block, block
    assert "accelerate==1.15.0 " in text


def test_deepspeed_is_built_after_the_others(renderer: Renderer) -> None:
    """It is published as source only, and imports torch when it is built."""
    text = renderer.contents({"backend": "deepspeed"})["requirements/deepspeed.txt"][0].decode()
    assert re.fullmatch(r"#.+\ndeepspeed==\S+ \\\n    --hash=sha256:[0-9a-f]{64}\n", text)
