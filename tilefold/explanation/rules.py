"""What Blockbuster's rules do to a user's own program, step by step: data and page section. It is not what runs."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from tilefold.blockbuster.from_tensor import from_tensor
from tilefold.blockbuster.ir import Map, Path, Program
from tilefold.blockbuster.listing import lines_of
from tilefold.blockbuster.rules.algorithm import fuse
from tilefold.blockbuster.safety import make_safe
from tilefold.errors import NotFusibleError, UnsupportedError
from tilefold.explanation.block_svg import draw_program
from tilefold.explanation.highlight import code
from tilefold.tensor.ir import Program as TensorProgram

#: Longer programs are not shown: statements of the tensor program, and steps with a drawing.
MOST_STATEMENTS, MOST_STEPS = 24, 80


@dataclass(frozen=True, slots=True)
class RuleStep:
    """A program after one application: the law's label and statement, a note, the maps around the place."""

    label: str
    statement: str
    note: str
    place: str
    program: Program

    @property
    def listing(self) -> str:
        return "\n".join(lines_of(self.program))


@dataclass(frozen=True, slots=True)
class Rules:
    """The whole run; `start` before any step, `safe` the last snapshot made safe. `reason`: why there is none."""

    start: Program | None = None
    steps: tuple[RuleStep, ...] = ()
    snapshots: tuple[int, ...] = ()
    safe: Program | None = None
    reason: str = ""


def rules_of(p: TensorProgram) -> Rules:
    """Run the algorithm on a tensor program, if its operators have block forms."""
    if len(p.body) > MOST_STATEMENTS:
        return Rules(reason=f"{len(p.body)} statements are too many to follow step by step")
    try:
        start = from_tensor(p).program
        run = fuse(start)
        safe = make_safe(run.result)
    except (UnsupportedError, NotFusibleError) as why:
        return Rules(reason=why.message)
    if len(run.steps) > MOST_STEPS:
        return Rules(reason=f"{len(run.steps)} steps are too many to show")
    before = [start, *(s.after for s in run.steps)]
    steps = tuple(
        RuleStep(s.law.label, s.law.statement, s.match.note, _place(before[k], s.path), s.after)
        for k, s in enumerate(run.steps)
    )
    return Rules(start, steps, run.snapshots, safe)


def _place(p: Program, path: Path) -> str:
    """The maps around a graph, outermost first."""
    g, dims = p.graph, list[str]()
    for k in path:
        n = g.nodes[k]
        assert isinstance(n, Map)
        dims.append(n.dim)
        g = n.body
    return f"in {' / '.join(dims)}" if dims else "at the top"


def section(r: Rules) -> str:
    """A slider over all steps, with the listing and the drawing before and after each; empty if there is nothing."""
    if r.start is None or not r.steps:
        return ""
    states = [("The program before any step", "", r.start)]
    states += [
        (f"{k}. {s.label}, {s.place}", f"{s.statement}. Here: {s.note}.", s.program) for k, s in enumerate(r.steps, 1)
    ]
    if r.safe is not None and r.safe != r.steps[-1].program:
        text = "Exponentials are carried as significands and exponents, so that none overflows."
        states.append(("Made safe", text, r.safe))
    last = len(states) - 1
    panels = "".join(
        _panel(k, *state, snapshot=k in r.snapshots, shown=k >= last - 1) for k, state in enumerate(states)
    )
    controls = (
        '<div class="controls"><button type="button" data-move="-1" aria-label="step back">←</button>'
        f'<input type="range" min="0" max="{last}" value="{last}" aria-label="step">'
        '<button type="button" data-move="1" aria-label="step forward">→</button>'
        f"<output>{last} of {last}</output></div>"
    )
    note = (
        "<p><b>Not what runs.</b> The kernels of this page are planned on their own and stand under Loops and code. "
        "Here the nine rules of the Blockbuster paper are applied to the same program, one at a time.</p>"
        "<p class='soft'>Red edges are buffered: they go through global memory. A dotted box is a map over the dim in "
        "its corner. Each step shows the program before it and after it.</p>"
    )
    return f'{note}<div class="rule-steps" data-last="{last}">{controls}<div class="states">{panels}</div></div>'


def _panel(k: int, title: str, text: str, p: Program, *, snapshot: bool, shown: bool) -> str:
    """One state; the script of the page shows others than the last two."""
    badge = ' <span class="badge good">snapshot</span>' if snapshot else ""
    listing = code("\n".join(lines_of(p)))
    hidden = "" if shown else " hidden"
    return (
        f'<article class="state" data-step="{k}"{hidden}><h4>{escape(title)}{badge}</h4>'
        f'<p class="soft">{escape(text)}</p><pre>{listing}</pre>'
        f'<div class="canvas">{draw_program(p, title)}</div></article>'
    )
