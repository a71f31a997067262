"""What is checked, and how: `python3 bootstrap.py test` runs the default sessions.

lint, render, scan,
smoke, slurm, docker,
kubernetes            run by default, in this order; the last three need root, or sudo without a password
bench                 speed, as ratios
renovate              Renovate reads rendered projects (needs a registry of npm packages)
kills                 runs that are killed at random instants, many times
newcomer              both commands on a machine that has nothing (needs root and debootstrap)

One session: `.venv/bin/nox -s render -- -k docker` (what follows `--` goes to pytest).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bootstrap
from tests.support import docker as engine
from tests.support import pods
from tests.support import slurm as cluster
from tools.sources import sources

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "render", "scan", "smoke", "slurm", "docker", "kubernetes"]
nox.options.default_venv_backend = "none"

TESTS_VENV = bootstrap.BUILD / "tests-venv"
SMOKE_TESTS = "tests/test_smoke*.py"
LINT_TESTS = "tests/test_repository.py"
SLURM_TESTS = "tests/test_slurm.py"
DOCKER_TESTS = "tests/test_docker.py"
KUBERNETES_TESTS = "tests/test_kubernetes.py"
SCAN_TESTS = "tests/test_scan.py"
RENOVATE_TESTS = "tests/test_renovate.py"


class Tools:
    """The programs of one virtual environment, which all sessions share."""

    def __init__(self, session: nox.Session) -> None:
        self.session = session
        self.bin = bootstrap.make_venv(TESTS_VENV, bootstrap.ROOT / "requirements" / "tests.txt") / "bin"

        self.environment = {
            "PATH": os.pathsep.join([str(self.bin), os.environ["PATH"]]),
            "PYTHONPATH": str(bootstrap.ROOT),  # bootstrap, tools
        }

    def run(self, program: str, *arguments: str) -> None:
        self.session.run(str(self.bin / program), *arguments, env=self.environment, external=True)

    def run_as_root(self, program: str, *arguments: str) -> None:
        """What root makes would stay root's, so it makes no caches."""
        if os.geteuid() == 0:
            return self.run(program, *arguments)
        variables = [f"{name}={value}" for name, value in {**self.environment, "PYTHONDONTWRITEBYTECODE": "1"}.items()]
        command = ["sudo", "--non-interactive", "env", *variables, str(self.bin / program), *arguments]
        self.session.run(*command, "-p", "no:cacheprovider", external=True)

    def pytest(self, *arguments: str) -> None:
        self.run("pytest", *arguments, *self.session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """The sources of this repository and of the template, as they stand."""
    tools = Tools(session)
    tools.run("ruff", "check", ".")
    tools.run("ruff", "format", "--check", ".")
    tools.run("mypy")
    helm = ":!*/chart/templates/*"  # are YAML once Helm has rendered them
    tools.run("yamllint", "--strict", *sources("*.yml", "*.yaml", helm))
    tools.run("shellcheck", ".ci/run", *sources("*.sh"))
    tools.run("jactionlint", *sources(".github/workflows"))
    tools.run("zizmor", "--offline", "--quiet", *sources(".github/workflows"))
    tools.run("validate-pyproject", "pyproject.toml")
    tools.run("pre-commit", "validate-config", ".pre-commit-config.yaml")
    tools.pytest(LINT_TESTS)


@nox.session
def render(session: nox.Session) -> None:
    """Valid answers give files that their consumers accept; the others are refused."""
    others = (LINT_TESTS, SLURM_TESTS, DOCKER_TESTS, KUBERNETES_TESTS, SCAN_TESTS, RENOVATE_TESTS)
    Tools(session).pytest("tests", f"--ignore-glob={SMOKE_TESTS}", *(f"--ignore={tests}" for tests in others))


@nox.session
def scan(session: nox.Session) -> None:
    """A scanner finds no weakness in rendered projects but those that the documentation gives a reason for."""
    bootstrap.make_venv(bootstrap.BUILD / "scan-venv", bootstrap.ROOT / "requirements" / "scan.txt")
    Tools(session).pytest(SCAN_TESTS)


@nox.session
def smoke(session: nox.Session) -> None:
    """Rendered projects, set up by their own `make setup`, train for real on two processes."""
    smoke_tests = sorted(str(path.relative_to(bootstrap.ROOT)) for path in bootstrap.ROOT.glob(SMOKE_TESTS))
    Tools(session).pytest(*smoke_tests)


@nox.session
def slurm(session: nox.Session) -> None:
    """Rendered projects train, are stopped and go on in a real cluster of two nodes on this machine."""
    run_as_root(session, SLURM_TESTS, cluster.PACKAGES, cluster.missing())


@nox.session
def docker(session: nox.Session) -> None:
    """The rendered image is built, trains and is stopped in a real engine; services are probed."""
    run_as_root(session, DOCKER_TESTS, engine.PACKAGES, engine.missing())


@nox.session
def kubernetes(session: nox.Session) -> None:
    """The pods of a rendered Job train, lose one of them and go on, as a node of a cluster would run them."""
    run_as_root(session, KUBERNETES_TESTS, pods.PACKAGES, pods.missing())


def run_as_root(session: nox.Session, tests: str, packages: Sequence[str], missing: Sequence[str]) -> None:
    """Run tests that start services; what these need is installed first."""
    if not can_be_root():
        reason = f"this needs root, or sudo without a password: run `sudo nox -s {session.name}`"
        if os.environ.get("CI"):
            session.error(reason)
        session.skip(reason)
    sudo = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    if missing:
        if not shutil.which("apt-get"):
            session.error(f"there is no apt-get here to install what is missing: {', '.join(missing)}")
        session.run(*sudo, "apt-get", "--quiet", "update", external=True)
        install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
        session.run(*sudo, "env", "DEBIAN_FRONTEND=noninteractive", *install, external=True)
    Tools(session).run_as_root("pytest", tests, *session.posargs)


def can_be_root() -> bool:
    sudo = ["sudo", "--non-interactive", "true"]
    return os.geteuid() == 0 or (
        bool(shutil.which("sudo")) and not subprocess.run(sudo, capture_output=True).returncode
    )


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Copying, starting and saving, each against the least that it could take."""
    Tools(session).run("python", "-m", "benchmarks", *session.posargs)


@nox.session(default=False)
def renovate(session: nox.Session) -> None:
    """Renovate itself finds in rendered projects what it shall keep."""
    bootstrap.make_venv(bootstrap.BUILD / "renovate-venv", bootstrap.ROOT / "requirements" / "renovate.txt")
    Tools(session).pytest(RENOVATE_TESTS)


@nox.session(default=False)
def kills(session: nox.Session) -> None:
    """Killed at random instants and resumed, compared with a run left alone: `nox -s kills -- 1000` kills in all."""
    Tools(session).run("python", "-m", "tools.kills", *session.posargs)


@nox.session(default=False)
def newcomer(session: nox.Session) -> None:
    """Both commands on new machines: `nox -s newcomer -- bookworm trixie`, as root."""
    Tools(session).run("python", "tools/newcomer.py", *session.posargs)
