"""A row: peers compute what the operator does, and contenders that fail or are wrong do not stop it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.utils import fresh_cache

from tilefold.errors import UnsupportedError
from tilefold.frontend.regions import assemble as regions
from tilefold.frontend.regions.guard import Fallback
from tilefold.frontend.torch_compile import backend
from tilefold.frontend.verify import own_error
from tilefold.suites.gpu import exact, peers
from tilefold.suites.gpu import row as rows
from tilefold.suites.gpu.case import Part, whole
from tilefold.suites.gpu.cases import SMALL
from tilefold.suites.gpu.floors import Rates
from tilefold.suites.gpu.measure import CpuTimer
from tilefold.suites.gpu.peers import OURS, PEERS, Peer, contenders, start_compilers
from tilefold.suites.gpu.results import Record
from tilefold.suites.gpu.row import DeviceLost, Effort, measure_row
from tilefold.suites.timing import Series

RATES = Rates(1e12, 1e12, 1e10)
QUICK = Effort(rounds=2, seconds=0.01)
CASES = {c.row: c for c in (*SMALL["redfuser"], *SMALL["neptune"])}
LIBRARIES = frozenset(PEERS) - {OURS, "compile", "compile-max", "quack", "liger"}
#: A contender in Tilefold's place that costs no compilation.
STAND_IN = Peer(OURS, "ours", lambda case, args: case.fn)


def measured(case, *peers, effort=QUICK, timer=None, **more):
    found = measure_row(case, peers, timer or CpuTimer(), RATES, "cpu", effort=effort, **more)
    return {r.contender: r for r in found}


def test_both_compilers_are_started_forward_and_backward(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda fn, *, dynamic, backend: asked.append(backend) or fn)
    module = SimpleNamespace(start_building=lambda: asked.append("begun"), wait=lambda: asked.append("built"))
    monkeypatch.setattr(peers, "native", lambda: module)
    start_compilers("cpu")
    assert asked == ["begun", backend, "inductor", "built"]


@pytest.mark.parametrize("name", CASES)
def test_every_peer_computes_the_operator(name, monkeypatch):
    monkeypatch.setattr(rows, "REPEATS", 1)
    monkeypatch.setattr(
        CpuTimer, "rounds", lambda self, calls, **_: {n: Series((self.once(c),)) for n, c in calls.items()}
    )
    case = CASES[name]
    found = measured(case, STAND_IN, *(p for p in contenders(case, only=LIBRARIES) if p.name != OURS))
    assert len(found) >= 2
    for r in found.values():
        assert not r.why and len(r.microseconds) == rows.REPEATS and r.best_us > 0
        assert r.kind == "floor" or r.error < 0.02


@pytest.mark.parametrize("name", ["gqa-decode-67", "window-prefill-67", "Q-small", "R-small-6"])
def test_tilefold_is_compared_and_timed(name):
    found = measured(CASES[name], *contenders(CASES[name], only=frozenset({"eager"})))
    ours, eager = found[OURS], found["eager"]
    assert not ours.why and ours.error <= 2 * ours.eager_error + 0.01 and ours.first_call > 0
    assert ours.over_ours == (1.0, 1.0) and len(eager.over_ours) == rows.REPEATS
    assert eager.ratio == 1.0 and ours.ratio == pytest.approx(eager.best_us / ours.best_us)
    assert ours.floor_us == pytest.approx(1e6 * RATES.floor(CASES[name].work)[0])


def test_the_first_call_alone_finds_cold_caches():
    inside, calls = [], []

    @contextmanager
    def cold():
        inside.append(True)
        yield
        inside.clear()

    case = CASES["R-small-6"]
    watched = Peer(
        "watched", "peer", lambda case, args: lambda *a: calls.append(bool(inside)) or case.fn(*a), cold=cold
    )
    assert not measured(case, STAND_IN, watched)["watched"].why
    assert calls[0] and not any(calls[1:]) and len(calls) > 1


def test_every_form_of_inductor_compiles_from_cold_caches():
    assert {p.name for p in PEERS.values() if p.cold is fresh_cache} == {"compile", "compile-max", "compile-cg"}


def test_all_peers_of_the_rows_are_known():
    for case in (*SMALL["redfuser"], *SMALL["neptune"]):
        names = [p.name for p in contenders(case, autotune=True)]
        assert names[0] == OURS and {"eager", "compile", "compile-max"} <= set(names)
    assert [p.name for p in contenders(CASES["H-small"], only=frozenset({"flash"}))] == [OURS, "flash"]


def test_libraries_refuse_what_they_do_not_have():
    alibi, softmax = CASES["alibi-prefill-67"], CASES["X-small"]
    with pytest.raises(UnsupportedError, match="SDPA has no alibi"):
        PEERS["cudnn"].build(alibi, alibi.args())
    with pytest.raises(UnsupportedError, match="is not attention"):
        PEERS["flex"].build(softmax, softmax.args())


def test_wrong_failing_and_uncapturable_contenders_do_not_stop_a_row():
    class Picky(CpuTimer):
        def ready(self, call):
            if call() is None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return call

    def fails(case, args):
        raise ValueError("out of luck\nand more")

    def late(case, args):
        calls = iter((case.fn(*args),))
        return lambda *args: next(calls, None)

    off = Peer("off", "peer", lambda case, args: lambda x: case.fn(x) * 1.5)
    shape = Peer("shape", "peer", lambda case, args: lambda x: case.fn(x)[:1])
    two = Peer("two", "peer", lambda case, args: lambda x: (case.fn(x),) * 2)
    found = measured(
        CASES["V-small"], STAND_IN, off, shape, two, Peer("fails", "peer", fails), Peer("late", "peer", late),
        timer=Picky(),
    )  # fmt: skip
    assert found["off"].why.startswith("wrong: less right") and not found["off"].microseconds
    assert "result is" in found["shape"].why and "2 results, not 1" in found["two"].why
    assert found["fails"].why == "ValueError: out of luck"
    assert "stream is capturing" in found["late"].how and len(found["late"].microseconds) == rows.REPEATS
    assert not found[OURS].why and found[OURS].microseconds


def test_an_error_that_only_one_part_has_is_found():
    case = CASES["V-small"]
    halves = replace(case, parts=lambda args: (Part((args[0][:5],), lambda y: y[:5]), *case.parts(args)[:1]))

    def off_at_the_end(c, args):
        return lambda x: torch.cat([c.fn(x)[:-1], c.fn(x)[-1:] * 2])

    found = measured(halves, STAND_IN, Peer("tail", "peer", off_at_the_end))
    assert found["tail"].why.startswith("wrong")


def test_a_tile_that_was_never_written_is_found_outside_the_parts():
    case = CASES["X-small"]
    first = replace(case, parts=lambda args: (Part((args[0][:2],), lambda y: y[:2]),))

    def unwritten(c, args):
        return lambda x: torch.where(torch.arange(x.shape[0]).unsqueeze(-1) < 9, c.fn(x), float("nan"))

    found = measured(first, STAND_IN, Peer("holes", "peer", unwritten))
    assert "not finite" in found["holes"].why and not found[OURS].why


def test_slow_and_large_contenders_are_timed_apart(monkeypatch):
    class Small(CpuTimer):
        def memory(self):
            return 1000

        def peak(self, call):
            return 900

    found = measured(CASES["V-small"], STAND_IN, timer=Small())
    assert "slow or large" in found[OURS].how and len(found[OURS].microseconds) == rows.REPEATS
    assert found[OURS].over_ours == (1.0, 1.0)


def test_what_killed_a_process_is_not_tried_again_and_time_is_kept():
    def never(case, args):
        raise AssertionError("tried again")

    dead = Record("redfuser", "V-small", "variance", "", 0, "dead", "peer", why="the process died")
    found = measured(CASES["V-small"], STAND_IN, Peer("dead", "peer", never), known={"dead": dead})
    assert found["dead"].why == "the process died"
    late = measured(CASES["V-small"], STAND_IN, effort=Effort(3, 0.01, row_seconds=-1.0))
    assert "time was used up" in late[OURS].why


def test_a_lost_device_ends_the_process():
    class Lost(CpuTimer):
        def release(self):
            raise RuntimeError("an illegal memory access was encountered")

    def fails(case, args):
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLost, match="illegal memory access"):
        measured(CASES["V-small"], Peer("bad", "peer", fails), timer=Lost())


def test_a_row_without_a_reference_is_recorded():
    def fails(x):
        raise RuntimeError("out of memory")

    found = measured(replace(CASES["V-small"], fn=fails), STAND_IN)
    assert found[OURS].why == "no reference: RuntimeError: out of memory"


def test_what_is_left_to_others_is_said():
    scan = replace(CASES["X-small"], fn=lambda x: x.cumsum(-1).sort(-1)[0], planned=True)
    ours = measured(scan, *contenders(scan, only=frozenset()))[OURS]
    assert ours.left == "aten.cumsum.default, aten.sort.default" and not ours.why
    first, second = ours.left_why.split("; ")
    assert first.startswith("aten.cumsum.default: ") and second.startswith("aten.sort.default: ")
    assert measured(CASES["X-small"], *contenders(CASES["X-small"], only=frozenset()))[OURS].left == ""


def test_contenders_that_tune_themselves_are_asked_for():
    names = [p.name for p in contenders(CASES["causal-prefill-67"], autotune=True)]
    assert names[0] == OURS and {"untuned", "compile-max", "flex-max"} <= set(names) and "flex" in names
    assert "flex-max" not in [p.name for p in contenders(CASES["X-small"], autotune=True)]
    assert not {"untuned", "compile-max", "flex-max"} & {p.name for p in contenders(CASES["causal-prefill-67"])}
    (untuned,) = (p for p in contenders(CASES["X-small"], autotune=True) if p.name == "untuned")
    assert untuned.kind == "own"  # no peer: no bar means it
    with pytest.raises(UnsupportedError, match="takes what was tuned"):
        untuned.build(CASES["L-small"], ())


def test_what_fails_after_the_first_call_is_said_too():
    """Kernels are built when a call first needs them."""
    calls, fallbacks = [], []

    def build(case, args):
        regions.compilations.append(regions.CompiledGraph("graph0", [], fallbacks))

        def run(x):
            calls.append(x)
            if len(calls) == 2:
                fallbacks.append(Fallback("graph0_1", "BackendError: " + 200 * "x"))
            return case.fn(x)

        return run

    case = CASES["X-small"]
    found = measured(case, Peer(OURS, "ours", build))[OURS]
    assert found.left == "graph0_1" and found.left_why == "graph0_1: " + ("BackendError: " + 200 * "x")[: rows.REASON]


def rounded(x):
    return x.to(torch.bfloat16).float().sum()


def scalar_case():
    return replace(CASES["X-small"], fn=rounded, make=lambda gen: (torch.rand(64, generator=gen),), parts=whole)


def unlucky_seed(case) -> tuple[int, float]:
    """A seed where eager happens to be right on, and the largest of its errors elsewhere."""
    for seed in range(50):
        args = case.args("cpu", seed)
        (part,) = exact.references(case, args)
        own, _ = own_error(part.eager[0], part.exact.result)
        luck, _ = exact.Draws(case, "cpu", seed).luck(0, 0)
        if 3 * own < luck:
            return seed, luck
    raise AssertionError


@pytest.mark.parametrize(("errs", "right"), [(1.5, True), (3.0, False)])
def test_a_single_number_is_judged_by_eagers_errors_on_several_draws(errs, right):
    case = scalar_case()
    seed, luck = unlucky_seed(case)

    def build(case, args):
        return lambda x: (x.double().sum() * (1 + errs * luck)).float()

    found = measured(case, Peer(OURS, "ours", build), seed=seed)[OURS]
    assert found.error == pytest.approx(errs * luck, rel=0.05) and found.eager_error == pytest.approx(luck)
    assert (found.why == "") == right and found.why.startswith("" if right else "wrong: less right than eager")


def test_results_of_many_elements_are_judged_by_their_own_draw(monkeypatch):
    monkeypatch.setattr(exact.Draws, "luck", lambda *a: pytest.fail("drawn"))
    case = replace(scalar_case(), fn=lambda x: x.to(torch.bfloat16).float())
    apart = torch.linspace(-0.1, 0.1, 64)  # each element has an error of its own
    peer = Peer(OURS, "ours", lambda case, args: lambda x: case.fn(x) * (1 + apart))
    assert measured(case, peer)[OURS].why.startswith("wrong: less right than eager")


@pytest.mark.parametrize(("factor", "right"), [(1.5e-3, True), (5e-2, False)])
def test_errors_that_all_elements_have_in_common_are_one_numbers(monkeypatch, factor, right):
    """All elements times a number that eager happens to have right, and has 1e-3 off on other draws."""
    monkeypatch.setattr(exact.Draws, "luck", lambda *a: (1e-3, 1e-3))
    case = replace(scalar_case(), fn=lambda x: 2 * x)
    peer = Peer(OURS, "ours", lambda case, args: lambda x: case.fn(x) * (1 + factor))
    why = measured(case, peer)[OURS].why
    assert (why == "") == right and why.startswith("" if right else "wrong: less right than eager")


def test_the_loss_of_a_training_step_is_drawn_without_a_backward(monkeypatch):
    model = torch.nn.Linear(64, 1, dtype=torch.bfloat16)
    case = replace(scalar_case(), fn=model, make=lambda gen: (torch.rand(8, 64, generator=gen).bfloat16(),), train=True)
    loss = replace(case, fn=torch.nn.Sequential(model, torch.nn.Flatten(0), Mean()))
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: pytest.fail("backward"))
    with torch.no_grad():
        draws = exact.Draws(loss, "cpu", 0)
        assert 0 < draws.luck(0, 0)[0] < 0.1


def test_a_gradient_of_few_elements_is_judged_by_several_draws_as_well(monkeypatch):
    """A bias' gradient that eager happens to have right, and other draws do not; the report names the result."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 1, dtype=torch.bfloat16), torch.nn.Flatten(0), torch.nn.Sigmoid())
    case = scalar_case()
    case = replace(case, fn=model.append(Mean()), make=lambda gen: (torch.rand(8, 64, generator=gen).bfloat16(),))
    case = replace(case, train=True)
    with torch.no_grad():
        draws = exact.Draws(case, "cpu", 0)
        luck, _ = draws.luck(0, 2)
        assert luck > 2e-4
    monkeypatch.setattr(exact.Draws, "luck", lambda self, part, leaf: (0.0, 0.0) if leaf < 2 else (luck, luck))

    def build(by):
        def step(x):
            loss = model(x)
            return loss + (by * (model[0].bias - model[0].bias.detach())).sum()  # the bias' gradient, and it alone

        return Peer(OURS, "ours", lambda case, args: step)

    found = measured(case, build(1.0))[OURS]
    assert found.why.startswith("wrong: less right than eager (result 3 of 3, error")
    assert measured(case, build(0.0))[OURS].why == ""


