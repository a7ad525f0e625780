"""Groups that do not fit a kernel are cut at their cheapest edge; products of the library stay whole."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from tilefold.block.fuse import FusedKernel
from tilefold.block.group import ANY, Group
from tilefold.block.ir import Loop, walk
from tilefold.block.legal import one_kernel
from tilefold.pipeline import compile_program
from tilefold.plan.cut import added_bytes, cuts
from tilefold.plan.gpu import _Fitting, fuse_for_gpu
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.runtime.library import LibraryStep
from tilefold.tensor.analysis import Graph
from tilefold.tensor.text import parse

#: Normalisation, a product with many columns, and the log of the sum of their exponentials.
HEAD = """
program head({syms})
  input x: bf16[{rows}, 256]
  input w: bf16[256, 4000]
  dim i = {rows}
  dim j = 256
  dim c = 4000
  q[i]: f32 = sum[j] x[i, j] * x[i, j]
  n[i, j]: bf16 = x[i, j] * rsqrt(q[i])
  l[i, c]: f32 = sum[j] n[i, j] * w[j, c]
  m[i]: f32 = max[c] l[i, c]
  s[i]: f32 = sum[c] exp(l[i, c] - m[i])
  y[i]: f32 = log(s[i]) + m[i]
  return y
"""


def head(rows: str = "512") -> Graph:
    return Graph.of(parse(HEAD.format(rows=rows, syms="" if rows.isdigit() else rows)))


def kernels(rows: str, refused: set[str]) -> list[tuple[str, ...]]:
    """The groups if no kernel may hold all of `refused`."""
    text = HEAD.format(rows=rows, syms="" if rows.isdigit() else rows)
    target = GpuTarget(refuse=lambda k: "no" if refused <= set(k.plan.group.members) else None)
    fused = fuse_for_gpu(parse(text), target)
    return list(dict.fromkeys(k.plan.group.members for k in fused.kernels))


#: Three layers alike, and what they add up to.
LAYERS = """
program layers()
  input x: f32[512, 256]
  input y: f32[512, 256]
  input z: f32[512, 256]
  dim i = 512
  dim j = 256
  a[i]: f32 = sum[j] x[i, j] * x[i, j]
  p[i, j]: f32 = x[i, j] * rsqrt(a[i])
  b[i]: f32 = sum[j] y[i, j] * y[i, j]
  q[i, j]: f32 = y[i, j] * rsqrt(b[i])
  c[i]: f32 = sum[j] z[i, j] * z[i, j]
  r[i, j]: f32 = z[i, j] * rsqrt(c[i])
  s[i, j]: f32 = p[i, j] + q[i, j] + r[i, j]
  return s
"""


def test_a_part_with_a_layer_that_does_not_fit_is_not_tried() -> None:
    asked: list[frozenset[str]] = []

    def refuse(k: FusedKernel) -> str | None:
        asked.append(frozenset(k.plan.group.members))
        return "no" if any(set(layer) <= asked[-1] for layer in ("ap", "bq", "cr")) else None

    fused = fuse_for_gpu(parse(LAYERS), GpuTarget(refuse=refuse))
    assert {m for k in fused.kernels for m in k.plan.group.members} == set("apbqcrs")
    after = asked[asked.index(frozenset("ap")) + 1 :]  # the other layers are its twins, and not asked about
    assert sum(any(set(layer) <= x for layer in ("ap", "bq", "cr")) for x in after) <= 2


def test_a_twin_is_not_built_to_be_asked_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
program twins()
  input x: f32[512, 256]
  input y: f32[512, 256]
  dim i = 512
  dim j = 256
  a[i]: f32 = sum[j] x[i, j] * x[i, j]
  b[i]: f32 = exp(a[i])
  c[i]: f32 = sum[j] y[i, j] * y[i, j]
  d[i]: f32 = exp(c[i])
  return b, d
"""
    asked: list[Group] = []
    own = GpuTarget.build

    def build(self: GpuTarget, g: Graph, x: Group, form: object = None) -> tuple[FusedKernel, ...]:
        asked.append(x)
        return own(self, g, x)

    monkeypatch.setattr(GpuTarget, "build", build)
    fitting = _Fitting(Graph.of(parse(text)), GpuTarget(), frozenset(), {})
    first, second = Group(("a", "b"), ("i",)), Group(("c", "d"), ("i",))
    assert fitting.refusal(first) is None is fitting.refusal(second)
    assert asked == [first]
    assert [k.block.name for k in (*fitting.kernels(first), *fitting.kernels(second))] == ["b", "d"]
    assert asked == [first, second]


