"""The one list of variants, made from copier.yml's own choices and rules: a new choice is tested the day it is added.

`combinations` gives every possible combination of some questions; `pairs` a short list in which every possible pair of
answers occurs. Both only hold answers to questions that are asked, ready for --data.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
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
    "gpu_capability": ["8.0", "6.1", "8.9", "12.0"],
    "gpu_memory_gb": [24, 141],
    "num_gpus": [4, 0, 1],
    "num_machines": [1, 2],
    "checkpoint_volume": ["checkpoints", "/mnt/checkpoints"],
    "preemption_grace_seconds": [120, 600],
    "partition": ["", "gpu"],
    "account": ["", "team-1"],
    "qos": ["", "high"],
    "time_limit": ["", "12:00:00"],
    "constraint": ["", "a100&nvlink"],
    "sbatch_options": ["", "--exclusive --gres=gpu:a100:4"],
    "modules": ["", "python/3.12 cuda/13.0"],
    "namespace": ["", "team-1"],
    "storage_class": ["", "fast"],
    "volume_size": ["100Gi", "2Ti"],
    "data_claim": ["", "datasets"],
    "image_pull_secret": ["", "registry-key"],
    "node_selector": ["", "cloud.google.com/gke-accelerator=nvidia-h100-80gb,on=true"],
    "tolerations": ["nvidia.com/gpu:NoSchedule", "", "spot=true:NoSchedule,dedicated:NoExecute"],
    "priority_class": ["", "batch-low"],
    "queue": ["", "research"],
    "base_registry": ["docker.io", "registry.example.com/mirror"],
    "package_index": ["", "https://pypi.example.com/simple"],
    "image_registry": ["", "registry.example.com:5000/team"],
    "shm_size": ["16gb", "64gb"],
}

# What decides how training is started: of these, every possible combination is rendered.
MACHINE = ["gpu", "num_gpus", "num_machines", "precision", "backend", "sharding", "deployment"]

Pair = frozenset[tuple[str, Any]]


class Space:
    """All possible answers, as copier.yml describes them."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.names = list(renderer.questions)
        self.needs = {name: self._needs(name) for name in self.names}
        self._cache: dict[tuple[str, tuple[Any, ...]], tuple[Answers, list[Any], Any]] = {}
        self.values = functools.lru_cache(maxsize=None)(self._values)

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

    def _values(self, name: str) -> list[Any]:
        """All answers that are possible at all."""
        if not self.renderer.questions[name].get("choices"):
            return VALUES[name]
        found = [value for context in self.contexts(name) for value in self.possible(name, context)[0]]
        return list(dict.fromkeys(found))

    def contexts(self, name: str) -> Iterator[Answers]:
        """All answers that can stand before this question, among those that it depends on."""
        order = self.closure(self.needs[name])
        found: list[Answers] = [{}]
        for index, other in enumerate(order):
            needed = {each for later in [name, *order[index:]] for each in self.needs[later]}
            states = {}
            for context in found:
                values, default = self.possible(other, context)
                for value in values or [default]:
                    state = {key: each for key, each in (context | {other: value}).items() if key in needed}
                    states[tuple(state.items())] = state
            found = list(states.values())
        yield from found

    def possible(self, name: str, context: Answers) -> tuple[list[Any], Any]:
        """The valid answers after the others, none when it is not asked; and the default."""
        relevant = {other: context[other] for other in self.needs[name]}
        key = (name, tuple(relevant.values()))
        if key not in self._cache:
            question = self.renderer.question(name, relevant)
            values: list[Any] = []
            if question.get_when():
                choices = [question.cast_answer(choice.value) for choice in question._formatted_choices]
                values = [value for value in choices or VALUES[name] if self._is_valid(question, value)]
            self._cache[key] = (relevant, values, question.get_default())
        return self._cache[key][1:]

    def looked_at(self) -> Iterator[tuple[str, Answers, list[Any], Any]]:
        """What `possible` has found out so far: question, the answers that decide, valid answers, default."""
        for (name, _), found in self._cache.items():
            yield name, *found

    @staticmethod
    def _is_valid(question: Any, value: Any) -> bool:
        try:
            question.validate_answer(question.parse_answer(value))
        except ValueError:
            return False
        return True

    def walk(self, names: Sequence[str]) -> Iterator[Answers]:
        """Every possible combination of the answers to these questions; those they depend on keep their defaults."""
        order = self.closure(names)

        def step(index: int, given: Answers, context: Answers) -> Iterator[Answers]:
            if index == len(order):
                yield given
                return
            name = order[index]
            values, default = self.possible(name, context)
            if name not in names or not values:
                yield from step(index + 1, given, context | {name: default})
                return
            for value in values:
                yield from step(index + 1, given | {name: value}, context | {name: value})

        return step(0, {}, {})

    def complete(self, goal: Answers, preferred: Callable[[Answers, str, Any], int]) -> Answers | None:
        """All answers with these among them, None when they exclude each other; else those that are preferred most."""
        order = self.closure(list(goal))
        order += [name for name in self.names if name not in order]
        needed = [{other for name in order[index:] for other in self.needs[name]} for index in range(len(order))]
        hopeless = set()

        def step(index: int, given: Answers, context: Answers) -> Answers | None:
            if index == len(order):
                return given
            state = (index, tuple(value for name, value in context.items() if name in needed[index]))
            if state in hopeless:
                return None
            name = order[index]
            values, default = self.possible(name, context)
            if name in goal:
                values = [value for value in values if value == goal[name]]
                if not values:
                    return None
            if not values:
                return step(index + 1, given, context | {name: default})
            for value in sorted(values, key=lambda value: -preferred(given, name, value)):
                found = step(index + 1, given | {name: value}, context | {name: value})
                if found is not None:
                    return found
            hopeless.add(state)
            return None

        found = step(0, {}, {})
        return found and {name: found[name] for name in self.names if name in found}

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
    values = {name: space.values(name) for name in space.names}
    goals = [
        {one: first, other: second}
        for one, other in itertools.combinations(space.names, 2)
        for first, second in itertools.product(values[one], values[other])
    ]
    covered: set[Pair] = set()

    def new_pairs(given: Answers, name: str, value: Any) -> int:
        return sum(frozenset([item, (name, value)]) not in covered for item in given.items())

    variants = []
    for goal in goals:
        if frozenset(goal.items()) not in covered and (variant := space.complete(goal, new_pairs)):
            covered |= _pairs(variant)
            variants.append(variant)
    return variants


def _pairs(answers: Answers) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(answers.items(), 2)))