def test_parameters_are_drawn_again_where_nothing_else_is():
    """Of a module with float arguments alone, which in training are parameters: each draw has its own."""
    asked = []

    def made():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16), Mean())
        asked.append(float(model[0].weight.sum()))
        return model

    ones = torch.ones(4, 8, dtype=torch.bfloat16)
    case = replace(scalar_case(), module=made, make=lambda gen: (ones,), train=True)
    with torch.no_grad():
        assert exact.Draws(case, "cpu", 0).luck(0, 0)[0] > 0
    assert len(set(asked)) == len(asked) == exact.DRAWS


def test_training_is_compared_with_float64_whatever_the_program_casts_to():
    """Softmax's gradient of float32, of which little is left: eager is off by more than its last place."""
    case = replace(scalar_case(), fn=Narrow(), make=lambda gen: (torch.rand(1, 64, generator=gen),), train=True)
    with torch.enable_grad():
        (part,) = exact.references(case, case.args("cpu", 0))
    loss, gradient = part.exact.result
    assert loss.dtype == gradient.dtype == torch.float64 != part.eager[1].dtype
    x = case.fn.weight.detach().double().requires_grad_()
    own = (torch.softmax(x, -1) * (1 + 1e-3 * case.args("cpu", 0)[0].double())).sum()
    own.backward()
    assert torch.allclose(gradient, x.grad, rtol=1e-12, atol=0) and torch.equal(loss, own.detach())
    assert 1e-5 < own_error(part.eager[1], gradient)[0] < 1e-2


class Narrow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 64)[None])

    def forward(self, x):
        p = self.weight.float().softmax(-1) * (1 + 1e-3 * x.to(torch.float32))
        return p.sum(dtype=torch.float32)


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.float().mean()
