"""Planned calls: addresses, scratch, views and caches, with kernels that the block interpreter runs at addresses."""

from __future__ import annotations

import importlib

import pytest
import torch

import tilefold
from tilefold.backends.triton.launch import TritonKernel, memory_at
from tilefold.backends.triton.launcher import Launcher, Plan
from tilefold.block.interp import run as run_block
from tilefold.frontend.fuse import trace
from tilefold.frontend.regions.direct import Direct, executable, packed_strides
from tilefold.frontend.regions.replay import Replayed
from tilefold.pipeline import compile_program
from tilefold.runtime.gpu_program import GpuCall
from tilefold.runtime.native.load import native
from tilefold.suites.gpu import operators as o


@pytest.fixture
def planned(monkeypatch, request):
    """Shapes of every planned kernel's tensors; kernels see nothing but addresses. Calls run in Python, or as tapes."""
    runner = getattr(request, "param", "python")
    monkeypatch.setenv("TILEFOLD_RUNNER", runner)
    assert runner == "python" or native().wait() is not None, native().reason
    found = []

    def plan(self, xs, syms, place):
        found.append(tuple(tuple(x.shape) for x in xs))
        layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in xs]

        def call(grid, y, z, stream, *addresses):
            tensors = [memory_at(p, *layout) for p, layout in zip(addresses, layouts, strict=True)]
            names = [i.name for i in self.block.inputs]
            results = run_block(self.block, dict(zip(names, tensors, strict=False)), syms)
            for r, out in zip(self.block.results, tensors[len(names) :], strict=True):
                out.copy_(results[r.name])

        return Plan(Launcher(call, ()), 1, ())

    monkeypatch.setattr(TritonKernel, "plan", plan)
    return found


IN_BOTH = pytest.mark.parametrize("planned", ["python", "cpu"], indirect=True)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def taped(run):
    return run._module.count(run._region)


def direct(fn, *args, **options):
    """The function as planned calls, and its arguments in the graph's order."""
    low = trace(fn, *args, **options)
    run = executable(low, compile_program(low.program, goal="fused", device="interpreter"))
    assert isinstance(run, Direct)
    return run


@IN_BOTH
def test_views_of_arguments_and_results_are_planned_away(planned):
    x = randn(6, 8)
    run = direct(lambda x: torch.softmax(x.view(2, 3, 8), -1).transpose(0, 1), x)
    for seed in range(3):
        x = randn(6, 8, seed=seed)
        (y,) = run(x)
        want = torch.softmax(x.view(2, 3, 8), -1).transpose(0, 1)
        torch.testing.assert_close(y, want)
        assert y.stride() == want.stride()
    assert len(planned) == 1
    assert (run._module is not None) == (not run.refused) and (run._module is None or taped(run) == 1)


@IN_BOTH
def test_parts_of_one_result_are_views_of_it(planned):
    def parts(x):
        y = torch.softmax(x, -1)
        return y[:, 1:], y[:, :-1]

    run = direct(parts, randn(6, 8))
    for seed in range(3):
        x = randn(6, 8, seed=seed)
        got, want = run(x), parts(x)
        assert all(torch.allclose(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))
        assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
    assert len(planned) == 1


@IN_BOTH
def test_another_layout_is_another_plan(planned):
    x = randn(6, 8)
    run = direct(lambda x: torch.softmax(x, -1), x)
    wide = randn(6, 16)
    for other in (x, x.clone(), wide[:, :8], wide[:, ::2], wide[:, 1:9], x.T.contiguous().T):
        torch.testing.assert_close(run(other)[0], torch.softmax(other, -1))
    assert len(planned) == 5  # `x` and its clone share one; a window at an odd address has its own


@IN_BOTH
def test_results_that_are_arguments_twice_the_same_or_have_gaps(planned):
    def several(x, y):
        t = torch.softmax(x, -1)
        return t, y, torch.softmax(x, -1), (x + 1).sum(0)

    x, y = randn(4, 6), randn(4, 6, seed=1)
    run = direct(several, x, y)
    got, want = run(x, y), several(x, y)
    by = [z for z in got if z is x or z is y]
    assert len(got) == len(run.lowered.outputs) and len(by) <= 1
    for o_, z in zip(run.lowered.outputs, got, strict=True):
        assert z is y if o_.position is not None else any(z.shape == w.shape and torch.allclose(z, w) for w in want)


