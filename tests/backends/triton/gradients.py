"""The two kernels of attention's backward as programs: queries that own dQ, keys that own dK and dV."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tilefold.block.ir import Block
from tilefold.block.text import parse, show
from tilefold.frontend.fuse import trace
from tilefold.frontend.operators.random import random16_op
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.hardware import gpu_named
from tilefold.plan.targets.gpu import GpuTarget

B, F = torch.bfloat16, torch.float32
SEED = ((2,), torch.int64)
Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | float]]


def plain(s, i, j):
    """A score and its derivative."""
    return s, 1.0


def causal(s, i, j):
    return torch.where(j <= i, s, float("-inf")), 1.0


def window(s, i, j):
    return torch.where((j <= i) & (j > i - 100), s, float("-inf")), 1.0


def softcap(s, i, j):
    t = torch.tanh(s / 20)
    return torch.where(j <= i, 20 * t, float("-inf")), 1 - t * t


def alibi(s, i, j):
    return torch.where(j <= i, s + 0.05 * (j - i), float("-inf")), 1.0


def _lift(score: Score, q, k, v, g, lse, delta):
    """Probabilities and the gradient of what the queries and keys are multiplied to."""
    i, j = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)
    factor = q.shape[-1] ** -0.5
    s, slope = score((q @ k.mT).float() * factor, i, j)
    p = torch.exp(s - lse)
    return p, p * ((g @ v.mT).float() - delta) * slope * factor


def _dropped(p, dp, seed):
    """Probabilities and their gradients where a tenth was dropped."""
    kept = random16_op(seed, list(p.shape)) < 58982
    return p * kept * (1 / 0.9), dp * (kept.float() * (1 / 0.9))


def dropped_queries(q, k, v, g, o, lse, seed):
    """dQ of causal attention with dropout."""
    i, j = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)
    p = torch.exp(torch.where(j <= i, (q @ k.mT).float() * 0.1, float("-inf")) - lse[..., None])
    _, dp = _dropped(p, (g @ v.mT).float(), seed)
    delta = (g.float() * o.float()).sum(-1, keepdim=True)
    return (p * (dp - delta) * 0.1).to(q.dtype) @ k, delta


def dropped_keys(q, k, v, g, lse, delta, seed):
    """dK and dV of the same."""
    i, j = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)
    p = torch.exp(torch.where(j <= i, (q @ k.mT).float() * 0.1, float("-inf")) - lse[..., None])
    kept, dp = _dropped(p, (g @ v.mT).float(), seed)
    return (p * (dp - delta[..., None]) * 0.1).to(q.dtype).mT @ q, kept.to(q.dtype).mT @ g


def queries(score: Score):
    """dQ, and the sums that the other kernel reads."""

    def fn(q, k, v, g, o, lse):
        delta = (g.float() * o.float()).sum(-1, keepdim=True)
        _, d = _lift(score, q, k, v, g, lse[..., None], delta)
        return d.to(q.dtype) @ k, delta

    return fn


def sloped_queries(q, k, v, g, o, lse, slopes):
    """dQ of ALiBi with a slope a head, and the slopes' gradient, a sum a row."""
    i, j = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)
    s = (q @ k.mT).float() * 0.1 + 0.01 * slopes.view(-1, 1, 1) * (j - i)
    delta = (g.float() * o.float()).sum(-1, keepdim=True)
    d = torch.exp(torch.where(j <= i, s, float("-inf")) - lse[..., None]) * ((g @ v.mT).float() - delta)
    return (d * 0.1).to(q.dtype) @ k, delta, (d * (j - i)).sum(-1)


def keys(score: Score, *, turned: bool = False):
    """dK, in memory by features if it is `turned`, and dV."""

    def fn(q, k, v, g, lse, delta):
        p, d = _lift(score, q, k, v, g, lse[..., None], delta[..., None])
        d = d.to(q.dtype)
        return (q.mT @ d if turned else d.mT @ q), p.to(q.dtype).mT @ g

    return fn


