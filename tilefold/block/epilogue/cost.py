"""What a cut into kernels costs: passes over memory, with epilogues in the shadow of main loops.

Bytes that a kernel without a product moves count in full. Those around a product count a quarter:
a main loop runs at the rate of the matrix units while the epilogue of another tile moves them
(CODA section 1: ping-pong schedules, tensor memory). Arithmetic of products counts at the ratio of
the machine's rates, so that no law trades a pass for a product. Every kernel counts a little.

Statements that depend on parameters alone are made once: where they only arrange parameters
(interleaved weights) they cost nothing, since parameters can be stored so; where they compute with
them, nothing in inference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, loads, walk
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import estimate

#: Weight of a byte moved beside a product.
SHADOW = 0.25
#: Arithmetic operations that take as long as a byte of memory traffic (H100: 989 TFLOP/s, 3.35 TB/s).
RIDGE = 295.0
#: Cost of a kernel, in bytes: enough to break ties.
LAUNCH = 16.0


@dataclass(frozen=True, slots=True)
class Target:
    """What to cut for. `tile`: rows and columns of an output tile. `parameters`: inputs that stay the
    same from call to call; with `training` what is computed from them is computed each time. `late`:
    inputs that come after the results that do not depend on them (gradients, in a joint graph)."""

    tile: int = 128
    parameters: frozenset[str] = frozenset()
    training: bool = False
    late: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of passes without a product, bytes beside products, FLOP of products, number of kernels."""

    passes: float = 0.0
    beside: float = 0.0
    flops: float = 0.0
    kernels: int = 0

    def __add__(self, o: Cost) -> Cost:
        return Cost(self.passes + o.passes, self.beside + o.beside, self.flops + o.flops, self.kernels + o.kernels)

    @property
    def total(self) -> float:
        """In bytes of plain traffic."""
        return self.passes + SHADOW * self.beside + self.flops / RIDGE + LAUNCH * self.kernels


class Costs:
    """Costs of sets of statements of one program."""

    def __init__(self, p: Program, g: Graph, target: Target):
        self.p, self.g, self.target = p, g, target
        self.dtypes: dict[str, DType] = {i.name: i.dtype for i in p.inputs}
        for c in p.body:
            self.dtypes.update({r: p.dtype_of(r) for r in c.results})
        self.size_of = {i.name: prod(map(estimate, i.shape)) for i in p.inputs}
        self.size_of |= {r: g.points(c.dims) for c in p.body for r in c.results}
        self.once = self._once()
        self.read_by = {c.name: self._reads(c.body) for c in p.body}
        self.made = {c.name: sum(self.dtypes[r].nbytes for r in c.results) * g.points(c.dims) for c in p.body}
        self.known: dict[tuple[str, ...], Cost] = {}

    def _once(self) -> frozenset[str]:
        known = set(self.target.parameters)
        for c in self.p.body:
            read = {ld.tensor for ld in loads(c.body)}
            if read and read <= known:
                known |= set(c.results)
        return frozenset(known - self.target.parameters)

    def phases(self) -> dict[str, str]:
        """Statement -> "late" if it depends on a late input, "early" if an output without one needs it."""
        phase: dict[str, str] = {}
        late = set(self.target.late)
        for c in self.p.body:
            if any(ld.tensor in late for ld in loads(c.body)):
                late |= set(c.results)
                phase[c.name] = "late"
        wanted = {o for o in self.p.outputs if o not in late}
        for c in reversed(self.p.body):
            if wanted & set(c.results):
                phase[c.name] = "early"
                wanted |= {ld.tensor for ld in loads(c.body)}
        return phase

    def _reads(self, e: Expr) -> dict[str, int]:
        """Elements read of each tensor: of every different access, at most all."""
        out: dict[str, int] = {}
        for ld in loads(e):
            dims = {n.dim for i in ld.index for n in walk(i) if isinstance(n, Index)}
            out[ld.tensor] = min(out.get(ld.tensor, 0) + self.g.points(dims), self.size_of[ld.tensor])
        return out

    def kernel(self, members: tuple[str, ...], product: str | None) -> Cost:
        """One kernel of these statements."""
        if members not in self.known:
            self.known[members] = self._kernel(members, product)
        return self.known[members]

    def _kernel(self, members: tuple[str, ...], product: str | None) -> Cost:
        if set(members) <= self.once and (not self.target.training or all(map(self._arranges, members))):
            return Cost(kernels=0)
        moved = self._moved(members)
        if product is not None:
            c = self.g.by_name[product]
            flops = 2.0 * self.g.points((*c.dims, *c.rdims))
            return Cost(beside=moved, flops=flops, kernels=1)
        points = max(self.g.points((*out_dims(c), *c.rdims)) for c in map(self.g.by_name.__getitem__, members))
        return Cost(passes=max(moved, points), kernels=1)

    def _moved(self, members: tuple[str, ...]) -> float:
        """Bytes read from outside, each tensor once, and written for outside."""
        inside = set(members)
        made = {r for m in members for r in self.g.by_name[m].results}
        elements: dict[str, int] = {}
        for m in members:
            for t, n in self.read_by[m].items():
                if t not in made:
                    elements[t] = max(elements.get(t, 0), n)
        total = float(sum(n * self.dtypes[t].nbytes for t, n in elements.items()))
        return total + sum(self.made[m] for m in members if self.g.escapes(m, inside))

    def _arranges(self, name: str) -> bool:
        return arranges(self.g.by_name[name].body)


def arranges(e: Expr) -> bool:
    """Whether an expression only chooses elements: loads under conditions on indices."""
    match e:
        case Load():
            return not any(isinstance(n, Load) for i in e.index for n in walk(i))
        case Cast(arg, _):
            return arranges(arg)
        case Call("where", (c, a, b)):
            return not any(isinstance(n, Load) for n in walk(c)) and arranges(a) and arranges(b)
        case Const():
            return True
    return False