@IN_BOTH
def test_partial_states_lie_in_scratch(planned):
    """Decoding: segments and the kernel that combines them."""
    q, k, v = randn(1, 2, 1, 16), randn(1, 2, 2048, 16, seed=1), randn(1, 2, 2048, 16, seed=2)
    low = trace(o.attention, q, k, v)
    run = executable(low, compile_program(low.program, goal="fused", device="interpreter"))
    by = {"q": q, "k": k, "v": v}
    args = [by[b.name[0]] for b in sorted(low.inputs, key=lambda b: b.position)]
    for _ in range(2):
        torch.testing.assert_close(run(*args)[0].view(1, 2, 1, 16), o.attention(q, k, v))
    assert len(planned) == 2 == len(run.whole.launches) and run.whole.between
    call = run._last.call
    assert call.scratch >= 4 * 2 * 16 and len(call.offsets) == len(run.whole.between)


@IN_BOTH
def test_sizes_are_read_from_arguments(planned):
    x = randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    run = direct(lambda x: torch.softmax(x, 0) * x.shape[0], x, dynamic="auto")
    for n in (5, 9, 5, 1, 9):
        x = randn(n, 8, seed=n)
        (y,) = run(*[x if isinstance(a, torch.Tensor) else n for a in _kinds(run, x, n)])
        torch.testing.assert_close(y, torch.softmax(x, 0) * n)
    assert len(planned) == 3 * len(run.whole.launches)


def _kinds(run, x, n):
    """Arguments of a graph of one tensor and its sizes."""
    numbers = {b.position for b in run.lowered.syms if b.axis is None}
    return [n if k in numbers else x for k in range(run.lowered.placeholders)]


class OnDevice:
    """What a call asks of an argument on a CUDA device."""

    shape, dtype = torch.Size((6, 8)), torch.float32

    def __init__(self, device, address=0x100):
        self.device, self.address = device, address

    def get_device(self):
        return self.device

    def data_ptr(self):
        return self.address

    def stride(self):
        return (8, 1)


def test_kernels_go_to_the_current_stream_of_their_device(planned, monkeypatch):
    """Device 1 is current: a call there changes nothing, one on device 0 makes that current for its launches."""
    run = direct(lambda x: torch.softmax(x, -1), randn(6, 8))
    launched, current = [], [1]

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *why):
            current.pop()

    def planned_call(args):
        plan = Plan(Launcher(lambda *a: launched.append((current[-1], a[3], a[4])), ()), 5, ())
        return GpuCall((), (), 0, (), ((plan, (0,)),))

    monkeypatch.setattr(run, "_planned", planned_call)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Current)
    for device in (1, 0, 1):
        run(OnDevice(device))
    assert launched == [(1, 71, 0x100), (0, 70, 0x100), (1, 71, 0x100)] and current == [1]
    run(OnDevice(1, 0x104))
    assert len(run._known) == 3, "another alignment is another plan"


def test_cpu_programs_are_recorded_unless_the_settings_forbid(monkeypatch):
    low = trace(lambda x: torch.softmax(x, -1), randn(3, 4))
    program = compile_program(low.program)
    assert native().wait() is not None, native().reason
    x = randn(3, 4)
    for runner, tapes in (("cpu", 1), ("all", 1), ("python", 0)):
        monkeypatch.setenv("TILEFOLD_RUNNER", runner)
        run = executable(low, program)
        assert type(run) is Replayed
        for _ in range(2):
            torch.testing.assert_close(run(x)[0], torch.softmax(x, -1))
        assert (run._module.count(run._region) if run._module is not None else 0) == tapes
        assert ("TILEFOLD_RUNNER is python" in run.refused) == (tapes == 0)


@pytest.fixture
def operator(planned, monkeypatch):
    """An operator whose program runs as planned calls."""
    module = importlib.import_module("tilefold.frontend.registered.custom_op")
    monkeypatch.setattr(
        module, "compile_program", lambda p, *, device, **how: compile_program(p, device="interpreter", **how)
    )
    return tilefold.custom_op


def test_repeated_calls_of_an_operator_are_looked_at_once(operator, monkeypatch):
    x, scale = randn(6, 8), randn(8, seed=1)
    op = operator(lambda x, scale: torch.softmax(x * scale, -1), x, scale)
    op(x, scale)
    checked = []
    monkeypatch.setattr(type(op._run), "__call__", lambda self, *xs: checked.append(xs) or self.run(*xs))
    for seed in range(3):
        y = randn(6, 8, seed=seed)
        torch.testing.assert_close(op(y, scale), torch.softmax(y * scale, -1))
    assert not checked
    wide = randn(6, 16)[:, :8]
    torch.testing.assert_close(op(wide, scale), torch.softmax(wide * scale, -1))
    assert len(checked) == 1
    with pytest.raises(tilefold.TilefoldError, match="takes 2 tensors, not 1"):
        op(x)


