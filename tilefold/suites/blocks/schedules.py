"""Schedules: a general attention as tensor expressions (Neptune's Figure 12), scheduled by hand as in its Figure 13.

For masks and scores that give global, causal, ALiBi, grouped, soft-capped and windowed attention, the schedule must
arrive at the kernel of the automatic road: the same block program and the same tile kernel, text for text, under
canonical names. Every step on the way is interpreted, and the compiled kernels are compared with float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilefold.block import text as block_text
from tilefold.block.canonical import canonical
from tilefold.block.interp import run
from tilefold.block.ir import Block
from tilefold.errors import ScheduleError
from tilefold.frontend.expressions import te
from tilefold.frontend.fuse import trace
from tilefold.frontend.verify import compare
from tilefold.plan.greedy import fuse
from tilefold.suites import functions as f
from tilefold.suites.blocks.case import BlockCase, Outcome
from tilefold.suites.cascades import CASCADES
from tilefold.suites.case import normal, together
from tilefold.tensor.interp import bind_syms
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import drop_dead
from tilefold.tile import text as tile_text
from tilefold.tile.lower import LowerOptions, lower

D = 64
SCALE = D**-0.5
#: Lines of Neptune's definition and schedule.
FIGURE_12, FIGURE_13 = 38, 28
#: Keys of the decode case: long enough that the automatic road splits them.
LONG = (1 << 16) + 77

#: Functions of the zoo whose automatic kernels are made again, law by law.
FOLLOWED = (
    "softmax",
    "variance",
    "MoE routing",
    "RMSNorm + GEMM",
    "LayerNorm + GEMM",
    "quantise + GEMM",
    "attention, GQA",
    "Performer",
)

Score = Callable[..., te.Operand]


def general_attention(
    batch: int,
    heads: int,
    queries: te.Extent,
    keys: te.Extent,
    mask: Score,
    score: Score,
    shared: int = 1,
    size: int = D,
) -> Program:
    """q: [batch, heads, queries, size], k and v: [batch, heads // shared, keys, size]."""
    b, n, i, j, d, e = te.dims(b=batch, n=heads, i=queries, j=keys, d=size, e=size)
    q = te.tensor("q", (b, n, i, d))
    k = te.tensor("k", (b, heads // shared, j, d))
    v = te.tensor("v", (b, heads // shared, j, e))
    h = n // shared if shared > 1 else n
    p = te.compute("p", (b, n, i, j), te.sum(q[b, n, i, d] * k[b, h, j, d], over=d))
    s = te.compute("s", (b, n, i, j), te.where(mask(b, n, i, j), score(p[b, n, i, j], b, n, i, j), -te.inf))
    m = te.compute("m", (b, n, i), te.max(s[b, n, i, j], over=j))
    x = te.compute("x", (b, n, i, j), te.exp(s[b, n, i, j] - m[b, n, i]))
    t = te.compute("t", (b, n, i), te.sum(x[b, n, i, j], over=j))
    a = te.compute("a", (b, n, i, e), te.sum(x[b, n, i, j] * v[b, h, j, e], over=j))
    return te.program("attention", te.compute("o", (b, n, i, e), a[b, n, i, e] / t[b, n, i]))


def rolling(sch: te.Schedule) -> te.Schedule:
    """FlashAttention: all of it in one pass over the keys."""
    sch = sch.fuse("p", "s", "m").tile("m", i=128, j=64)
    sch = sch.rolling_update("t", "j")
    sch = sch.rolling_update("a", "j")
    sch = sch.fuse("a", "o")
    sch = sch.place("q", "shared", at="o").place("k", "shared", at="o").place("v", "shared", at="o")
    return sch.bind("o", i="x", n="y", b="z").pipeline("a", "j", 2).warps("o", 8)


def split_k(sch: te.Schedule) -> te.Schedule:
    """FlashDecoding: segments of the keys in parallel, combined by the derived merge."""
    sch = sch.fuse("p", "s", "m").tile("m", j=512)
    sch = sch.rolling_update("t", "j")
    sch = sch.rolling_update("a", "j")
    sch = sch.fuse("a", "o")
    return sch.split_k_update("a", "j", 16).bind("o", i="x", n="y", b="z")


def everywhere(*_: te.Value) -> bool:
    """No mask."""
    return True


def causal(b: te.Dim, n: te.Dim, i: te.Dim, j: te.Dim) -> te.Value:
    """The last query stands at the last key."""
    return j <= i + te.extent(j) - te.extent(i)


def window(b: te.Dim, n: te.Dim, i: te.Dim, j: te.Dim) -> te.Value:
    """The keys up to a query's own position, at most `functions.WINDOW` of them."""
    at = i + te.extent(j) - te.extent(i)
    return (j <= at) & (at - j < f.WINDOW)


def scaled(p: te.Value, *_: te.Value) -> te.Value:
    """The usual score."""
    return p * SCALE


def soft_capped(p: te.Value, *_: te.Value) -> te.Value:
    """Gemma 2's."""
    return f.SOFT_CAP * te.tanh(p * SCALE / f.SOFT_CAP)


def alibi(slopes: te.Tensor) -> Score:
    """A penalty a head and position of distance."""
    return lambda p, b, n, i, j: p * SCALE + slopes[n] * (j - (i + te.extent(j) - te.extent(i)))


@dataclass(frozen=True, slots=True)
class Variant:
    """An attention as a program, and the same in PyTorch, on arguments q, k, v and then what else there is."""

    name: str
    program: Callable[[], Program]
    eager: Callable[..., torch.Tensor]
    shared: int = 1
    extra: tuple[torch.Tensor, ...] = ()

    def args(self, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        kv = normal(2, 4 // self.shared, keys, D)
        gen = torch.Generator().manual_seed(queries)
        return (*together(normal(2, 4, queries, D), kv, kv)(gen), *self.extra)


def _prefill(mask: Score, score: Score, shared: int = 1) -> Program:
    return general_attention(2, 4, te.size("sq"), te.size("skv"), mask, score, shared)


def _with_slopes() -> Program:
    slopes = te.tensor("slopes", (4,))
    p = _prefill(causal, alibi(slopes))
    return replace(p, inputs=(*p.inputs[1:], p.inputs[0]))


VARIANTS = (
    Variant("global", partial(_prefill, everywhere, scaled), f.attention),
    Variant("causal", partial(_prefill, causal, scaled), f.attention_causal),
    Variant("ALiBi", _with_slopes, f.attention_alibi, extra=(f.alibi_slopes(4),)),
    Variant("GQA", partial(_prefill, causal, scaled, 2), f.attention_gqa, shared=2),
    Variant("soft-cap", partial(_prefill, causal, soft_capped), f.attention_softcap),
    Variant("window", partial(_prefill, window, scaled), f.attention_window),
)


def decode(keys: int = LONG) -> Program:
    """One query against many keys, with sizes that are known."""
    return general_attention(1, 2, 1, keys, everywhere, scaled)


def kernel_texts(blocks: tuple[Block, ...], sizes: tuple[dict[str, int], ...]) -> list[str]:
    """Block program and tile kernel of each kernel, under canonical names, with these tile sizes."""
    out: list[str] = []
    for b, given in zip(blocks, sizes, strict=True):
        c = canonical(b)
        tiles = {c.dims[d]: n for d, n in given.items() if d in c.dims}
        out += [block_text.show(c.block), tile_text.show(lower(c.block, LowerOptions(tiles=tiles)))]
    return out


def same_kernels(p: Program, sch: te.Schedule) -> bool:
    """Whether a schedule arrives at what the automatic road makes of the program, text for text."""
    mine, theirs = sch.kernels, fuse(p).kernels
    if len(mine) != len(theirs):
        return False
    sizes = tuple(dict(k.tiles) for k in mine)
    return kernel_texts(tuple(k.block for k in mine), sizes) == kernel_texts(tuple(k.block for k in theirs), sizes)


def _scheduled(v: Variant) -> Outcome:
    p = v.program()
    sch = rolling(te.schedule(p))
    if not same_kernels(p, sch):
        return Outcome(False, "not the kernel of the automatic road")
    compiled = te.compile(sch.portable())
    errors = []
    for queries, keys in ((70, 70), (33, 130), (1, 301), (5, 5)):
        found = compare(v.name, v.eager, compiled, v.args(queries, keys))
        if not found.ok:
            return Outcome(False, f"{queries} x {keys}: {found.why or 'wrong'} ({found.max_rel_err:.1e})")
        errors.append(found)
    worst = max(errors, key=lambda c: c.max_rel_err)
    return Outcome(
        True, f"the automatic kernel; error {worst.max_rel_err:.1e}, eager's {worst.eager_rel_err:.1e}, 4 shapes"
    )


def _split() -> Outcome:
    p = decode()
    sch = split_k(te.schedule(p))
    if not same_kernels(p, sch):
        return Outcome(False, "not the kernels of the automatic road")
    gen = torch.Generator().manual_seed(1)
    kv = normal(1, 2, LONG, D)
    found = compare("decode", f.attention, te.compile(sch.portable()), together(normal(1, 2, 1, D), kv, kv)(gen))
    return Outcome(found.ok, f"{len(sch.kernels)} kernels, the automatic ones; error {found.max_rel_err:.1e}")


def _steps() -> Outcome:
    """Each step of both schedules, interpreted in float64."""
    count = 0
    plans: tuple[tuple[Callable[[te.Schedule], te.Schedule], Program], ...] = (
        (rolling, _prefill(causal, scaled)),
        (split_k, decode(41)),
    )
    for plan, p in plans:
        x = {i.name: _input(i.name, tuple(getattr(e, "value", 9) for e in i.shape)) for i in p.inputs}
        want = te.reference(p)(*x.values())
        for sch in plan(te.schedule(p)).history():
            whole = sch.block
            got = run(whole, x, bind_syms(p, x), block_sizes=dict.fromkeys(whole.sizes, 4), exact=True)["o"]
            count += 1
            if not isinstance(want, torch.Tensor) or not torch.allclose(got, want, rtol=1e-9, atol=1e-9):
                return Outcome(False, f"changed by {sch.steps[-1]}")
    return Outcome(True, f"{count} block programs mean the same")


def _input(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def _followed() -> Outcome:
    """The automatic road on PyTorch functions, as steps of a schedule that make the same block programs."""
    steps = 0
    by_name = {c.name: c for c in CASCADES}
    for case in (by_name[name] for name in FOLLOWED):
        p = drop_dead(trace(case.fn, *case.args()).program)
        fused = fuse(p)
        sch = te.Schedule.following(p, fused)
        if [k.block for k in sch.kernels] != [k.block for k in fused.kernels]:
            return Outcome(False, f"{case.name}: other kernels than the automatic road's")
        steps += len(sch.steps)
    return Outcome(True, f"{len(FOLLOWED)} functions, {steps} steps, the same block programs")


def _lengths() -> Outcome:
    """Definition and schedule are as short as the paper's."""
    have = [len(inspect.getsource(x).splitlines()) for x in (general_attention, rolling, split_k)]
    ok = have[0] <= FIGURE_12 and max(have[1:]) <= FIGURE_13
    return Outcome(ok, f"definition {have[0]} lines (38), rolling {have[1]} (28), split-k {have[2]}")


ILLEGAL: tuple[tuple[str, Callable[[te.Schedule], te.Schedule], str | None], ...] = (
    ("fuse across the program", lambda s: s.fuse("p", "m"), "s -> m"),
    ("share a pass without repair", lambda s: s.fuse("m", "x", "t").fuse("m", "t", at="j"), "m -> t"),
    ("bind a loop with a state", lambda s: rolling(s).bind("o", j="x"), "a -> a over j"),
    ("split what is written", lambda s: s.fuse("s", "m").split_k_update("m", "j"), "s -> x"),
    ("privatise what is repaired", lambda s: s.rolling_update("t", "j").privatize("t", "j"), "m -> t"),
    ("extend over what is reduced", lambda s: s.fuse("s", "m").extend("s", "j"), "m -> s"),
    ("recompute for the only reader", lambda s: s.recompute("p", "s"), "p -> s"),
)


def _illegal() -> Outcome:
    """Steps that would change the meaning are refused, with the dependency."""
    start = te.schedule(_prefill(causal, scaled))
    for name, step, dependency in ILLEGAL:
        try:
            step(start)
        except ScheduleError as why:
            if why.dependency != dependency or why.loc is None:
                return Outcome(False, f"{name}: names {why.dependency}, not {dependency}")
        else:
            return Outcome(False, f"{name}: accepted")
    return Outcome(True, f"{len(ILLEGAL)} illegal steps refused, each with its dependency")


def cases() -> tuple[BlockCase, ...]:
    """What schedules have to show."""
    return (
        *(BlockCase("schedules", f"attention, {v.name}", partial(_scheduled, v)) for v in VARIANTS),
        BlockCase("schedules", "attention, decode by split-k", _split),
        BlockCase("schedules", "every step means the same", _steps),
        BlockCase("schedules", "the automatic road as a schedule", _followed),
        BlockCase("schedules", "as short as Figures 12 and 13", _lengths),
        BlockCase("schedules", "illegal steps", _illegal),
    )
