"""Answer the real `accelerate config` at its prompts and keep the files it writes.

    python -m tests.support.record_accelerate /path/to/python-with-accelerate-deepspeed-and-torchao [PART-OF-A-NAME]

The files under tests/recorded/ are what ours must equal. Record them anew when accelerate's pin changes.
"""

import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect

RECORDED = Path(__file__).resolve().parent.parent / "recorded"
PRECISIONS = ("no", "fp16", "bf16", "fp8")
OFFLOAD = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}  # optimizer, parameters


@dataclass(frozen=True)
class Case:
    """A machine and a way to train on it; no GPUs is the CPU."""

    gpus: int  # over all machines
    precision: str
    machines: int = 1
    backend: str = "ddp"
    sharding: str = "none"
    cpu_offload: str = "none"
    activation_checkpointing: bool = False

    @property
    def file_name(self) -> str:
        machine = f"{f'{self.machines}x' if self.machines > 1 else ''}{self.gpus // self.machines}gpu"
        parts = [machine if self.gpus else "cpu", self.backend, self.sharding, f"offload-{self.cpu_offload}"]
        parts += ["checkpointing"] if self.activation_checkpointing else []
        return "-".join([part for part in parts if part not in ("none", "offload-none")] + [self.precision]) + ".yaml"


def cases() -> list[Case]:
    """Every form of the file: each precision, and each way to split a model, on one machine and on two."""
    found = [Case(0, "no"), Case(0, "bf16"), Case(2, "no")]
    found += [Case(gpus, precision) for gpus in (1, 4) for precision in PRECISIONS]
    found += [Case(8, "bf16", machines=2), Case(4, "fp8", backend="fsdp", sharding="full")]
    for machines in (1, 2):
        gpus = 4 * machines
        for sharding, offload, checkpointing in itertools.product(
            ("full", "grad-op", "hybrid"), ("none", "all"), (False, True)
        ):
            if sharding != "hybrid" or machines > 1:
                found.append(Case(gpus, "bf16", machines, "fsdp", sharding, offload, checkpointing))
        for stage, offloads in {
            "zero1": ("none",),
            "zero2": ("none", "optimizer"),
            "zero3": ("none", "optimizer", "all"),
        }.items():
            found += [Case(gpus, "bf16", machines, "deepspeed", stage, offload) for offload in offloads]
    return found


def menus(case: Case) -> dict[str, int]:
    """Prompt → the row to choose."""
    optimizer, parameters = OFFLOAD[case.cpu_offload]
    devices = ("none", "cpu")
    return {
        "In which compute environment": 0,
        "Which type of machine": 4 if case.gpus > 1 or case.backend != "ddp" else 0,
        "What is the rank of this machine": 0,
        "ZeRO optimization stage": int(case.sharding[-1]) if case.backend == "deepspeed" else 0,
        "Where to offload optimizer states": devices.index(optimizer),
        "Where to offload parameters": devices.index(parameters),
        "Which Type of launcher": 1,  # standard: one launcher on each machine
        "What should be your FSDP version": 1,
        "What should be your auto wrap policy": 0,  # by class
        "What should be your FSDP's state dict type": 0,  # sharded
        "Do you wish to use mixed precision": PRECISIONS.index(case.precision),
        "Which FP8 backend": 0,  # torchao
    }


def texts(case: Case) -> dict[str, Any]:
    """Prompt → what to type; all other questions keep their defaults."""
    return {
        "How many different machines": case.machines,
        "on CPU only": "no" if case.gpus else "yes",
        "Do you want to use DeepSpeed": "yes" if case.backend == "deepspeed" else "no",
        "Do you want to use gradient clipping": "yes",
        "Do you want to save 16-bit model": "yes",
        "Do you want to use FullyShardedDataParallel": "yes" if case.backend == "fsdp" else "no",
        "resharding after forward": "no" if case.sharding == "grad-op" else "yes",
        "offload parameters and gradients": "yes" if case.cpu_offload == "all" else "no",
        "Do you want to use the model's `_no_split_modules` to wrap": "yes",
        "CPU RAM efficient model loading": "no",
        "FSDP activation checkpointing": "yes" if case.activation_checkpointing else "no",
        "use the parallelism config": "yes" if case.sharding == "hybrid" else "no",
        "data parallelism replicate size": case.machines,
        "What is the FSDP shard size": case.gpus // case.machines,
        r"How many GPU\(s\) should be used": case.gpus,
        "FSDP2 float8 all gather": "yes" if case.backend == "fsdp" else "no",
    }


def record(python: str, case: Case, output: Path) -> None:
    command = [python, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(output)]
    # (pattern, what to type, whether it is a menu: a digit selects the row, Enter takes it)
    prompts = [(prompt, str(row), True) for prompt, row in menus(case).items()]
    prompts += [(rf"{prompt}[^\]]*\]: ?", str(text), False) for prompt, text in texts(case).items()]
    prompts += [
        (r"IP address of the machine[^?]*\? ", "10.0.0.1", False),
        (r"port you will use to communicate[^?]*\? ", "29500", False),
        (r"\[(yes/NO|YES/no|1|1\.0|all)\]: ?", "", False),
    ]
    patterns: list[Any] = [prompt for prompt, _, _ in prompts] + [pexpect.EOF]
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "HOME": home, "CUDA_VISIBLE_DEVICES": ""}
        child = pexpect.spawn(
            command[0], command[1:], timeout=120, encoding="utf-8", dimensions=(50, 250), env=environment
        )
        while (index := child.expect(patterns)) < len(prompts):
            _, answer, is_menu = prompts[index]
            if is_menu:
                child.expect(r"\x1b\[\?25l")  # the cursor is hidden once the menu listens
                child.send(answer + "\r")
            else:
                child.sendline(answer)
        child.close()
        if child.exitstatus != 0:
            raise RuntimeError(f"accelerate config ended with {child.exitstatus}: {child.before}")


def main() -> None:
    python, part = sys.argv[1], "".join(sys.argv[2:])
    RECORDED.mkdir(exist_ok=True)
    for case in cases():
        if part in case.file_name:
            record(python, case, RECORDED / case.file_name)
            print(case.file_name, flush=True)


if __name__ == "__main__":
    main()
