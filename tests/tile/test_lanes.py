"""Folds per lane and dims as single indices: in float64 as the kernels they come from, on hostile inputs too."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tests.tile.kernels import ATTENTION, SOFTMAX, TOPK
from tilefold.algebra.evaluate import Env, Grid, evaluate, reader
from tilefold.algebra.expr import Const
from tilefold.algebra.text import Names
from tilefold.algebra.text import parse as parse_expr
from tilefold.block.canonical import canonical
from tilefold.block.ir import Loop, walk
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.gpu_forms import Given
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.suites.cascades import CASCADES
from tilefold.suites.case import Case, normal, together
from tilefold.tile.interp import run_kernel
from tilefold.tile.ir import Alloc, Buffer, Kernel
from tilefold.tile.lanes import by_tile, per_lane
from tilefold.tile.lower import LowerOptions, lower
from tilefold.tile.pieces import product_dims, singles, summed
from tilefold.tile.steady import MOST
from tilefold.tile.text import parse
from tilefold.tile.text import show as show_kernel
from tilefold.tile.uses import every
from tilefold.tile.verify import verify

F = torch.float64
TILE, LANES = 64, 16


def extremes(x):
    return x.amax(-1), x.amin(-1), (x > 0).any(-1), (x > -3).all(-1), (x * 0.01 + 1).prod(-1)


def rests(x):
    """Of 301 indices 45 are left, three times 16 lanes but three of them."""
    return x.sum(-1), x.amax(-1), -x.abs().amin(-1)


def images(x, w):
    return torch.var_mean(x, (0, 2)), (x * w).sum((0, 2)), x.abs().amax((0, 2))


def weighed(x, w):
    """What both sums read is a value of the loop, which has its axes in the program's order."""
    y = (x * w).sigmoid()
    return y.sum((0, 1)), (y * x).sum((0, 1))


def centred(x, w):
    """Columns of what is centred row by row: a mean and a scale of each row, which columns are summed about."""
    y = x - x.mean(-1, keepdim=True)
    scale = (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (y * scale * w).sum((0, 1)), (y * scale).amax((0, 1))


FOLDS = [
    c
    for c in CASCADES
    if "attention" not in c.name and "MLA" not in c.name and "GEMM" not in c.name and c.name != "Performer"
]
CASES = [
    *FOLDS,
    Case("extremes", extremes, together(normal(5, 301)), ""),
    Case("rests", rests, together(normal(5, 301)), ""),
    Case("places of extremes", lambda x: torch.max(x.round(), -1), together(normal(5, 301)), ""),
    Case("weighed", weighed, together(normal(301, 9, 3), normal(3)), ""),
    Case("images", images, together(normal(301, 3, 9), normal(9)), ""),
    Case("centred", centred, together(normal(7, 301, 24), normal(24)), ""),
]
#: Left as they are: several index reducers, matrix products, a sum that is rescaled by division.
LEFT = {"MoE routing", "L2 norm"}
#: A few folds of each kind suffice for segments: plain, moved by exponentials, by counts, by sums of weights.
SEGMENTED = {"sum + sum", "rests", "logsumexp", "variance", "inertia", "centred"}


def laned(k: Kernel) -> Kernel:
    return verify(per_lane(singles(k), lambda s: LANES))


def changed(k: Kernel) -> bool:
    return any("_lane" in d for d in k.sizes)


def both(case: Case, given: Given):
    """For each kernel of the program that streams: run(arguments) before and after, and the kernels."""
    args = case.args()
    torch._dynamo.reset()
    meta = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x for x in args]
    program = trace(case.fn, *meta).program
    torch._dynamo.reset()
    made = [canonical(k.block) for k in fuse_for_gpu(program, GpuTarget(given=given)).kernels]
    pairs = []
    for c in made:
        streamed = {n.dim for n in walk(c.block.body) if isinstance(n, Loop) and n.kind == "for"}
        kernel = verify(lower(c.block, LowerOptions(tiles=dict.fromkeys(streamed, TILE), arranged=False)))
        pairs.append((kernel, laned(kernel), c.tensors))
    return program, pairs


