"""Lines of a listing as data: declarations and statements, without their meaning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilefold.algebra import text as expr_text
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr
from tilefold.algebra.text import Names
from tilefold.blockbuster.ir import Array, Param, Type
from tilefold.blockbuster.listing import ACCUMULATE, INDENT
from tilefold.errors import ParseError
from tilefold.tensor.text import parse_names, parse_shape

HEAD = re.compile(r"program (\w+)\(([^)]*)\)")
_DIM = re.compile(r"dim (\w+) = (.*)")
_INPUT = re.compile(r"input (\w+)\[([^\]]*)\] of \(([^)]*)\) in \(([^)]*)\): (\w+)")
_RAW = re.compile(r"input (\w+) raw \[(.*)\]: (\w+)")
_OUTPUT = re.compile(r"output (\w+)\[([^\]]*)\] in \(([^)]*)\): (\w+)")
_LOOP = re.compile(r"(forall|for) (\w+) in range\((?:(\d+),)?\s*(\w+)\):")
_LOAD = re.compile(r"(\w+) = load\((\w+)\[([^\]]*)\]\)")
_STORE = re.compile(r"store\((\w+),\s*(\w+)\[([^\]]*)\]\)")
_ACC = re.compile(r"(\w+) (\+=|\*=|max=|min=) (.*)")
_ASSIGN = re.compile(r"(\w+) = (.*)")
VIEW = re.compile(r"view (\w+)\[([^\]]*)\] of \(([^)]*)\) = (\w+)\[(.*)\]")
_MISC = re.compile(r"misc (.*) = \{(.*)\} with (.*)")
PLACE = re.compile(r"(\w+)\[([^\]]*)\] of \(([^)]*)\)")
_OF_SYMBOL = {symbol: op for op, symbol in ACCUMULATE.items()}


@dataclass(frozen=True, slots=True)
class Loop:
    dim: str
    start: int
    body: tuple[Stmt, ...]
    line: str


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    buffer: str
    index: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Store:
    name: str
    buffer: str
    index: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Acc:
    name: str
    op: str
    text: str


@dataclass(frozen=True, slots=True)
class Assign:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Raw:
    """A view or a miscellaneous operator: the match of its line."""

    found: re.Match[str]


Stmt = Loop | Load | Store | Acc | Assign | Raw


@dataclass(slots=True)
class Heading:
    name: str
    syms: tuple[str, ...]
    sizes: dict[str, Expr] = field(default_factory=dict)
    inputs: list[Param] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)


def declaration(line: str, top: Heading, names: Names) -> bool:
    if m := _DIM.fullmatch(line):
        top.sizes[m[1]] = expr_text.parse(m[2], names)
    elif m := _INPUT.fullmatch(line):
        top.inputs.append(Param(m[1], Type(parse_names(m[2]), parse_names(m[3]))))
        top.arrays[m[1]] = Array(parse_names(m[4]), DType(m[5]))
    elif m := _RAW.fullmatch(line):
        top.inputs.append(Param(m[1], Type(raw=True)))
        top.arrays[m[1]] = Array((), DType(m[3]), parse_shape(m[2], names))
    elif m := _OUTPUT.fullmatch(line):
        top.outputs.append(m[1])
        top.arrays[m[1]] = Array(parse_names(m[3]), DType(m[4]))
    else:
        return False
    return True


def statements(lines: list[str], at: int, depth: int) -> tuple[tuple[Stmt, ...], int]:
    out: list[Stmt] = []
    while at < len(lines):
        raw = lines[at]
        indent = len(raw) - len(raw.lstrip())
        if indent < depth * len(INDENT):
            break
        if indent > depth * len(INDENT):
            return tuple(out), at
        line = raw.strip()
        if m := _LOOP.fullmatch(line):
            if m[4] != m[2].upper():
                raise ParseError(f"{m[2]} runs over {m[2].upper()}, not {m[4]}: {line!r}")
            body, at = statements(lines, at + 1, depth + 1)
            if not body:
                raise ParseError(f"a loop without a body: {line!r}")
            out.append(Loop(m[2], int(m[3] or 0), body, line))
            continue
        out.append(_statement(line))
        at += 1
    return tuple(out), at


def _statement(line: str) -> Stmt:
    if m := _LOAD.fullmatch(line):
        return Load(m[1], m[2], parse_names(m[3]))
    if m := _STORE.fullmatch(line):
        return Store(m[1], m[2], parse_names(m[3]))
    if m := VIEW.fullmatch(line) or _MISC.fullmatch(line):
        return Raw(m)
    if m := _ACC.fullmatch(line):
        return Acc(m[1], _OF_SYMBOL[m[2]], m[3])
    if m := _ASSIGN.fullmatch(line):
        return Assign(m[1], m[2])
    raise ParseError(f"not a statement of a listing: {line!r}")


def loads_by_path(stmts: Sequence[Stmt], path: tuple[int, ...] = ()) -> dict[str, list[tuple[int, ...]]]:
    """Where each buffer is read: positions of the loops around."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for k, s in enumerate(stmts):
        match s:
            case Loop():
                for b, paths in loads_by_path(s.body, (*path, k)).items():
                    found.setdefault(b, []).extend(paths)
            case Load(_, buffer, _):
                found.setdefault(buffer, []).append(path)
            case Raw(m):
                text = m[4] if m.re is VIEW else m[3]
                for b in re.findall(r"\w+", text):
                    found.setdefault(b, []).append(path)
    return found


def buffer_dims(stmts: Sequence[Stmt]) -> dict[str, tuple[str, ...]]:
    """The dims of each buffer, from all its indices: a peeled entry ("0") is named by another statement."""
    found: dict[str, list[str]] = {}
    for s in stmts:
        match s:
            case Loop():
                items = buffer_dims(s.body).items()
            case Load(_, buffer, index) | Store(_, buffer, index):
                items = {buffer: index}.items()
            case _:
                continue
        for buffer, index in items:
            old = found.setdefault(buffer, list(index))
            if len(old) != len(index):
                raise ParseError(f"{buffer} is indexed by {', '.join(old)} and by {', '.join(index)}")
            for k, i in enumerate(index):
                if old[k] == "0":
                    old[k] = i
                elif i not in ("0", old[k]):
                    raise ParseError(f"{buffer} is indexed by {old[k]} and by {i}")
    return {buffer: tuple(index) for buffer, index in found.items()}
