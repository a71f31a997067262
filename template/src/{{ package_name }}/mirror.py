"""A second home for the checkpoints of a run, wherever fsspec reaches: s3://, gs://, another disk.

The checkpoint volume stays the one that counts. After a save the main process copies what is new,
in the background; when that is slower than the saves, it leaves some out. A checkpoint is complete
or absent there too, since its manifest is copied last and removed first. A run that finds itself on
an empty volume goes on from there.
"""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from .checkpoint import (
    BEST,
    LATEST,
    MANIFEST,
    complete_checkpoints,
    files_below,
    find_damage,
    point,
    read_pointers,
    retired,
)
from .errors import UserError
from .logs import logger


class Mirror:
    """The copy of one run.

    Args:
        url: of the folder for all runs, as fsspec understands it.
        keep_last, keep_every: what stays there, as on the checkpoint volume.
    Raises: UserError when there is no library for this kind of storage.
    """

    def __init__(self, url: str, run_name: str, keep_last: int, keep_every: int) -> None:
        self.url = f"{url.rstrip('/')}/{run_name}"
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._copying: Future[None] | None = None
        self._storage: Any
        try:
            self._storage, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"mirror {url} cannot be used ({error}): add the library for it to "
                "requirements/project.in, or take another place"
            ) from error

    def follow(self, run_dir: Path) -> None:
        """Copy in the background what is new, unless the last copy is still under way."""
        if self._copying is None or self._copying.done():
            executor = ThreadPoolExecutor(1, "mirror")
            self._copying = executor.submit(self._copy, run_dir)
            executor.shutdown(wait=False)

    def finish(self, run_dir: Path) -> None:
        """Wait until everything is copied."""
        if self._copying is not None:
            self._copying.result()
        self._copy(run_dir)

    def fetch(self, run_dir: Path) -> None:
        """Bring the newest checkpoint here, and the best, if there is none as new.

        Raises: UserError when the mirror cannot be read, or what it has is damaged: starting afresh
            beside it would be a silent loss.
        """
        try:
            there = self._complete()
            here = [folder.name for folder in complete_checkpoints(run_dir)]
            if not there or (here and here[-1] >= there[-1]):
                return
            pointed = {LATEST: there[-1], BEST: self._read(BEST)}
            for pointer, name in pointed.items():
                if name in there:
                    if name not in here:
                        self._get(name, run_dir)
                        here.append(name)
                    point(run_dir / pointer, name)
        except UserError:
            raise
        except Exception as error:  # of any storage's own library
            raise UserError(
                f"mirror {self.url} cannot be read ({type(error).__name__}: {error}): make it "
                "reachable, or start without mirror"
            ) from error
        logger.info(f"fetched {there[-1]} from {self.url}")

    def _copy(self, run_dir: Path) -> None:
        try:
            there = self._complete()
            for folder in complete_checkpoints(run_dir):
                with suppress(FileNotFoundError):  # pruned meanwhile
                    self._put(folder, folder.name in there)
            there = self._complete()
            pointed = read_pointers(run_dir)
            kept = {folder.name for folder in pointed.values()}
            for pointer, target in pointed.items():
                if target.name in there:
                    self._storage.pipe_file(f"{self._root}/{pointer}", target.name.encode())
            for name in retired(there, self.keep_last, self.keep_every, kept):
                self._storage.rm_file(f"{self._root}/{name}/{MANIFEST}")
                self._storage.rm(f"{self._root}/{name}", recursive=True)
        except Exception as error:  # of any storage's own library
            logger.warning(
                f"could not copy to {self.url} ({type(error).__name__}: {error}); {run_dir} has "
                "the checkpoint, and the copy is tried again after the next one"
            )

    def _complete(self) -> list[str]:
        """Names of the complete checkpoints there, oldest first."""
        self._storage.invalidate_cache()
        found = self._storage.glob(f"{self._root}/step-*/{MANIFEST}")
        return sorted(str(path).split("/")[-2] for path in found)

    def _read(self, pointer: str) -> str:
        try:
            return str(self._storage.cat_file(f"{self._root}/{pointer}").decode()).strip()
        except FileNotFoundError:
            return ""

    def _put(self, folder: Path, is_there: bool) -> None:
        target = f"{self._root}/{folder.name}"
        if is_there:
            if self._storage.cat_file(f"{target}/{MANIFEST}") == (folder / MANIFEST).read_bytes():
                return
            self._storage.rm_file(f"{target}/{MANIFEST}")  # the same step of another course
        files = [file for file in files_below(folder) if file.name != MANIFEST]
        for file in [*files, folder / MANIFEST]:
            remote = f"{target}/{file.relative_to(folder).as_posix()}"
            self._storage.makedirs(remote.rpartition("/")[0], exist_ok=True)
            self._storage.put_file(str(file), remote)

    def _get(self, name: str, run_dir: Path) -> None:
        temporary = run_dir / f"{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        source = f"{self._root}/{name}"
        for remote in self._storage.find(source):
            local = temporary / str(remote).partition(f"{name}/")[2]
            local.parent.mkdir(parents=True, exist_ok=True)
            self._storage.get_file(remote, str(local))
        damage = find_damage(temporary)
        if damage:
            raise UserError(
                f"{self.url}/{name} is damaged ({damage}): remove it there, or start without mirror"
            )
        temporary.rename(run_dir / name)