def run(program, kernels, args) -> dict[str, torch.Tensor]:
    """All tensors that the kernels write, in float64."""
    given = [x for x in args if isinstance(x, torch.Tensor)]
    values = {i.name: x.double() if x.is_floating_point() else x for i, x in zip(program.inputs, given, strict=True)}
    for kernel, names in kernels:
        for t in kernel.tensors:
            if t.role != "in":
                shape = [int(e.value) for e in t.shape if isinstance(e, Const)]
                values[names[t.name]] = torch.zeros(shape, dtype=F if t.dtype.is_float else t.dtype.torch_dtype)
        run_kernel(kernel, {t.name: values[names[t.name]] for t in kernel.tensors}, {}, exact=True)
    return values


@pytest.mark.parametrize(
    ("case", "segments"),
    [pytest.param(c, n, id=f"{c.name} in {n}") for c in CASES for n in (1, 3) if n == 1 or c.name in SEGMENTED],
)
def test_lanes_change_no_result(case, segments):
    program, pairs = both(case, Given(segments=segments, stream=TILE))
    assert any(changed(after) for _, after, _ in pairs) == (case.name not in LEFT)
    wanted = {tuple(x.shape if isinstance(x, torch.Tensor) else () for x in case.args())}
    hostile = [(n, a) for n, a in case.hostile_args() if
               tuple(x.shape if isinstance(x, torch.Tensor) else () for x in a) in wanted]  # fmt: skip
    for name, args in [("given", case.args()), *hostile]:
        before = run(program, [(k, names) for k, _, names in pairs], args)
        after = run(program, [(k, names) for _, k, names in pairs], args)
        for n in program.outputs:
            torch.testing.assert_close(after[n], before[n], equal_nan=True, msg=lambda m, at=(name, n): f"{at}: {m}")


@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("length", [64, 301])
def test_places_of_what_is_no_number_of_equals_and_of_rows_without_any(op, length):
    x = torch.randn(7, length).round()
    x[0], x[1], x[2, 70 % length], x[3, [5, 40]], x[4] = -torch.inf, torch.inf, torch.nan, torch.nan, torch.nan
    x[5, 3], x[5, 9] = (torch.inf, torch.nan) if op == "argmax" else (-torch.inf, torch.nan)
    case = Case(op, lambda x: getattr(torch, op)(x, -1), lambda *_: (x,), "")
    program, pairs = both(case, Given(segments=1, stream=32))
    laned_pairs = [(verify(per_lane(singles(k), lambda s: LANES)), names) for k, _, names in pairs]
    assert all(changed(k) for k, _ in laned_pairs)
    found = run(program, laned_pairs, (x,))
    assert torch.equal(found[program.outputs[0]], getattr(torch, op)(x, -1))


def test_what_is_kept_of_elements_lies_as_the_states_do():
    """Else every turn has it change places among threads."""
    kernel = parse(shown("weighed"))
    orders = {b.dims for b in allocated_in(kernel) if "j_lane" in b.dims}
    assert len(orders) == 1


def allocated_in(k: Kernel) -> list[Buffer]:
    return [s.buffer for s in every(k.body) if isinstance(s, Alloc)]


@pytest.mark.parametrize("text", [ATTENTION, SOFTMAX, TOPK], ids=["products", "states that are copied", "selection"])
def test_other_loops_are_left(text):
    kernel = verify(parse(text))
    assert per_lane(kernel, lambda s: 2) == kernel


def shown(case_name: str) -> str:
    (case,) = [c for c in CASES if c.name == case_name]
    _, pairs = both(case, Given(segments=1, stream=TILE))
    return show_kernel(pairs[0][1])


