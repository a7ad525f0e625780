"""Printer and parser of the tensor IR (grammar in `tensor.ir`); `parse(show(p)) == p`."""

from __future__ import annotations

import re

from tilefold.algebra import text as expr_text
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr
from tilefold.algebra.ops import REDUCERS
from tilefold.algebra.text import Names
from tilefold.errors import ParseError
from tilefold.tensor.ir import Compute, Input, Program

_HEAD = re.compile(r"program (\w+)\(([^)]*)\)")
_INPUT = re.compile(r"input (\w+): (\w+)\[(.*)\]")
_DIM = re.compile(r"dim (\w+) = (.*)")
_RESULT = re.compile(r"(\w+)\[([^\]]*)\]: (\w+)$")
_REDUCE = re.compile(rf"({'|'.join(REDUCERS)})\[([^\]]*)\] (.*)")


def show_compute(c: Compute) -> str:
    """One statement, e.g. `t[i]: f32 = sum[j] e[i, j]`."""
    dims = ", ".join(c.dims)
    left = f"{c.name}[{dims}]: {c.dtype.value}"
    if c.index_name is not None:
        left += f", {c.index_name}[{dims}]: i64"
    head = ""
    if c.reducer is not None:
        slot = f"; {c.dims[-1]}" if c.reducer == "topk" else ""
        head = f"{c.reducer}[{', '.join(c.rdims)}{slot}] "
    return f"{left} = {head}{expr_text.show(c.body)}"


def show(p: Program) -> str:
    """The whole program."""
    lines = [f"program {p.name}({', '.join(p.syms)})"]
    for i in p.inputs:
        lines.append(f"  input {i.name}: {i.dtype.value}[{', '.join(map(expr_text.show, i.shape))}]")
    lines += [f"  dim {d} = {expr_text.show(e)}" for d, e in p.sizes.items()]
    lines += [f"  {show_compute(c)}" for c in p.body]
    lines.append(f"  return {', '.join(p.outputs)}")
    return "\n".join(lines) + "\n"


def parse(text: str) -> Program:
    """The program that `show` printed; ParseError names the line that cannot be read."""
    lines = [ln.strip() for ln in text.splitlines() if ln.strip() and not ln.strip().startswith("#")]
    head = _HEAD.fullmatch(lines[0]) if lines else None
    if head is None:
        raise ParseError("a program starts with `program name(syms)`")
    syms = parse_names(head[2])
    inputs: list[Input] = []
    sizes: dict[str, Expr] = {}
    body: list[Compute] = []
    outputs: tuple[str, ...] = ()
    names = Names(syms=set(syms))
    for line in lines[1:]:
        if m := _INPUT.fullmatch(line):
            inputs.append(Input(m[1], _dtype(m[2], line), parse_shape(m[3], names)))
            names.tensors.add(m[1])
        elif m := _DIM.fullmatch(line):
            sizes[m[1]] = expr_text.parse(m[2], names)
            names.dims.add(m[1])
        elif line.startswith("return"):
            outputs = parse_names(line[len("return") :])
        else:
            c = parse_compute(line, names)
            body.append(c)
            names.tensors |= set(c.results)
    return Program(head[1], tuple(inputs), sizes, tuple(body), outputs, syms)


def parse_compute(line: str, names: Names) -> Compute:
    """One statement; its dims must be in `names`."""
    left, eq, right = line.partition(" = ")
    if not eq:
        raise ParseError(f"not a statement: {line!r}")
    results = [_RESULT.fullmatch(s.strip()) for s in re.split(r"(?<=\w), (?=\w+\[[^\]]*\]: )", left)]
    if any(r is None for r in results) or len(results) not in (1, 2):
        raise ParseError(f"left of `=` must be `name[dims]: dtype`: {line!r}")
    first = results[0]
    assert first is not None
    dims = parse_names(first[2])
    reducer: str | None = None
    rdims: tuple[str, ...] = ()
    body = right
    if m := _REDUCE.fullmatch(right):
        reducer, body = m[1], m[3]
        rdims = parse_names(m[2].partition(";")[0])
    index_name = results[1][1] if len(results) == 2 and results[1] else None
    e = expr_text.parse(body, names)
    return Compute(first[1], dims, _dtype(first[3], line), e, reducer, rdims, index_name)


def parse_shape(text: str, names: Names) -> tuple[Expr, ...]:
    """Comma-separated expressions."""
    return tuple(expr_text.parse(s, names) for s in _split(text))


def parse_names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(s.strip() for s in text.split(",") if s.strip())


def _split(text: str) -> list[str]:
    """Split at top-level commas."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "([") - (ch in ")]")
        if ch == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    tail = text[start:]
    return [s.strip() for s in [*out, tail] if s.strip()]


def _dtype(name: str, line: str) -> DType:
    try:
        return DType(name)
    except ValueError:
        raise ParseError(f"unknown dtype {name!r} in {line!r}") from None
