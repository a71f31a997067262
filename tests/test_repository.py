"""The sources of this repository, as they stand: what no other tool looks at."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from tests.support.render import Renderer
from tools.sources import ROOT, sources

SOURCES = sources()

# Settings of Copier that work without --trust. Copier ignores unknown ones, so a typo would be silent.
SETTINGS = {
    "_answers_file",
    "_envops",
    "_exclude",
    "_message_after_copy",
    "_message_after_update",
    "_message_before_copy",
    "_message_before_update",
    "_min_copier_version",
    "_secret_questions",
    "_skip_if_exists",
    "_subdirectory",
    "_templates_suffix",
}
ATTRIBUTES = {
    "choices",
    "default",
    "help",
    "multiline",
    "multiselect",
    "placeholder",
    "qmark",
    "secret",
    "type",
    "validator",
    "when",
}


def text(name: str) -> str | None:
    """The contents of a source file, None when it is not text."""
    try:
        return (ROOT / name).read_bytes().decode()
    except UnicodeDecodeError:
        return None


def texts(*ending: str) -> dict[str, str]:
    found = {name: text(name) for name in SOURCES if name.endswith(ending or "")}
    return {name: content for name, content in found.items() if content is not None}


def lines_with(pattern: str, files: dict[str, str], flags: int = 0) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, content in files.items()
        for number, line in enumerate(content.splitlines(), 1)
        if re.search(pattern, line, flags)
    ]


# -- copier.yml and the questions ------------------------------------------------------------------


class UniqueKeys(yaml.SafeLoader):
    """Refuses the second of two equal keys, which YAML loaders otherwise take without a word."""

    included: list[str]


def mapping(loader: UniqueKeys, node: yaml.MappingNode) -> dict[str, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    assert not twice, f"twice in one mapping, line {node.start_mark.line + 1}: {twice}"
    return dict(loader.construct_pairs(node, deep=True))


def include(loader: UniqueKeys, node: yaml.ScalarNode) -> dict[str, Any]:
    loader.included.append(node.value)
    return {}


UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
UniqueKeys.add_constructor("!include", include)


def documents(name: str) -> tuple[list[dict[str, Any]], list[str]]:
    loader = UniqueKeys((ROOT / name).read_text())
    loader.included = []
    found = []
    while loader.check_data():
        found.append(loader.get_data() or {})
    return found, loader.included


def copier_files() -> list[str]:
    return ["copier.yml", *documents("copier.yml")[1]]


def test_question_files_are_included_one_by_one():
    included = copier_files()[1:]
    on_disk = [name for name in SOURCES if name.startswith("questions/")]
    assert sorted(included) == on_disk, "each file once; a glob would be unsorted and may be empty"


def test_settings_are_known_and_need_no_trust():
    settings = [key for name in copier_files() for part in documents(name)[0] for key in part if key[0] == "_"]
    assert set(settings) <= SETTINGS
    assert len(settings) == len(set(settings)), "a setting that stands twice: the last one wins"


def test_questions_are_asked_once_and_their_attributes_exist():
    questions = [
        (key, question)
        for name in copier_files()
        for part in documents(name)[0]
        for key, question in part.items()
        if key[0] != "_"
    ]
    names = [name for name, _ in questions]
    assert len(names) == len(set(names)), "a question that stands twice: the last one wins"
    unknown = {name: set(question) - ATTRIBUTES for name, question in questions}
    assert not {name: keys for name, keys in unknown.items() if keys}
    assert names, "no questions at all"


def test_every_question_says_what_it_means():
    for name in copier_files():
        for part in documents(name)[0]:
            for key, question in part.items():
                if key[0] == "_" or question.get("when") is False:
                    continue
                assert question.get("type") and question.get("help"), key
                assert "default" in question, f"{key} has no default: --defaults would fail"


# -- the template's Python --------------------------------------------------------------------------


def test_python_sources_hold_no_jinja():
    """Answers change configuration, never training code."""
    python = texts(".py", ".py.jinja")
    in_template = {name: content for name, content in python.items() if name.startswith("template/")}
    assert in_template
    assert not lines_with(r"\{%|\{#|%\}|#\}", in_template)
    rendered = {name: content for name, content in in_template.items() if name.endswith(".jinja")}
    assert not lines_with(r"\{\{(?! package_name \}\})", rendered)
    assert not [name for name in rendered if not name.startswith("template/tests/")]


@pytest.fixture(scope="module")
def project(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default project: no tool looks into a package whose folder is called {{ … }}."""
    return renderer.render({}, tmp_path_factory.mktemp("projects") / "my-project")


def run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing_in_the_template(project: Path):
    run(["ruff", "check", "."], project)
    run(["ruff", "format", "--check", "--diff", "."], project)


