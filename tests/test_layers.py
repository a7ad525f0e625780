"""Imports go one way through the layers, back ends stay apart, and imports sit at the top of modules."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tilefold"

#: Lowest first; a module imports from its own layer or lower ones. `tilefold/__init__.py` is on top.
LAYERS = (
    ("errors", "config", "files", "artifacts", "names", "log", "garbage", "version", "user_file"),
    ("algebra",),
    ("tensor",),
    ("block",),
    ("blockbuster",),
    ("tile",),
    ("plan",),
    ("backends",),
    ("runtime",),
    ("pipeline",),
    ("frontend",),
    ("suites",),
    ("explanation",),
    ("integrations",),
    ("demo",),
    ("cli",),
    ("with_torch",),
)
#: Packages that may be missing, or are slow to load and only some runs need: imported where used.
OPTIONAL = frozenset(
    {"transformers", "torchvision", "matplotlib", "triton", "sympy", "z3", "mpmath", "quack", "liger_kernel", "scipy"}
)
#: The same of parts of packages.
OPTIONAL_PARTS = ("torch._inductor.",)
#: The only module that may read environment variables.
ENVIRONMENT = "config"


def layer(module: str) -> int:
    """Position of a dotted module in LAYERS; the package itself, as `tilefold`, is above all."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(LAYERS)
    top = "cli" if parts[1].startswith("cli") or parts[1] == "__main__" else parts[1]
    for n, names in enumerate(LAYERS):
        if top in names:
            return n
    raise KeyError(f"{module} belongs to no layer")


def imported(tree: ast.AST, module: str, is_package: bool = False) -> list[tuple[ast.stmt, str]]:
    """Every module that the code imports, relative imports resolved; `from p import m` counts as p.m."""
    found: list[tuple[ast.stmt, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*up, base] if base else up)
            found += [(node, f"{base}.{a.name}") for a in node.names]
    return found


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What in a module breaks the rules, one line each."""
    tree = ast.parse(source)
    out = []
    for node, name in imported(tree, module, is_package):
        if name.split(".")[0] == "tilefold" and name != module:
            out += _direction(node, name, module)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            out += [
                f"{module}:{node.lineno} imports {name} inside {function.name}"
                for node, name in imported(function, module, is_package)
                if name.split(".")[0] not in OPTIONAL and not name.startswith(OPTIONAL_PARTS)
            ]
    if module != f"tilefold.{ENVIRONMENT}":
        out += [
            f"{module}:{n.lineno} reads the environment"
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv", "environb")
        ]
    lines = source.splitlines()
    out += [
        f"{module}:{n.lineno} catches everything, and no comment says what that hides"
        for n in ast.walk(tree)
        if isinstance(n, ast.ExceptHandler)
        and (n.type is None or (isinstance(n.type, ast.Name) and n.type.id in ("Exception", "BaseException")))
        and not _explained(n, lines)
    ]
    return out


def _explained(handler: ast.ExceptHandler, lines: list[str]) -> bool:
    """Whether what is caught goes on, or a comment on its line, or just above, says what is hidden."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return True
    mine, above = lines[handler.lineno - 1], lines[handler.lineno - 2].strip()
    return "#" in mine or above.startswith("#")


def _direction(node: ast.stmt, name: str, module: str) -> list[str]:
    target = name.split(".")
    if target == ["tilefold"] or (len(target) == 2 and not _is_module(target[1])):
        return (
            []
            if module == "tilefold" or layer(module) >= layer("tilefold.explanation")
            else [f"{module}:{node.lineno} imports the package's top ({name})"]
        )
    if layer(name) > layer(module):
        return [f"{module}:{node.lineno} imports {name}, a higher layer"]
    mine = module.split(".")
    if mine[1:2] == target[1:2] == ["backends"] and len(mine) > 2 and len(target) > 2 and mine[2] != target[2]:
        both_packages = all((PACKAGE / "backends" / p).is_dir() for p in (mine[2], target[2]))
        return [f"{module}:{node.lineno} imports another back end, {name}"] if both_packages else []
    return []


def _is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_module_keeps_the_rules(path):
    found = violations(path.read_text(), dotted(path), path.name == "__init__.py")
    assert not found, "\n".join(found)


