"""RedFuser's two ablations (its 5.3 and 5.4, figure 6), with the compiler's own fusion switched part by part.

*levels*: safe softmax of 1K to 8K columns. "unfused" compiles each reduction apart, "fused" the whole, at the
level that the compiler chooses. *incremental*: attention of BERT-base with the keys cut into segments, one a
block of the grid, and a second kernel that combines them; fewer keys a block means more waves a multiprocessor.

Both are tables of ways to compile; `plan.gpu.Given` fixes what makes the way. Where softmax's partial states are
merged follows from who holds a tile of a row: a thread (16 bytes of it, rows beside each other in a warp), a
warp (one a block), a thread block, or blocks of the grid, each with a segment, and a kernel that combines them.
An attention that is not incremental holds all keys of its segment in one tile, with nothing to repair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefold.frontend.fuse import Fused, fuse
from tilefold.frontend.hostile import Args
from tilefold.frontend.verify import compare
from tilefold.plan.gpu_forms import Given
from tilefold.suites.functions import softmax_by_hand
from tilefold.suites.gpu.measure import Timer
from tilefold.suites.gpu.operators import Operator, attention
from tilefold.suites.gpu.row import FAILURES, PEER_FACTOR, Effort, Said, Tell, first_line

Entry = dict[str, Any]
ROWS, COLUMNS = 4096, (1024, 2048, 4096, 8192)
#: bs, heads, queries, keys, head_dim: H2.
BERT = (32, 12, 512, 512, 64)
SEGMENTS = (1, 2, 4, 8)
#: Queries a block is taken to have, where waves are counted.
BLOCK_QUERIES = 64


def unfused_softmax() -> Operator:
    """Each reduction, and the quotient, a kernel of its own."""
    largest = fuse(lambda x: x.amax(-1, keepdim=True))
    total = fuse(lambda x, m: torch.exp(x - m).sum(-1, keepdim=True))
    quotient = fuse(lambda x, m, t: torch.exp(x - m) / t)

    def run(x: Tensor) -> Any:
        m = largest(x)
        return quotient(x, m, total(x, m))

    return run


def segmented(segments: int, mode: Callable[[Operator, int], Operator]) -> Operator:
    """Attention with the keys in so many segments: partial results and their log-sums, then the combination.

    `mode(operator, keys)` compiles the operator of one segment of so many keys.
    """
    if segments == 1:
        return lambda q, k, v: mode(attention, k.shape[-2])(q, k, v)

    def part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q: [B, H, 1, Sq, D], k and v: [B, H, segments, keys, D]."""
        scores = (q @ k.mT * q.shape[-1] ** -0.5).float()
        m = scores.amax(-1, keepdim=True)
        e = torch.exp(scores - m)
        t = e.sum(-1, keepdim=True)
        return (e / t).to(v.dtype) @ v, m + torch.log(t)

    def combine(o: Tensor, log_sum: Tensor) -> Tensor:
        return (o * torch.softmax(log_sum, 2)).sum(2).to(o.dtype)

    combined = fuse(combine)
    compiled: dict[int, Operator] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keys = k.shape[-2] // segments
        one = compiled.setdefault(keys, mode(part, keys))
        return combined(*one(q.unsqueeze(2), *(x.unflatten(2, (segments, keys)) for x in (k, v))))

    return run


#: Columns that a thread takes at once, rows of a block of such threads, columns that a warp takes at once.
THREAD_COLUMNS, THREAD_ROWS, WARP_COLUMNS = 8, 128, 512
#: Blocks that share a row at the level of the grid.
GRID_SEGMENTS = 4


