"""Tilefold: an operator-fusion compiler for PyTorch.

fast = torch.compile(model, backend="tilefold")   whole models; what is not covered runs elsewhere
tilefold.fuse(fn)                                 one function, whole; an error if it cannot be
tilefold.explain(fn, *args)                       what was fused, why, the code, the traffic
tilefold.verify(fn, *args)                        error against float64, next to eager's
tilefold.custom_op(fn, *args)                     an operator of torch, for graphs of others and calls without guards
tilefold.te                                       tensor expressions and schedules: fusion by hand
tilefold.tune(fn, *args)          times configurations of its GPU kernels and keeps the best
tilefold.derive("m = max[l] x[l] ...")            the mathematics alone
"""

from tilefold.errors import (
    BackendError,
    CacheError,
    NotFusibleError,
    ParseError,
    ScheduleError,
    SourceLoc,
    TilefoldError,
    UnsupportedError,
    VerifyError,
)
from tilefold.explain.report import Explanation, explain
from tilefold.frontend import te
from tilefold.frontend.custom_op import CustomOp, custom_op
from tilefold.frontend.fuse import fuse
from tilefold.frontend.tune import tune
from tilefold.frontend.verify import VerifyReport, verify
from tilefold.tensor.formula import derive

__all__ = [
    "BackendError",
    "CacheError",
    "CustomOp",
    "Explanation",
    "NotFusibleError",
    "ParseError",
    "ScheduleError",
    "SourceLoc",
    "TilefoldError",
    "UnsupportedError",
    "VerifyError",
    "VerifyReport",
    "custom_op",
    "derive",
    "explain",
    "fuse",
    "te",
    "tune",
    "verify",
]
