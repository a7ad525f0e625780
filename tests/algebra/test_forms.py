"""The printed forms equal the papers': symbolically, and as golden text."""

from __future__ import annotations

import math

import pytest
import torch

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tilefold.algebra import forms
from tilefold.algebra.derivation import Derivation, derivation_of
from tilefold.algebra.expr import Expr
from tilefold.algebra.forms import Equation
from tilefold.algebra.symbolic import is_zero, to_sympy
from tilefold.algebra.text import Names, parse, show

SCALAR_ATTENTION = """
    m = max[l] P[l]
    t = sum[l] exp(P[l] - m)
    O = sum[l] exp(P[l] - m) / t * V[l]
"""


def same(a: Expr, b: Expr) -> bool:
    return is_zero(to_sympy(a) - to_sympy(b))


def written(text: str) -> Expr:
    """A hand-written form; `m1`, `mL`, `mk` are the loads that `plain` renames to."""
    return parse(text, Names(open_tensors=True))


def plain(e: Expr) -> Expr:
    """Loads of the level forms as bare names: m¹[L-1] -> m_before, m¹[L] -> m_now, mᵏ⁻¹ -> m_part, P[L] -> P."""
    from_text = forms.show(e)
    for old, new in (("¹[L-1]", "_before"), ("ᵏ[L-1]", "_before"), ("¹[L]", "_now"), ("ᵏ[L]", "_now"),
                     ("ᵏ⁻¹", "_part"), ("[L]", "")):  # fmt: skip
        from_text = from_text.replace(old, new)
    return written(from_text)


def agrees(equations: list[Equation], name: str, *parts: str) -> None:
    found = {e.left.tensor.rstrip("¹ᵏ⁻"): e for e in equations}[name]
    assert len(found.parts) == len(parts)
    for got, want in zip(found.parts, parts, strict=True):
        assert same(plain(got), written(want)), (forms.show(got), want)


def derived(text: str, **options: bool) -> Derivation:
    return derivation_of(cascade(text), **options)


def test_attention_is_redfuser_32_and_33() -> None:
    # the second term of eq. 32 lacks the factor V[L] of eq. 29; it is written here
    paper = derived(SCALAR_ATTENTION).paper
    one, k = forms.incremental_1(paper), forms.incremental_k(paper)
    agrees(one, "m", "m_before", "P")
    agrees(one, "t", "t_before * exp(m_before - m_now)", "exp(P - m_now)")
    agrees(one, "O", "O_before * exp(m_before - m_now) * t_before / t_now", "exp(P - m_now) / t_now * V")
    agrees(k, "m", "m_before", "m_part")
    agrees(k, "t", "t_before * exp(m_before - m_now)", "t_part * exp(m_part - m_now)")
    agrees(
        k, "O",
        "O_before * exp(m_before - m_now) * t_before / t_now",
        "O_part * exp(m_part - m_now) * t_part / t_now",
    )  # fmt: skip


def test_attention_delayed_is_flash_attention_2() -> None:
    d = derived(SCALAR_ATTENTION)
    agrees(forms.incremental_1(d.plain), "O", "O_before * exp(m_before - m_now)", "exp(P - m_now) * V")
    assert same(dict(d.plain.finish)["O"], written("O / t"))
    assert d.delays and not derived(c.SOFTMAX).delays


def test_routing_is_redfuser_37_and_38() -> None:
    d = derived(c.ROUTING_PAPER)
    one, k = forms.incremental_1(d.paper), forms.incremental_k(d.paper)
    agrees(one, "t", "t_before * exp(m_before - m_now)", "exp(x - m_now)")
    agrees(k, "t", "t_before * exp(m_before - m_now)", "t_part * exp(m_part - m_now)")
    assert one[2].text == "s¹[r, L] = TopK(s¹[r, L-1], x[L])"
    assert k[2].text == "sᵏ[r, L] = TopK(sᵏ[r, L-1], sᵏ⁻¹[r])"


def test_quantise_gemm_is_redfuser_21_and_22() -> None:
    text = """
        m = max[l] abs(a[l])
        c = sum[l] MAX * a[l] / m * w[l]
    """
    paper = derived(text).paper
    one, k = forms.incremental_1(paper), forms.incremental_k(paper)
    agrees(one, "c", "c_before * m_before / m_now", "MAX * a / m_now * w")
    agrees(k, "c", "c_before * m_before / m_now", "c_part * m_part / m_now")
    rounded = derived(text.replace("MAX * a[l] / m", "e4m3(MAX * a[l] / m)"), ignore_rounding=True)
    agrees(forms.incremental_k(rounded.paper), "c", "c_before * m_before / m_now", "c_part * m_part / m_now")


