"""Answers that nobody should give: either a whole project comes out, or one sentence and nothing on the disk.

What single answers are refused with is in test_questions.py. Here they come all together, in thousands of
combinations: of right and wrong values, types and questions, and of text that means something to YAML, TOML, shells,
make or Jinja.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.support.render import Answers, Files, Renderer
from tests.support.variants import Space

FREE_TEXT = ["project_name", "description", "author_name", "author_email"]

NASTY = [
    "", " ", "\t", "\n", "\r\n", "\\", "\\n", "\\u0041", "'", '"', "'''", '"""', "`id`", "$(id)", "${HOME}", "$HOME",
    "$$", "$(shell id)", "%s", "%(x)s", "~", "*", "!", "&", "|", ">", "- a", "? a", "a: b", "a #b", "#", "=", "<<", "@",
    ",", ";", "{{ 7*7 }}", "{% raw %}", "{# a #}", "{{", "%}", "[x]", "]", "}", "a\n[tool]", "<b>", "-->", "]]>", "EOF",
    "null", "true", "no", "yes", "0x10", "1e5", "-1", "010", "1_000", ".inf", "nan", "2026-12-02", "12:30:00", "16",
    "--", "-rf", "..", "../x", "/", "//", "a/b", "a" * 41, "x" * 300, "é", "日本語", "🚀",
    "\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "\xa0", "\u200b", "\u2028", "\u202e", "\ufeff", "\udc80",
]  # fmt: skip
PIECES = st.one_of(st.sampled_from(NASTY), st.text(max_size=12))
TEXT = st.lists(PIECES, min_size=1, max_size=4).map("".join)
NUMBERS = st.one_of(st.integers(-2, 2000), st.sampled_from([10**9, -(10**20), 8.0, 8.7, float("nan"), float("inf")]))
OTHER_TYPES = st.sampled_from([None, True, False, [], ["ddp"], {}, {"a": 1}, b"a", 1.5])
WIDER = {  # than the values that all other tests take; also valid
    "gpu_memory_gb": [4, 24, 1024],
    "num_gpus": list(range(17)),
    "num_machines": [1, 2, 3, 16, 1024],
    "preemption_grace_seconds": [30, 31, 3600],
}
# Names that start with _copier are Copier's own: it fails over them before it asks anything.
UNKNOWN = ["gpu_cuont", "_subdirectory", "_tasks", "d", "rules", "zero_stage", "", "GPU", "project_name "]


@pytest.fixture(scope="module")
def space(renderer: Renderer) -> Space:
    return Space(renderer)


@st.composite
def any_answers(draw: st.DrawFn, space: Space) -> Answers:
    """Right ones, as many as somebody likes to give, and up to two that may be wrong."""
    drawn: Answers = {}
    context: Answers = {}
    given = draw(st.sets(st.sampled_from(space.names), max_size=15))
    for name in space.names:
        values, default = space.possible(name, context)
        context[name] = default
        if name in given and values:
            context[name] = drawn[name] = draw(st.sampled_from(WIDER.get(name, values)))
            if name in FREE_TEXT:
                drawn[name] = draw(st.one_of(st.just(drawn[name]), TEXT))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        name = draw(st.sampled_from([*space.names, *UNKNOWN]))
        elsewhere = space.values(name) if name in space.names else ["yes"]  # right after other answers
        wrong = st.one_of(TEXT, NUMBERS, OTHER_TYPES)
        drawn[name] = draw(wrong if draw(st.booleans()) else st.sampled_from(elsewhere))
    return drawn


def check_project(rendered: Files, answers: Answers, checked: set[Any], folder: Path) -> None:
    """Every file can be read, and free text arrives as it was typed."""
    for name, (content, _) in rendered.items():
        if (name, content) in checked:
            continue
        checked.add((name, content))
        text = content.decode()
        assert "\r" not in text and (not text or text.endswith("\n")), name
        if name.endswith(".py"):
            ast.parse(text)
        elif name.endswith((".yaml", ".yml")):
            yaml.load(re.sub(r"!(reset|override)\b", "", text), Loader=yaml.CSafeLoader)
        elif name.endswith(".toml"):
            tomllib.loads(text)
        elif name.endswith(".ipynb"):
            json.loads(text)
        elif name == ".editorconfig":
            configparser.ConfigParser().read_string(f"[top]\n{text}")
        elif name.endswith(".sh"):
            shell = subprocess.run(["bash", "-n"], input=content, capture_output=True, check=False)
            assert shell.returncode == 0 and not shell.stderr, f"{name}: {shell.stderr.decode()}"
        elif name == "Makefile":
            (folder / "Makefile").write_bytes(content)
            make = subprocess.run(["make", "-C", folder, "-n", "setup"], capture_output=True, check=False)
            assert make.returncode == 0, make.stderr.decode()

    project = tomllib.loads(rendered["pyproject.toml"][0].decode())["project"]
    remembered = yaml.load(rendered[".copier-answers.yml"][0], Loader=yaml.CSafeLoader)
    platform = yaml.load(rendered["platform.yaml"][0], Loader=yaml.CSafeLoader)
    assert project["description"] == remembered["description"]
    assert project["authors"][0]["name"] == remembered["author_name"]
    assert project["name"] == platform["project"] == remembered["project_slug"]
    assert f"src/{remembered['package_name']}/train.py" in rendered
    for name in set(answers) & set(remembered):
        given = str(answers[name]).strip()
        assert remembered[name] == (int(given) if isinstance(remembered[name], int) else given), name


def check_refusal(refusal: Exception) -> None:
    sentence = str(refusal)
    assert sentence.strip(), "a refusal without a word"
    assert "\n" not in sentence.strip(), sentence
    assert not re.search(r"ndefined|has no attribute|unsupported operand|not supported between", sentence), sentence


@pytest.fixture(scope="module")
def checked() -> set[Any]:
    """The names and contents of the files that were looked at."""
    return set()


@settings(
    max_examples=2000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_a_project_or_a_sentence(
    data: st.DataObject,
    renderer: Renderer,
    space: Space,
    checked: set[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    chosen = data.draw(any_answers(space))
    folder = tmp_path_factory.getbasetemp()
    try:
        rendered = renderer.contents(chosen)
    except (ValueError, TypeError) as refusal:
        event("refused")
        check_refusal(refusal)
        assert renderer.refusal(chosen) == str(refusal), "refused only after the last question"
        with pytest.raises(type(refusal)):
            renderer.render(chosen, folder / "refused")
        assert not (folder / "refused").exists()
    else:
        event("rendered")
        check_project(rendered, chosen, checked, folder)
