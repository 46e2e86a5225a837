"""Run a function right after a named module has been imported, without importing it.

The way into Megatron (`integration`) and the CPU ranks (`emulation`) change modules that may be
imported much later, or never. Neither may import them: importing Megatron takes seconds and may
fail.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_pending: dict[str, list[Callable[[ModuleType], None]]] = {}


def after_import(module_name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` once `module_name` is imported; at once if it already is.

    Functions left for one module run in the order in which they were left. An exception in one
    of them propagates through the import statement that triggered it.

    Args:
        module_name: dotted name, such as "megatron.core.transformer.transformer_config".
        function: called once, with the module, after its body has run.
    """
    module = sys.modules.get(module_name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        function(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _pending.setdefault(module_name, []).append(function)


class _Finder(MetaPathFinder):
    """Finds a watched module with the other finders, and adds a step to its loader."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _pending:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        # None is a namespace package, without a body to wait for.
        loader = getattr(spec, "loader", None)
        if loader is not None:
            load = loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                for function in _pending.pop(module.__name__, []):
                    function(module)

            loader.exec_module = load_and_call
        return spec
