"""The forms of a Fold that people read, as text and LaTeX, in the papers' notation.

    identity, lift, merge, update, finish     the monoid (DESIGN), unmarked / a, b / primed
    fused, level k                            RedFuser eq. 11 (and 6 for k = 1)
    incremental, level 1 and level k          RedFuser eqs. 16 and 15
    h(t, r, r')                               Neptune's repair function, eq. 5

Equations are data: tests compare them with the papers' symbolically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilefold.algebra.expr import Call, Cast, Expr, Index, Load, Sym, rebuild, transform
from tilefold.algebra.fold import NEW, Fold, StateVar
from tilefold.algebra.latex import latex, name, plain_load
from tilefold.algebra.run_fold import merge_exprs
from tilefold.algebra.text import show

_JOINED = {"sum": " + ", "prod": " * "}
_FUNCTION = {"topk": "TopK"}
_LATEX_JOINED = {"sum": " + ", "prod": r" \cdot "}
_LATEX_FUNCTION = {"max": r"\max", "min": r"\min", "topk": r"\mathrm{TopK}"}
_LATEX_OVER = {"sum": r"\sum", "prod": r"\prod", "max": r"\max", "min": r"\min"}


@dataclass(frozen=True, slots=True)
class Equation:
    """`left = parts joined by reducer`, or, with `over`, `left = reducer over that range of the one part`."""

    left: Load
    parts: tuple[Expr, ...]
    reducer: str
    over: str = ""

    @property
    def text(self) -> str:
        parts = [self._grouped(p, show(flat(p)), "(", ")") for p in self.parts]
        return f"{show(self.left)} = {self._joined(parts, _JOINED, _FUNCTION, text=True)}"

    @property
    def latex(self) -> str:
        parts = [self._grouped(p, latex(flat(p), _tagged_latex), r"\left(", r"\right)") for p in self.parts]
        return f"{latex(self.left, _tagged_latex)} &= {self._joined(parts, _LATEX_JOINED, _LATEX_FUNCTION)}"

    def _grouped(self, part: Expr, text: str, left: str, right: str) -> str:
        """Parentheses around a sum that is multiplied, or that a reduction runs over."""
        loose = isinstance(part, Call) and part.op in ("add", "sub", "neg")
        return f"{left}{text}{right}" if loose and (self.over or (self.reducer == "prod" and self.parts[1:])) else text

    def _joined(
        self, parts: list[str], joined: Mapping[str, str], function: Mapping[str, str], text: bool = False
    ) -> str:
        if self.over:
            if text:
                return f"{function.get(self.reducer, self.reducer)} over {self.over} of {parts[0]}"
            head = _LATEX_OVER.get(self.reducer, rf"\operatorname*{{{self.reducer}}}")
            return rf"{head}_{{{self.over}}} {parts[0]}"
        if len(parts) == 1:
            return parts[0]
        if self.reducer in joined:
            return joined[self.reducer].join(parts)
        default = self.reducer if text else rf"\operatorname{{{self.reducer}}}"
        return f"{function.get(self.reducer, default)}({', '.join(parts)})"


def flat(e: Expr) -> Expr:
    """Products and sums as chains that need no parentheses: a * (b * c) as a * b * c."""

    def one(n: Expr) -> Expr | None:
        match n:
            case Call("mul", (a, Call("mul", (b, c)))):
                return flat(Call("mul", (Call("mul", (a, b)), c)))
            case Call("add", (a, Call("add", (b, c)))):
                return Call("add", (Call("add", (a, b)), c))
            case Call("add", (a, Call("sub", (b, c)))):
                return Call("sub", (Call("add", (a, b)), c))
        return None

    return transform(e, one)


@dataclass(frozen=True, slots=True)
class Notation:
    """How the loads of an equation are written: a new name and extra indices for each tag."""

    tags: Mapping[str, tuple[str, tuple[Expr, ...]]]
    axis: Mapping[str, Expr]

    def apply(self, e: Expr, state: frozenset[str]) -> Expr:
        """State loads renamed by their tag, the axes' indices replaced."""
        match e:
            case Load(tensor, index):
                base, _, tag = tensor.partition("@")
                at = tuple(self.apply(i, state) for i in index)
                if base not in state:
                    return Load(tensor, at)
                suffix, extra = self.tags[tag]
                return Load(base + suffix, (*at, *extra))
            case Index(dim):
                return self.axis.get(dim, e)
            case Call(_, args):
                return rebuild(e, tuple(self.apply(a, state) for a in args))
            case Cast(arg, _):
                return rebuild(e, (self.apply(arg, state),))
        return e


_PLAIN = {"": ("", ()), "old": ("", ()), "new": ("", ())}
_PRIMED = {"": ("", ()), "old": ("", ()), "new": ("'", ())}
_SIDES = {"": ("", ()), "new": ("", ()), "a": ("_a", ()), "b": ("_b", ())}


