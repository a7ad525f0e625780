"""Random tensor programs over dims i (rows), j (long axis), k (features), for differential tests.

Values stay in a moderate range by construction (bounded functions), so that a wrong result is
told from a badly conditioned one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypothesis import strategies as st

from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse, show

HEADER = """program fuzz(n)
  input x: f32[{rows}, n]
  input y: f32[{rows}, n]
  input u: f32[n]
  input w: f32[n, {features}]
  dim i = {rows}
  dim j = n
  dim k = {features}
"""


@dataclass(frozen=True)
class Pool:
    """Names of values so far, by the dims they have."""

    row: tuple[str, ...] = ()
    long: tuple[str, ...] = ("x[i, j]", "y[i, j]", "u[j]")
    wide: tuple[str, ...] = ()


@st.composite
def elementwise(draw: st.DrawFn, pool: Pool, depth: int = 2) -> str:
    """An expression over (i, j)."""
    if depth == 0:
        return draw(st.sampled_from(pool.long + tuple(f"{r}[i]" for r in pool.row)))
    a = draw(elementwise(pool, depth - 1))
    b = draw(elementwise(pool, depth - 1))
    form = draw(
        st.sampled_from(
            (
                "({a}) + ({b})",
                "({a}) - ({b})",
                "tanh({a}) * ({b})",
                "maximum({a}, {b})",
                "where(j % 3 < 2, {a}, {b})",
                "where(j <= i + 4, {a}, {b})",
                "sigmoid({a})",
                "abs({a}) / (1.0 + abs({b}))",
                "exp(-abs({a}))",
            )
        )
    )
    return form.format(a=a, b=b)


@st.composite
def dependent(draw: st.DrawFn, pool: Pool) -> str:
    """A body in one of the forms that folds are made of, on an earlier row value when there is one."""
    e = draw(st.sampled_from(pool.long))
    if not pool.row:
        return e
    r = draw(st.sampled_from(pool.row)) + "[i]"
    form = draw(
        st.sampled_from(
            (
                "exp({e} - abs({r}) - 6.0)",
                "({e} - {r}) * ({e} - {r})",
                "({e} - {r} / size(j)) * ({e} - {r} / size(j))",
                "{e} * rsqrt(abs({r}) + 1.0)",
                "{e} / (1.0 + {r} * {r})",
                "{e} - {r}",
                "exp(-abs({e}) / (1.0 + abs({r})))",
                "tanh({e} * {r})",
            )
        )
    )
    return form.format(e=e, r=r)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of 2 to 7 statements: maps, (dependent) reductions and products over j."""
    rows, features = draw(st.sampled_from((1, 2, 5))), draw(st.sampled_from((2, 3)))
    pool = Pool()
    lines: list[str] = []
    outputs: list[str] = []
    for n in range(draw(st.integers(2, 7))):
        kind = draw(st.sampled_from(("map", "reduce", "reduce", "reduce", "product", "finish", "total")))
        name = f"v{n}"
        if kind == "map":
            lines.append(f"{name}[i, j]: f32 = {draw(elementwise(pool))}")
            pool = Pool(pool.row, (*pool.long, f"{name}[i, j]"), pool.wide)
        elif kind == "reduce":
            reducer = draw(st.sampled_from(("sum", "max", "min", "sum")))
            body = draw(st.one_of(dependent(pool), elementwise(pool, 1)))
            lines.append(f"{name}[i]: f32 = {reducer}[j] {body}")
            pool = Pool((*pool.row, name), pool.long, pool.wide)
        elif kind == "product":
            body = draw(dependent(pool))
            lines.append(f"{name}[i, k]: f32 = sum[j] ({body}) * w[j, k]")
            pool = Pool(pool.row, pool.long, (*pool.wide, name))
        elif kind == "total":
            lines.append(f"{name}[]: f32 = sum[i, j] {draw(elementwise(pool))}")
        elif pool.row:
            a, b = draw(st.sampled_from(pool.row)), draw(st.sampled_from(pool.row))
            lines.append(f"{name}[i]: f32 = {a}[i] / (1.0 + abs({b}[i]))")
            pool = Pool((*pool.row, name), pool.long, pool.wide)
        else:
            continue
        if draw(st.booleans()):
            outputs.append(name)
    if not lines:
        lines.append("v0[i]: f32 = sum[j] x[i, j]")
    if not outputs:
        outputs.append(lines[-1].split("[")[0])
    text = HEADER.format(rows=rows, features=features) + "".join(f"  {ln}\n" for ln in lines)
    return parse(f"{text}  return {', '.join(dict.fromkeys(outputs))}\n")


#: What the compiler's own names end with: of block values, states, parts, copies.
ENDINGS = ("_b", "_s", "_f", "_old", "_part", "_in", "_2", "_seg", "_again", "_pack", "_")


@st.composite
def unlucky(draw: st.DrawFn) -> Program:
    """A program whose results are called as the compiler might call values of its own."""
    text = show(draw(programs()))
    old = [n for n in dict.fromkeys(re.findall(r"\bv\d+\b", text))]
    stems = st.sampled_from((*old, "x", "y", "j"))
    new = draw(st.lists(st.tuples(stems, st.sampled_from(ENDINGS)), min_size=len(old), max_size=len(old), unique=True))
    names = {o: "".join(n) for o, n in zip(old, new, strict=True)}
    stay = set(draw(st.lists(st.sampled_from(old), unique=True)))
    names |= {o: o for o in stay}
    return parse(re.sub(r"\bv\d+\b", lambda m: names[m[0]], text))
