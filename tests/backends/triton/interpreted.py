"""Runs generated kernels in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.backends.triton.interpreted`.

A process of its own, for Triton looks at the variable when it is imported. Writes a line of JSON a check.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F_
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import _interpreter

from tests.backends.triton import gradients as backward
from tests.backends.triton.contracted import contracted
from tests.backends.triton.functions import (
    contrast,
    distances,
    each_state,
    multiplied_bytes,
    narrow_weights,
    neighbours,
    of_bytes,
    of_four_bits,
    of_logits,
    quantile_loss,
    spread,
    summed_states,
    top_of_groups,
    warped,
)
from tests.backends.triton.keyed import keyed_sums
from tests.backends.triton.odd_depths import odd_depths
from tests.frontend.flex_mods import MASKS, SCORES, L, S
from tests.layers import Layer, gradients, rotated
from tilefold import flex_attention, fuse, pipeline, te
from tilefold.backends.triton import (
    added_rows,
    launch,
    memory,
    order,
    prefix_gradient,
    prefixes,
    product_tiles,
    scale,
)
from tilefold.backends.triton.own_vectors import OwnVector
from tilefold.block import one_axis
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import Fused, trace
from tilefold.frontend.operators.random import LIMIT, random16_op, random_op, seed_op
from tilefold.frontend.regions.assemble import compilations
from tilefold.frontend.verify import compare, verify
from tilefold.pipeline import compile_program
from tilefold.plan import near_sums
from tilefold.plan.gpu_forms import Given
from tilefold.plan.hardware import H100
from tilefold.suites.gpu import operators as o
from tilefold.suites.gpu.cases import SMALL

CASES = {c.row: c for suite in SMALL.values() for c in suite}
H, B, F = torch.float16, torch.bfloat16, torch.float32
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
#: Told what is wrong; empty: nothing.
Check = Callable[[], str]


def _interpreted(p, *, device, **options):
    return compile_program(p, device="interpreter", **{**options, "goal": "fused"})


def rand(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(most: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Integers [96, 80] of at most this magnitude."""
    return torch.randint(-most, most + 1, (96, 80), generator=torch.Generator().manual_seed(0)).to(dtype)


def right(fn, *args, compiled=None, hostile: bool = False) -> str:
    report = verify(fn, *args, compiled=compiled or fuse(fn), hostile=hostile)
    return "" if report.ok else str(report)


def squares(x, w):
    """Elements of up to 1e9, which fp16 does not hold and bf16 rounds."""
    return (x.float() - 30.0).square() @ w.float()


def lines_of_windows(pixels: int) -> str:
    """Blocks have several lines of a window, each of pixels that fill no tile."""

    def attend(q, k, v, up, across):
        b, x, y, d = q.shape
        s = (q.reshape(b, x * y, d) @ k.reshape(b, x * y, d).mT).reshape(b, x, y, x, y).float()
        s = s + up[:, :, :, :, None] + across[:, :, :, None, :]
        return torch.softmax(s.reshape(b, x * y, x * y), -1).to(v.dtype) @ v.reshape(b, x * y, d)

    n = pixels
    args = [rand(2, n, n, 32, seed=i) for i in range(3)] + [rand(2, n, n, n, seed=i) for i in (3, 4)]
    with patch.object(product_tiles, "ENOUGH", 0):
        return right(attend, *args)


def own_rows(x):
    """One step after the other, of the numbers of a row."""
    v = x[:, 0] * 0.0
    for n in range(x.shape[1]):
        v = torch.sqrt(v * v * 0.5 + x[:, n] * x[:, n] + 0.1)
    return v


def own_columns(x):
    """Each step's value at its place, beside the row's last one."""
    n, v, out = x.shape[1], x[:, 0] * 0.0, 0.0
    for t in range(n):
        v = torch.tanh(v + x[:, t])
        out = out + F_.pad(v[:, None], (t, n - 1 - t))
    return out + v[:, None] * x


def in_vectors(*shapes: tuple[int, int], dtype: torch.dtype = F) -> str:
    said = ""
    for shape in shapes:
        with patch.object(memory.Memory, "_part", autospec=True, side_effect=memory.Memory._part) as part:
            said += right(own_rows, rand(*shape, dtype=dtype)) + ("" if part.called else f"{shape}: no vectors")
        with patch.object(OwnVector, "joined", autospec=True, side_effect=OwnVector.joined) as joined:
            said += right(own_columns, rand(*shape, dtype=dtype)) + ("" if joined.called else f"{shape}: not joined")
    return said


def large_norm(x, g, w):
    """RMSNorm divides at the end of its fold: until then x g is larger than fp16's largest number."""
    r = x.float().square().mean(-1, keepdim=True).sqrt()
    return ((x.float() / r * 1e-3 * g).half() @ w).float()


def heads(b: int, h: int, queries: int, keys: int, dim: int, *, kv: int | None = None, value: int | None = None):
    """q, k, v."""
    kv, value = kv or h, value or dim
    return rand(b, h, queries, dim), rand(b, kv, keys, dim, seed=1), rand(b, kv, keys, value, seed=2)


