"""`verify` accepts what is right and refuses what is not: on values, patterns, dtypes, hostile inputs."""

from __future__ import annotations

import pytest
import torch

from tilefold.errors import UnsupportedError
from tilefold.frontend.fuse import fuse
from tilefold.frontend.hostile import variants
from tilefold.frontend.verify import compare, judge, verify


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def softmax(x):
    return torch.softmax(x, -1)


def by_hand(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_eager_is_right_by_its_own_measure():
    report = verify(softmax, torch.randn(9, 40), compiled=by_hand)
    assert report.ok and report.max_rel_err < 1e-6 and report.eager_rel_err < 1e-6
    assert {c.name for c in report.hostile} >= {"huge", "nan", "-inf entries", "one row", "non-contiguous"}
    assert "right" in str(report)


@pytest.mark.parametrize("factor", [1 + 1e-4, 1.01, 2.0])
def test_a_wrong_result_is_refused(factor):
    report = verify(softmax, torch.randn(9, 40), compiled=lambda x: softmax(x) * factor)
    assert not report.ok and report.given.why == "less right than eager"
    assert report.max_rel_err == pytest.approx(factor - 1, rel=0.01)
    assert "WRONG" in str(report)


def test_one_wrong_element_among_many_is_refused():
    def wrong(x):
        y = softmax(x).clone()
        y[3, 7] += y.max() * 1e-5
        return y

    assert not verify(softmax, torch.randn(9, 40), compiled=wrong, hostile=False).ok


def test_many_slightly_wrong_elements_are_refused():
    """One large element hides the others from the maximum norm; the root mean square sees them."""
    x = torch.randn(200, 200)
    x[0, 0] = 1e3
    noisy = x + 1e-4 * torch.randn(200, 200)
    noisy[0, 0] = 1e3
    c = judge("x", noisy, x, x.double())
    assert not c.ok and c.max_rel_err <= c.bound < c.rms_rel_err


@pytest.mark.parametrize(
    ("unstable", "variant"),
    [
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "huge"),
        (lambda x: torch.nan_to_num(softmax(x)), "nan"),
        (lambda x: by_hand(torch.where(x == -torch.inf, -1e30, x)), "-inf entries"),
        (lambda x: softmax(x.as_strided(x.shape, (x.shape[1], 1))), "non-contiguous"),
    ],
)
def test_hostile_inputs_find_what_random_ones_do_not(unstable, variant):
    report = verify(softmax, torch.randn(9, 40), compiled=unstable)
    assert report.given.ok and not report.ok
    assert variant in [c.name for c in report.hostile if not c.ok]


def uncorrected(x):
    """Two passes without the second's residual: what the mean's rounding adds stays."""
    d = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return (d * d).sum(-1) / (x.shape[-1] - 1)


def test_offsets_find_what_the_rounding_of_a_mean_adds():
    x = torch.randn(9, 400)
    report = verify(lambda x: x.var(-1), x, compiled=uncorrected)
    assert report.given.ok and not report.ok
    assert {"offset", "large offset"} <= {c.name for c in report.hostile if not c.ok}
    report = verify(lambda x: x.var(-1), x)
    assert report.ok, str(report)


def test_odd_strides_find_what_takes_rows_to_be_aligned():
    def rounded_down(x):
        return softmax(x.as_strided(x.shape, (x.stride(0) // 4 * 4, 1)))

    report = verify(softmax, torch.randn(9, 40), compiled=rounded_down)
    assert report.given.ok and "odd strides" in [c.name for c in report.hostile if not c.ok]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.double(), r"result is torch.float64 \(9, 40\), not torch.float32"),
        (lambda y: y[:, :-1], r"result is torch.float32 \(9, 39\)"),
        (lambda y: (y, y), "2 results instead of 1"),
        (lambda y: torch.where(y > 0.1, torch.nan, y), "NaN or infinite where they should not be"),
    ],
)
def test_results_of_another_form_are_refused(change, message):
    report = verify(softmax, torch.randn(9, 40), compiled=lambda x: change(softmax(x)), hostile=False)
    assert not report.ok
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report.given.why)


def test_overflow_like_eagers_is_allowed():
    x = torch.full((4,), 3e38)
    c = compare("x", lambda x: x * 2, lambda x: x + x, (x,))
    assert c.ok
    wrong_sign = compare("x", lambda x: x * 2, lambda x: -(x + x), (x,))
    assert not wrong_sign.ok and "infinite" in wrong_sign.why


def test_indices_are_compared_exactly():
    x = torch.randn(30, 20)
    x[4, 19] = 10
    assert verify(lambda x: x.argmax(-1), x, compiled=lambda x: x.max(-1).indices).ok
    assert not verify(lambda x: x.argmax(-1), x, compiled=lambda x: x.argmax(-1).clamp(max=18), hostile=False).ok
    assert not verify(lambda x: x.argmax(-1), x, compiled=lambda x: x.argmin(-1), hostile=False).ok


@pytest.mark.parametrize("variant", ["ties", "near ties"])
def test_indices_are_judged_by_what_they_point_at(variant):
    """topk's order of equal elements is open; of nearly equal ones, anyone's rounding decides."""
    x = torch.randint(0, 3, (20, 30)).float()
    if variant == "near ties":
        x = x + 1e-7 * torch.rand(20, 30)

    def last_first(x):
        flipped = x.flip(-1).topk(4)
        return flipped.values, x.shape[-1] - 1 - flipped.indices

    def topk(x):
        found = x.topk(4)
        return found.values, found.indices

    assert verify(topk, x, compiled=last_first, hostile=False).ok
    shifted = verify(topk, x, compiled=lambda x: (topk(x)[0], (topk(x)[1] + 1) % 30), hostile=False)
    assert not shifted.ok
    twice = verify(topk, x, compiled=lambda x: (topk(x)[0], topk(x)[1][:, :1].expand(-1, 4)), hostile=False)
    assert not twice.ok and twice.given.why == "an element is chosen twice"
    outside = verify(topk, x, compiled=lambda x: (topk(x)[0], topk(x)[1] - 30), hostile=False)
    assert not outside.ok and outside.given.why == "an index is out of range"


