"""Cleaning up a body after fusion: share, hoist, and give matrix products plain operands.

- share: an expression that several statements evaluate is computed once (the exponentials that
  the denominator and the output of an attention both use).
- hoist: a part that does not vary over all dims of its statement is computed over the dims it
  has, and outside of the loop where nothing in it changes.
- drop what nothing reads.
- contractions: operands that are not plain loads become block values.

None moves a load out of the branch of a `where` that keeps it in range, except plain loads: of elements that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    TWICE,
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    children,
    dims_used,
    loads,
    substitute,
    tensors_read,
    transform,
    type_of,
)
from tilefold.block.contract import as_contraction, is_plain
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Store, Update, exprs_of, walk
from tilefold.names import fresh
from tilefold.tensor.analysis import expr_flops

#: Cheaper expressions are evaluated again instead of being stored.
WORTH_SHARING = 4
WORTH_HOISTING = 2
#: An expression that may be shared, and the tensors that it reads.
_Shared = tuple[Expr, tuple[str, ...]]


def tidy(b: Block) -> Block:
    """`b` with every body tidied."""
    t = _Tidy(b)
    return without_dead(_without_copies(replace(b, body=t.body(b.body, ()))))


def _without_copies(b: Block) -> Block:
    """Replace a value that only repeats another one, in each of the loops that compute it."""
    changed = set(_changes(Loop("forall", "", b.body)))
    dtypes = {n.name: n.dtype for n in walk(b.body) if isinstance(n, Let)}
    table, computed = dict[str, str](), set[str]()
    for n in walk(b.body):
        if isinstance(n, Let) and n.name not in changed | computed:
            copied = n.expr if n.reducer is None and isinstance(n.expr, Load) else None
            plain = copied is not None and copied.index == tuple(Index(d) for d in n.dims)
            source = copied.tensor if copied is not None else ""
            known = table.get(source, source)
            if plain and source not in changed and dtypes.get(source) is n.dtype and table.get(n.name, known) == known:
                table[n.name] = known
            else:
                table.pop(n.name, None)
                computed.add(n.name)
    return replace(b, body=_renamed(b.body, table)) if table else b


def _renamed(nodes: tuple[Node, ...], table: dict[str, str]) -> tuple[Node, ...]:
    def one(e: Expr) -> Expr | None:
        return Load(table[e.tensor], e.index) if isinstance(e, Load) and e.tensor in table else None

    return mapped(nodes, lambda e: transform(e, one))


def mapped(nodes: tuple[Node, ...], f: Callable[[Expr], Expr]) -> tuple[Node, ...]:
    """The nodes with what they compute (not bounds, positions and payloads) rewritten."""
    out: list[Node] = []
    for n in nodes:
        match n:
            case Loop():
                out.append(replace(n, body=mapped(n.body, f)))
            case Init():
                out.append(n)
            case _:
                out.append(replace(n, expr=f(n.expr)))
    return tuple(out)


def without_dead(b: Block) -> Block:
    """Drop values and states that nothing reads."""
    while True:
        read = {x for n in walk(b.body) for e in exprs_of(n) for x in tensors_read(e) if _reads_other(n, x)}
        dead = {
            n.name
            for n in walk(b.body)
            if isinstance(n, Let | Init) and n.name not in read and n.index_name not in read
        }
        if not dead:
            return b
        b = replace(b, body=_drop(b.body, dead))


def _reads_other(n: Node, name: str) -> bool:
    """A state's own update does not keep it alive."""
    return not (isinstance(n, Update | Accumulate) and n.name == name)


def _drop(nodes: tuple[Node, ...], dead: set[str]) -> tuple[Node, ...]:
    kept: list[Node] = []
    for n in nodes:
        if isinstance(n, Loop):
            n = replace(n, body=_drop(n.body, dead))
        elif not isinstance(n, Store) and n.name in dead:
            continue
        kept.append(n)
    return tuple(kept)


