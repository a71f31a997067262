"""Runs that are killed before their ranks meet, and at every point of saving.

Nothing complete is lost, no process is left over, and the end is the same bit for bit.

`nox -s kills` does it a thousand times at random instants.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support import kills
from tests.support.kills import Run
from tests.test_smoke_backends import WAYS, Make, make  # noqa: F401  (a fixture)

OPTIONS = "--max_steps 40 --log_every_steps 5 --save_every_steps 2 --keep_last 2"
TMP, NAME = "step-.tmp", "step-"
OF_MAIN = [
    "state",
    "state written",
    "write model.json",
    "write progress.json",
    "write MANIFEST.json",
    f"flush {TMP}",
    f"rename {TMP} {NAME}",
    "flush {run}",
    "write latest.tmp",
    "replace latest",
    f"rename {NAME} {TMP}",
    f"remove {TMP}",
]
OF_THE_OTHER = ["state", "state written"]
WHOM = ("rank", "launcher", "all")
FEW = ["state written", "write MANIFEST.json", f"rename {TMP} {NAME}", "write latest.tmp", f"rename {NAME} {TMP}"]
KINDS = {
    "ddp": ("ddp", "", OF_MAIN, OF_THE_OTHER),
    "ddp-async": ("ddp", "--async_save true", OF_MAIN, OF_THE_OTHER[1:]),
    "zero2": ("zero2", "", FEW, OF_THE_OTHER),
    "zero3": ("zero3", "", FEW, OF_THE_OTHER),
    "fsdp": ("fsdp", "", FEW, OF_THE_OTHER),
}


@pytest.fixture(scope="module")
def whole(make: Make) -> Callable[[str], Run]:  # noqa: F811
    """The run of a way that went to its end in one go."""
    done: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in done:
            way = WAYS[name]
            project = make(way.backend, way.config)
            kills.prepare(project)
            one = Run(project, "whole", OPTIONS)
            assert one.end(one.start()) == 0, one.said()
            done[name] = one
        return done[name]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_point(whole: Callable[[str], Run], kind: str):
    name, options, of_main, of_the_other = KINDS[kind]
    expected = whole(name)
    run = replace(expected, name=f"killed-{kind}", options=f"{OPTIONS} {options}")
    points = ["0:launcher:meet", "1:launcher:meet"]
    points += [f"0:{WHOM[i % 3]}:{point}" for i, point in enumerate(of_main)]
    points += [f"1:{WHOM[i % 3]}:{point}" for i, point in enumerate(of_the_other)]
    complete = 0
    for point in points:
        process = run.start(point.format(run=run.name))
        code = run.end(process)
        assert code != 0 and run.reached.exists(), f"{point} was not reached: {run.said()}"
        complete = run.check_nothing_is_lost(complete, point)
    assert run.end(run.start()) == 0, run.said()
    assert run.result() == expected.result()
    shutil.rmtree(run.folder)


def test_kills_at_random_instants_are_real(whole: Callable[[str], Run]):
    """What `nox -s kills` does, three times."""
    expected = whole("ddp")
    run = replace(expected, name="random")
    generator = random.Random(0)
    seen = [kills.kill_at_a_random_instant(run, 6, generator) for _ in range(3)]
    assert all((code == 0) == (whom == "nobody") for whom, code in seen), seen
    assert run.end(run.start()) == 0, run.said()
    assert run.result() == expected.result()
