"""Products that a sum of the same operand is subtracted from keep float32 in memory."""

from __future__ import annotations

import pytest
import torch

import tilefold  # noqa: F401 (registers the back end)
from tilefold.algebra.dtypes import DType
from tilefold.pipeline import gpu_kernels
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.text import parse
from tilefold.tensor.unrounded import unrounded

PROGRAM = """program gradient()
  input a: bf16[3, 7, 4]
  input v: bf16[3, 6, 4]
  input o: bf16[3, 7, 4]
  input p: f32[3, 7, 6]
  dim h = 3
  dim i = 7
  dim k = 6
  dim e = 4
  d[h, i, k]: bf16 = sum[e] a[h, i, e] * v[h, k, e]
  t[h, i]: {kind} = sum[e] {other}[h, i, e] * o[h, i, e]
  s[h, i, k]: f32 = p[h, i, k] * ({body})
  {more}
  return {results}
"""


def kinds(body="d[h, i, k] - t[h, i]", *, other="a", kind="f32", more="", results="s"):
    p = parse(PROGRAM.format(body=body, other=other, kind=kind, more=more, results=results))
    return {c.name: c.dtype for c in unrounded(p).body}


@pytest.mark.parametrize("body", ["d[h, i, k] - t[h, i]", "d[h, i, k] * 2.0 - t[h, i]", "1.0 + (d[h, i, k] - t[h, i])"])
def test_what_a_sum_of_the_same_operand_is_subtracted_from_is_not_rounded(body):
    assert kinds(body) == {"d": DType.F32, "t": DType.F32, "s": DType.F32}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"body": "d[h, i, k] + t[h, i]"}, "nothing is subtracted"),
        ({"body": "t[h, i] - p[h, i, k] * d[h, i, k]"}, "the product is what is subtracted"),
        ({"other": "o"}, "the sum has no operand of the product"),
        ({"kind": "bf16"}, "the sum is rounded too"),
        ({"results": "s, d"}, "the product is a result, whose type the caller knows"),
        ({"more": "z[h, i, e]: bf16 = sum[k] d[h, i, k] * v[h, k, e]", "results": "s, z"}, "a product reads it"),
    ],
)
def test_others_stay_as_they_are(how, why):
    assert kinds(**how)["d"] is DType.BF16, why


def test_only_those_that_are_asked_for_change():
    p = parse(PROGRAM.format(body="d[h, i, k] - t[h, i]", other="a", kind="f32", more="", results="s"))
    assert unrounded(p, {"t"}) is p and unrounded(p, {"d"}) == unrounded(p) != p


def test_what_a_gpus_library_makes_has_float32():
    """Of 256 rows and 512 keys each, which a kernel of ours would not multiply."""
    text = PROGRAM.format(body="d[h, i, k] - t[h, i]", other="a", kind="f32", more="", results="s")
    for small, large in (("3,", "64,"), (" 7", " 256"), (" 6", " 512"), (" 4", " 128"), ("h = 3", "h = 64")):
        text = text.replace(small, large)
    made = gpu_kernels(parse(text), GpuTarget())
    assert any("d" in members for members in made.calls)
    assert {c.name: c.dtype for c in made.fused.program.body}["d"] is DType.F32


def decode(q, k, v, lengths):
    """One query for each of some sequences, whose keys are those up to a length."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    seen = torch.arange(k.shape[2])[None, :] <= lengths[:, None]
    return scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(-1).to(v.dtype) @ v


def test_gradients_of_a_sequence_of_one_key_are_eagers():
    """There scores have no gradient, and where dp was rounded that was 6 times the other sequences'."""
    gen = torch.Generator().manual_seed(0)
    shapes = ((4, 2, 1, 64), (4, 2, 512, 64), (4, 2, 512, 64))
    given = [torch.randn(s, generator=gen, dtype=torch.bfloat16) for s in shapes]
    lengths = torch.tensor([500, 0, 300, 77])

    def gradients(fn, dtype):
        xs = [x.to(dtype).detach().requires_grad_() for x in given]
        fn(*xs, lengths).double().square().sum().backward()
        return [x.grad.double() for x in xs]

    exact = gradients(decode, torch.float64)
    theirs = gradients(decode, torch.bfloat16)
    ours = gradients(torch.compile(decode, backend="tilefold"), torch.bfloat16)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()
