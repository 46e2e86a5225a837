"""Run a function right after a named module has been imported, without importing it.

The way into Megatron (`integration`) and the CPU ranks (`emulation`) both change modules that may
be imported much later, or never. Neither may import them: importing Megatron takes seconds and
may fail. So they leave a function here, and it runs when, and only when, the module appears.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

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
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        function(module)
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _pending.setdefault(module_name, []).append(function)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a watched module with the other finders and wraps the loader that they chose."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


class _PatchingLoader(importlib.abc.Loader):
    """The real loader, with the pending functions run after the module's body."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        # inspect.getsource, importlib.resources and pickle ask the loader for more than
        # create_module and exec_module; the real one answers.
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not keep this wrapper: later readers of __loader__ want the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for function in _pending.pop(module.__name__, []):
            function(module)
