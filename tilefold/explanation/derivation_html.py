"""The mathematics of the folds as HTML: the cascade, its laws, the formulas as MathML, and the checks."""

from __future__ import annotations

from html import escape

from tilefold.algebra.expr import Load
from tilefold.algebra.fold import Check, Fold, Step
from tilefold.explanation import mathml
from tilefold.explanation.gather import same_fold
from tilefold.explanation.mathml import Notation
from tilefold.explanation.model import FoldReport, Region
from tilefold.explanation.names import cascade_signature, short_symbols
from tilefold.explanation.notes import explain_law


def derivations(regions: tuple[Region, ...]) -> str:
    """A card for every fold; folds that read the same once, trivial ones in a line at the end."""
    shown: dict[str, tuple[FoldReport, int]] = {}
    for f in (f for region in regions for f in region.folds):
        key = cascade_signature(f.cascade) if not f.trivial else f"{f.kernel} {f.cascade[0].name}"
        first, count = shown.get(key, (f, 0))
        shown[key] = (first, count + 1)
    proper = [(f, n) for f, n in shown.values() if not f.trivial]
    simple = [(f, n) for f, n in shown.values() if f.trivial]
    cards = "".join(fold_card(f, n, k < 3) for k, (f, n) in enumerate(proper))
    if simple:
        count = sum(n for _, n in simple)
        names = ", ".join(dict.fromkeys(f"<code>{escape(c.name)}</code>" for f, _ in simple[:8] for c in f.cascade))
        more = ", …" if len(simple) > 8 else ""
        cards += (
            f'<p class="soft">{count} more pass{"es" if count > 1 else ""} reduce{"" if count > 1 else "s"} without '
            f"repair: nothing in {names}{more} depends on an earlier reduction over the same axis.</p>"
        )
    return cards


def notation_of(f: FoldReport) -> Notation:
    """Short symbols for the state variables; indices of parallel dims left out."""
    states = dict.fromkeys([*f.paper.state, *f.delayed.state])
    reducers = {v.name: v.reducer for v in states} | {c.name: c.reducer or "" for c in f.cascade}
    loads = {n.tensor.partition("@")[0] for v in states for n in _loads(v.element)} - set(reducers)
    dims = {d for c in f.cascade for d in (*c.dims, *c.rdims)}
    symbols = short_symbols([*reducers.items(), *((t, None) for t in sorted(loads))], dims)
    return Notation(symbols, frozenset(f.parallel))


def _loads(e: object) -> list[Load]:
    found = [e] if isinstance(e, Load) else []
    for k in (*getattr(e, "args", ()), *([e.arg] if hasattr(e, "arg") else ())):
        found += _loads(k)
    return found


def fold_card(f: FoldReport, count: int, opened: bool) -> str:
    """Everything about one fold."""
    n = notation_of(f)
    axes = ", ".join(f.fold.axes)
    names = ", ".join(c.name for c in f.cascade)
    times = f'<span class="badge">×{count}</span>' if count > 1 else ""
    passed = sum(c.ok for c in f.checks)
    state = "good" if passed == len(f.checks) else "bad"
    summary = (
        f'<summary><h3>{escape(names)}</h3><span class="soft">one pass over {escape(axes)}</span>'
        f'<span class="badge {state}">{passed} of {len(f.checks)} checks passed</span>{times}</summary>'
    )
    each = ", ".join(d for d in f.parallel if d != "unit")
    legend = _legend(f, n)
    parts = [
        "<h4>The cascade</h4>",
        f'<p class="soft">Each line needs the lines above it'
        f"{f', for each {escape(each)}' if each else ''}.{' ' + legend if legend else ''}</p>",
        _formulas(cascade(f, n)),
        "<h4>Laws applied</h4>",
        laws(f.derivation),
        forms(f, n),
        "<h4>Merging two parts</h4>",
        '<p class="soft">The same rule joins tiles, threads and segments: a and b are the states of two disjoint parts.'
        "</p>",
        _formulas([mathml.merge(v, f.delayed, n) for v in f.delayed.state]),
        "<h4>Checked before use</h4>",
        checks(f.checks),
    ]
    start = f'<details class="card"{" open" if opened else ""}>{summary}'
    return f'{start}<div class="inside">{"".join(parts)}</div></details>'


