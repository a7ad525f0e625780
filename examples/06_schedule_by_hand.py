"""Fusion by hand: attention as tensor expressions, and a schedule that makes one kernel of its six definitions.

Each step keeps the meaning, or raises and names the dependency that forbids it; `rolling_update` derives the repair
that lets a sum join the pass of the maximum it depends on. The kernel is the one that the automatic road makes.
"""

import torch

from tilefold import ScheduleError, te

WINDOW = 64


def attention() -> te.Schedule:
    """q, k, v: [4, S, 32]; a query sees the WINDOW keys up to its own position. Returns the unfused program."""
    h, i, j, d, e = te.dims(h=4, i=te.size("n"), j=te.size("n"), d=32, e=32)
    q, k, v = (te.tensor(name, (h, i, d)) for name in "qkv")
    p = te.compute("p", (h, i, j), te.sum(q[h, i, d] * k[h, j, d], over=d))
    s = te.compute("s", (h, i, j), te.where((j <= i) & (i - j < WINDOW), p[h, i, j] * 32**-0.5, -te.inf))
    m = te.compute("m", (h, i), te.max(s[h, i, j], over=j))
    x = te.compute("x", (h, i, j), te.exp(s[h, i, j] - m[h, i]))
    t = te.compute("t", (h, i), te.sum(x[h, i, j], over=j))
    o = te.compute("o", (h, i, e), te.sum(x[h, i, j] / t[h, i] * v[h, j, e], over=j))
    return te.schedule(te.program("attention", o))


def fused(sch: te.Schedule) -> te.Schedule:
    """One pass over the keys, and no mask on the blocks that are wholly inside the window."""
    sch = sch.fuse("p", "s", "m").tile("m", i=64, j=32)  # the scores stay in the loop over j
    sch = sch.rolling_update("t", "j").rolling_update("o", "j")  # the sums join it, repaired
    return sch.peel("o", "j").bind("o", i="x", h="y")


if __name__ == "__main__":
    torch.manual_seed(0)
    start = attention()
    done = fused(start)
    print(f"{len(start.kernels)} kernels before, {len(done.kernels)} after:\n{done.script()}\n")
    try:
        done.bind("o", j="z")
    except ScheduleError as error:
        print(f"refused ({error.dependency}):\n{error}\n")
    by_hand, unfused, exact = te.compile(done.portable()), te.compile(start), te.reference(start.program)
    for length in (1, 63, 200):
        args = tuple(torch.randn(3, 4, length, 32))
        want = exact(*args)
        for name, run in (("fused", by_hand), ("unfused", unfused)):
            error = (run(*args).double() - want).abs().max().item()
            print(f"length {length}: {name} kernels, error against float64 {error:.1e}")
            assert error < 1e-5
