"""The one list of variants, made from copier.yml's own choices and rules: a new choice is tested the day it is added.

`combinations` gives every possible combination of some questions; `pairs` a short list in which every possible pair of
answers occurs. Both only hold answers to questions that are asked, ready for --data.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import meta

from tests.support.render import Answers, Renderer

# Questions without choices: the values that change what is generated, the default first.
VALUES: dict[str, list[Any]] = {
    "project_name": ["My Project", 'O\'Neil "X" 🚀 # {{ 7*7 }} & <b>$HOME</b> `id` \\ %'],
    "project_slug": ["my-project", "0-9"],
    "package_name": ["my_project", "vision"],
    "description": ["Training with PyTorch and Accelerate.", 'Says "hi" to O\'Neil: {{ 7*7 }} # 🚀 \\ é'],
    "author_name": ["My Project authors", 'Zoë "Z" O\'Neil'],
    "author_email": ["", "zoe@example.com"],
    "gpu_capability": ["8.0", "6.1", "8.9"],
    "gpu_memory_gb": [24],
    "num_gpus": [4, 0, 1],
    "num_machines": [1, 2],
    "checkpoint_volume": ["checkpoints", "/mnt/checkpoints"],
    "preemption_grace_seconds": [120, 600],
    "image_registry": ["", "registry.example.com:5000/team"],
    "shm_size": ["16gb", "64gb"],
}

Pair = frozenset[tuple[str, Any]]


class Space:
    """All possible answers, as copier.yml describes them."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.names = list(renderer.questions)
        self.needs = {name: self._needs(name) for name in self.names}
        self._cache: dict[tuple[str, str], tuple[Answers, list[Any], Any]] = {}

    def _needs(self, name: str) -> list[str]:
        """The questions whose answers decide whether and how this one can be answered."""
        question = self.renderer.questions[name]
        sources = [question.get(key) for key in ("when", "choices", "validator", "default")]
        variables: set[str] = set()
        while sources:
            source = sources.pop()
            if isinstance(source, str):
                variables |= meta.find_undeclared_variables(self.renderer.environment.parse(source))
            elif isinstance(source, dict | list):
                sources += source.values() if isinstance(source, dict) else source
        return [other for other in self.names if other in variables and other != name]

    def possible(self, name: str, context: Answers) -> tuple[list[Any], Any]:
        """The valid answers after the others, none when it is not asked; and the default."""
        relevant = {other: context[other] for other in self.needs[name]}
        key = (name, repr(relevant))
        if key not in self._cache:
            question = self.renderer.question(name, relevant)
            values: list[Any] = []
            if question.get_when():
                offered = self.renderer.choices(name, relevant) if question.choices else VALUES[name]
                values = [value for value in offered if self._is_valid(name, question, value)]
            self._cache[key] = (relevant, values, question.get_default())
        return self._cache[key][1:]

    def looked_at(self) -> Iterator[tuple[str, Answers, list[Any], Any]]:
        """What `possible` has found out so far: question, the answers that decide, valid answers, default."""
        for (name, _), found in self._cache.items():
            yield name, *found

    @staticmethod
    def _is_valid(name: str, question: Any, value: Any) -> bool:
        try:
            question.validate_answer(question.parse_answer(value))
        except ValueError:
            return False
        return True

    def walk(self, names: Sequence[str], fixed: Answers | None = None) -> Iterator[Answers]:
        """Every possible combination of the answers to these questions; those they depend on keep their defaults."""
        fixed = fixed or {}
        order = self.closure(names)

        def step(index: int, given: Answers, context: Answers) -> Iterator[Answers]:
            if index == len(order):
                yield given
                return
            name = order[index]
            values, default = self.possible(name, context)
            if name not in names or not values:
                if name not in fixed:
                    yield from step(index + 1, given, context | {name: default})
                return
            for value in values:
                if fixed.get(name, value) == value:
                    yield from step(index + 1, given | {name: value}, context | {name: value})

        return step(0, {}, {})

    def closure(self, names: Sequence[str]) -> list[str]:
        """These questions and all that decide over them."""
        found = set(names)
        while missing := {other for name in found for other in self.needs[name]} - found:
            found |= missing
        return [name for name in self.names if name in found]


def combinations(renderer: Renderer, names: Sequence[str]) -> Iterator[Answers]:
    """Every possible combination of these questions; all others keep their defaults."""
    return Space(renderer).walk(names)


def pairs(renderer: Renderer) -> list[Answers]:
    """Variants that together hold every possible pair of answers."""
    space = Space(renderer)
    uncovered = possible_pairs(space)
    variants = []
    for goal in sorted(uncovered, key=lambda pair: sorted(map(repr, pair))):
        if goal in uncovered:
            variant = _best_variant(space, dict(goal), uncovered)
            uncovered -= _pairs(variant)
            variants.append(variant)
    return variants


def _pairs(answers: Answers) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(answers.items(), 2)))


def possible_pairs(space: Space) -> set[Pair]:
    found: set[Pair] = set()
    for one, other in itertools.combinations(space.names, 2):
        for given in space.walk(space.closure([one, other])):
            if one in given and other in given:
                found.add(frozenset({(one, given[one]), (other, given[other])}))
    return found


def _best_variant(space: Space, goal: Answers, uncovered: set[Pair]) -> Answers:
    """A whole set of answers with the goal in it, each of the others chosen for the most uncovered pairs."""

    def covered(given: Answers) -> int:
        return len(_pairs(given) & uncovered)

    best = max(space.walk(space.closure(list(goal)), goal), key=covered)
    chosen = dict(best)
    context: Answers = {}
    for name in space.names:
        values, default = space.possible(name, context)
        if name not in chosen and values:
            chosen[name] = max(values, key=lambda value: covered(chosen | {name: value}))
        context[name] = chosen.get(name, default)
    return {name: chosen[name] for name in space.names if name in chosen}