def of_keys(queries: int, keys: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Arguments of the kernel that makes dK and dV: log-sum-exps are not less than the scores."""
    q, k, v = heads(1, 2, queries, keys, dim)
    return (
        q,
        k,
        v,
        rand(1, 2, queries, dim, seed=3),
        rand(1, 2, queries, seed=4).float() + 4,
        rand(1, 2, queries).float(),
    )


def case(name: str, *, hostile: bool = False) -> str:
    return right(CASES[name].fn, *CASES[name].args(), hostile=hostile)


def over_logits(rows: int, columns: int) -> str:
    """A loss and the gradient of its logits, which is written over them."""

    def loss(x, w, y):
        logits, keep = x @ w.mT, y != -100
        at = torch.where(keep, y, 0)
        total = torch.logsumexp(logits.float(), -1)
        hit = torch.arange(columns) == at[:, None]
        gradient = torch.where(keep[:, None], torch.exp(logits.float() - total[:, None]) - hit.float(), 0.0)
        picked = logits.float().gather(1, at[:, None])[:, 0]
        return torch.where(keep, total - picked, 0.0).sum(), gradient.to(x.dtype)

    x, w = rand(rows, 320, dtype=B), rand(columns, 320, dtype=B, seed=1)
    y = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(2))
    y[:3] = torch.tensor([-100, 0, columns - 1])
    traced = trace(loss, x, w, y)
    made = pipeline.compile_program(traced.program, device="interpreter")
    if not any(made._over.values()):
        return "the logits stay"
    compare_to = loss(x.double(), w.double(), y)
    eager = loss(x, w, y)
    given = {"x": x, "w": w, "y": y}
    wrong = ""
    for name, plain, exact in zip(traced.program.outputs, eager, compare_to, strict=True):
        got = made(given, {})[name].reshape(exact.shape).double()
        error, allowed = (got - exact).abs().max(), 2 * (plain.double() - exact).abs().max()
        wrong += "" if error <= allowed else f"{name} is off by {error}, eager by {allowed / 2}; "
    return wrong


def in_turn(fn, calls, **how) -> str:
    """One compiled function on several arguments."""
    run = fuse(fn, **how)
    found = [compare(str([tuple(x.shape) for x in args]), fn, run, args) for args in calls]
    return "\n".join(str(f) for f in found if not f.ok)


def lengths(dynamic: bool) -> str:
    """One compiled attention on several lengths, short ones first."""
    run, wrong = fuse(o.causal, dynamic=True if dynamic else None), []
    for n in (5, 64, 3, 129, 66):
        args = tuple(rand(1, 2, n, 64, seed=s) for s in range(3))
        for x in () if dynamic else args:
            torch._dynamo.mark_dynamic(x, 2)
        found = compare(f"length {n}", o.causal, run, args)
        wrong += [] if found.ok else [str(found)]
    return "\n".join([*wrong, *([] if len(run.graphs) == 1 else [f"{len(run.graphs)} compilations"])])


def repeated_heads(n: int, spread: bool):
    """Attention whose keys and values are repeated for n heads each."""

    def attend(q, k, v):
        b, h, t, d = k.shape
        if spread:
            k, v = (x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(n, 1) for x in (k, v))
        return torch.softmax((q @ k.mT).float() * d**-0.5, -1).to(q.dtype) @ v

    return attend


def down_columns(x):
    return x.var(0), torch.logsumexp(x, 0), (x > 2.5).any(0)


def of_images(x):
    return torch.var_mean(x, (0, 2, 3)), x.abs().amax((0, 2, 3))


def of_pixels(x, w, b):
    """[B, H, W, C] times weights [G, M, C, 1, 1] of groups of channels, biased."""
    return torch.relu(torch.einsum("ijkn,lmn->ijklm", x, w[..., 0, 0]).float() + b).to(x.dtype)


def cut(fn, *args) -> str:
    """Folds cut into segments at sizes that are not worth it."""
    small = replace(H100, least_read=64, least_segment=16, second_kernel=0.0, columns=16)
    with patch.object(pipeline, "gpu_here", return_value=small):
        return right(fn, *args)


def sliced() -> str:
    args = (torch.nn.functional.pad(x, (3, 5, 1, 2))[..., 1:-2, 3:-5] for x in heads(1, 2, 20, 70, 64))
    return right(o.attention, *args)


def ties(experts: int) -> str:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-1, 2, s, generator=g).to(B) for s in ((21, 32), (32, 48)))
    fn = o.moe_routing(experts)
    run = fuse(fn)
    return right(fn, x, w, compiled=run) or right(fn, torch.zeros_like(x), w, compiled=run)


def of_products(x, y, z):
    """(X Y)^T Z: a product with the transpose of a product's result as operand."""
    return torch.relu(x @ y).mT @ z


def transposed_operand() -> str:
    return right(of_products, rand(1, 96, 64), rand(1, 64, 80, seed=1), rand(1, 96, 64, seed=2))


def mixed(x, w):
    return (x @ w.to(F)).amax(-1)


def wide_operand() -> str:
    """A float32 operand keeps its 24 bits beside one of 16."""
    return right(mixed, rand(40, 64, dtype=F) * 1e5, rand(64, 48, seed=1))


def of_8_bits(kept: torch.dtype, to: torch.dtype) -> str:
    """What is computed from 8-bit arguments is not rounded to 8 bits: errors are those of `to`."""
    args = heads(1, 2, 33, 70, 64)
    return right(of_bytes(to), *(x.to(kept) for x in args))


def whole_bytes() -> str:
    """Products of bytes that a program multiplies in float32 are exact, and so are their sums of few."""
    x = torch.arange(40 * 70).remainder(256).sub(128).reshape(40, 70).to(torch.int8)
    w = torch.arange(50 * 70).mul(7).remainder(256).reshape(50, 70).to(torch.uint8)
    return right(multiplied_bytes, x, w, rand(50, dtype=F))


def weights_of_8_bits() -> str:
    """The other operand keeps its 16 bits."""
    return right(narrow_weights, rand(40, 64), rand(64, 48, seed=1).to(E4))


def summed(x):
    return (x * 2).sum(-1)


def given(segments: int, fn, *args) -> str:
    """Folds are cut into this many segments, or not at all (1), whatever rows of this length are worth."""
    p = trace(fn, *args).program
    made = compile_program(p, device="interpreter", given=Given(segments=segments))
    kernels = [s.name for s in made.steps]
    if any(n.endswith("_partial") for n in kernels) != (segments > 1):
        return f"the kernels are {', '.join(kernels)}"

    def compile_given(p, *, device, **options):
        return _interpreted(p, device=device, **{**options, "given": Given(segments=segments)})

    with patch.dict(vars(importlib.import_module("tilefold.frontend.fuse")), compile_program=compile_given):
        return right(fn, *args)


def long_inertia(n: int) -> str:
    """Masses of both signs, and none in whole lanes."""
    m = rand(2, n, dtype=F) + 0.5
    m[:, ::8] = 0
    return given(1, o.inertia, m, rand(2, n, 3, dtype=F, seed=1))


def long_variance() -> str:
    """One kernel, no segments."""
    return given(1, o.variance_by_hand, rand(3, 40_009, dtype=F) + 100)


def weighed(x, x_2):
    return (x[:, :, 0] * 3 + x[:, :, 1] * 5 + x[:, :, 2] * 7 + x_2).sum(-1)


def numbered() -> str:
    """The third load of x and the first of x_2 have names of their own."""
    return right(weighed, rand(5, 33, 3, dtype=F), rand(5, 33, dtype=F, seed=1))


def long_norms() -> str:
    """One compiled function on rows of a few tiles, ragged and not."""
    rows = ((rand(2, n, dtype=F), rand(n, dtype=F, seed=1)) for n in (70_000, 98_304, 40_001))
    return in_turn(o.rms_norm, rows, dynamic=True)


def dynamic_rows() -> str:
    """One compiled softmax on rows that a block holds, and on longer ones."""
    return in_turn(o.softmax, ((rand(3, n, dtype=B),) for n in (300, 2, 140_001, 40_000)), dynamic=True)


def norm_of_heads(x, g):
    """The gradients of a norm's weights and of a bias behind a map, which is written too."""
    y = g * torch.tanh(x)
    return (g * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).sum((0, 1, 2)), y, y.sum((0, 1, 2))


def sums_over_axes_of_any_length() -> str:
    """One compiled function in segments, for few sequences that are long and many that are short, heads behind them or
    before."""
    run, wrong = Fused(norm_of_heads, dynamic=True, given=Given(segments=3)), []
    calls = [(rand(*n, dtype=F), rand(*n, dtype=F, seed=1)) for n in ((2, 9, 3, 5), (7, 2, 4, 5))]
    for args in (*calls, tuple(x.transpose(1, 2) for x in calls[0])):
        found = compare(str([x.stride() for x in args]), norm_of_heads, run, args)
        wrong += [] if found.ok else [str(found)]
    return "\n".join(wrong)


def best_of_one_row() -> str:
    """One row and a number of experts that is not known: a segment may have one expert."""
    experts = [(rand(1, 64), rand(64, k, seed=1)) for k in (2, 3, 40)]
    return "".join(in_turn(o.moe_routing(2), [args], dynamic=True) for args in experts)


def side_by_side() -> str:
    """Five heads, the last two of which start side by side."""
    with patch.object(order, "FULL", 2):
        return right(o.causal, *heads(1, 5, 150, 150, 64))


def long_contraction(dynamic: bool) -> str:
    """More features than a block holds of an operand, no multiple of a tile."""
    calls = ((rand(37, n), rand(300, n, seed=1) * 0.1) for n in ((700, 1000) if dynamic else (700,)))
    return in_turn(of_logits, calls, dynamic=dynamic)


def nearest(x, y):
    """The closest point, and how far it is."""
    squares = x.square().sum(-1)[:, None] + y.square().sum(-1)[None] - 2 * (x @ y.mT)
    return squares.amin(-1), squares.argmin(-1)


def colours(m, x):
    """The largest and least colour of each pixel, which they are, and their mixtures."""
    return x.amax(1), x.argmax(1), x.argmin(1), torch.einsum("kc,bchw->bkhw", m, x) * x.amin(1, keepdim=True)


def hostile_colours() -> torch.Tensor:
    """Pixels of which colours are equal, infinite, or no numbers."""
    x = rand(2, 3, 5, 40, dtype=F).round()
    x[0, 1, 0], x[0, 2, 1], x[0, :2, 2], x[0, :, 3] = math.nan, math.inf, math.nan, -math.inf
    x[1, 0, 0], x[1, :, 1], x[1, 1:, 2] = -math.inf, math.nan, math.inf
    return x


def points(dims: int) -> str:
    return right(nearest, rand(70, dims, dtype=F), rand(130, dims, dtype=F, seed=1))


def wrong_program() -> str:
    """What a wrong kernel looks like to this script: must not be empty."""
    args = heads(1, 2, 40, 70, 64)
    found = compare("attention for causal", o.causal, fuse(o.attention), args)
    return "" if found.ok else "wrong"


def flexible(score: str | None, mask: str, *, queries: int = L) -> str:
    """`flex_attention` with a score function and a mask of torch's documentation, against torch's in float64."""
    q, k, v = heads(2, 4, queries, S, 16, kv=2)
    score_mod, block_mask = SCORES[score or "identity"], create_block_mask(MASKS[mask], 2, 4, queries, S, "cpu")
    got, aux = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    wide = (x.double() for x in (q, k, v))
    out, sums, _ = math_attention(*wide, score_mod, block_mask.as_tuple(), 0.25, {})
    off = (got - out).abs().max(), (aux.lse - sums * math.log(2)).nan_to_num(0.0, 0.0, 0.0).abs().max()
    return "" if max(off) < 4e-3 and torch.equal(aux.lse.isinf(), sums.isinf()) else f"errors {off}"


def shifted(x):
    """Differences of neighbours, and a mean of three with padding."""
    y = torch.nn.functional.pad(x, (1, 1))
    return torch.diff(x, dim=-1), (y[..., :-2] + y[..., 1:-1] + y[..., 2:]) / 3


def rotated_attention(q, k, v, c, s):
    k, v = (y.repeat_interleave(2, 1) for y in (rotated(k, c, s), v))
    return torch.softmax(rotated(q, c, s) @ k.mT * 0.2, -1) @ v


def by_hand() -> str:
    """A schedule with its blocks, warps and stages, unfused and in one pass."""
    i, j = te.dims(i=6, j=40)
    x = te.tensor("x", (i, j))
    m = te.compute("m", (i,), te.max(x[i, j], over=j))
    t = te.compute("t", (i,), te.sum(te.exp(x[i, j] - m[i]), over=j))
    p = te.program("rows", te.compute("o", (i,), t[i] + 0 * m[i]))
    one_pass = te.schedule(p).tile("m", j=16).rolling_update("t", "j").fuse("t", "o").warps("o", 8)
    given = rand(6, 40, dtype=F) * 10
    found = [te.compile(s, device="interpreter")(given) for s in (te.schedule(p), one_pass.pipeline("o", "j", 3))]
    off = [(y.double() / te.reference(p)(given).double() - 1).abs().max().item() for y in found]
    return "\n".join(f"{e:.1e}" for e in off if not e < 1e-5)


def whole_layer(width: int) -> str:
    """A decoder layer and its gradients through torch.compile, every covered part in kernels."""
    torch.manual_seed(0)
    layer, x = Layer(width, 4, 2, 3 * width), rand(2, 24, width, dtype=F)
    ways, entry = (importlib.import_module(f"tilefold.frontend.{m}") for m in ("capture.options", "torch_compile"))

    def interpreted(p, *, device, **options):
        return compile_program(p, device="interpreter", **options)

    compilations.clear()
    with patch.object(ways, "RUNNERS", {"pipeline": interpreted}):
        fast = torch.compile(layer, backend=entry.backend)
        found = zip(gradients(fast, layer, x), gradients(layer, layer, x), strict=True)
        off = [((a - b).norm() / b.norm()).item() for a, b in found]
    left = [str(f) for c in compilations for f in c.fallbacks]
    return "\n".join([*(f"{e:.1e}" for e in off if not e < 1e-5), *left])


def dropped_out(width: int) -> str:
    """A kernel's random numbers are the definition's, bit for bit."""
    torch.manual_seed(6)
    seed = seed_op(torch.device("cpu"))
    kept = random_op(seed, (3, 5, width)) < round(0.7 * LIMIT)
    torch.manual_seed(6)
    y = fuse(lambda x: F_.dropout(x, 0.3))(torch.ones(3, 5, width))
    return "" if torch.equal(y != 0, kept) and 0.6 < kept.double().mean() < 0.8 else f"{(y != 0) ^ kept}"


def dropped_scores(rows: int, columns: int) -> str:
    """The same of the numbers of 16 bits that attention's dropout draws, by kernels and by torch."""
    torch.manual_seed(6)
    seed = seed_op(torch.device("cpu"))
    want = random16_op(seed, (2, 3, rows, columns))
    found = fuse(lambda s: random16_op(s, (2, 3, rows, columns)) * 2)(seed)
    return "" if torch.equal(found, want * 2) else f"{found[0, 0]} {want[0, 0]}"


def missing_row() -> str:
    """Indices that data choose are checked, in lanes of elements: 37 of them leave lanes idle."""
    return missing(lambda w, i: w[i] * 2.0, lambda w, i: w[i + 3 - 3] * 2.0, 37)


def missing_in_a_loop() -> str:
    """The same of rows that a loop sums, in its first turn and in the ragged end: the assertion stands behind it."""
    return missing(lambda w, i: w[i].sum(0), lambda w, i: w[i + 3 - 3].sum(0), 2999)


def missing(eager: Callable[..., torch.Tensor], fn: Callable[..., torch.Tensor], count: int) -> str:
    """What is wrong with a function of rows and of so many indices into 11 of them, the first or last missing."""
    w, ids = torch.randn(11, 8), torch.arange(count) % 11
    run = fuse(fn)
    found = compare("rows", eager, run, (w, ids))
    for at in (0, count - 1):
        for row in (11, -12, 1 << 40):
            try:
                run(w, torch.where(torch.arange(count) == at, row, ids))
            except InterpreterError as err:
                if "index out of range" not in str(err):
                    return str(err)
            else:
                return f"{row} at {at} is no error"
    return "" if found.ok else str(found)


def columns(shape: tuple[int, ...], units: int) -> str:
    """Prefixes down the second last axis, as torch has them in float64."""
    wrong = []
    for kind, x in (("sum", torch.randn(shape)), ("prod", 1 + torch.randn(shape) * 0.01)):
        want = getattr(torch, f"cum{kind}")(x.double(), -2)
        got = prefixes.run(x, x.dim() - 2, kind, F, units)
        wrong += [kind] if not torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5) else []
        for turned in (prefixes.READ, prefixes.WRITTEN, prefixes.READ + prefixes.WRITTEN):
            given = x.double().flip(-2) if prefixes.READ in turned else x.double()
            want = getattr(torch, f"cum{kind}")(given, -2)
            want = want.flip(-2) if prefixes.WRITTEN in turned else want
            got = prefixes.run(x, x.dim() - 2, kind, F, units, turned)
            wrong += [] if torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5) else [f"{kind} turned {turned}"]
    whole = torch.randint(-9, 9, shape, dtype=torch.int8)
    wrong += (
        [] if torch.equal(prefixes.run(whole, -2 % len(shape), "sum", torch.int64, 1), whole.cumsum(-2)) else ["int"]
    )
    return " ".join(wrong)


