"""Bodies of loops as functions, so that Triton reads each once.

Triton reads the body of a loop twice: first to see which variables it changes, which is thrown away, then to translate
it. A loop in a loop is so read four times. A function is read once, however often it is called, and calls are inlined
before anything else happens: the code means the same, and nearly always is the same machine code.

    for n in range(k):          @triton.jit
        y = x * n               def kernel_turn(s, n, x):
        s += y                      y = x * n
                            ->      s += y
                                    return s

                                for n in range(k):
                                    s = kernel_turn(s, n, x)

What a body changes and was there before the loop is handed in and comes back; what it only reads is handed in. A loop
stays as it is where that is not plain to see: it uses a name of one branch alone, or has statements of another kind.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilefold.names import fresh

#: Bodies of fewer statements are read twice sooner than called.
FEW = 3
#: What a body may consist of.
_PLAIN = (ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.While, ast.If)


def outlined(source: str) -> str:
    """The same module with bodies of loops outside of its functions, those of inner loops first."""
    if "    for " not in source and "    while " not in source:
        return source
    lines, found, end = source.splitlines(), [], 0
    tree = ast.parse(source)
    names = {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}
    for f in tree.body:
        if isinstance(f, ast.FunctionDef) and f.decorator_list:
            of = _Function(lines, f"@{ast.unparse(f.decorator_list[0])}", f.name, names)
            body = of.rewritten(f.body, _Scope({a.arg for a in f.args.args}))
            start = f.decorator_list[0].lineno - 1
            first = f.body[0].lineno - 1
            found += [*lines[end:start], *of.made, *lines[start:first], *body]
            end = f.end_lineno or first
    return "\n".join([*found, *lines[end:]]) + "\n"


@dataclass(slots=True)
class _Scope:
    """Names that are there at a statement: for certain, or on some way only."""

    sure: set[str]
    unsure: set[str] = field(default_factory=set)

    def within(self, names: Iterable[str] = ()) -> _Scope:
        return _Scope(self.sure | set(names), set(self.unsure))


@dataclass(slots=True)
class _Function:
    """A function's lines are rewritten; `made`: those of bodies outside. names: of all functions of the module."""

    lines: Sequence[str]
    decorator: str
    name: str
    names: set[str]
    made: list[str] = field(default_factory=list)

    def rewritten(self, body: Sequence[ast.stmt], scope: _Scope) -> list[str]:
        """Lines of a block, whose names join the scope; comments ahead of a statement stay with it."""
        found: list[str] = []
        end = body[0].lineno - 1
        for s in body:
            found += self.lines[end : s.lineno - 1]
            end = s.end_lineno or s.lineno
            match s:
                case ast.For() | ast.While():
                    found += self._loop(s, scope)
                case ast.If():
                    found += self._branches(s, scope)
                    scope.unsure |= _stored([s]) - scope.sure
                case _:
                    made = _stored([s])
                    scope.sure |= made
                    scope.unsure -= made
                    found += self.lines[s.lineno - 1 : end]
        return found

    def _branches(self, s: ast.If, scope: _Scope) -> list[str]:
        found = [*self.lines[s.lineno - 1 : s.body[0].lineno - 1], *self.rewritten(s.body, scope.within())]
        if s.orelse:
            found += self.lines[s.body[-1].end_lineno : s.orelse[0].lineno - 1]
            found += self.rewritten(s.orelse, scope.within())
        return found

    def _loop(self, s: ast.For | ast.While, outside: _Scope) -> list[str]:
        turned = _stored([s.target]) if isinstance(s, ast.For) else set()
        head, scope = self.lines[s.lineno - 1 : s.body[0].lineno - 1], outside.within(turned)
        body = self.rewritten(s.body, scope.within())
        changed, used = _stored(s.body), _stored(s.body) | _loaded(s.body)
        plain = all(isinstance(n, _PLAIN) for b in s.body for n in ast.walk(b) if isinstance(n, ast.stmt))
        plain = plain and s.body[0].lineno > s.lineno
        if len(s.body) < FEW or not plain or used & scope.unsure or changed & turned:
            return [*head, *body]
        carried = sorted(changed & scope.sure)
        given = ", ".join([*carried, *sorted((used & scope.sure) - set(carried))])
        name = fresh(f"{self.name}_turn", self.names)
        self.made += [self.decorator, f"def {name}({given}):"]
        self.made += textwrap.indent(textwrap.dedent("\n".join(body)), "    ").splitlines()
        call = f"{name}({given})"
        if carried:
            self.made.append(f"    return {', '.join(carried)}")
            call = f"{', '.join(carried)} = {call}"
        self.made += ["", ""]
        return [*head, " " * s.body[0].col_offset + call]


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    return _names(nodes, ast.Store)


def _loaded(nodes: Iterable[ast.AST]) -> set[str]:
    return _names(nodes, ast.Load)


def _names(nodes: Iterable[ast.AST], how: type[ast.expr_context]) -> set[str]:
    found = (n for node in nodes for n in ast.walk(node))
    return {n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, how)}
