"""The kernels that a tensor program's operators could become: legality, lower bounds, snapshots and their cost.

Everything about a set of operators depends on it only up to names, so it is remembered under a canonical key: the
layers of a model are looked at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Expr, Index, Load, Size, dims_used, loads, transform, walk
from tilefold.block.canonical import canonical
from tilefold.block.fuse import FusedKernel
from tilefold.block.group import Group
from tilefold.block.legal import legal
from tilefold.errors import NotFusibleError, VerifyError
from tilefold.plan.cost import Cost, library_cost
from tilefold.plan.dag import Dag, bits
from tilefold.plan.dataflow import MOVE, element_units
from tilefold.plan.forms import Form
from tilefold.plan.library import ConvolutionCall, GradientCall, LibraryCall, library_call
from tilefold.plan.library_rates import Kind, Sizes
from tilefold.plan.problem import MOST_IDEALS, Problem, Variant
from tilefold.plan.search import Shape
from tilefold.plan.target import Target
from tilefold.tensor import streams
from tilefold.tensor.analysis import Graph, out_dims
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.sizes import estimate, extents

#: Most operators of one kernel that are looked at.
LARGEST = 16
#: Sets whose legality is looked at, for each kernel that may be priced.
SETS_A_PRICE = 40
#: Ideals that are passed, for each kernel that may be priced. Where there are more, only small kernels leave few
#: enough, and the greedy grouping is priced lower than what they make.
IDEALS_A_PRICE = 400
#: Part of the element-wise work that a kernel does at least.
LEAST_SHARE = 0.5
#: How much better than one pass another snapshot must look to be chosen.
DOUBT = 1.15
Key = tuple[object, ...]
#: Bytes moved that a byte of a stream in memory costs: fresh memory comes page by page (gradient of attention, 4 heads
#: of 64, 2,048 keys, float32, one thread: 1.0 s where 0.14 s were predicted of its traffic, 0.33 s as two kernels).
STORED = 8
#: What a statement costs that a library call absorbs.
NOTHING = Cost(0.0, {"compute": 0.0}, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One way to run a candidate: a library call, or `form` with a tiling for each of its kernels (canonical dims)."""

    form: Form | None
    shapes: tuple[Shape, ...]
    cost: Cost

    @property
    def seconds(self) -> float:
        """What the selection compares: predicted, and more for a form that has to look clearly better."""
        return self.cost.seconds * (DOUBT if self.form is not None and self.form != Form() else 1.0)

    def __str__(self) -> str:
        return "library" if self.form is None else str(self.form)


