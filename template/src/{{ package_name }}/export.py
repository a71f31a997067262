"""Export: the weights of a checkpoint alone, ready to be loaded anywhere."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import clean_state_dict_for_safetensors
from safetensors.torch import save_file
from torch import nn

from . import backend, checkpoint
from .collective import FailTogether
from .config import load_config, to_dict
from .errors import run
from .logs import logger, start_logging
from .session import build_parts, leave, start_accelerator

WEIGHTS = "model.safetensors"


def main() -> int:
    """Write a checkpoint's weights as safetensors, with its figures beside them."""
    parser = argparse.ArgumentParser(prog="export", description=main.__doc__, add_help=False)
    parser.add_argument("--checkpoint", default=checkpoint.BEST, help="best, latest, step or path")
    parser.add_argument("--output", type=Path, help="folder; default: export in the run's folder")
    config, arguments = load_config(extra=parser)
    source = checkpoint.open_intact(config.run_dir, arguments.checkpoint)
    progress = checkpoint.read_progress(source)
    config.optimizer = progress.config.get("optimizer", config.optimizer)  # its state is read too
    accelerator = start_accelerator(config)
    start_logging(accelerator.is_main_process)
    parts = build_parts(accelerator, config)
    model, _, _ = backend.prepare(accelerator, parts.model, parts.optimizer, parts.train_loader)
    checkpoint.load_state(accelerator, model, source)
    facts = {
        "run": config.run_name,
        "checkpoint": source.name,
        "step": progress.step,
        "samples_seen": progress.samples_seen,
        "scores": progress.scores if progress.evaluated_step == progress.step else {},
        "versions": progress.versions,
        "config": to_dict(config),
    }
    output = arguments.output or config.run_dir / "export"
    export(accelerator, model, output, facts)
    logger.info(f"exported {source} to {output / WEIGHTS}")
    leave(accelerator)
    return 0


def export(accelerator: Accelerator, model: nn.Module, output: Path, facts: dict[str, Any]) -> None:
    """Gather the weights on all ranks and write them once; names as in a fresh model. Collective.

    Raises: UserError when the folder cannot be written.
    """
    temporary = output.with_name(f".{output.name}.tmp")
    with FailTogether(accelerator, f"could not export to {output}"):
        weights = backend.full_weights(accelerator, model)
        if accelerator.is_main_process:
            temporary.mkdir(parents=True, exist_ok=True)
            shared_once = clean_state_dict_for_safetensors(weights)
            save_file(shared_once, temporary / WEIGHTS, metadata={"format": "pt"})
            (temporary / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
            (temporary / "README.md").write_text(model_card(facts, len(shared_once)), "utf-8")
            output.mkdir(parents=True, exist_ok=True)
            for file in temporary.iterdir():
                file.chmod(0o644)  # safetensors makes it private
                file.replace(output / file.name)
            shutil.rmtree(temporary)


def model_card(facts: dict[str, Any], num_tensors: int) -> str:
    """What is known about the model, and what its makers still have to say."""
    scores = "".join(f"| test {name} | {value:.4f} |\n" for name, value in facts["scores"].items())
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return f"""# {facts["run"]}

What it is for, what it was trained on, and where it fails: to be written.

| | |
|---|---|
{scores}| optimizer steps | {facts["step"]:,} |
| samples seen | {facts["samples_seen"]:,} |
| made with | {versions} |

```python
from safetensors.torch import load_model
from {__package__}.config import load_config
from {__package__}.data import build_datasets
from {__package__}.model import build_model

config, _ = load_config(["--config", "configs/train.yaml"])  # as in facts.json
model = build_model(config.model, build_datasets(config.data))
load_model(model, "{WEIGHTS}")  # {num_tensors} tensors; fails unless all of them fit
```
"""


if __name__ == "__main__":
    run(main)
