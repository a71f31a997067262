"""fp8 on two CPU processes, where torchao's operations run too, slowly: a small model of text, a few steps.

That products of 8 bits are right is shown by losses next to those of bf16; that they are there, by losses that differ.
How fast they are only a GPU can show: `make gpu-check`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.test_smoke import run
from tests.test_smoke_backends import TEXT, Make, change, export_latest, make, rows  # noqa: F401  (a fixture)

STEPS = 12
SMALL = "--model.width 32 --model.layers 1 --model.dropout 0 --data.file LICENSE --data.length 32"
OPTIONS = f"--config configs/text.yaml --run_name run --global_batch_size 8 --learning_rate 0.01 {SMALL}"


def learn(folder: Path, steps: int) -> str:
    return run(f"./launch.sh --cpu train {OPTIONS} --max_steps {steps} --log_every_steps 1", folder)


def losses(folder: Path) -> list[float]:
    found = rows(folder, "train")
    assert [int(row["step"]) for row in found] == list(range(1, STEPS + 1))
    return [float(row["loss"]) for row in found]


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_learns_what_bf16_learns(make: Make, backend: str):  # noqa: F811
    found = {}
    for precision in ("bf16", "fp8"):
        folder = make(f"{backend}-fp8", {"mixed_precision": precision})
        for file in TEXT.glob("*.py"):
            shutil.copy(file, folder / "src" / "my_project")
        shutil.copy(TEXT / "smoke.yaml", folder / "configs" / "text.yaml")
        if precision == "bf16":
            learn(folder, STEPS)
        else:
            # The rendered settings, which the twin for CPUs leaves out.
            settings = yaml.safe_load((folder / "accelerate_config.yaml").read_text())["fp8_config"]
            twin = folder / "accelerate_config.cpu.yaml"
            twin.write_text(twin.read_text() + yaml.safe_dump({"fp8_config": settings}))
            output = learn(folder, STEPS // 2)
            assert "requested: fp8, launched: fp8, effective: fp8 in 3 of 5 linear layers, else bf16" in output
            assert "going on from" in learn(folder, STEPS)
        found[precision] = losses(folder)
    assert found["fp8"] == pytest.approx(found["bf16"], abs=0.02)
    assert found["fp8"] != found["bf16"]
    assert found["fp8"][-1] < found["fp8"][0] - 1
    assert {kind for kind, _ in export_latest(folder, OPTIONS.replace(" --run_name run", "")).values()} == {
        "torch.float32"
    }
