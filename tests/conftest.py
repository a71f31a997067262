"""Fixtures that all tests share: an isolated Copier and git, and the template ready to be rendered."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import render
from tests.support.render import Answers, Renderer
from tests.support.variants import pairs


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The person's own settings, caches and git configuration change nothing, and are not changed."""
    home = tmp_path_factory.mktemp("home")
    gitconfig = home / "gitconfig"
    gitconfig.write_text(
        "[user]\n\tname = Tester\n\temail = tester@example.com\n"
        "[init]\n\tdefaultBranch = main\n[safe]\n\tdirectory = *\n[commit]\n\tgpgSign = false\n"
    )
    (home / "settings.yml").write_text("defaults: {}\n")
    os.environ.update(
        COPIER_SETTINGS_PATH=str(home / "settings.yml"),
        COPIER_CACHE_DIR=str(home / "cache"),
        GIT_CONFIG_GLOBAL=str(gitconfig),
        GIT_CONFIG_NOSYSTEM="1",
        PROMPT_TOOLKIT_NO_CPR="1",
    )


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as a plain directory."""
    return render.export(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def renderer(template: Path, isolated: None) -> Renderer:
    return Renderer(template)


@pytest.fixture(scope="session")
def variants(renderer: Renderer) -> list[Answers]:
    """Answers in which every possible pair occurs: enough to render each file in each of its forms."""
    return pairs(renderer)


@pytest.fixture(scope="session")
def training_python(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with torch and all that a generated project needs.

    It's TRAIN_PYTHON where that is set; otherwise the default project's own `make setup` makes it, once, in
    TRAINING_VENV (build/venv), where later runs and the smoke tests find it.
    """
    if given := os.environ.get("TRAIN_PYTHON"):
        return Path(given)
    venv = Path(os.environ.get("TRAINING_VENV", render.ROOT / "build" / "venv"))
    project = renderer.render({}, tmp_path_factory.mktemp("setup") / "project")
    subprocess.run(["make", "--no-print-directory", "setup", f"VENV={venv}"], cwd=project, check=True)
    return venv / "bin" / "python"
