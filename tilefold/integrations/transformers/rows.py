"""What became of each part of a model, and the table of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: `ready`: compiled when it is first called. `fused`: runs compiled. `left`: runs as it did.
State = Literal["ready", "fused", "left"]


@dataclass(slots=True)
class Row:
    """One part of a model: its path, class and kind, and what runs it. `why`: of what is left, or how it is fused.

    The only mutable record here: what Tilefold refuses is known when the part is first called.
    """

    path: str
    owner: str
    kind: str
    state: State
    why: str = ""


def table(rows: Iterable[Row]) -> str:
    """The rows as text, equal ones of numbered layers as one: `layers.*`."""
    counted: Counter[tuple[str, ...]] = Counter(
        (re.sub(r"\b\d+\b", "*", r.path), r.owner, r.kind, r.state, r.why) for r in rows
    )
    if not counted:
        return "nothing yet: rows appear as models are built"
    head = ("part", "class", "what", "runs", "times", "why")
    lines = [(p, owner, kind, state, str(n), why) for (p, owner, kind, state, why), n in counted.items()]
    order = {"fused": 0, "ready": 1, "left": 2}
    lines.sort(key=lambda line: order[line[3]])  # stable: as in the model otherwise
    widths = [max(len(line[k]) for line in (head, *lines)) for k in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in (head, *lines)
    )