def test_sum_sum_is_redfuser_42_and_43() -> None:
    paper = derived(c.SUM_SUM).paper
    one, k = forms.incremental_1(paper), forms.incremental_k(paper)

    def h(tag: str) -> str:
        return f"maximum(m_{tag} - 10.0, 0.001)"

    moved = f"s_before * sqrt({h('before')} / {h('now')})"
    agrees(one, "m", "m_before", "x1 ** 2")
    agrees(one, "s", moved, f"x1 * x2 / sqrt({h('now')})")
    agrees(k, "s", moved, f"s_part * sqrt({h('part')} / {h('now')})")


NEPTUNE = {
    "attention": (c.SOFTMAX, "t", "t * exp(m - m_new)"),
    "L2 norm (4.4)": (c.L2_NORM, "t", "t * m ** 2 / m_new ** 2"),
    "RMSNorm + max (4.4)": (
        "r = sum[l] x[l] ** 2 \n m = max[l] x[l] / sqrt(r + eps)",
        "m",
        "sqrt(r + eps) / sqrt(r_new + eps) * m",
    ),
    "performer h1 (C)": (c.PERFORMER, "r2", "r2 * exp(r1 - r1_new)"),
    "performer h2 (C)": (
        "r1 = max[l] c1[l] \n o = sum[l] alpha * c3[l] * exp(c1[l] - r1 - beta * c2[l])",
        "o",
        "o * exp(r1 - r1_new)",
    ),
    "performer h3 (C)": (
        """r1 = max[l] c1[l]
        r2 = sum[l] exp(c1[l] - r1)
        o = sum[l] alpha * exp(c1[l] - r1 - beta * c2[l] * c3[l]) / r2""",
        "o",
        "o * (r2 / r2_new) * exp(r1 - r1_new)",
    ),
}


@pytest.mark.parametrize("name", NEPTUNE)
def test_repair_functions_are_neptunes(name: str) -> None:
    # appendix C prints exp(r' - r) for h1 and h2; its own proofs, and eq. 5, give exp(r - r')
    text, variable, want = NEPTUNE[name]
    h = dict(forms.repair_functions(derived(text).paper))[variable]
    got = written(forms.show(h).replace("'", "_new").replace("[e]", ""))
    assert same(got, written(want)), forms.show(h)
    assert not same(got, written(f"2.0 * ({want})"))


def test_variance_merges_as_chan() -> None:
    """Chan, Golub, LeVeque (1979): M = Ma + Mb + (mean_b - mean_a)^2 na nb / (na + nb)."""
    rows = {e.left.tensor: e for e in forms.merge(derived(c.VARIANCE).plain)}
    merged = forms.show(rows["q"].parts[0]) + " + " + forms.show(rows["q"].parts[1])
    merged = merged.replace("s / n)", "(s_a + s_b) / (n_a + n_b))")
    chan = "q_a + q_b + (s_b / n_b - s_a / n_a) ** 2 * n_a * n_b / (n_a + n_b)"
    difference = to_sympy(written(merged)) - to_sympy(written(chan))
    assert is_zero(difference.together().as_numer_denom()[0])