class Kernels:
    """Candidates of a program (after `align_reductions`) on a device. `apart`: operators that stay alone;
    `syms`: values of symbols to plan for (absent: typical ones). `inside`:
    parts of streams, which no library call computes. `copies`: of one stream, of which no kernel has two.
    """

    def __init__(
        self,
        p: Program,
        target: Target,
        apart: frozenset[str] = frozenset(),
        syms: Mapping[str, int] | None = None,
        inside: frozenset[str] = frozenset(),
        copies: Collection[frozenset[str]] = (),
    ):
        self.target, self.machine = target, target.machine
        self.program, self.apart = p, apart
        self.graph = Graph.of(p)
        self.syms = syms or {}
        self.sizes = extents(p.sizes, self.syms)
        self.calls: dict[str, LibraryCall | ConvolutionCall | GradientCall] = {}
        for c in p.body if target.library else ():
            if c.name in inside:
                continue
            call = library_call(self.graph, c, apart)
            self.calls |= {} if call is None else dict.fromkeys(call.members, call)
        self.dag = Dag.of([c.name for c in p.body], self.graph.producers)
        self.streams = self.dag.mask(m for x in streams.streams(p) for m in x.members) if inside else 0
        self.copies = [self.dag.mask(m for m in members if m in self.graph.by_name) for members in copies]
        self.partners = self._partners()
        self.inputs = {i.name: i for i in p.inputs}
        self.owner = {r: c.name for c in p.body for r in c.results}
        self._conditions = {c.name: _index_conditions(c.body) for c in p.body}
        self._units: dict[str, float] = {}  # of one element of each statement
        self._reads: dict[str, dict[str, float]] = {}  # of each statement, bytes of each tensor
        self._whole: dict[str, float] = {}  # bytes of tensors
        self._templates = {c.name: _template(c) for c in p.body}
        self._groups: dict[Key, tuple[int, ...] | None] = {}
        self._bounds: dict[Key, float | None] = {}
        self._variants: dict[Key, tuple[Variant, ...]] = {}
        self._outers: dict[str, tuple[str, ...]] = {}
        self._at = {c.name: k for k, c in enumerate(p.body)}
        self._keys: dict[int, Key] = {}
        self._built: dict[tuple[Group, Form], tuple[FusedKernel, ...]] = {}
        #: Legal sets that no block program could be built for, and why.
        self.refused: dict[tuple[str, ...], str] = {}

    def problem(self, budget: int | None = None) -> Problem:
        """For `plan.select`. `budget`: kernels (different ones) to price, about; None: as many as it takes."""
        return Problem(
            self.dag,
            self.partners,
            self.bound,
            self.variants,
            largest=LARGEST,
            spent=lambda: budget is not None and len(self._variants) >= budget,
            most_sets=None if budget is None else SETS_A_PRICE * budget,
            most_ideals=MOST_IDEALS if budget is None else IDEALS_A_PRICE * budget,
        )

    def _partners(self) -> tuple[int, ...]:
        """Links: an edge, or two reductions over the same dims of the same input; none for what stays apart."""
        links = [a | b for a, b in zip(self.dag.preds, self.dag.succs, strict=True)]
        readers: dict[tuple[str, tuple[str, ...], frozenset[str]], list[int]] = {}
        for k, c in enumerate(self.program.body):
            if c.reducer is not None:
                for ld in loads(c.body):
                    readers.setdefault((ld.tensor, c.rdims, frozenset(out_dims(c))), []).append(k)
        for same in readers.values():
            for k in same:
                links[k] |= sum(1 << j for j in set(same) if j != k)
        for mine in self.copies:
            others = sum(m for m in self.copies if m != mine)
            for k in bits(mine):
                links[k] &= ~others
        alone = self.dag.mask(self.apart)
        return tuple(0 if alone >> k & 1 else x & ~alone for k, x in enumerate(links))

    def mixes(self, s: int) -> bool:
        """Whether a set has parts of two copies of a stream."""
        return sum(bool(s & m) for m in self.copies) > 1

    # -- legality and bounds ------------------------------------------------------------------

    def group(self, s: int) -> Group | None:
        """The group of a candidate, None if it is not one kernel."""
        key = self.key(s)
        members = self.dag.members(s)
        if key not in self._groups:
            found = legal(self.graph, members, self.target.limits)
            self._groups[key] = None if isinstance(found, str) else tuple(self._names(s)[d] for d in found.parallel)
        places = self._groups[key]
        if places is None:
            return None
        dims = list(self._names(s))
        return Group(members, tuple(dims[k] for k in places))

    def bound(self, s: int) -> float | None:
        """At least what any snapshot costs: each tensor moved once from where it lives, and the products."""
        if self.mixes(s):
            return None
        key = self.key(s)
        if key not in self._bounds:
            self._bounds[key] = self._bound(s) if self.group(s) is not None else None
        return self._bounds[key]

    def _bound(self, s: int) -> float:
        machine, members = self.machine, self.dag.members(s)
        moved: dict[str, float] = {}
        for name, n in self.traffic(members).items():
            home = machine.home(max(n, self.whole_bytes(name))).name
            moved[home] = moved.get(home, 0.0) + n
        rates: dict[str, float] = {t.name: t.bandwidth for t in machine.tiers}
        stages = [n / rates[t] for t, n in moved.items()]
        return machine.launch + max([*stages, self._least_compute(members)])

    def _least_compute(self, members: Sequence[str]) -> float:
        """Arithmetic that no snapshot avoids: products at full rate, a share of the rest (what is shared, or hoisted
        out of loops, is computed less often); none of what a condition on indices may keep from running."""
        seconds = 0.0
        asked = [d for m in members for d in self._conditions[m]]
        alone = len(members) == 1
        for m in members:
            c = self.graph.by_name[m]
            dims = {*out_dims(c), *c.rdims}
            if any(d <= dims for d in asked):
                continue
            points = prod(self.sizes[d] for d in dims)
            if c.reducer == "sum" and isinstance(c.body, Call) and c.body.op == "mul":
                operand = next(iter(loads(c.body)), None)
                dtype = DType.F32 if operand is None else self.program.dtype_of(operand.tensor)
                best = max(self.machine.gemm_rate(dtype, library=x) for x in ((True, False) if alone else (False,)))
                seconds += 2.0 * points / max(best, self.machine.vector)
            else:
                if m not in self._units:
                    self._units[m] = element_units(c.body)
                seconds += LEAST_SHARE * points * (self._units[m] + MOVE) / self.machine.vector
        return seconds

    def traffic(self, members: Sequence[str]) -> dict[str, float]:
        """Bytes of each tensor that a kernel of these members reads from outside, or writes, once."""
        mine = frozenset(members)
        inside = {r for m in members for r in self.graph.by_name[m].results}
        out: dict[str, float] = {}
        for m in members:
            for tensor, n in self._read(m).items():
                if tensor not in inside:
                    out[tensor] = min(self.whole_bytes(tensor), out.get(tensor, 0.0) + n)
            if self.graph.escapes(m, mine):
                out |= {r: self.whole_bytes(r) for r in self.graph.by_name[m].results}
        return out

    def _read(self, member: str) -> dict[str, float]:
        """Bytes of each tensor that a statement reads."""
        if member not in self._reads:
            found = self._reads[member] = dict[str, float]()
            for ld in loads(self.graph.by_name[member].body):
                found[ld.tensor] = found.get(ld.tensor, 0.0) + self._touched(ld)
        return self._reads[member]

    def _touched(self, ld: Load) -> float:
        dims = frozenset().union(*map(dims_used, ld.index)) if ld.index else frozenset()
        return prod(self.sizes[d] for d in dims) * self.program.dtype_of(ld.tensor).nbytes

    def whole_bytes(self, tensor: str) -> float:
        """Bytes of a tensor of the program."""
        found = self._whole.get(tensor)
        if found is None:
            found = self._whole[tensor] = self._bytes_of(tensor)
        return found

    def _bytes_of(self, tensor: str) -> float:
        if tensor in self.inputs:
            shape = [estimate(e, self.syms) for e in self.inputs[tensor].shape]
            return float(prod(shape) * self.inputs[tensor].dtype.nbytes)
        c = self.graph.by_name[self.owner[tensor]]
        return float(prod(self.sizes[d] for d in c.dims) * self.program.dtype_of(tensor).nbytes)

    # -- prices -------------------------------------------------------------------------------

    def variants(self, s: int) -> tuple[Variant, ...]:
        """Every snapshot of a candidate, priced, the cheapest first."""
        more, found = self.storing(s), self._priced(s)
        return tuple(replace(v, seconds=v.seconds + more) for v in found) if more else found

    def storing(self, s: int) -> float:
        """Seconds that the streams cost which a set leaves in memory."""
        return STORED * sum(self.whole_bytes(n) for n in self.dag.members(self.stored(s))) / self.machine.bandwidth

    def stored(self, s: int) -> int:
        """The streams of a set that other kernels read."""
        return sum(1 << k for k in bits(s & self.streams) if self.dag.succs[k] & ~s)

    def _priced(self, s: int) -> tuple[Variant, ...]:
        key = self.key(s)
        if key not in self._variants:
            low = self.bound(s) or 0.0
            try:
                found = [Variant(max(low, x.seconds), what=x) for x in self._snapshots(s)]
            except (NotFusibleError, VerifyError) as err:
                self.refused[self.dag.members(s)] = err.message
                found = []
            self._variants[key] = tuple(sorted(found, key=lambda v: v.seconds))
        return self._variants[key]

    def at_least(self, s: int) -> float:
        """What is known of the cost of a legal candidate: its price if it has one, else its bound."""
        found = self._variants.get(self.key(s))
        return found[0].seconds if found else self.bound(s) or 0.0

    def _snapshots(self, s: int) -> list[Snapshot]:
        group = self.group(s)
        assert group is not None
        return self.snapshots(group)

    def snapshots(self, group: Group) -> list[Snapshot]:
        """Every way to run a legal group, priced."""
        members = group.members
        out: list[Snapshot] = []
        if len(members) == 1 and members[0] in self.calls:
            (name,) = members
            call = self.calls[name]
            # of a product and its bias, the call is priced with the bias
            out.append(Snapshot(None, (), self.library(call) if name == call.out else NOTHING))
            if name in self.apart:
                return out
        for form, kernels in self.target.forms(self.graph, group):
            self._built[group, form] = kernels
            best = tuple(self.shapes(k)[0] for k in kernels)
            out.append(Snapshot(form, best, together([b.cost for b in best])))
        return out

    def build(self, group: Group, form: Form) -> tuple[FusedKernel, ...]:
        """The kernels of one snapshot of a group."""
        found = self._built.get((group, form))
        return self.target.build(self.graph, group, form) if found is None else found

    def shapes(self, k: FusedKernel) -> tuple[Shape, ...]:
        """Tilings of a kernel under its canonical names, the cheapest first."""
        named = canonical(k.block)
        syms = {new: self.syms[old] for new, old in named.syms.items() if old in self.syms}
        return self.target.shapes(named.block, extents(named.block.sizes, syms))

    def library(self, call: LibraryCall | ConvolutionCall | GradientCall) -> Cost:
        """A product, convolution or gradient of one left to the library."""
        if isinstance(call, GradientCall):
            c, v = call.compute, call.form
            columns = 1 if v.groups else prod(self.sizes[d] for d in v.channels)
            rows = prod(self.sizes[d] for d in c.dims) // max(1, columns)
            sizes = Sizes(1, rows, columns, prod(self.sizes[d] for d in c.rdims))
            return library_cost("conv", sizes, self.traffic(call.members), v.dtype, self.machine)
        if isinstance(call, ConvolutionCall):
            c, f = call.compute, call.form
            channels = prod(self.sizes[d] for d in f.outs)
            places = prod(self.sizes[d] for d in c.dims) // max(1, channels)
            sizes = Sizes(1, places, channels, prod(self.sizes[d] for d in c.rdims))
            return library_cost("conv", sizes, self.traffic(call.members), f.dtype, self.machine)
        p = call.product
        sizes = Sizes(*(prod(self.sizes[d] for d in dims) for dims in (p.batch, p.rows, p.cols, p.rdims)))
        kind: Kind = "bmm" if p.batch else "mm" if call.bias is None else "addmm"
        dtype = self.program.dtype_of(call.a.tensor)
        launches = 3 if p.batch and self.machine.kind == "cpu" else 1
        return library_cost(kind, sizes, self.traffic(call.members), dtype, self.machine, launches=launches)

    # -- names --------------------------------------------------------------------------------

    def _names(self, s: int) -> dict[str, int]:
        """Dims of a candidate, numbered as they appear."""
        dims: dict[str, int] = {}
        for k in bits(s):
            for d in self._templates[self.dag.names[k]].dims:
                dims.setdefault(d, len(dims))
        return dims

    def key(self, s: int) -> Key:
        """Equal for candidates that differ in names only."""
        found = self._keys.get(s)
        if found is None:
            found = self._keys[s] = self._key(s)
        return found

    def _key(self, s: int) -> Key:
        members = self.dag.members(s)
        dims = self._names(s)
        inside = {r: (n, k) for n, m in enumerate(members) for k, r in enumerate(self.graph.by_name[m].results)}
        outside: dict[str, int] = {}
        parts: list[object] = [tuple(str(self.program.sizes[d]) for d in dims)]
        for m in members:
            t = self._templates[m]
            read: list[object] = []
            for name in t.tensors:
                if name in inside:
                    read.append(inside[name])
                else:
                    read.append(outside.setdefault(name, len(outside)))
            parts.append((t.text, tuple(read), tuple(dims[d] for d in t.dims), self._needed(m, s)))
        parts.append(tuple(self._outer(name) for name in outside))
        return tuple(parts)

    def _needed(self, m: str, s: int) -> tuple[object, ...]:
        c = self.graph.by_name[m]
        k = self._at[m]
        used = bool(self.dag.succs[k] & ~s) or any(r in self.program.outputs for r in c.results)
        call = self.calls.get(m)
        return used, m in self.apart, call is not None and call.out == m, 0 if call is None else len(call.members)

    def _outer(self, name: str) -> tuple[str, ...]:
        found = self._outers.get(name)
        if found is None:
            shape = self.inputs[name].shape if name in self.inputs else self.program.shape_of(name)
            found = self._outers[name] = (self.program.dtype_of(name).value, *(str(e) for e in shape))
        return found


