"""`tilefold.explain` on functions: what it collects from a real compilation."""

from __future__ import annotations

import pytest
import torch

from tests.block.programs import SOFTMAX
from tests.explanation.fixtures import TWO_KERNELS
from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.explanation import html
from tilefold.explanation.model import alike
from tilefold.explanation.report import explain, explain_compiled
from tilefold.explanation.timed import run_timed
from tilefold.frontend.fuse import fuse, trace
from tilefold.pipeline import compile_program
from tilefold.tensor.text import parse


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_a_function():
    x = explain(softmax, torch.randn(6, 40))
    (k,) = x.kernels
    assert x.name == "softmax" and k.kind == "fused" and x.operators == 1 and not x.rejections
    assert k.bytes == x.traffic.after == 2 * 6 * 40 * 4
    assert "tilefold_kernel" in x.source and "forall" in k.listing and k.grid
    (f,) = x.folds
    assert [v.reducer for v in f.fold.state] == ["max", "sum"]
    assert f.checks and all(c.ok for c in f.checks)


def standardised_softmax(x: torch.Tensor) -> torch.Tensor:
    v, m = torch.var_mean(x, -1, keepdim=True)
    return torch.softmax((x - m) / torch.sqrt(v + 1e-5), -1)


def test_a_fold_that_has_no_other_form_is_shown_as_it_runs(tmp_path):
    """Its maximum both shifts and scales: kept in the loop it may overflow, so that the papers' form does not exist."""
    x = explain(standardised_softmax, torch.randn(6, 40))
    found = next(f for f in x.folds if "softmax_max" in {c.name for c in f.cascade})
    assert len(found.cascade) == 4 and found.paper is found.delayed
    x.to_html(tmp_path / "page.html")


def test_what_is_not_covered_is_listed(tmp_path):
    def sorted_softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sort(x).values, -1)

    x = explain(sorted_softmax, torch.randn(6, 40))
    (found,) = [r for r in x.rejections if r.kind == "fallback"]
    assert "sort" in found.subject + found.reason
    assert len(x.kernels) == 1 and x.left == 1
    head = str(x).split("Kernels")[0]
    assert (
        "1 more operator left to PyTorch:\n  aten.sort.default: operator aten.sort" in head and "without those" in head
    )
    x.to_html(tmp_path / "page.html")
    assert "1 more is left to PyTorch: aten.sort.default." in (tmp_path / "page.html").read_text()


def test_what_breaks_a_graph_is_said_first(capsys):
    def told(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        print("hello")
        breaking = torch.randn(2).tolist()
        return y + breaking[0]

    x = explain(told, torch.randn(6, 40))
    head = " ".join(str(x).split("Kernels")[0].split())
    assert "left to PyTorch: what lies between its graphs: the function cannot be captured whole: " in head
    assert x.fallbacks[0].loc.text == 'print("hello")'
    assert "Left to PyTorch: what lies between its graphs." in html.page(x)


def test_what_is_whole_has_nothing_left():
    x = explain(softmax, torch.randn(6, 40))
    assert not x.left and "left to PyTorch" not in str(x) + html.page(x).split("<section")[0]


def several_results(x: torch.Tensor) -> torch.Tensor:
    a, b = x.split(4, -1)
    values, at = a.topk(2, -1)
    best, _ = b.max(-1)
    return torch.softmax(a * best[:, None], -1), values, at


def test_operators_with_several_results_are_named():
    x = explain(several_results, torch.randn(8, 8))
    shown = str(x) + html.page(x)
    assert "built-in function" not in shown
    origins = {c.origin for c in trace(several_results, torch.randn(8, 8)).program.body}
    assert "aten.topk.default" in origins and not any("built-in" in o for o in origins)


def test_significands_that_come_before_their_exponents_are_listed():
    def weighed(x):
        a, b = x.split(4, -1)
        return torch.softmax(a * b.amax(-1, keepdim=True), -1).sum(-1)

    assert "pair(" in html.page(explain(weighed, torch.randn(8, 8)))


@pytest.mark.parametrize("fn", [softmax, lambda x: torch.softmax(x @ x.mT, -1) @ x])
def test_kernels_are_those_of_the_device_asked_for(fn):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")
    cpu, gpu = (explain(fn, torch.randn(64, 64), device=d) for d in ("cpu", "cuda"))
    assert "#include" in cpu.source and "triton" not in cpu.source
    assert "@triton.jit" in gpu.source and "#include" not in gpu.source
    assert "@triton.jit" in gpu.text(code=True) and "@triton.jit" not in str(gpu)
    assert "Generated Triton" in html.page(gpu) and "Generated C++" in html.page(cpu)
    assert explain(fn, torch.randn(64, 64)).source == cpu.source


def test_library_calls_of_a_gpu_are_shown_as_such():
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).half()
    x = explain(model, torch.randn(4096, 512).half(), device="cuda")
    assert any(k.kind == "library" for k in x.kernels) and "library" in x.text(code=True)