def turn_of(text: str) -> str:
    """The loop over tiles, from its header to the statement after it."""
    lines = text[text.index("for k_turn") :].splitlines() if "for k_turn" in text else []
    lines = lines or text[text.index("_turn:1") :].splitlines()
    depth = min(len(x) - len(x.lstrip()) for x in lines[1:2])
    end = next(n for n, x in enumerate(lines[1:], 1) if len(x) - len(x.lstrip()) < depth)
    return "\n".join(lines[:end])


def test_no_reduction_in_the_loop_of_a_variance():
    turn = turn_of(shown("variance"))
    assert "sum" in turn and " over " not in turn


def test_a_lane_keeps_what_its_squares_are_about():
    """Repairs are those of its first tile and of the combination."""
    text = shown("variance")
    assert "centred" in text and text.count("maximum(n_old") == 1
    assert "n_old" not in turn_of(text) and "ratio" in turn_of(text)
    assert text.count("ratio_lane[i, j_lane] =") == 1


@pytest.mark.parametrize("length", [70, 128, 301, 640, LANES * MOST + TILE])
def test_squares_about_what_lies_far_off(length):
    """A lane's first elements 1e5 from its others, in float32: as exact as about each tile's mean."""
    x = torch.randn(3, length)
    x[0, :TILE] += 1e5
    x[1, LANES:TILE] -= 1e5
    x[2] += 1e5
    case = Case("variance", lambda x: torch.var_mean(x, -1), lambda *_: (x,), "")
    program, pairs = both(case, Given(segments=1, stream=TILE))
    kernels = [(k, names) for _, k, names in pairs]
    values = {program.inputs[0].name: x}
    for kernel, names in kernels:
        assert changed(kernel)
        for t in kernel.tensors:
            if t.role != "in":
                values[names[t.name]] = torch.zeros([int(e.value) for e in t.shape])
        run_kernel(kernel, {t.name: values[names[t.name]] for t in kernel.tensors}, {})
    for n, wanted in zip(program.outputs, torch.var_mean(x.double(), -1), strict=True):
        torch.testing.assert_close(values[n].double(), wanted, rtol=3e-6, atol=0)


def test_lanes_fold_what_is_left_before_they_are_combined():
    text = shown("rests")
    assert text.count("for ") == 1 and text.count("where") == 3
    assert shown("extremes").count("for ") == 2  # `any` has an identity that is no number
    assert shown("variance").count("for ") == 1  # states about what a lane met first need no repair


WRITTEN = """
kernel gradient(R)
  dim i = R
  dim s = 3
  dim j = {total}
  in x: f32[{total}, R] unit 1
  out y: f32[3, R] unit 1
  out z: f32[{total}, R] unit 1
  grid s:1 i:1
    alloc t: f32[i:1] tile
    fill t = 0.0
    for j:64 in tile_start(s) * {length} .. minimum(size(j), (tile_start(s) + 1) * {length})
      alloc e: f32[i:1, j:64] tile
      e[i, j] = x[j, i] * 2.0
      t[i] sum= over j: e[i, j]
      store z[j, i] over j, i = {stored}
    store y[s, i] over s, i = t[i]
"""


@pytest.mark.parametrize(("length", "loops"), [(176, 1), (180, 2), (128, 1)])
def test_what_a_loop_stores_of_elements_each_lane_stores(length, loops):
    """Of 176 indices 48 are left, which fill 16 lanes three times; of 180 there are 52."""
    before = verify(parse(WRITTEN.format(length=length, total=3 * length, stored="e[i, j] + 1.0")))
    after = laned(before)
    assert changed(after) and show_kernel(after).count("for ") == loops
    x = torch.randn(3 * length, 2, dtype=F)
    y, z = torch.zeros(3, 2, dtype=F), torch.zeros(3 * length, 2, dtype=F)
    run_kernel(after, {"x": x, "y": y, "z": z}, {"R": 2}, exact=True)
    torch.testing.assert_close(y, 2 * x.view(3, length, 2).sum(1))
    torch.testing.assert_close(z, 2 * x + 1)


