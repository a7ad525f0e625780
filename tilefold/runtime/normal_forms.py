"""What an earlier process normalised is read (`kept`): splitting dims and inlining maps take longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Call, Cast, Const, Expr, Index, Load, Size, Sym, tensors_read
from tilefold.errors import SourceLoc
from tilefold.runtime.kept import Shelf, lines_of
from tilefold.tensor.ir import Compute, Input, Program
from tilefold.tensor.passes import normalise
from tilefold.tensor.split_dims import Layouts

NORMAL = Shelf("normal", "every process normalises its programs anew")
#: Programs of fewer statements are normalised before a file is found.
LEAST = 16
_CLASSES = (Program, Input, Compute, SourceLoc, Const, Index, Size, Sym, Load, Call, Cast, DType)


@dataclass(frozen=True, slots=True)
class Normal:
    """A normalised program, and how its inputs are viewed: for each axis the extents that it was cut into."""

    program: Program
    layouts: Mapping[str, tuple[tuple[Expr, ...], ...]]


def normal_form(p: Program, contiguous: Mapping[str, int] | None = None) -> tuple[Program, Layouts]:
    """`normalise(p, contiguous)`, remembered."""
    if len(p.body) < LEAST:
        return normalise(p, contiguous)
    path = NORMAL.path([*lines_of(p), "" if contiguous is None else str(sorted(contiguous.items()))])
    found = NORMAL.read(path, Normal, (Normal, *_CLASSES), _sound)
    if found is None:
        found = Normal(*normalise(p, contiguous))
        NORMAL.write(path, found)
    return replace(found.program, name=p.name), found.layouts


def _sound(found: Normal) -> None:
    """ValueError where something is read that is not there, or written twice."""
    p = found.program
    known = {i.name for i in p.inputs}
    for c in p.body:
        if not known >= tensors_read(c.body) or known & set(c.results):
            raise ValueError("names do not fit")
        known.update(c.results)
    if not known.issuperset(p.outputs):
        raise ValueError("no such results")