def test_argmax_takes_the_first_of_equals():
    x = torch.randint(0, 3, (20, 30)).float()
    last = verify(lambda x: x.argmax(-1), x, compiled=lambda x: 29 - x.flip(-1).argmax(-1), hostile=False)
    assert not last.ok and last.given.why == "not the first of equal elements"
    distinct = torch.stack([torch.randperm(30) for _ in range(20)]).float()
    assert verify(lambda x: x.argmax(-1), distinct, compiled=lambda x: 29 - x.flip(-1).argmax(-1), hostile=False).ok


def test_narrow_results_may_round_as_eager_does():
    x = torch.randn(64, 64).bfloat16()
    better = compare("x", lambda x: x @ x, lambda x: (x.float() @ x.float()).bfloat16(), (x,))
    worse = compare("x", lambda x: x @ x, lambda x: (x.to(torch.float8_e4m3fn).float() @ x.float()).bfloat16(), (x,))
    assert better.ok and not worse.ok


def test_what_eager_does_not_take_is_left_out():
    w = torch.randn(9, 9)
    report = verify(
        lambda x, y: torch.linalg.solve(w, x) + y,
        torch.randn(9, 9),
        torch.randn(9, 9),
        compiled=lambda x, y: torch.linalg.solve(w, x) + y,
    )
    assert report.skipped == ("one row",) and "eager does not take them: one row" in str(report)


def test_variants_keep_dtypes_and_ranks():
    args = (torch.randn(6, 5, 4).bfloat16(), torch.randint(0, 5, (6,)), 0.5, torch.randn(7))
    found = dict(variants(args))
    for changed in found.values():
        assert [getattr(a, "dtype", None) for a in changed] == [getattr(a, "dtype", None) for a in args]
        assert [getattr(a, "ndim", None) for a in changed] == [getattr(a, "ndim", None) for a in args]
    assert not found["non-contiguous"][0].is_contiguous() and torch.equal(found["non-contiguous"][0], args[0])
    assert not found["non-contiguous"][3].is_contiguous() and torch.equal(found["non-contiguous"][3], args[3])
    assert found["one row"][0].shape == (1, 5, 4) and found["one row"][1].shape == (1,)
    assert found["one row"][3].shape == (7,)
    assert found["odd strides"][0].stride(1) == 7 and found["odd strides"][0].storage_offset() == 1
    assert torch.equal(found["odd strides"][0], args[0]) and found["odd strides"][3].data_ptr() % 16
    apart = found["offset"][0].float()
    assert (apart - args[0].float()).min() > 0 and 0.5 < apart.std() < 2
    assert found["nan"][0].isnan().sum() == 1 and (found["-inf entries"][0][0, 0] == -torch.inf).all()
    assert variants((torch.arange(3), 1.0)) == ()


def test_variants_leave_the_arguments_alone():
    x = torch.randn(4, 4)
    before = x.clone()
    variants((x,))
    assert torch.equal(x, before)


def test_fused_functions_are_unwrapped():
    """What `tilefold.fuse` returns is compared with the function that it was made from."""
    report = verify(fuse(softmax), torch.randn(5, 33))
    assert report.ok, str(report)


def counted(x, count):
    """Changes both of its arguments, reads what it changed, and returns something else."""
    count.add_(1)
    x.mul_(3).sub_(1)
    return x.exp().sum(-1) * count[0]


def changing(x):
    x.add_(1).mul_(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arguments_that_a_function_changes_are_its_results(dtype):
    x, count = torch.randn(9, 40, dtype=dtype), torch.arange(3)
    whole = torch.randn(9, 80, dtype=dtype)[:, ::2]
    before = x.clone(), count.clone(), whole.clone()
    for fn, args in ((counted, (x, count)), (counted, (whole, count)), (changing, (x,))):
        report = verify(fn, *args)
        assert report.ok and report.max_rel_err < 1e-6, str(report)
    assert torch.equal(x, before[0]) and torch.equal(count, before[1]) and torch.equal(whole, before[2])


@pytest.mark.parametrize(
    ("fn", "args", "wrong"),
    [
        (changing, 1, lambda x: x.add_(1)),
        (changing, 1, lambda x: None),
        (changing, 1, lambda x: x.add_(1).mul_(2)),  # which returns the tensor as well
        (counted, 2, lambda x, count: counted(x.clone(), count)),
        (counted, 2, lambda x, count: counted(x, count.clone())),
        (softmax, 1, lambda x: softmax(x) + 0 * x.zero_()),
    ],
)
def test_arguments_that_are_changed_otherwise_are_wrong(fn, args, wrong):
    given = (torch.randn(9, 40), torch.arange(1, 4))[:args]
    assert not verify(fn, *given, compiled=wrong, hostile=False).ok


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_random_numbers_cannot_be_compared(p):
    def dropped(x):
        return torch.nn.functional.dropout(x, p, training=True)

    if not p:
        assert verify(dropped, torch.randn(9, 40), hostile=False).ok
        return
    with pytest.raises(UnsupportedError, match=r"dropped draws random numbers.*\n.*model.eval"):
        verify(dropped, torch.randn(9, 40), hostile=False)