def test_segments_of_less_than_a_tile_are_left_to_the_loop():
    """Two of 17 indices, and one of 16."""
    kernel = verify(parse(WRITTEN.format(length=17, total=50, stored="e[i, j] + 1.0")))
    assert laned(kernel) == kernel


def test_what_is_stored_of_a_state_is_left_to_the_loop():
    kernel = verify(parse(WRITTEN.format(length=176, total=528, stored="e[i, j] + t[i]")))
    assert laned(kernel) == kernel


COUNT = """
kernel mean(R)
  dim i = R
  dim j = 301
  in x: f32[R, 301] unit 1
  out y: f32[R] unit 0
  grid i:1
    alloc t: f32[i:1] tile
    alloc n: f32[] tile
    fill t = 0.0
    fill n = 0.0
    for j:64
      t[i] sum= over j: x[i, j]
      n sum= over j: 1.0
    store y[i] over i = t[i] / n
"""


def test_a_count_differs_from_lane_to_lane_where_some_have_an_index_less():
    """Of 301 indices 45 are left: 13 of 16 lanes have three more than 16, the others two."""
    before = verify(parse(COUNT))
    after = laned(before)
    assert changed(after) and show_kernel(after).count("for ") == 1
    x, y, w = torch.randn(3, 301, dtype=F), torch.zeros(3, dtype=F), torch.zeros(3, dtype=F)
    run_kernel(before, {"x": x, "y": w}, {"R": 3}, exact=True)
    run_kernel(after, {"x": x, "y": y}, {"R": 3}, exact=True)
    torch.testing.assert_close(y, x.mean(1))
    torch.testing.assert_close(w, x.mean(1))


def test_what_is_held_beside_the_loop_is_reduced_after_it():
    turn = turn_of(shown("images"))
    assert "max" in turn and " over " not in turn


def test_sums_of_weights_are_those_of_all_lanes():
    """Weights that cancel within a lane must not be divided by; what nothing divides by stays per lane."""
    turn = turn_of(shown("inertia"))
    assert turn.count("sum= over") == 2  # m x and the mass, not the moment


def test_weights_that_cancel_in_a_lane():
    case = next(c for c in CASES if c.name == "inertia")
    m = torch.ones(7, 301, dtype=F)
    m[:, LANES :: 2 * LANES] = -1 + 1e-12  # lane 0 alone: weights 1 and about -1
    x = torch.randn(7, 301, 3, dtype=F, generator=torch.Generator().manual_seed(0))
    program, pairs = both(case, Given(segments=1, stream=2 * LANES))
    (after,) = [(k, names) for _, k, names in pairs]
    value = run(program, [after], (m, x))[program.outputs[0]]
    centre = (m[..., None] * x).sum(1, keepdim=True) / m.sum(1)[:, None, None]
    torch.testing.assert_close(value, (m[..., None] * (x - centre) ** 2).sum((1, 2)), rtol=1e-12, atol=0)


def test_short_dims_are_single_indices():
    text = """
kernel lengths()
  dim i = 40
  dim j = 3
  dim k = 3
  in x: f32[40, 3] unit 1
  in y: f32[40, 3] unit 1
  out o: f32[40] unit 0
  out z: f32[40, 3] unit 1
  grid i:8
    alloc s: f32[i:8] tile
    s[i] = sum over j: x[i, j] * x[i, j]
    store o[i] over i = s[i]
    store z[i, k] over i, k = y[i, k] * s[i]
"""
    kernel = verify(parse(text))
    cut = verify(singles(kernel))
    shown = show_kernel(cut)
    assert all(t in shown for t in ("over j_0: x[i, j_0]", "x[i, j_1 + 1]", "x[i, j_2 + 2]"))
    assert "store z[i, k] over i, k" in shown  # stores of every third element would not share cache lines
    x, y = torch.randn(40, 3), torch.randn(40, 3)
    o, z = torch.empty(40), torch.empty(40, 3)
    run_kernel(cut, {"x": x, "y": y, "o": o, "z": z}, {})
    torch.testing.assert_close(o, (x * x).sum(-1))
    torch.testing.assert_close(z, y * (x * x).sum(-1, keepdim=True))


