"""Schedules: the automatic road is one of them; steps mean the same, or are refused with the dependency."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.block.programs import ALL, inputs, program
from tests.block.test_split import DECODE, ORDER, VARIANCE
from tests.fuzz.programs import programs
from tilefold.algebra.expr import tensors_read
from tilefold.block import interp
from tilefold.block.ir import Accumulate, Block, Loop, Update, walk
from tilefold.block.schedule import Schedule
from tilefold.errors import ScheduleError
from tilefold.plan.greedy import fuse
from tilefold.tensor import interp as tensor_interp
from tilefold.tensor.ir import Program
from tilefold.tensor.rewrite import drop_dead
from tilefold.tensor.text import parse
from tilefold.tile import ir as tile
from tilefold.tile.lower import LowerOptions, lower

Step = Callable[[Schedule], Schedule]


def start(name: str = "attention") -> Schedule:
    return Schedule.of(program(name))


def flash(sch: Schedule) -> Schedule:
    return sch.fuse("s", "c", "m").tile("m", "j").rolling_update("t", "j").rolling_update("o", "j")


def blocks(sch: Schedule) -> list[Block]:
    return [k.block for k in sch.kernels]


def check_meaning(sch: Schedule, p: Program, n: int = 9) -> None:
    x = inputs(p, n)
    want = tensor_interp.run(p, x, exact=True)
    whole = sch.block
    got = interp.run(whole, x, {"n": n}, block_sizes=dict.fromkeys(whole.sizes, 4), exact=True)
    for name in p.outputs:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9, equal_nan=True)


# -- the automatic road ---------------------------------------------------------------------


@pytest.mark.parametrize("text", [*ALL.values(), VARIANCE, DECODE, ORDER])
def test_the_automatic_road_is_a_schedule(text: str) -> None:
    p = parse(text)
    assert blocks(Schedule.following(p, fuse(p))) == [k.block for k in fuse(p).kernels]


@settings(max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(programs())
def test_the_automatic_road_is_a_schedule_for_random_programs(p: Program) -> None:
    fused = fuse(drop_dead(p))
    assert blocks(Schedule.following(p, fused)) == [k.block for k in fused.kernels]


@pytest.mark.parametrize("name", ["attention", "rmsnorm_gemm", "routing", "refused"])
def test_a_script_can_be_run_again(name: str) -> None:
    made = Schedule.following(program(name), fuse(program(name)))
    again = start(name)
    for line in made.script().splitlines():
        again = eval(f"again.{line}", {"again": again})
    assert blocks(again) == blocks(made)
    assert [h.script() for h in again.history()] == ["\n".join(made.steps[:n]) for n in range(len(made.steps) + 1)]


def test_a_short_schedule_makes_the_automatic_kernel() -> None:
    assert blocks(flash(start())) == [k.block for k in fuse(program("attention")).kernels]


def test_another_order_of_steps_makes_the_same_kernel() -> None:
    other = start().rolling_update("t", "j").rolling_update("o", "j").fuse("s", "c", "m").tile("o", "j")
    assert blocks(other) == blocks(flash(start()))


# -- legal steps ------------------------------------------------------------------------------


def nodes(sch: Schedule, kind: type) -> list:
    return [n for n in walk(sch.block.body) if isinstance(n, kind)]


LEGAL: dict[str, tuple[str, Step, Callable[[Schedule], bool]]] = {
    "fuse": ("attention", lambda s: s.fuse("s", "c"), lambda s: len(s.kernels) == 5),
    "fuse at": ("argmax", lambda s: s.fuse("a", "b", "p", at="l").tile("a", "l"), lambda s: len(nodes(s, Loop)) == 2),
    "rolling_update": ("variance", lambda s: s.tile("s", "l").rolling_update("v", "l"), lambda s: len(s.kernels) == 2),
    "rolling_update, repair": (
        "attention",
        lambda s: s.fuse("s", "c", "m").tile("m", "j").rolling_update("t", "j"),
        lambda s: [n.name for n in nodes(s, Update)] == ["t_s"],
    ),
    "rolling_update, one block": ("softmax", lambda s: s.rolling_update("t", "j"), lambda s: not nodes(s, Update)),
    "split_k_update": (
        "attention",
        lambda s: flash(s).split_k_update("o", "j", 3),
        lambda s: len(s.kernels) == 2 and nodes(s, Loop)[3].single,
    ),
    "privatize": ("mean_all", lambda s: s.privatize("s", "i", 2), lambda s: len(s.kernels) == 3),
    "tile": ("attention", lambda s: s.tile("m", j=4), lambda s: len(nodes(s, Accumulate)) == 1),
    "tile, what is written": (
        "softmax",
        lambda s: s.fuse("m", "e", "t", "y").tile("y", j=3),
        lambda s: s.loops("y") == ("i", "j"),
    ),
    "tile, the pass around": (
        "attention",
        lambda s: s.fuse("s", "c", "m").tile("s", j=4),
        lambda s: "j" in s.loops("m"),
    ),
    "reorder": ("attention", lambda s: s.reorder("o", "i", "b"), lambda s: s.loops("o") == ("h", "e", "i", "b")),
    "extend": (
        "rmsnorm_gemm",
        lambda s: s.rolling_update("y", "k").extend("y", "o"),
        lambda s: s.loops("y") == ("m", "o"),
    ),
    "peel": ("attention", lambda s: flash(s).peel("o", "j"), lambda s: len(nodes(s, Loop)) == 5),
    "recompute": (
        "attention",
        lambda s: s.recompute("p", "o").fuse("p_o", "o").fuse("p", "t"),
        lambda s: not {"p", "p_o"} & {r.name for r in s.block.results},
    ),
    "swap_scale_dot": (
        "attention",
        lambda s: s.swap_scale_dot("o"),
        lambda s: tensors_read(s.named.definition("o_dot").body) == {"p", "v"} and len(s.kernels) == 6,
    ),
    "bind": ("attention", lambda s: flash(s).bind("o", i="x", b="y"), lambda s: s.kernels[0].grid["i"] == "x"),
    "place": (
        "attention",
        lambda s: flash(s).place("k", "shared", at="o"),
        lambda s: s.kernels[0].placement["k"] == "shared",
    ),
    "place, a value": ("attention", lambda s: flash(s).place("p", "register"), lambda s: "p" in s.kernels[0].placement),
    "pipeline": ("attention", lambda s: flash(s).pipeline("o", "j", 3), lambda s: s.kernels[0].stages["j"] == 3),
    "warps": ("attention", lambda s: flash(s).warps("o", 8), lambda s: s.kernels[0].warps == 8),
}


@pytest.mark.parametrize("case", LEGAL)
def test_a_legal_step_does_what_it_says_and_means_the_same(case: str) -> None:
    name, step, done = LEGAL[case]
    sch = step(start(name))
    assert done(sch), sch.script()
    check_meaning(sch, program(name))


def test_hints_belong_to_their_kernel_and_reach_the_tiles() -> None:
    sch = flash(start()).tile("o", i=16, j=8).tile("c", i=32)
    (k,) = sch.kernels
    assert dict(k.tiles) == {"i": 32, "j": 8}, "the later one wins"
    kernel = lower(k.block, LowerOptions(tiles=k.tiles))
    (loop,) = [s for s in kernel.body if isinstance(s, tile.For)]
    assert (loop.dim, loop.tile) == ("j", 8) and tile.Tiled("i", 32) in kernel.grid
    first, *_ = start().tile("c", i=8).tile("o", i=4).kernels
    assert dict(first.tiles) == {}


def test_split_keeps_hints_for_both_kernels() -> None:
    partial, combine = flash(start()).tile("o", i=16).split_k_update("o", "j", 4).kernels
    assert partial.tiles["i"] == combine.tiles["i"] == 16
    assert not [n for n in walk(combine.block.body) if isinstance(n, Loop) and n.dim == "j"]


# -- illegal steps --------------------------------------------------------------------------

ILLEGAL: dict[str, tuple[str, Step, str, str | None]] = {
    "fuse, path outside": ("attention", lambda s: s.fuse("s", "m"), "m reads c, which another kernel", "c -> m"),
    "fuse, unknown name": ("attention", lambda s: s.fuse("s", "scores"), "nothing is called scores", None),
    "fuse at, dependent": (
        "attention",
        lambda s: s.fuse("m", "p", "t").fuse("m", "t", at="j"),
        "t reads m, which is known only after the loop over j",
        "m -> t",
    ),
    "fuse, split": ("attention", lambda s: s.privatize("m", "j").fuse("c", "m"), "m is split already", None),
    "rolling_update, no repair": ("refused", lambda s: s.rolling_update("y", "l"), "cannot join", "s -> y"),
    "rolling_update, rounding": ("quant_gemm", lambda s: s.rolling_update("c", "k"), "round", "x -> c"),
    "rolling_update, a map": ("attention", lambda s: s.rolling_update("p", "j"), "p is a map", None),
    "rolling_update, independent": ("argmax", lambda s: s.rolling_update("b", "l"), "depends on no other", None),
    "rolling_update, other axis": ("attention", lambda s: s.rolling_update("t", "d"), "no update over d", None),
    "split, written along it": ("softmax", lambda s: s.fuse("m", "e").split_k_update("m", "j"), "written", "e -> t"),
    "split, two passes": (
        "refused",
        lambda s: s.fuse("s", "y").split_k_update("s", "l"),
        "only a kernel with a single pass",
        "s -> y",
    ),
    "privatize, dependent": (
        "variance",
        lambda s: s.rolling_update("v", "l").privatize("s", "l"),
        "differs from segment to segment",
        "s -> v",
    ),
    "segments": ("variance", lambda s: s.split_k_update("s", "l", 0), "0 segments", None),
    "tile, inside": (
        "attention",
        lambda s: s.fuse("c", "m", "p", "t").tile("c", j=4),
        "c is computed where m uses it",
        "c -> m",
    ),
    "tile, a state": ("attention", lambda s: flash(s).tile("o", e=4), "all of e is its state", None),
    "tile, no such loop": ("attention", lambda s: s.tile("m", d=4), "no loop of m is over d", None),
    "tile, size": ("attention", lambda s: s.tile("m", j=0), "at least one index", None),
    "reorder, serial": ("attention", lambda s: flash(s).reorder("o", "j", "b"), "carries o", "o -> o over j"),
    "extend, reduced": ("attention", lambda s: s.fuse("c", "m").extend("c", "j"), "m reduces over j", "m -> c"),
    "extend, written": ("softmax", lambda s: s.fuse("m", "e", "t").extend("e", "j"), "m reduces over j", "m -> e"),
    "extend, stored twice": (
        "rmsnorm_gemm",
        lambda s: (
            Schedule.of(parse(ALL["rmsnorm_gemm"].replace("return y", "return s, y"))).fuse("s", "y").extend("y", "o")
        ),
        "every block of o would write it",
        "s -> the caller",
    ),
    "peel, no mask": ("softmax", lambda s: s.tile("m", "j").peel("m", "j"), "no loop over j has a mask", None),
    "peel, no loop": ("attention", lambda s: s.peel("m", "j"), "no serial loop over j", None),
    "recompute, one reader": ("attention", lambda s: s.recompute("s", "c"), "only c reads s", "s -> c"),
    "recompute, not read": ("attention", lambda s: s.recompute("s", "o"), "o does not read s", None),
    "swap_scale_dot, varying": ("attention", lambda s: s.swap_scale_dot("s"), "every factor of s varies", "k -> s"),
    "swap_scale_dot, a maximum": ("attention", lambda s: s.swap_scale_dot("m"), "m is no sum", None),
    "bind, serial": ("attention", lambda s: flash(s).bind("o", j="x"), "the loop over j carries o", "o -> o over j"),
    "bind, no axis": ("attention", lambda s: s.bind("o", i="w"), "no axis w", None),
    "place, tier": ("attention", lambda s: s.place("o", "disk"), "no tier is called disk", None),  # type: ignore[arg-type]
    "place, not written": ("attention", lambda s: flash(s).place("p", "global"), "never written", "p -> t"),
    "place, whose": ("attention", lambda s: s.place("k", "shared"), "k is an argument", None),
    "place, not there": ("attention", lambda s: s.place("v", "shared", at="m"), "has no v", None),
    "pipeline, parallel": ("attention", lambda s: s.pipeline("o", "i", 2), "no serial loop over i", None),
    "warps": ("attention", lambda s: s.warps("o", 3), "power of two", None),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_step_names_the_dependency_and_the_line(case: str) -> None:
    name, step, message, dependency = ILLEGAL[case]
    with pytest.raises(ScheduleError, match=message) as caught:
        step(start(name))
    assert caught.value.dependency == dependency
    assert caught.value.loc is not None and caught.value.loc.file == __file__


def test_crossing_blocks_is_illegal() -> None:
    p = parse("""
program turned(n)
  input x: f32[n, n]
  dim i = n
  dim j = n
  a[i, j]: f32 = exp(x[i, j])
  b[i, j]: f32 = a[i, j] + a[j, i]
  return b
""")
    with pytest.raises(ScheduleError, match="b reads a across blocks of i, j") as caught:
        Schedule.of(p).fuse("a", "b")
    assert caught.value.dependency == "a -> b"


def test_swap_scale_dot_keeps_the_sum_of_nothing() -> None:
    p = program("attention")
    sch = start().swap_scale_dot("o")
    x = inputs(p, 0)
    assert interp.run(sch.block, x, {"n": 0}, exact=True)["o"].shape == (2, 3, 0, 8)
    text = """
program scaled(n)
  input x: f32[4, n]
  input c: f32[4]
  dim i = 4
  dim j = n
  y[i]: f32 = sum[j] x[i, j] / c[i]
  return y
"""
    out = Schedule.of(parse(text)).swap_scale_dot("y")
    got = interp.run(out.block, {"x": torch.zeros(4, 0), "c": torch.zeros(4)}, {"n": 0})["y"]
    assert got.tolist() == [0.0] * 4, "not 0 / 0"
