"""Calls that all ranks have to make are made by all ranks; the training script calls what it must, where it must.

Read from the code, since a run of two processes may get through by luck. A function that needs all ranks says
"Collective" in its docstring, and is held to that as Accelerate's own are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

import bootstrap

PACKAGE = bootstrap.ROOT / "template" / "src" / "{{ package_name }}"
TREES = {path.name: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}

# Of Accelerate, torch.distributed and sharded tensors.
COLLECTIVES = {
    "all_gather",
    "all_reduce",
    "backward",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "check_trigger",
    "clip_grad_norm_",
    "full_tensor",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "get_state_dict",
    "load_state",
    "prepare",
    "reduce",
    "save_state",
    "wait_for_everyone",
}
ONE_RANK = {"is_main_process", "is_local_main_process", "is_last_process", "process_index", "local_process_index"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def called(node: ast.AST) -> str:
    """The last part of a call's name, "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def own_collectives() -> set[str]:
    functions = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    names = {node.name for node in functions if "Collective" in (ast.get_docstring(node) or "")}
    return names - {"finish", "restore", "save", "wait"}  # also names of what one rank does


def of_one_rank(condition: ast.expr) -> bool:
    """Whether ranks may answer it differently, by attributes and by variables that are called after them."""
    names = ONE_RANK | {"is_main", "rank", "turn"}
    return any(getattr(node, "attr", getattr(node, "id", None)) in names for node in ast.walk(condition))


def leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def some_ranks_only(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that some ranks skip: below a condition on the rank, or after one under which the others left."""
    for number, statement in enumerate(body):
        if isinstance(statement, (ast.If, ast.While)) and of_one_rank(statement.test):
            yield from statement.body
            yield from statement.orelse
            if leaves(statement.body):
                yield from body[number + 1 :]
                return
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from some_ranks_only(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from some_ranks_only(handler.body)


def lonely_calls(tree: ast.Module) -> set[str]:
    """Collective calls that some ranks would wait in for ever."""
    collectives = COLLECTIVES | own_collectives()
    lonely = {called(node) for statement in some_ranks_only(tree.body) for node in ast.walk(statement)}
    short = {
        called(node)
        for choice in ast.walk(tree)
        if isinstance(choice, ast.IfExp) and of_one_rank(choice.test)
        for node in ast.walk(choice)
    }
    return (lonely | short) & collectives


# Under DDP, the only backend whose saves are staged, every rank has the whole state.
NOT_COLLECTIVE_THERE = {"staging.py": {"get_state_dict"}}


@pytest.mark.parametrize("name", TREES)
def test_no_rank_is_left_waiting(name: str):
    assert lonely_calls(TREES[name]) == NOT_COLLECTIVE_THERE.get(name, set())


@pytest.mark.parametrize(
    "code",
    [
        "if accelerator.is_main_process:\n    accelerator.save_state(folder)",
        "if accelerator.is_main_process:\n    pass\nelse:\n    accelerator.wait_for_everyone()",
        "def f():\n    if not accelerator.is_main_process:\n        return\n    gather_object([1])",
        "for batch in loader:\n    try:\n        if accelerator.process_index == 0:\n            evaluate(model)\n"
        "    finally:\n        pass",
        "with held():\n    if rank.is_last_process and due:\n        while True:\n            tensor.full_tensor()",
        "def f():\n    is_main = accelerator.is_main_process\n    if is_main:\n        reduce(sums)",
        "state = accelerator.get_state_dict(model) if accelerator.is_main_process else None",
    ],
)
def test_one_that_is_would_be_seen(code: str):
    assert lonely_calls(ast.parse(code))


def calls(name: str) -> list[tuple[str, ast.Call]]:
    return [
        (file, node)
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) == name
    ]


def test_one_call_prepares_everything():
    """DeepSpeed takes the size of a batch from the loaders that come with the model."""
    [(file, call)] = [
        (file, call) for file, call in calls("prepare") if ast.unparse(call.func) == "accelerator.prepare"
    ]
    assert (file, ast.unparse(call)) == ("backend.py", "accelerator.prepare(model, optimizer, *loaders)")
    trained = [call for file, call in calls("prepare") if file == "train.py"]
    assert [ast.unparse(argument) for argument in trained[0].args[1:]] == [
        "parts.model",
        "parts.optimizer",
        "parts.train_loader",
        "parts.eval_loader",
    ]


def test_gradients_are_clipped_by_the_accelerator_when_they_are_whole():
    owners = {
        ast.unparse(call.func) for file, call in calls("clip_grad_norm_") if file != "memory.py"
    }  # which estimates
    assert owners == {"accelerator.clip_grad_norm_"}
    [(file, clipping)] = calls("clip_gradients")
    [around] = [
        node
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.If) and any(clipping is inner for inner in ast.walk(node))
    ]
    assert (file, ast.unparse(around.test)) == ("train.py", "accelerator.sync_gradients")


def test_the_accelerator_moves_models_and_batches_and_scales_gradients():
    script = ast.unparse(TREES["train.py"])
    assert "cuda" not in script and "model.to(" not in script and "batch.to(" not in script
    assert {ast.unparse(call.func) for file, call in calls("backward") if file == "train.py"} == {
        "accelerator.backward"
    }


def test_evaluation_is_the_work_of_all_ranks():
    assert not [node for node in ast.walk(TREES["evaluate.py"]) if isinstance(node, ast.If) and of_one_rank(node.test)]
