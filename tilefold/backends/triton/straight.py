"""Long straight lines of code, which Triton is not to look for neighbours in.

Triton's pass that lays accesses out (`TritonGPUCoalesce`, 3.6) gives each as many neighbours a lane as any access has
whose positions, values or results hang together with its own, and finds these by walking from every operation that it
meets to all that it follows from and that follow from it. In a straight line all operations hang together, by their
ranges at least: A accesses of vectors and N operations take A N N steps. A scan of 32 written out (133 accesses, 1,513
operations) takes 3.7 of its 5.7 s of a slow core there, one of 64 eight times that.

Without the pass lanes are laid along the last axis, an element each: neighbours are read by neighbouring lanes, only
not in vectors. That serves where no access has its neighbours along another axis, and no loop copies ahead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds of a slow core that a step of the walk takes (measured: 1.0e-8 to 1.3e-8 with 90 to 133 accesses), and those
#: from which the pass is left out.
STEP, LONG = 1.2e-8, 4.0
_ACCESSES = frozenset({"load", "store"})
#: What takes the neighbours that a lane has apart, or puts them together.
_OF_LANES = frozenset({"split", "join"})
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Subscript)


def laid_out(source: str, name: str) -> bool:
    """Whether Triton is to lay out the accesses of a kernel: unless it would take long, for nothing that shows."""
    kernel = _kernel(source, name)
    return _seconds(kernel) < LONG or not _is_plain(kernel)


@contextmanager
def layouts(source: str, name: str) -> Iterator[None]:
    """Have Triton compile a kernel without the pass where it is not worth it. The pass is Triton's for all threads: one
    at a time."""
    if laid_out(source, name):
        yield
        return
    from triton._C.libtriton import passes  # noqa: PLC0415 (Triton is optional)

    own = passes.ttgpuir.add_coalesce
    passes.ttgpuir.add_coalesce = lambda manager: None
    try:
        yield
    finally:
        passes.ttgpuir.add_coalesce = own


def _kernel(source: str, name: str) -> ast.FunctionDef:
    functions = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
    return next(f for f in functions if f.name == name)


def _seconds(kernel: ast.FunctionDef) -> float:
    """What laying out the accesses takes, about."""
    return STEP * len(_accesses(kernel)) * sum(isinstance(n, _OPERATIONS) for n in ast.walk(kernel)) ** 2


def _is_plain(kernel: ast.FunctionDef) -> bool:
    """Whether neighbours lie along the last axis of all accesses, for different lanes, and there is no loop."""
    looping = any(isinstance(n, ast.For | ast.While) for n in ast.walk(kernel))
    splits = any(isinstance(n, ast.Attribute) and n.attr in _OF_LANES for n in ast.walk(kernel))
    return not looping and not splits and not any(map(_across, _accesses(kernel)))


def _accesses(kernel: ast.FunctionDef) -> list[ast.expr]:
    """Positions of all accesses of vectors: those that add a range."""
    calls = (n for n in ast.walk(kernel) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    found = (n.args[0] for n in calls if n.args and n.func.attr in _ACCESSES)  # type: ignore[attr-defined]
    return [e for e in found if any(isinstance(n, ast.Name) and n.id.startswith("r_") for n in ast.walk(e))]


def _across(position: ast.expr) -> bool:
    """Whether neighbours are along another axis than the last: `r[:, None] + (r * stride)[None, :]`."""
    unit, last = set[int](), 0
    for n in ast.walk(position):
        if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple):
            kept = [k for k, e in enumerate(n.slice.elts) if isinstance(e, ast.Slice)]
            last = len(n.slice.elts) - 1
            if not any(isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult) for x in ast.walk(n.value)):
                unit.update(kept)
    return bool(unit) and last not in unit
