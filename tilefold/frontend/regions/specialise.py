"""Head counts and head sizes made numbers; lengths stay symbolic.

Dynamo makes symbolic whatever it saw change, and it knows a function by its name and line: one attention
function that two models call has their numbers of heads and head sizes as symbols. Kernels are built around those
(FlexAttention does the same), so that a guard is worth its recompilation. In the lowered program they are

- features: extents of a matrix product, at most `MOST_FEATURES`, that are extents of the last axes of floating
  arguments and of no other axis, and that no maximum is taken over or along (softmax: queries and keys);
- heads: where a dim of both operands indexes one of them as it is and the other divided (`q[i]`, `k[i // (H // G)]`),
  the sizes in the divisor, but for those that a product sums or keeps from one operand alone.

Everything else is a length and stays, as does what the user marked dynamic (`torch._dynamo.mark_dynamic`: Dynamo would
refuse the guard), and every size of a function that was compiled so often that Dynamo's limit is near: its last graphs
serve all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._guards import CompileContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from tilefold.algebra.expr import Call, Cast, Expr, Index, Sym, dims_used, loads, walk
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import Product, product
from tilefold.tensor.sizes import extent

#: Largest extent that is taken for features, not for a length.
MOST_FEATURES = 1024
#: Compilations of a function, of those that Dynamo allows it, that keep all sizes.
LAST = 2


def lower_specialised(
    gm: torch.fx.GraphModule, sizes: Sizes | None, *, name: str = "program", names: Sequence[str] | None = None
) -> Lowered:
    """`lower`, and once more if that shows sizes that should be numbers, which become so in all of `gm`'s shape
    environment. sizes: those of the graph that `gm` is, or is a part of; None leaves all of them symbolic.
    """
    lowered = lower(gm, name=name, names=names)
    if sizes is None or not sizes.fix(features(lowered.program, sizes) | heads(lowered.program)):
        return lowered
    return lower(gm, name=name, names=names)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbols of a captured graph's arguments that guards may be added to, by name.

    features: extents of last axes of floating arguments alone. numbers: integer arguments, no extents.
    """

    symbols: dict[str, torch.SymInt]
    features: frozenset[str]
    numbers: frozenset[str]

    @classmethod
    def of(cls, gm: torch.fx.GraphModule) -> Sizes | None:
        """Those of a graph with fake values in `meta["val"]`; None where no size may become a number."""
        symbols: dict[str, torch.SymInt] = {}
        extents: set[str] = set()
        last: set[str] = set()
        other: set[str] = set()
        for node in gm.graph.find_nodes(op="placeholder"):
            val = node.meta.get("val")
            for axis, n in enumerate(val.shape) if isinstance(val, torch.Tensor) else ((0, val),):
                symbols.update(_symbol(n))
                if isinstance(val, torch.Tensor):
                    extents |= _names(n)
                    if val.ndim > 1:  # of a vector there is no telling
                        (last if axis == val.ndim - 1 and val.is_floating_point() else other).update(_names(n))
        if not symbols or _compiled_often():
            return None
        kept = _marked(next(iter(symbols.values())).node.shape_env)
        free = {s: n for s, n in symbols.items() if s not in kept}
        return cls(free, frozenset(last - other), frozenset(symbols) - extents)

    def fix(self, names: Iterable[str]) -> bool:
        """Guard on the values of these symbols; whether there were any."""
        known = [self.symbols[s] for s in sorted(names) if s in self.symbols]
        for n in known:
            int(n)
        return bool(known)

    def value(self, e: Expr) -> int:
        """The extent `e` in the call that is compiled for."""
        syms = {s: n.node.hint for s, n in self.symbols.items()}
        return int(extent(e, syms))


def _names(n: object) -> set[str]:
    return {str(s) for s in n.node.expr.free_symbols} if isinstance(n, torch.SymInt) else set()


def _symbol(n: object) -> dict[str, torch.SymInt]:
    """A size that is one symbol, by its name; not one that depends on data."""
    if not isinstance(n, torch.SymInt) or not n.node.expr.is_Symbol or free_unbacked_symbols(n):
        return {}
    return {str(n.node.expr): n}


def _marked(env: ShapeEnv) -> set[str]:
    """Symbols that the user marked dynamic: a guard on their value would be an error of Dynamo's."""
    found: set[str] = set()
    for tracked in env.tracked_fakes or ():
        sizes = tracked.fake.shape if isinstance(tracked.fake, torch.Tensor) else [tracked.fake]
        context = tracked.symbolic_context
        constraints = getattr(context, "constraint_sizes", None) or [getattr(context, "constraint", None)] * len(sizes)
        for n, c in zip(sizes, constraints, strict=False):
            if c is not None and not c.warn_only:
                found |= _names(n)
    return found


def _compiled_often() -> bool:
    """Whether Dynamo's limit of compilations of the function that is compiled is near."""
    current = CompileContext.current_compile_id()
    count = None if current is None else current.frame_compile_id
    return count is not None and count >= torch._dynamo.config.recompile_limit - LAST


def features(p: Program, sizes: Sizes) -> set[str]:
    """Symbols of the extents of features."""
    lengths = {s for c in _maxima(p) for d in (*c.dims, *c.rdims) for s in _syms(p.sizes[d])}
    found: set[str] = set()
    for x in _products(p):
        for e in (p.sizes[d] for d in _lengths(x)):
            syms = _syms(e)
            last = syms - sizes.numbers  # a number of heads may divide them
            if not last or not syms <= sizes.symbols.keys():
                continue
            if last <= sizes.features - lengths and sizes.value(e) <= MOST_FEATURES:
                found |= syms
    return found


def heads(p: Program) -> set[str]:
    """Symbols in divisors of dims that index one operand of a product as they are."""
    lengths = {s for c in _maxima(p) for d in c.rdims for s in _syms(p.sizes[d])}
    found: set[str] = set()
    for x in _products(p):
        lengths |= {e.name for d in _lengths(x) if isinstance(e := p.sizes[d], Sym)}
        for one, other in ((x.a, x.b), (x.b, x.a)):
            whole = {ix.dim for ld in loads(one) for ix in ld.index if isinstance(ix, Index)} & set(x.batch)
            for divided, divisor in _divisions(other):
                if whole & dims_used(divided):
                    found |= _syms(divisor)
    return found - lengths


def _maxima(p: Program) -> Iterator[Compute]:
    return (c for c in p.body if c.reducer == "max")


def _products(p: Program) -> Iterator[Product]:
    """Sums of products, also those that are cast before they are summed."""
    for c in p.body:
        body = c.body
        while isinstance(body, Cast):
            body = body.arg
        found = product(c.reducer, body, c.dims, c.rdims)
        if found is not None and found.depth and found.of_one_side:
            yield found


def _lengths(x: Product) -> frozenset[str]:
    """Dims of a product but for the batch."""
    return frozenset({*x.dims, *x.rdims}) - frozenset(x.batch)


def _divisions(e: Expr) -> Iterator[tuple[Expr, Expr]]:
    """(divided, divisor) of the indices of loads."""
    for ld in loads(e):
        for ix in ld.index:
            for n in walk(ix):
                match n:
                    case Call("floordiv" | "mod", (divided, divisor)):
                        yield divided, divisor


def _syms(e: Expr) -> set[str]:
    return {n.name for n in walk(e) if isinstance(n, Sym)}
