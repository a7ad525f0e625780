"""Printer and parser of block programs; `parse(show(b)) == b`.

block softmax(n)
  input x: f32[4, n]
  dim i = 4
  dim j = n
  result y[i, j]: f32
  forall i
    init m[i]: f32 = -inf
    for j
      accum m = max[j] x[i, j]
    for j in 0 .. size(j)
      store y[i, j] over (i, j) = exp(x[i, j] - m[i])
  return y
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from tilefold.algebra import text as expr_text
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr
from tilefold.algebra.ops import REDUCERS
from tilefold.algebra.text import Names
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Result, Store, Update
from tilefold.errors import ParseError
from tilefold.tensor.ir import Input
from tilefold.tensor.text import parse_names, parse_shape

_HEAD = re.compile(r"block (\w+)\(([^)]*)\)")
_INPUT = re.compile(r"input (\w+): (\w+)\[(.*)\]")
_DIM = re.compile(r"dim (\w+) = (.*)")
_RESULT = re.compile(r"result (\w+)\[([^\]]*)\]: (\w+)")
_LOOP = re.compile(r"(forall|for) (\w+)( each)?(?: in (.*) \.\. (.*))?")
_LET = re.compile(r"(let|init) (\w+)\[([^\]]*)\]: (\w+)(?:, (\w+))? = (.*)")
_ACCUM = re.compile(r"accum (\w+) = (.*)")
_UPDATE = re.compile(r"update (\w+) = (.*)")
#: How values join those that are there (`Store.added`), and the word for it.
STORES = {"": "store", "sum": "add", "max": "raise"}
ADDED = {word: how for how, word in STORES.items()}
_STORE = re.compile(rf"({'|'.join(ADDED)}) (\w+)\[(.*)\] over \(([^)]*)\) = (.*)")
_REDUCE = re.compile(rf"({'|'.join(REDUCERS)})(?:\.(\w+))?\[([^\]]*)\] (.*)")


def show(b: Block) -> str:
    """The whole program."""
    lines = [f"block {b.name}({', '.join(b.syms)})"]
    for i in b.inputs:
        lines.append(f"  input {i.name}: {i.dtype.value}[{', '.join(map(expr_text.show, i.shape))}]")
    lines += [f"  dim {d} = {expr_text.show(e)}" for d, e in b.sizes.items()]
    lines += [f"  result {r.name}[{', '.join(r.dims)}]: {r.dtype.value}" for r in b.results]
    lines += show_nodes(b.body, 1)
    lines.append(f"  return {', '.join(b.outputs)}")
    return "\n".join(lines) + "\n"


def show_nodes(nodes: tuple[Node, ...], depth: int = 0) -> list[str]:
    """Lines of a body, two spaces a level."""
    out: list[str] = []
    for n in nodes:
        out.append("  " * depth + show_head(n))
        if isinstance(n, Loop):
            out += show_nodes(n.body, depth + 1)
    return out


def show_head(n: Node) -> str:
    """One node without its body."""
    show_e = expr_text.show
    match n:
        case Loop(kind, dim, _, start, stop, single):
            if single:
                dim += " each"
            if start is None and stop is None:
                return f"{kind} {dim}"
            a = "0" if start is None else show_e(start)
            z = f"size({n.dim})" if stop is None else show_e(stop)
            return f"{kind} {dim} in {a} .. {z}"
        case Let():
            second = f", {n.index_name}" if n.index_name else ""
            head = f"let {n.name}[{', '.join(n.dims)}]: {n.dtype.value}{second} = "
            return head + _reduction(n.reducer, n.rdims, n.expr, n.payload, n.kept)
        case Init():
            second = f", {n.index_name}" if n.index_name else ""
            return f"init {n.name}[{', '.join(n.dims)}]: {n.dtype.value}{second} = {show_e(n.value)}"
        case Update(name, e):
            return f"update {name} = {show_e(e)}"
        case Accumulate(name, reducer, rdims, e, payload, kept):
            return f"accum {name} = {_reduction(reducer, rdims, e, payload, kept)}"
        case Store(tensor, index, dims, e, added):
            head = f"{STORES[added]} {tensor}[{', '.join(map(show_e, index))}]"
            return f"{head} over ({', '.join(dims)}) = {show_e(e)}"
    raise AssertionError(n)


def _reduction(reducer: str | None, rdims: tuple[str, ...], e: Expr, payload: Expr | None, kept: DType | None) -> str:
    head = f"{reducer}{'' if kept is None else '.' + kept.value}[{', '.join(rdims)}] " if reducer else ""
    tail = f" at {expr_text.show(payload)}" if payload is not None else ""
    return head + expr_text.show(e) + tail


def parse(text: str) -> Block:
    """The program that `show` printed; ParseError names the line that cannot be read."""
    lines = [ln for ln in text.splitlines() if ln.strip() and not ln.strip().startswith("#")]
    return _Parser(lines).block()


class _Parser:
    def __init__(self, lines: list[str]):
        self.lines, self.at, self.names = lines, 0, Names(open_tensors=True)

    def block(self) -> Block:
        head = _HEAD.fullmatch(self.lines[0].strip()) if self.lines else None
        if head is None:
            raise ParseError("a block program starts with `block name(syms)`")
        syms = parse_names(head[2])
        self.names.syms = set(syms)
        inputs: list[Input] = []
        sizes: dict[str, Expr] = {}
        results: list[Result] = []
        self.at = 1
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            if m := _INPUT.fullmatch(line):
                inputs.append(Input(m[1], DType(m[2]), parse_shape(m[3], self.names)))
            elif m := _DIM.fullmatch(line):
                sizes[m[1]] = expr_text.parse(m[2], self.names)
                self.names.dims.add(m[1])
            elif m := _RESULT.fullmatch(line):
                results.append(Result(m[1], parse_names(m[2]), DType(m[3])))
            else:
                break
            self.at += 1
        body = self.nodes(1)
        if self.at >= len(self.lines) or not self.lines[self.at].strip().startswith("return"):
            raise ParseError("a block program ends with `return names`")
        outputs = parse_names(self.lines[self.at].strip()[len("return") :])
        return Block(head[1], syms, sizes, tuple(inputs), tuple(results), outputs, body)

    def nodes(self, depth: int) -> tuple[Node, ...]:
        out: list[Node] = []
        while self.at < len(self.lines):
            raw = self.lines[self.at]
            indent = (len(raw) - len(raw.lstrip())) // 2
            if indent < depth or raw.strip().startswith("return"):
                break
            if indent > depth:
                raise ParseError(f"unexpected indentation: {raw.strip()!r}")
            self.at += 1
            out.append(self.node(raw.strip(), depth))
        return tuple(out)

    def node(self, line: str, depth: int) -> Node:
        e = self.expr
        if m := _LOOP.fullmatch(line):
            start = None if m[4] in (None, "0") else e(m[4])
            stop = None if m[5] in (None, f"size({m[2]})") else e(m[5])
            kind: Literal["forall", "for"] = "forall" if m[1] == "forall" else "for"
            return Loop(kind, m[2], self.nodes(depth + 1), start, stop, m[3] is not None)
        if m := _LET.fullmatch(line):
            dims, dtype = parse_names(m[3]), DType(m[4])
            if m[1] == "init":
                value = e(m[6])
                if not isinstance(value, Const):
                    raise ParseError(f"a state starts from a constant: {line!r}")
                return Init(m[2], dims, dtype, replace(value, dtype=dtype.compute), m[5])
            reducer, rdims, expr, payload, kept = self.reduction(m[6])
            return Let(m[2], dims, dtype, expr, reducer, rdims, m[5], payload, kept)
        if m := _ACCUM.fullmatch(line):
            reducer, rdims, expr, payload, kept = self.reduction(m[2])
            if reducer is None:
                raise ParseError(f"accum needs a reducer: {line!r}")
            return Accumulate(m[1], reducer, rdims, expr, payload, kept)
        if m := _UPDATE.fullmatch(line):
            return Update(m[1], e(m[2]))
        if m := _STORE.fullmatch(line):
            return Store(m[2], parse_shape(m[3], self.names), parse_names(m[4]), e(m[5]), ADDED[m[1]])
        raise ParseError(f"not a block statement: {line!r}")

    def expr(self, text: str) -> Expr:
        return expr_text.parse(text, self.names)

    def reduction(self, text: str) -> tuple[str | None, tuple[str, ...], Expr, Expr | None, DType | None]:
        reducer: str | None = None
        kept: DType | None = None
        rdims: tuple[str, ...] = ()
        if m := _REDUCE.fullmatch(text):
            reducer, kept, rdims, text = m[1], DType(m[2]) if m[2] else None, parse_names(m[3]), m[4]
        body, sep, payload = text.partition(" at ")
        return reducer, rdims, self.expr(body), self.expr(payload) if sep else None, kept
