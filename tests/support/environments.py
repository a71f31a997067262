"""The virtual environments that rendered projects run in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import yaml

import bootstrap

# Answers whose packages nobody else has. Accelerate imports DeepSpeed wherever it finds it, and that MLflow: in one
# environment for all, each rank of each run would pay for it with seconds.
OWN_PACKAGES = {"backend": {"deepspeed"}, "precision": {"fp8"}, "tracker": {"mlflow", "trackio", "wandb"}}


def venv_for(project: Path) -> Path:
    """Where the project's `make setup` goes, filled with what other environments have already."""
    file = project / ".copier-answers.yml"
    answers = yaml.safe_load(file.read_text()) if file.exists() else {}
    own = [answers[key] for key, values in OWN_PACKAGES.items() if answers.get(key) in values]
    venv = bootstrap.TRAINING_VENV
    if not own:
        return venv
    special = venv.with_name("-".join([venv.name, *own]))
    if not special.exists() and (venv / ".setup-stamp").exists():
        copy_venv(venv, special)
    return special


def copy_venv(venv: Path, copy: Path) -> None:
    """The same packages, which are gigabytes, by links: whoever installs others replaces files and changes none."""
    shutil.copytree(venv, copy, symlinks=True, copy_function=os.link)
    (copy / ".setup-stamp").unlink()
    for script in (copy / "bin").iterdir():
        if script.is_symlink() or not (content := script.read_bytes()).startswith(b"#!"):
            continue
        script.unlink()
        script.write_bytes(content.replace(bytes(venv), bytes(copy)))
        script.chmod(0o755)
