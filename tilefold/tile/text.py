"""Printer and parser of the tile IR (grammar in `tile.ir`); `parse(show(k)) == k`.

    kernel attention(S)
      dim i = S
      dim j = S
      dim d = 64
      in q: f32[2, 12, S, 64] unit 3
      out o: f32[2, 12, S, 64]
      grid b:1 h:1 i:64
        alloc s: f32[j:128, i:64] tile
        fill m = -inf
        for j:128 in 0 .. minimum(size(j), tile_stop(i))
          s[j, i] = gemm over d: k[b, h, j, d] * q[b, h, i, d]
          m[i] max= over j: s[j, i]                      accumulating Reduce; `= max over j:` overwrites
          w[i], x[i] = argmax over j: s[j, i] -> j       Select: value -> payload
        store o[b, h, i, e] over i, e = acc[i, e] / t[i]

Nesting is by indentation. `note` and `listing` are comments: not part of a kernel's meaning, not
printed. Dims after a destination are for the reader; where given they must be the buffer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from tilefold.algebra import text as expr_text
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Load
from tilefold.algebra.text import Names
from tilefold.block.text import ADDED, STORES
from tilefold.errors import ParseError
from tilefold.tile.ir import (
    Alloc,
    Buffer,
    Fill,
    For,
    Gemm,
    Kernel,
    Map,
    Reduce,
    Select,
    Stmt,
    Store,
    TensorParam,
    Tiled,
)

_STEP = "  "


def show(k: Kernel) -> str:
    """The whole kernel."""
    lines = [f"kernel {k.name}({', '.join(k.syms)})"]
    lines += [f"{_STEP}dim {d} = {expr_text.show(e)}" for d, e in k.sizes.items()]
    for t in k.tensors:
        unit = "" if t.unit_axis is None else f" unit {t.unit_axis}"
        lines.append(f"{_STEP}{t.role} {t.name}: {t.dtype.value}[{', '.join(map(expr_text.show, t.shape))}]{unit}")
    lines.append(_STEP + " ".join(["grid", *(f"{g.dim}:{g.tile}" for g in k.grid)]))
    lines += _body(k.body, {}, 2)
    return "\n".join(lines) + "\n"


def _body(body: tuple[Stmt, ...], outer: Mapping[str, Buffer], level: int) -> list[str]:
    buffers, lines = dict(outer), []
    for s in body:
        if isinstance(s, Alloc):
            buffers[s.buffer.name] = s.buffer
        lines.append(_STEP * level + show_stmt(s, buffers))
        if isinstance(s, For):
            lines += _body(s.body, buffers, level + 1)
    return lines


def show_stmt(s: Stmt, buffers: Mapping[str, Buffer]) -> str:
    """One line for a statement (the head of a loop); `buffers` in scope supply the dims shown."""

    def dest(name: str) -> str:
        b = buffers.get(name)
        return f"{name}[{', '.join(b.dims)}]" if b is not None and b.dims else name

    def over(left: str, op: str, rdims: tuple[str, ...], accumulate: bool, kept: DType | None = None) -> str:
        op = op if kept is None else f"{op}.{kept.value}"
        head = f"{left} {op}=" if accumulate else f"{left} = {op}"
        return f"{head} over {', '.join(rdims)}:"

    e = expr_text.show
    match s:
        case Alloc(b):
            axes = ", ".join(f"{d}:{e(x)}" for d, x in zip(b.dims, b.extents, strict=True))
            return f"alloc {b.name}: {b.dtype.value}[{axes}] {b.scope}"
        case For(dim, tile, _, start, stop):
            bounds = "" if start is None and stop is None else " in"
            bounds += "" if start is None else f" {e(start)}"
            bounds += "" if not bounds else " .."
            bounds += "" if stop is None else f" {e(stop)}"
            return f"for {dim}:{tile}{bounds}"
        case Fill(buf, value):
            return f"fill {buf} = {e(value)}"
        case Map(buf, expr):
            return f"{dest(buf)} = {e(expr)}"
        case Reduce(buf, op, rdims, expr, accumulate, kept):
            return f"{over(dest(buf), op, rdims, accumulate, kept)} {e(expr)}"
        case Gemm(buf, a, b, rdims, accumulate, kept):
            return f"{over(dest(buf), 'gemm', rdims, accumulate, kept)} {e(a)} * {e(b)}"
        case Select(buf, index_buf, op, rdims, expr, payload, accumulate):
            left = f"{dest(buf)}, {dest(index_buf)}"
            return f"{over(left, op, rdims, accumulate)} {e(expr)} -> {e(payload)}"
        case Store(tensor, index, dims, expr, added):
            return f"{STORES[added]} {tensor}[{', '.join(map(e, index))}] over {', '.join(dims)} = {e(expr)}"
        case _:
            assert_never(s)


_HEAD = re.compile(r"kernel (\w+)\(([^)]*)\)")
_DIM = re.compile(r"dim (\w+) = (.*)")
_TENSOR = re.compile(r"(in|out|scratch) (\w+): (\w+)\[(.*)\](?: unit (\d+))?")
_TILED = re.compile(r"(\w+):(\d+)")
_ALLOC = re.compile(r"alloc (\w+): (\w+)\[(.*)\] (tile|panel)")
_FOR = re.compile(r"for (\w+):(\d+)(?: in(?: (.+?))? \.\.(?: (.+))?)?")
_FILL = re.compile(r"fill (\w+) = (.*)")
_STORE = re.compile(rf"({'|'.join(ADDED)}) (\w+)\[(.*)\] over ([\w, ]*?) ?= (.*)")
_DEST = r"(\w+)(?:\[([\w, ]*)\])?"
_OVER = re.compile(rf"{_DEST}(?:, {_DEST})? (?:= ([\w.]+)|([\w.]+)=) over ([\w, ]*): (.*)")
_MAP = re.compile(rf"{_DEST} = (.*)")


@dataclass(slots=True)
class _Line:
    indent: int
    text: str


@dataclass(slots=True)
class _Reader:
    """The lines, and what names mean so far."""

    lines: list[_Line]
    at: int = 0
    names: Names = field(default_factory=Names)

    def peek(self) -> _Line | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def next(self) -> str:
        self.at += 1
        return self.lines[self.at - 1].text

    def expr(self, text: str) -> Expr:
        return expr_text.parse(text, self.names)


def parse(text: str) -> Kernel:
    """The kernel that `show` printed; ParseError names the line that cannot be read."""
    lines = [_Line(len(ln) - len(ln.lstrip()), ln.strip()) for ln in text.splitlines()]
    r = _Reader([ln for ln in lines if ln.text and not ln.text.startswith("#")])
    head = _HEAD.fullmatch(r.next()) if r.lines else None
    if head is None:
        raise ParseError("a kernel starts with `kernel name(syms)`")
    syms = _words(head[2])
    r.names.syms |= set(syms)
    sizes: dict[str, Expr] = {}
    tensors: list[TensorParam] = []
    grid: list[Tiled] | None = None
    while grid is None:
        line = r.next() if r.peek() is not None else ""
        if m := _DIM.fullmatch(line):
            sizes[m[1]] = r.expr(m[2])
        elif m := _TENSOR.fullmatch(line):
            shape = tuple(r.expr(s) for s in _split(m[4]))
            unit = None if m[5] is None else int(m[5])
            tensors.append(TensorParam(m[2], _dtype(m[3], line), shape, m[1], unit))  # type: ignore[arg-type]
        elif line == "grid" or line.startswith("grid "):
            grid = [_tiled(word, line) for word in line.split()[1:]]
        else:
            raise ParseError(f"expected `dim`, a tensor or `grid`, found {line!r}")
    r.names.dims |= set(sizes)
    r.names.tensors |= {t.name for t in tensors}
    grid_indent = r.lines[r.at - 1].indent
    body = _parse_body(r, grid_indent, {})
    if r.peek() is not None:
        raise ParseError(f"this line is outside the kernel's body: {r.next()!r}")
    return Kernel(head[1], syms, sizes, tuple(tensors), tuple(grid), body)


def _parse_body(r: _Reader, parent: int, outer: Mapping[str, Buffer]) -> tuple[Stmt, ...]:
    """The statements indented deeper than `parent`."""
    buffers, body = dict(outer), list[Stmt]()
    indent: int | None = None
    while (line := r.peek()) is not None and line.indent > parent:
        indent = line.indent if indent is None else indent
        if line.indent != indent:
            raise ParseError(f"unexpected indentation: {line.text!r}")
        text = r.next()
        if m := _FOR.fullmatch(text):
            start, stop = (None if s is None else r.expr(s) for s in (m[3], m[4]))
            body.append(For(m[1], int(m[2]), _parse_body(r, indent, buffers), start, stop))
            continue
        s = _statement(r, text, buffers)
        if isinstance(s, Alloc):
            buffers[s.buffer.name] = s.buffer
            r.names.tensors.add(s.buffer.name)
        body.append(s)
    return tuple(body)


def _statement(r: _Reader, text: str, buffers: Mapping[str, Buffer]) -> Stmt:
    if m := _ALLOC.fullmatch(text):
        axes = [a.partition(":") for a in _split(m[3])]
        extents = tuple(r.expr(x) for _, _, x in axes)
        dims = tuple(d.strip() for d, _, _ in axes)
        return Alloc(Buffer(m[1], dims, extents, _dtype(m[2], text), m[4]))  # type: ignore[arg-type]
    if m := _FILL.fullmatch(text):
        return Fill(m[1], r.expr(m[2]))
    if m := _STORE.fullmatch(text):
        return Store(m[2], tuple(r.expr(i) for i in _split(m[3])), _words(m[4]), r.expr(m[5]), ADDED[m[1]])
    if m := _OVER.fullmatch(text):
        return _over(r, m, text, buffers)
    if m := _MAP.fullmatch(text):
        _check_dims(m[1], m[2], text, buffers)
        return Map(m[1], r.expr(m[3]))
    raise ParseError(f"not a statement: {text!r}")


def _over(r: _Reader, m: re.Match[str], text: str, buffers: Mapping[str, Buffer]) -> Stmt:
    """Reduce, Gemm or Select: `dest[, dest] = op over rdims: ...`."""
    buf, index_buf, rdims, accumulate = m[1], m[3], _words(m[7]), m[6] is not None
    op, _, kind = (m[6] if accumulate else m[5]).partition(".")
    kept = _dtype(kind, text) if kind else None
    _check_dims(buf, m[2], text, buffers)
    if index_buf is not None:
        _check_dims(index_buf, m[4], text, buffers)
        value, arrow, payload = m[8].partition(" -> ")
        if not arrow:
            raise ParseError(f"a selection ends with `-> payload`: {text!r}")
        return Select(buf, index_buf, op, rdims, r.expr(value), r.expr(payload), accumulate)
    if op != "gemm":
        return Reduce(buf, op, rdims, r.expr(m[8]), accumulate, kept)
    for split in re.finditer(r" \* ", m[8]):  # the product at the top, not one inside an index
        left, right = m[8][: split.start()], m[8][split.end() :]
        if left.count("[") == left.count("]") and left.count("(") == left.count(")"):
            a, b = r.expr(left), r.expr(right)
            if isinstance(a, Load) and isinstance(b, Load):
                return Gemm(buf, a, b, rdims, accumulate, kept)
    raise ParseError(f"gemm multiplies two loads: {text!r}")


def _check_dims(name: str, dims: str | None, text: str, buffers: Mapping[str, Buffer]) -> None:
    if dims is not None and name in buffers and _words(dims) != buffers[name].dims:
        raise ParseError(f"the dims of {name} are [{', '.join(buffers[name].dims)}]: {text!r}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(s.strip() for s in text.split(",") if s.strip())


def _split(text: str) -> list[str]:
    """Split at top-level commas."""
    out, depth, start = list[str](), 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "([") - (ch in ")]")
        if ch == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    return [s.strip() for s in [*out, text[start:]] if s.strip()]


def _tiled(word: str, line: str) -> Tiled:
    m = _TILED.fullmatch(word)
    if m is None:
        raise ParseError(f"a grid entry is `dim:tile`, not {word!r}: {line!r}")
    return Tiled(m[1], int(m[2]))


def _dtype(name: str, line: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise ParseError(f"unknown dtype {name!r} in {line!r}") from None
