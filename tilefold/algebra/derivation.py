"""A derivation for people: the Fold of a cascade, how it was found, its forms and its proof."""

from __future__ import annotations

from dataclasses import dataclass

from tilefold.algebra import forms
from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.context import Options
from tilefold.algebra.deep import deeply
from tilefold.algebra.derive import build_fold, derive_fold
from tilefold.algebra.expr import Load
from tilefold.algebra.fold import Fold
from tilefold.algebra.text import show


@dataclass(frozen=True, slots=True)
class Derivation:
    """`fold` is the one to run; `plain` the same without run-time guards, `paper` with nothing delayed.

    `str()` gives everything as text, `latex()` the equations; notebooks show Markdown.
    """

    cascade: Cascade
    fold: Fold
    plain: Fold
    paper: Fold

    @property
    def identity(self) -> str:
        """The state of no elements."""
        return forms.text_of(forms.identity(self.fold))

    @property
    def lift(self) -> str:
        """The state of one element."""
        return forms.text_of(forms.lift(self.plain))

    @property
    def update(self) -> str:
        """One more element; primes mark the state after."""
        return forms.text_of(forms.update(self.plain))

    @property
    def merge(self) -> str:
        """The state of two disjoint parts a and b."""
        return forms.text_of(forms.merge(self.plain))

    @property
    def finish(self) -> str:
        """The results from the final state."""
        return forms.text_of(forms.finish(self.plain))

    @property
    def delays(self) -> bool:
        """Whether factors were moved to `finish`, so that the paper's form is another one."""
        return self.paper.state != self.plain.state

    @property
    def paper_form(self) -> str:
        """Fused and incremental expressions as RedFuser prints them (eqs. 11, 15, 16), nothing delayed."""
        f = self.paper
        parts = (
            ("incremental, level 1", forms.incremental_1(f)),
            ("incremental, level k", forms.incremental_k(f)),
            ("fused, level k", forms.fused_k(f)),
        )
        return "\n".join(f"{title}\n{_indented(forms.text_of(eqs))}" for title, eqs in parts)

    @property
    def steps(self) -> str:
        """The laws used, in order."""
        return "\n".join(f"{s.law}: {s.text}" for s in self.fold.derivation)

    @property
    def proof(self) -> str:
        """Every obligation and check, and how it was decided."""
        return "\n".join(f"{'ok' if c.ok else 'FAILED':6} {c.method:8} {c.name}" for c in self.fold.checks)

    @property
    def guards(self) -> str:
        """The expressions that run, with their guards (RedFuser A.1)."""
        return forms.text_of(forms.update(self.fold) + forms.finish(self.fold))

    def __str__(self) -> str:
        return deeply(self._text)

    def _text(self) -> str:
        sections = [
            ("cascade", "\n".join(_shown(r, self.cascade) for r in self.cascade.reductions)),
            ("derivation", self.steps),
            ("identity", self.identity),
            ("lift", self.lift),
            ("merge", self.merge),
            ("update", self.update),
            ("finish", self.finish),
        ]
        if self.delays:
            sections.append(("paper's form (nothing delayed)", self.paper_form))
        sections += [("as run, with guards", self.guards), ("proof", self.proof)]
        return "\n".join(f"{title}\n{_indented(body)}" for title, body in sections if body)

    def latex(self) -> str:
        """The cascade, the monoid and the papers' incremental forms as `aligned` blocks with headings."""
        return "\n\n".join(f"\\text{{{title}}}\n{body}" for title, body in deeply(self._blocks))

    def _blocks(self) -> list[tuple[str, str]]:
        p = self.plain
        blocks = [
            ("cascade", _cascade_latex(self.cascade)),
            ("identity", forms.latex_of(forms.identity(self.fold))),
            ("lift", forms.latex_of(forms.lift(p))),
            ("merge", forms.latex_of(forms.merge(p))),
            ("update", forms.latex_of(forms.update(p))),
            ("finish", forms.latex_of(forms.finish(p))),
        ]
        f = self.paper
        blocks += [
            ("incremental, level 1", forms.latex_of(forms.incremental_1(f))),
            ("incremental, level k", forms.latex_of(forms.incremental_k(f))),
        ]
        return blocks

    def _repr_latex_(self) -> str:
        rows = [rf"\text{{{title}}} \\ {body}" for title, body in self._blocks()]
        return "$$\\begin{gathered}\n" + " \\\\[1ex]\n".join(rows) + "\n\\end{gathered}$$"

    def _repr_markdown_(self) -> str:
        return "\n\n".join(f"**{title}**\n\n$$\n{body}\n$$" for title, body in self._blocks())


def derivation_of(cascade: Cascade, *, ignore_rounding: bool = False) -> Derivation:
    """Derive, and keep the forms that are only printed. Raises NotFusibleError as `derive_fold` does."""
    fold = derive_fold(cascade, ignore_rounding=ignore_rounding)
    plain = build_fold(cascade, Options(guards=False, residuals=False, ignore_rounding=ignore_rounding))
    paper = build_fold(cascade, Options(guards=False, residuals=False, delay=False, ignore_rounding=ignore_rounding))
    return Derivation(cascade, fold, plain, paper)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _shown(r: Reduction, c: Cascade) -> str:
    dims = f"[{', '.join(r.dims)}]" if r.dims else ""
    return f"{r.name}{dims} = {r.reducer}[{', '.join(c.axes)}] {show(r.body)}"


def _cascade_latex(c: Cascade) -> str:
    rows = []
    for r in c.reductions:
        eq = forms.Equation(Load(r.name, ()), (r.body,), r.reducer, ", ".join(c.axes))
        rows.append(eq.latex)
    return "\\begin{aligned}\n" + " \\\\\n".join(rows) + "\n\\end{aligned}"
