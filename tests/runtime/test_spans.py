"""Names of steps in profilers: after their operators, one each, and made only while a profiler runs."""

from __future__ import annotations

import pytest
import torch

from tilefold.backends.triton.launcher import Launcher, Plan
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.runtime import program as runtime_program
from tilefold.runtime.gpu_program import GpuCall
from tilefold.runtime.spans import PREFIX, profiled, titles


def network(x, w, b):
    h = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, x.shape[-1:]) @ w + b)
    return torch.softmax(h, -1), torch.softmax(x * 2, -1)


def arguments():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in ((300, 400), (400, 500), (500,))]


@pytest.fixture(scope="module")
def compiled():
    low = trace(network, *arguments())
    return low, compile_program(low.program)


def recorded(run) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    return [e.name for e in found.events() if e.name.startswith(PREFIX)]


def test_every_step_shows_once_and_in_order(compiled):
    low, program = compiled
    given = dict(zip((b.name for b in low.inputs), arguments(), strict=True))
    assert len(set(program.titles)) == len(program.steps) > 1
    assert any("softmax" in t for t in program.titles) and any("mm" in t for t in program.titles)
    assert recorded(lambda: program(given, {})) == list(program.titles)


def test_in_a_compiled_model():
    run = torch.compile(network, backend="tilefold")
    want = network(*arguments())
    run(*arguments())
    assert len(recorded(lambda: run(*arguments()))) > 1
    torch.testing.assert_close(run(*arguments()), want)


def test_no_range_is_made_without_a_profiler(compiled, monkeypatch):
    low, program = compiled
    given = dict(zip((b.name for b in low.inputs), arguments(), strict=True))
    made = []
    kept = runtime_program.span
    monkeypatch.setattr(runtime_program, "span", lambda title: made.append(title) or kept(title))
    assert not profiled()
    program(given, {})
    assert made == []
    recorded(lambda: program(given, {}))
    assert made == list(program.titles)


def test_launches_of_planned_calls_have_names():
    low = trace(lambda x: torch.softmax(x, -1).sum(0), torch.zeros(5, 7))
    whole = compile_program(low.program, device="interpreter").whole
    assert whole is not None and len(set(whole.titles)) == len(whole.launches) > 0
    launched = []
    plan = Plan(Launcher(lambda *args: launched.append(profiled()), ()), 1, ())
    call = GpuCall((), (), 0, (), ((plan, (0,)), (plan, (0,))), ("tilefold::a_0", "tilefold::b_1"))
    assert recorded(lambda: call.run(None, [0])) == ["tilefold::a_0", "tilefold::b_1"]
    call.run(None, [0])
    assert launched == [True, True, False, False]


def test_a_step_without_known_operators_keeps_its_own_name(compiled):
    class Unknown:
        name, members = "my_kernel", ("nothing",)

    assert titles(compiled[1].program, [Unknown(), Unknown()]) == (f"{PREFIX}my_kernel_0", f"{PREFIX}my_kernel_1")


def test_names_stay_short():
    def many(x):
        y = torch.tanh(torch.sin(torch.exp(x) + 1) * torch.sigmoid(x))
        return (y - y.amax(-1, keepdim=True)).sum(-1)

    (title,) = titles((low := trace(many, torch.zeros(4, 9))).program, compile_program(low.program).steps)
    assert "amax" in title and "sum" in title and title.count("_") <= 5
