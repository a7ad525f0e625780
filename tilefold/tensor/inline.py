"""Map fusion: substitute maps into the statements that read them.

Law: out[i] = f(i) read at e is f(e). A map's result is converted to its dtype, so the substituted
body keeps a cast where that is more than a precision hint (`DType.rounds`), is read as it is stored
(`tensor.as_stored`) or changes the arithmetic type.

Kept as statements: outputs; maps with several readers, unless they are next to free, spread smaller tensors
(a mask that all layers of a model read is computed in each: its kernel then knows what it discards), or each reader
takes a part of its own (the gradient of what was stacked or concatenated);
and maps that a reader would repeat along a dim that they do not have (a per-row factor), unless next to
free; operands of a sum of products are never repeated so (a normalised row, a bias). The block
layer fuses those without repetition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import (
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Load,
    call,
    children,
    dims_used,
    loads,
    ops_used,
    tensors_read,
    times_read,
    transform,
    type_of,
    walk,
)
from tilefold.tensor.analysis import Graph, expr_flops, readings
from tilefold.tensor.as_stored import rounded
from tilefold.tensor.channels_last import library_turns
from tilefold.tensor.convolution import is_windowed
from tilefold.tensor.index_simplify import const, poly, same, within
from tilefold.tensor.ir import Compute, Program
from tilefold.tensor.product import product_of, varying
from tilefold.tensor.rewrite import dims_of, drop_dead, rename_loads, substitute_map

#: Arithmetic (in adds) that is repeated rather than kept in a tensor.
FREE = 1
#: Arithmetic a single reader may repeat along dims that the map lacks.
CHEAP = 2
#: Arithmetic of a map that spreads smaller tensors over its dims: reading its result would cost more than computing it.
SPREAD = 4
#: Arithmetic that its one reader may repeat because it reads a map at several places (neighbours of a padded image):
#: what 4 bytes cost to write and read again, on a GPU of 16 adds per 4 bytes as on a CPU.
NEIGHBOURS = 32
#: Bytes that a read by itself moves; those that a cache moves while a kernel more begins; and how many times as many as
#: a map, written and read, may be moved to read what it is made of by themselves.
SECTOR, KERNEL, MORE = 32, 1 << 24, 1.5
#: Most nodes of a body after substitution, and most that are within each other; larger ones stay statements.
BODY_LIMIT, DEPTH_LIMIT = 400, 100
#: Times that maps are looked at.
MOST_ROUNDS = 3


def inline(p: Program, rounds: int = MOST_ROUNDS) -> Program:
    """The program with maps substituted wherever that repeats next to nothing: also those of which one reader is left
    when others are substituted themselves (a gate, in what a gradient is concatenated from)."""
    for _ in range(rounds):
        before, p = p, _inline_once(p)
        if p.body == before.body:
            break
    return p


@dataclass(frozen=True, slots=True)
class _Known:
    """What a program says about its tensors. readers: statements, one where readers take no more than there is; given:
    inputs; the others as in `_operands` and `_crossed`."""

    readers: Counter[str]
    operands: AbstractSet[str]
    given: AbstractSet[str]
    crossed: AbstractSet[str]
    dtypes: dict[str, DType]
    sizes: Mapping[str, Expr]

    @staticmethod
    def of(p: Program) -> _Known:
        dtypes = {i.name: i.dtype for i in p.inputs} | {r: c.dtype for c in p.body for r in c.results}
        dtypes |= {c.index_name: DType.I64 for c in p.body if c.index_name}
        readers, shared = Counter(t for c in p.body for t in {ld.tensor for ld in loads(c.body)}), _shared_out(p)
        readers = Counter({t: 1 if t in shared else n for t, n in readers.items()})
        return _Known(readers, _operands(p), {i.name for i in p.inputs}, _crossed(p), dtypes, p.sizes)


def _inline_once(p: Program) -> Program:
    known, g = _Known.of(p), Graph.of(p)
    maps: dict[str, Compute] = {}
    body: list[Compute] = []
    for c in p.body:
        c = _into(c, maps, known)
        body.append(c)
        if c.reducer is None and c.name not in p.outputs:
            maps[c.name] = replace(c, body=rounded(g, c))
    return drop_dead(replace(p, body=tuple(body)))


def _into(c: Compute, maps: dict[str, Compute], known: _Known) -> Compute:
    """One reader with the maps that it should absorb substituted."""
    found = loads(c.body)
    if maps.keys().isdisjoint(tensors_read(c.body)):
        return c
    count = Counter(times_read(c.body))
    wanted = {
        ld.tensor
        for ld in found
        if ld.tensor in maps and _worth(maps[ld.tensor], [x for x in found if x.tensor == ld.tensor], count, c, known)
    }
    if not wanted:
        return c

    def one(ld: Load) -> Expr | None:
        if ld.tensor not in wanted:
            return None
        m = maps[ld.tensor]
        return converted(substitute_map(checked_inside(m, ld, known.sizes), ld), m.dtype, known.dtypes)

    e = rename_loads(c.body, one)
    return c if too_long(e) else replace(c, body=e)


def too_long(e: Expr) -> bool:
    """Whether a body would have more nodes, or more within each other, than bodies have."""
    todo, count = [(e, 1)], 0
    while todo:
        n, level = todo.pop()
        count += 1
        if count > BODY_LIMIT or level > DEPTH_LIMIT:
            return True
        todo.extend((k, level + 1) for k in children(n))
    return False


def _shared_out(p: Program) -> frozenset[str]:
    """Maps of which readers take no more elements than they have, each its own: parts of a gradient."""
    left = {c.name: _extents(c.dims, p.sizes) or None for c in p.body if c.reducer is None}  # nothing has no parts
    for c in p.body:
        taken = _extents(dims_of(c), p.sizes)
        for ld in {x for x in loads(c.body) if x.tensor in left}:
            have = left[ld.tensor]
            plain = all(map(_shifted, ld.index)) and product_of(c) is None
            left[ld.tensor] = None if have is None or taken is None or not plain else have - taken
    return frozenset(n for n, rest in left.items() if rest is not None and rest >= 0)


def _crossed(p: Program) -> frozenset[str]:
    """Maps that one statement reduces along some axes and another along others (the nearest of all points to each, both
    ways): no loop nest has both, so that one or the other would read all of the map from memory."""
    ways: dict[str, set[frozenset[int]]] = {}
    for c in p.body:
        for ld in loads(c.body) if c.reducer is not None else ():
            along = frozenset(n for n, e in enumerate(ld.index) if not dims_used(e).isdisjoint(c.rdims))
            ways.setdefault(ld.tensor, set()).add(along)
    return frozenset(n for n, found in ways.items() if any(not (a <= b or b <= a) for a in found for b in found))


def _operands(p: Program) -> frozenset[str]:
    """What windows read, and matrix products whole (not a third of it: queries, keys and values of one product): it is
    stored for them anyway. What products read for several heads (keys of a cache) where it is a result."""
    found: set[str] = set()
    results = {ld.tensor for c in p.body if c.name in p.outputs and _renames(c.body) for ld in loads(c.body)}
    for c in p.body:
        x = product_of(c)
        if is_windowed(c):
            found.update(ld.tensor for ld in loads(c.body))
        elif x is not None and x.is_matrix():
            found.update(ld.tensor for ld in loads(c.body) if all(isinstance(ix, Index) for ix in ld.index))
        found.update(ld.tensor for ld in loads(c.body) if x is not None and ld.tensor in results and _shared(ld))
    return frozenset(found)


def checked_inside(m: Compute, ld: Load, sizes: Mapping[str, Expr]) -> Compute:
    """The map, with checks of indices (`within`) for the elements alone that it has: padding asks for others, and drops
    what it gets."""
    if "within" not in ops_used(m.body):
        return m
    beyond = [
        call("and", call("ge", Index(d), 0), call("lt", Index(d), sizes[d]))
        for d, e in zip(m.dims, ld.index, strict=True)
        if not within(poly(e, sizes), poly(sizes[d], sizes), sizes)
    ]

    def one(x: Expr) -> Expr | None:
        if not (isinstance(x, Call) and x.op == "within"):
            return None
        at = x.args[0]
        for inside in beyond:
            at = call("where", inside, at, 0)
        return call("within", at, x.args[1])

    return replace(m, body=transform(m.body, one)) if beyond else m


def converted(e: Expr, dtype: DType, dtypes: dict[str, DType]) -> Expr:
    """What reading `e` back from a tensor of that dtype gives, as an expression."""
    have = type_of(e, dtypes.__getitem__)
    exact = dtype.compute is dtype and dtype is not DType.F32
    if have is dtype.compute and (exact or not dtype.rounds or _held(e, dtypes) is dtype):
        return e
    return Cast(e, dtype)


def _held(e: Expr, dtypes: dict[str, DType]) -> DType | None:
    match e:
        case Load(tensor, _):
            return dtypes[tensor]
        case Cast(_, dtype):
            return dtype
    return None


def _worth(m: Compute, at: Sequence[Load], count: Counter[str], c: Compute, known: _Known) -> bool:
    """Whether substituting map m into c repeats next to nothing."""
    cost = expr_flops(m.body)
    if is_windowed(c):
        return _renames(m.body) and _permutes(m)
    if _renames(m.body):
        return True
    if _looked_up_apart(m, at, c, known.sizes):
        return False
    lacking = any(set(dims_of(c)) - frozenset().union(*map(dims_used, ld.index)) for ld in at)
    shared = any(set(dims_of(c)) - varying(ld) for ld in at)  # also by outputs of a group, o // q
    if product_of(c) is not None and (shared or (m.name in known.operands and any(map(_shared, at)))):
        return False  # operands stay plain loads, so that it is a matrix product to every back end
    if cost <= FREE and len(loads(m.body)) <= 1:
        return True
    smaller = [ld for ld in loads(m.body) if not dims_used(ld) >= set(m.dims)]
    if (
        cost <= CHEAP
        and m.name not in known.operands
        and len(loads(m.body)) - len(smaller) <= 1
        and all(ld.tensor in known.given for ld in smaller)
    ):
        return True  # a bias and a factor of each channel: nothing as large is read for them
    if not lacking and all(_takes_few(ld, m) for ld in at):
        return True
    if cost <= (NEIGHBOURS if m.name in known.crossed else SPREAD) and _spreads(m) and product_of(c) is None:
        return True
    if known.readers[m.name] > 1:
        return False
    if count[m.name] > 1 and cost > CHEAP:
        more = len(at) if len(at) > 1 else count[m.name]  # elements; of one alone a kernel keeps what is used again
        few = (more - 1) * cost <= NEIGHBOURS or (count[m.name] == len(at) and _each_once(m, at, c, known.sizes))
        return not lacking and product_of(c) is None and few
    return (not lacking and (_times(m, at, c, known.sizes) - 1) * _of_elements(m.body) <= NEIGHBOURS) or cost <= CHEAP


def _shared(ld: Load) -> bool:
    """Whether neighbours along a dim read the same element: x // c, where nothing says which of c they are (x % c)."""
    parts = {n for e in ld.index for n in walk(e) if isinstance(n, Call)}
    return any(n.op == "floordiv" and n.args[1] != const(1) and call("mod", *n.args) not in parts for n in parts)


def _of_elements(e: Expr) -> int:
    """Arithmetic with what is loaded: which elements are there (padding) is known by the row and column."""
    return _with_elements(e, {})


def _with_elements(e: Expr, known: dict[int, int]) -> int:
    """known: of calls by identity."""
    if not loads(e) or isinstance(e, Load):
        return 0
    if id(e) not in known:
        found = sum([_with_elements(k, known) for k in children(e)])
        if isinstance(e, Call) and e.op not in ("where", "within"):
            found += expr_flops(e) - sum(map(expr_flops, e.args))
        known[id(e)] = found
    return known[id(e)]


def _times(m: Compute, at: Sequence[Load], c: Compute, sizes: Mapping[str, Expr]) -> float:
    """How often a reader computes an element of a map, if it takes one for each of its own: short parts put together
    along the last axis are all computed everywhere; of parts along another one an inner loop has one. 1 where sizes are
    not known."""
    points = _points(c, m, sizes)
    if points is None:
        return 1.0
    if all(ld.index and isinstance(ld.index[-1], Index) and all(map(_shifted, ld.index)) for ld in at):
        return 1.0
    read, made = points
    return max(1.0, read / made) if made else 1.0


def _points(c: Compute, m: Compute, sizes: Mapping[str, Expr]) -> tuple[int, int] | None:
    """Elements that a reader takes, one for each of its own, and those that a map has; None where sizes are not
    known."""
    read, made = _extents(dims_of(c), sizes), _extents(m.dims, sizes)
    return None if read is None or made is None else (read, made)


def _extents(dims: Sequence[str], sizes: Mapping[str, Expr]) -> int | None:
    """Elements of these dims; None where sizes are not known."""
    found = [sizes[d] for d in dims]
    known = [int(n.value) for n in found if isinstance(n, Const)]
    return math.prod(known) if len(known) == len(found) else None


def _shifted(i: Expr) -> bool:
    """Whether an index is a dim, or one less a number."""
    match i:
        case Index() | Const() | Call("add" | "sub", (Index(), Const())):
            return True
    return False


def _each_once(m: Compute, at: Sequence[Load], c: Compute, sizes: Mapping[str, Expr]) -> bool:
    """Whether a reader takes no more elements of a map than it has, each in one place (pooling whose windows do not
    overlap): nothing is computed twice."""
    points = _points(c, m, sizes)
    if points is None or len(set(at)) < len(at):
        return False
    read, made = points
    return len(at) * read <= made


def _looked_up_apart(m: Compute, at: Sequence[Load], c: Compute, sizes: Mapping[str, Expr]) -> bool:
    """Whether a map of several tensors is read at places that data give, so often that each reading of them all by
    itself moves more than the map, written once and read there alone.

    Measured on an H100, gradients of the normals of 64 meshes at three corners each, of four tensors: 98 us."""
    points = _points(c, m, sizes)
    first = {n for ld in at for n, i in enumerate(ld.index) if any(isinstance(e, Load) for e in walk(i))}
    if not first or points is None:
        return False
    read, made = points
    run = _extents(m.dims[max(first) + 1 :], sizes) or 1
    places = {m.dims[n] for n in first}
    tensors = sum(bool(dims_used(ld) & places) for ld in set(loads(m.body)))
    apart = read * len(set(at)) / min(run, SECTOR // 4) * (tensors - 1) * SECTOR
    return apart > MORE * (made * (tensors + 1) * m.dtype.nbytes + KERNEL)


def _takes_few(ld: Load, m: Compute) -> bool:
    """Whether a load takes one element along a dim of the map, at a place that data give, or on a diagonal: the label's
    logarithm, and that of the pair of a row in a batch."""
    given = any(isinstance(e, Load) for i in ld.index for e in walk(i))
    diagonal = len(set(plain := [i for i in ld.index if isinstance(i, Index)])) < len(plain)
    return (given or diagonal) and len(dims_used(ld)) < len(m.dims)


def _spreads(m: Compute) -> bool:
    """Whether each tensor that a map reads lacks one of its dims: a mask of rows and columns, an outer sum."""
    return len(m.dims) > 1 and all(dims_used(ld) < set(m.dims) for ld in loads(m.body))


def _renames(e: Expr) -> bool:
    """A load or a cast of one: nothing to repeat."""
    while isinstance(e, Cast):
        e = e.arg
    return isinstance(e, Load)


def _permutes(m: Compute) -> bool:
    """Whether a map that renames only reorders the axes of what it reads."""
    return all(isinstance(i, Index) for ld in loads(m.body) for i in ld.index) and len(dims_used(m.body)) == len(m.dims)


def round_where_stored(p: Program) -> Program:
    """Results that every reader rounds to the same type are rounded where they are made: fewer bytes, the same values.

    Law: a value that is stored in a type is that value rounded once to it. Side conditions: no result of the program;
    the wide type is what the narrow one computes in, so that nothing else is lost.
    """
    read: dict[str, set[DType | None]] = {}
    for c in p.body:
        for ld, dtype in readings(c.body):
            read.setdefault(ld.tensor, set()).add(dtype)
    narrow: dict[str, DType] = {}
    for c in p.body:
        types = read.get(c.name, set())
        found = next(iter(types)) if len(types) == 1 else None
        if found is None or c.index_name is not None or c.name in p.outputs:
            continue
        if found.is_float and found is not c.dtype and found.compute is c.dtype:
            narrow[c.name] = found
    if not narrow:
        return p

    def stored(x: Expr) -> Expr | None:
        return (
            x.arg if isinstance(x, Cast) and isinstance(x.arg, Load) and narrow.get(x.arg.tensor) is x.dtype else None
        )

    body = (replace(c, dtype=narrow.get(c.name, c.dtype), body=transform(c.body, stored)) for c in p.body)
    return replace(p, body=tuple(body))


def absorb_copies(p: Program) -> Program:
    """An output that only reorders the axes of a result becomes that result, with its dims reordered.

    Side conditions: the copy reads every element once (no slice of them), at plain indices; the result is no output
    itself and is stored in the copy's dtype (or read by the copy alone, which then stores for both);
    topk keeps its slot dim last; the library convolves images in their memory order (`channels_last.library_turns`).
    """
    owner = {r: n for n, c in enumerate(p.body) for r in c.results}
    at: dict[str, set[int]] = {}
    for n, c in enumerate(p.body):
        for ld in loads(c.body):
            at.setdefault(ld.tensor, set()).add(n)
    readers = Counter({t: len(places) for t, places in at.items()})
    body = list(p.body)
    gone: set[int] = set()
    for n in range(len(body)):
        c = body[n]
        source = _copied(c)
        if c.name not in p.outputs or source is None or source.tensor not in owner:
            continue
        k = owner[source.tensor]
        made = body[k]
        if k in gone or source.tensor in p.outputs:
            continue
        order = [i.dim for i in source.index if isinstance(i, Index)]
        places = [order.index(d) for d in c.dims if d in order]
        if len(order) != len(source.index) or len(places) != len(order) or sorted(order) != sorted(c.dims):
            continue
        if not all(same(p.sizes[d], n) for d, n in zip(order, p.shape_of(source.tensor), strict=True)):
            continue
        stored = _stored_as(made, source.tensor, c, places, readers)
        if stored is None or library_turns(made, stored.dims, p):
            continue
        body[k] = stored
        gone.add(n)
        for m in at[source.tensor]:
            body[m] = _reread(body[m], source.tensor, c.name, places)
        at.setdefault(c.name, set()).update(at[source.tensor])
        owner[c.name] = k
    return replace(p, body=tuple(c for n, c in enumerate(body) if n not in gone))


def _stored_as(made: Compute, result: str, copy: Compute, places: list[int], readers: Counter[str]) -> Compute | None:
    """The producer storing straight into the copy; None where a side condition fails."""
    if made.index_name is not None:
        if places != sorted(places) or copy.dtype is not (made.dtype if result == made.name else DType.I64):
            return None
        return replace(made, name=copy.name) if result == made.name else replace(made, index_name=copy.name)
    if made.dtype is not copy.dtype and (readers[made.name] > 1 or made.dtype.compute is not copy.dtype.compute):
        return None
    return replace(made, name=copy.name, dims=tuple(made.dims[n] for n in places), dtype=copy.dtype)


def _copied(c: Compute) -> Load | None:
    e = c.body
    if isinstance(e, Cast) and e.dtype is c.dtype and not e.dtype.rounds:
        e = e.arg
    return e if c.reducer is None and isinstance(e, Load) else None


def _reread(c: Compute, old: str, new: str, places: list[int]) -> Compute:
    """A reader of a result whose axes were reordered and which was renamed."""

    def one(ld: Load) -> Expr | None:
        return Load(new, tuple(ld.index[n] for n in places)) if ld.tensor == old else None

    return replace(c, body=rename_loads(c.body, one)) if any(ld.tensor == old for ld in loads(c.body)) else c
