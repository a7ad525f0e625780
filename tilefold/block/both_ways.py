"""One kernel for two folds over the same pairs: one goes along its rows, the other across them.

A backward of attention has a kernel whose rows are keys, which meet all queries, and one whose rows are queries, which
meet all keys. Both compute the same dS for each pair. Where they do, the first can add up for the second:

    dQ[i] = sum over j of dS[i, j] k[j]  =  sum over blocks J of (sum over j in J of dS[i, j] k[j])

a block of rows adds its part of each streamed element to memory (`Store.adds`), in float32. What the second kernel
does after its loop becomes a kernel of its own, as does what it computes beside the loop and the first one reads. Two
of seven products and one pass over the pairs are saved; the sum is in any order: bits differ from run to run.

Nothing is named here: `both_ways` compares expressions, with values put in, up to the names of dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Const,
    Expr,
    Index,
    Load,
    Size,
    children,
    loads,
    rename_dims,
    substitute,
    tensors_read,
    transform,
)
from tilefold.algebra.expr import walk as parts_of
from tilefold.block.bounds import linear
from tilefold.block.ir import Accumulate, Block, Init, Let, Loop, Node, Result, Store, Update, dims_of, exprs_of, walk
from tilefold.names import fresh
from tilefold.tensor.ir import Input

#: A sum that a value is, among expressions that are compared.
_SUM = "sum over"
#: Operations whose two operands may be written either way round.
_COMMUTE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or"})


@dataclass(frozen=True, slots=True)
class BothWays:
    """Kernels in the order in which they run. before: what the second computed beside its loop; None: nothing.

    kernel: the first, which adds to `added`, too. after: what the second does with its state.
    """

    before: Block | None
    kernel: Block
    after: Block
    added: str


def both_ways(along: Block, across: Block) -> BothWays | str:
    """One kernel instead of two, or why there is none. `along` keeps its rows, what `across` adds goes to memory."""
    first, second = _Nest.of(along), _Nest.of(across)
    if first is None or second is None:
        return "not one stream of pairs each"
    if not set(along.syms) >= set(across.syms):
        return "sizes of others"
    sums = [n for n in second.loop.body if isinstance(n, Accumulate)]
    states = {n.name: n for n in second.block_body if isinstance(n, Init)}
    if len(sums) != 1 or any(isinstance(n, Update | Store | Loop) for n in second.loop.body):
        return "more than a sum of products across"
    (s,) = sums
    state = states.get(s.name)
    if s.rdims != (second.loop.dim,) or s.reducer != "sum" or s.payload is not None or s.kept is not None:
        return "no sum over the stream"
    if state is None or state.dtype is not DType.F32 or float(state.value.value) != 0.0:
        return "a sum that does not begin at 0"
    match s.expr:
        case Call("mul", (Load() as a, Load() as b)):
            made, other = (a, b) if a.tensor in second.values else (b, a)
        case _:
            return "no product across"
    if made.tensor not in second.values or other.tensor in second.values:
        return "a product of other values"
    for n in first.loop.body:
        if isinstance(n, Let) and n.reducer is None and n.index_name is None:
            dims: dict[str, str] = {}
            if _same(second.closed(made), first.closed(_whole(n)), dims) and dims.get(second.loop.dim) == first.row:
                return _Joined(first, second, s, state, n, other, dims).build()
    return "the two compute no value of a pair that is the same"


class _Joined:
    """The kernels, where `n` of the first is the `made` of the second up to `dims`, names of the second's dims here."""

    def __init__(
        self, first: _Nest, second: _Nest, s: Accumulate, state: Init, n: Let, other: Load, dims: Mapping[str, str]
    ):
        self.first, self.second, self.sum, self.state, self.made, self.other = first, second, s, state, n, other
        self.dims = dict(dims)

    def build(self) -> BothWays | str:
        along, across = self.first.block, self.second.block
        sizes = dict(along.sizes)
        for d in self.state.dims:
            if d not in self.dims:
                self.dims[d] = self._dim(d, sizes)
        known = {i.name for i in along.inputs}
        if self.other.tensor not in known:
            return "an operand that the first does not read"
        out = tuple(self.dims[d] for d in self.state.dims)
        name = _fresh(f"{self.state.name}_parts", along, across)
        kernel = self._kernel(name, out, sizes)
        after = self._after(name)
        return BothWays(self._before(), kernel, after, name)

    def _dim(self, d: str, sizes: dict[str, Expr]) -> str:
        """The first's name of a dim of columns: that by which it reads the same axis, or a new one."""
        axis = next(n for n, e in enumerate(self.other.index) if e == Index(d))
        size = self.second.block.sizes[d]
        for x in (x for n in walk(self.first.block.body) for e in exprs_of(n) for x in loads(e)):
            if x.tensor == self.other.tensor and isinstance(e := x.index[axis], Index) and sizes[e.dim] == size:
                return e.dim
        new = fresh(d, set(sizes))
        sizes[new] = size
        return new

    def _kernel(self, name: str, out: tuple[str, ...], sizes: Mapping[str, Expr]) -> Block:
        along, made = self.first.block, self.made
        body = list(self.first.loop.body)
        factor = self._factor()
        if factor is not None:  # applied after all is added, as it is by the first to its own sums
            plain = replace(made, name=_fresh(f"{made.name}_plain", along), expr=factor[0])
            body[body.index(made)] = plain
            body.insert(body.index(plain) + 1, replace(made, expr=Call("mul", (_whole(plain), factor[1]))))
            made = plain
        part = _fresh(f"{name}_of", along)
        other = Load(self.other.tensor, tuple(rename_dims(e, self.dims) for e in self.other.index))
        product = Call("mul", (_whole(made), other))
        body.append(Let(part, out, DType.F32, product, "sum", (self.first.row,)))
        index = tuple(map(Index, out))
        body.append(Store(name, index, out, Load(part, index), adds=True))
        changed = replace(self.first.loop, body=tuple(body))
        results = (*along.results, Result(name, out, DType.F32))
        nodes = self.first.with_loop(changed)
        return replace(along, sizes=sizes, results=results, outputs=(*along.outputs, name), body=nodes)

    def _factor(self) -> tuple[Expr, Const] | None:
        """What the shared value is a constant multiple of; not of float16, whose range it may be out of."""
        narrow = {i.name for i in self.first.block.inputs if i.dtype is DType.BF16}
        match self.made.expr:
            case Call("mul", (x, Const(_, DType.F32) as k)) if self.other.tensor in narrow:
                return x, k
        return None

    def _after(self, name: str) -> Block:
        b = self.second.block
        at = Load(name, tuple(map(Index, self.state.dims)))
        factor = self._factor()
        whole = at if factor is None else Call("mul", (at, factor[1]))
        table: dict[Expr, Expr] = {Load(self.state.name, at.index): whole}
        rest = [n for n in self.second.block_body if n not in (self.second.loop, self.state)]
        shape = tuple(b.sizes[d] for d in self.state.dims)
        return self._only(b, rest, self._stored(after=True), table, (Input(name, DType.F32, shape),))

    def _before(self) -> Block | None:
        rest = [n for n in self.second.block_body if n is not self.second.loop]
        stored = self._stored(after=False)
        return self._only(self.second.block, rest, stored, {}, ()) if stored else None

    def _stored(self, *, after: bool) -> list[Node]:
        """The second's stores of what follows from its state, or of what does not."""
        names = {self.state.name}
        found: list[Node] = []
        for n in self.second.block_body:
            read = {t for x in walk((n,)) for e in exprs_of(x) for t in tensors_read(e)}
            depends = bool(read & names) and n is not self.second.loop
            if depends and isinstance(n, Let):
                names.add(n.name)
            if isinstance(n, Store) and depends is after:
                found.append(n)
        return found

    def _only(
        self,
        b: Block,
        nodes: Sequence[Node],
        wanted: Sequence[Node],
        table: Mapping[Expr, Expr],
        more: tuple[Input, ...],
    ) -> Block:
        """A block of the second's nest with what the wanted stores need of these nodes."""
        kept: list[Node] = []
        needed: set[str] = set()
        for n in reversed(nodes):
            own = {x.name for x in walk((n,)) if isinstance(x, Let | Init | Update | Accumulate)}
            if n in wanted or own & needed:
                kept.append(_put(n, table))
                needed |= {t for x in walk((kept[-1],)) for e in exprs_of(x) for t in tensors_read(e)}
        body = self.second.with_body(tuple(reversed(kept)))
        written = {n.tensor for n in walk(body) if isinstance(n, Store)}
        inputs = tuple(i for i in (*b.inputs, *more) if i.name in needed)
        dims = {d for n in walk(body) for d in dims_of(n)} | {d for r in b.results if r.name in written for d in r.dims}
        dims |= {x.dim for n in walk(body) for e in exprs_of(n) for x in parts_of(e) if isinstance(x, Index | Size)}
        return replace(
            b,
            name="_".join(sorted(written)),
            sizes={d: e for d, e in b.sizes.items() if d in dims},
            inputs=inputs,
            results=tuple(r for r in b.results if r.name in written),
            outputs=tuple(o for o in b.outputs if o in written),
            body=body,
        )