def test_the_cheapest_edge_is_the_one_that_fewest_bytes_cross() -> None:
    g = head()
    members = tuple(c.name for c in g.program.body)
    ways = cuts(g, members)
    assert ways[0] == (members[:-1], ("y",))  # two numbers a row
    prices = [added_bytes(g, a, b) for a, b in ways]
    assert prices == sorted(prices) and (members[:2], members[2:]) in ways and (members[:3], members[3:]) in ways
    assert all(a and b and set(a) | set(b) == set(members) and not set(a) & set(b) for a, b in ways)
    assert not any(p in b for a, b in ways for m in a for p in g.producers[m])  # nothing runs back
    assert added_bytes(g, members[:2], members[2:]) == 2 * 512 * 256 * 2  # n is written and read
    assert added_bytes(g, members[:3], members[3:]) == 2 * 512 * 4000 * 4  # l is
    assert added_bytes(g, ("q",), members[1:]) == 2 * 512 * 4 + 512 * 256 * 2  # q is, and x is read again


def test_a_value_that_is_in_memory_anyway_is_only_read_again() -> None:
    p = parse(HEAD.format(rows="512", syms="").replace("return y", "return y, n"))
    g = Graph.of(p)
    members = tuple(c.name for c in g.program.body)
    assert added_bytes(g, members[:2], members[2:]) == 512 * 256 * 2


@pytest.mark.parametrize("rows", ["512", "n"])
def test_what_fits_stays_together(rows: str) -> None:
    whole = kernels(rows, {"nothing"})
    cut = kernels(rows, {"n", "l"})
    assert any({"n", "l"} <= set(x) for x in whole)
    assert not any({"n", "l"} <= set(x) for x in cut)
    assert any({"q", "n"} <= set(x) for x in cut) and any({"l", "m", "s"} <= set(x) for x in cut)


def test_single_operators_are_the_end() -> None:
    alone = kernels("512", set())
    assert all(len(x) == 1 for x in alone) and len(alone) == 6


#: b and c, which have nothing to do with each other, in a kernel read a, and are read by d.
SIBLINGS = """
program siblings()
  input x: f32[512, 256]
  dim i = 512
  dim j = 256
  a[i]: f32 = sum[j] x[i, j]
  b[i]: f32 = sum[j] x[i, j] * a[i]
  c[i]: f32 = sum[j] x[i, j] * x[i, j]
  d[i]: f32 = a[i] + c[i]
  return b, d
"""


def test_parts_are_not_joined_around_a_kernel_that_stands_between_them() -> None:
    """What leads from a to d is no operator, but a kernel of two."""
    fitting = _Fitting(Graph.of(parse(SIBLINGS)), GpuTarget(refuse=lambda k: "no"), frozenset(), {})
    a, middle, d = (Group(members, ("i",)) for members in (("a",), ("b", "c"), ("d",)))
    assert fitting._between(a, d, [a, middle, d])
    alone = [Group((m,), ("i",)) for m in "bc"]
    assert not fitting._between(a, d, [a, *alone, d])


PARTIAL = """
program partial()
  input x: bf16[16, 64, 32]
  input g: bf16[16, 64, 16]
  dim b = 16
  dim s = 64
  dim i = 32
  dim j = 16
  w[i, j]: bf16 = sum[b, s] x[b, s, i] * g[b, s, j]
  n[i]: f32 = sum[j] w[i, j] * w[i, j]
  t[b, i]: f32 = sum[s] x[b, s, i] * n[i]
  return w, t
"""


