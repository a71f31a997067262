"""Resolve requirements/*.in into includes/lock/ and the pins of this repository.

    python tools/lock.py             resolve; versions that still fit stay as they are
    python tools/lock.py --upgrade   resolve anew
    python tools/lock.py --check     say whether the inputs changed since the last resolution

All groups of the generated project are resolved together, for Linux and macOS and every Python from 3.11 on, so that
any sum of groups fits. packages.txt holds them all, parted by empty lines; groups.jinja says which group needs which.
One file, since Copier clones and reads hundreds slowly.
torch and torchvision are left out: they come with the image, or from `make setup`.
"""

import argparse
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from packaging.markers import Marker

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCK = ROOT / "includes" / "lock"
PACKAGES = LOCK / "packages.txt"

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("linux", "darwin")
MACHINES = ("x86_64", "aarch64", "arm64")

GROUPS = ("base", "dev", "tensorboard", "wandb", "mlflow", "trackio", "jupyter")
OWN = ("tools", "tests")  # this repository's pins: requirements/<name>.in → requirements/<name>.txt
LEFT_OUT = ("torch", "torchvision")

REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==[^ ]+(?: ; (?P<marker>[^\\]+?))?(?: \\)?$")


def compile_lock(inputs: list[Path], output: Path, *arguments: str) -> None:
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", PYTHONS[0]]
    command += ["--fork-strategy", "fewest", "--no-annotate", "--no-header", "--output-file", str(output)]
    result = subprocess.run([*command, *arguments, *map(str, inputs)], check=False, stdout=subprocess.DEVNULL)
    if result.returncode:
        sys.exit(f"error: uv found no versions for {', '.join(path.name for path in inputs)}; its reasons are above.")


def blocks(lock: str) -> dict[str, str]:
    """Name → its lines, without packages that no supported machine installs."""
    environments = [
        {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": platform,
            "platform_system": platform.capitalize(),
            "platform_machine": machine,
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        for python, platform, machine in itertools.product(PYTHONS, PLATFORMS, MACHINES)
    ]
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", lock.strip()):
        match = REQUIREMENT.match(block.splitlines()[0])
        if match is None:
            sys.exit(f"error: cannot read the line {block.splitlines()[0]!r} that uv wrote.")
        marker = match["marker"]
        if marker is None or any(Marker(marker).evaluate(environment) for environment in environments):
            found[match["name"]] = block + "\n"
    return found


def torch_releases() -> list[tuple[str, str]]:
    """The pairs of torch and torchvision in the stack table."""
    environment = Environment(loader=FileSystemLoader(ROOT), autoescape=True)
    stacks = environment.get_template("includes/stacks.jinja").make_module().__dict__["stacks"]
    return sorted({(row["torch"], row["torchvision"]) for row in stacks.values()})


def digest() -> str:
    """One hash of all that the resolution is made from."""
    settings = (PYTHONS, PLATFORMS, MACHINES, GROUPS, OWN, LEFT_OUT, torch_releases())
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
        compile_lock(list(inputs.values()), everything, "--generate-hashes", "--override", str(override))
        packages = blocks(everything.read_text())

        # Without torch's own marker line: it would refuse every release but the newest.
        locked = Path(scratch, "locked.txt")
        locked.write_text("".join(packages.values()))
        check_stacks(locked, Path(scratch))

        groups = {}
        for group, path in inputs.items():
            part = Path(scratch, f"{group}.txt")
            compile_lock([path], part, "--override", str(override), "--constraint", str(locked))
            groups[group] = sorted(blocks(part.read_text()).keys() & packages.keys())

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