def test_golden_text_of_attention() -> None:
    d = derived(SCALAR_ATTENTION)
    assert d.update.splitlines() == [
        "m' = max(m, P[l])",
        "t' = t * exp(m - m') + exp(P[l] - m')",
        "O' = O * exp(m - m') + exp(P[l] - m') * V[l]",
    ]
    assert d.merge.splitlines()[2] == "O = O_a * exp(m_a - m) + O_b * exp(m_b - m)"
    assert d.identity.splitlines() == ["m = -inf", "t = 0.0", "O = 0.0"]
    assert d.finish.splitlines() == ["m = m", "t = t", "O = O / t"]
    assert d.paper_form.splitlines() == [
        "incremental, level 1",
        "  m¹[L] = max(m¹[L-1], P[L])",
        "  t¹[L] = t¹[L-1] * exp(m¹[L-1] - m¹[L]) + exp(P[L] - m¹[L])",
        "  O¹[L] = O¹[L-1] * exp(m¹[L-1] - m¹[L]) * (t¹[L-1] / t¹[L]) + exp(P[L] - m¹[L]) / t¹[L] * V[L]",
        "incremental, level k",
        "  mᵏ[L] = max(mᵏ[L-1], mᵏ⁻¹)",
        "  tᵏ[L] = tᵏ[L-1] * exp(mᵏ[L-1] - mᵏ[L]) + tᵏ⁻¹ * exp(mᵏ⁻¹ - mᵏ[L])",
        "  Oᵏ[L] = Oᵏ[L-1] * exp(mᵏ[L-1] - mᵏ[L]) * (tᵏ[L-1] / tᵏ[L]) + Oᵏ⁻¹ * exp(mᵏ⁻¹ - mᵏ[L]) * (tᵏ⁻¹ / tᵏ[L])",
        "fused, level k",
        "  mᵏ = max over j of mᵏ⁻¹",
        "  tᵏ = sum over j of tᵏ⁻¹ * exp(mᵏ⁻¹ - mᵏ)",
        "  Oᵏ = sum over j of Oᵏ⁻¹ * exp(mᵏ⁻¹ - mᵏ) * (tᵏ⁻¹ / tᵏ)",
    ]


def test_golden_text_of_variance() -> None:
    d = derived(c.VARIANCE)
    assert d.update.splitlines()[2] == "q' = q + n * (s / n - s' / n') ** 2 + (x[l] - s' / n') ** 2"
    assert "closed under differentiation" in d.steps and "sum of 1.0 = n" in d.steps


def test_latex_of_attention() -> None:
    d = derived(SCALAR_ATTENTION)
    assert r"\hat{t}^{k}[L] &= \hat{t}^{k}[L-1] \, \exp\left(\hat{m}^{k}[L-1] - \hat{m}^{k}[L]\right)" in d.latex()
    assert r"\hat{m}^{k-1}" in d.latex() and r"\frac{O}{t}" in d.latex()
    assert d._repr_latex_().startswith("$$") and "**merge**" in d._repr_markdown_()
    assert d.latex().count(r"\begin{aligned}") == d.latex().count(r"\end{aligned}") == 8


def test_str_has_every_section() -> None:
    text = str(derived(SCALAR_ATTENTION))
    for title in ("cascade", "derivation", "identity", "lift", "merge", "update", "finish", "paper's form", "proof"):
        assert f"\n{title}" in f"\n{text}"
    assert "FAILED" not in text and "ok     symbolic" in text


def value(e: Expr, names: dict[str, torch.Tensor]) -> torch.Tensor:
    """An expression of one axis, at values of its tensors."""
    known = {"maximum": lambda a, b: torch.as_tensor(a).clamp(min=b), "where": torch.where, "abs": abs, "inf": math.inf}
    return torch.as_tensor(eval(show(e).replace("@new", "").replace("[l]", ""), known, dict(names)))


@pytest.mark.parametrize("power", [2, 3, 4, "covariance"])
def test_what_a_wrong_mean_adds_to_moments_is_taken_out(power: int | str) -> None:
    """The sums that are kept about means that are off by tenths give the moments about the right ones."""
    body = "(x[l] - a) * (y[l] - b)" if power == "covariance" else f"(x[l] - a) ** {power}"
    d = derived(f"a = sum[l] x[l] / size(l) \n b = sum[l] y[l] / size(l) \n q = sum[l] {body}")
    x, y = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    n = torch.tensor(50.0, dtype=torch.float64)
    names = {"x": x, "y": y, "n": n, "a": x.sum() + 0.3 * n, "b": y.sum() - 0.2 * n}
    names |= {v.name: value(v.element, names).sum() for v in d.fold.state if v.name.startswith("q")}
    right = (x - x.mean()) * (y - y.mean()) if power == "covariance" else (x - x.mean()) ** power
    (finish,) = (e for name, e in d.fold.finish if name == "q")
    torch.testing.assert_close(value(finish, names), right.sum())
    assert (names["q"] - right.sum()).abs() > 1


@pytest.mark.parametrize("body", ["(x[l] - a) * y[l]", "x[l] - a"])
def test_sums_without_a_residual_are_what_they_are(body: str) -> None:
    """Weights of their own keep none, and a residual that is asked for is not taken out of itself."""
    finish = dict(derived(f"a = sum[l] x[l] / size(l) \n q = sum[l] {body}").fold.finish)
    assert finish["q"] == written("q")