@pytest.mark.parametrize(("n", "single"), [(40, True), (16, False)])
def test_what_a_long_loop_sums_along_a_dim_is_single_indices_though_it_is_stored(n, single):
    """Forces of pairs in three coordinates: of four lanes one would be idle, and what is computed of a distance
    repeated in each (470 us on an H100 for 8 x 1000 x 1000 pairs)."""
    text = f"""
kernel forces()
  dim i = 40
  dim l = {n}
  dim k = 3
  in x: f32[40, 3] unit 1
  in y: f32[{n}, 3] unit 1
  out f: f32[40, 3] unit 1
  grid i:8
    alloc s: f32[i:8, k:3] tile
    fill s = 0.0
    for l:8
      alloc r: f32[i:8, l:8] tile
      r[i, l] = sum over k: (x[i, k] - y[l, k]) * (x[i, k] - y[l, k])
      s sum= over l: exp(-r[i, l]) * (x[i, k] - y[l, k])
    store f[i, k] over i, k = s[i, k]
"""
    kernel = verify(parse(text))
    cut = verify(singles(kernel))
    assert ("store f[i, k_2 + 2] over i, k_2" in show_kernel(cut)) is single
    x, y, f = torch.randn(40, 3), torch.randn(n, 3), torch.empty(40, 3)
    run_kernel(cut, {"x": x, "y": y, "f": f}, {})
    d = x[:, None] - y[None]
    torch.testing.assert_close(f, (torch.exp(-(d * d).sum(-1, keepdim=True)) * d).sum(1))


PLANES = """
kernel planes()
  dim i = 3
  dim k = 100
  dim m = 2
  in x: f32[3, 2, 100] unit {unit}
  in y: f32[3, 2, 100] unit {unit}
  out o: f32[3] unit 0
  grid i:1
    alloc s: f32[i:1] tile
    fill s = 0.0
    for k:32
      alloc a: f32[i:1, k:32] tile
      a[i, k] = sum over m: x[i, m, k] * x[i, m, k]
      alloc b: f32[i:1, k:32] tile
      b[i, k] = sum over m: y[i, m, k] * y[i, m, k]
      s sum= over k: abs(log(a[i, k] + 1.0) - log(b[i, k] + 1.0))
    store o[i] over i = s[i]
"""


@pytest.mark.parametrize("unit", [2, 1])
def test_what_is_reduced_of_an_element_each_lane_reduces(unit):
    """Parts of complex numbers, in planes or side by side: sums of them are no reductions across lanes."""
    kernel = verify(parse(PLANES.format(unit=unit)))
    after = laned(kernel)
    text = show_kernel(after)
    assert ("over m_0" in text) == (unit == 2)  # a vector of two has wide loads where they are side by side
    assert "over k:" not in turn_of(text) and "over k_lane" not in turn_of(text)
    x, y = torch.randn(3, 2, 100, dtype=F), torch.randn(3, 2, 100, dtype=F)
    want = ((x.square().sum(1) + 1).log() - (y.square().sum(1) + 1).log()).abs().sum(1)
    o = torch.empty(3, dtype=F)
    run_kernel(after, {"x": x, "y": y, "o": o}, {}, exact=True)
    torch.testing.assert_close(o, want)


ROWS = """
kernel rows()
  dim i = 3
  dim k = 110
  dim m = 24
  in x: f32[3, 110, 24] unit 2
  out o: f32[3, 24] unit 1
  grid i:1
    alloc s: f32[i:1, m:24] tile
    fill s = 0.0
    for k:64
      alloc a: f32[i:1, k:64] tile
      a[i, k] = max over m: x[i, k, m]
      s sum= over k: abs(x[i, k, m] - a[i, k])
    store o[i, m] over i, m = s[i, m]
"""


