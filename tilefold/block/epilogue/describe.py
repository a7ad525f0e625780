"""What a kernel is in CODA's terms: the primitives of its epilogue, and the paper's kernel it amounts to.

Section 3.1 names five classes of primitives; appendix C.1 lists ten kernels made of them. Both are
read off the statements of a kernel: nothing here knows a model or an operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilefold.algebra.expr import Const, Index, Load, dims_used, loads, walk
from tilefold.block.epilogue.kernels import Kernel, Kernels
from tilefold.tensor.analysis import Graph
from tilefold.tensor.ir import Compute
from tilefold.tensor.laws.terms import gemm

#: A combine kernel touches no tensor larger than this part of the largest product's result.
SMALL = 4

PAPER: dict[int, str] = {
    1: "RoPE",
    2: "SwiGLU",
    3: "partial cross-entropy",
    4: "residual, partial RMSNorm, weight scaling",
    5: "RMSNorm scaling",
    6: "RMSNorm and SwiGLU",
    7: "RMSNorm and RoPE",
    8: "RMSNorm and partial cross-entropy",
    9: "residual and RMSNorm backward",
    10: "SwiGLU backward",
}


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Primitives of one kernel with a product. Names are of tensors and statements.

    rows, columns: vectors loaded along one side of the tile only (`indices`: integers); tiles: tensors
    loaded like the tile; saved_pairs: those of which single features of a pair are loaded; pairs: maps
    that combine features of the tile (`keeps` of them give as many); packs: results that lay features
    out in pairs; over_columns, over_rows: partial reductions; `stateful`: a maximum and sums that
    depend on it.
    """

    rows: tuple[str, ...]
    indices: tuple[str, ...]
    columns: tuple[str, ...]
    tiles: tuple[str, ...]
    saved_pairs: tuple[str, ...]
    pairs: tuple[str, ...]
    keeps: tuple[str, ...]
    packs: tuple[str, ...]
    over_columns: tuple[str, ...]
    over_rows: tuple[str, ...]
    stateful: bool

    def describe(self) -> str:
        """The primitives in a line."""
        parts = [
            ("row vectors", self.rows),
            ("row indices", self.indices),
            ("column vectors", self.columns),
            ("tiles", self.tiles),
            ("pairs", self.pairs),
            ("packed", self.packs),
            ("partials over columns", self.over_columns),
            ("partials over rows", self.over_rows),
        ]
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names) or "elementwise"


@dataclass(frozen=True, slots=True)
class Described:
    """A kernel with its kind: "product", "combine" (small), "pass" (over memory) or "once" (parameters alone).

    `backward`: it depends on a gradient.
    """

    kernel: Kernel
    kind: str
    backward: bool
    epilogue: Epilogue | None

    @property
    def paper(self) -> int | None:
        """Number of the paper's kernel (appendix C.1) with these primitives, None for a plain epilogue."""
        e = self.epilogue
        if e is None:
            return None
        scaled = bool(e.rows)
        if e.stateful:
            return 8 if scaled else 3
        if self.backward:
            if e.packs and e.saved_pairs:
                return 10
            return 9 if e.over_rows and e.tiles and scaled else None
        if e.pairs:
            return (7 if scaled else 1) if e.keeps else (6 if scaled else 2)
        if e.over_columns and not scaled:
            return 4
        return 5 if scaled else None

    def title(self) -> str:
        """One line."""
        when = "backward " if self.backward else ""
        if self.epilogue is None:
            return f"{when}{self.kind}"
        number = self.paper
        paper = f"kernel {number}, {PAPER[number]}: " if number is not None else ""
        return f"{when}product {self.kernel.product}, {paper}{self.epilogue.describe()}"


def described(found: Kernels) -> tuple[Described, ...]:
    """Every kernel of a cut program."""
    g = Graph.of(found.program)
    largest = max((g.points(g.by_name[k.product].dims) for k in found.kernels if k.product is not None), default=0)
    out = []
    for k in found.kernels:
        backward = any(m in found.late for m in k.members)
        if k.product is not None:
            out.append(Described(k, "product", backward, epilogue_of(g, k, found.target.parameters | found.once)))
            continue
        kind = "combine" if _largest(g, k) * SMALL <= largest else "pass"
        out.append(Described(k, "once" if k.members[0] in found.once else kind, backward, None))
    return tuple(out)


def _largest(g: Graph, k: Kernel) -> int:
    """Elements of the largest tensor that a kernel touches."""
    sizes = [g.points(g.by_name[m].dims) for m in k.members]
    for m in k.members:
        for ld in loads(g.by_name[m].body):
            sizes.append(g.points({n.dim for i in ld.index for n in walk(i) if isinstance(n, Index)}))
    return max(sizes)


def epilogue_of(g: Graph, k: Kernel, constant: frozenset[str]) -> Epilogue:
    """The primitives of a kernel's epilogue; an operand among `constant` gives the columns."""
    assert k.product is not None
    product = gemm(g.by_name[k.product])
    assert product is not None
    columns = dims_used(product.b) & frozenset(product.compute.dims)
    rows = frozenset(product.compute.dims) - columns
    if product.a.tensor in constant and product.b.tensor not in constant:
        rows, columns = columns, rows
    members = [g.by_name[m] for m in k.members if m != k.product]
    inside = {r for m in k.members for r in g.by_name[m].results}
    outer = {ld for c in members for ld in loads(c.body) if ld.tensor not in inside}
    partial = [c for c in members if c.reducer is not None]
    crossing = [c for c in members if c.reducer is None and not isinstance(c.body, Load) and _crossed(g, c, inside)]
    largest = {c.name for c in partial if c.reducer == "max"}
    along_rows = [ld for ld in outer if dims_used(ld) and dims_used(ld) <= rows]
    return Epilogue(
        rows=_named(ld for ld in along_rows if g.program.dtype_of(ld.tensor).is_float),
        indices=_named(ld for ld in along_rows if not g.program.dtype_of(ld.tensor).is_float),
        columns=_named(ld for ld in outer if dims_used(ld) and dims_used(ld) <= columns),
        tiles=_named(ld for ld in outer if dims_used(ld) & rows and dims_used(ld) & columns),
        saved_pairs=_named(ld for ld in outer if any(isinstance(i, Const) for i in ld.index)),
        pairs=tuple(c.name for c in crossing),
        keeps=tuple(c.name for c in crossing if _crossed(g, c, inside) & set(c.dims)),
        packs=tuple(c.name for c in members if c.reducer is None and set(c.dims) - set(product.compute.dims)),
        over_columns=tuple(c.name for c in partial if set(c.rdims) <= columns),
        over_rows=tuple(c.name for c in partial if set(c.rdims) <= rows),
        stateful=any(ld.tensor in largest for c in partial for ld in loads(c.body)),
    )


def _named(found: Iterable[Load]) -> tuple[str, ...]:
    return tuple(sorted({ld.tensor for ld in found}))


def _crossed(g: Graph, c: Compute, inside: set[str]) -> set[str]:
    """Dims of results of the same kernel that a map reads at other elements than its own."""
    out: set[str] = set()
    for ld in loads(c.body):
        if ld.tensor in inside:
            dims = next(p.dims for p in g.program.body if ld.tensor in p.results)
            out |= {d for d, i in zip(dims, ld.index, strict=True) if i != Index(d)}
    return out
