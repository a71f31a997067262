"""Each way to share a model among processes, trained for real on two of this CPU.

FSDP 2 shards there through the test-only seam in tests/fsdp_on_cpu, DeepSpeed runs its own engine over gloo. That a way
learns is shown by its accuracy on test data, that it learns what DDP learns by its losses.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import bootstrap
from tests.support.render import copier_command, data_arguments, export
from tests.test_smoke import metrics, run

ANSWERS = {
    "ddp": {},
    "fsdp": {"backend": "fsdp", "sharding": "full"},
    "deepspeed": {"backend": "deepspeed", "sharding": "zero2"},
    "ddp-fp8": {"precision": "fp8", "gpu": "h100"},
    "fsdp-fp8": {"precision": "fp8", "gpu": "h100", "backend": "fsdp", "sharding": "full"},
}
# A model whose results do not depend on how a batch is divided: no normalisation over it. Two layers share weights.
TEXT = bootstrap.ROOT / "docs" / "examples" / "text"

# Real digits; a model that learns nothing gets 10 %.
TRAIN = "train --config configs/smoke.yaml --run_name run --epochs 3 --log_every_steps 8"
ACCURACY = 0.9


@dataclass(frozen=True)
class Way:
    """How to run: what accelerate_config.cpu.yaml says besides the answers, and options of the run."""

    backend: str
    config: dict[str, Any] = field(default_factory=dict)
    options: str = ""
    like: str = "ddp"  # the way that it must agree with
    tells_norm: bool = True  # of the gradients


BF16 = {"mixed_precision": "bf16"}
ADAM = "--optimizer adamw --learning_rate 0.003"
ACCUMULATED = "--gradient_accumulation_steps 4"


def zero(stage: int, **others: Any) -> dict[str, Any]:
    gathered = {"zero3_save_16bit_model": True} if stage == 3 else {}
    return {"deepspeed_config": {"zero_stage": stage, **gathered, **others}}


def fsdp(**others: Any) -> dict[str, Any]:
    return {"fsdp_config": {f"fsdp_{name}": value for name, value in others.items()}}


OFFLOADED = {"offload_optimizer_device": "cpu"}
ALL_OFFLOADED = OFFLOADED | {"offload_param_device": "cpu"}
WHOLE_STATE = {"state_dict_type": "FULL_STATE_DICT"}
# Four processes as two machines with two GPUs each: split among the two, and copied to the other two.
HYBRID = {
    "num_processes": 4,
    "parallelism_config": {
        f"parallelism_config_{kind}_size": size
        for kind, size in {"cp": 1, "dp_replicate": 2, "dp_shard": 2, "tp": 1}.items()
    },
}
WAYS = {
    "ddp": Way("ddp"),
    "ddp-bf16": Way("ddp", BF16, like="ddp-bf16"),
    "ddp-accumulated": Way("ddp", options=ACCUMULATED, like="ddp-accumulated"),
    "ddp-compiled": Way("ddp", options="--compile true --compile_backend eager"),
    "ddp-adam": Way("ddp", options=ADAM, like="ddp-adam"),
    # Not among the answers. In fp32 DeepSpeed clips without telling the norm.
    "zero0": Way("deepspeed", zero(0), tells_norm=False),
    "zero0-bf16": Way("deepspeed", zero(0) | BF16, like="ddp-bf16"),
    "zero1": Way("deepspeed", zero(1)),
    "zero2": Way("deepspeed", zero(2)),
    "zero3": Way("deepspeed", zero(3)),
    "zero1-bf16": Way("deepspeed", zero(1) | BF16, like="ddp-bf16"),
    "zero2-bf16": Way("deepspeed", zero(2) | BF16, like="ddp-bf16"),
    "zero3-bf16": Way("deepspeed", zero(3) | BF16, like="ddp-bf16"),
    "zero1-accumulated": Way("deepspeed", zero(1), ACCUMULATED, like="ddp-accumulated"),
    "zero2-accumulated": Way("deepspeed", zero(2), ACCUMULATED, like="ddp-accumulated"),
    "zero3-compiled": Way("deepspeed", zero(3), "--compile true --compile_backend eager"),
    "zero2-offloaded": Way("deepspeed", zero(2, **OFFLOADED)),
    "zero2-offloaded-adam": Way("deepspeed", zero(2, **OFFLOADED), ADAM, like="ddp-adam"),
    "zero2-offloaded-bf16": Way("deepspeed", zero(2, **OFFLOADED) | BF16, like="ddp-bf16"),
    "zero3-all-offloaded": Way("deepspeed", zero(3, **ALL_OFFLOADED)),
    "zero3-all-offloaded-bf16": Way("deepspeed", zero(3, **ALL_OFFLOADED) | BF16, like="ddp-bf16"),
    "fsdp": Way("fsdp"),
    "fsdp-bf16": Way("fsdp", BF16, like="ddp-bf16"),
    "fsdp-whole-state": Way("fsdp", fsdp(**WHOLE_STATE)),
    "fsdp-whole-state-bf16": Way("fsdp", fsdp(**WHOLE_STATE) | BF16, like="ddp-bf16"),
    "fsdp-grad-op": Way("fsdp", fsdp(reshard_after_forward=False)),
    "fsdp-grad-op-bf16": Way("fsdp", fsdp(reshard_after_forward=False) | BF16, like="ddp-bf16"),
    "fsdp-accumulated": Way("fsdp", options=ACCUMULATED, like="ddp-accumulated"),
    "fsdp-compiled": Way("fsdp", options="--compile true --compile_backend eager"),
    "fsdp-checkpointed": Way("fsdp", fsdp(activation_checkpointing=True)),
}

# Sums are added up in another order, and with 16 bits in other places. Where a maximum changes its place for it, the
# model's course changes too, so two epochs later only the level of the losses is the same.
EARLY = 16  # steps
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}
LEVEL = {"fp32": 0.1, "bf16": 0.15}  # of losses that start near 2.3 and end near 0.15
FIRST_NORM = {"fp32": 5e-3, "bf16": 0.1}  # of gradients, relative

Make = Callable[[str, dict[str, Any]], Path]


def merge(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with these changes, nested ones too."""
    merged = dict(config)
    for key, value in changes.items():
        merged[key] = merge(config.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def change(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "accelerate_config.cpu.yaml"
    file.write_text(yaml.safe_dump(merge(yaml.safe_load(file.read_text()), changes)))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Copies the project of a backend, which is rendered and set up on its first use, and changes its configuration."""
    template = export(tmp_path_factory.mktemp("template") / "copier-accelerate")
    projects: dict[str, Path] = {}

    def make(backend: str, changes: dict[str, Any]) -> Path:
        if backend not in projects:
            projects[backend] = tmp_path_factory.mktemp(backend) / "project"
            answers = data_arguments(ANSWERS[backend])
            run(
                " ".join(copier_command("copy", "--quiet", "--defaults", *answers, template, projects[backend])),
                template,
            )
            run("make setup", projects[backend])
        folder = tmp_path_factory.mktemp(f"{backend}-way") / "project"
        shutil.copytree(projects[backend], folder)
        change(folder, changes)
        return folder

    return make


@pytest.fixture(scope="module")
def trained(make: Make) -> Callable[[str], Path]:
    """The project in which a way was trained."""
    done: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in done:
            way = WAYS[name]
            folder = make(way.backend, way.config)
            run(f"./launch.sh --cpu {TRAIN} {way.options}", folder)
            done[name] = folder
        return done[name]

    return train


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    return [row for row in metrics(folder / "checkpoints" / "run") if row["split"] == split]


@pytest.mark.parametrize("name", WAYS)
def test_learns_what_ddp_learns(trained: Callable[[str], Path], name: str):
    way, folder = WAYS[name], trained(name)
    assert max(float(row["accuracy"]) for row in rows(folder, "eval")) > ACCURACY

    precision = "bf16" if "mixed_precision" in way.config else "fp32"
    log = (folder / "checkpoints" / "run" / "train.log").read_text()
    assert f"effective: {'bf16' if precision == 'bf16' else 'no'}" in log
    assert {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed ZeRO"}[way.backend] in log

    expected = rows(trained(way.like), "train")
    found = rows(folder, "train")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row["learning_rate"] == wanted["learning_rate"]
        if int(row["step"]) <= EARLY:
            assert float(row["loss"]) == pytest.approx(float(wanted["loss"]), rel=TOLERANCE[precision])
        assert float(row["loss"]) == pytest.approx(float(wanted["loss"]), abs=LEVEL[precision])
    if way.tells_norm:
        norms = [float(rows[0]["grad_norm"]) for rows in (found, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=FIRST_NORM[precision])
    else:
        assert found[0]["grad_norm"] == ""


def saved(folder: Path) -> dict[str, Any]:
    """The exported weights, as lists of numbers by name."""
    code = (
        "import json, sys; from safetensors.torch import load_file; weights = load_file(sys.argv[1]); "
        "print(json.dumps({name: [str(one.dtype), one.double().flatten().tolist()] for name, one in weights.items()}))"
    )
    exported = folder / "checkpoints" / "run" / "export" / "model.safetensors"
    python = bootstrap.TRAINING_VENV / "bin" / "python"
    return json.loads(subprocess.check_output([python, "-c", code, exported], text=True))


def export_latest(folder: Path, options: str = "--config configs/smoke.yaml") -> dict[str, Any]:
    run(f"./launch.sh --cpu export --checkpoint latest --run_name run {options}", folder)
    return saved(folder)


@pytest.mark.parametrize(
    "name",
    ["zero0-bf16", "zero2-bf16", "zero3-bf16", "zero3-all-offloaded", "fsdp-bf16", "fsdp-checkpointed"],
)
def test_export_is_a_whole_model_in_32_bits(trained: Callable[[str], Path], name: str):
    expected, found = export_latest(trained("ddp")), export_latest(trained(name))
    assert {key: (kind, len(values)) for key, (kind, values) in found.items()} == {
        key: (kind, len(values)) for key, (kind, values) in expected.items()
    }
    if name.endswith("bf16"):
        weights = [value for kind, values in found.values() if kind == "torch.float32" for value in values]
        assert any(len(struct.pack(">f", one).rstrip(b"\0")) > 2 for one in weights), "more than 16 bits"


@pytest.mark.parametrize("name", ["zero3-bf16", "fsdp-bf16"])
def test_evaluation_of_a_checkpoint_gives_its_scores(trained: Callable[[str], Path], name: str):
    folder = trained(name)
    command = "evaluate --checkpoint latest --config configs/smoke.yaml --run_name run"
    output = run(f"./launch.sh --cpu {command}", folder)
    [accuracy] = re.findall(r"test accuracy ([\d.]+)", output)
    assert float(accuracy) == pytest.approx(float(rows(folder, "eval")[-1]["accuracy"]), abs=1e-4)


TEXT_OPTIONS = "--config configs/text.yaml"  # of adamw: a checkpoint says itself by which optimizer it was made
TEXT_RUN = f"train {TEXT_OPTIONS} --run_name run --optimizer sgd --learning_rate 0.5 --log_every_steps 1"
STEPS = 6


def learn_text(folder: Path, options: str = "", code: int = 0) -> str:
    for file in TEXT.glob("*.py"):
        shutil.copy(file, folder / "src" / "my_project")
    shutil.copy(TEXT / "smoke.yaml", folder / "configs" / "text.yaml")
    return run(f"./launch.sh --cpu {TEXT_RUN} --max_steps {STEPS} {options}", folder, code)


@pytest.fixture(scope="module")
def text_by_ddp(make: Make) -> dict[str, Any]:
    folder = make("ddp", {})
    learn_text(folder, "--model.dropout 0")
    return export_latest(folder, TEXT_OPTIONS)


@pytest.mark.parametrize(
    ("name", "processes", "changes"),
    [
        ("fsdp", 1, {}),
        ("fsdp", 2, {}),
        ("fsdp", 4, HYBRID),
        ("zero1", 2, {}),
        ("zero2", 1, {}),
        ("zero2", 2, {}),
        ("zero3", 2, {}),
    ],
)
def test_weights_are_those_of_ddp(
    make: Make, text_by_ddp: dict[str, Any], name: str, processes: int, changes: dict[str, Any]
):
    """Whatever the number of processes, and of forward passes that a step is divided into."""
    way = WAYS[name]
    folder = make(way.backend, way.config | {"num_processes": processes} | changes)
    learn_text(folder, f"--model.dropout 0 --gradient_accumulation_steps {max(2 // processes, 1)}")
    found = export_latest(folder, TEXT_OPTIONS)
    assert found.keys() == text_by_ddp.keys()
    for name, (kind, values) in found.items():
        assert kind == text_by_ddp[name][0]
        assert values == pytest.approx(text_by_ddp[name][1], rel=1e-4, abs=1e-5), name


def test_activations_computed_again_are_the_same(make: Make):
    """Dropout included, and the statistics of the batches are counted once."""
    losses = []
    for again in (False, True):
        folder = make("fsdp", fsdp(activation_checkpointing=again))
        learn_text(folder, "--model.dropout 0.5")
        losses.append([row["loss"] for row in rows(folder, "train")])
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp"])
def test_the_plan_of_a_backend(make: Make, backend: str):
    """By the project's own tests, which compare it with what PyTorch allocates and a run writes."""
    assert re.search(r"\d+ passed", run("make test ARGS=tests/test_plan.py", make(backend, {})))


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp"])
def test_a_script_of_your_own(make: Make, backend: str):
    """docs/your-own.md: the script that knows nothing of the project but what the backend needs."""
    folder = make(backend, {})
    shutil.copy(bootstrap.ROOT / "docs/examples/script/after.py", folder / "src/my_project/finetune.py")
    [accuracy] = re.findall(r"test accuracy ([\d.]+)", run("./launch.sh --cpu finetune", folder))
    assert 0.87 <= float(accuracy) <= 0.89


def go_on(folder: Path, code: int) -> str:
    return run(f"./launch.sh --cpu {TEXT_RUN} --max_steps {2 * STEPS}", folder, code)


def test_fsdp_goes_on_with_another_number_of_processes(make: Make):
    folder = make("fsdp", {})
    learn_text(folder)
    change(folder, {"num_processes": 1})
    assert "saved by 2 processes, now 1" in go_on(folder, 0)
    assert [int(row["step"]) for row in rows(folder, "train")] == list(range(1, 2 * STEPS + 1))
    losses = [float(row["loss"]) for row in rows(folder, "train")]
    assert max(losses[STEPS:]) < min(losses[:STEPS]), losses


@pytest.mark.parametrize("changes", [fsdp(**WHOLE_STATE), HYBRID], ids=["whole-state", "hybrid"])
def test_fsdp_goes_on_bit_for_bit(make: Make, changes: dict[str, Any]):
    """Stopped or not, from a state in one piece, and from one that two of four processes have each part of."""
    folder = make("fsdp", changes)
    options = f"--max_steps {2 * STEPS} --save_every_steps {STEPS}"
    learn_text(folder, options)
    expected = export_latest(folder, TEXT_OPTIONS)
    assert f"going on from checkpoints/run/step-{STEPS:08}" in learn_text(folder, f"{options} --resume {STEPS}")
    assert export_latest(folder, TEXT_OPTIONS) == expected


def test_what_cannot_be_read_is_said(make: Make):
    folder = make("deepspeed", zero(2))
    learn_text(folder)
    change(folder, {"num_processes": 1})
    sentence = "was saved by 2 processes, and DeepSpeed cannot share it among 1: start 2 again"
    assert one_error(go_on(folder, 1)).count(sentence) == 1
    change(folder, {"num_processes": 2, **zero(1)})
    assert "was saved with DeepSpeed ZeRO 2, which DeepSpeed ZeRO 1 cannot read" in one_error(go_on(folder, 1))
    other = make("ddp", {})
    learn_text(other, "--max_steps 1")
    shutil.rmtree(other / "checkpoints")
    shutil.copytree(folder / "checkpoints", other / "checkpoints")
    assert "was saved with DeepSpeed ZeRO 2, which DDP cannot read" in one_error(go_on(other, 1))


def one_error(output: str) -> str:
    assert "Traceback" not in output
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    return error
