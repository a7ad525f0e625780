"""The suite of cascades: its functions against independent formulas, and the suite runner's judgement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tilefold.errors import TilefoldError
from tilefold.suites import functions as f
from tilefold.suites.cascades import CASCADES
from tilefold.suites.verify_suite import run_case, suite_cases, summary, table

BY_NAME = {c.name: c for c in CASCADES}


def test_the_issues_list_is_covered():
    wanted = """softmax; log_softmax; logsumexp; cross-entropy; attention; attention, causal; attention, ALiBi;
        attention, GQA; attention, soft-cap; attention, window; attention, decode; attention, head 80; MLA;
        MoE routing; quantise + GEMM; RMSNorm; LayerNorm; RMSNorm + GEMM; LayerNorm + GEMM; RMSNorm + max; L2 norm;
        Performer; sum + sum; variance; std; inertia; weighted mean; weighted covariance; argmax; argmin; prod;
        third moment; fourth moment; sum of exp(x / rms)"""
    assert {n.strip() for n in wanted.split(";")} <= set(BY_NAME)
    assert len(BY_NAME) == len(CASCADES)
    assert [c.name for c in CASCADES if c.expect == "refused"] == ["quantise + GEMM", "sum of exp(x / rms)"]


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_are_random_and_repeatable(name):
    case = BY_NAME[name]
    first, again, other = case.args(0), case.args(0), case.args(1)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a.float(), b.float()) for a, b in zip(first, other, strict=True))
    for _, args in (("given", first), *case.hostile_args()):
        with torch.no_grad():
            case.fn(*args)


def _sdpa(q, k, v, **kw):
    return functional.scaled_dot_product_attention(q, k, v, **kw)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("softmax, by hand", lambda x: x.softmax(-1)),
        ("attention", _sdpa),
        ("attention, causal", lambda q, k, v: _sdpa(q, k, v, is_causal=True)),
        ("attention, causal decode", _sdpa),
        ("attention, GQA decode", lambda q, k, v: _sdpa(q, k, v, enable_gqa=True)),
        (
            "attention, window",
            lambda q, k, v: _sdpa(q, k, v, attn_mask=torch.ones(70, 70).tril().triu(1 - f.WINDOW).bool()),
        ),
        ("MLA", lambda q, c: _mla(q, c)),
        ("L2 norm", lambda x: x.norm(dim=-1)),
        ("variance, by hand", lambda x: x.var(-1, correction=0)),
        ("third moment", lambda x: (x**3).mean(-1) - 3 * x.mean(-1) * (x**2).mean(-1) + 2 * x.mean(-1) ** 3),
        ("weighted mean", lambda w, x: torch.stack([a @ b / a.sum() for a, b in zip(w, x, strict=True)])),
        ("RMSNorm", lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w),
        ("Performer", lambda *a: _performer(*a)),
    ],
)
def test_functions_against_other_formulas(name, oracle):
    case = BY_NAME[name]
    args = [a.double() for a in case.args()]
    torch.testing.assert_close(case.fn(*args), oracle(*args), rtol=1e-6, atol=1e-9)


def _mla(q, c):
    k = c.unsqueeze(1)
    return _sdpa(q.unsqueeze(2), k.expand(-1, 16, -1, -1), k[..., :64].expand(-1, 16, -1, -1)).squeeze(2)


def _performer(q, k, v, projection):
    """Attention with the kernel exp(x.w - |x|^2 / 2) in place of exp of the score, row by row."""
    d = q.shape[-1]

    def features(x):
        return torch.exp(x @ projection.mT * d**-0.25 - x.square().sum(-1, keepdim=True) / (2 * d**0.5))

    weights = torch.einsum("bhim,bhjm->bhij", features(q), features(k))
    return weights / weights.sum(-1, keepdim=True) @ v


def test_an_unknown_suite_is_refused():
    with pytest.raises(TilefoldError, match="no suite 'absent'"):
        suite_cases("absent")


QUICK = ("softmax", "variance", "L2 norm", "attention, causal", "MoE routing", "sum of exp(x / rms)")


@pytest.mark.parametrize("name", QUICK)
def test_cascades_are_derived_and_right(name):
    row = run_case(BY_NAME[name])
    assert row.ok, f"{row.why} {row.reasons}"
    assert row.hostile[0] == row.hostile[1] > 0


def test_unmet_expectations_are_faults():
    refused = run_case(replace(BY_NAME["softmax"], expect="refused", derived_hostile=False, hostile=()))
    assert not refused.ok and "expected refused" in refused.why and refused.outcome == "fold"
    fewer = run_case(replace(BY_NAME["softmax"], kernels=0, derived_hostile=False, hostile=()))
    assert not fewer.ok and "at most 0 kernel(s)" in fewer.why
    assert summary([refused, fewer]).startswith("0 of 2 right")
    assert table([refused, fewer]).row_count == 2


def test_a_function_that_cannot_be_compiled_is_a_row():
    row = run_case(replace(BY_NAME["softmax"], fn=lambda x: torch.sort(x, -1).values))
    assert not row.ok and row.outcome == "error" and "sort" in row.why
