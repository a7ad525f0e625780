"""Break a sample of places on purpose, run the nearest tests, and list what survives.

    python bench/mutants.py [--sample 20] [--seed 0] [module[:function] ...]       (or: make mutants)

A place is a comparison (flipped), a number (off by one), a truth value, `and` / `or`, `+` / `-`, `min` / `max`,
a negation (dropped), or a branch (never taken). Only one is broken at a time, in a copy of the package. The nearest
tests of `tilefold/a/b.py` are those that import it, tests/a first; `--tests` names others. A failure counts if that
test passes where nothing is broken; being stopped after `--limit` seconds counts if the tests end in that time
without it.

mutmut and cosmic-ray were considered: both run one given suite for each mutant (here 40 minutes of it), or want the
nearest tests written down for each module.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  (imported once, for every fork)

ROOT = Path(__file__).parents[1]
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken place: the module's path in the package, the source with it broken, and what was done where."""

    path: Path
    source: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.what}"


def count(source: str, function: str | None = None) -> int:
    """Mutants of a module, or of one of its functions or classes."""
    return sum(1 for _ in _changes(ast.parse(source), function))


def mutant(path: Path, source: str, n: int, function: str | None = None) -> Mutant:
    """The n-th of them."""
    tree = ast.parse(source)
    node, change = next(itertools.islice(_changes(tree, function), n, None))
    line, before = node.lineno, ast.unparse(node).splitlines()[0]
    change()
    return Mutant(path, ast.unparse(tree), f"{line}: {before}  ->  {ast.unparse(node).splitlines()[0]}")


def _changes(tree: ast.Module, function: str | None) -> Iterator[tuple[ast.expr | ast.stmt, _Change]]:
    """Places of a tree, each with what breaks it in place."""
    roots: list[ast.AST] = [tree]
    if function is not None:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        roots = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.name == function]
    for root in roots:
        for node in ast.walk(root):
            if isinstance(node, ast.expr | ast.stmt):
                for change in _of(node):
                    yield node, change


class _Change:
    """Sets an attribute of a node."""

    def __init__(self, node: ast.AST, name: str, value: object):
        self.node, self.name, self.value = node, name, value

    def __call__(self) -> None:
        setattr(self.node, self.name, self.value)


def _of(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=[op, *rest]) if type(op) in _COMPARISONS:
            yield _Change(node, "ops", [_COMPARISONS[type(op)](), *rest])
        case ast.Constant(bool() as value):
            yield _Change(node, "value", not value)
        case ast.Constant(int() | float() as value):
            yield _Change(node, "value", value + 1)
        case ast.BoolOp(op=op):
            yield _Change(node, "op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            yield _Change(node, "op", ast.Sub() if isinstance(op, ast.Add) else ast.Add())
        case ast.Call(func=ast.Name(name)) if name in _SWAPPED:
            yield _Change(node.func, "id", _SWAPPED[name])
        case ast.If() | ast.IfExp():
            yield _Change(node, "test", ast.Constant(False))
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield _Change(node, "operand", ast.UnaryOp(ast.Not(), inner))


def nearest(path: Path, most: int) -> list[str]:
    """Test files that import a module of the package, those of its own folder first."""
    dotted = ".".join(("tilefold", *path.with_suffix("").parts))
    package, name = dotted.rpartition(".")[::2]
    own = ROOT / "tests" / path.parent
    found = []
    for f in sorted((ROOT / "tests").rglob("test_*.py")):
        text = f.read_text()
        if f"from {dotted} import" in text or f"from {package} import {name}" in text or f"import {dotted}" in text:
            found.append(f)
    mirror = own / f"test_{name}.py"
    found += [f for f in (mirror, *sorted(own.glob("test_*.py"))) if f.exists() and f not in found]
    found = sorted(dict.fromkeys(found), key=lambda f: (f != mirror, f.parent != own))
    return [str(f.relative_to(ROOT)) for f in found if "gpu" not in f.parts][:most]


class _Failed:
    """A plugin of pytest: writes the names of failed tests into a file."""

    def __init__(self, file: Path):
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write_text(report.nodeid)


def tested(copy: Path, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
    """The exit status of pytest in the copy (None: stopped after `limit` seconds) and the test that failed.

    It runs in a fork, which has torch imported.
    """
    failed = copy / "failed"
    failed.write_text("")
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.chdir(copy)
            os.environ |= {"PYTHONPATH": str(copy), "TILEFOLD_CACHE_DIR": str(copy / "cache")}
            sys.path[0] = str(copy)
            sys.dont_write_bytecode = True
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments], [_Failed(failed)])))
        finally:
            os._exit(70)
    stop = time.monotonic() + limit
    while time.monotonic() < stop:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), failed.read_text()
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, ""


class Copy:
    """A copy of the package and its tests, in which one place at a time is broken."""

    def __init__(self, folder: Path, limit: float):
        self._folder, self._limit = folder, limit
        self._fine: dict[tuple[str, ...], bool] = {}
        for name in ("tilefold", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def noticed(self, m: Mutant, tests: Sequence[str]) -> str:
        """What the tests say to it: "noticed", "SURVIVED", or "too long" where they do without it too."""
        file = self._folder / "tilefold" / m.path
        whole, skip = file.read_text(), list[str]()
        while tests:
            file.write_text(m.source)
            try:
                status, failed = tested(self._folder, [*tests, *skip], self._limit)
            finally:
                file.write_text(whole)
            if status in (0, 5):  # 5: no test is left
                break
            if status is None:
                return "noticed" if self._passes((*tests, *skip)) else "too long"
            if self._passes((failed,) if failed else ("--collect-only", *tests)):
                return "noticed"
            if not failed:
                break
            skip += ["--deselect", failed]  # it fails in any copy
        return "SURVIVED"

    def _passes(self, arguments: tuple[str, ...]) -> bool:
        """Whether such tests pass where nothing is broken."""
        if arguments not in self._fine:
            self._fine[arguments] = tested(self._folder, arguments, self._limit)[0] == 0
        return self._fine[arguments]


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("places", nargs="*", help="modules under tilefold/, with :function for a part")
    ask.add_argument("--sample", type=int, default=20, help="mutants tried")
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--limit", type=float, default=300.0, help="seconds a mutant")
    ask.add_argument("--files", type=int, default=3, help="test files a mutant")
    ask.add_argument("--tests", nargs="*", default=None, help="these instead of the nearest")
    a = ask.parse_args()
    package = ROOT / "tilefold"
    places = a.places or [str(p.relative_to(package)) for p in sorted(package.rglob("*.py"))]
    every: list[tuple[Path, str, int, str | None]] = []
    for place in places:
        name, _, function = place.removeprefix("tilefold/").partition(":")
        if not (package / name).is_file():
            ask.error(f"no such module under tilefold/: {name}")
        source = (package / name).read_text()
        every += [(Path(name), source, n, function or None) for n in range(count(source, function or None))]
    chosen = [mutant(*x) for x in random.Random(a.seed).sample(every, min(a.sample, len(every)))]
    said: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="tilefold-mutants-") as folder:
        copy = Copy(Path(folder), a.limit)
        for m in chosen:
            how = copy.noticed(m, a.tests or nearest(m.path, a.files))
            said[how] += 1
            print(f"{how:8s}", m, flush=True)
    print(", ".join(f"{n} {how}" for how, n in sorted(said.items())))
    return bool(said["SURVIVED"])


if __name__ == "__main__":
    sys.exit(main())
