"""Saving and loading 500 MB of state: the generated project's checkpoints against others' ways.

Runs in a generated project's environment: `python checkpoints.py ROUNDS FOLDER`. Prints seconds of each side, in JSON.
Every side ends with the state on the disk, and its files are removed between two measurements.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from accelerate import Accelerator
from my_project import backend
from my_project.checkpoint import Checkpoints, Progress, find_damage, load_state
from my_project.staging import Staging

WIDTH, LAYERS = 2000, 16  # 256 MB of weights, and as much momentum


def flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main(rounds: int, folder: Path) -> dict[str, list[float]]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.randn(8, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def checkpoints(name: str, staging: Staging | None = None) -> Checkpoints:
        (folder / name).mkdir(exist_ok=True)
        return Checkpoints(accelerator, model, folder / name, 1, 0, staging)

    def torch_save() -> None:
        (folder / "torch").mkdir(exist_ok=True)
        torch.save(state(), folder / "torch" / "state.pt")
        flush(folder / "torch")

    def distributed_checkpoint() -> None:
        dcp.save(state(), checkpoint_id=folder / "dcp", no_dist=True)
        flush(folder / "dcp")

    def accelerate_save_state() -> None:
        accelerator.save_state(str(folder / "accelerate"))
        flush(folder / "accelerate")

    plain, background = checkpoints("plain"), checkpoints("background", Staging(optimizer))

    def hash_files() -> None:
        for path in (folder / "plain").rglob("*.*"):
            if path.is_file():
                xxhash.xxh3_128(path.read_bytes())

    saves: dict[str, Callable[[], object]] = {
        "save": lambda: plain.save(Progress(step=1)),
        "torch.save": torch_save,
        "async_save": lambda: background.save(Progress(step=1)),
        "torch.distributed.checkpoint": distributed_checkpoint,
        "accelerator.save_state": accelerate_save_state,
    }
    saved = folder / "plain" / "step-00000001"

    def load_torch() -> None:
        found = torch.load(folder / "torch" / "state.pt", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    def load() -> None:
        assert find_damage(saved) is None
        load_state(accelerator, model, saved)

    times: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], object]) -> None:
        os.sync()
        started = time.perf_counter()
        action()
        times.setdefault(name, []).append(time.perf_counter() - started)

    for number in range(-1, rounds):  # the first one fills caches, and counts for nothing
        for name in list(saves)[:: 1 if number % 2 else -1]:
            for old in folder.glob("*/*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            measure(name, saves[name])
            if name == "async_save":
                measure("async_save, to its end", background.wait)
        plain.save(Progress(step=1, layout=backend.layout(accelerator)))
        torch_save()
        measure("hash", hash_files)
        for name, action in {"load": load, "torch.load": load_torch}.items():
            measure(name, action)
        if number < 0:
            times.clear()
    end = "async_save, to its end"
    times[end] = [stall + rest for stall, rest in zip(times["async_save"], times[end], strict=True)]
    return times


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    print(json.dumps(main(int(sys.argv[1]), target)))
