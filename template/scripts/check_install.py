#!/usr/bin/env python3
"""Check what was installed: torch is the one that platform.yaml names, and all packages fit.

Ends with 1 and one sentence for each thing that is wrong.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import yaml


def conflicts(python: str) -> set[str]:
    """What `pip check` says of an interpreter's packages."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    return set((done.stdout + done.stderr).splitlines()) if done.returncode else set()


def check_torch(in_image: bool, want_cuda: bool) -> list[str]:
    """What is wrong with torch and torchvision."""
    try:
        import torch
        import torchvision
    except Exception as error:  # builds that do not belong together fail in many ways
        return [f"torch and torchvision do not work together: {' '.join(str(error).split())}"]
    root = Path(__file__).resolve().parents[1]
    software = yaml.safe_load((root / "platform.yaml").read_text(encoding="utf-8"))["software"]
    problems = []
    for module in (torch, torchvision):
        found, wanted = module.__version__.split("+")[0], software[module.__name__]
        if found != wanted:
            problems.append(f"{module.__name__} is {found}, platform.yaml names {wanted}")
        if in_image and Path(str(module.__file__)).is_relative_to(sys.prefix):
            problems.append(f"{module.__name__} was installed over the base image's")
    if want_cuda and torch.version.cuda != software["cuda"]:
        problems.append(
            f"torch was built for CUDA {torch.version.cuda}, platform.yaml names "
            f"{software['cuda']}: set TORCH_INDEX to an index that has it"
        )
    return problems


def image_python() -> str | None:
    """The base image's interpreter, where this environment lies on top of its packages."""
    lines = Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
    return settings["executable"] if settings["include-system-site-packages"] == "true" else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Check what was installed.")
    parser.add_argument("--cuda", action="store_true", help="torch must be built for CUDA, too")
    arguments = parser.parse_args()

    base = image_python()
    problems = conflicts(sys.executable)
    if problems and base:  # what the base image brings along is not ours to mend
        problems -= conflicts(base)
    problems.update(check_torch(base is not None, arguments.cuda))
    for problem in sorted(problems):
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
