"""The rules of block programs that the grammar does not enforce."""

from __future__ import annotations

from tilefold.algebra.expr import Index, Load, walk
from tilefold.algebra.ops import INDEX_REDUCERS, REDUCERS
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, dims_of, exprs_of
from tilefold.block.text import show_head
from tilefold.errors import VerifyError


def verify(b: Block) -> Block:
    """`b` itself; VerifyError naming the statement that breaks a rule."""
    scope: dict[str, tuple[str, ...] | None] = {i.name: None for i in b.inputs}
    ranks = {i.name: len(i.shape) for i in b.inputs} | {r.name: len(r.dims) for r in b.results}
    written: set[str] = set()
    _Checker(b, ranks, written).nodes(b.body, scope, ())
    for r in b.results:
        if r.name not in written:
            raise VerifyError(f"result {r.name} is never stored")
    for name in b.outputs:
        if name not in ranks:
            raise VerifyError(f"output {name} is neither an input nor a result")
    return b


class _Checker:
    def __init__(self, b: Block, ranks: dict[str, int], written: set[str]):
        self.b, self.ranks, self.written = b, ranks, written

    def nodes(self, nodes: tuple[Node, ...], scope: dict[str, tuple[str, ...] | None], loops: tuple[str, ...]) -> None:
        inner = dict(scope)
        for n in nodes:
            self.node(n, inner, loops)

    def node(self, n: Node, scope: dict[str, tuple[str, ...] | None], loops: tuple[str, ...]) -> None:
        fail = _Failure(n)
        for d in dims_of(n):
            if d not in self.b.sizes:
                raise fail(f"dim {d} has no size")
        held = scope.get(n.name) if isinstance(n, Update | Accumulate) else ()
        known = {*dims_of(n), *loops, *(held or ())}
        for e in exprs_of(n):
            for x in walk(e):
                if isinstance(x, Index) and x.dim not in known:
                    raise fail(f"index {x.dim} is not a dim of the statement or of a loop around it")
                if isinstance(x, Load):
                    self.load(x, scope, fail)
        match n:
            case Loop(_, dim, body):
                if dim in loops:
                    raise fail(f"two nested loops over {dim}")
                self.nodes(body, scope, (*loops, dim))
            case Let(reducer=r, index_name=ix, payload=p, rdims=rd, dims=dims):
                self.reducer(r, ix is not None, p is not None, fail)
                if set(rd) & set(dims):
                    raise fail("a dim is both kept and reduced")
                self.define(n, dims, scope, fail)
            case Init(dims=dims):
                self.define(n, dims, scope, fail)
            case Update(name) | Accumulate(name):
                if scope.get(name) is None:
                    raise fail(f"{name} is not a state in scope")
                if isinstance(n, Accumulate):
                    self.reducer(n.reducer, n.payload is not None, n.payload is not None, fail)
            case Store(tensor, index, _):
                if tensor not in self.ranks or tensor in {i.name for i in self.b.inputs}:
                    raise fail(f"{tensor} is not a result")
                if len(index) != self.ranks[tensor]:
                    raise fail(f"{tensor} has {self.ranks[tensor]} axes")
                self.written.add(tensor)

    def define(
        self, n: Let | Init, dims: tuple[str, ...], scope: dict[str, tuple[str, ...] | None], fail: _Failure
    ) -> None:
        for name in (n.name, n.index_name):
            if name is None:
                continue
            if name in scope or name in self.ranks:
                raise fail(f"{name} is defined twice")
            scope[name] = dims

    def load(self, x: Load, scope: dict[str, tuple[str, ...] | None], fail: _Failure) -> None:
        dims = scope.get(x.tensor)
        if dims is not None:
            if len(x.index) != len(dims):
                raise fail(f"{x.tensor} has dims {dims}")
            return
        if x.tensor not in self.ranks:
            raise fail(f"{x.tensor} is not in scope")
        if len(x.index) != self.ranks[x.tensor]:
            raise fail(f"{x.tensor} has {self.ranks[x.tensor]} axes")

    @staticmethod
    def reducer(r: str | None, has_index: bool, has_payload: bool, fail: _Failure) -> None:
        if r is not None and r not in REDUCERS:
            raise fail(f"unknown reducer {r}")
        if has_index != has_payload or (r in INDEX_REDUCERS) != has_payload:
            raise fail("index reducers, and only they, carry an index and its payload")


class _Failure:
    def __init__(self, n: Node):
        self.n = n

    def __call__(self, why: str) -> VerifyError:
        return VerifyError(f"{why}: `{show_head(self.n)}`")
