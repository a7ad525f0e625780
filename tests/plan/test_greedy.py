"""Which siblings share a kernel: what they read is read once, but no kernel grows with the depth of a model."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tilefold.algebra.expr import tensors_read
from tilefold.block.group import Group
from tilefold.plan.greedy import MOST_READ, _Greedy, group
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.analysis import Graph
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


def test_numbers_share_a_launch():
    """Steps of an optimiser's tensors, each counted for itself; what has elements stays apart, and on a CPU all do."""
    n = MOST_READ + 3
    lines = ["program steps()", *(f"  input s{k}: f32[]" for k in range(n)), "  input x: f32[7]", "  dim i = 7"]
    lines += [f"  t{k}[]: f32 = s{k} + 1.0" for k in range(n)]
    p = parse("\n".join([*lines, "  y[i]: f32 = exp(x[i])", f"  return {', '.join(f't{k}' for k in range(n))}, y"]))
    groups = [x.members for x in group(p, limits=LIMITS).groups]
    assert sorted(len(m) for m in groups) == [1, 3, MOST_READ] and ("y",) in groups
    assert len(group(p).groups) == n + 1


def leads_outside(g, of, a, b) -> bool:
    """Whether groups between lead from one of two groups to the other, by walking."""
    for start, goal in ((a, b), (b, a)):
        todo = [of[u] for m in start.members for u in g.consumers[m] if of[u] not in (start, goal)]
        seen = set(todo)
        while todo:
            for x in {of[u] for m in todo.pop().members for u in g.consumers[m]}:
                if x == goal:
                    return True
                if x != start and x not in seen:
                    seen.add(x)
                    todo.append(x)
    return False


@given(st.integers(0, 1 << 30), st.booleans())
@settings(max_examples=60, deadline=None)
def test_paths_outside_are_known_as_groups_grow(seed, with_call):
    rng, n = random.Random(seed), 12
    lines = ["program web()", "  input x: f32[64]", "  dim i = 64"]
    for k in range(n):
        read = [f"t{r}[i]" for r in range(k) if rng.random() < 0.2] or ["x[i]"]
        lines.append(f"  t{k}[i]: f32 = {' + '.join(read)}")
    g = Graph.of(parse("\n".join([*lines, f"  return {', '.join(f't{k}' for k in range(n))}"])))
    of = {m: Group((m,), ("i",)) for m in g.by_name}
    pairs = [(m, u) for m in g.by_name for u in g.consumers[m] if not leads_outside(g, of, of[m], of[u])]
    if with_call and pairs:  # the statements of a call are one from the beginning
        call = rng.choice(pairs)
        of |= dict.fromkeys(call, Group(call, ("i",)))
    grouping = _Greedy(g, of, frozenset(), LIMITS)
    for _ in range(n):
        groups = list(dict.fromkeys(of.values()))
        answers = {(a, b): grouping._path_outside(a, b) for a in groups for b in groups if a is not b}
        assert answers == {(a, b): leads_outside(g, of, a, b) for a, b in answers}
        joined = [pair for pair, outside in answers.items() if not outside]
        if not joined:
            break
        a, b = rng.choice(joined)
        members = tuple(m for m in g.by_name if m in (*a.members, *b.members))
        grouping.join(a, b, Group(members, ("i",)))
