"""Checkpoints that are complete or absent.

    <run>/step-00001000/state/…        model, optimizer, random states of every rank
                        model.json     names and shapes of the model's weights
                        progress.json  where the run stands
                        MANIFEST.json  size and hash of each file: what makes it complete
    <run>/latest · best                names of two of them

All ranks save into `step-….tmp`; files are flushed and hashed; the folder is renamed; the pointers
are swapped; only then are older ones removed. A machine may die between any two of these. With
`async_save` a copy of the state is written while training goes on, by a thread of the main process.
"""

import copy
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from . import backend
from .collective import FailTogether
from .errors import UserError
from .logs import logger
from .staging import Staging

if TYPE_CHECKING:
    from .mirror import Mirror

MANIFEST = "MANIFEST.json"
PROGRESS = "progress.json"
MODEL = "model.json"
STATE = "state"
LATEST = "latest"
BEST = "best"
ASIDE = ".aside"
FORMAT = 1

Hashes = dict[str, dict[str, Any]]  # size and hash by the file's name


@dataclass
class Progress:
    """Where a run stands, between two optimizer steps."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0
    position: int = 0  # samples of this epoch seen by all processes together
    samples_seen: int = 0
    evaluated_step: int | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of that evaluation
    best_step: int | None = None
    best_value: float | None = None
    interval_forward_passes: int = 0  # since the last row of metrics.csv
    interval_sums: list[list[float]] = field(default_factory=list)  # loss, metric of each rank
    world_size: int = 1
    layout: str = ""  # of the state's files; unknown in checkpoints of earlier versions
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        model: the prepared one.
        run_dir: folder of the run on the checkpoint volume.
        keep_last: newest ones to keep; the best one stays besides.
        keep_every: keep those at multiples of this step too; 0 = none.
        staging: memory for a copy of the state, to save in the background; None = not.
        mirror: where complete checkpoints are copied to; None = nowhere.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        run_dir: Path,
        keep_last: int,
        keep_every: int,
        staging: Staging | None = None,
        mirror: "Mirror | None" = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.run_dir = run_dir
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.resumed_from: Path | None = None
        self.staging = staging
        self.mirror = mirror
        self._under_way: tuple[Path, Future[None] | None] | None = None  # only main has a future

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint of this step. Collective. Returns its folder.

        In the background, with `staging`, as soon as a copy of the state is in memory; before that,
        this waits for the save before. What an earlier start left of the same step is replaced: it
        may be damaged, not evaluated yet, or of another course of the run.
        Raises: UserError when the volume is full or cannot be written; what was complete stays.
        """
        self.wait()
        folder = self.run_dir / step_name(progress.step)
        temporary = folder.with_suffix(".tmp")
        try:
            self._make_room(temporary)
            if self.staging is not None:
                self._save_in_background(self.staging, temporary, folder, progress)
            else:
                self._save_now(temporary, folder, progress)
        except UserError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return folder

    def wait(self) -> None:
        """Wait for the save in the background, if there is one. Collective.

        Raises: UserError when it failed; what was complete stays.
        """
        if self._under_way is None:
            return
        folder, future = self._under_way
        self._under_way = None
        try:
            with self._together(f"could not save {folder}"):
                if future is not None:
                    future.result()
        except UserError:
            shutil.rmtree(folder.with_suffix(".tmp"), ignore_errors=True)
            raise

    def finish(self) -> None:
        """Wait until what was saved is where it belongs, before the end. Collective."""
        self.wait()
        if self.mirror is not None and self.accelerator.is_main_process:
            self.mirror.finish(self.run_dir)

    def restore(self, resume: str) -> Progress | None:
        """Load a checkpoint into what was prepared. Collective.

        Args:
            resume: "auto" takes the newest complete and intact one, or starts fresh where there is
                none; "never" starts fresh; anything else is the folder of one checkpoint.
        Returns: where to go on, or None to start fresh.
        Raises: UserError when a named checkpoint cannot be had, or none of those here is intact.
        """
        found: list[Any] = [None, None]  # folder, message of what is wrong
        if self.accelerator.is_main_process:
            try:
                found[0] = self._choose(resume)
            except UserError as error:
                found[1] = str(error)
        broadcast_object_list(found)
        if found[1]:
            raise UserError(found[1])
        if found[0] is None:
            return None
        folder = Path(found[0])
        progress = read_progress(folder)
        load_state(self.accelerator, self.model, folder)
        self.resumed_from = folder
        if resume != "auto":
            with self._together(f"could not update {self.run_dir}"):
                if self.accelerator.is_main_process:
                    self._set_aside_later(folder, progress)
        return progress

    def _make_room(self, temporary: Path) -> None:
        """An empty folder to write to, on a volume with as much space as the checkpoint before."""
        with self._together(f"could not save {temporary.with_suffix('')}"):
            if self.accelerator.is_main_process:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                needed = max(map(size_of, complete_checkpoints(self.run_dir)[-1:]), default=0)
                if shutil.disk_usage(self.run_dir).free < needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                (temporary / STATE).mkdir(parents=True)
        backend.share_buffers(self.accelerator, self.model)

    def _save_now(self, temporary: Path, folder: Path, progress: Progress) -> None:
        """Everything into `temporary`, onto the disk, and only then the name `folder`."""
        what = f"could not save {folder}"
        is_main = self.accelerator.is_main_process
        with self._together(what), backend.saving(self.accelerator):
            self.accelerator.save_state(str(temporary / STATE), safe_serialization=True)
        shapes = backend.shapes(self.accelerator, self.model)
        with self._together(what):
            if is_main:
                _write_facts(temporary, shapes, progress)
        # Each file is flushed and hashed by one rank.
        with self._together(what):
            rank, num_processes = self.accelerator.process_index, self.accelerator.num_processes
            share = _flush_and_hash(temporary, files_below(temporary)[rank::num_processes])
        shares = gather_object([share])
        hashes = {name: entry for part in shares for name, entry in part.items()}
        with self._together(what):
            if is_main:
                self._complete(temporary, folder, hashes)
        with self._together(f"could not update {self.run_dir}"):
            if is_main:
                self._point_and_prune(folder, progress.best_step)

    def _save_in_background(
        self, staging: Staging, temporary: Path, folder: Path, progress: Progress
    ) -> None:
        with self._together(f"could not save {folder}"):
            write_state = staging.stage(self.accelerator, self.model, temporary / STATE)
        shapes = backend.shapes(self.accelerator, self.model)
        facts = copy.deepcopy(progress)

        def finish() -> None:
            write_state()
            _write_facts(temporary, shapes, facts)
            hashes = _flush_and_hash(temporary, files_below(temporary))
            self._complete(temporary, folder, hashes)
            self._point_and_prune(folder, facts.best_step)

        future = None
        if self.accelerator.is_main_process:
            executor = ThreadPoolExecutor(1, "save")
            future = executor.submit(finish)
            executor.shutdown(wait=False)
        self._under_way = (folder, future)

    def _complete(self, temporary: Path, folder: Path, hashes: Hashes) -> None:
        """The manifest, and then the name: from here on the checkpoint is there."""
        _write(temporary / MANIFEST, _manifest_text(dict(sorted(hashes.items()))))
        for inner in [temporary, *filter(Path.is_dir, temporary.rglob("*"))]:
            _flush(inner)
        replaced = folder.with_suffix(".old")
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        temporary.rename(folder)
        _flush(self.run_dir)
        shutil.rmtree(replaced, ignore_errors=True)

    def _point_and_prune(self, folder: Path, best_step: int | None) -> None:
        point(self.run_dir / LATEST, folder.name)
        if best_step is not None and is_complete(best := self.run_dir / step_name(best_step)):
            point(self.run_dir / BEST, best.name)
        self._prune()
        if self.mirror is not None:
            self.mirror.follow(self.run_dir)

    def _choose(self, resume: str) -> str | None:
        if resume == "never":
            if complete_checkpoints(self.run_dir):
                raise UserError(
                    f"{self.run_dir} holds checkpoints and --resume never would overwrite them: "
                    "give another run_name, or remove the folder"
                )
            return None
        if resume != "auto":
            return str(open_intact(self.run_dir, resume))
        if self.mirror is not None:
            self.mirror.fetch(self.run_dir)
        for leftover in self.run_dir.glob("step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        for replaced in self.run_dir.glob("step-*.old"):
            if replaced.with_suffix("").exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:  # the machine died between two renames
                replaced.rename(replaced.with_suffix(""))
        candidates = complete_checkpoints(self.run_dir)
        for folder in reversed(candidates):
            problem = find_damage(folder)
            if not problem:
                return str(folder)
            logger.warning(f"{folder} is damaged ({problem}); taking the one before")
        if candidates:
            raise UserError(
                f"no checkpoint in {self.run_dir} is intact: restore one from a copy, or give "
                "another run_name to start again"
            )
        return None

    def _set_aside_later(self, folder: Path, progress: Progress) -> None:
        """Take later steps out of the way: the next start goes on with the course begun here."""
        later = [found for found in complete_checkpoints(self.run_dir) if found > folder]
        if folder.parent != self.run_dir or not later:
            return
        for found in later:
            aside = found.with_suffix(ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            found.rename(aside)
        logger.info(
            f"later checkpoints are now called {later[0].name}{ASIDE} and so on: resume from one "
            "by its folder, or remove them"
        )
        point(self.run_dir / LATEST, folder.name)
        if progress.best_step is not None:
            point(self.run_dir / BEST, step_name(progress.best_step))

    def _together(self, what: str) -> FailTogether:
        return FailTogether(self.accelerator, what, self.run_dir)

    def _prune(self) -> None:
        folders = complete_checkpoints(self.run_dir)
        kept = {read_pointer(self.run_dir / BEST), self.resumed_from}
        names = {folder.name for folder in kept if folder is not None}
        every = [folder.name for folder in folders]
        for name in retired(every, self.keep_last, self.keep_every, names):
            # Out of sight first: a half-removed folder must not look like a checkpoint.
            doomed = (self.run_dir / name).with_suffix(".tmp")
            (self.run_dir / name).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def retired(names: list[str], keep_last: int, keep_every: int, kept: set[str]) -> list[str]:
    """Which of these checkpoints, oldest first, are not kept: `kept` are, whatever their age."""

    def is_milestone(name: str) -> bool:
        return keep_every > 0 and int(name.removeprefix("step-")) % keep_every == 0

    return [name for name in names[:-keep_last] if name not in kept and not is_milestone(name)]


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint; names sort by step."""
    return f"step-{step:08d}"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    return sorted(
        folder
        for folder in run_dir.glob("step-*")
        if folder.name.removeprefix("step-").isdigit() and is_complete(folder)
    )


def is_complete(folder: Path) -> bool:
    """Whether the folder was finished; its content is not looked at."""
    return (folder / MANIFEST).is_file()


def files_below(folder: Path) -> list[Path]:
    """All files of a folder, in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(path.stat().st_size for path in files_below(folder))


def read_pointer(path: Path) -> Path | None:
    """The checkpoint that `latest` or `best` names, if it is there."""
    try:
        folder = path.parent / path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return folder if folder != path.parent and is_complete(folder) else None


def read_pointers(run_dir: Path) -> dict[str, Path]:
    """The checkpoints that `latest` and `best` name, of those that are there."""
    found = {name: read_pointer(run_dir / name) for name in (LATEST, BEST)}
    return {name: folder for name, folder in found.items() if folder is not None}


def resolve(run_dir: Path, name: str) -> Path:
    """The folder meant by "latest", "best", the name of a step, a step, or a path.

    Raises: UserError when there is no complete checkpoint of that name.
    """
    if name in (LATEST, BEST):
        pointed = read_pointer(run_dir / name)
        if pointed is None:
            raise UserError(f"{run_dir} has no {name} checkpoint: train first, or check run_name")
        return pointed
    options = [Path(name), run_dir / name]
    if name.isdigit():
        options.append(run_dir / step_name(int(name)))
    for folder in options:
        if is_complete(folder):
            return folder
    here = ", ".join(folder.name for folder in complete_checkpoints(run_dir)) or "none"
    raise UserError(f"no complete checkpoint at {name}; in {run_dir}: {here}")


def open_intact(run_dir: Path, name: str) -> Path:
    """The folder that `resolve` finds, every file of it checked.

    Raises: UserError when it is missing or damaged.
    """
    folder = resolve(run_dir, name)
    problem = find_damage(folder)
    if problem:
        raise UserError(f"{folder} is damaged ({problem}): take another checkpoint")
    return folder


def find_damage(folder: Path) -> str | None:
    """What differs between a checkpoint's files and its manifest, or None if nothing does."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["digest"] != _digest(files):
            return f"{MANIFEST} was changed"
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
            if _describe(path) != entry:
                return f"{name} has another hash"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def read_progress(folder: Path) -> Progress:
    """Where the run stood; fields that an older version did not write get their defaults."""
    content = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    known = {item.name for item in dataclasses.fields(Progress)}
    return Progress(**{key: value for key, value in content.items() if key in known})


def load_state(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """Load weights and whatever else was prepared. Collective.

    No code is executed, whatever the files hold.
    Raises: UserError when the checkpoint is of another backend or model; it names the first
        parameter of another name or shape.
    """
    progress = read_progress(folder)
    backend.check_layout(accelerator, folder, progress.layout, progress.world_size)
    _check_shapes(folder, backend.shapes(accelerator, model))
    try:
        with backend.loading(accelerator, folder / STATE):
            accelerator.load_state(str(folder / STATE))
    except (RuntimeError, KeyError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        detail = lines[1] if len(lines) > 1 else (lines[0] if lines else type(error).__name__)
        raise _misfit(folder, detail) from error


def _check_shapes(folder: Path, here: dict[str, list[int]]) -> None:
    file = folder / MODEL
    if not file.exists():  # of an earlier version; loading finds out
        return
    there = json.loads(file.read_text(encoding="utf-8"))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise _misfit(
                folder, f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here"
            )


def _misfit(folder: Path, detail: str) -> UserError:
    return UserError(
        f"{folder} does not fit this model and optimizer ({detail}): take the model and "
        "configuration that it was made with, or give another run_name"
    )


def _write_facts(folder: Path, shapes: dict[str, list[int]], progress: Progress) -> None:
    _write(folder / MODEL, json.dumps(shapes, indent=1))
    _write(folder / PROGRESS, json.dumps(dataclasses.asdict(progress), indent=1))


def _flush_and_hash(folder: Path, files: list[Path]) -> Hashes:
    """By name; while the system writes to the disk, the content is read from its memory."""
    with ThreadPoolExecutor(2) as threads:
        flushed = [threads.submit(_flush, path) for path in files]
        hashes = {path.relative_to(folder).as_posix(): _describe(path) for path in files}
        for one in flushed:
            one.result()
    return hashes


def _manifest_text(files: Hashes) -> str:
    return json.dumps({"format": FORMAT, "files": files, "digest": _digest(files)}, indent=1)


def _digest(files: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return {"size": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _blocks(file: Any) -> Iterator[memoryview]:
    buffer = bytearray(1 << 22)
    while count := file.readinto(buffer):
        yield memoryview(buffer)[:count]


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _flush(path: Path) -> None:
    """Have the system put a file or a folder's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(pointer: Path, name: str) -> None:
    """Have `latest` or `best` name this checkpoint, in one operation."""
    temporary = pointer.with_suffix(".tmp")
    _write(temporary, name)
    temporary.replace(pointer)
    _flush(pointer.parent)
