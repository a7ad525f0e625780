"""Names taken out: what is decided about one expression or Fold holds for all that differ from it in names only.

The layers of a model give the same cascades under other names; each is proved and checked once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.expr import Expr, Index, Load, Size, Sym, children, rebuild
from tilefold.algebra.fold import Check, Fold, StateVar


class Names:
    """New names for dims, tensors and symbols, numbered as they are met: two never become one."""

    def __init__(self) -> None:
        self._dims: dict[str, str] = {}
        self._tensors: dict[str, str] = {}
        self._syms: dict[str, str] = {}

    def dim(self, d: str) -> str:
        return self._dims.setdefault(d, f"d{len(self._dims)}")

    def dims(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self.dim, names))

    def tensor(self, t: str) -> str:
        """An input, result or state variable; `@old`, `@new` stay."""
        base, at, tag = t.partition("@")
        return self._tensors.setdefault(base, f"t{len(self._tensors)}") + at + tag

    def optional(self, t: str | None) -> str | None:
        return None if t is None else self.tensor(t)

    def expr(self, e: Expr) -> Expr:
        match e:
            case Load(t, index):
                return Load(self.tensor(t), tuple(map(self.expr, index)))
            case Index(d):
                return Index(self.dim(d))
            case Size(d):
                return Size(self.dim(d))
            case Sym(s):
                return Sym(self._syms.setdefault(s, f"s{len(self._syms)}"))
        return rebuild(e, tuple(map(self.expr, children(e))))

    def reductions(self, rs: Iterable[Reduction]) -> tuple[Reduction, ...]:
        return tuple(
            Reduction(
                self.tensor(r.name), r.reducer, self.dims(r.dims), self.expr(r.body), r.dtype,
                self.optional(r.index_name), exact=r.exact,
            )
            for r in rs
        )  # fmt: skip

    def cascade(self, c: Cascade) -> Cascade:
        """Of the inputs only those that are met: rename last."""
        axes, reductions = self.dims(c.axes), self.reductions(c.reductions)
        dtypes = tuple((self._tensors[t], d) for t, d in c.input_dtypes if t in self._tensors)
        return Cascade(axes, reductions, tuple(sorted(dtypes, key=lambda x: x[0])), c.few)

    def fold(self, f: Fold) -> Fold:
        """Without its derivation and checks."""
        finish = tuple((self.tensor(t), self.expr(e)) for t, e in f.finish)
        return Fold(self.dims(f.axes), tuple(map(self._variable, f.state)), finish)

    def checks(self, found: Iterable[Check]) -> tuple[Check, ...] | None:
        """Checks that hold, called `subject: law`; None if a subject was not met before."""
        parts = [(c, *c.name.partition(":")) for c in found]
        if not all(subject in self._tensors for _, subject, _, _ in parts):
            return None
        return tuple(replace(c, name=self._tensors[subject] + colon + law) for c, subject, colon, law in parts)

    def named(self, found: Iterable[Check]) -> tuple[Check, ...]:
        """`checks` undone, with the names that the numbers stand for here."""
        back = {new: old for old, new in self._tensors.items()}
        parts = [(c, *c.name.partition(":")) for c in found]
        return tuple(replace(c, name=back[subject] + colon + law) for c, subject, colon, law in parts)

    def _variable(self, v: StateVar) -> StateVar:
        return replace(
            v,
            name=self.tensor(v.name),
            dims=self.dims(v.dims),
            element=self.expr(v.element),
            repair=None if v.repair is None else self.expr(v.repair),
            index_name=self.optional(v.index_name),
        )


def numbered(*exprs: Expr) -> tuple[Expr, ...]:
    """The expressions with a number for each distinct load, index, size or symbol: equal where those were equal."""
    table: dict[Expr, Load] = {}

    def one(e: Expr) -> Expr:
        if isinstance(e, Load | Index | Size | Sym):
            return table.setdefault(e, Load(f"%{len(table)}", ()))
        return rebuild(e, tuple(map(one, children(e))))

    return tuple(map(one, exprs))
