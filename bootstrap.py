#!/usr/bin/env python3
"""From a bare machine to a trained model, or to a tested template, in one command.

python3 bootstrap.py demo [FOLDER]     render the default project and train it on this CPU
python3 bootstrap.py test [ARGUMENTS]  run this repository's checks (ARGUMENTS go to nox)

Needs python3 and git. What else is missing (python3-venv, make) is installed with apt-get, as root
or through sudo; everything else goes into virtual environments inside this folder.
"""

# Only the standard library, and only syntax that an old python3 can read: it has to be able to say
# that it is too old.
from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

if os.name == "posix":
    import fcntl

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
TOOLS_VENV = ROOT / ".venv"
TOOLS_REQUIREMENTS = ROOT / "requirements" / "tools.txt"
TRAINING_VENV = BUILD / "venv"  # torch and the rest of a generated project; smoke tests use it too
DEMO_PROJECT = BUILD / "my-project"
OLDEST_PYTHON = (3, 11)  # of generated projects

# Copier commits a local template's uncommitted changes to a scratch clone of it, and on a new
# machine git has no name yet.
IDENTITY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "copier-accelerate"),
        ("EMAIL", "maintainers@copier-accelerate.invalid"),
    )
}

# The words of pip, and of the resolver and the sockets below it, for "there is no network".
UNREACHABLE = (
    "NewConnectionError",
    "Failed to establish a new connection",
    "Name or service not known",
    "Temporary failure in name resolution",
    "NameResolutionError",
    "Network is unreachable",
    "ProxyError",
    "ReadTimeoutError",
    "ConnectTimeoutError",
    "Connection refused",
)


class BootstrapError(Exception):
    """What went wrong and what to do about it, in one sentence."""


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


def run(command: list[str], cwd: Path = ROOT) -> None:
    """Shows and runs a command whose output belongs to the person."""
    say(shlex.join(command))
    code = subprocess.run(command, cwd=cwd, env={**IDENTITY, **os.environ}).returncode
    if code:
        raise BootstrapError(f"`{shlex.join(command)}` ended with exit code {code}; its output above says why")