def _own(v: StateVar, tag: str = "") -> Load:
    return Load(v.name + tag, tuple(Index(d) for d in v.dims))


def _equations(fold: Fold, make: Callable[[StateVar], tuple[str, tuple[Expr, ...]]], n: Notation) -> list[Equation]:
    state = frozenset(v.name for v in fold.state)
    out = []
    for v in fold.state:
        tag, parts = make(v)
        left = n.apply(_own(v, tag), state)
        assert isinstance(left, Load)
        out.append(Equation(left, tuple(n.apply(p, state) for p in parts), v.reducer))
    return out


def identity(fold: Fold) -> list[Equation]:
    """The state of no elements."""
    return _equations(fold, lambda v: ("", (v.identity,)), Notation(_PLAIN, {}))


def lift(fold: Fold) -> list[Equation]:
    """The state of one element."""
    return _equations(fold, lambda v: ("", (v.element,)), Notation(_PLAIN, {}))


def update(fold: Fold) -> list[Equation]:
    """One more element: primes mark the state after."""
    return _equations(fold, lambda v: (NEW, (v.repair or _own(v), v.element)), Notation(_PRIMED, {}))


def merge(fold: Fold) -> list[Equation]:
    """The state of two disjoint parts a and b."""
    table = {m.name: (m.a, m.b) for m in merge_exprs(fold)}
    return _equations(fold, lambda v: ("", table[v.name]), Notation(_SIDES, {}))


def finish(fold: Fold) -> list[Equation]:
    """The results."""
    return [Equation(Load(k, ()), (e,), "") for k, e in fold.finish]


_L, _BEFORE = Sym("L"), Sym("L-1")
_LEVEL_1 = {"": ("¹", (_BEFORE,)), "old": ("¹", (_BEFORE,)), "new": ("¹", (_L,))}
_LEVEL_K = {"": ("ᵏ", ()), "a": ("ᵏ", (_BEFORE,)), "b": ("ᵏ⁻¹", ()), "new": ("ᵏ", (_L,))}
_FUSED = {"": ("ᵏ", ()), "a": ("ᵏ⁻¹", ()), "b": ("ᵏ⁻¹", ()), "new": ("ᵏ", ())}


def incremental_1(fold: Fold) -> list[Equation]:
    """RedFuser eq. 16: element L joins the first L - 1."""
    axes = dict.fromkeys(fold.axes, _L)
    return _equations(fold, lambda v: (NEW, (v.repair or _own(v), v.element)), Notation(_LEVEL_1, axes))


def incremental_k(fold: Fold) -> list[Equation]:
    """RedFuser eq. 15: partial result of level k-1 joins at level k."""
    table = {m.name: (m.a, m.b) for m in merge_exprs(fold)}
    return _equations(fold, lambda v: (NEW, table[v.name]), Notation(_LEVEL_K, {}))


def fused_k(fold: Fold) -> list[Equation]:
    """RedFuser eq. 11: all partial results of level k-1 at once."""
    table = {m.name: m.b for m in merge_exprs(fold)}
    rows = _equations(fold, lambda v: ("", (table[v.name],)), Notation(_FUSED, {}))
    return [Equation(e.left, e.parts, e.reducer, "j") for e in rows]


def repair_functions(fold: Fold) -> list[tuple[str, Expr]]:
    """Neptune's h(t, r, r') of every repaired variable: the variable as t, D before as r, D after as r'."""
    state = frozenset(v.name for v in fold.state)
    n = Notation(_PRIMED, {})
    return [(v.name, n.apply(v.repair, state)) for v in fold.state if v.repair is not None]


def text_of(equations: list[Equation]) -> str:
    return "\n".join(e.text for e in equations)


def latex_of(equations: list[Equation]) -> str:
    """An `aligned` block."""
    rows = " \\\\\n".join(e.latex for e in equations)
    return f"\\begin{{aligned}}\n{rows}\n\\end{{aligned}}"


_SUPERSCRIPTS = {"ᵏ⁻¹": "k-1", "¹": "1", "ᵏ": "k"}  # longest first


def _tagged_latex(load: Load, index: str) -> str:
    """State loads of the level forms get a hat and a superscript, primes and sides stay."""
    base = load.tensor
    for mark, level in _SUPERSCRIPTS.items():
        if base.endswith(mark):
            return rf"\hat{{{name(base[: -len(mark)])}}}^{{{level}}}" + (f"[{index}]" if index else "")
    if base.endswith("'"):
        return f"{name(base[:-1])}'" + (f"[{index}]" if index else "")
    if base.endswith(("_a", "_b")):
        return f"{name(base[:-2])}_{base[-1]}" + (f"[{index}]" if index else "")
    return plain_load(load, index)