def guarded(q, k, v, g, top, total, delta):
    """dK and dV from a maximum and a sum, which rows without a key have as -inf and 0."""
    i, j = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1), torch.arange(k.shape[-2], device=q.device)
    s = torch.where(j <= i, (q @ k.mT).float() * 0.1, float("-inf"))
    shift, divisor = torch.where(top == float("-inf"), 0.0, top), torch.where(total == 0.0, 1.0, total)
    p = torch.exp(s - shift[..., None]) / divisor[..., None]
    d = p * ((g @ v.mT).float() - delta[..., None]) * 0.1
    return d.to(q.dtype).mT @ q, p.to(q.dtype).mT @ g


def arguments(rows: int, columns: int, dim: int, numbers: int, *, saved: bool = False, dtype: torch.dtype = B):
    """Shapes and types: q, k, v, g, with the forward's result if it is `saved`, and so many numbers a query."""
    q, k, row = ((1, 2, n, dim) for n in (rows, columns, rows))
    return [(q, dtype), (k, dtype), (k, dtype), (row, dtype), *[(q, dtype)] * saved, *[((1, 2, rows), F)] * numbers]


#: Name -> function, shapes and types of its arguments.
GRADIENTS = {
    "queries, causal": (queries(causal), arguments(333, 333, 128, 1, saved=True)),
    "queries, full, fewer than keys": (queries(plain), arguments(130, 200, 64, 1, saved=True, dtype=torch.float16)),
    "queries, window": (queries(window), arguments(300, 300, 64, 1, saved=True)),
    "queries, soft cap": (queries(softcap), arguments(200, 200, 64, 1, saved=True)),
    "keys, causal": (keys(causal), arguments(333, 333, 128, 2)),
    "keys, causal, by features": (keys(causal, turned=True), arguments(333, 333, 64, 2)),
    "keys, full, fewer than queries": (keys(plain), arguments(200, 130, 64, 2, dtype=torch.float16)),
    "keys, causal, more than queries": (keys(causal), arguments(130, 300, 64, 2)),
    "keys, window": (keys(window), arguments(300, 300, 64, 2)),
    "keys, alibi": (keys(alibi), arguments(200, 200, 96, 2)),
    "keys, guarded": (guarded, arguments(200, 200, 64, 3)),
    "queries, slopes": (sloped_queries, [*arguments(200, 200, 64, 1, saved=True), ((2,), F)]),
    "queries, dropout": (dropped_queries, [*arguments(200, 333, 64, 1, saved=True), SEED]),
    "keys, dropout": (dropped_keys, [*arguments(333, 200, 64, 2), SEED]),
}


def with_heads(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], heads: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Arguments of one batch and so many heads: slopes are one a head, and a seed has none."""
    return [(s, d) if (s, d) == SEED else ((heads,) if len(s) == 1 else (1, heads, *s[2:]), d) for s, d in shapes]


def of_one_program(
    score: Score,
    rows: int,
    columns: int,
    dim: int,
    heads: int = 2,
    batch: int = 2,
    *,
    values: int | None = None,
    turned: bool = False,
) -> tuple[tuple[Block, ...], Block, tuple[str, str]]:
    """The kernels of keys and that of queries as blocks of one program, and the names of dK and dV: what one writes has
    the name by which the other reads it. dim, values: features of queries and keys, and of values (None: as many).
    turned: as in `keys`."""
    shapes = [[((batch, heads, *s[2:]), t) for s, t in arguments(rows, columns, dim, n, saved=n == 1)] for n in (2, 1)]
    given = [of_values(x, values or dim) for x in shapes]
    own, found = _traced(keys(score, turned=turned), given[0])
    (other,), _ = _traced(queries(score), given[1])
    sums, dq = other.outputs
    dk, dv = found
    return own, parse(show(other).replace(sums, "delta").replace(dq, "dq")), (dk, dv)


def of_values(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], columns: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """`arguments` with values, and what is like them, of so many columns."""
    return [((*s[:-1], columns), d) if n in (2, 3, 4) and len(s) == 4 else (s, d) for n, (s, d) in enumerate(shapes)]


def _traced(
    fn: Callable[..., object], shapes: list[tuple[tuple[int, ...], torch.dtype]]
) -> tuple[tuple[Block, ...], tuple[str, ...]]:
    """Blocks and outputs of a program."""
    torch._dynamo.reset()
    program = trace(fn, *(torch.empty(s, dtype=d, device="meta") for s, d in shapes)).program
    kernels = fuse_for_gpu(program, GpuTarget(gpu_named("", 132))).kernels
    return tuple(k.block for k in kernels), program.outputs
