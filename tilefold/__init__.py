"""Tilefold: an operator-fusion compiler for PyTorch.

fast = torch.compile(model, backend="tilefold")   whole models; what is not covered runs elsewhere
tilefold.fuse(fn)                                 one function, whole; an error if it cannot be
tilefold.explain(fn, *args)                       what was fused, why, the code, the traffic
tilefold.verify(fn, *args)                        error against float64, next to eager's
tilefold.custom_op(fn, *args)                     an operator of torch, for graphs of others and calls without guards
tilefold.flex_attention(q, k, v, ...)             torch's flex_attention, compiled: your own scores and masks
tilefold.varlen_attention(q, k, v, ...)           the same for packed sequences of any lengths, and for paged keys
tilefold.package(fn, args, path), load(path)      a file that a process without a compiler loads
tilefold.keep_operators(path), load_pt2(path)     .pt2 files of torch with such operators, for other processes
tilefold.te                                       tensor expressions and schedules: fusion by hand
tilefold.schedule(fn, *args)                      a function's definitions by name, to be scheduled by hand
tilefold.tune(fn, *args)          times configurations of its GPU kernels and keeps the best
tilefold.derive("m = max[l] x[l] ...")            the mathematics alone

A name is loaded when it is first used: `tilefold --help`, and whoever only catches errors, need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
from tilefold.version import version as _version
from tilefold.with_torch import register as _register

if TYPE_CHECKING:
    from tilefold.explanation.report import Explanation, explain
    from tilefold.frontend.expressions import te
    from tilefold.frontend.expressions.scheduled import FunctionSchedule, schedule
    from tilefold.frontend.flex import flex_attention
    from tilefold.frontend.fuse import fuse
    from tilefold.frontend.packages.load import Packaged, load
    from tilefold.frontend.packages.operators import keep_operators, load_pt2
    from tilefold.frontend.packages.package import package
    from tilefold.frontend.registered.custom_op import CustomOp, custom_op
    from tilefold.frontend.tune import tune
    from tilefold.frontend.varlen import varlen_attention
    from tilefold.frontend.verify import VerifyReport, verify
    from tilefold.tensor.formula import derive

#: Where the names are that need torch: as above, for Python.
_HOMES = {
    "Explanation": "tilefold.explanation.report",
    "explain": "tilefold.explanation.report",
    "te": "tilefold.frontend.expressions.te",
    "FunctionSchedule": "tilefold.frontend.expressions.scheduled",
    "schedule": "tilefold.frontend.expressions.scheduled",
    "CustomOp": "tilefold.frontend.registered.custom_op",
    "custom_op": "tilefold.frontend.registered.custom_op",
    "flex_attention": "tilefold.frontend.flex",
    "fuse": "tilefold.frontend.fuse",
    "Packaged": "tilefold.frontend.packages.load",
    "load": "tilefold.frontend.packages.load",
    "keep_operators": "tilefold.frontend.packages.operators",
    "load_pt2": "tilefold.frontend.packages.operators",
    "package": "tilefold.frontend.packages.package",
    "tune": "tilefold.frontend.tune",
    "varlen_attention": "tilefold.frontend.varlen",
    "VerifyReport": "tilefold.frontend.verify",
    "verify": "tilefold.frontend.verify",
    "derive": "tilefold.tensor.formula",
}

__all__ = [
    "BackendError",
    "CacheError",
    "CustomOp",
    "Explanation",
    "FunctionSchedule",
    "NotFusibleError",
    "Packaged",
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
    "flex_attention",
    "fuse",
    "keep_operators",
    "load",
    "load_pt2",
    "package",
    "schedule",
    "te",
    "tune",
    "varlen_attention",
    "verify",
]

_register()


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'tilefold' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    found = globals()[name] = home if name == "te" else getattr(home, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