class _Tidy:
    def __init__(self, b: Block):
        self.dtypes: dict[str, DType] = {i.name: i.dtype for i in b.inputs} | {r.name: r.dtype for r in b.results}
        self.dims: dict[str, tuple[str, ...]] = {}
        self.shapes = {i.name: i.shape for i in b.inputs}
        for n in walk(b.body):
            if isinstance(n, Let | Init):
                self.note(n)
        self.taken = set(self.dtypes)

    def note(self, n: Let | Init) -> None:
        self.dtypes[n.name], self.dims[n.name] = n.dtype, n.dims
        if n.index_name is not None:
            self.dtypes[n.index_name], self.dims[n.index_name] = DType.I64, n.dims

    def fresh(self, stem: str) -> str:
        return fresh(stem, self.taken)

    def body(self, nodes: tuple[Node, ...], loops: tuple[str, ...]) -> tuple[Node, ...]:
        flat = self.contractions(self.hoist(self.share(list(nodes))))
        out: list[Node] = []
        for n in flat:
            if not isinstance(n, Loop):
                out.append(n)
                continue
            inner = self.body(n.body, (*loops, n.dim))
            before, kept = _invariant(n, inner)
            if n.kind == "forall":
                before, kept = [], list(inner)
            out += [*before, replace(n, body=tuple(kept))]
        return tuple(out)

    # -- sharing --------------------------------------------------------------------------

    def share(self, nodes: list[Node]) -> list[Node]:
        known: dict[int, tuple[Node, list[_Shared]]] = {}  # by identity: a shared expression changes few statements
        while True:
            best = self._most_shared(nodes, known)
            if best is None:
                return nodes
            e, at = best
            dims = self._order(e, [nodes[n] for n in at])
            let = Let(self.fresh(_stem(e)), dims, type_of(e, self.dtypes.__getitem__), e)
            self.note(let)
            use = Load(let.name, tuple(Index(d) for d in dims))
            places = set(at)
            nodes = [_replace(n, e, use) if i in places else n for i, n in enumerate(nodes)]
            nodes.insert(at[0], let)

    def _most_shared(
        self, nodes: list[Node], known: dict[int, tuple[Node, list[_Shared]]]
    ) -> tuple[Expr, list[int]] | None:
        """The dearest expression that several places evaluate on the same values. known: of statements seen before."""
        version: dict[str, int] = {}
        seen: dict[tuple[Expr, tuple[int, ...]], list[int]] = {}
        for at, n in enumerate(nodes):
            if id(n) not in known:
                known[id(n)] = n, self._worth_sharing(n)
            for e, read in known[id(n)][1]:
                key = (e, tuple([version.get(t, 0) for t in read]))
                seen.setdefault(key, []).append(at)
            for name in _changes(n):
                version[name] = version.get(name, 0) + 1
        shared = [(expr_flops(e), e, places) for (e, _), places in seen.items() if len(places) > 1]
        if not shared:
            return None
        _, dearest, places = max(shared, key=lambda s: s[0])
        return dearest, sorted(set(places))

    def _worth_sharing(self, n: Node) -> list[_Shared]:
        """What a statement evaluates that is worth a value of its own, and what that reads."""
        if isinstance(n, Loop):
            return []
        found = (e for e in self._movable(n) if expr_flops(e) >= WORTH_SHARING and self._sharable(n, e))
        return [(e, tuple(sorted(tensors_read(e)))) for e in found]

    def _sharable(self, n: Node, e: Expr) -> bool:
        """An update of t may not share an expression of t itself."""
        return not (isinstance(n, Update) and n.name in tensors_read(e)) and bool(dims_used(e))

    def _order(self, e: Expr, users: list[Node]) -> tuple[str, ...]:
        """The dims of `e` in the order in which its users name theirs."""
        used = dims_used(e)
        order: dict[str, None] = {}
        for n in users:
            order |= dict.fromkeys(d for d in self._dims(n) if d in used)
        return tuple(order)

    def _dims(self, n: Node) -> tuple[str, ...]:
        match n:
            case Let(dims=dims, rdims=rdims):
                return (*dims, *rdims)
            case Update(name):
                return self.dims[name]
            case Accumulate(name, _, rdims):
                return (*self.dims[name], *rdims)
            case Store(dims=dims):
                return dims
            case _:
                return ()

    # -- hoisting -------------------------------------------------------------------------

    def hoist(self, nodes: list[Node]) -> list[Node]:
        out: list[Node] = []
        for n in nodes:
            if isinstance(n, Loop | Init):
                out.append(n)
                continue
            slots = frozenset(self._slots(n))
            have = frozenset(self._dims(n)) - slots
            wanted: dict[Expr, None] = {}
            for e in exprs_of(n) if not isinstance(n, Store) else (n.expr,):
                wanted |= dict.fromkeys(self._parts(e, lambda x: self._hoistable(n, x, have)))  # noqa: B023
            for e in wanted:
                dims = self._order(e, [n])
                let = Let(self.fresh(_stem(e)), dims, type_of(e, self.dtypes.__getitem__), e)
                self.note(let)
                out.append(let)
                use = Load(let.name, tuple(Index(d) for d in dims))
                n = _replace(n, e, use)
            out.append(n)
        return out

    def _hoistable(self, n: Node, e: Expr, have: frozenset[str]) -> bool:
        used = dims_used(e)
        own = isinstance(n, Update) and n.name in tensors_read(e)
        return bool(used) and used < have and expr_flops(e) >= WORTH_HOISTING and not own and bool(loads(e))

    def _slots(self, n: Node) -> tuple[str, ...]:
        topk = (isinstance(n, Let) and n.reducer == "topk") or (isinstance(n, Accumulate) and n.reducer == "topk")
        return self.dims[n.name][-1:] if topk else ()  # type: ignore[union-attr]

    # -- what may move ---------------------------------------------------------------------

    def _movable(self, n: Node) -> Iterator[Expr]:
        """Sub-expressions of a statement that may be evaluated before it."""
        for e in exprs_of(n) if not isinstance(n, Store) else (n.expr,):
            yield from self._safe(e, guarded=False)

    def _safe(self, e: Expr, guarded: bool) -> Iterator[Expr]:
        """What may move of an expression, parents first: one object at most twice, however often it is read, for that
        tells what is shared."""
        todo, met = [(e, guarded)], dict[tuple[int, bool], int]()
        while todo:
            n, inside = todo.pop()
            times = met.get((id(n), inside), 0)
            if times < TWICE:
                met[id(n), inside] = times + 1
                if self._may_move(n, inside):
                    yield n
                todo += reversed(list(_below(n, inside)))

    def _may_move(self, e: Expr, guarded: bool) -> bool:
        """Whether an expression may be evaluated earlier; under a `where` only if its loads are plain."""
        return isinstance(e, Call | Cast) and (not guarded or all(map(self._plain_load, loads(e))))

    def _plain_load(self, ld: Load) -> bool:
        """Whether each element exists: of whole axes, or at a place of one that has it."""
        shape = self.shapes.get(ld.tensor)
        return all(
            isinstance(ix, Index) or (shape is not None and _is_place(ix, shape[n])) for n, ix in enumerate(ld.index)
        )

    def _parts(self, e: Expr, wanted: Callable[[Expr], bool], guarded: bool = False) -> Iterator[Expr]:
        """Outermost movable sub-expressions for which `wanted` holds."""
        if self._may_move(e, guarded) and wanted(e):
            yield e
            return
        for child, inside in _below(e, guarded):
            yield from self._parts(child, wanted, inside)

    # -- contractions ---------------------------------------------------------------------

    def contractions(self, nodes: list[Node]) -> list[Node]:
        out: list[Node] = []
        for n in nodes:
            if isinstance(n, Let | Accumulate) and n.reducer == "sum":
                c = as_contraction(n.expr, self.dims[n.name], n.rdims, self.dtypes.__getitem__)
                if c is not None:
                    a, b = self._operand(c.a, n, out), self._operand(c.b, n, out)
                    n = replace(n, expr=Call("mul", (a, b)))
            out.append(n)
        return out

    def _operand(self, e: Expr, n: Let | Accumulate, out: list[Node]) -> Expr:
        if is_plain(e):
            return e
        dims = self._order(e, [n])
        let = Let(self.fresh(f"{n.name}_in"), dims, type_of(e, self.dtypes.__getitem__), e)
        self.note(let)
        out.append(let)
        return Load(let.name, tuple(Index(d) for d in dims))


