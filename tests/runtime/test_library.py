"""Products as one call of torch's library: every arrangement of dims against einsum in float64, and the bias."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilefold.pipeline import compile_program
from tilefold.plan.library import library_calls
from tilefold.runtime.library import LibraryStep
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

EXTENT = {"b": 2, "h": 6, "r": 5, "s": 3, "c": 7, "k": 4, "l": 2}


def program(a: str, b: str, out: str, dtype: str = "f32") -> Program:
    """out = sum of a * b; a dim in capitals is divided by 3 there."""
    over = [d for d in dict.fromkeys((a + b).lower()) if d not in out]

    def shape(of: str) -> str:
        return ", ".join(str(EXTENT[d.lower()] // (3 if d.isupper() else 1)) for d in of)

    def index(of: str) -> str:
        return ", ".join(f"{d.lower()} // 3" if d.isupper() else d for d in of)

    dims = "\n".join(f"  dim {d} = {EXTENT[d]}" for d in dict.fromkeys((a + b).lower()))
    return parse(
        f"program p()\n  input a: {dtype}[{shape(a)}]\n  input b: {dtype}[{shape(b)}]\n{dims}\n"
        f"  y[{', '.join(out)}]: {dtype} = sum[{', '.join(over)}] a[{index(a)}] * b[{index(b)}]\n  return y\n"
    )


def by_einsum(a: str, b: str, out: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for n, d in enumerate(a):
        x = x.repeat_interleave(3, n) if d.isupper() else x
    for n, d in enumerate(b):
        y = y.repeat_interleave(3, n) if d.isupper() else y
    return torch.einsum(f"{a.lower()},{b.lower()}->{out}", x.double(), y.double())


def step_of(p: Program) -> LibraryStep:
    q, calls = library_calls(p, [c.name for c in p.body])
    (call,) = calls.values()
    return LibraryStep(call, q)


CASES = [
    *itertools.product(("rk", "kr"), ("kc", "ck"), ("rc", "cr")),
    *itertools.product(("kc", "ck"), ("rk", "kr"), ("rc", "cr")),
    ("brk", "kc", "brc"), ("brk", "bkc", "brc"), ("brk", "bkc", "bcr"), ("brk", "bkc", "rbc"), ("rbk", "cbk", "bcr"),
    ("bhrk", "bhck", "bhrc"), ("bhrk", "bhck", "hbcr"), ("rsk", "ck", "rsc"), ("rsk", "ck", "src"),
    ("rkl", "clk", "rc"),
    ("hrk", "Hkc", "hrc"), ("bhrk", "bHck", "bhrc"), ("bhrk", "bHck", "brhc"), ("Hkc", "hrk", "hrc"),
    ("hk", "Hkc", "hc"),
    ("bhr", "bHrc", "bhc"), ("rk", "k", "r"), ("k", "kc", "c"), ("brk", "bk", "br"), ("bk", "bk", "b"),
    ("r", "c", "rc"), ("bhsr", "bsk", "hrk"), ("bshr", "bhsk", "bhrk"), ("brhs", "bsck", "hrck"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ("bhsr", "bsk", "hrk"),  # a weight's gradient of heads: tokens of all sequences are summed
        ("bshr", "bhsk", "bhrk"),  # of a batch of heads that no one stride tells
    ],
)
def test_a_copy_leaves_side_by_side_what_lies_so(a: str, b: str, out: str) -> None:
    step = step_of(program(a, b, out))
    x = torch.randn([EXTENT[d] for d in a])
    y = step._views[0](x)
    assert y.data_ptr() != x.data_ptr() and not y.is_contiguous() and y.mT.is_contiguous()


@pytest.mark.parametrize("a, b, out", CASES)
def test_every_arrangement(a: str, b: str, out: str) -> None:
    p = program(a, b, out)
    step = step_of(p)
    gen = torch.Generator().manual_seed(0)
    x, y = (torch.randn([int(e.value) for e in i.shape], generator=gen) for i in p.inputs)  # type: ignore[attr-defined]
    want = by_einsum(a, b, out, x, y)
    for left, right in ((x, y), (x.mT.contiguous().mT if x.ndim > 1 else x, y.flip(0).flip(0))):
        tensors = {"a": left, "b": right}
        step.run(tensors, {})
        assert tensors["y"].is_contiguous() and tensors["y"].shape == want.shape
        torch.testing.assert_close(tensors["y"].double(), want, rtol=1e-5, atol=1e-5)
    whole = torch.full(want.shape, 7.0)
    step.run({"a": x, "b": y, "y": whole}, {})
    torch.testing.assert_close(whole.double(), want, rtol=1e-5, atol=1e-5)
    strided = torch.full((*want.shape, 2), 7.0)[..., 0]
    step.run({"a": x, "b": y, "y": strided}, {})
    torch.testing.assert_close(strided.double(), want, rtol=1e-5, atol=1e-5)


class Copies(TorchDispatchMode):
    """What is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.found.append(args[func is torch.ops.aten.copy_.default])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "a, b, out",
    [
        ("rkl", "kcl", "rc"),  # what is summed is not side by side in b
        ("kcl", "rkl", "cr"),
        ("brk", "bkc", "rbc"),  # the result has another order
        ("rk", "sck", "scr"),
    ],
)
def test_what_has_to_be_copied_is_once_and_as_it_lies(a: str, b: str, out: str) -> None:
    """In lines of the last axis: torch's copies between two orders take several times as long."""
    p = program(a, b, out)
    x, y = (torch.randn([int(e.value) for e in i.shape]) for i in p.inputs)  # type: ignore[attr-defined]
    want = by_einsum(a, b, out, x, y)
    target = torch.empty(want.shape)
    with Copies() as copies:
        step_of(p).run({"a": x, "b": y, "y": target}, {})
    torch.testing.assert_close(target.double(), want, rtol=1e-5, atol=1e-5)
    assert len(copies.found) <= 1 and all(t.stride(-1) == 1 for t in copies.found)


