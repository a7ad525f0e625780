"""Arithmetic of rendered statements and of positions, and what a thread holds meanwhile: of the forecast (`warps`).

What a statement computes twice, the compiler computes once, and what does not vary along a dim once for all of it: each
distinct operation costs its units (`dataflow.GPU_UNITS`) on the tile of the dims that it varies with.

Powers and sines branch for rare arguments. The assembler moves nothing across a branch, so where one computes a
tile, all that is computed before and needed after is in registers for all of the thread's elements. Registers and bytes
spilled a thread on Hopper: x ** y of 64 elements 145 and 0 of 4 warps, 128 and 188 of 16; (x ** y) log(x) 214 and 0,
128 and 1,452; of logarithms alone, which do not branch, 64 and 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, dims_used, loads
from tilefold.backends.triton.product import in_float
from tilefold.plan.dataflow import GPU_UNITS, operation_units, root_of
from tilefold.tile import ir
from tilefold.tile.affine import coefficients

#: Elements of the tile of these dims.
Area = Callable[[frozenset[str]], float]

#: Operations whose code branches.
BRANCHING = frozenset({"pow", "sin", "cos", "lgamma", "erfinv"})
#: Registers of a multiprocessor, most of a thread, and those that addresses and the like take.
REGISTERS, MOST, OWN = 1 << 16, 255, 16
#: Threads from which a thread block has all registers of a multiprocessor.
FILL = REGISTERS // (MOST + 1)
#: Units of a power that its base alone takes: a logarithm in two parts (31 of 73 instructions are left where a base is
#: that of a whole tile, `prelude.tf_pow`).
OF_BASE = 21.0
#: Units of a quotient of a position by a number, a product's upper half and a shift; of the product more that a
#: remainder is.
QUOTIENT, REST = 1.5, 0.5


def operations(e: Expr) -> dict[Expr, None]:
    """Distinct operations of an expression, operands before what uses them; none of indices."""
    found: dict[Expr, None] = {}

    def visit(x: Expr) -> None:
        match x:
            case Cast(arg=arg):
                visit(arg)
            case Call(_, args) if x not in found:
                for a in args:
                    visit(a)
                found[x] = None

    visit(e)
    return found


def work(e: Expr, area: Area) -> float:
    """Units of a tile's elements."""
    return sum(_own(x, area) for x in operations(e))


def _own(x: Expr, area: Area) -> float:
    """Units of an operation of a tile's elements, without its operands."""
    assert isinstance(x, Call)
    if x.op == "pow" and root_of(x) is None:
        base = OF_BASE * area(dims_used(x.args[0]))
        return base + (operation_units(x, GPU_UNITS) - OF_BASE) * area(dims_used(x))
    return _each(x) * area(dims_used(x))


def _each(x: Call) -> float:
    if _is_quotient(x):
        return _quotient(x)
    if x.op == "div" and not dims_used(x.args[1]) and not any(True for _ in loads(x.args[1])):
        return GPU_UNITS["mul"]  # by a number: a product with its inverse
    return operation_units(x, GPU_UNITS)


def index_units(e: Expr, known: Collection[Expr] = ()) -> float:
    """Units of a position that is computed for each element: what is a sum of dims is one of each dim. known: quotients
    that are computed anyway."""
    if e in known:
        return 0.0
    match e:
        case Call("floordiv" | "mod", (x, Const())):
            return _quotient(e) + (index_units(x, known) if not isinstance(x, Index) else 0.0)
        case Call(op, args) if coefficients(e) is None:
            return GPU_UNITS.get(op, 0.0) + sum(index_units(x, known) for x in args)
    return 0.0


def _quotient(e: Call) -> float:
    """Units of a quotient or a remainder of a position, without the position's."""
    return QUOTIENT + (REST if e.op == "mod" else 0.0)


def quotients(e: Expr) -> frozenset[Expr]:
    """Quotients and remainders of positions by numbers that a statement's expression has."""
    return frozenset(filter(_is_quotient, operations(e)))


def _is_quotient(e: Expr) -> bool:
    """Whether `e` is a quotient or a remainder of a position, that is of no data, by a number."""
    match e:
        case Call("floordiv" | "mod", (x, Const())):
            return not any(True for _ in loads(x))
    return False


def kind_of(kinds: Collection[DType], read: Collection[DType], kept: DType | None, *, narrow: bool) -> DType:
    """The type that operands of these types are multiplied in. read: types of those in memory, which are not rounded:
    float32 stays what it is. narrow: whether the kernel reads something of 16 bits, which computed ones are rounded to.
    """
    if not all(t.is_float for t in kinds):
        return in_float(kinds)
    if kept is DType.BF16:
        return next((t for t in DType if t in kinds and t is not DType.F32), DType.F16 if narrow else DType.F32)
    if DType.F32 in read or (kept is not None and DType.F32 in kinds):
        return DType.F32
    found = min(kinds, key=lambda t: t.nbytes)
    return DType.F16 if found is DType.F32 and narrow else found


def held(stmts: Sequence[ir.Stmt], area: Area, part: Callable[[str], float] = lambda tensor: 1.0) -> float:
    """Most registers' worth of elements that branching operations of these statements, which no loop parts, find or
    leave. part: of a register, that an element of a tensor takes (16 bits: half)."""
    born: dict[object, int] = {}
    last: dict[object, int] = {}
    sizes: dict[object, float] = {}
    branching: list[int] = []

    def visit(x: Expr) -> object:
        match x:
            case Cast(arg=arg):
                return visit(arg)
            case Load(tensor):
                key: object = tensor if tensor in born else x
            case Call(op, args):
                key = x
                if key not in born:
                    for k in [visit(a) for a in args]:
                        last[k] = len(born)
                    if op in BRANCHING and root_of(x) is None:
                        branching.append(len(born))
            case _:
                return x
        if key not in born:
            born[key], sizes[key] = len(born), area(dims_used(x)) * (part(x.tensor) if isinstance(x, Load) else 1.0)
        last[key] = max(last.get(key, 0), born[key])
        return key

    for s in stmts:
        match s:
            case ir.Map(buf, e):
                key = visit(e)
                last[key] = len(born)
                born[buf], sizes[buf] = len(born), sizes.get(key, 0.0)
                last[buf] = born[buf]
            case ir.Reduce(expr=e) | ir.Store(expr=e):
                last[visit(e)] = len(born)
    most = 0.0
    for n in branching:
        before = sum(sizes.get(k, 0.0) for k, m in born.items() if m < n <= last.get(k, 0))
        after = sum(sizes.get(k, 0.0) for k, m in born.items() if m <= n < last.get(k, 0))
        most = max(most, before, after)
    return most


def room(threads: int) -> float:
    """Elements that a thread block of so many threads holds in registers."""
    return threads * (min(MOST, REGISTERS // threads) - OWN)