def _stem(e: Expr) -> str:
    """A name for a shared value after what it computes."""
    match e:
        case Call(op, _):
            return _STEMS.get(op, f"{op}_of")
        case Cast(_, dtype):
            return f"as_{dtype.value}"
        case _:
            return "value"


_STEMS = {"where": "guard", "mul": "product", "div": "ratio", "sub": "centred", "add": "total", "exp": "expo"}


def _is_place(ix: Expr, extent: Expr) -> bool:
    """Whether an index is the number of an element of an axis."""
    return isinstance(ix, Const) and isinstance(extent, Const) and 0 <= ix.value < extent.value


def _below(e: Expr, guarded: bool) -> Iterator[tuple[Expr, bool]]:
    """Children, each with whether a `where` may discard it; the indices of a load stay with it."""
    if isinstance(e, Load):
        return
    for k, child in enumerate(children(e)):
        yield child, guarded or (isinstance(e, Call) and e.op == "where" and k > 0)


def _replace(n: Node, e: Expr, use: Expr) -> Node:
    match n:
        case Let() | Accumulate() | Update() | Store():
            return replace(n, expr=substitute(n.expr, {e: use}))
        case _:
            return n


def _changes(n: Node) -> Iterator[str]:
    """States whose value a node changes."""
    for x in walk((n,)):
        if isinstance(x, Update | Accumulate):
            yield x.name


def _invariant(loop: Loop, body: tuple[Node, ...]) -> tuple[list[Node], list[Node]]:
    """Split a loop body into values that are the same in every iteration, and the rest."""
    changing = {loop.dim} | set(_changes(replace(loop, body=body)))
    defined = {x.name for x in walk(body) if isinstance(x, Let | Init)}
    before: list[Node] = []
    kept: list[Node] = []
    for n in body:
        if isinstance(n, Let) and n.reducer is None and loop.dim not in n.dims:
            read = tensors_read(n.expr)
            if not read & (changing | defined) and loop.dim not in dims_used(n.expr):
                before.append(n)
                defined.discard(n.name)
                continue
        kept.append(n)
    return before, kept
