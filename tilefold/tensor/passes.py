"""The tensor-level passes, in order: what the front end builds -> what fusion works on."""

from __future__ import annotations

from collections.abc import Callable

from tilefold.tensor.inline import absorb_copies, inline
from tilefold.tensor.ir import Program
from tilefold.tensor.narrow import narrow
from tilefold.tensor.rewrite import drop_dead, drop_repeated
from tilefold.tensor.split_dims import Layouts, split_dims
from tilefold.tensor.unify import canonical_names, unify

#: Applied after the dims have been split.
AFTER_SPLIT: tuple[tuple[str, Callable[[Program], Program]], ...] = (
    ("narrow conditions", narrow),
    ("inline maps", inline),
    ("absorb copies", absorb_copies),
    ("unify dims", unify),
    ("drop repeated", drop_repeated),
    ("drop dead", drop_dead),
    ("name dims", canonical_names),
)


def normalise(p: Program) -> tuple[Program, Layouts]:
    """Views as plain indices, linked dims unified, maps inlined; and how inputs have to be viewed."""
    p, layouts = split_dims(inline(drop_dead(p)))
    for _, run in AFTER_SPLIT:
        p = run(p)
    return p, layouts
