"""What a maximum bounds, quotients by inverses, rows kept as they are in memory: the kernels that follow."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import assembled, heads, meta
from tilefold.algebra.expr import Expr
from tilefold.algebra.text import Names
from tilefold.algebra.text import parse as parse_expr
from tilefold.backends.triton.bounds import SLACK, Bounds
from tilefold.backends.triton.build import Target
from tilefold.backends.triton.compile import resources
from tilefold.backends.triton.launch import TritonKernel
from tilefold.block.canonical import canonical
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.suites.gpu import operators as o
from tilefold.tile.layout import usual_units

B, F, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def expr(text: str) -> Expr:
    return parse_expr(text, Names(dims={"i", "j"}, tensors={"x", "m", "s", "t"}, syms=set()))


def test_a_quotient_by_its_maximum_is_bounded():
    known = Bounds()
    x = expr("x[i, j]")
    assert known.quotient(x, expr("m[i]")) is None
    known.reduced("m", "max", expr("abs(x[i, j])"), accumulate=False)
    known.mapped("s", expr("maximum(m[i], 1e-12) / 448.0"))
    assert known.quotient(x, expr("s[i]")) == pytest.approx(448 * SLACK)
    assert known.quotient(x, expr("m[i] * 2.0")) == pytest.approx(0.5 * SLACK)
    for none in ("m[i] * -2.0", "m[i] - 1.0", "minimum(m[i], 1.0)"):
        assert known.quotient(x, expr(none)) is None
    assert known.quotient(expr("x[j, i]"), expr("s[i]")) is None


def test_what_is_written_anew_bounds_nothing():
    known = Bounds()
    x = expr("x[i, j]")
    known.reduced("m", "max", expr("abs(x[i, j])"), accumulate=False)
    known.mapped("s", expr("m[i] / 2.0"))
    known.reduced("m", "max", expr("abs(x[i, j]) * 0.5"), accumulate=False)
    assert known.quotient(x, expr("m[i]")) is None and known.quotient(x, expr("s[i]")) is not None
    known.reduced("m", "max", expr("abs(x[i, j])"), accumulate=True)
    assert known.quotient(x, expr("m[i]")) is not None
    known.reduced("m", "sum", expr("abs(x[i, j])"), accumulate=True)
    assert known.quotient(x, expr("m[i]")) is None
    known.forget(("s",))
    assert known.quotient(x, expr("s[i]")) is None


def kernels(fn, *args):
    """Source and resources on sm_90 of the kernels of a function."""
    torch._dynamo.reset()
    program = trace(fn, *args).program
    torch._dynamo.reset()
    for k in fuse_for_gpu(program).kernels:
        t = TritonKernel(canonical(k.block).block)
        v = t.variant(usual_units(t.block), t.sizes({}), tf32=False, interpreted=False)
        text = v.rendered.source
        done = resources(v.kernel, v.rendered, v.config, Target("cuda", 90))
        yield text[text.index(f"def {v.rendered.name}(") :], v, done


def fixed_scale(a):
    return (a.float() / 3.5).to(E4M3)


def other_rows(a, b):
    """The maximum of one tensor, the elements of another."""
    scale = b.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (a.float() / scale).to(E4M3)


def test_only_what_a_maximum_bounds_is_not_tested_for_overflow():
    ((text, _, done),) = kernels(o.quantise, meta(64, 2560, dtype=B))
    assert "tf_in_e4m3" not in text and "tf_inverse_rest" in text and done.has("cvt.rn.satfinite.e4m3x2.f32")
    for fn, args in ((fixed_scale, 1), (other_rows, 2)):
        for text, _, _ in kernels(fn, *(meta(64, 2560, dtype=B) for _ in range(args))):
            assert ("tf_in_e4m3" in text) == (".to(tl.float8e4nv)" in text)


def rounded(x):
    return torch.round(x / x.abs().amax(-1, keepdim=True))


def test_quotients_by_what_a_row_shares_are_products():
    ((text, _, _),) = kernels(o.softmax, meta(64, 1000, dtype=F))
    assert "tf_inverse_rest(" in text and "tf_even(" in text and "/" not in text.split("tl.store")[1]
    ((text, _, _),) = kernels(o.softmax, meta(64, 1000, dtype=B))
    assert "tf_inverse(" in text and "tf_inverse_rest(" not in text
    ((text, _, _),) = kernels(rounded, meta(64, 1000, dtype=F))
    assert "tf_quotient(" in text
    ((text, _, _),) = kernels(lambda x, y: x / y, meta(64, 1000, dtype=F), meta(64, 1000, dtype=F))
    assert "tf_" not in text and " / " in text


def test_positions_that_are_divided_round_nothing():
    """Heads that share keys: i // 4 is an index, and the quotient at the end a plain one."""
    for text, _, _ in kernels(o.gqa, *heads(1, 8, 256, 256, 64, 2)):
        assert "tf_quotient(" not in text and "div_rn" not in text


def test_a_result_is_rounded_once():
    def halved(x):
        return (x * 0.5).to(B)

    ((text, _, _),) = kernels(halved, meta(64, 1000, dtype=B))
    assert text.count(".to(tl.bfloat16)") == 1


@pytest.mark.parametrize("fn", [o.softmax, o.rms_norm])
def test_long_narrow_rows_are_kept_as_they_are_in_memory(fn, tmp_path):
    """So that two thread blocks fit into a multiprocessor, which one block of float32 values fills."""
    args = (meta(8192, 32768, dtype=B), *([meta(32768, dtype=B)] if fn is o.rms_norm else []))
    ((text, v, done),) = kernels(fn, *args)
    assert "tf_again(" in text and text.count("tl.load(p_x") + text.count("tl.load(at_x") == 1
    said = assembled(done.assembly["ptx"], "sm_90a", tmp_path)
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    assert registers * 32 * v.config.warps <= 65536 // 2 and " 0 bytes spill stores" in said
    ((text, _, _),) = kernels(fn, *(x.to(F) for x in args))
    assert "tf_again(" not in text