def cascade(f: FoldReport, n: Notation) -> list[str]:
    """`name = reducer over axes of body` for every reduction."""
    out = []
    for c in f.cascade:
        left = mathml.load(Load(c.name, tuple(map(_index, c.dims))), n)
        out.append(mathml.equation(left, mathml.reduction(str(c.reducer), c.rdims, c.body, n)))
    return out


def _index(dim: str) -> mathml.Index:
    return mathml.Index(dim)


def forms(f: FoldReport, n: Notation) -> str:
    """Update and finish of what runs, beside the paper's form where the two differ."""
    mine = _form(f.delayed, n)
    if same_fold(f.paper, f.delayed):
        return f"<h4>One step of the loop</h4>{_STEP_NOTE}{mine}"
    theirs = _form(f.paper, n)
    return (
        f'{_STEP_NOTE_SPACED}<div class="forms"><div><h4>As in the paper: repaired at every step</h4>{theirs}</div>'
        f"<div><h4>What runs: factors delayed to the end</h4>{mine}</div></div>"
    )


_STEP_NOTE = '<p class="soft">The state so far is repaired for the new values (primed), then the tile is added.</p>'
_STEP_NOTE_SPACED = f"<h4>One step of the loop</h4>{_STEP_NOTE}"


def _form(fold: Fold, n: Notation) -> str:
    results = {v.name for v in fold.state} | {v.index_name for v in fold.state}
    lines = [mathml.update(v, fold.axes, n) for v in fold.state]
    final = [
        mathml.equation(mathml.load(Load(name, _own_index(fold, name)), _final(n, name)), mathml.expr(e, n))
        for name, e in fold.finish
        if not (isinstance(e, Load) and e.tensor == name and name in results)
    ]
    tail = f'<p class="soft">and at the end</p>{_formulas(final)}' if final else ""
    return _formulas(lines) + tail


def _final(n: Notation, name: str) -> Notation:
    """The notation in which the finished `name` has a hat, so that it differs from the state."""
    return Notation({**n.symbols, name: f"{n.symbols.get(name, name)}\u0302"}, n.hidden, n.marks)


def _own_index(fold: Fold, name: str) -> tuple[mathml.Index, ...]:
    for v in fold.state:
        if name in (v.name, v.index_name):
            return tuple(mathml.Index(d) for d in v.dims)
    return ()


def _formulas(lines: list[str]) -> str:
    return f'<div class="formulas">{"".join(lines)}</div>'


def _legend(f: FoldReport, n: Notation) -> str:
    """What the short symbols and the barred names stand for."""
    symbol = {t: mathml.math_element(mathml.identifier(s), False) for t, s in n.symbols.items()}
    shown = [f"{s} is <code>{escape(t)}</code>" for t, s in symbol.items()]
    shown += dict.fromkeys(g for c in f.cascade for g in mathml.guards(c.body, n))
    return ", ".join(shown) + "." if shown else ""


def laws(steps: tuple[Step, ...]) -> str:
    """The law, what it gave, and for readers what it means."""
    rows = "".join(
        f'<li><b title="{escape(explain_law(s.law))}">{escape(s.law)}</b><code>{escape(s.text)}</code></li>'
        for s in steps
    )
    return f'<ol class="laws">{rows}</ol>'


def checks(found: tuple[Check, ...]) -> str:
    """A mark for each proof obligation or numerical check."""
    rows = "".join(
        f'<li{"" if c.ok else " class=bad"}>{escape(c.name)} <span class="soft">{escape(c.method)}'
        f"{f': {escape(c.detail)}' if c.detail else ''}</span></li>"
        for c in found
    )
    return f'<ul class="checks">{rows}</ul>'
