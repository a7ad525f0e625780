"""An explanation as plain text, under 100 columns; long programs are summarised."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tilefold.explanation.model import WHERE, Alike, FoldReport, RejectionReport, alike, same_reason
from tilefold.explanation.names import cascade_signature
from tilefold.explanation.notes import explain_law
from tilefold.explanation.traffic import Traffic, human, human_time

if TYPE_CHECKING:
    from tilefold.explanation.report import Explanation

WIDTH = 96
#: Kernels, folds and tensors that are shown in full.
MOST_KERNELS, MOST_FOLDS, MOST_TENSORS, MOST_REASONS, MOST_LEFT = 16, 2, 10, 8, 3


def text(x: Explanation, *, code: bool = False) -> str:
    """The whole report. code: also what was generated for each kernel."""
    n, t = len(x.kernels), x.traffic
    parts = [
        [
            f"{x.name}: {_count(x.operators, 'operator')} -> {_count(n, 'kernel')}",
            *_left(x),
            f"memory traffic {human(t.before)} -> {human(t.after)} ({t.change}, counted"
            f"{' without those' if x.left or x.fallbacks else ''})",
        ],
        _kernels(alike(x.regions)),
        _folds(x.folds),
        _listings(alike(x.regions)),
        _traffic(t),
        _rejections(x.rejections),
        *(_code(a) for a in alike(x.regions) if code),
    ]
    if x.verification is not None:
        v = x.verification
        parts.append([f"error against float64 {v.max_rel_err:.1e}, eager's own {v.eager_rel_err:.1e}"])
    return "\n\n".join("\n".join(p) for p in parts if p) + "\n"


def _left(x: Explanation) -> list[str]:
    """What the numbers of kernels and bytes are not of, by name."""
    if not (x.left or x.fallbacks):
        return []
    lines = [f"{_count(x.left, 'more operator') + ' ' if x.left else ''}left to PyTorch{':' if x.fallbacks else ''}"]
    together = same_reason(x.fallbacks, lines=False)
    for rs in together[:MOST_LEFT]:
        names = list(dict.fromkeys(r.subject for r in rs))
        rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines += _wrap(f"{names[0]}{rest}: {rs[0].reason}", "  ", "    ")
    return [*lines, "  ... (all of them below)"] if len(together) > MOST_LEFT else lines


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _wrap(line: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(line, WIDTH, initial_indent=first, subsequent_indent=rest or " " * len(first)) or [first]


def _kernels(found: tuple[Alike, ...]) -> list[str]:
    lines = ["Kernels"]
    for a in found[:MOST_KERNELS]:
        k = a.first
        times = f" x{a.count}" if a.count > 1 else ""
        grid = f", grid {k.grid}" if k.grid else ""
        what = f"library call of {', '.join(k.calls)}" if k.calls else f"{k.kind}, {k.language}"
        lines += _wrap(f"{k.name}{times}: {what}{grid}, {human(k.bytes)}{_times(a)}", "  ", "    ")
        if len(k.members) > 1:
            lines += _wrap("computes " + ", ".join(k.members), "    ")
    if len(found) > MOST_KERNELS:
        lines.append(f"  ... {len(found) - MOST_KERNELS} more")
    return lines


def _times(a: Alike) -> str:
    """Of one kernel predicted, of all that are alike measured."""
    k = a.first
    least = f", {human_time(k.predicted)} at least" if k.predicted is not None else ""
    took = f", measured {human_time(a.seconds)}" if a.seconds is not None else ""
    return least + took + (f" (all {a.count})" if took and a.count > 1 else "")


def _code(a: Alike) -> list[str]:
    """What was generated for a kernel; a library call says so."""
    k = a.first
    body = k.source.rstrip("\n").splitlines() if k.source else ["  computed by PyTorch's library"]
    return [f"{k.name}: {k.language}" if k.source else k.name, *body]


def _folds(found: tuple[FoldReport, ...]) -> list[str]:
    proper = [f for f in found if not f.trivial]
    different = {cascade_signature(f.cascade): f for f in reversed(proper)}
    shown = list(reversed(different.values()))
    lines = ["Why it is right"] if proper else []
    for f in shown[:MOST_FOLDS]:
        passed = sum(c.ok for c in f.checks)
        names = ", ".join(c.name for c in f.cascade)
        lines += _wrap(f"{names}: one pass over {', '.join(f.fold.axes)}", "  ")
        laws = dict.fromkeys(s.law for s in f.derivation)
        for s in f.derivation:
            lines += _wrap(f"{s.law}: {s.text}", "    ", "      ")
        for law in laws:
            lines += _wrap(f"{law}: {explain_law(law)}", "    | ", "    |   ") if explain_law(law) else []
        lines.append(f"    {passed} of {len(f.checks)} checks passed before use")
    if len(proper) > MOST_FOLDS:
        lines.append(f"  {_count(len(proper), 'fold')} with a repair in all; {len(found) - len(proper)} need none")
    return lines


def _listings(found: tuple[Alike, ...]) -> list[str]:
    """The loop listing, where the program is a single short kernel."""
    own = [a.first for a in found if a.first.listing]
    if len(own) != 1 or own[0].listing.count("\n") > 40:
        return []
    return ["Loops", *(ln for row in own[0].listing.splitlines() for ln in _listing_row(row))]


def _listing_row(row: str) -> list[str]:
    indent = " " * (2 + len(row) - len(row.lstrip()))
    return _wrap(row.strip(), indent, indent + "    ")


def _traffic(t: Traffic) -> list[str]:
    rows = sorted(t.rows, key=lambda r: (r.after - r.before, -r.after))[:MOST_TENSORS]
    if not rows:
        return []
    wide = max(*(len(r.name) for r in rows), 12)
    wide = min(wide, 44)
    lines = [f"Memory traffic{'before':>{wide + 10}}{'after':>10}"]
    for r in rows:
        name = r.name if len(r.name) <= wide else r.name[: wide - 1] + "…"
        after = human(r.after) if r.after else "-"
        before = human(r.before) if r.before else "-"
        lines.append(f"  {name:<{wide}}{before:>12}{after:>10}  {r.role}")
    if len(t.rows) > len(rows):
        lines.append(f"  ... {len(t.rows) - len(rows)} more tensors")
    lines.append(f"  {'all':<{wide}}{human(t.before):>12}{human(t.after):>10}")
    return lines


def _rejections(found: tuple[RejectionReport, ...]) -> list[str]:
    together = same_reason(found, lines=False)
    lines = ["Not fused, and why"] if found else []
    for rs in together[:MOST_REASONS]:
        first, more = rs[0], f" and {len(rs) - 1} more" if len(rs) > 1 else ""
        lines += _wrap(f"{first.subject}{more} ({WHERE[first.kind]}): {first.reason}", "  ", "    ")
        if first.loc is not None:
            lines += _wrap(f"at {first.loc}", "    ", "      ")
    if len(together) > MOST_REASONS:
        lines.append(f"  ... {len(together) - MOST_REASONS} more reasons")
    return lines