@dataclass(frozen=True)
class _Nest:
    """A kernel: loops of a grid, and a body in which one loop has a part of two dims that are not reduced: pairs."""

    block: Block
    grid: tuple[Loop, ...]
    block_body: tuple[Node, ...]
    loop: Loop
    row: str
    values: Mapping[str, Let | Init]

    @classmethod
    def of(cls, b: Block) -> _Nest | None:
        grid: list[Loop] = []
        body = b.body
        while len(body) == 1 and isinstance(n := body[0], Loop) and n.kind == "forall":
            grid.append(n)
            body = n.body
        values = {n.name: n for n in walk(body) if isinstance(n, Let | Init)}
        pairs = [
            (n, g.dim)
            for n in body
            if isinstance(n, Loop)
            for g in grid
            if any(isinstance(x, Let) and x.reducer == "sum" and {n.dim, g.dim} <= set(x.dims) for x in n.body)
        ]
        rows = {d for _, d in pairs} - {d for n, _ in pairs for x in n.body if isinstance(x, Let) for d in _batch(x, n)}
        if len({n for n, _ in pairs}) != 1 or len(rows) != 1:
            return None
        return cls(b, tuple(grid), body, pairs[0][0], rows.pop(), values)

    def with_body(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        for g in reversed(self.grid):
            body = (replace(g, body=body),)
        return body

    def with_loop(self, loop: Loop) -> tuple[Node, ...]:
        return self.with_body(tuple(loop if n is self.loop else n for n in self.block_body))

    def closed(self, e: Expr) -> Expr:
        """An expression of tensors alone: values put in, sums as calls; results that hold a value stand for it."""
        stored = {
            n.expr.tensor: (n.expr.index, Load(n.tensor, n.index))
            for n in self.block_body
            if isinstance(n, Store) and isinstance(n.expr, Load)
        }

        def put(x: Expr) -> Expr | None:
            if not isinstance(x, Load) or x.tensor not in self.values:
                return None
            if x.tensor in stored and stored[x.tensor][0] == x.index:
                return stored[x.tensor][1]
            n = self.values[x.tensor]
            if not isinstance(n, Let) or n.index_name is not None or x.index != tuple(map(Index, n.dims)):
                return None
            inner = self.closed(n.expr)
            return inner if n.reducer is None else Call(_SUM, (inner, *map(Index, n.rdims)))

        return transform(e, put)


def _same(a: Expr, b: Expr, dims: dict[str, str]) -> bool:
    """Whether two expressions are the same when dims of the first are renamed; `dims` says how."""
    if isinstance(a, Index | Size) and type(a) is type(b):
        new = b.dim  # type: ignore[union-attr]
        if a.dim in dims or new in dims.values():
            return dims.get(a.dim) == new
        dims[a.dim] = new
        return True
    x, y = children(a), children(b)
    if isinstance(a, Call) and isinstance(b, Call) and (whole := _whole_numbers(a, b)) is not None:
        return _same_sum(*whole, dims)
    if type(a) is not type(b) or len(x) != len(y):
        return False
    if not x:
        return a == b
    if _head(a) != _head(b):
        return False
    before = dict(dims)
    if all(_same(p, q, dims) for p, q in zip(x, y, strict=True)):
        return True
    if not (isinstance(a, Call) and a.op in _COMMUTE and len(x) == 2):
        return False
    dims.clear()
    dims.update(before)
    return _same(x[0], y[1], dims) and _same(x[1], y[0], dims)


def _whole_numbers(a: Call, b: Call) -> tuple[Mapping[Expr, int], Mapping[Expr, int]] | None:
    """Two sums of indices and numbers, where both are such."""
    x, y = linear(a), linear(b)
    return None if x is None or y is None else ({t: n for t, n in x.items() if n}, {t: n for t, n in y.items() if n})


def _same_sum(x: Mapping[Expr, int], y: Mapping[Expr, int], dims: dict[str, str]) -> bool:
    """Whether sums have the same terms, each as often; those that are known or unlike others first."""
    left = dict(y)
    ordered = sorted(x.items(), key=lambda t: (getattr(t[0], "dim", "") not in dims, list(x.values()).count(t[1])))
    for t, n in ordered:
        for u in [u for u, m in left.items() if m == n]:
            trial = dict(dims)
            if _same(t, u, trial):
                dims.update(trial)
                del left[u]
                break
        else:
            return False
    return not left


def _head(e: Expr) -> object:
    """What an expression is beside its parts."""
    match e:
        case Call(op, _):
            return op
        case Load(tensor, _):
            return tensor
    return getattr(e, "dtype", None)


def _batch(x: Let, loop: Loop) -> set[str]:
    """Dims that all that a sum over pairs multiplies has: no rows of a product."""
    read = [set(_indices(ld)) for ld in loads(x.expr)]
    return set.intersection(*read) if x.reducer == "sum" and loop.dim in x.dims and len(read) > 1 else set()


def _indices(ld: Load) -> Iterator[str]:
    return (e.dim for e in ld.index if isinstance(e, Index))


def _put(n: Node, table: Mapping[Expr, Expr]) -> Node:
    if isinstance(n, Store | Let | Update) and table:
        return replace(n, expr=substitute(n.expr, table))
    return n


def _whole(n: Let) -> Load:
    return Load(n.name, tuple(map(Index, n.dims)))


def _fresh(name: str, *blocks: Block) -> str:
    taken = {n.name for b in blocks for n in walk(b.body) if isinstance(n, Let | Init)}
    taken |= {n.name for b in blocks for n in b.inputs} | {n.name for b in blocks for n in b.results}
    return fresh(name, taken)
