"""FSDP 2 on a CPU, for smoke runs and tests: `launch.sh --cpu` puts this folder on PYTHONPATH.

Accelerate turns FSDP into DDP where there is no GPU, although torch shards on a CPU all the same.
Python imports this file at its start; once Accelerate's state is loaded, it is told to stay FSDP.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "accelerate.state"


class _Finder(MetaPathFinder):
    """Finds the module as everybody does, and changes it once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _keep_fsdp(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _keep_fsdp(state: Any) -> None:
    start, kind = state.AcceleratorState.__init__, state.DistributedType

    def start_with_fsdp(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is None or self.distributed_type != kind.MULTI_CPU:
            return
        self.distributed_type = kind.FSDP
        state.PartialState._shared_state["distributed_type"] = kind.FSDP
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin

    state.AcceleratorState.__init__ = start_with_fsdp


if os.environ.get("ACCELERATE_USE_CPU") == "true":
    sys.meta_path.insert(0, _Finder())