def test_products_of_the_library_are_not_split_into_partial_sums() -> None:
    """t sums over fewer of the axes than w, which t depends on: law split would write a w for each b, rounded."""
    p = parse(PARTIAL)
    assert "w_in" in {c.name for c in fuse_for_gpu(p).program.body}
    whole = fuse_for_gpu(p, calls=(("w",),))
    assert "w_in" not in {c.name for c in whole.program.body}
    assert ("w",) in {k.plan.group.members for k in whole.kernels}


SCALED = """
program scaled()
  input x: bf16[512, 256]
  input w: bf16[64, 256]
  input z: bf16[512, 64]
  dim i = 512
  dim j = 256
  dim c = 64
  n[i, j]: bf16 = maximum(x[i, j], 0.0)
  l[i, c]: bf16 = sum[j] n[i, j] * w[c, j]
  m[i]: f32 = sum[c] {summed}
  return m
"""


@pytest.mark.parametrize("library", [True, False])
def test_a_product_that_is_cut_from_its_reduction_is_the_library_s(library: bool) -> None:
    """With maps alone a kernel of ours has no main loop like the library's."""
    p = parse(SCALED.format(summed="l[i, c] * z[i, c]"))

    def groups(refused: set[str]) -> set[tuple[str, ...]]:
        refuse = lambda k: "no" if refused <= set(k.plan.group.members) else None  # noqa: E731
        return {k.plan.group.members for k in fuse_for_gpu(p, GpuTarget(refuse=refuse, library=library)).kernels}

    assert groups({"nothing"}) == {("n", "l", "m")}
    assert groups({"l", "m"}) == ({("n",), ("l",), ("m",)} if library else {("n", "l"), ("m",)})


MASKED = """
program masked()
  input s: f32[2, 8, 512, 512]
  input t: f32[2, 8, 512, 512]
  input seen: bool[2, 512]
  dim b = 2
  dim h = 8
  dim i = 512
  dim j = 512
  dim u = {other}
  m[b, i, j]: bool = (j <= i) & seen[b, j] & (erf(exp(s[b, 0, i, j])) * tanh(s[b, 0, i, j]) > 0.5)
  x[b, h, i, j]: f32 = where(m[b, i, j], s[b, h, i, j], 0.0)
  a[b, h, i]: f32 = max[j] x[b, h, i, j]
  y[b, {u}, i, j]: f32 = where(m[b, i, j], t[b, {u}, i, j], 1.0)
  return a, y
"""


def test_a_map_that_goes_to_memory_takes_no_parallel_dim_from_its_readers() -> None:
    """The mask has no heads: with it, a thread block would have all heads of a row."""
    p = parse(MASKED.format(other=8, u="u"))
    of = {m: k.plan.group for k in fuse_for_gpu(p).kernels for m in k.plan.group.members}
    assert of["m"].members == ("m",) and {"b", "h", "i"} <= set(of["a"].parallel) and "x" in of["a"].members
    alone = replace(p, outputs=("a",), body=p.body[:3])  # read once, it is computed where it is read
    (k,) = fuse_for_gpu(alone).kernels
    assert k.plan.group.members == ("m", "x", "a")


HEADS = """
program heads()
  input p: f32[2, {h}, 128, 256]
  input g: bf16[2, 256, {h}, 128]
  dim b = 2
  dim h = {h}
  dim k = 128
  dim n = 256
  dim l = 128
  d[b, h, k, l]: f32 = sum[n] p[b, h, k, n] * g[b, n, h, l]
  y[b, k, l]: f32 = max[h] d[b, h, k, l]
  return y
"""


