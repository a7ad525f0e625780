"""What has no Fold is refused, naming the reduction and a reason a user can read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.algebra import cascades as c
from tests.algebra.cascades import cascade
from tilefold.algebra import check as check_module
from tilefold.algebra import derive as derive_module
from tilefold.algebra.check import check_fold
from tilefold.algebra.context import Options
from tilefold.algebra.derive import build_fold, derive_fold
from tilefold.algebra.expr import Load, loads
from tilefold.algebra.fold import Check
from tilefold.algebra.simplify import mul, number
from tilefold.algebra.symbolic import prove
from tilefold.errors import NotFusibleError

REFUSED = {
    "exp of a ratio": (
        "s = sum[l] x[l] ** 2 \n o = sum[l] exp(x[l] / sqrt(s / size(l)))",
        "o",
        "brings a new function of the inputs each time.*no finite set of sums closes",
    ),
    "fp8 rounding": (c.QUANTISE_GEMM, "c", "rounding to e4m3 is not separable.*\n.*ignore_rounding"),
    "integer rounding": (
        "m = max[l] abs(x[l]) \n c = sum[l] round(x[l] / m) * w[l]",
        "c",
        "which integer.*\n.*ignore_rounding",
    ),
    "unknown sign": ("s = sum[l] y[l] \n m = max[l] x[l] * s", "m", "sign of s cannot be proved"),
    "unknown sign under top-k": ("s = sum[l] y[l] \n v[r], i[r] = topk[l; r] x[l] * s", "v", "sign of s"),
    "product of differences": ("s = sum[l] x[l] \n P = prod[l] x[l] - s", "P", "polynomial of degree n"),
    "condition": ("m = max[l] x[l] \n y = any[l] x[l] > m", "y", "any of a condition"),
    "comparison": ("m = max[l] x[l] \n y = sum[l] where(x[l] == m, 1.0, 0.0)", "y", "comparison x.l. == m"),
    "clamp": ("m = max[l] x[l] \n y = sum[l] maximum(x[l], m)", "y", "does not separate"),
    "index used as value": (
        "m, i = argmax[l] x[l] \n y = sum[l] where(l == i, w[l], 0.0)",
        "y",
        "only known at the end",
    ),
    "power of a result": ("s = sum[l] x[l] \n y = sum[l] x[l] ** s", "y", "does not separate"),
    "root of unknown sign": ("s = sum[l] x[l] \n y = sum[l] sqrt(s * z[l])", "y", "sign of s is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_the_reduction_and_the_reason(name: str) -> None:
    text, reduction, reason = REFUSED[name]
    with pytest.raises(NotFusibleError, match=reason) as error:
        derive_fold(cascade(text))
    assert error.value.reduction == reduction
    assert error.value.message.startswith(reduction)


def test_the_reductions_before_a_refused_one_still_derive() -> None:
    text, _, _ = REFUSED["exp of a ratio"]
    first = text.split("\n")[0]
    assert derive_fold(cascade(first)).state[0].repair is None


def test_a_wrong_repair_fails_the_numerical_check() -> None:
    problem = cascade(c.ATTENTION)
    fold = derive_fold(problem)
    v = fold.var("t")
    wrong = dataclasses.replace(v, repair=mul(v.repair, number(1.001)))
    broken = dataclasses.replace(fold, state=tuple(wrong if u is v else u for u in fold.state))
    failed = [check.name for check in check_fold(problem, broken, problem.reductions) if not check.ok]
    assert "incremental update = F" in failed and "fold of one = F" not in failed


def test_a_missing_guard_fails_the_numerical_check() -> None:
    problem = cascade(c.SOFTMAX)
    unguarded = build_fold(problem, Options(guards=False))
    failed = [check for check in check_fold(problem, unguarded, problem.reductions) if not check.ok]
    assert failed and any("-inf" in check.detail for check in failed)


def test_a_wrong_finish_fails_the_numerical_check() -> None:
    problem = cascade(c.ATTENTION)
    fold = derive_fold(problem)
    finish = tuple((name, mul(e, number(2.0)) if name == "o" else e) for name, e in fold.finish)
    checks = check_fold(problem, dataclasses.replace(fold, finish=finish), problem.reductions)
    assert not any(check.ok for check in checks if check.name != "fold of nothing = identity")


def test_sums_that_have_nothing_to_do_with_each_other_are_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sums are checked as what each of them is; with a wrong one among them the check fails, and says which."""
    problem = cascade(" \n ".join(f"s{k} = sum[l] x{k}[l] ** 2" for k in range(10)))
    fold, seen, real = derive_fold(problem), [], check_module._checks

    def counted(*part: Any) -> tuple[Check, ...]:
        seen.append(len(part[0].reductions))
        return real(*part)

    monkeypatch.setattr(check_module, "_checks", counted)
    assert all(found.ok for found in check_fold(problem, fold, problem.reductions)) and seen == [1] * 10
    last = dataclasses.replace(fold.state[-1], element=mul(fold.state[-1].element, number(2.0)))
    wrong = dataclasses.replace(fold, state=(*fold.state[:-1], last))
    failed = [found for found in check_fold(problem, wrong, problem.reductions) if not found.ok]
    assert failed and all("s9" in found.detail and "s8" not in found.detail for found in failed)


