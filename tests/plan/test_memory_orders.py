"""Operands and results of library products, in orders of memory that the library takes without a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilefold.frontend.fuse import trace
from tilefold.plan.hardware import H100
from tilefold.plan.library import library_calls
from tilefold.plan.memory_orders import _around, library_copies, without_copies
from tilefold.runtime.library import LibraryStep
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse, show


def program(sizes: dict[str, int], inputs: dict[str, str], body: str, result: str) -> Program:
    dims = "\n".join(f"  dim {d} = {n}" for d, n in sizes.items())
    given = "\n".join(f"  input {t}: f32[{', '.join(str(sizes[d]) for d in of)}]" for t, of in inputs.items())
    return parse(f"program p()\n{given}\n{dims}\n{body}\n  return {result}\n")


#: Block by block, then across the blocks: no order of the first result's axes but i, k, j serves both.
MONARCH = program(
    {"i": 3, "j": 11, "k": 4, "m": 4, "n": 5},
    {"x": "jim", "l": "imk", "r": "kin"},
    "  s[i, j, k]: f32 = sum[m] x[j, i, m] * l[i, m, k]\n  out[j, n, k]: f32 = sum[i] s[i, j, k] * r[k, i, n]",
    "out",
)
#: One operand for rows i and k, with a batch between them.
SHARED = program(
    {"i": 6, "j": 2, "k": 64, "l": 8, "m": 4},
    {"a": "ijkm", "b": "jml"},
    "  s[i, j, k, l]: f32 = sum[m] a[i, j, k, m] * b[j, m, l]\n  out[i, j, k, l]: f32 = exp(s[i, j, k, l])",
    "out",
)
#: Heads behind rows: whoever computes an operand writes them in front.
HEADS = program(
    {"i": 2, "h": 3, "r": 7, "c": 8, "k": 5},
    {"q": "ihrk", "v": "ichk"},
    "  w[i, c, h, k]: f32 = exp(v[i, c, h, k])\n  s[i, h, r, c]: f32 = sum[k] q[i, h, r, k] * w[i, c, h, k]\n"
    "  out[i, h, r, c]: f32 = exp(s[i, h, r, c])",
    "out",
)
#: Two products read the same input across.
TWICE = program(
    {"i": 6, "j": 7, "k": 5, "m": 8},
    {"x": "kij", "z": "kij", "w": "jmk"},
    "  s[k, i, m]: f32 = sum[j] x[k, i, j] * w[j, m, k]\n  t[k, i, m]: f32 = sum[j] z[k, i, j] * w[j, m, k]\n"
    "  out[k, i, m]: f32 = s[k, i, m] + t[k, i, m]",
    "out",
)
#: Rows around what is summed are a batch of the second product: nothing is to be done.
MIXED = program(
    {"i": 3, "j": 6, "k": 136, "l": 5, "m": 128},
    {"x": "ijl", "c": "lk", "s": "mj"},
    "  y[i, j, k]: f32 = sum[l] x[i, j, l] * c[l, k]\n  out[i, m, k]: f32 = sum[j] s[m, j] * y[i, j, k]",
    "out",
)
#: Places in windows of images, by heads: more axes than are looked at one by one.
WINDOWS = program(
    {"i": 2, "x": 3, "y": 2, "z": 3, "w": 4, "h": 2, "r": 3, "c": 4, "k": 5},
    {"a": "ixyhzwrc", "v": "ixyhrck"},
    "  out[i, x, y, z, w, h, k]: f32 = sum[r, c] a[i, x, y, h, z, w, r, c] * v[i, x, y, h, r, c, k]",
    "out",
)


def products(p: Program) -> frozenset[str]:
    return frozenset(c.name for c in p.body if c.reducer == "sum")


def copies(p: Program, names: frozenset[str]) -> int:
    return sum(library_copies(p, c) for c in p.body if c.name in names)


@pytest.mark.parametrize(
    ("p", "added", "turned"),
    [
        (MONARCH, ["out_made"], {"s": "ikj"}),
        (SHARED, ["b_turned"], {"s": "ijkl"}),
        (HEADS, [], {"w": "ihck"}),
        (TWICE, ["w_turned"], {}),
        (MIXED, [], {"y": "ijk"}),
        (WINDOWS, ["out_made"], {"out_made": "ixyhzwk"}),
    ],
)
def test_the_library_copies_nothing(p: Program, added: list[str], turned: dict[str, str]) -> None:
    q, names = without_copies(p, products(p), H100)
    assert copies(q, names) == 0 < len(names) == len(products(p)) and (copies(p, products(p)) > 0) == (q != p)
    assert [c.name for c in q.body if c.name not in {x.name for x in p.body}] == added
    assert {c.name: "".join(c.dims) for c in q.body if c.name in turned} == turned
    gen = torch.Generator().manual_seed(0)
    args = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen) for i in p.inputs}  # type: ignore[attr-defined]
    torch.testing.assert_close(run(q, args)["out"], run(p, args)["out"], rtol=1e-4, atol=1e-4)


def test_a_product_has_the_inner_axis_of_what_its_readers_move() -> None:
    """The library writes a matrix or the transposed one; a kernel that reads it across moves it slowly."""
    text = (
        "  s[i, k, j]: f32 = sum[m] x[i, m, k] * y[i, m, j]\n  out[i, j, k]: f32 = exp(s[i, k, j] + z[i, j, k])\n"
        "  t[k]: f32 = sum[i, j] s[i, k, j] * z[i, j, k]"
    )
    p = program({"i": 6, "j": 7, "k": 8, "m": 9}, {"x": "imk", "y": "imj", "z": "ijk"}, text, "out, t")
    q, names = without_copies(p, frozenset({"s"}), H100)
    assert {c.name: "".join(c.dims) for c in q.body} == {"s": "ijk", "out": "ijk", "t": "k"}
    assert copies(q, names) == 0
    other = show(p).replace("out[i, j, k]: f32 = exp(s[i, k, j] + z[i, j, k])", "out[i, k, j]: f32 = exp(s[i, k, j])")
    q, _ = without_copies(parse(other), frozenset({"s"}), H100)
    assert {c.name: "".join(c.dims) for c in q.body}["s"] == "ikj"  # one reads it so, one so


def test_small_tensors_beside_a_product_turn_nothing() -> None:
    """Norms of rows and of columns, beside all distances: that there are more rows is no reason."""
    text = "  s[i, k]: f32 = sum[m] x[i, m] * y[k, m]\n  out[i]: f32 = min[k] a[i] - 2.0 * s[i, k] + b[k]"
    p = program({"i": 64, "k": 32, "m": 9}, {"x": "im", "y": "km", "a": "i", "b": "k"}, text, "out")
    q, _ = without_copies(p, frozenset({"s"}), H100)
    assert {c.name: "".join(c.dims) for c in q.body}["s"] == "ik"


def test_statements_beside_it_are_the_same_ones() -> None:
    """What neither makes nor reads a turned tensor is not made again for each."""
    text = show(MONARCH).replace(
        "  return out", "  beside[i, j]: f32 = exp(l[i, 0, 0] + x[j, i, 0])\n  return out, beside"
    )
    p = parse(text)
    q, _ = without_copies(p, products(p), H100)
    assert q != p and q.body[-1].name == "beside"
    assert q.body[-1] is p.body[-1]


def test_what_conventions_fix_stays() -> None:
    """A result is copied, not turned; so is what another call reads."""
    p = program(
        {"i": 3, "j": 11, "k": 4, "m": 4, "n": 5},
        {"x": "jim", "l": "imk", "r": "kin"},
        "  s[i, j, k]: f32 = sum[m] x[j, i, m] * l[i, m, k]\n  out[k, j, n]: f32 = sum[i] s[i, j, k] * r[k, i, n]\n"
        "  t[i, j]: f32 = sum[k] s[i, j, k]",
        "out, t",
    )
    q, _ = without_copies(p, frozenset({"s", "out"}), H100)
    assert {c.name: "".join(c.dims) for c in q.body} == {"s": "ikj", "out": "kjn", "t": "ij"}
    q, _ = without_copies(p, frozenset({"s", "out"}), H100, fixed={"t"})
    assert {c.name: "".join(c.dims) for c in q.body} == {"s": "ijk", "s_turned": "ikj", "out": "kjn", "t": "ij"}


@pytest.mark.parametrize("made", [True, False])
def test_what_is_given_may_lie_as_it_is_read(made: bool) -> None:
    """Attention's result, heads side by side behind rows, is read so; a sum's result has the order that it says."""
    p = program(
        {"i": 2, "h": 3, "r": 7, "k": 5, "c": 6},
        {"x": "ihrkc", "w": "hkc"},
        "  y[i, h, r, k]: f32 = sum[c] x[i, h, r, k, c]\n  out[i, r, c]: f32 = sum[h, k] y[i, h, r, k] * w[h, k, c]",
        "out",
    )
    q, _ = without_copies(p, frozenset({"out"}), H100, fixed={"y"}, given=() if made else {"y"})
    assert [c.name for c in q.body] == ["y", *["y_turned"] * made, "out"]
    p = program({"i": 2, "h": 3, "r": 7, "k": 5, "c": 6}, {"x": "ihrk", "w": "hkc"},
                "  out[i, r, c]: f32 = sum[h, k] x[i, h, r, k] * w[h, k, c]", "out")  # fmt: skip
    assert without_copies(p, frozenset({"out"}), H100)[0] == p


def test_a_copy_that_is_a_result_is_what_the_call_reads() -> None:
    """It is made once, in front of the call, though the program has it behind."""
    p = program(
        {"i": 2, "h": 3, "r": 7, "k": 5, "c": 6},
        {"x": "ihrk", "w": "hkc"},
        "  y[i, h, r, k]: f32 = exp(x[i, h, r, k])\n  out[i, r, c]: f32 = sum[h, k] y[i, h, r, k] * w[h, k, c]\n"
        "  kept[i, r, h, k]: f32 = y[i, h, r, k]",
        "out, y, kept",
    )
    q, _ = without_copies(p, frozenset({"out"}), H100)
    assert [c.name for c in q.body] == ["y", "kept", "out"]
    gen = torch.Generator().manual_seed(0)
    args = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen) for i in p.inputs}  # type: ignore[attr-defined]
    torch.testing.assert_close(run(q, args)["out"], run(p, args)["out"], rtol=1e-4, atol=1e-4)


def test_what_is_known_to_lie_otherwise_is_copied_by_a_statement() -> None:
    """A sum over a batch and what both have side by side: torch would copy it in front of the call."""
    p = program({"b": 3, "i": 7, "j": 6, "k": 5}, {"x": "bik", "w": "bkj"},
                "  out[i, j]: f32 = sum[b, k] x[b, i, k] * w[b, k, j]", "out")  # fmt: skip
    assert without_copies(p, products(p), H100)[0] == p
    q, names = without_copies(replace(p, inputs=tuple(replace(i, row_major=True) for i in p.inputs)), products(p), H100)
    assert [(c.name, "".join(c.dims)) for c in q.body] == [("x_turned", "ibk"), ("out", "ij")]
    assert copies(q, names) == 0 < copies(p, names)


@pytest.mark.parametrize("turned", [False, True])
def test_how_an_argument_lies_is_known(turned: bool) -> None:
    x, w = torch.randn(3, 7, 5), torch.randn(3, 6, 5)
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
    p = trace(lambda x, w: torch.einsum("bik,bjk->ij", x, w), x, w).program
    assert {i.name: i.row_major for i in p.inputs} == {"x": not turned, "w": True}


def test_a_result_is_written_with_its_own_strides() -> None:
    """Rows of all matrices side by side: no matrix after the other, but each has strides."""
    p = program({"i": 3, "j": 11, "k": 4, "m": 5}, {"x": "ijm", "l": "imk"},
                "  s[j, i, k]: f32 = sum[m] x[i, j, m] * l[i, m, k]", "s")  # fmt: skip
    q, calls = library_calls(p, ["s"])
    (call,) = calls.values()
    step = LibraryStep(call, q)  # type: ignore[arg-type]
    x, y = torch.randn(3, 11, 5), torch.randn(3, 5, 4)
    want = torch.einsum("ijm,imk->jik", x, y)
    for target in (None, torch.empty(11, 3, 4), torch.empty(11, 3, 4, 2)[..., 0]):
        tensors = {} if target is None else {"s": target}
        step._within(tensors, x, y, {})
        torch.testing.assert_close(tensors["s"], want)
        assert target is None or tensors["s"] is target


def test_a_place_is_no_axis_that_kernels_run_along() -> None:
    """Queries are one third of a product, of which nothing that is read beside them says how they should lie: the
    thirds became the inner axis, of which every third element is read."""
    p = program(
        {"i": 2000, "k": 1536, "l": 3, "m": 12, "n": 128},
        {"x": "ik", "w": "lmnk", "b": "n"},
        "  qkv[i, l, m, n]: f32 = sum[k] x[i, k] * w[l, m, n, k]\n"
        "  s[i, m]: f32 = sum[n] qkv[i, 0, m, n] * qkv[i, 0, m, n]\n"
        "  q[i, m, n]: f32 = qkv[i, 0, m, n] * s[i, m] + b[n]\n"
        "  t[i, m]: f32 = sum[n] qkv[i, 1, m, n] * qkv[i, 1, m, n]\n"
        "  r[i, m, n]: f32 = qkv[i, 1, m, n] * t[i, m] + b[n]\n"
        "  out[i, m, n]: f32 = q[i, m, n] * r[i, m, n] + qkv[i, 2, m, n]",
        "out",
    )
    around = _around(p, "qkv", ["qkv"])
    assert around is not None and set(around.kernels) == {3}
    assert without_copies(p, frozenset({"qkv"}), H100)[0].body == p.body


PATCHES = """
program patches()
  input x: bf16[8, 128, 48, 2, 48, 2]
  input w: bf16[64, 128, 2, 2]
  dim i = 8
  dim j = 48
  dim k = 48
  dim l = 64
  dim m = 128
  dim n = 2
  dim p = 2
  c[i, j, k, l]: bf16 = sum[m, n, p] x[i, m, j, n, k, p] * w[l, m, n, p]
  return c
"""


def test_patches_whose_places_and_channels_take_turns_are_copied_by_a_statement() -> None:
    p = parse(PATCHES)
    p = replace(p, inputs=tuple(replace(i, row_major=True) for i in p.inputs))
    q, products = without_copies(p, frozenset({"c"}), H100)
    (copy,) = (c for c in q.body if c.name != "c")
    assert products == {"c"} and copy.dims == ("i", "j", "k", "m", "n", "p")
    assert library_copies(p, p.body[0]) and not library_copies(q, next(c for c in q.body if c.name == "c"))