def test_mypy_finds_nothing_in_the_template(project: Path):
    """Without torch, so without its types; the smoke session runs mypy with everything there."""
    run(["mypy", "--ignore-missing-imports", "src"], project)


# -- one fact, one place ----------------------------------------------------------------------------

# Where versions may stand: the tables, what is resolved from them, and what tests expect.
FACTS = ("includes/", "requirements/", "tests/", "template/tests/", "docs/choices.md")


def stacks() -> dict[str, dict[str, str]]:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(ROOT))
    module: Any = environment.get_template("includes/stacks.jinja").module
    return module.stacks


def elsewhere() -> dict[str, str]:
    return {name: content for name, content in texts().items() if not name.startswith(FACTS)}


def test_versions_of_torch_stand_in_the_stack_table_only():
    versions = {row[package] for row in stacks().values() for package in ("torch", "torchvision")}
    # A stack's own name, such as an answer in a preset, is not a second place.
    pattern = rf"(?<![\w.])({'|'.join(map(re.escape, sorted(versions)))})(?![\w.]|-cuda)"
    assert not lines_with(pattern, elsewhere())


def test_digests_and_image_tags_stand_in_the_tables_only():
    assert not lines_with(r"sha256:[0-9a-f]{64}", elsewhere())
    assert not lines_with(r"cuda\d+\.\d+-cudnn", elsewhere())


def test_named_stacks_exist():
    named = {
        stack for content in elsewhere().values() for stack in re.findall(r"\b\d+\.\d+\.\d+-cuda\d+\.\d+\b", content)
    }
    assert named <= set(stacks())


def test_packages_are_pinned_in_requirements_only():
    assert not lines_with(r"(?<![\w.{$-])[a-zA-Z][\w.-]+==\d", elsewhere())


# -- hygiene ----------------------------------------------------------------------------------------


def test_windows_can_check_the_files_out():
    reserved = re.compile(r"^(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
    bad = [
        name
        for name in SOURCES
        if re.search(r'[<>:"\\|?*\x00-\x1f]', name)
        or len(name) > 180
        or any(part[-1] in ". " or reserved.match(part) for part in name.split("/"))
    ]
    assert not bad
    folded = [name.lower() for name in SOURCES]
    assert len(folded) == len(set(folded)), "names that differ in case only"


def test_text_is_tidy():
    untidy = []
    for name, content in texts().items():
        if "\r" in content or content.startswith("\ufeff"):
            untidy.append(f"{name}: carriage return or byte order mark")
        if content and (not content.endswith("\n") or content.endswith("\n\n")):
            untidy.append(f"{name}: ends in no newline, or in more than one")
    untidy += lines_with(r"[ \t]+$", texts())
    untidy += lines_with("^(<<<<<<<|>>>>>>>|=======$)", texts())
    assert not untidy


def test_nothing_is_left_to_do():
    words = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
    assert not lines_with(rf"\b({words})\b", texts())


def test_no_test_is_skipped():
    skips = "|".join(["mark.sk" + "ip", "mark.xf" + "ail", r"\bsk" + r"ip\(", "importor" + "skip"])
    tests = {name: content for name, content in texts().items() if "tests/" in name}
    assert tests
    assert not lines_with(rf"({skips})", tests)


def test_scripts_can_be_run():
    for name, content in texts().items():
        if (name.endswith((".sh", ".sh.jinja")) or name == ".ci/run") and content:
            # A line of Jinja leaves nothing behind.
            first = next(line for line in content.splitlines() if not line.startswith("{%"))
            assert first.startswith("#!/"), name
            assert (ROOT / name).stat().st_mode & 0o111, f"{name} is not executable"


def test_ci_runs_the_command_that_people_run():
    command = "python3 bootstrap.py test"
    assert (ROOT / ".ci/run").read_text().rstrip().endswith(f"exec {command}")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
    assert command in (ROOT / "README.md").read_text()


# -- documentation ----------------------------------------------------------------------------------


def anchors(markdown: str) -> set[str]:
    """The fragments under which a forge shows the headings."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code(markdown), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen: dict[str, int] = {}
    result = set()
    for name in plain:
        result.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return result


def without_code(markdown: str) -> str:
    return re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)


def test_links_in_the_documentation_resolve():
    broken = []
    pages = {name: content for name, content in texts(".md").items() if name[:9] != "template/"}
    assert "README.md" in pages
    for name, content in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(content)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = target.partition("#")
            page = (ROOT / name).parent / path if path else ROOT / name
            if not page.exists():
                broken.append(f"{name}: {target}")
            elif fragment and fragment not in anchors(page.read_text()):
                broken.append(f"{name}: {target} (no such heading)")
    assert not broken