def _index_conditions(e: Expr) -> tuple[frozenset[str], ...]:
    """Dims of each condition of the expression that looks at indices alone (a mask)."""
    tests = [x.args[0] for x in walk(e) if isinstance(x, Call) and x.op == "where"]
    return tuple(dims_used(t) for t in tests if dims_used(t) and not any(isinstance(x, Load) for x in walk(t)))


@dataclass(frozen=True, slots=True)
class _Template:
    """A statement with its names taken out: dims and tensors in order of appearance."""

    text: str
    dims: tuple[str, ...]
    tensors: tuple[str, ...]


def _template(c: Compute) -> _Template:
    dims = {d: k for k, d in enumerate(dict.fromkeys((*c.dims, *c.rdims)))}
    tensors: dict[str, int] = {}

    def one(x: Expr) -> Expr | None:
        match x:
            case Index(d):
                return Index(f"d{dims.setdefault(d, len(dims))}")
            case Size(d):
                return Size(f"d{dims.setdefault(d, len(dims))}")
            case Load(t, index):
                return Load(f"t{tensors.setdefault(t, len(tensors))}", index)
        return None

    body = transform(c.body, one)
    text = f"{c.dtype.value} {len(c.dims)} {c.reducer} {len(c.rdims)} {c.index_name is None} {body}"
    return _Template(text, tuple(dims), tuple(tensors))


def together(costs: Sequence[Cost]) -> Cost:
    """Kernels one after the other."""
    if len(costs) == 1:
        return costs[0]
    stages: dict[str, float] = {}
    for c in costs:
        for name, x in c.stages.items():
            stages[name] = stages.get(name, 0.0) + x
    return Cost(sum(c.seconds for c in costs), stages, sum(c.overhead for c in costs), sum(c.nbytes for c in costs))