#: Who holds a tile of a row.
HOLDERS: Mapping[str, Given] = {
    "thread": Given(stream=THREAD_COLUMNS, rows=THREAD_ROWS, warps=THREAD_ROWS // 32),
    "warp": Given(stream=WARP_COLUMNS, rows=1, warps=1),
    "block": Given(stream=max(COLUMNS), rows=1, warps=8),
}


def softmax_held_by(holder: str) -> Operator:
    """Safe softmax in one kernel."""
    return Fused(softmax_by_hand, given=HOLDERS[holder])


def softmax_over_the_grid() -> Operator:
    """Maximum and sum of segments, their combination, and the quotient: a cut fold writes nothing along its axis."""

    def sums(x: Tensor) -> tuple[Tensor, Tensor]:
        m = x.amax(-1, keepdim=True)
        return m, torch.exp(x - m).sum(-1, keepdim=True)

    folded: Operator = Fused(sums, given=Given(segments=GRID_SEGMENTS))
    quotient = fuse(lambda x, m, t: torch.exp(x - m) / t)

    def run(x: Tensor) -> Any:
        m, t = folded(x)
        return quotient(x, m, t)

    return run


def in_one_tile(operator: Operator, keys: int) -> Operator:
    """The operator of a segment with all its keys in one tile."""
    return Fused(operator, given=Given(segments=1, stream=keys, rows=BLOCK_QUERIES, warps=8, stages=1))


#: How safe softmax is compiled, by level. The first is what the others are compared with.
LEVELS: Mapping[str, Callable[[], Operator]] = {
    "unfused": unfused_softmax,
    **{holder: partial(softmax_held_by, holder) for holder in HOLDERS},
    "grid": softmax_over_the_grid,
    "fused": lambda: fuse(softmax_by_hand),
}
#: How the operator of a segment is compiled: (operator, keys of a segment) -> compiled.
MODES: Mapping[str, Callable[[Operator, int], Operator]] = {
    "incremental": lambda operator, keys: Fused(operator, given=Given(segments=1, rows=BLOCK_QUERIES)),
    "non-incremental": in_one_tile,
}


def study(
    device: str, timer: Timer, said: Said, *, small: bool = False, known: Sequence[Entry] = ()
) -> Iterator[list[Entry]]:
    """The entries of each point of both ablations: `study`, `point`, `variant`, `microseconds`, `why`.

    known: entries of an earlier process. A point of which some variants are known is measured without those.
    """
    for make in (_levels, _incremental):
        for name, point, plain, args, variants in make(device, small):
            done = {e["variant"] for e in known if (e["study"], e["point"]) == (name, point)}
            left = {v: how for v, how in variants.items() if v not in done}
            if left:
                with torch.no_grad():
                    yield _point(name, point, plain, args, left, timer, partial(said, f"{name}: {point}"))
            torch._dynamo.reset()
            timer.release()


def blank(row: str, contender: str, why: str, *, small: bool = False) -> list[Entry]:
    """The entries of a variant that ended the process ("": of all of the point)."""
    name, _, point = row.partition(": ")
    names = (contender,) if contender else tuple(LEVELS if name == "levels" else MODES)
    return [{"study": name, "point": point, "variant": v, "microseconds": None, "why": why} for v in names]


def with_relative(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """`relative`: to the first variant of the same point in *levels*, to the slowest of all in *incremental*, as in the
    paper's figures.
    """
    return tuple(e | {"relative": _relative(e, entries)} for e in entries)


def _relative(entry: Entry, entries: Sequence[Entry]) -> float | None:
    same = [e for e in entries if e["study"] == entry["study"] and e["microseconds"]]
    if entry["study"] == "levels":
        of_point = (e for e in same if e["point"] == entry["point"])
        base = next((e["microseconds"] for e in of_point if e["variant"] == next(iter(LEVELS))), None)
    else:
        base = max((e["microseconds"] for e in same), default=None)
    return entry["microseconds"] / base if base and entry["microseconds"] else None


_Point = tuple[str, str, Operator, Args, dict[str, Callable[[], Operator]]]


def _levels(device: str, small: bool) -> Iterator[_Point]:
    gen = torch.Generator(device).manual_seed(0)
    for columns in (65, 130) if small else COLUMNS:
        x = torch.randn(7 if small else ROWS, columns, generator=gen, device=device, dtype=torch.float16)
        yield "levels", f"{columns} columns", softmax_by_hand, (x,), dict(LEVELS)


def _incremental(device: str, small: bool) -> Iterator[_Point]:
    gen = torch.Generator(device).manual_seed(0)
    b, h, queries, keys, d = (1, 2, 16, 64, 32) if small else BERT
    q, k, v = (
        torch.randn(b, h, n, d, generator=gen, device=device, dtype=torch.float16) for n in (queries, keys, keys)
    )
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    for segments in SEGMENTS:
        blocks = b * h * math.ceil(queries / BLOCK_QUERIES) * segments
        point = f"{keys // segments} keys a block, {blocks / processors:.1f} waves"
        variants = {name: _segmented(segments, mode) for name, mode in MODES.items()}
        yield "incremental", point, attention, (q, k, v), variants


def _segmented(segments: int, mode: Callable[[Operator, int], Operator]) -> Callable[[], Operator]:
    return lambda: segmented(segments, mode)


def _point(
    name: str,
    point: str,
    plain: Operator,
    args: Args,
    variants: Mapping[str, Callable[[], Operator]],
    timer: Timer,
    tell: Tell,
) -> list[Entry]:
    """Variants of one point, checked, then timed in turns."""
    ready: dict[str, Callable[[], object]] = {}
    why: dict[str, str] = {}
    for variant, make in variants.items():
        tell(variant, "compiling and checking")
        try:
            run = make()
            checked = compare(variant, plain, run, args, factor=PEER_FACTOR)
            if checked.ok:
                ready[variant] = timer.ready(_bound(run, args))
            else:
                why[variant] = f"wrong: {checked.why} (error {checked.max_rel_err:.1e})"
        except FAILURES as error:
            why[variant] = first_line(error)
    effort = Effort()
    tell("", "timing")
    series = timer.rounds(ready, most=effort.rounds, budget=effort.seconds) if ready else {}
    times = {v: 1e6 * s.median for v, s in series.items()}
    return [
        {"study": name, "point": point, "variant": v, "microseconds": times.get(v), "why": why.get(v, "")}
        for v in variants
    ]


def _bound(run: Operator, args: Args) -> Callable[[], object]:
    return lambda: run(*args)
