"""The page of an explanation: one self-contained HTML file, light and dark, without external resources."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from tilefold.explanation.derivation_html import derivations
from tilefold.explanation.highlight import code
from tilefold.explanation.model import WHERE, Alike, Dataflow, Region, RejectionReport, alike, same_reason
from tilefold.explanation.names import words
from tilefold.explanation.rules import section
from tilefold.explanation.svg import draw
from tilefold.explanation.traffic import TensorTraffic, Traffic, human, human_time

if TYPE_CHECKING:
    from tilefold.explanation.report import Explanation
    from tilefold.frontend.verify import VerifyReport

#: Rows of the traffic table that are shown at once.
ROWS = 24
#: Of more kernels than this, the code is shown when it is asked for.
AT_ONCE = 4
#: Operators left to PyTorch that are named in the head.
MOST_LEFT = 3


@lru_cache(maxsize=4)
def _template(name: str) -> str:
    return (files("tilefold.explanation") / "templates" / name).read_text(encoding="utf-8")


def page(x: Explanation) -> str:
    """The whole document."""
    fill = {"title": escape(x.name), "style": _template("page.css"), "script": _template("page.js"), "body": body(x)}
    return Template(_template("page.html")).substitute(fill)


def fragment(x: Explanation) -> str:
    """The same for a notebook cell: style and content without a document around them."""
    return f'<style>{_template("page.css")}</style><div class="tilefold">{body(x)}</div>'


def body(x: Explanation) -> str:
    """All sections that have something to say."""
    parts = [
        ("", "", head(x)),
        ("dataflow", "Dataflow", "".join(flows(r, len(x.regions) > 1) for r in x.regions)),
        ("derivation", "Why it is right", derivations(x.regions)),
        ("code", "Loops and code", kernels(alike(x.regions))),
        ("traffic", "Memory traffic", traffic(x.traffic)),
        ("rejections", "What was not fused, and why", rejections(x.rejections)),
        ("rules", "The paper's rules, step by step (not what runs)", "".join(section(r.rules) for r in x.regions)),
        ("accuracy", "Error against float64", accuracy(x.verification) if x.verification else ""),
    ]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, text in parts if key and text)
    out = []
    for key, title, text in parts:
        if not key:
            out.append(f"<header>{text}<nav>{links}</nav></header>")
        elif text:
            out.append(f'<section id="{key}"><h2>{title}</h2>{text}</section>')
    return "".join(out)


def head(x: Explanation) -> str:
    """Name, a sentence, and the figures: launches, bytes, folds, error."""
    t, n = x.traffic, len(x.kernels)
    library = sum(k.kind == "library" for k in x.kernels)
    proofs = sum(len(f.checks) for f in x.folds)
    cells = [
        (f'<span class="was">{x.operators}</span><span class="to">→</span>{n}', "operators → kernels"
         + (f", {library} of them library products" if library else "")),
        (f'<span class="was">{human(t.before)}</span><span class="to">→</span>{human(t.after)}',
         _bars(t.before, t.after) + f"predicted memory traffic, {t.change}"),
        (str(len(x.folds)), f"fold{_s(len(x.folds))} derived; {proofs} checks passed before use"),
    ]  # fmt: skip
    if x.verification is not None:
        v = x.verification
        cells.append((f"{v.max_rel_err:.1e}", f"error against float64; eager's own is {v.eager_rel_err:.1e}"))
    tally = "".join(f'<div><div class="big">{a}</div><div class="soft">{b}</div></div>' for a, b in cells)
    what = f"{x.operators} operator{_s(x.operators)} run{'s' if x.operators == 1 else ''} as {n} kernel{_s(n)}."
    what += _left(x)
    return f'<h1>{escape(x.name)}</h1><p class="lead">{what}{_sizes(x.regions)}</p><div class="tally">{tally}</div>'


def _left(x: Explanation) -> str:
    """What is not among them, by name; why is told below."""
    if not (x.left or x.fallbacks):
        return ""
    names = list(dict.fromkeys(f.subject for f in x.fallbacks))
    shown = ", ".join(map(escape, names[:MOST_LEFT])) + (", ..." if names[MOST_LEFT:] else "")
    head = f"{x.left} more {'is' if x.left == 1 else 'are'} left" if x.left else "Left"
    return f" {head} to PyTorch{': ' if names else ''}{shown}."


def _s(n: int) -> str:
    return "" if n == 1 else "s"


def _bars(before: int, after: int) -> str:
    top = max(before, after, 1)
    return "".join(
        f'<span class="bar {name}" style="width:{100 * n / top:.1f}%"></span>'
        for name, n in (("was", before), ("now", after))
    )


def _sizes(regions: Iterable[Region]) -> str:
    """Which values the symbols have in this account."""
    values = {s: n for r in regions for s, n in r.syms.items()}
    shown = ", ".join(f"{escape(s)}\u00a0=\u00a0{n}" for s, n in list(values.items())[:4])
    return f" Sizes are symbolic in the code; the byte counts are for {shown}." if shown else ""


def flows(r: Region, named: bool) -> str:
    """Both drawings of a region, with a legend."""
    kinds = (("memory", "through memory"), ("chip", "stays on chip"), ("boundary", "argument or result"))
    legend = "".join(
        f'<span><svg width="26" height="8"><path class="edge {c}" d="M0 4H26"/></svg>{t}</span>' for c, t in kinds
    )
    figures = "".join(
        f'<figure><figcaption>{caption}</figcaption><div class="canvas">{draw(flow, caption)}</div>'
        f"{_note(flow)}</figure>"
        for flow, caption in (
            (r.before, f"Before: {r.operators} operator{_s(r.operators)}, each reading and writing memory"),
            (r.after, f"After: {len(r.kernels)} kernel{_s(len(r.kernels))}"),
        )
    )
    title = f"<h3>{escape(r.name)}</h3>" if named else ""
    text = (
        f"<details class='plain'><summary>the program in index notation</summary><pre>{code(r.program)}</pre></details>"
    )
    return f'{title}<div class="legend">{legend}</div><div class="flows">{figures}</div>{text}'


def _note(flow: Dataflow) -> str:
    return f'<p class="soft">{escape(flow.omitted)}</p>' if flow.omitted else ""


def kernels(found: tuple[Alike, ...]) -> str:
    """A card a kernel; of few short ones the code is shown at once."""
    return "".join(kernel(a, len(found) <= AT_ONCE and len(a.first.listing) < 4000) for a in found)


def kernel(a: Alike, opened: bool) -> str:
    """One kernel (standing for all that are alike): listing beside C++, and the tile kernel."""
    k = a.first
    times = f'<span class="badge">×{a.count}</span>' if a.count > 1 else ""
    kind = '<span class="badge good">fused</span>' if k.kind == "fused" else '<span class="badge">library</span>'
    members, grid = ", ".join(k.members), f" · grid {escape(k.grid)}" if k.grid else ""
    facts = f'<span class="soft">{escape(members)}{grid} · {human(k.bytes)}{_times(a)}</span>'
    summary = f"<summary><h3>{escape(k.name)}</h3>{kind}{times}{facts}</summary>"
    if k.kind == "library":
        calls = ", ".join(f"<code>{escape(c)}</code>" for c in k.calls) or "a product or convolution"
        text = f"<p>A call of PyTorch's library: {calls}.</p>"
        return f'<details class="card">{summary}<div class="inside">{text}</div></details>'
    names = words(k.listing)
    left = f"<div><h4>Loop listing</h4><pre>{code(k.listing, names)}</pre></div>"
    right = (
        f"<div><h4>Generated {k.language}</h4><pre>{code(_without_header(k.source), names)}</pre></div>"
        if k.source
        else ""
    )
    tile = _plain("tile kernel", code(k.tile, names)) if k.tile else ""
    return (
        f'<details class="card"{" open" if opened else ""}>{summary}<div class="inside codes-of">'
        f'<div class="codes">{left}{right}</div>{tile}</div></details>'
    )


def _times(a: Alike) -> str:
    """The least time that the bytes of one take, and what all that are alike took, if measured."""
    least = f" · at least {human_time(a.first.predicted)}" if a.first.predicted is not None else ""
    took = f" · measured {human_time(a.seconds)}{' in all' if a.count > 1 else ''}" if a.seconds is not None else ""
    return least + took


def _plain(title: str, text: str) -> str:
    return f'<details class="plain"><summary>{title}</summary><pre>{text}</pre></details>'


def _without_header(source: str) -> str:
    """The code without the listing that it starts with, which the page shows beside it."""
    lines = source.splitlines()
    start = next((n for n, ln in enumerate(lines) if not ln.startswith(("//", "#  ", "# block"))), len(lines))
    return "\n".join(lines[start:]).strip("\n")


def traffic(t: Traffic) -> str:
    """Bytes of every tensor before and after, the largest saving first."""
    rows = sorted(t.rows, key=lambda r: (r.after - r.before, -r.after))
    top = max((max(r.before, r.after) for r in rows), default=1) or 1
    note = (
        "<p class='soft'>Counted, not measured: an operator (before) or a kernel (after) reads every element that it "
        "touches of a tensor once, and writes its results once.</p>"
    )
    header = (
        "<tr><th>tensor</th><th>shape</th><th></th><th class='num'>before</th><th class='num'>after</th>"
        "<th class='track'></th></tr>"
    )
    total = (
        f'<tr class="sum"><td>all</td><td></td><td></td><td class="num">{human(t.before)}</td>'
        f'<td class="num">{human(t.after)}</td><td></td></tr>'
    )
    shown = "".join(_row(r, top) for r in rows[:ROWS])
    rest = "".join(_row(r, top) for r in rows[ROWS:])
    more = (
        f'<details class="plain"><summary>{len(rows) - ROWS} more tensors</summary><table>{rest}</table></details>'
        if rest
        else ""
    )
    return f"{note}<table>{header}{shown}{total}</table>{more}"


def _row(r: TensorTraffic, top: int) -> str:
    bars = "".join(
        f'<span class="bar {c}" style="width:{100 * n / top:.1f}%"></span>'
        for c, n in (("was", r.before), ("now", r.after))
        if n
    )
    after = human(r.after) if r.after else "—"
    before = human(r.before) if r.before else "—"
    return (
        f"<tr><td><code>{escape(r.name)}</code></td><td>{r.dtype} {'×'.join(map(str, r.shape)) or 'scalar'}</td>"
        f'<td class="soft">{r.role}</td><td class="num">{before}</td><td class="num">{after}</td>'
        f'<td class="track">{bars}</td></tr>'
    )


def rejections(found: tuple[RejectionReport, ...]) -> str:
    """A card a reason and line."""
    cards = []
    for rs in same_reason(found, lines=True):
        first = rs[0]
        names = ", ".join(f"<code>{escape(r.subject)}</code>" for r in rs[:6])
        more = f" and {len(rs) - 6} more" if len(rs) > 6 else ""
        where = f'<p class="soft"><code>{escape(str(first.loc))}</code></p>' if first.loc else ""
        cards.append(
            f'<div class="card reason"><p>{names}{more} <span class="badge bad">{WHERE[first.kind]}</span></p>'
            f"<p>{escape(first.reason)}</p>{where}</div>"
        )
    return "".join(cards)


def accuracy(v: VerifyReport) -> str:
    """A row for the given arguments and for each hostile variant of them."""
    header = (
        "<tr><th></th><th>arguments</th><th class='num'>error</th><th class='num'>eager's error</th>"
        "<th class='num'>allowed</th><th></th></tr>"
    )
    rows = "".join(
        f"<tr><td>{'✓' if c.ok else '✗'}</td><td>{escape(c.name)}</td><td class='num'>{c.max_rel_err:.1e}</td>"
        f"<td class='num'>{c.eager_rel_err:.1e}</td><td class='num'>{c.bound:.1e}</td><td>{escape(c.why)}</td></tr>"
        for c in (v.given, *v.hostile)
    )
    return f"<table>{header}{rows}</table>"
