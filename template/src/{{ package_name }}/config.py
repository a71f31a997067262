"""Hyper-parameters: one dataclass, filled from a YAML file and from the command line."""

import argparse
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .data import DataConfig
from .errors import UserError
from .model import ModelConfig

SECTIONS = ("data", "model")
DEFAULT_CONFIG = Path("configs/train.yaml")


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with the sentence that `--help` shows."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class TrainConfig:
    """What a run does. Each field is a key of `configs/*.yaml` and an option `--key value`."""

    run_name: str = option("main", "folder of the run; the same name continues the same run")
    epochs: int = option(20, "passes over the training data")
    max_steps: int | None = option(None, "stop after this many optimizer steps")
    global_batch_size: int = option(128, "samples per optimizer step, over all processes")
    gradient_accumulation_steps: int = option(1, "forward passes per optimizer step")

    optimizer: str = option("sgd", "update rule", choices=("sgd", "adamw"))
    learning_rate: float = option(0.1, "peak of the schedule")
    weight_decay: float = option(5.0e-4, "not applied to biases and normalisation")
    momentum: float = option(0.9, "of sgd (Nesterov)")
    schedule: str = option(
        "cosine", "shape after warm-up", choices=("constant", "cosine", "linear")
    )
    warmup_steps: int = option(0, "optimizer steps from zero to the peak")
    max_grad_norm: float = option(1.0, "clip gradients to this norm; 0 leaves them alone")

    compile: bool = option(False, "torch.compile the model")
    compile_backend: str = option("inductor", "backend of torch.compile")
    sync_batchnorm: bool = option(False, "BatchNorm statistics over all GPUs")
    find_unused_parameters: bool = option(
        False, "needed when some parameters get no gradient in a step"
    )
    seed: int = option(0, "decides weights, order of data and randomness of every step")
    num_workers: int = option(0, "loader processes per training process")

    eval_every_epochs: int = option(1, "epochs between evaluations; each is followed by a save")
    log_every_steps: int = option(10, "optimizer steps between two lines of the log")
    save_every_steps: int = option(0, "extra checkpoints inside an epoch; 0 = none")
    keep_last: int = option(2, "newest checkpoints to keep, besides the best")
    keep_every: int = option(0, "also keep checkpoints at multiples of this step; 0 = none")
    async_save: bool = option(False, "save while training goes on, from a copy in memory")
    mirror: str | None = option(
        None, "copy checkpoints to this place too, such as s3://bucket/runs (fsspec)"
    )
    checkpoint_dir: str | None = option(
        None, "where runs are kept; default: $CHECKPOINT_DIR or ./checkpoints"
    )

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def run_dir(self) -> Path:
        """Folder of this run on the checkpoint volume."""
        root = self.checkpoint_dir or os.environ.get("CHECKPOINT_DIR") or "checkpoints"
        return Path(root) / self.run_name

    def validate(self) -> None:
        """Refuse what cannot train. Raises: UserError."""
        at_least = {
            "epochs": 1,
            "global_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "eval_every_epochs": 1,
            "log_every_steps": 1,
            "keep_last": 1,
            "max_steps": 1,
            "warmup_steps": 0,
            "num_workers": 0,
            "save_every_steps": 0,
            "keep_every": 0,
            "learning_rate": 0.0,
            "weight_decay": 0.0,
            "momentum": 0.0,
            "max_grad_norm": 0.0,
            "seed": 0,
        }
        for key, least in at_least.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise UserError(f"{key} is {value}: give {least} or more")
        if self.momentum >= 1:
            raise UserError(f"momentum is {self.momentum}: give a number below 1")
        if not self.run_name or self.run_name.startswith(".") or "/" in self.run_name:
            raise UserError(f"run_name is {self.run_name!r}: give the plain name of one folder")


def per_device_batch_size(config: TrainConfig, num_processes: int) -> int:
    """Samples of one forward pass on one process.

    Raises: UserError when the global batch does not divide evenly.
    """
    shares = num_processes * config.gradient_accumulation_steps
    if config.global_batch_size % shares:
        raise UserError(
            f"global_batch_size {config.global_batch_size} does not divide by "
            f"{num_processes} processes x {config.gradient_accumulation_steps} accumulation steps: "
            f"give a multiple of {shares}"
        )
    return config.global_batch_size // shares


