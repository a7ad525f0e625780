"""Which siblings share a kernel: what they read is read once, but no kernel grows with the depth of a model."""

from __future__ import annotations

from tilefold.algebra.expr import tensors_read
from tilefold.plan.greedy import MOST_READ, group
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.text import parse

LIMITS = GpuTarget().limits


def layers(n: int) -> str:
    """Gradients of n scales, down the rows: of a stream's gradient, which every layer makes another (each row by a
    maximum of its own), times the layer's input."""
    lines = ["program scales()", "  input g: bf16[4096, 768]"]
    lines += [f"  input x{k}: bf16[4096, 768]" for k in range(n)]
    lines += ["  dim i = 4096", "  dim j = 768"]
    for k in range(n):
        before = f"d{k - 1}" if k else "g"
        lines.append(f"  r{k}[i]: f32 = max[j] {before}[i, j]")
        lines.append(f"  d{k}[i, j]: bf16 = {before}[i, j] * r{k}[i]")
        lines.append(f"  s{k}[j]: f32 = sum[i] d{k}[i, j] * x{k}[i, j]")
    results = [*(f"s{k}" for k in range(n)), *(f"d{k}" for k in range(n))]
    return "\n".join([*lines, f"  return {', '.join(results)}"])


def read(p, members) -> set[str]:
    computes = [c for c in p.body if c.name in members]
    return {t for c in computes for t in tensors_read(c.body)} - {r for c in computes for r in c.results}


def test_sums_of_many_layers_are_kernels_of_a_few():
    p = parse(layers(16))
    groups = group(p, limits=LIMITS).groups
    sums = [x.members for x in groups if any(m.startswith("s") for m in x.members)]
    assert len(sums) > 1
    assert all(len(read(p, members)) <= MOST_READ for members in sums)


def test_siblings_of_one_tensor_stay_together_however_many_they_are():
    n = 2 * MOST_READ
    lines = ["program moments()", "  input x: bf16[4096, 768]", "  dim i = 4096", "  dim j = 768"]
    lines += [f"  s{k}[j]: f32 = sum[i] exp(x[i, j] * {k}.0)" for k in range(n)]
    p = parse("\n".join([*lines, f"  return {', '.join(f's{k}' for k in range(n))}"]))
    assert [len(x.members) for x in group(p, limits=LIMITS).groups] == [n]


def test_a_few_layers_are_as_before():
    p = parse(layers(2))
    (members,) = (x.members for x in group(p, limits=LIMITS).groups if "s0" in x.members)
    assert {"s0", "s1"} <= set(members)


def test_sums_of_what_a_library_makes_are_one_kernel():
    """A gradient comes out of a product; a bias and a scale sum it."""
    lines = [
        "program gradients()",
        "  input a: bf16[4096, 768]",
        "  input w: bf16[768, 768]",
        "  input x: bf16[4096, 768]",
    ]
    lines += ["  dim i = 4096", "  dim j = 768", "  dim k = 768", "  g[i, j]: bf16 = sum[k] a[i, k] * w[k, j]"]
    lines += ["  b[j]: f32 = sum[i] g[i, j]", "  s[j]: f32 = sum[i] g[i, j] * x[i, j]", "  return b, s"]
    groups = group(parse("\n".join(lines)), frozenset({"g"}), LIMITS, calls=[("g",)]).groups
    assert [x.members for x in groups] == [("g",), ("b", "s")]