@pytest.mark.parametrize(
    "a, b, dims, out",
    [
        ("[0, r, k]", "[2, k, c]", "r, c", (5, 7)),
        ("[b, r, 1, k]", "[c, k, 0]", "b, r, c", (3, 5, 7)),  # rows of two axes
        ("[1, b, r, k]", "[b, 0, c, k]", "b, c, r", (3, 7, 5)),
    ],
)
def test_one_place_of_an_axis_is_a_view(a: str, b: str, dims: str, out: tuple[int, ...]) -> None:
    extent = {"b": 3, "r": 5, "c": 7, "k": 4}
    shapes = [[extent.get(ix, 3) for ix in ld.strip("[]").split(", ")] for ld in (a, b)]
    used = "\n".join(f"  dim {d} = {n}" for d, n in extent.items() if d in a + b)
    p = parse(
        f"program p()\n  input a: f32{shapes[0]}\n  input b: f32{shapes[1]}\n{used}\n"
        f"  y[{dims}]: f32 = sum[k] a{a} * b{b}\n  return y\n"
    )
    gen = torch.Generator().manual_seed(0)
    x, y = (torch.randn(s, generator=gen) for s in shapes)
    parts, letters = [], []
    for t, ld in ((x, a), (y, b)):
        at = ld.strip("[]").split(", ")
        parts.append(t[tuple(int(ix) if ix.isdigit() else slice(None) for ix in at)].double())
        letters.append("".join(ix for ix in at if not ix.isdigit()))
    want = torch.einsum(f"{','.join(letters)}->{dims.replace(', ', '')}", *parts)
    step = step_of(p)
    for _ in range(2):  # views are remembered
        tensors = {"a": x, "b": y}
        step.run(tensors, {})
        assert tensors["y"].shape == out
        torch.testing.assert_close(tensors["y"].double(), want, rtol=1e-5, atol=1e-5)


def test_narrow_operands_are_summed_in_float32() -> None:
    p = parse(
        "program p()\n  input a: bf16[5, 300]\n  input b: bf16[300, 7]\n  dim r = 5\n  dim c = 7\n  dim k = 300\n"
        "  y[r, c]: f32 = sum[k] a[r, k] * b[k, c]\n  return y\n"
    )
    x, y = torch.randn(5, 300).bfloat16(), torch.randn(300, 7).bfloat16()
    tensors = {"a": x, "b": y}
    step_of(p).run(tensors, {})
    assert tensors["y"].dtype is torch.float32
    torch.testing.assert_close(tensors["y"].double(), x.double() @ y.double(), rtol=1e-5, atol=1e-5)


def test_floats_of_eight_bits_are_multiplied_though_torch_promotes_them_to_nothing() -> None:
    p = parse(
        "program p()\n  input a: e4m3[5, 64]\n  input b: e4m3[64, 7]\n  dim r = 5\n  dim c = 7\n  dim k = 64\n"
        "  y[r, c]: f32 = sum[k] a[r, k] * b[k, c]\n  return y\n"
    )
    x, y = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((5, 64), (64, 7)))
    tensors = {"a": x, "b": y}
    step_of(p).run(tensors, {})
    torch.testing.assert_close(tensors["y"].double(), x.double() @ y.double(), rtol=1e-5, atol=1e-5)


BIASED = """
program biased(n)
  input x: f32[n, 6]
  input w: f32[7, 6]
  input b: f32[7]
  input z: f32[n, 7]
  dim i = n
  dim j = 7
  dim k = 6
  m[i, j]: f32 = sum[k] x[i, k] * w[j, k]
  y[i, j]: f32 = {first}
  u[i, j]: f32 = {second}
  return y, u
"""


