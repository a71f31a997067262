"""What keeps checkpoints safe is tested in every project: take it away, and a test of the project fails.

So that a person who changes the training code is told. Each change is made in a copy of the default project.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

import pytest

from tests.test_smoke import environment
from tests.test_smoke_backends import Make, make  # noqa: F401  (a fixture)


@dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    test: str


CHECKPOINT = "tests/test_checkpoint.py"
MUTATIONS = {
    "the rename comes before the flush": Mutation(
        "checkpoint.py",
        """        for inner in [temporary, *filter(Path.is_dir, temporary.rglob("*"))]:
            _flush(inner)
        replaced = folder.with_suffix(".old")
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        temporary.rename(folder)
""",
        """        replaced = folder.with_suffix(".old")
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        temporary.rename(folder)
        for inner in [folder, *filter(Path.is_dir, folder.rglob("*"))]:
            _flush(inner)
""",
        CHECKPOINT,
    ),
    "files are not flushed": Mutation(
        "checkpoint.py", "threads.submit(_flush, path)", "threads.submit(str, path)", CHECKPOINT
    ),
    "the name is not flushed": Mutation("checkpoint.py", "        _flush(self.run_dir)\n", "", CHECKPOINT),
    "older ones go before the new one is there": Mutation(
        "checkpoint.py",
        "        _write(temporary / MANIFEST, _manifest",
        "        for old in complete_checkpoints(self.run_dir):\n            shutil.rmtree(old)\n"
        "        _write(temporary / MANIFEST, _manifest",
        CHECKPOINT,
    ),
    "the pointer comes first": Mutation(
        "checkpoint.py",
        '        replaced = folder.with_suffix(".old")\n        if folder',
        '        point(self.run_dir / LATEST, folder.name)\n'
        '        replaced = folder.with_suffix(".old")\n        if folder',
        CHECKPOINT,
    ),
    "the hash is not checked": Mutation(
        "checkpoint.py", "if _describe(path) != entry:", 'if path.stat().st_size != entry["size"]:', CHECKPOINT
    ),
    "the manifest is not checked": Mutation(
        "checkpoint.py", 'if manifest["digest"] != _digest(files):', "if not files:", CHECKPOINT
    ),
    "one rank does not save": Mutation(
        "checkpoint.py",
        "            self.accelerator.save_state(str(temporary / STATE), safe_serialization=True)\n",
        "            if is_main:\n"
        "                self.accelerator.save_state(str(temporary / STATE), safe_serialization=True)\n",
        "tests/test_train.py::test_run_folder_is_complete",
    ),
    "the copy in memory is no copy": Mutation(
        "staging.py",
        "self._place(value, path).copy_(value.detach(), non_blocking=True)",
        "value.detach()",
        CHECKPOINT,
    ),
    "two saves are under way at a time": Mutation(
        "checkpoint.py", "        self.wait()\n        folder = self", "        folder = self", CHECKPOINT
    ),
    "the order is drawn from the global generator": Mutation(
        "loader.py", "generator = torch.Generator().manual_seed(fold(self.seed, self.epoch))", "generator = None",
        "tests/test_loader.py",
    ),
    "a step's random numbers depend on the start": Mutation(
        "train.py",
        "seed_step(config.seed, accelerator.process_index, progress.step, forward_passes)",
        "pass",
        "tests/test_equivalence.py",
    ),
    "the folder is not locked": Mutation(
        "runfolder.py", "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", CHECKPOINT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_test_of_the_project_fails_when(make: Make, name: str):  # noqa: F811
    mutation = MUTATIONS[name]
    project = make("ddp", {})
    file = project / "src" / "my_project" / mutation.file
    source = file.read_text()
    assert source.count(mutation.old) == 1, f"{mutation.file} has changed: {mutation.old}"
    file.write_text(source.replace(mutation.old, mutation.new))
    done = subprocess.run(
        ["scripts/run.sh", "python", "-m", "pytest", "--exitfirst", "--quiet", mutation.test],
        cwd=project,
        env=environment(project),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert not re.search(r"NameError|SyntaxError|ImportError|ModuleNotFoundError", done.stdout), done.stdout[-3000:]
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
