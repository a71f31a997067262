"""Resolve requirements/*.in into includes/lock/ and the pins of this repository.

    python tools/lock.py             resolve; versions that still fit stay as they are
    python tools/lock.py --upgrade   resolve anew
    python tools/lock.py --check     say whether the inputs changed since the last resolution

All groups of the generated project are resolved together, for every Python from 3.11 on, so that any sum of groups
fits. packages.txt holds them all, parted by empty lines; groups.jinja says which group needs which. One file, since
Copier clones and reads hundreds slowly, with the hashes of those files alone that a supported machine may install,
since it is read at each render. torch and torchvision are left out: they come with the image, or from `make setup`.
"""

import argparse
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jinja2 import Environment, FileSystemLoader
from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCK = ROOT / "includes" / "lock"
PACKAGES = LOCK / "packages.txt"

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))  # those that PyTorch is published for
NEWEST_GLIBC = 50  # 2.50: wheels for it and for all before it count
NEWEST_MACOS = (30, 0)

GROUPS = ("base", "dev", "deepspeed", "fp8", "tensorboard", "wandb", "mlflow", "trackio", "jupyter")
OWN = ("tools", "tests", "scan", "renovate")  # this repository's pins: requirements/<name>.in → requirements/<name>.txt
LEFT_OUT = ("torch", "torchvision")

REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==[^ ]+(?: ; (?P<marker>[^\\]+?))?(?: \\)?$")


def compile_lock(inputs: list[Path], output: Path, *arguments: str) -> None:
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", PYTHONS[0]]
    command += ["--fork-strategy", "fewest", "--no-annotate", "--no-header", "--output-file", str(output)]
    result = subprocess.run([*command, *arguments, *map(str, inputs)], check=False, stdout=subprocess.DEVNULL)
    if result.returncode:
        sys.exit(f"error: uv found no versions for {', '.join(path.name for path in inputs)}; its reasons are above.")


@dataclass(frozen=True)
class Machine:
    """A Python on a kind of machine: what markers see of it, and which wheels it installs."""

    marker_environment: dict[str, str]
    tags: frozenset[Tag]

    @classmethod
    def of(cls, python: str, system: str, machine: str) -> "Machine":
        major, minor = map(int, python.split("."))
        if system == "linux":
            platforms = [f"manylinux_2_{glibc}_{machine}" for glibc in range(5, NEWEST_GLIBC + 1)]
            platforms += [f"{name}_{machine}" for name in ("manylinux1", "manylinux2010", "manylinux2014", "linux")]
        else:
            platforms = list(mac_platforms(NEWEST_MACOS, machine))
        interpreter = f"cp{major}{minor}"
        return cls(
            {
                "python_version": python,
                "python_full_version": f"{python}.0",
                "sys_platform": system,
                "platform_system": system.capitalize(),
                "platform_machine": machine,
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            },
            frozenset(cpython_tags((major, minor), [interpreter], platforms))
            | frozenset(compatible_tags((major, minor), interpreter, platforms)),
        )


SUPPORTED = [Machine.of(python, *machine) for python, machine in itertools.product(PYTHONS, MACHINES)]


def requirements(lock: str) -> dict[str, str]:
    """Name → its line, without packages that no supported machine installs."""
    found: dict[str, str] = {}
    for line in lock.splitlines():
        if not line.strip() or line.startswith((" ", "#")):  # hashes, what the file says of itself
            continue
        match = REQUIREMENT.match(line)
        if match is None:
            sys.exit(f"error: cannot read the line {line!r} that uv wrote.")
        if _users(match["marker"]):
            found[match["name"]] = line.removesuffix(" \\")
    return found


def _users(marker: str | None) -> list[Machine]:
    """The machines that a requirement with this marker is for."""
    return [machine for machine in SUPPORTED if marker is None or Marker(marker).evaluate(machine.marker_environment)]


def hashes(package: dict[str, Any], machines: list[Machine]) -> list[str]:
    """What these machines may install of a package in uv's pylock.toml: wheels, and the source where none fits."""
    wheels = []
    for wheel in package.get("wheels", []):
        name = unquote(wheel["url"].rpartition("/")[2])
        wheels.append((parse_wheel_filename(name)[3], wheel))
    kept = [wheel for tags, wheel in wheels if any(tags & machine.tags for machine in machines)]
    if not all(any(tags & machine.tags for tags, _ in wheels) for machine in machines):
        if "sdist" not in package:
            sys.exit(f"error: {package['name']} has neither a wheel for each machine nor its source.")
        kept.append(package["sdist"])
    return sorted(file["hashes"]["sha256"] for file in kept)


def with_hashes(lines: dict[str, str], scratch: Path) -> dict[str, str]:
    """Name → its block in packages.txt."""
    versions, files = scratch / "versions.txt", scratch / "pylock.toml"
    versions.write_text("\n".join(lines.values()))
    compile_lock([versions], files, "--no-deps", "--format", "pylock.toml")
    blocks = {}
    for package in tomllib.loads(files.read_text())["packages"]:
        line = lines[package["name"]]
        match = REQUIREMENT.match(line)
        assert match, line
        found = hashes(package, _users(match["marker"]))
        blocks[package["name"]] = " \\\n".join([line, *(f"    --hash=sha256:{digest}" for digest in found)]) + "\n"
    if blocks.keys() != lines.keys():
        sys.exit(f"error: uv found no files for {', '.join(sorted(lines.keys() - blocks.keys()))}.")
    return blocks


def torch_releases() -> list[tuple[str, str]]:
    """The pairs of torch and torchvision in the stack table."""
    environment = Environment(loader=FileSystemLoader(ROOT), autoescape=True)
    stacks = environment.get_template("includes/stacks.jinja").make_module().__dict__["stacks"]
    return sorted({(row["torch"], row["torchvision"]) for row in stacks.values()})


def digest() -> str:
    """One hash of all that the resolution is made from."""
    settings = (PYTHONS, MACHINES, NEWEST_GLIBC, NEWEST_MACOS, GROUPS, OWN, LEFT_OUT, torch_releases())
    digest = hashlib.sha256(repr(settings).encode())
    for name in (*GROUPS, *OWN):
        digest.update((REQUIREMENTS / f"{name}.in").read_bytes())
    return digest.hexdigest()


def check_stacks(everything: Path, scratch: Path) -> None:
    """Every torch of the stack table must accept the locked versions, or `pip check` fails in its image."""
    for torch, torchvision in torch_releases():
        stack = scratch / f"torch-{torch}.in"
        stack.write_text(f"torch=={torch}\ntorchvision=={torchvision}\n")
        compile_lock([stack], stack.with_suffix(".txt"), "--constraint", str(everything))


def groups_jinja(groups: dict[str, list[str]], packages: list[str]) -> str:
    """Names in one string: Jinja reads hundreds of literals slowly."""
    lines = ["{# Written by tools/lock.py: which packages each group needs. #}", "{% set groups = {"]
    for group, names in groups.items():
        lines += [f"  '{group}': '", *_wrapped(names), "  '.split(),"]
    lines += ["} %}", "{# All of them, as Python might import them. #}", "{% set locked_names = '"]
    lines += [*_wrapped([re.sub(r"[-.]", "_", name) for name in packages]), "'.split() %}", ""]
    return "\n".join(lines)


def _wrapped(names: list[str]) -> list[str]:
    return textwrap.wrap(" ".join(names), 116, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


def lock(upgrade: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        override = Path(scratch, "override.txt")
        override.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in LEFT_OUT))
        inputs = {group: REQUIREMENTS / f"{group}.in" for group in GROUPS}

        everything = Path(scratch, "everything.txt")  # uv prefers the versions that it finds in its output file
        if not upgrade and PACKAGES.exists():
            everything.write_text(PACKAGES.read_text())
        compile_lock(list(inputs.values()), everything, "--override", str(override))
        lines = requirements(everything.read_text())
        packages = with_hashes(lines, Path(scratch))

        # Without torch's own marker line: it would refuse every release but the newest.
        locked = Path(scratch, "locked.txt")
        locked.write_text("\n".join(lines.values()))
        check_stacks(locked, Path(scratch))

        groups = {}
        for group, path in inputs.items():
            part = Path(scratch, f"{group}.txt")
            compile_lock([path], part, "--override", str(override), "--constraint", str(locked))
            groups[group] = sorted(requirements(part.read_text()).keys() & packages.keys())

    PACKAGES.write_text("\n".join(packages.values()))
    (LOCK / "groups.jinja").write_text(groups_jinja(groups, sorted(packages)))

    for name in OWN:
        upgrades = ["--upgrade"] if upgrade else []
        compile_lock([REQUIREMENTS / f"{name}.in"], REQUIREMENTS / f"{name}.txt", "--generate-hashes", *upgrades)
    (LOCK / "inputs.sha256").write_text(digest() + "\n")
    print(f"{len(packages)} packages in {len(groups)} groups: {LOCK.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--check", action="store_true", help="only say whether the inputs changed")
    arguments = parser.parse_args()
    if not arguments.check:
        lock(arguments.upgrade)
    elif (LOCK / "inputs.sha256").read_text().strip() != digest():
        sys.exit("error: requirements/*.in changed since the last resolution: run python tools/lock.py")
    else:
        print("includes/lock/ is up to date with requirements/*.in")


if __name__ == "__main__":
    main()