def test_arguments_are_checked_after_calls_that_fitted(operator):
    x, scale = randn(6, 8), randn(8, seed=1)
    op = operator(lambda x, scale: torch.softmax(x * scale, -1), x, scale)
    for _ in range(3):
        op(x, scale)
    for bad in ((x.double(), scale), (x[:5], scale), (x, scale[:7])):
        with pytest.raises(tilefold.TilefoldError):
            op(*bad)
    torch.testing.assert_close(op(x, scale), torch.softmax(x * scale, -1))


def test_an_argument_that_the_program_does_not_read_is_checked(operator):
    x, unused = randn(6, 8), randn(3, seed=1)
    op = operator(lambda x, unused: torch.softmax(x, -1) * unused.shape[0], x, unused)
    for _ in range(3):
        torch.testing.assert_close(op(x, unused), torch.softmax(x, -1) * 3)
    with pytest.raises(tilefold.TilefoldError):
        op(x, randn(4))


def window(x: torch.Tensor, start: int) -> torch.Tensor:
    """The same values and strides at another address: so many elements into a fresh memory."""
    whole = torch.empty(x.numel() + 64)
    at = (-whole.data_ptr() // 4) % 64 + start  # elements from an address that 256 divides
    part = whole[at : at + x.numel()].view(x.shape)
    return part.copy_(x)


def test_a_call_is_repeated_only_for_tensors_like_those_of_the_last(planned):
    x = window(randn(4, 8), 0)
    run = direct(lambda x: torch.softmax(x, -1), x)
    assert run.again((x,)) is None and planned == []  # there was no call yet
    run(x)
    (y,) = run.again((window(randn(4, 8, seed=1), 0),))
    torch.testing.assert_close(y, torch.softmax(randn(4, 8, seed=1), -1))
    others = [window(randn(4, 8), 1), randn(8, 4).T, randn(8, 4), randn(4, 8).double(), randn(4, 16)[:, ::2]]
    for other in others:
        assert run.again((other,)) is None
    assert len(planned) == 1
    torch.testing.assert_close(run(others[0])[0], torch.softmax(others[0], -1))  # the last call is this one now
    assert run.again((others[0],)) is not None and run.again((x,)) is None


def test_a_repeated_call_finds_its_tensors_among_other_arguments(planned):
    x, n = randn(4, 8), 3

    def several(x, y):
        return torch.softmax(y, -1) + x.sum(-1, keepdim=True)

    run = direct(several, x, randn(4, 8, seed=1))
    assert run.reads(2) and not run.reads(1) and not run.reads(3)
    for seed in range(3):
        a, b = randn(4, 8, seed=seed), randn(4, 8, seed=seed + n)
        (y,) = run(a, b) if seed == 0 else run.again((a, b))
        want = {tuple(several(*p).flatten().tolist()) for p in ((a, b), (b, a))}  # the graph orders its arguments
        assert any(torch.allclose(y.flatten(), torch.tensor(w)) for w in want)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (4, 1, 3, 2)])
def test_packed_strides_are_those_of_new_memory(shape: tuple[int, ...]) -> None:
    assert packed_strides(shape) == torch.empty(shape).stride()


@IN_BOTH
def test_results_are_written_over_arguments(planned):
    def step(p, g, m):
        new = m * 0.9 + g
        return p * 0.5 + new, new, g.amax()

    given = {"p": randn(4, 6), "g": randn(4, 6, seed=1), "m": randn(4, 6, seed=2)}
    low = trace(step, *given.values())
    program = compile_program(low.program, goal="fused", device="interpreter")
    at = {b.name: b.position for b in low.inputs}
    found = program.replacing({(low.outputs[0].name, "p"), (low.outputs[1].name, "m"), (low.outputs[2].name, "g")})
    program.replace(found)
    run = executable(low, program, {new: at[old] for new, old in found.items()})
    assert isinstance(run, Direct) and list(found.values()) == ["m", "p"]
    for _ in range(3):
        want = step(*[x.clone() for x in given.values()])
        made = run(*sorted(given.values(), key=lambda x: [at[n] for n in at if given[n] is x]))
        torch.testing.assert_close(made, want)
        assert made[0].is_set_to(given["p"]) and made[1].is_set_to(given["m"])
