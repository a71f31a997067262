"""Answer the real `accelerate config` at its prompts and keep the files it writes.

    python -m tests.support.record_accelerate /path/to/python-with-torch-and-accelerate

The files under tests/recorded/ are what ours must equal. Record them anew when accelerate's pin changes.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pexpect

RECORDED = Path(__file__).resolve().parent.parent / "recorded"
PRECISIONS = ("no", "fp16", "bf16")

# GPUs (0 is the CPU) and precision; two GPUs without mixed precision are also what the CPU twin must equal
CASES = [(0, "no"), (0, "bf16"), (2, "no"), *((gpus, precision) for gpus in (1, 4) for precision in PRECISIONS)]


def file_name(gpus: int, precision: str) -> str:
    return f"{f'gpu{gpus}' if gpus else 'cpu'}-{precision}.yaml"


def record(python: str, gpus: int, precision: str, output: Path) -> None:
    command = [python, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(output)]
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm", "HOME": home, "CUDA_VISIBLE_DEVICES": ""}
        child = pexpect.spawn(
            command[0], command[1:], timeout=60, encoding="utf-8", dimensions=(50, 250), env=environment
        )
        menus = {
            "In which compute environment": "0",
            "Which type of machine": "4" if gpus > 1 else "0",
            "Do you wish to use mixed precision": str(PRECISIONS.index(precision)),
        }
        # (prompt, what to type, whether it is a menu: a digit selects the row, Enter takes it)
        prompts = [(prompt, key, True) for prompt, key in menus.items()]
        prompts += [
            (r"How many GPU\(s\) should be used", str(gpus), False),
            ("on CPU only", "no" if gpus else "yes", False),
            (r"\[(yes/NO|1|all)\]: ?", "", False),  # everything else keeps its default
        ]
        patterns: list[Any] = [prompt for prompt, _, _ in prompts] + [pexpect.EOF]
        while (index := child.expect(patterns)) < len(prompts):
            _, answer, is_menu = prompts[index]
            if is_menu:
                child.expect(r"\x1b\[\?25l")  # the cursor is hidden once the menu listens
                child.send(answer + "\r")
            else:
                if index != len(prompts) - 1:
                    child.expect(r"\]:")
                child.sendline(answer)
        child.close()
        if child.exitstatus != 0:
            raise RuntimeError(f"accelerate config ended with {child.exitstatus}: {child.before}")


def main() -> None:
    python = sys.argv[1]
    RECORDED.mkdir(exist_ok=True)
    for gpus, precision in CASES:
        record(python, gpus, precision, RECORDED / file_name(gpus, precision))
        print(file_name(gpus, precision))


if __name__ == "__main__":
    main()
