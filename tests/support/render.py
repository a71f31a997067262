"""Render the template: through the real command line, or fast, many times in one process.

The fast route shares what Copier makes anew for each run: the parsed questions and the compiled Jinja templates. Where
nothing has to lie on a disk, it keeps the files in memory and the answers' context for all of them. It uses Copier's
private classes, so a sample of both is compared byte for byte with the command line (test_questions.py,
test_variants.py).
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import copier._main
import copier._user_data
import yaml
from copier._main import Worker
from copier._user_data import AnswersMap, Question

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("copier.yml", "questions", "includes", "template")

Answers = dict[str, Any]
Files = dict[str, tuple[bytes, bool]]  # relative path → content and whether it is executable


def export(folder: Path) -> Path:
    """The template as a plain directory: no git, so no tag decides what is rendered."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


def copier_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "copier", *map(str, arguments)]


def run_copier(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The real command line, without a terminal; never with --trust."""
    return subprocess.run(
        copier_command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )


def data_arguments(answers: Mapping[str, Any]) -> list[str]:
    return [argument for key, value in answers.items() for argument in ("--data", f"{key}={value}")]


def files(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), os.access(path, os.X_OK))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Renderer:
    def __init__(self, template: Path) -> None:
        self.path = template
        with self._worker({}, template / "nowhere") as worker:
            self.template = worker.template
            self.environment = worker.jinja_env
        from_string = self.environment.from_string
        cached = functools.lru_cache(maxsize=None)(from_string)

        def from_string_once(source: Any) -> Any:
            return (cached if isinstance(source, str) else from_string)(source)

        self.environment.__dict__["from_string"] = from_string_once
        self._choices: dict[tuple[str, str], dict[Any, str]] = {}
        # Where each file of the template goes; None where its name depends on the answers.
        self._sources = {
            source: None if "{" in str(source) else source.with_suffix("") if source.suffix == ".jinja" else source
            for path in sorted((template / self.template.subdirectory).rglob("*"))
            if path.is_file() and (source := path.relative_to(template / self.template.subdirectory))
        }
        self._read = functools.lru_cache(maxsize=None)(_read)
        self._yaml = functools.lru_cache(maxsize=None)(copier._user_data.parse_yaml_string)

    @property
    def questions(self) -> dict[str, dict[str, Any]]:
        return self.template.questions_data

    @contextmanager
    def _worker(self, answers: Mapping[str, Any], destination: Path, defaults: bool = True) -> Iterator[Worker]:
        with Worker(
            src_path=str(self.path),
            dst_path=destination,
            data=dict(answers),
            defaults=defaults,
            unsafe=False,
            quiet=True,
        ) as worker:
            if hasattr(self, "environment"):
                worker.__dict__.update(template=self.template, jinja_env=self.environment)
            yield worker

    def render(self, answers: Mapping[str, Any], destination: Path) -> Path:
        # Without git, Copier does not start one `git config` for each written file.
        with (
            mock.patch.object(copier._main, "is_git_available", return_value=False),
            self._worker(answers, destination) as worker,
        ):
            worker.run_copy()
        return destination

    def contents(self, answers: Mapping[str, Any]) -> Files:
        """What `render` would write, without writing it."""
        found: Files = {}

        def render_template() -> None:
            context = worker._render_context()
            settings = dict(context["_copier_conf"])

            def same_context() -> Answers:
                return context | {"_copier_conf": dict(settings)}  # Copier writes into it

            worker.__dict__["_render_context"] = same_context
            for source, fixed in self._sources.items():
                targets = [fixed] if fixed else [target for target, _ in worker._render_path(source)]
                for target in targets:
                    if worker.match_exclude(target):
                        continue
                    name = f"{self.template.subdirectory}/{source.as_posix()}"
                    content, executable = self._read(self.path / name)
                    if name.endswith(self.template.templates_suffix):
                        content = self.environment.get_template(name).render(**same_context()).encode()
                    found[target.as_posix()] = content, executable

        with (
            mock.patch.object(copier._user_data, "parse_yaml_string", self._yaml),
            self._worker(answers, self.path / "nowhere") as worker,
        ):
            worker.__dict__["_render_template"] = render_template
            worker.run_copy()
        return found

    def answer(self, answers: Mapping[str, Any]) -> Answers:
        """All answers, asked ones only, when the others take their defaults; nothing is written."""
        with self._worker(answers, self.path / "nowhere") as worker:
            worker._ask()
            return {key: worker.answers.user[key] for key in self.questions if key not in worker.answers.hidden}

    def refusal(self, answers: Mapping[str, Any]) -> str:
        """The sentence with which these answers are refused, or an empty string."""
        try:
            self.answer(answers)
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    def question(self, name: str, prefix: Mapping[str, Any]) -> Question:
        """One question as it is asked after these answers."""
        with self._worker({}, self.path / "nowhere") as worker:
            worker.answers = AnswersMap(user=dict(prefix))
            return Question(
                answers=worker.answers,
                context=worker._render_context(),
                jinja_env=self.environment,
                var_name=name,
                **self.questions[name],
            )

    def choices(self, name: str, prefix: Mapping[str, Any]) -> dict[Any, str]:
        """Value → why it is not possible after these answers, or an empty string."""
        key = (name, repr(prefix))
        if key not in self._choices:
            question = self.question(name, prefix)
            self._choices[key] = {
                question.cast_answer(choice.value): choice.disabled or "" for choice in question._formatted_choices
            }
        return self._choices[key]

    def is_asked(self, name: str, prefix: Mapping[str, Any]) -> bool:
        return self.question(name, prefix).get_when()


def _read(path: Path) -> tuple[bytes, bool]:
    return path.read_bytes(), os.access(path, os.X_OK)


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
