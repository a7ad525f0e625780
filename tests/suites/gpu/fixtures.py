"""Records and results made by hand."""

from __future__ import annotations

from tilefold.suites.gpu.results import Record, Results


def record(row, contender, us=None, *, suite="redfuser", family="mha", over=None, **more):
    """One contender; `us` is None where it was not timed, `over` its time over Tilefold's."""
    kind = {"tilefold": "ours", "tilefold-cg": "own", "gemm": "floor"}.get(contender, "peer")
    times = () if us is None else (us, us * 1.01)
    ratios = () if over is None else (over, over * 1.1)
    fixed = {"shape": "8 x 8", "length": 8, "floor_us": 5.0, "flops": 1e9, "nbytes": 1e6, **more}
    return Record(suite, row, family, contender=contender, kind=kind, microseconds=times, over_ours=ratios, **fixed)


def results(*records, **more):
    """With every row done."""
    done = tuple(dict.fromkeys(r.key for r in records))
    rates = {"f16": 8e14, "f8": 1.3e15, "memory": 3e12}
    fixed = {"device": {"name": "a GPU"}, "versions": {"torch": "2.11"}, "policy": {"how": "graphs"}, "rates": rates}
    return Results(**fixed, date="2026-11-21T00:00:00+00:00", records=records, done=done, **more)