@pytest.mark.parametrize(("heads", "apart"), [(1, False), (2, False), (4, True)])
def test_a_product_that_no_matrix_unit_takes_is_not_unrolled_by_the_thousand(heads: int, apart: bool) -> None:
    """With all heads in a thread block each of its threads would sum 1,024 products in straight code, compiled for
    minutes. Then the product is the library's."""
    made = compile_program(parse(HEADS.format(h=heads)), device="cuda", goal="fused")
    assert [isinstance(s, LibraryStep) for s in made.steps] == ([True, False] if apart else [False])
    reasons = [r.reason for r in made.fused.grouping.refusals]
    assert any("would hold 262144 elements" in r for r in reasons) == apart


#: A map whose result is small, in front of what does not fit as one.
IN_FRONT = """
program front()
  input x: f32[512, 64]
  input w: f32[64, 256]
  input s: f32[64]
  dim i = 512
  dim j = 64
  dim k = 256
  e[j]: f32 = exp(s[j])
  a[i]: f32 = sum[j] x[i, j] * e[j]
  b[i, j]: f32 = x[i, j] * rsqrt(a[i]) + e[j]
  c[i, k]: f32 = sum[j] b[i, j] * w[j, k]
  d[i, k]: f32 = c[i, k] * c[i, k]
  return d
"""


def test_a_map_that_was_cut_off_in_vain_goes_back_to_its_reader():
    """Cut off first, for least is written there; what is left has to be cut all the same."""

    def refuse(k):
        members = {*k.plan.group.members}
        return "no" if {"b", "c"} <= members or {"c", "d"} <= members else None

    fused = fuse_for_gpu(parse(IN_FRONT), GpuTarget(refuse=refuse, library=False))
    groups = list(dict.fromkeys(k.plan.group.members for k in fused.kernels))
    assert ("e",) not in groups and ("e", "a", "b") in groups, groups


SHARED = """
program shared()
  input x: f32[512, 256]
  dim i = 512
  dim j = 256
  a[i]: f32 = max[j] x[i, j]
  b[i]: f32 = sum[j] exp(x[i, j] - a[i])
  c[]: f32 = sum[i] a[i] + log(b[i])
  d[i]: f32 = sum[j] x[i, j] - a[i] - log(b[i])
  e[]: f32 = sum[i] d[i]
  return c, e
"""


def test_what_is_joined_again_stays_in_front_of_its_other_readers():
    """`a` and `b` go back to `d`, which is computed behind `c`, another reader of theirs."""
    g = Graph.of(parse(SHARED))
    cut = [one_kernel(g, members, ANY) for members in (("a", "b"), ("c",), ("d",))]
    target = GpuTarget(refuse=lambda k: "no" if "c" in k.plan.group.members else None, library=False)
    joined = _Fitting(g, target, frozenset(), {})._put_back(cut)
    assert [x.members for x in joined] == [("a", "b", "d"), ("c",)]


MEANS = """program means()
  input x: f32[4096, 64]
  input y: f32[4096, 64]
  input z: f32[4096, 64]
  dim i = 4096
  dim j = 64
  dim l = 3
  b[i, j]: f32 = x[i, j] + y[i, j] * 2.0
  m[]: f32 = sum[l, i, j] where(l < 1, x[i, j], where(l < 2, z[i, j], b[i, j])) * where(l < 1, x[i, j], 1.0)
  s[]: f32 = sum[i, j] b[i, j] * b[i, j]
  t[]: f32 = m + s
  return b, t
"""


def test_sums_over_all_there_is_are_no_work_of_one_thread_block():
    """Two sums, over different axes, of what is written meanwhile: no segments as one kernel. 592 us on an H100 of the
    last step of an integrator and its losses, of 8 MB."""
    fused = fuse_for_gpu(parse(MEANS))
    blocks = [
        prod(int(k.block.sizes[n.dim].value) for n in walk(k.block.body) if isinstance(n, Loop) and n.kind == "forall")
        for k in fused.kernels
        if {"x", "y", "z", "b"} & {i.name for i in k.block.inputs}
    ]
    assert min(blocks) >= 16
    assert any("thread blocks would read" in r.reason for r in fused.grouping.refusals)