@pytest.mark.parametrize("length", [64, 100, 110, 128])
def test_rows_that_columns_are_summed_about_each_lane_reduces(length):
    """What is left of them, lanes of which some have no index fold too; a state lies as the rows do."""
    after = laned(verify(parse(ROWS.replace("110", str(length)))))
    if length > TILE:
        assert "over k" not in turn_of(show_kernel(after)) and len(re.findall("for ", show_kernel(after))) == 1
    (held,) = (b for b in allocated_in(after) if b.name.startswith("s_lane"))
    assert held.dims[0].startswith("k_lane") and held.dims[-1] == "m"
    x, o = torch.randn(3, length, 24, dtype=F), torch.empty(3, 24, dtype=F)
    run_kernel(after, {"x": x, "o": o}, {}, exact=True)
    torch.testing.assert_close(o, (x - x.amax(-1, keepdim=True)).abs().sum(1))


MOVED = ROWS.replace(
    "      s sum= over k: abs(x[i, k, m] - a[i, k])",
    """      alloc old: f32[i:1, m:24] tile
      old[i, m] = t[i, m]
      t max= over k: x[i, k, m] - a[i, k]
      s[i, m] = s[i, m] * exp(where(old[i, m] == -inf, 0.0, old[i, m]) - t[i, m])
      s sum= over k: exp(x[i, k, m] - a[i, k] - t[i, m])""",
).replace("    fill s = 0.0", "    fill s = 0.0\n    alloc t: f32[i:1, m:24] tile\n    fill t = -inf")


@pytest.mark.parametrize("length", [100, 110, 128])
def test_states_that_are_repaired_lie_as_rows_do(length):
    """Sums of exponentials about the greatest so far, of what is taken about rows."""
    after = laned(verify(parse(MOVED.replace("110", str(length)))))
    orders = {b.dims for b in allocated_in(after) if {"k_lane", "m"} <= {*b.dims}}
    assert len(orders) == 1 and next(iter(orders)).index("k_lane") < next(iter(orders)).index("m")
    x, o = torch.randn(3, length, 24, dtype=F), torch.empty(3, 24, dtype=F)
    run_kernel(after, {"x": x, "o": o}, {}, exact=True)
    y = x - x.amax(-1, keepdim=True)
    torch.testing.assert_close(o, (y - y.amax(1, keepdim=True)).exp().sum(1))


@pytest.mark.parametrize("length", [192, 200, 301])
def test_squares_about_what_a_lane_kept_of_rows(length):
    """What the first turn's lanes keep lies as rows do, too."""
    _, pairs = both(Case("", lambda x: torch.var_mean(x, 1), together(normal(3, length, 24)), ""), Given(1, TILE))
    ((kernel, _, _),) = pairs
    text = show_kernel(kernel).replace("x[i, k, j]", "(x[i, k, j] - a[i, k])")
    row = f"    for k:{TILE}\n      alloc a: f32[i:1, k:{TILE}] tile\n      a[i, k] = max over j: x[i, k, j]"
    after = laned(verify(parse(text.replace(f"    for k:{TILE}", row))))
    assert "over k" not in turn_of(show_kernel(after))
    x = torch.randn(3, length, 24, dtype=F) + 1e3 * torch.arange(24)
    found = {t.name: torch.empty(3, 24, dtype=F) for t in after.tensors if t.role != "in"}
    run_kernel(after, {"x": x, **found}, {}, exact=True)
    want = torch.var_mean(x - x.amax(-1, keepdim=True), 1)
    for n, y in zip(("var_mean_var_out", "var_mean_mean_out"), want, strict=True):
        torch.testing.assert_close(found[n], y)


def test_long_reductions_of_an_element_are_left_to_the_loop():
    text = PLANES.format(unit=1).replace("dim m = 2", "dim m = 64").replace("[3, 2, 100]", "[3, 64, 100]")
    assert not changed(laned(verify(parse(text))))


