"""What is registered with torch wherever Tilefold and torch are both loaded, in any order: operators that saved
programs call (`torch.export.load`, AOTInductor).

`import tilefold` does not load torch. Where torch is not there yet, its module is made as usual, and ours after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPERATORS = "tilefold.frontend.registered.fused"


def register() -> None:
    """Register now, or once torch is loaded."""
    if "torch" in sys.modules:
        import_module(_OPERATORS)
    elif not any(isinstance(f, _AfterTorch) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(MetaPathFinder):
    """Finds torch as the other finders do."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = [f.find_spec for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for find in others if (s := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Loader) -> None:
        load = loader.exec_module

        def then(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                import_module(_OPERATORS)

        loader.exec_module = then  # type: ignore[method-assign]
