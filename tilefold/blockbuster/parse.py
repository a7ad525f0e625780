"""Reader of listings (`blockbuster.listing`); `parse(show(p))` is `p` up to names.

A function of blocks may have calls of block functions as operands (`row_sum(t1**2)`), as in
the paper's listings; each becomes an operator of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilefold.algebra import text as expr_text
from tilefold.algebra.expr import Expr, Load, loads, substitute
from tilefold.algebra.text import Names
from tilefold.blockbuster import statements as st
from tilefold.blockbuster.edit import in_order, rename
from tilefold.blockbuster.ir import (
    Cons,
    Func,
    Graph,
    Head,
    In,
    Map,
    Misc,
    Node,
    Out,
    Param,
    Program,
    Reduce,
    Type,
    View,
    arg,
)
from tilefold.blockbuster.ops import BLOCK_OPS, ELEMENTWISE
from tilefold.blockbuster.verify import infer, verify
from tilefold.errors import ParseError, VerifyError
from tilefold.names import fresh
from tilefold.tensor.text import parse_compute, parse_names, parse_shape


def parse(text: str) -> Program:
    """The program of a listing; ParseError names the line that cannot be read."""
    lines = [ln for ln in text.splitlines() if ln.strip() and not ln.strip().startswith("#")]
    head = st.HEAD.fullmatch(lines[0].strip()) if lines else None
    if head is None:
        raise ParseError("a block program starts with `program name(syms)`")
    top = st.Heading(head[1], parse_names(head[2]))
    names = Names(syms=set(top.syms), open_tensors=True)
    at = 1
    while at < len(lines) and st.declaration(lines[at].strip(), top, names):
        at += 1
    stmts, end = st.statements(lines, at, 0)
    if end != len(lines):
        raise ParseError(f"unexpected indentation: {lines[end].strip()!r}")
    names.dims = set(top.sizes)
    root = _Scope(None, "", (), _Reading(names, st.loads_by_path(stmts), set(top.outputs), stmts))
    root.params = list(top.inputs)
    root.buffers = {p.name: p.name for p in top.inputs}
    root.index = {**st.buffer_dims(stmts), **{p.name: p.type.lists for p in top.inputs}}
    root.taken = {p.name for p in top.inputs}
    root.statements(stmts)
    graph = root.graph([root.output(v) for v in top.outputs])
    values = dict(zip(graph.outputs, top.outputs, strict=True))
    graph = _named(graph, values)
    try:
        return verify(Program(top.name, graph, top.sizes, top.arrays, top.syms))
    except VerifyError as err:
        raise ParseError(f"the listing makes no valid block program: {err.message}") from None


def _named(g: Graph, values: dict[str, str]) -> Graph:
    """Outputs called as declared."""
    from_to = {old: new for old, new in values.items() if old != new}
    taken = {v for v in g.values if v not in from_to}
    if clash := taken & set(from_to.values()):
        raise ParseError(f"{', '.join(clash)} is an output and something else")
    return Graph(g.inputs, tuple(rename(n, from_to) for n in g.nodes), tuple(values.values()))


@dataclass(slots=True)
class _Reading:
    """What all scopes share."""

    names: Names
    loads: dict[str, list[tuple[int, ...]]]
    outputs: set[str]
    stmts: tuple[st.Stmt, ...]

    def needed(self, buffer: str, path: tuple[int, ...]) -> bool:
        """Whether a buffer that a loop fills is read outside of that loop."""
        return buffer in self.outputs or any(p[: len(path)] != path for p in self.loads.get(buffer, ()))


class _Scope:
    """A graph being read: the body of one loop, or the top."""

    def __init__(self, parent: _Scope | None, dim: str, path: tuple[int, ...], reading: _Reading):
        self.parent, self.dim, self.path, self.reading = parent, dim, path, reading
        self.params: list[Param] = []
        self.ins: list[In] = []
        self.nodes: list[Node] = []
        self.taken: set[str] = set()
        self.locals: dict[str, str] = {}  # local variable -> value
        self.buffers: dict[str, str] = {}  # buffer -> value
        self.firsts: dict[tuple[str, str], str] = {}  # (buffer, peeled dim) -> value of the first entry
        self.filled: dict[str, str] = {}  # buffer filled here -> value
        self.totals: dict[str, tuple[str, str, str | None]] = {}  # accumulator -> op, value, exponent value
        self.index: dict[str, tuple[str, ...]] = parent.index if parent else {}

    def fresh(self, base: str) -> str:
        return fresh(base, self.taken)

    # -- values of the scopes around ------------------------------------------------------

    def local(self, name: str) -> str:
        """The value of a local variable, handed down from the scope that has it."""
        if name in self.locals:
            return self.locals[name]
        if self.parent is None:
            raise ParseError(f"{name} is used before it is defined")
        self.locals[name] = self.bring(self.parent.local(name), name, each=False)
        return self.locals[name]

    def buffer(self, name: str) -> str:
        """The value of a buffer, one entry of it where it is indexed by this loop."""
        if name in self.buffers:
            return self.buffers[name]
        if self.parent is None:
            raise ParseError(f"{name} is loaded before it is stored")
        each = self.dim in self.index.get(name, ())
        self.buffers[name] = self.bring(self.parent.buffer(name), name, each=each)
        return self.buffers[name]

    def bring(self, value: str, base: str, *, each: bool) -> str:
        assert self.parent is not None
        outer = self.parent.type_of(value)
        if each and self.dim not in outer.lists:
            raise ParseError(f"{base} has no axis {self.dim} left to loop over")
        name = self.fresh(base)
        self.params.append(Param(name, outer.at(self.dim) if each else outer))
        self.ins.append(In(value, name, each))
        return name

    def type_of(self, value: str) -> Type:
        try:
            return infer(Graph(tuple(self.params), tuple(self.nodes), ()), self.dims())[value]
        except VerifyError as err:
            raise ParseError(err.message) from None

    def dims(self) -> tuple[str, ...]:
        return (*self.parent.dims(), self.dim) if self.parent else ()

    # -- statements -----------------------------------------------------------------------

    def statements(self, stmts: Sequence[st.Stmt]) -> None:
        for k, s in enumerate(stmts):
            match s:
                case st.Loop():
                    self.loop(s, (*self.path, k))
                case st.Load(name, buffer, index):
                    self.load(name, buffer, index)
                case st.Store(name, buffer, index):
                    self.fill(buffer, index, self.local(name))
                case st.Acc(name, op, text):
                    self.accumulate(name, op, text)
                case st.Assign(name, text):
                    self.locals[name] = self.expression(text, name)
                case st.Raw(m):
                    self.raw(m)

    def load(self, name: str, buffer: str, index: tuple[str, ...]) -> None:
        value = self.buffer(buffer)
        for d, i in zip(self.index.get(buffer, ()), index, strict=True):
            if i == "0":
                out = self.fresh(name)
                self.nodes.append(Head(out, value, d))
                value = out
            elif i not in self.dims():
                raise ParseError(f"{name} = load({buffer}[{','.join(index)}]) is not inside a loop over {i}")
        self.locals[name] = value

    def fill(self, buffer: str, index: tuple[str, ...], value: str) -> None:
        for d, i in zip(self.index[buffer], index, strict=True):
            if i == "0":
                self.firsts[buffer, d] = value
                return
        self.filled[buffer] = value

    def accumulate(self, name: str, op: str, text: str) -> None:
        exponent: str | None = None
        if m := re.fullmatch(r"pair\((.*),(\w+)\)", text):
            text, exponent = m[1], self.local(m[2])
        self.totals[name] = (op, self.expression(text, name), exponent)

    def loop(self, s: st.Loop, path: tuple[int, ...]) -> None:
        if self.plain_reduction(s):
            return
        inner = _Scope(self, s.dim, path, self.reading)
        inner.statements(s.body)
        outs: list[tuple[Out, str]] = []
        for name, (op, value, exponent) in inner.totals.items():
            out = self.fresh(name)
            z = next((self.locals[t] for t, (o, v, _) in inner.totals.items() if o == "max" and v == exponent), None)
            if exponent is not None and z is None:
                raise ParseError(f"{name}: its exponent has no running max before it")
            self.locals[name] = out
            outs.append((Out(out, op, z), value))
        for buffer, value in inner.filled.items():
            if not self.reading.needed(buffer, path):
                continue
            outs.append((Out(self.fresh(buffer)), value))
        if not outs:
            raise ParseError(f"nothing comes out of a loop: {s.line!r}")
        graph = inner.graph([v for _, v in outs])
        self.nodes.append(Map(s.dim, tuple(inner.ins), graph, tuple(o for o, _ in outs), s.start))
        lists = [b for b in inner.filled if self.reading.needed(b, path)]
        for buffer, (o, _) in zip(lists, outs[len(inner.totals) :], strict=True):
            self.publish(buffer, o.name, s)

    def publish(self, buffer: str, value: str, s: st.Loop) -> None:
        """A list is complete, after its peeled first entry if it has one."""
        first = self.firsts.pop((buffer, s.dim), None)
        if s.start and first is not None:
            whole = self.fresh(buffer)
            self.nodes.append(Cons(whole, first, value, s.dim))
            value = whole
        self.buffers[buffer] = self.filled[buffer] = value

    def plain_reduction(self, s: st.Loop) -> bool:
        """A loop that only loads and adds up is a reduction operator."""
        match s.body:
            case (st.Load(item, buffer, index), st.Acc(total, op, text)) if text == item and not s.start:
                if s.dim not in index:
                    return False
                value = self.buffer(buffer)
                out = self.fresh(total)
                self.nodes.append(Reduce(out, op, value, s.dim))
                self.locals[total] = out
                return True
        return False

    def raw(self, m: re.Match[str]) -> None:
        if m.re is st.VIEW:
            t = Type(parse_names(m[2]), parse_names(m[3]))
            out = self.fresh(m[1])
            index = parse_shape(m[5], self.reading.names)
            self.nodes.append(View(out, self.buffer(m[4]), index, t))
            self.buffers[m[1]], self.index[m[1]] = out, t.lists
            return
        compute = parse_compute(m[2], self.reading.names)
        results: list[Param] = []
        for place in st.PLACE.finditer(m[1]):
            out = self.fresh(place[1])
            results.append(Param(out, Type(parse_names(place[2]), parse_names(place[3]))))
            self.filled[place[1]] = self.buffers[place[1]] = out
            self.index[place[1]] = results[-1].type.lists
        pairs = re.findall(r"(\w+)=(\w+)\[[^\]]*\]", m[3])
        args = tuple(self.buffer(b) for _, b in pairs)
        self.nodes.append(Misc(tuple(results), args, tuple(n for n, _ in pairs), compute))

    # -- expressions ----------------------------------------------------------------------

    def expression(self, text: str, base: str) -> str:
        """The value of a right-hand side."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as err:
            raise ParseError(f"not an expression: {text!r}: {err.msg}") from None
        return self.value(tree, base)

    def value(self, tree: ast.expr, base: str) -> str:
        if isinstance(tree, ast.Name) and tree.id not in self.reading.names.dims:
            return self.local(tree.id)
        if _block_call(tree):
            assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
            args = tuple(self.value(a, base) for a in tree.args)
            return self.add(Func(self.fresh(base), tree.func.id, args))
        operands: list[str] = []

        def operand(name: str) -> Load:
            value = inner.get(name) or self.local(name)
            if value not in operands:
                operands.append(value)
            return arg(operands.index(value))

        inner: dict[str, str] = {}
        flat = ast.unparse(_Flatten(lambda call: self.inner(call, base, inner)).visit(tree))
        e = expr_text.parse(flat, self.reading.names)
        table: dict[Expr, Expr] = {n: operand(n.tensor) for n in loads(e)}
        return self.add(Func(self.fresh(base), ELEMENTWISE, tuple(operands), substitute(e, table)))

    def inner(self, call: ast.Call, base: str, inner: dict[str, str]) -> ast.expr:
        name = f"inner{len(inner)}"
        inner[name] = self.value(call, base)
        return ast.Name(name)

    def add(self, n: Func) -> str:
        self.nodes.append(n)
        return n.out

    # -- result ---------------------------------------------------------------------------

    def output(self, name: str) -> str:
        if name not in self.filled:
            raise ParseError(f"output {name} is never stored")
        return self.filled[name]

    def graph(self, outputs: list[str]) -> Graph:
        nodes = in_order(self.nodes, (p.name for p in self.params))
        return Graph(tuple(self.params), nodes, tuple(outputs))


def _block_call(tree: ast.AST) -> bool:
    return isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in BLOCK_OPS


class _Flatten(ast.NodeTransformer):
    """Block functions inside an elementwise expression become operands."""

    def __init__(self, replace_call: Callable[[ast.Call], ast.expr]):
        self.replace_call = replace_call

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if _block_call(node):
            return self.replace_call(node)
        self.generic_visit(node)
        return node