def test_what_reads_each_other_is_checked_together() -> None:
    problem = cascade(c.SOFTMAX + " \n n = sum[l] x[l]")
    parts = check_module._parts(problem, derive_fold(problem), problem.reductions)
    assert sorted(len(bodies) for _, _, bodies in parts) == [1, len(problem.reductions) - 1]


@pytest.mark.parametrize("text", [c.ATTENTION, c.VARIANCE, c.INERTIA, c.SUM_SUM])
def test_a_wrong_repair_fails_the_symbolic_proof(text: str) -> None:
    ctx = derive_module._derive_all(cascade(text), Options(guards=False, delay=False))
    assert all(check.ok for check in prove(ctx))
    name, info = [(n, i) for n, i in ctx.infos.items() if i.var.repair is not None][-1]
    wrong = dataclasses.replace(info.var, repair=mul(info.var.repair, number(1.5)))
    ctx.infos[name] = dataclasses.replace(info, var=wrong)
    failed = {check.name for check in prove(ctx) if not check.ok}
    assert f"{name}: h(R F(x, D), D, D') = R F(x, D')" in failed
    assert f"{name}: h(t, D, D) = t" in failed


def test_a_failed_check_is_an_error_not_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive_module, "check_fold", lambda *_: (Check("some law", "numeric", False, "t (ties)"),))
    derive_module._derive.cache_clear()
    with pytest.raises(NotFusibleError, match="failed its own check: some law"):
        derive_fold(cascade(c.SOFTMAX))
    derive_module._derive.cache_clear()


@pytest.mark.parametrize(("rows", "joins"), [(4, True), (9, False)])
def test_rows_that_are_scaled_again_and_again_join_while_their_factors_are_short(rows: int, joins: bool) -> None:
    factors, lines = "", []
    for n in range(rows):
        lines.append(f"s{n} = sum[l] abs(x[l]){factors}")
        factors += f" / (1.0 + s{n})"
    problem = cascade(" \n ".join(lines))
    if joins:
        assert all(check.ok for check in derive_fold(problem).checks)
        return
    with pytest.raises(NotFusibleError, match="operations of earlier results") as error:
        derive_fold(problem)
    assert error.value.reduction == "s5"


@pytest.mark.parametrize("moved", [True, False])
def test_sums_that_each_move_with_all_before_them_are_proved_in_little_time(
    moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out, the sums that the last one moves with would have 2**20 terms; a wrong one is still found."""
    earlier = [" + ".join(f"s{j}" for j in range(n)) for n in range(20)]
    lines = [f"s{n} = sum[l] x[l] - 0.25 * ({e or '0.0'})" for n, e in enumerate(earlier)]
    ctx = derive_module._derive_all(cascade("\n".join(lines)), Options(guards=False))
    last = ctx.infos["s19"]
    assert last.var.repair is not None
    if not moved:
        wrong = dataclasses.replace(last.var, repair=last.var.repair + Load("s3@old", ()) * 0.5)
        ctx.infos["s19"] = dataclasses.replace(last, var=wrong)
    (found,) = [c for c in prove(ctx) if c.name.startswith("s19: h(R F(x, D), D, D')")]
    assert found.ok == moved
    assert found.method == "symbolic"


def test_a_factor_of_zero_is_not_dropped() -> None:
    """0 x is NaN where x is infinite: the state sums 0 x (a recurrent cell's first step), or there is no fold."""
    (state,) = derive_fold(cascade("s = sum[l] 0.0 * x[l]")).state
    assert loads(state.element)
    with pytest.raises(NotFusibleError, match="own check"):
        derive_fold(cascade("m = max[l] x[l]\ns = sum[l] 0.0 * exp(x[l] - m)"))


def test_what_a_projection_leaves_is_not_made_of_sums_of_products() -> None:
    """Where inputs are alike it is the small difference of large numbers, centred or not."""
    centred = ("x[l] - a / size(l)", "y[l] - b / size(l)")
    for x, y in (("x[l]", "y[l]"), centred):
        text = f"""a = sum[l] x[l]
        b = sum[l] y[l]
        c = sum[l] ({x}) * ({y})
        d = sum[l] ({y}) ** 2
        o = sum[l] ({x} - c / d * ({y})) ** 2"""
        with pytest.raises(NotFusibleError, match=r"failed its own check: .* o .*"):
            derive_fold(cascade(text))