def load_config(
    argv: Sequence[str] | None = None, extra: argparse.ArgumentParser | None = None
) -> tuple[TrainConfig, argparse.Namespace]:
    """Read `--config FILE`, then the overrides on the command line.

    Args:
        argv: arguments without the program's name; default `sys.argv[1:]`.
        extra: parser with further options of the calling command (made with `add_help=False`).
    Returns: the checked configuration, and the values of `extra`.
    Raises: UserError for unknown keys, wrong types and values out of range.
    """
    fields = _leaf_fields(TrainConfig)
    parser = argparse.ArgumentParser(
        prog=None if extra is None else extra.prog,
        description=None if extra is None else extra.description,
        parents=[] if extra is None else [extra],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}"
    )
    group = parser.add_argument_group("any key of the configuration")
    for key, item in fields.items():
        text = item.metadata.get("help", "")
        default = _default(item)
        shown = text if default is None else f"{text} (default: {default})"
        group.add_argument(
            f"--{key}", default=argparse.SUPPRESS, metavar="VALUE", help=shown.replace("%", "%%")
        )
    arguments, unknown = parser.parse_known_args(argv)
    for word in unknown:
        known = list(parser._option_string_actions)
        raise UserError(f"unknown option {word}" + _did_you_mean(word.split("=")[0], known))

    values = _read_yaml(arguments.config)
    _check_keys(values, fields, str(arguments.config))
    overrides = {key: getattr(arguments, key) for key in fields if hasattr(arguments, key)}
    values.update({key: _parse_text(text, fields[key]) for key, text in overrides.items()})
    config = _build(TrainConfig, values)
    config.validate()
    return config, arguments


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain nested dictionaries, ready for YAML or JSON."""
    return dataclasses.asdict(config)


def _leaf_fields(cls: type, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    leaves = {}
    for item in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[item.name]
        if dataclasses.is_dataclass(kind):
            leaves.update(_leaf_fields(typing.cast(type, kind), f"{prefix}{item.name}."))
        else:
            leaves[prefix + item.name] = item
    return leaves


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _read_yaml(path: Path) -> dict[str, Any]:
    """Keys of a YAML file, nested ones joined by dots."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `key: value` lines")
    return _flatten(content)


def _flatten(content: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if value is None and name in SECTIONS:  # all its keys are comments
            continue
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _check_keys(values: dict[str, Any], known: dict[str, Any], where: str) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"unknown key {key!r} in {where}" + _did_you_mean(key, list(known)))


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]}?" if near else "; --help lists the known ones"


def _parse_text(text: str, item: dataclasses.Field[Any]) -> Any:
    if item.type is str or (item.type == str | None and text != "null"):
        return text  # a run named 007 or no is no number and no boolean
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _build(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    arguments = {}
    for item in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[item.name]
        key = prefix + item.name
        if dataclasses.is_dataclass(kind):
            arguments[item.name] = _build(typing.cast(type, kind), values, f"{key}.")
        elif key in values:
            arguments[item.name] = _coerce(key, values[key], kind, item)
    return cls(**arguments)


def _coerce(key: str, value: Any, kind: Any, item: dataclasses.Field[Any]) -> Any:
    """The value as the field's type, refusing what would lose meaning (8.5 or true for an int)."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in allowed:
        return None
    wanted = next(one for one in allowed if one is not type(None))
    wrong = UserError(f"{key} is {value!r}: give {_NAMES.get(wanted, wanted.__name__)}")
    if wanted is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(value, bool) and wanted is not str:
        raise wrong
    if wanted is str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise wrong
        value = str(value)
        choices = item.metadata.get("choices", ())
        if choices and value not in choices:
            raise UserError(
                f"{key} is {value!r}: choose from {', '.join(choices)}"
                + _did_you_mean(value, list(choices)).replace("; --help lists the known ones", "")
            )
        return value
    try:
        # YAML 1.1 reads 1e-5 as text, so numbers may arrive as text.
        number = wanted(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if number != float(value) or not math.isfinite(float(value)):
        raise wrong
    return number


_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
}