def log_sums(shape: tuple[int, ...], units: int) -> str:
    """Running log-sum-exps of columns, with infinities, as eager's in float64."""
    x = rand(*shape, dtype=F) * 30
    x.flatten()[::7] = -torch.inf
    x[..., -5, ::7] = torch.inf
    want, got = x.double().logcumsumexp(-2), prefixes.run(x, x.dim() - 2, "logsumexp", F, units)
    return "" if torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5) else f"off by {(got - want).abs().nanmean()}"


def rows(shape: tuple[int, int], units: int, *kinds: str) -> str:
    """Prefixes of rows, with infinities where they are log-sum-exps, as torch has them in float64."""
    wrong = []
    logs = rand(*shape, dtype=F) * 30
    logs.flatten()[::7] = -torch.inf
    logs[-1, :3] = -torch.inf
    logs[0, shape[1] // 2] = torch.inf
    given = {"sum": rand(*shape, dtype=H), "prod": 1 + rand(*shape, dtype=F) * 0.01, "logsumexp": logs}
    for kind in kinds:
        scan = torch.logcumsumexp if kind == "logsumexp" else getattr(torch, f"cum{kind}")
        got = prefixes.run(given[kind], 1, kind, F, units)
        near = torch.allclose(got.double(), scan(given[kind].double(), 1), rtol=1e-5, atol=2e-5)
        wrong += [] if near else [kind]
    return " ".join(wrong)


def log_shares(shape: tuple[int, ...], dim: int, units: int) -> str:
    """The gradient of a running log-sum-exp, as autograd has it in float64."""
    wide, g = (rand(*shape, dtype=F) * 9).double(), rand(*shape, dtype=F, seed=2)
    wide.select(dim, shape[dim] // 2).fill_(-torch.inf)
    y = wide.requires_grad_().logcumsumexp(dim)
    (want,) = torch.autograd.grad(y, wide, g.double())
    got = prefix_gradient.run(g, wide.detach().float(), y.detach().float(), dim, "logsumexp", units)
    return "" if torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4) else f"off by {(got - want).abs().max()}"


def long_row() -> str:
    """The gradient of a running log-sum-exp that grows by equal steps, whose exponentials are rounded alike: errors of
    all steps would add up. The interpreter's do within a chunk, which it scans one place after the other."""
    y = torch.arange(400, dtype=F)[None] * (33 * 2.0**-25)  # half a unit more than float32 has below 1
    g = torch.zeros_like(y)
    g[0, -1] = 1
    want = (y.double() - y[0, -1].double()).exp()
    got = prefix_gradient.run(g, y, y, 1, "logsumexp", 132)
    return "" if torch.allclose(got.double(), want, rtol=6e-6, atol=0) else f"off by {(got - want).abs().max()}"


def factors(shape: tuple[int, ...], dim: int, units: int = 1) -> str:
    """The gradient of a running product, with zeros among its factors, as autograd has it in float64."""
    x = (rand(*shape, dtype=F) / 4 + 1) * (rand(*shape, dtype=F, seed=1) < 1.3)
    wide, g = x.double().requires_grad_(), rand(*shape, dtype=F, seed=2)
    y = wide.cumprod(dim)
    (want,) = torch.autograd.grad(y, wide, g.double())
    got = prefix_gradient.run(g, x, y.detach().float(), dim, "prod", units)
    return "" if torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4) else f"off by {(got - want).abs().max()}"


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of float32 rounded to the nearest bfloat16, as a device rounds: the interpreter cuts them off."""
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, nearest).astype(np.uint16)


def _rounds(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The interpreter's conversion of floats, with bfloat16 rounded."""

    def converted(x, of, to, mode):
        return to_bfloat16(x) if of.is_fp32() and to.is_bf16() else convert(x, of, to, mode)

    return converted


