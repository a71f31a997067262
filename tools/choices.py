"""Writes the tables of docs/choices.md from the tables in includes/: `python -m tools.choices`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "choices.md"

# Presets leave out what is the default.
PRESET_COLUMNS = {
    "gpu": "", "num_gpus": 0, "num_machines": 1, "precision": "", "backend": "ddp", "sharding": "", "deployment": "",
    "torch_stack": "newest",
}  # fmt: skip
# GPUs a machine and machines: in words
MACHINES = {
    (1, 1): "one",
    (4, 1): "several of one machine",
    (1, 2): "one of each of several machines",
    (4, 2): "several of each of several machines",
}


def tables() -> dict[str, str]:
    """Markdown of each generated table, by the name of its markers in the page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT),
        extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"],  # as Copier has them
    )
    rules: Any = environment.get_template("includes/rules.jinja").module
    gpus: Any = environment.get_template("includes/gpus.jinja").module
    stacks: Any = environment.get_template("includes/stacks.jinja").module

    gpu_rows = []
    for key, row in gpus.gpus.items():
        if key == "other":
            gpu_rows.append(
                [f"`{key}`", "any other", "asked", "asked", "as its capability allows", "those with code for it"]
            )
            continue
        possible = [name for name in stacks.stacks if not rules.stack(name, key, "").strip()]
        number = 0 if key == "none" else 1
        precisions = [name for name in rules.precisions if not rules.precision(name, key, "", number).strip()]
        gpu_rows.append(
            [
                f"`{key}`",
                row["name"],
                row["capability"] or "",
                f"{row['memory_gb']} GB" if row["memory_gb"] else "",
                ", ".join(precisions),
                "all" if len(possible) == len(stacks.stacks) else ", ".join(possible),
            ]
        )
    stack_rows = [
        [
            f"`{key}`",
            row["torch"],
            row["torchvision"],
            row["cuda"],
            row["python"],
            rules.driver(key, "none", "").strip(),
            "tag and digest" if row["digest"] else "tag",
        ]
        for key, row in stacks.stacks.items()
    ]
    sharding_rows = [["`ddp`", "", "nothing: each GPU holds all of it", "2", "any number", "`none`"]]
    for key, row in rules.shardings.items():
        backend = row["backend"]
        where = [name for counts, name in MACHINES.items() if not rules.sharding(key, backend, *counts).strip()]
        offloads = [
            f"`{name}`" for name in rules.cpu_offloads if not rules.cpu_offload(name, backend, key, 4, 2).strip()
        ]
        sharding_rows.append(
            [
                f"`{backend}`",
                f"`{key}`",
                row["label"].partition(": ")[2],
                row["traffic"],
                {len(MACHINES): "any number", len(MACHINES) - 1: "more than one"}.get(len(where), ", ".join(where)),
                ", ".join(offloads),
            ]
        )
    preset_rows = []
    for path in sorted((ROOT / "presets").glob("*.yml")):
        answers = yaml.safe_load(path.read_text())
        values = [str(answers.get(name, default)) for name, default in PRESET_COLUMNS.items()]
        preset_rows.append([f"[{path.stem}](../presets/{path.name})", *values])
    return {
        "shardings": markdown(
            ["backend", "sharding", "split among the GPUs", "traffic", "GPUs", "cpu_offload"], sharding_rows
        ),
        "presets": markdown(["preset", *PRESET_COLUMNS], preset_rows),
        "gpus": markdown(["gpu", "model", "capability", "memory", "precision", "torch_stack"], gpu_rows),
        "stacks": markdown(
            ["torch_stack", "PyTorch", "torchvision", "CUDA", "Python", "driver", "image pinned by"], stack_rows
        ),
    }


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page_with_tables(text: str) -> str:
    """The page with what stands between each pair of markers replaced."""
    for name, table in tables().items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + table + "\n" + end + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
