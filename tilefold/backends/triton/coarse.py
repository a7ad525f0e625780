"""Kernels whose results are no more exact than 16 bits, though they read and write numbers a row of float32.

A backward of attention reads log-sum-exps, a forward that saves them writes them, slopes of a bias are parameters: none
of that makes scores, which are products of 16-bit numbers, or gradients, which are stored in 16 bits, more exact.
"""

from __future__ import annotations

from collections.abc import Collection

from tilefold.algebra.expr import Call, Expr, Load
from tilefold.algebra.ops import OPS
from tilefold.tile import ir
from tilefold.tile.uses import every


def coarse(kernel: ir.Kernel) -> bool:
    """Whether all products multiply tensors of 16 bits (or what follows from such), and results of more than one number
    a row have no more. Not where something is selected: an order has no error."""
    stmts = list(every(kernel.body))
    if any(isinstance(s, ir.Select) for s in stmts):
        return False
    kinds = {t.name: t.dtype for t in kernel.tensors}
    read = [x.tensor for s in stmts if isinstance(s, ir.Gemm) for x in (s.a, s.b) if x.tensor in kinds]
    singles = {t.dim for t in kernel.grid if t.tile == 1}
    stored = [s for s in stmts if isinstance(s, ir.Store)]
    rows = [s for s in stored if len([d for d in s.dims if d not in singles]) <= 1]
    narrow = all(kinds[s.tensor].nbytes <= 2 for s in stored if s not in rows)
    return bool(read) and all(kinds[n].is_float and kinds[n].nbytes <= 2 for n in read) and narrow and rows != stored


def is_truth(e: Expr, truths: Collection[str] = ()) -> bool:
    """Whether e is a condition, or an element of one of these tensors: of two values, which no rounding makes more."""
    return (isinstance(e, Call) and OPS[e.op].result == "bool") or (isinstance(e, Load) and e.tensor in truths)
