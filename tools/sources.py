"""The files of this repository: under version control, or new and not ignored."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def sources(*patterns: str) -> list[str]:
    """Their names relative to the root, sorted; patterns are git's."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    # A file that was deleted but not yet committed is still listed.
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})


def export(folder: Path) -> Path:
    """Copies the sources into a folder, without history."""
    for name in sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder
