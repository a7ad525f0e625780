"""What a lane takes its elements about, kept from the first it meets.

A fold of squares about a mean repairs its states whenever the mean moves,

    D' = D - n (c' - c),   Q' = Q + (c' - c) (n (c' - c) - 2 D),        D = sum of x - c,  Q = sum of (x - c)^2,

which holds wherever c is: the states of a lane may be about the mean of its first elements for as long as it has
elements, and are repaired once, when lanes are combined (`lanes`). Then a turn has no repair in it. Where it was,
statistics of channels waited for instructions, not for memory (10 an element, of which 4 repaired; 18 us for 25 MB on
an H200).

Side conditions: what is added up is a polynomial in the reference, and the repair is none where the reference has not
moved. Rounding: of n elements of a lane that are D from its first ones, Q loses n eps D^2, and the whole has at least
D^2 from these; n is at most `MOST`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilefold.algebra.expr import Call, Cast, Const, Expr, Load, loads, tensors_read, transform
from tilefold.tile import ir

#: Most elements that a lane takes about the mean of its first ones.
MOST = 1024
#: Of these a polynomial is made.
_POLYNOMIAL = frozenset({"add", "sub", "mul", "neg"})


@dataclass(frozen=True, slots=True)
class Steady:
    """kept: local buffers that later turns read as the first left them. moves: of buffers that say how far one has
    moved, which. left: statements of the loop that later turns have no use for, by number."""

    kept: frozenset[str]
    moves: Mapping[str, str]
    left: frozenset[int]


def steady(body: Sequence[ir.Stmt], states: Mapping[str, object], elements: frozenset[str]) -> Steady | None:
    """What the states of a loop are about, if their repairs hold wherever that is; None: not so, or nothing is."""
    old: dict[str, str] = {}
    values: dict[str, Expr] = {}
    moves: dict[str, str] = {}
    left: set[int] = set()
    for at, s in enumerate(body):
        match s:
            case ir.Map(buf, e) if buf in elements:
                continue
            case ir.Map(buf, e) if buf in states:
                unmoved = _unmoved(e, moves)
                if not (isinstance(unmoved, Load) and unmoved.tensor == buf):
                    return None
                left.add(at)
            case ir.Map(buf, Load(t)) if t in states:
                old[buf] = t
                left.add(at)
            case ir.Map(buf, Call("sub", (Load(t), b))) if t in values and _renamed(b, old) == values[t]:
                moves[buf] = t
                left.add(at)
            case ir.Map(buf, e):
                values[buf] = e
    kept = frozenset(moves.values())
    if not moves or not _same(body, left, kept, elements):
        return None
    left |= {at for at, s in enumerate(body) if isinstance(s, ir.Map) and s.buf in kept}
    return Steady(kept, moves, frozenset(left))


def _same(body: Sequence[ir.Stmt], left: set[int], kept: frozenset[str], elements: frozenset[str]) -> bool:
    """Whether what stays of a loop reads nothing of its states but what is kept, of which it sums polynomials."""
    about = set(kept)
    changing = {s.buf for s in body if isinstance(s, ir.Map | ir.Reduce)} - elements - kept
    for at, s in enumerate(body):
        if at in left or not isinstance(s, ir.Map | ir.Reduce) or s.buf in kept:
            continue
        read = tensors_read(s.expr)
        if read & changing or (isinstance(s, ir.Map) and s.buf not in elements):
            return False
        if read & about:
            if not _polynomial(s.expr, about) or (isinstance(s, ir.Reduce) and s.op != "sum"):
                return False
            if s.buf in elements:
                about.add(s.buf)
    return True


def _unmoved(e: Expr, moves: Mapping[str, str]) -> Expr | None:
    """e where nothing has moved; None: zero."""
    match e:
        case Load(t) if t in moves:
            return None
        case Call(("add" | "sub") as op, (a, b)):
            x, y = _unmoved(a, moves), _unmoved(b, moves)
            if x is None:
                return y if y is None or op == "add" else Call("neg", (y,))
            return x if y is None else Call(op, (x, y))
        case Call("mul", (a, b)) if _unmoved(a, moves) is None or _unmoved(b, moves) is None:
            return None
        case Call("neg", (a,)) if _unmoved(a, moves) is None:
            return None
    return e


def _renamed(e: Expr, old: Mapping[str, str]) -> Expr:
    """e with what states were in place of what they are."""
    return transform(e, lambda n: Load(old[n.tensor], n.index) if isinstance(n, Load) and n.tensor in old else None)


def _polynomial(e: Expr, about: set[str]) -> bool:
    """Whether e is one in what is loaded from these buffers."""
    match e:
        case Load(_, index):
            return not any(about & {ld.tensor for ld in loads(i)} for i in index)
        case Call(op, args) if about & tensors_read(e):
            return op in _POLYNOMIAL and all(_polynomial(a, about) for a in args)
        case Cast() if about & tensors_read(e):
            return False
        case Call() | Cast() | Const():
            return True
    return not about & tensors_read(e)