def test_what_is_fused_is_shown_as_it_was_compiled():
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

    def layer(x, w, b):
        return torch.nn.functional.gelu(x @ w + b)

    args = torch.randn(4096, 512).half(), torch.randn(512, 2048).half(), torch.randn(2048).half()
    goals = ("fused", "fast")
    kinds = {g: {k.kind for k in explain(fuse(layer, goal=g), *args, device="cuda").kernels} for g in goals}
    assert "library" in kinds["fast"] and "library" not in kinds["fused"]


def test_library_calls_are_named_by_their_operators():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
    x = explain(model, torch.randn(256, 512), device="cpu", goal="greedy")
    called = [k.calls for k in x.kernels if k.kind == "library"]
    assert called and all("mm" in name for names in called for name in names)
    assert "library call of aten." in str(x) and called[0][0] in html.page(x)


def test_kernels_are_timed_where_that_is_asked_for():
    x = torch.randn(6, 40)
    plain, timed = explain(softmax, x), explain(softmax, x, measure=True, code=True)
    (k,), (t,) = plain.kernels, timed.kernels
    assert k.seconds is None and k.predicted == t.predicted and k.predicted > 0
    assert t.seconds is not None and 0 < t.seconds < 1
    assert "measured" in str(timed) and "measured" in html.page(timed) and "measured" not in str(plain)
    assert "#include" in str(timed) and "#include" not in timed.text()
    both = alike((*timed.regions, *timed.regions))
    assert both[0].count == 2 and both[0].seconds == pytest.approx(2 * t.seconds)


def test_a_program_that_is_timed_step_by_step_computes_the_same():
    compiled = compile_program(parse(TWO_KERNELS))
    x = torch.randn(64, 40)
    found, seconds = run_timed(compiled, {"x": x}, {"n": 40})
    assert len(seconds) == len(compiled.steps) and all(0 < s < 1 for s in seconds)
    assert torch.allclose(found["u"], (x * x.sum(-1, keepdim=True)).sum(0), atol=1e-3)


def test_another_device_cannot_be_measured():
    with pytest.raises(TilefoldError, match="nothing here runs on 'cuda'"):
        explain(softmax, torch.randn(3, 4), device="cuda", measure=True)


def test_what_does_not_run_is_not_printed():
    shown = explain(softmax, torch.randn(6, 40))
    assert "rule" not in str(shown) and "(not what runs)" in html.page(explain(softmax, torch.randn(6, 40)))


def test_other_devices_are_refused():
    with pytest.raises(TilefoldError, match="no kernels are made for 'tpu'"):
        explain(softmax, torch.randn(3, 4), device="tpu")


def test_a_graph_break_gives_two_regions():
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return torch.var(y, -1)

    assert len(explain(broken, torch.randn(6, 40)).regions) == 2


def test_nothing_to_explain_is_an_error():
    with pytest.raises(UnsupportedError, match="computes nothing on tensors"):
        explain(lambda: 3)


def test_a_compiled_program_takes_sizes_for_its_symbols():
    compiled = compile_program(parse(SOFTMAX))
    assert explain_compiled(compiled, syms={"n": 10}).traffic.after == 2 * 5 * 10 * 4
    assert explain_compiled(compiled).traffic.after == 2 * 5 * 512 * 4