@pytest.mark.parametrize(
    ("first", "second", "absorbed"),
    [
        ("m[i, j] + b[j]", "tanh(y[i, j])", True),
        ("exp(b[j] + m[i, j])", "tanh(m[i, j] + b[j])", True),
        ("m[i, j] + b[j] + z[i, j]", "z[i, j]", True),
        ("m[i, j] + z[i, j]", "z[i, j]", False),  # no vector
        ("m[i, j] + b[j]", "tanh(m[i, j])", False),  # also read without the bias
        ("m[i, j] - b[j]", "z[i, j]", False),
        ("m[i, j] + b[j]", "m[i, j] + z[0, j]", False),  # another bias
    ],
)
def test_a_bias_that_all_readers_add_is_the_library_s(first: str, second: str, absorbed: bool) -> None:
    p = parse(BIASED.format(first=first, second=second))
    _, calls = library_calls(p, ["m"])
    ((members, call),) = calls.items()
    assert (call.bias is not None) == absorbed == (len(members) == 2)
    gen = torch.Generator().manual_seed(0)
    x, w, b, z = (torch.randn(s, generator=gen) for s in ((5, 6), (7, 6), (7,), (5, 7)))
    md, bd, zd = x.double() @ w.double().T, b.double(), z.double()
    for goal in ("fast", "greedy"):
        compiled = compile_program(p, goal=goal, load=False)
        got = compiled({"x": x, "w": w, "b": b, "z": z}, {"n": 5})
        names = {"m[i, j]": "md", "b[j]": "bd", "z[i, j]": "zd", "z[0, j]": "zd[0]", "y[i, j]": "yd"}
        scope = {"md": md, "bd": bd, "zd": zd, "exp": torch.exp, "tanh": torch.tanh}
        for name, text in (("y", first), ("u", second)):
            for old, new in names.items():
                text = text.replace(old, new)
            scope[f"{name}d"] = eval(text, scope)
            torch.testing.assert_close(got[name].double(), scope[f"{name}d"], rtol=1e-5, atol=1e-5)


def around(a: str, b: str, out: str, wide: int) -> Program:
    """The same with extents of a library's tiles: e, f around the contraction k, and rows r."""
    extent = {"e": 3, "k": 16, "f": wide, "r": 130}
    dims = "\n".join(f"  dim {d} = {extent[d]}" for d in dict.fromkeys(a + b))
    x, y = (", ".join(str(extent[d]) for d in of) for of in (a, b))
    return parse(
        f"program p()\n  input a: f32[{x}]\n  input b: f32[{y}]\n{dims}\n"
        f"  y[{', '.join(out)}]: f32 = sum[k] a[{', '.join(a)}] * b[{', '.join(b)}]\n  return y\n"
    )


@pytest.mark.parametrize(
    ("a", "b", "out", "wide", "batch"),
    [
        ("rk", "ekf", "erf", 136, ("e",)),  # experts on the same rows
        ("ekf", "rk", "erf", 136, ("e",)),
        ("rk", "ekf", "efr", 136, ("e",)),
        ("rk", "ekf", "ref", 136, ()),  # the result has another order
        ("rk", "ekf", "erf", 137, ()),  # the library is slow with such rows
        ("rk", "ekf", "erf", 64, ()),  # few columns
        ("rk", "kef", "ref", 136, ()),  # they are side by side
        ("rk", "kef", "efr", 136, ()),
        ("rk", "kef", "erf", 136, ("e",)),  # but not in the result
        ("kef", "rk", "erf", 136, ("e",)),
    ],
)
def test_what_lies_around_a_contraction_is_a_batch(a, b, out, wide, batch, monkeypatch) -> None:
    p = around(a, b, out, wide)
    x, y = (torch.randn([int(e.value) for e in i.shape]) for i in p.inputs)  # type: ignore[attr-defined]
    tensors, step = {"a": x, "b": y}, step_of(p)
    seen: list[torch.Tensor] = []
    whole = torch.bmm if batch else torch.mm
    monkeypatch.setattr(torch, "bmm" if batch else "mm", lambda m, n: seen.extend((m, n)) or whole(m, n))
    step.run(tensors, {})
    monkeypatch.undo()
    torch.testing.assert_close(tensors["y"].double(), by_einsum(a, b, out, x, y), rtol=1e-5, atol=1e-4)
    assert step.matrices.batch == batch
    if batch:  # as they lie in memory
        assert {t.data_ptr() for t in seen} == {x.data_ptr(), y.data_ptr()}


@pytest.mark.parametrize(
    ("a", "b", "out", "library"),
    [
        ("bkc", "bk", "bc", False),  # each element once: memory is all that counts
        ("brk", "bkc", "brc", True),
        ("kc", "k", "c", True),  # one vector: libraries are made for it
    ],
)
def test_batches_of_vectors_are_kernels_of_a_gpu(a, b, out, library) -> None:
    steps = compile_program(program(a, b, out), device="interpreter", load=False).steps
    assert [isinstance(s, LibraryStep) for s in steps] == [library]