def file_imports(sources: Mapping[str, str], packages: Collection[str]) -> dict[str, set[str]]:
    """Module -> modules of `sources` that it imports when it runs, names of a package's modules resolved. Imports for
    types alone do not count."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        tree = ast.parse(source)
        typing = {id(x) for n in ast.walk(tree) if _for_types(n) for x in ast.walk(n)}
        names = {n for at, n in imported(tree, module, module in packages) if id(at) not in typing}
        names |= {n.rpartition(".")[0] for n in names}
        found[module] = (names & set(sources)) - {module}
    return found


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of files each of which reaches every other (Tarjan's components of more than one)."""
    graph = {m: sorted(targets) for m, targets in imports.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(m: str) -> None:
        order[m] = low[m] = len(order)
        stack.append(m)
        for t in graph[m]:
            if t not in order:
                visit(t)
            if t in stack:
                low[m] = min(low[m], low[t])
        if low[m] == order[m]:
            at = stack.index(m)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1:
                found.append(group)

    for m in graph:
        if m not in order:
            visit(m)
    return found


def test_files_import_without_circles():
    paths = {dotted(p): p for p in modules()}
    packages = {m for m, p in paths.items() if p.name == "__init__.py"}
    found = circles(file_imports({m: p.read_text() for m, p in paths.items() if m != "tilefold"}, packages))
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_circles_are_found():
    sources = {"a.x": "from a import y", "a.y": "from a.z import f", "a.z": "import a.x", "a.w": "import a.x"}
    assert circles(file_imports(sources, ())) == [["a.x", "a.y", "a.z"]]
    assert not circles(file_imports(sources | {"a.z": ""}, ()))
    assert not circles(file_imports(sources | {"a.z": "if TYPE_CHECKING:\n    import a.x"}, ()))


def _for_types(n: ast.AST) -> bool:
    return isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("tilefold.algebra.expr", "from tilefold.tensor.ir import Program", "a higher layer"),
        ("tilefold.algebra.expr", "import tilefold.tile.ir", "a higher layer"),
        ("tilefold.algebra.expr", "from ..tile import ir", "a higher layer"),
        ("tilefold.algebra.expr", "from tilefold import tile", "a higher layer"),
        ("tilefold.algebra.expr", "import tilefold", "the package's top"),
        ("tilefold.algebra.expr", "from tilefold import fuse", "the package's top"),
        ("tilefold.tile.ir", "def f():\n    import json", "imports json inside f"),
        ("tilefold.tile.ir", "class A:\n    def f(self):\n        from os import path", "inside f"),
        ("tilefold.runtime.cache", "import os\nx = os.environ['HOME']", "reads the environment"),
        ("tilefold.runtime.cache", "import os\nx = os.getenv('HOME')", "reads the environment"),
        ("tilefold.runtime.cache", "try:\n    pass\nexcept:\n    pass", "catches everything"),
        ("tilefold.runtime.cache", "try:\n    pass\nexcept Exception:\n    pass", "catches everything"),
    ],
)
def test_breaking_code_is_found(module, source, message):
    found = violations(source, module)
    assert any(message in line for line in found), found


def test_other_back_ends_are_found(tmp_path, monkeypatch):
    for name in ("cpp", "triton"):
        (tmp_path / "backends" / name).mkdir(parents=True)
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    bad = violations("from tilefold.backends.triton.render import render", "tilefold.backends.cpp.launch")
    assert bad == ["tilefold.backends.cpp.launch:1 imports another back end, tilefold.backends.triton.render.render"]
    assert not violations("from tilefold.backends.cpp.render import render", "tilefold.backends.cpp.launch")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tilefold.tile.ir", "from tilefold.algebra.expr import Expr\nfrom tilefold.errors import VerifyError"),
        ("tilefold.tile.ir", "from . import text"),
        ("tilefold.algebra.derive", "def f():\n    import sympy"),
        ("tilefold.config", "import os\nx = os.environ.get('CXX')"),
        ("tilefold.cli.friendly", "try:\n    pass\nexcept Exception:  # of the user's code\n    pass"),
        ("tilefold.cli.friendly", "try:\n    pass\n# Hidden: nothing.\nexcept Exception:\n    pass"),
        ("tilefold.files", "try:\n    pass\nexcept BaseException:\n    print()\n    raise"),
        ("tilefold.cli_bench", "import tilefold\nfrom tilefold.suites import bench_cpu"),
    ],
)
def test_good_code_passes(module, source):
    assert not violations(source, module)