class Memory:
    """Watches that a kernel reads and writes in its tensors alone, in lanes that are not masked."""

    def __init__(self):
        self.known: list[tuple[int, int]] = []
        self.outside = 0
        self.read, self.written = _interpreter.load, _interpreter.store
        self.memory_at, self.module_of = launch.memory_at, launch.module_of

    def start(self, *args):
        self.known.clear()
        return self.module_of(*args)

    def tensor(self, address, shape, strides, dtype):
        n = 0 if 0 in shape else 1 + sum(k * (m - 1) for k, m in zip(strides, shape, strict=True))
        self.known.append((address, address + n * dtype.itemsize))
        return self.memory_at(address, shape, strides, dtype)

    def see(self, pointers, mask, dtype):
        at = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
        inside = np.zeros(at.shape, bool)
        for lo, hi in self.known:
            inside |= (at >= lo) & (at + np.dtype(dtype).itemsize <= hi)
        self.outside += int((~inside).sum())

    def load(self, pointers, mask, other, dtype):
        self.see(pointers, mask, dtype)
        return self.read(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self.see(pointers, mask, value.dtype)
        return self.written(pointers, value, mask)

    def watch(self):
        launch.memory_at, launch.module_of = self.tensor, self.start
        _interpreter.load, _interpreter.store = self.load, self.store


def unmasked() -> str:
    """A kernel without the masks of computed positions: reads outside of memory must be seen. No other check has heads
    of 18 columns: a kernel that was rendered before has its masks."""
    with patch.object(memory.Memory, "inside", lambda *a: (None, 0)):
        return right(rotated, rand(1, 2, 5, 18), rand(1, 1, 5, 18, seed=1), rand(1, 1, 5, 18, seed=2))


def strided_windows(x):
    return F_.max_pool2d(x, 3, 2, 1) + F_.avg_pool2d(x, 3, 2, 1), F_.avg_pool1d(x.flatten(1, 2), 4)


def one_channel_each(x, w, v, b):
    """Windows of one channel a group: padded and strided, long and dilated, with neighbours dropped at the end."""
    short = F_.conv2d(x, w, b, stride=(2, 1), padding=1, groups=x.shape[1])
    along = F_.conv1d(x[:, :, 0], w[:, :, 0], b, padding=2, groups=x.shape[1])[..., : x.shape[-1]]
    return short, F_.silu(F_.conv2d(x, v, padding=4, dilation=2, groups=x.shape[1])), along


def of_tables(x, places, a, b, c, d):
    """Rows of tables beside one that is computed: a part of the stack each."""
    rows = (t[places[:, n]] for n, t in enumerate((a, b, c, d)))
    return torch.stack([x.relu(), *rows], 1) * 2.0


def many_parts() -> str:
    tables = [rand(20, 48, dtype=F, seed=n) for n in range(4)]
    return right(of_tables, rand(37, 48, dtype=F), torch.arange(37 * 4).reshape(37, 4) % 20, *tables)


def concatenated_channels() -> str:
    """Normalised channels of parts, whole vectors and not."""

    def joined(w, *parts):
        return torch.relu(torch.cat(parts, 1) * torch.rsqrt(w + 1.0))

    return "".join(
        right(joined, rand(sum(n), seed=9).abs(), *(rand(53, k, dtype=B, seed=j) for j, k in enumerate(n)))
        for n in ((64, 32, 32, 32, 32), (64, 32, 96, 40), (64, 33, 32, 32, 32))
    )


def concatenated_twice() -> str:
    """Parts of a concatenation in another one."""

    def joined(x, a, b, s):
        both = torch.cat([a, b.exp()], 1)
        return torch.cat([x, both, both * s, both / (s.abs() + 1)], 1)

    return right(joined, *(rand(37, 64, dtype=F, seed=n) for n in range(3)), rand(37, 1, dtype=F, seed=4))


def turned_pairs(x, c, s):
    """Rotary embedding of neighbours; c, s: an angle a pair."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def turned_neighbours(x, c, s):
    """The same, an angle an element."""
    return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


def two_by_two() -> str:
    """Even and odd numbers of pairs, gates beside what they gate, the last element without another, points."""
    said = ""
    for n in (16, 26):
        x, c, s = rand(2, 5, 3, n, dtype=B), rand(5, 1, n // 2, dtype=F, seed=1), rand(5, 1, n // 2, dtype=F, seed=2)
        said += right(turned_pairs, x, c, s) + right(turned_neighbours, x, *(y.repeat(1, 1, 2) for y in (c, s)))
        said += right(lambda x: F_.silu(x[..., ::2]) * (x[..., 1::2] + 1), x)
    said += right(lambda x: x[..., ::2] * 2.0, rand(7, 27, dtype=B)) + right(
        lambda x: x[..., 1::2].sum(-1), rand(7, 27)
    )
    for n in (16, 11):  # of values with an axis for which one of a pair they are
        x, c, s = rand(3, 8, 2, 5, n, dtype=B), rand(5, n, dtype=F, seed=1), rand(5, n, dtype=F, seed=2)
        said += right(lambda x: (x - x.mean(1, keepdim=True)).exp().movedim(2, -1).flatten(-2), x)
        x, c, s = (y.repeat_interleave(2, -1) for y in (x, c, s))
        said += right(lambda x, c, s: torch.cat((x[:, :, :1], turned_neighbours(x, c, s)[:, :, 1:]), 2), x, c, s)
    return said + right(lambda p: p[:, 0] ** 2 + p[:, 1] ** 2, rand(77, 2, dtype=F))


def on_one_axis_each() -> str:
    """Maps over two dims as one, over three, and over all: pixels made of channels, numbers of channels, images made
    larger, an operand that is transposed, several results. (Other sizes each time, for kernels are kept.)"""
    b, said = rand(2, dtype=F, seed=1), ""

    def some(n: int):
        def chosen(block, near, seconds, worth):
            ways = list(one_axis.on_one_axis(block, near))
            looked_at.append(len(ways))
            return ways[min(n, len(ways) - 1)] if ways else (block, ())

        return chosen

    for n in (0, 2):
        looked_at: list[int] = []
        with patch.multiple(launch, best_axes=some(n), loses=lambda *_: True):
            said += right(lambda x, b: torch.tanh(F_.pixel_shuffle(x, 3) + b[:, None, None]), rand(3 + n, 18, 5, 7), b)
            said += right(lambda x, b: (x * b[:, None, None], x + x.mT), rand(3 + n, 2, 9, 9, dtype=F), b)
            said += right(lambda x: F_.interpolate(x, (9, 11), mode="bilinear"), rand(2 + n, 3, 5, 7, dtype=F))
        said += "" if max(looked_at) > n else f"nothing over {n + 2} dims; "
        torch._dynamo.reset()
    return said


def windows() -> str:
    """Of images whose rows are no multiple of a vector."""
    x, b = rand(2, 5, 9, 13, dtype=F), rand(5, dtype=F, seed=3)
    w, v = rand(5, 1, 3, 3, dtype=F, seed=1), rand(5, 1, 5, 5, dtype=F, seed=2)
    framed = right(lambda x: F_.pad(torch.relu(x) * 2, (1, 1, 2, 0)), x)  # of 0 it is 0, of which these are not
    framed += right(lambda x: F_.pad(torch.exp(x), (1, 1, 2, 0)), x) + right(lambda x: F_.pad(x + 1, (1, 1)), x)
    return framed + right(strided_windows, x) + right(one_channel_each, x, w, v, b)


def written_by_segments() -> str:
    """A map that the segments of a sum write, the last of which are shorter."""

    def both(x, y):
        s = x + y
        return s, (s * y).sum((0, 1))

    args = rand(3, 929, 24, dtype=F), rand(3, 929, 24, dtype=F, seed=1)
    p = trace(both, *args).program
    compiled = compile_program(p, device="interpreter", given=Given(segments=4))
    found = compiled(dict(zip((i.name for i in p.inputs), args, strict=True)), {})
    wrong = [n for n, x in zip(p.outputs, both(*args), strict=True) if not torch.allclose(found[n], x, atol=1e-3)]
    return f"{', '.join(wrong)} differ" if wrong else "" if len(compiled.steps) == 2 else "it is not cut"


def batch_norm_in_segments() -> str:
    """Segments of the rows of each image, the last ones shorter: statistics and a gradient's sums, channels last, also
    with the gradient written."""

    def statistics(x):
        return torch.var_mean(x, (0, 1, 2), correction=0)

    def sums(g, y, x, m):
        d = torch.where(y <= 0, 0.0, g)
        return d.sum((0, 1, 2)), (d * (x - m)).sum((0, 1, 2))

    def ends(y, g, h, x):
        d = torch.where(y <= 0, 0.0, g + h)
        return d, d.float().sum((0, 1, 2)), (d * x).float().sum((0, 1, 2))

    images = (rand(3, 14, 14, 33, dtype=B, seed=n) for n in range(4))
    x, g, y = (rand(7, 21, 9, 5, dtype=F, seed=n) for n in range(3))
    said = given(6, ends, *images) + given(8, ends, *(rand(2, 20, 17, 70, dtype=F, seed=n) for n in range(4)))
    said += given(28, statistics, x) + given(28, statistics, x + 1e5) + given(63, sums, g, y, x, x.mean((0, 1, 2)))
    return said + given(35, sums, g, y, torch.full_like(x, 1e4), x.mean((0, 1, 2)))


def masked_by_the_least() -> str:
    """Keys are masked by the least number of the type: those of the first tiles, and a row's (the values' mean)."""
    q, k, v = (x.to(B) for x in heads(1, 2, 33, 300, 64))
    seen = torch.arange(300) >= 5 * torch.arange(33)[:, None] + 100
    seen[7] = False

    def attention(q, k, v, seen):
        s = q @ k.mT * 0.125
        return torch.softmax(torch.where(seen, s, torch.finfo(s.dtype).min), -1) @ v

    def added(q, k, v, mask):
        return torch.softmax(q @ k.mT * 0.125 + mask, -1) @ v

    mask = torch.zeros(33, 300, dtype=B).masked_fill(~seen, torch.finfo(B).min)
    x = rand(9, 6000).to(B)
    x[:, :5000], x[3] = torch.finfo(B).min, torch.finfo(B).min
    said = right(attention, q, k, v, seen) + right(added, q, k, v, mask, hostile=False)
    return said + right(lambda x: torch.softmax(x, -1), x, hostile=False)


def masked_by(value: float, dtype: torch.dtype, *, added: bool = False, wide: bool = False) -> str:
    """Keys before a window are masked by a number, or by one that is added: those of the first tiles, and a row's.
    wide: scores are float32."""
    q, k, v = (x.to(dtype) for x in heads(1, 2, 33, 300, 64))
    seen = torch.arange(300) >= 5 * torch.arange(33)[:, None] + 100
    seen[7] = math.isinf(value)

    def attention(q, k, v, mask):
        s = (q @ k.mT).float() if wide else q @ k.mT
        s = s * 0.1 + mask if added else torch.where(mask, s * 0.1, value)
        return torch.softmax(s, -1).to(v.dtype) @ v

    scores = torch.float32 if wide else dtype
    mask = torch.zeros(33, 300).masked_fill(~seen, value).to(scores) if added else seen
    return right(attention, q, k, v, mask)


def as_compiled(*checks: Check) -> str:
    """The checks again, with products that sums read not rounded."""
    said = ""
    for first in ("left", "right"):
        with contracted(first):
            said += "".join(check() for check in checks)
        torch._dynamo.reset()
    return said


def far_from_zero() -> str:
    """Scores far from 0 in float32, scaled, and a state that is rescaled from one maximum to another."""
    x = rand(5, 6000, dtype=F) * 30 + torch.tensor([1e3, -1e5, 1e6, -3e9, 1e12])[:, None]
    x[:, -1] += 40
    return right(lambda x: torch.softmax(x * 0.5, -1), x) + right(lambda x: torch.softmax(x, -1), x.to(B))


def largest_shares() -> str:
    """What is compared with a row's exponentials, of multiples of elements, is none of them: 1 over their sum. Checked
    row by row, whose exponents are up to 45; and rows that are far from 0."""

    def largest(x):
        return torch.softmax(x * 10.0, -1).amax(-1)

    said = "".join(right(largest, rand(1, 2000, dtype=F, seed=i)) for i in range(6))
    return said + right(largest, rand(4, 60, dtype=F) * torch.tensor([1e4, 1e8, 1e20, 1e37])[:, None])


def gradients_of_padding() -> str:
    """Queries of padding see nothing, as in DeBERTa: masked by the least number, forward and backward in kernels."""
    q, k, v = (x.to(B) for x in heads(1, 2, 70, 300, 64))
    seen = (torch.arange(70) < 50)[:, None] & (torch.arange(300) >= 200)

    def attention(q, k, v):
        s = (q @ k.mT * 0.125).masked_fill(~seen, torch.finfo(q.dtype).min)
        return torch.softmax(s, -1) @ v

    return trained(attention, q, k, v)


def gradients_of_lines() -> str:
    """A causal convolution of one channel each, as state spaces have in front, in either order of memory."""

    def rows(x, w, b):
        y = F_.conv1d(x.mT, w, b, padding=3, groups=x.shape[2])[..., : x.shape[1]]
        return F_.silu(y).mT

    def planes(x, w):
        return torch.tanh(F_.conv1d(x, w, padding=1, groups=x.shape[1]))

    w, b = rand(40, 1, 4, dtype=B, seed=1), rand(40, dtype=B, seed=2)
    said = trained(rows, rand(3, 37, 40, dtype=B), w, b)
    return said + trained(planes, rand(2, 24, 51, dtype=B), rand(24, 1, 3, dtype=B, seed=1))


def trained(fn, *args) -> str:
    """What of a function's result and gradients, forward and backward in kernels, is further off than eager's."""
    ways, entry = (importlib.import_module(f"tilefold.frontend.{m}") for m in ("capture.options", "torch_compile"))

    def made(run, *args):
        y = run(*args)
        g = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, args, g)]

    def leaves(dtype):
        return [x.detach().to(dtype).requires_grad_() for x in args]

    with patch.object(ways, "RUNNERS", {"pipeline": _interpreted}):
        found = made(torch.compile(fn, backend=entry.backend), *leaves(args[0].dtype))
    exact, plain = made(fn, *leaves(F)), made(fn, *leaves(args[0].dtype))
    off = [((a - e).norm() / e.norm(), (b - e).norm() / e.norm()) for a, b, e in zip(found, plain, exact, strict=True)]
    return "".join(f"{a:.1e} (eager {b:.1e}) " for a, b in off if not a <= 2 * b + 1e-6)


def near(fn, x) -> str:
    """With sums of what neighbours share written out, as they are where there are many places."""
    with patch.object(near_sums, "PLACES", 0):
        return right(fn, x)


def scaled_in_place() -> str:
    """Several steps of a thread block, the last of them ragged."""
    wrong = []
    for dtype, factor in itertools.product((F, B, torch.float64), (1.0, -0.5, math.nan)):
        x = rand(3 * 4096 + 7, dtype=dtype)
        found = scale.run(x.clone(), torch.tensor(factor), 1)
        wrong += [] if torch.allclose(found, x * factor, equal_nan=True) else [f"{dtype} times {factor}"]
    return ", ".join(wrong)


def rows_added() -> str:
    """Rows that share a row of a table, and such that do not; fewer and more of them than the table has."""
    wrong = []
    for dtype, (n, k, width) in itertools.product((F, B, torch.float64), ((50, 33, 6), (7, 300, 1), (40, 40, 1500))):
        table, rows = rand(n, width, dtype=dtype), rand(k, width, dtype=dtype, seed=1)
        at = torch.randint(-n, n, (k,), generator=torch.Generator().manual_seed(2))
        for skipped in (-1, 2):
            kept = at % n != skipped
            want = table.double().index_add(0, (at % n)[kept], rows.double()[kept])
            got = added_rows.run(table.clone(), at, rows, skipped, checked=True)
            tolerance = torch.finfo(dtype).eps  # rounded once, and sums in float32
            right_ = torch.allclose(got.double(), want, rtol=tolerance, atol=1e-5 if dtype is not torch.float64 else 0)
            wrong += [] if right_ else [f"{dtype} {n}"]
    try:
        added_rows.run(torch.zeros(3, 4), torch.tensor([0, 3]), torch.ones(2, 4), -1, checked=True)
    except InterpreterError:
        return ", ".join(wrong)
    return ", ".join([*wrong, "an index out of range is no error"])


CHECKS: dict[str, Check] = {
    "products of odd depths": odd_depths,
    "states that wait to be stored": lambda: right(each_state, rand(7, 50, dtype=F), rand(7, 50, dtype=F, seed=1)),
    "summed states": lambda: right(
        summed_states, rand(9, 2, 5, dtype=F), rand(5, 16, dtype=F), rand(9, 2, 16, dtype=F)
    ),
    "elements two by two": two_by_two,
    "maps on one axis": on_one_axis_each,
    "masked by the least number": masked_by_the_least,
    "masked by the least number, as compiled": lambda: as_compiled(masked_by_the_least),
    "masked by -1e9, as compiled": lambda: as_compiled(
        lambda: masked_by(-1e9, B), lambda: masked_by(-1e9, H, added=True, wide=True)
    ),
    "masked by -2e8, as compiled": lambda: as_compiled(lambda: masked_by(-2e8, H, wide=True)),
    "masked by -65504, as compiled": lambda: as_compiled(lambda: masked_by(-65504.0, H, added=True)),
    "masked by -1e30, added, as compiled": lambda: as_compiled(lambda: masked_by(-1e30, B, added=True)),
    "masked by infinity, as compiled": lambda: as_compiled(lambda: masked_by(-math.inf, B, added=True)),
    "gradients of padding, as compiled": lambda: as_compiled(gradients_of_padding),
    "gradients of lines, as compiled": lambda: as_compiled(gradients_of_lines),
    "far from zero, as compiled": lambda: as_compiled(far_from_zero),
    "largest shares": largest_shares,
    "largest shares, as compiled": lambda: as_compiled(largest_shares),
    "scaled in place": scaled_in_place,
    "rows added to a table": rows_added,
    "sums by keys": keyed_sums,
    "written by segments": written_by_segments,
    "batch norm in segments": batch_norm_in_segments,
    "powers in quarters": lambda: right(lambda x: (x * x + 1) ** 0.75 + (x.abs() + 2) ** -1.25, rand(7, 40, dtype=F)),
    "windows": windows,
    "many parts": many_parts,
    "channels that are concatenated twice": concatenated_twice,
    "concatenated channels": concatenated_channels,
    "a wrong program": wrong_program,
    "scheduled by hand": by_hand,
    "causal, ragged": lambda: right(o.causal, *heads(1, 2, 67, 67, 64)),
    "causal, heads side by side": side_by_side,
    "causal, more keys than queries": lambda: right(o.causal, *heads(1, 2, 20, 83, 64)),
    "causal, fewer keys than queries": lambda: right(o.causal, *heads(1, 1, 83, 20, 64)),
    "attention, hostile": lambda: case("H-small", hostile=True),
    "attention, float32": lambda: right(o.attention, *(x.float() for x in heads(1, 2, 33, 70, 32))),
    "attention, bfloat16": lambda: right(o.causal, *(x.to(B) for x in heads(1, 2, 33, 70, 64))),
    "attention of e4m3 in bfloat16": lambda: of_8_bits(E4, B),
    "attention of e5m2 in float16": lambda: of_8_bits(E5, H),
    "attention of e4m3 in float32": lambda: of_8_bits(E4, F),
    "weights of 8 bits": weights_of_8_bits,
    "bytes": whole_bytes,
    "what is counted one by one": lambda: right(
        lambda x, t: F_.cross_entropy(x, t, label_smoothing=0.1), rand(7, 33, dtype=F), whole(30)[0, :7].abs()
    ),
    "a product in float32 of fp16": lambda: right(squares, rand(40, 64) * 100, rand(64, 48)),
    "a product of what fp16 does not hold": lambda: right(large_norm, rand(40, 64) * 999, rand(64) * 300, rand(64, 48)),
    "head dim 80": lambda: case("H-small-80"),
    "head dims 192 and 128": lambda: right(o.attention, *heads(1, 1, 20, 70, 192, value=128)),
    "head dim 90": lambda: right(o.attention, *heads(1, 1, 20, 70, 90)),
    "head dim 40": lambda: right(o.attention, *heads(1, 1, 20, 70, 40)),
    "one query and one key": lambda: right(o.attention, *heads(2, 2, 1, 1, 64)),
    "no batch": lambda: right(o.attention, *heads(0, 2, 8, 8, 64)),
    "grouped decode": lambda: case("gqa-decode-67"),
    "grouped decode in segments": lambda: right(o.gqa, *heads(1, 8, 1, 1300, 64, kv=2)),
    "grouped prefill": lambda: case("gqa-prefill-67"),
    "latent attention": lambda: case("L-small"),
    "window": lambda: case("window-prefill-67"),
    "soft cap": lambda: case("softcap-prefill-67"),
    "gradients of keys": lambda: right(backward.keys(backward.causal), *of_keys(70, 70, 64), hostile=False),
    "gradients of keys by features": lambda: right(
        backward.keys(backward.softcap, turned=True), *of_keys(45, 70, 32), hostile=False
    ),
    "alibi": lambda: case("alibi-prefill-67"),
    "routing to one expert, ties": lambda: ties(1),
    "routing to eight experts, ties": lambda: ties(8),
    "variance in segments": lambda: given(7, o.variance_by_hand, rand(2, 5003, dtype=F)),
    "inertia in segments": lambda: given(7, o.inertia, rand(2, 9001, dtype=F) + 2, rand(2, 9001, 3, dtype=F, seed=1)),
    "inertia": lambda: case("I-small", hostile=True),
    "three columns, of one tensor": lambda: given(5, lambda x: x.mean(0), rand(20_011, 3, dtype=F) + 100),
    "three columns, which are read again": lambda: right(
        lambda x: x - x.logsumexp(1, keepdim=True), rand(5, 2011, 3, dtype=F), hostile=True
    ),
    "inertia of long rows": lambda: long_inertia(20_000),
    "inertia of long rows, ragged": lambda: long_inertia(9_001),
    "variance of long rows": long_variance,
    "names that numbers follow": numbered,
    "softmax of long rows": lambda: right(o.softmax, rand(2, 40_009, dtype=F)),
    "softmax of long rows, a whole number of tiles": lambda: right(o.softmax, rand(2, 65_536, dtype=F)),
    "RMS norm of long rows, lengths": long_norms,
    "softmax of rows of any length": dynamic_rows,
    "sums over axes of any length": sums_over_axes_of_any_length,
    "nearest points of 3 coordinates": lambda: points(3),
    "nearest points of 12 coordinates": lambda: points(12),
    "a long contraction in a streamed loop": lambda: long_contraction(False),
    "a long contraction of dynamic length": lambda: long_contraction(True),
    "a long contraction of float32": lambda: right(of_logits, rand(20, 700, dtype=F), rand(300, 700, dtype=F, seed=1)),
    "routing by groups": lambda: right(
        top_of_groups, rand(21, 40, dtype=F), rand(40, 12, dtype=F, seed=1), rand(12, dtype=F, seed=2)
    ),
    "routing of one row, any number of experts": best_of_one_row,
    "softmax of rows in pieces": lambda: right(o.softmax, rand(3, 1100, dtype=B)),
    "maxima of normalised rows in pieces": lambda: right(o.rms_norm_max, rand(5, 2570)),
    "softmax of one element": lambda: right(o.softmax, rand(3, 1, dtype=F)),
    "sums of nothing": lambda: right(summed, rand(3, 0, dtype=F)),
    "softmax of no rows": lambda: right(o.softmax, rand(0, 7, dtype=F)),
    "RMS norm and maximum": lambda: case("rmsnorm-max-5x517", hostile=True),
    "L2 norm in segments": lambda: given(7, o.l2_norm, rand(1, 20_001)),
    "performer": lambda: case("performer-70", hostile=True),
    "performer with panels that no block holds": lambda: right(
        o.performer, *(rand(2, 300, 16, seed=n) for n in range(3)), rand(256, 16, seed=3)
    ),
    "softmax of long narrow rows, a whole number of tiles": lambda: right(o.softmax, rand(2, 131_072, dtype=B)),
    "routing to two of six experts": lambda: right(
        o.moe_routing(2), rand(21, 64, dtype=B), rand(64, 6, dtype=B, seed=1)
    ),
    "8-bit products": lambda: case("Q-small"),
    "sliced tensors": sliced,
    "lengths by marked axes": lambda: lengths(False),
    "lengths of a wholly symbolic program": lambda: lengths(True),
    "a transposed product as operand": transposed_operand,
    "float32 beside float16": wide_operand,
    "rotary positions": lambda: right(
        rotated, rand(1, 2, 5, 16), rand(1, 1, 5, 16, seed=1), rand(1, 1, 5, 16, seed=2), hostile=True
    ),
    "soft cap in a window": lambda: flexible("soft cap", "sliding window"),
    "relative bias, rows that attend nothing": lambda: flexible("relative bias", "empty rows"),
    "a neighbourhood of an image": lambda: flexible(None, "neighbourhood of an image"),
    "one query of padded batches": lambda: flexible("ALiBi", "padding", queries=1),
    "neighbours and padding": lambda: right(shifted, rand(3, 37, dtype=F), hostile=True),
    "attention of rotated heads": lambda: right(
        rotated_attention,
        *heads(1, 4, 9, 9, 32, kv=2),
        *(rand(1, 1, 9, 32, seed=n) for n in (3, 4)),
    ),
    "a layer and its gradients": lambda: whole_layer(64),
    "a wide layer and its gradients": lambda: whole_layer(768),
    "a gather": lambda: right(lambda w, i: w[i] * 2.0, rand(11, 8, dtype=F), torch.tensor([3, 0, 10, 10, 7])),
    "an image at places of a flow": lambda: right(warped, rand(2, 5, 7, 21, dtype=F), rand(2, 7, 21, dtype=F) * 9),
    "rows of odd lengths": lambda: "".join(
        right(distances, *(rand(1100, n, dtype=d, seed=i) for i in range(3))) for n, d in ((37, B), (129, F))
    ),
    "weights of four bits": lambda: right(
        of_four_bits, whole(127, torch.uint8), rand(16, dtype=F), rand(96, dtype=F, seed=1)
    ),
    "what is around each pixel": lambda: near(contrast, rand(1, 1, 9, 64, dtype=F)),
    "pairs of an ensemble": lambda: near(spread, rand(2, 9, 301, dtype=F)),
    "reads outside of memory": unmasked,
    "five heads a key": lambda: right(repeated_heads(5, spread=False), *heads(2, 10, 1, 70, 32, kv=2)),
    "three heads a key, several rows": lambda: right(repeated_heads(3, spread=True), *heads(1, 6, 5, 70, 32, kv=2)),
    "folds down columns": lambda: cut(down_columns, rand(300, 70, dtype=F)),
    "neighbours in two coordinates": lambda: right(neighbours, rand(200, 2, dtype=F), rand(200, 2, dtype=F, seed=1)),
    "sums of pairs of a row": lambda: right(quantile_loss, *(rand(3, 200, dtype=F, seed=n) for n in range(3))),
    "planes of three colours": lambda: right(colours, rand(3, 3, dtype=F), hostile_colours()),
    "folds down a middle dim": lambda: right(
        lambda x: (x.amax(1), x.argmax(1), *x.min(1)), (rand(3, 300, 37, dtype=F) * 2).round()
    ),
    "sums of images": lambda: cut(of_images, rand(9, 5, 13, 24, dtype=F)),
    "sums of images, channels last": lambda: cut(
        of_images, rand(9, 40, 13, 7, dtype=F).contiguous(memory_format=torch.channels_last)
    ),
    "pixels times weights of channels in groups": lambda: right(
        of_pixels, rand(3, 5, 7, 40, dtype=B), rand(3, 8, 40, 1, 1, dtype=B, seed=1), rand(3, 8, seed=2)
    ),
    "sums of everything": lambda: cut(lambda x: (x.sum(), x.argmax()), rand(300, 300, dtype=F)),
    "a softmax down long columns": lambda: cut(lambda x: x.softmax(0), rand(3000, 40, dtype=F)),
    "a softmax down short columns": lambda: right(lambda x: x.softmax(1), rand(3, 60, 70, dtype=F)),
    "scaled weights of 8 bits": lambda: right(
        lambda x, w, s: (x @ w.to(x.dtype)) * s, rand(40, 96, dtype=B), whole(127, torch.int8), rand(80, dtype=B)
    ),
    "bits and quotients of integers": lambda: right(
        lambda x: (x ^ (x >> 3) & 0xFFFFFFFF, x * 2654435761 & 0xFFFFFFFF, torch.div(x, 7, rounding_mode="trunc")),
        whole(2**40),
    ),
    "integers multiplied in float32": lambda: right(
        lambda x, w: (x.float() @ w.float()).relu(), rand(40, 96, dtype=B), whole(100_000, torch.int32)
    ),
    "one-hot rows times a matrix": lambda: right(
        lambda t, w: (t[:, None] == torch.arange(w.shape[0])).long().to(w.dtype) @ w,
        whole(50)[0],
        rand(60, 80, dtype=B),
    ),
    "a row times a matrix": lambda: cut(lambda x, w: torch.relu(x @ w), rand(1, 300, dtype=F), rand(300, 70, dtype=F)),
    "prefixes of rows": lambda: rows((3, 301), 132, "sum", "prod", "logsumexp"),
    "prefixes of rows, several a block": lambda: rows((21, 70), 1, "sum", "logsumexp"),
    "prefixes of rows, in chunks": lambda: rows((2, 4501), 1, "logsumexp"),
    "prefixes of rows, in blocks": lambda: rows((2, 4501), 132, "sum", "logsumexp"),
    "running sums of columns": lambda: columns((2, 150, 40), 132),
    "running sums of columns, few blocks": lambda: columns((70, 33), 1),
    "gradients of running log-sum-exps of long rows": long_row,
    "gradients of running products of rows": lambda: factors((10, 150), 1),
    "gradients of running products of columns": lambda: factors((2, 23, 40), 1),
    "gradients of running products of columns, in blocks": lambda: factors((2, 200, 40), 1, 132),
    "running log-sum-exps of columns": lambda: log_sums((2, 150, 40), 132),
    "gradients of running log-sum-exps of rows": lambda: log_shares((3, 2100), 1, 132),
    "gradients of running log-sum-exps of columns, in blocks": lambda: log_shares((2, 200, 40), 1, 132),
    "gradients over logits": lambda: over_logits(24, 1500),
    "rows that do not exist": missing_row,
    "an index that does not exist in a loop": missing_in_a_loop,
    "distances of pairs": lambda: "".join(
        right(lambda x, y, f=f: f(x[:, :, None] - y[:, None]), rand(2, n, d, dtype=F), rand(2, m, d, dtype=F, seed=1))
        for f in (lambda x: (x * x).sum(-1).sqrt(), lambda x: x.abs().amax(-1), lambda x: x.abs().sum(-1).sum(1))
        for n, m, d in ((37, 51, 20), (3, 200, 33), (64, 32, 8))
    ),
    "dropout": lambda: dropped_out(64),
    "dropout of ragged rows": lambda: dropped_out(37),
    "dropout of scores": lambda: dropped_scores(21, 37),
    "conditions that are numbers": lambda: right(
        lambda x: (x.amax(1, True) * (torch.arange(1) < 1), x.sum(0)), rand(1, 70)
    ),
    "transposed": lambda: right(lambda x, y: (x.T + y).relu(), rand(300, 70), rand(70, 300, seed=1)),
    "functions of numbers near zero": lambda: "".join(
        right(lambda x, f=f: f(x) * 2, rand(5, 70, dtype=F) * scale)
        for f in (torch.tanh, torch.expm1, torch.log1p)
        for scale in (1e-9, 1e-4, 0.1)
    ),
    "rows of a thread's own in vectors": lambda: in_vectors((20011, 24), (4096, 22)) + in_vectors((20011, 32), dtype=B),
    "functions of statistics": lambda: "".join(
        right(f, rand(5, 70, dtype=F) * 4)
        for f in (
            lambda x: torch.erfinv(x.tanh() * 0.99),
            lambda x: torch.lgamma(x.abs() + 0.01),
            lambda x: torch.digamma(x.abs() + 0.01),
            torch.lgamma,
        )
    ),
    "lines of windows": lambda: lines_of_windows(9) + lines_of_windows(14),
    "functions of hostile numbers": lambda: "".join(
        right(lambda x, f=f: f(x) * 2, rand(5, 70, dtype=F) * 9, hostile=True) for f in (torch.tanh, torch.log1p)
    ),
}


#: Kernels whose tensors the watch is not told.
UNWATCHED = (
    "gradients of running products of rows",
    "gradients of running products of columns",
    "gradients of running products of columns, in blocks",
    "gradients of running log-sum-exps of long rows",
    "gradients of running log-sum-exps of rows",
    "gradients of running log-sum-exps of columns, in blocks",
    "running log-sum-exps of columns",
    "prefixes of rows",
    "prefixes of rows, several a block",
    "prefixes of rows, in chunks",
    "prefixes of rows, in blocks",
    "running sums of columns",
    "running sums of columns, few blocks",
    "scaled in place",
    "rows added to a table",
)


def main() -> None:
    """All checks."""
    warnings.simplefilter("ignore")
    module = importlib.import_module("tilefold.frontend.fuse")  # the function `fuse` hides it as an attribute
    vars(module)["compile_program"] = _interpreted
    interpreter._convert_float = _rounds(interpreter._convert_float)
    watched = Memory()
    watched.watch()
    for name, check in CHECKS.items():
        watched.outside = 0
        try:
            said = check()
        except (
            TilefoldError,
            ArithmeticError,
            AssertionError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as err:
            said = f"{type(err).__name__}: {err}"
        if watched.outside and name not in UNWATCHED:
            said += f"{watched.outside} elements outside of memory are read or written"
        print(json.dumps({name: said}), flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