def captured(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command whose output only matters when it fails."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def base_python() -> str:
    """The interpreter outside of virtual environments: .venv can be made anew from within."""
    return getattr(sys, "_base_executable", None) or sys.executable


def can_make_venvs() -> bool:
    """Debian and Ubuntu ship python3 without ensurepip, which `python3 -m venv` needs."""
    check = "import ensurepip, venv"
    return subprocess.run([base_python(), "-c", check], stderr=subprocess.DEVNULL).returncode == 0


def missing_packages() -> list[str]:
    packages = []
    if not can_make_venvs():
        packages.append("python3-venv")
    packages += [tool for tool in ("make", "git") if not shutil.which(tool)]
    return packages


def install_system_packages() -> None:
    packages = missing_packages()
    if not packages:
        return
    by_hand = f"install {' and '.join(packages)} and run this again"
    if not shutil.which("apt-get"):
        raise BootstrapError(f"there is no apt-get here: {by_hand}")
    apt = ["apt-get"]
    if os.geteuid() != 0:
        if not shutil.which("sudo"):
            raise BootstrapError(f"neither root nor sudo here: {by_hand} (apt-get install {' '.join(packages)})")
        apt = ["sudo", "apt-get"]
    say(f"installing with apt-get: {', '.join(packages)}")
    apt += ["-q", "-o", "DPkg::Lock::Timeout=120"]  # a new machine may still be updating itself
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # An update with one dead source fails, though the packages may be there: only install counts.
    captured([*apt, "update"], environment)
    done = captured([*apt, "install", "-y", "--no-install-recommends", *packages], environment)
    if done.returncode:
        print(done.stdout[-2000:], file=sys.stderr)
        raise BootstrapError(f"apt-get could not install {' and '.join(packages)} (its words are above): {by_hand}")
    still = missing_packages()
    if still:
        raise BootstrapError(
            f"{' and '.join(still)} is still missing for {base_python()}: "
            "run this with the system's own /usr/bin/python3"
        )


@contextlib.contextmanager
def locked(path: Path):
    """Two runs at once take turns at making the same virtual environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        if os.name == "posix":
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_venv(folder: Path, requirements: Path) -> Path:
    """Makes a virtual environment with exactly these requirements, unless it is there already."""
    if not requirements.is_file():
        raise BootstrapError(f"{requirements.relative_to(ROOT)} is missing: get a complete copy of this repository")
    # The path counts too: scripts in a virtual environment that was moved point to the old place.
    pins = [path.read_text() for path in sorted(requirements.parent.glob("*.txt"))]
    key = "\n".join((sys.version, base_python(), str(folder), requirements.name, *pins))
    stamp = folder / ".stamp"
    wanted = hashlib.sha256(key.encode()).hexdigest()
    with locked(BUILD / (folder.name.lstrip(".") + ".lock")):
        if stamp.is_file() and stamp.read_text() == wanted:
            return folder
        say(f"making {folder.relative_to(ROOT)} with {requirements.relative_to(ROOT)} (once)")
        started = time.monotonic()
        if folder.exists():
            shutil.rmtree(folder)
        check([base_python(), "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        check([*pip, "install", "--quiet", "--retries", "2", "-r", str(requirements)])
        stamp.write_text(wanted)
        say(f"{folder.relative_to(ROOT)} is ready ({time.monotonic() - started:.0f} s)")
    return folder


def check(command: list[str]) -> None:
    done = captured(command)
    if not done.returncode:
        return
    if any(words in done.stdout for words in UNREACHABLE):
        raise BootstrapError(
            "the package index can't be reached: connect this machine to a network, "
            "or set PIP_INDEX_URL to an index it can reach, and run this again"
        )
    print(done.stdout[-4000:], file=sys.stderr)
    raise BootstrapError(f"`{shlex.join(command)}` failed; the lines above say why")


def set_up() -> None:
    install_system_packages()
    make_venv(TOOLS_VENV, TOOLS_REQUIREMENTS)


def demo(folder: str | None) -> None:
    started = time.monotonic()
    project = Path(folder).resolve() if folder else DEMO_PROJECT
    if folder and project.exists() and (not project.is_dir() or any(project.iterdir())):
        raise BootstrapError(f"{project} is not empty: name another folder")
    set_up()
    if project.exists():  # the demo's own folder: keep what was there, somebody may have worked on it
        previous = project.with_name(project.name + ".previous")
        if previous.exists():
            shutil.rmtree(previous)
        project.rename(previous)
    copier = [str(TOOLS_VENV / "bin" / "copier"), "copy", "--quiet", "--defaults", "--vcs-ref", "HEAD"]
    run([*copier, str(ROOT), str(project)])
    environment = [f"VENV={TRAINING_VENV}", f"PYTHON={base_python()}"]
    run(["make", "--no-print-directory", "setup", *environment], cwd=project)
    # From now on a plain `make` in the project finds its environment.
    (project / ".venv").symlink_to(TRAINING_VENV)
    run(["make", "--no-print-directory", "smoke", *environment], cwd=project)
    print()
    say(f"done in {time.monotonic() - started:.0f} s; the project is {project}")
    # The template by its full path: the project remembers where its updates come from.
    command = [os.path.relpath(copier[0]), "copy", str(ROOT), os.path.relpath(ROOT.parent / "my-project")]
    say(f"next, a project for your machine (it asks what you have): {shlex.join(command)}")


def test(arguments: list[str]) -> None:
    set_up()
    command = [str(TOOLS_VENV / "bin" / "nox"), *arguments]
    say(shlex.join(command))
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(command[0], command)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bootstrap.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | test")
    demo_parser = commands.add_parser("demo", help="render the default project and train it on this CPU")
    demo_parser.add_argument(
        "folder",
        nargs="?",
        help=f"where the project goes (default: {DEMO_PROJECT.relative_to(ROOT)})",
    )
    commands.add_parser("test", help="run this repository's checks; what follows goes to nox", add_help=False)
    options, rest = parser.parse_known_args()
    if options.command == "demo" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if sys.version_info < OLDEST_PYTHON:
            needed = ".".join(map(str, OLDEST_PYTHON))
            raise BootstrapError(f"Python {needed} or newer is needed, this is {sys.version.split()[0]}")
        if options.command == "demo":
            demo(options.folder)
        else:
            test(rest)
    except (BootstrapError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