def test_what_is_stored_in_lines_of_another_dim_is_single_indices_too():
    """Planes of colours: their largest, where it is, and a matrix of colours times them."""
    text = """
kernel colours()
  dim i = 40
  dim j = 3
  dim k = 3
  in m: f32[3, 3] unit 1
  in x: f32[3, 40] unit 1
  out o: f32[3, 40] unit 1
  out at: i64[40] unit 0
  grid i:8
    alloc best: f32[i:8] tile
    alloc place: i64[i:8] tile
    alloc p: f32[j:3, i:8] tile
    fill best = -inf
    fill place = -1
    best, place argmax= over j: x[j, i] -> j
    p[j, i] = gemm over k: m[j, k] * x[k, i]
    store at[i] over i = place[i]
    store o[j, i] over j, i = p[j, i] * best[i]
"""
    kernel = summed(verify(parse(text)))
    assert not product_dims(kernel)
    cut = verify(singles(kernel))
    shown = show_kernel(cut)
    assert "gemm" not in shown and "store o[j_2 + 2, i] over j_2, i" in shown
    m, x = torch.randn(3, 3), torch.randn(3, 40).round()
    o, at = torch.empty(3, 40), torch.empty(40, dtype=torch.int64)
    run_kernel(cut, {"m": m, "x": x, "o": o, "at": at}, {})
    assert torch.equal(at, torch.tensor(x.numpy().argmax(0)))  # of equals the first
    torch.testing.assert_close(o, m @ x * x.amax(0))


@pytest.mark.parametrize(("shape", "at", "unit", "apart"), [("4, 40", "j, i", 1, True), ("40, 4", "i, j", 1, False)])
def test_what_is_stacked_in_lines_of_its_own_is_stored_part_by_part(shape, at, unit, apart):
    """Directions of a lattice's flow, each a plane; where parts lie side by side, all of an element's."""
    text = f"""
kernel stacked()
  dim i = 40
  dim j = 4
  in x: f32[40] unit 0
  out o: f32[{shape}] unit {unit}
  grid i:8
    alloc p: f32[i:8] tile
    p[i] = exp(x[i])
    store o[{at}] over j, i = where(j < 1, p[i], where(j < 2, x[i], where(j < 3, p[i] * x[i], -p[i])))
"""
    kernel = verify(parse(text))
    cut = verify(singles(kernel))
    shown = show_kernel(cut)
    assert ("where" not in shown) is apart and shown.count("store") == (4 if apart else 1)
    x, o = torch.randn(40), torch.empty(*map(int, shape.split(",")))
    run_kernel(cut, {"x": x, "o": o}, {})
    p = x.exp()
    want = torch.stack([p, x, p * x, -p], unit if not apart else 0)
    torch.testing.assert_close(o, want)


BOUNDS = (
    "tile_start(s) * 16",
    "minimum(size(j), (tile_start(s) + 1) * 16)",
    "minimum(tile_stop(i), 77) + tile_start(s)",
    "tile_min(s * 2 + 1)",
)


@pytest.mark.parametrize("text", BOUNDS)
def test_bounds_of_all_tiles_at_once(text):
    """As they are tile by tile."""
    e = parse_expr(text, Names(dims={"i", "j", "s"}, tensors=set(), syms=set()))
    tiles, sizes = {"i": 32, "s": 1}, {"i": 100, "s": 5, "j": 70}
    env = Env(reader({}), sizes, {})
    starts = [range(0, sizes[d], tiles[d]) for d in ("i", "s")]
    grid = Grid({d: (0, len(at)) for d, at in zip(("i", "s"), starts, strict=True)})
    found = evaluate(by_tile(e, tiles, sizes), grid, env).expand(grid.shape)
    for (n, i), (m, s) in itertools.product(*map(enumerate, starts)):
        tile = Grid({"i": (i, min(i + tiles["i"], sizes["i"])), "s": (s, s + 1)})
        assert int(found[n, m]) == int(evaluate(e, tile, env))


def test_extremes_over_tiles_of_several_indices_stay():
    e = parse_expr("tile_max(i * 2)", Names(dims={"i"}, tensors=set(), syms=set()))
    assert by_tile(e, {"i": 8}, {"i": 100}) == e
