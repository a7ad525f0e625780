"""Calls in C++ against the Python that defines them: steps, arguments and results of every kind, errors, threads."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from weakref import ref

import pytest
import torch
import torch.nn.functional as F

from tilefold import pipeline
from tilefold.backends.triton.launch import TritonKernel, memory_at
from tilefold.backends.triton.launcher import Launcher, Plan
from tilefold.block.interp import run as run_block
from tilefold.errors import BackendError
from tilefold.frontend.fuse import trace
from tilefold.frontend.regions.execute import Executable
from tilefold.frontend.regions.replay import Replayed
from tilefold.plan.library import library_convolutions, library_product
from tilefold.plan.targets import cpu, gpu
from tilefold.runtime.native import load
from tilefold.runtime.native.load import native
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.tape import Op


@pytest.fixture(autouse=True)
def in_library(monkeypatch):
    """Every product is a library call, so that small programs have steps of all kinds; and the module is built."""
    assert native().wait() is not None, native().reason

    def products(p, machine):
        return frozenset(c.name for c in p.body if library_product(c, p.sizes) is not None) | library_convolutions(p)

    monkeypatch.setattr(pipeline, "_planned", lambda *given: None)
    monkeypatch.setattr(pipeline, "settled_for_cpu", lambda p, key, settle: settle(p))  # nothing of this on disk
    monkeypatch.setattr(cpu, "library_products", products)
    monkeypatch.setattr(gpu, "gpu_library_products", products)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def replayed(fn, *args, device="cpu", **options):
    """The function as a region that is recorded, and one that never is."""
    low = trace(fn, *args, **options)
    program = pipeline.compile_program(low.program, device=device)
    return Replayed(low, program), Executable(low, program)


def tapes(run):
    return run._module.count(run._region)


def check(fn, *shapes, kinds, dtype=torch.float32, device="cpu"):
    """Same results, strides and types as the definition in three calls, the last two of which are not Python's."""
    args = [randn(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes)]
    run, definition = replayed(fn, *args, device=device)
    assert {type(s).__name__ for s in run.program.steps} == set(kinds)
    for seed in range(3):
        args = [randn(*s, seed=10 * seed + n, dtype=dtype) for n, s in enumerate(shapes)]
        by = {id(a): a.clone() for a in args}
        ordered = in_order(run, fn, args)
        got, want = run(*ordered), definition(*ordered)
        if seed == 0:
            run._run = None  # only the tape is left
        for x, y in zip(got, want, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert x.stride() == y.stride() and x.dtype is y.dtype and not x.requires_grad
                assert torch.equal(x, y)
        assert all(torch.equal(a, by[id(a)]) for a in args)
    assert tapes(run) == 1 and not run.refused
    return run


def in_order(run, fn, args):
    """Arguments of the function in the order of its graph's placeholders, sizes among them."""
    by = dict(zip(inspect.signature(fn).parameters, args, strict=True))
    given = {b.position: by[b.name] for b in run.lowered.inputs}
    for b in run.lowered.syms:
        if b.axis is None:
            given[b.position] = next(iter(by.values())).shape[0]  # lengths are those of first axes here
    (rest,) = [[a for a in args if all(a is not g for g in given.values())]]
    return [given[k] if k in given else rest.pop() for k in range(run.lowered.placeholders)]


CASES = {
    "mm": (lambda x, w: torch.softmax(x @ w, -1), [(5, 8), (8, 6)]),
    "mm of a transposed operand": (lambda x, w: torch.softmax(x @ w.T, -1), [(5, 8), (6, 8)]),
    "addmm": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(5, 8), (6, 8), (6,)]),
    "linear of rows of two axes": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(2, 5, 8), (6, 8), (6,)]),
    "bmm": (lambda q, k: torch.softmax(q @ k.mT, -1), [(3, 5, 8), (3, 6, 8)]),
    "attention": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)]),
    "heads merged": (
        lambda x, w: (F.relu(x).transpose(1, 2).reshape(2, 5, 24) @ w).relu(),
        [(2, 3, 5, 8), (24, 6)],
    ),
    "one result twice, and an argument": (lambda x, w: (torch.relu(x @ w), (x @ w).relu().T, x), [(5, 8), (8, 6)]),
}


@pytest.mark.parametrize("case", CASES)
def test_products_and_kernels(case):
    fn, shapes = CASES[case]
    check(fn, *shapes, kinds={"LibraryStep", "KernelStep"})


def test_products_that_convert_their_operands():
    run = check(
        lambda x, w: torch.relu((x @ w).float()), (5, 8), (8, 6), kinds={"LibraryStep", "KernelStep"},
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert run is not None


@pytest.mark.parametrize("form", [{"padding": 1}, {"stride": 2, "groups": 2}, {"dilation": 2}])
def test_convolutions(form):
    w = (6, 4 // form.get("groups", 1), 3, 3)
    check(lambda x, w: torch.relu(F.conv2d(x, w, **form)), (2, 4, 9, 9), w, kinds={"ConvolutionStep", "KernelStep"})


def test_kernels_alone():
    check(lambda x: torch.softmax(x, -1), (5, 8), kinds={"KernelStep"})


def test_launches_of_python_callables(monkeypatch):
    """What launches kernels of GPUs is called with addresses and integers; here the block interpreter stands in."""

    def plan(self, xs, syms, place=None):
        layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in xs]

        def call(grid, y, z, stream, *arguments):
            assert (grid, y, z, stream, arguments[0], arguments[-1]) == (7, 1, 1, 0, "head", 33)
            tensors = [memory_at(p, *layout) for p, layout in zip(arguments[1:-1], layouts, strict=True)]
            names = [i.name for i in self.block.inputs]
            results = run_block(self.block, dict(zip(names, tensors, strict=False)), syms)
            for r, out in zip(self.block.results, tensors[len(names) :], strict=True):
                out.copy_(results[r.name])

        return Plan(Launcher(call, ("head",)), 7, (33,))

    monkeypatch.setattr(TritonKernel, "plan", plan)
    fn, shapes = CASES["attention"]
    check(fn, *shapes, kinds={"LibraryStep", "GpuStep"}, device="interpreter")


def test_other_extents_strides_and_types_are_other_tapes():
    w = randn(8, 6, seed=1)
    run, definition = replayed(lambda x, w: torch.relu(x @ w), randn(5, 8), w)
    wide = randn(5, 16)
    for n, x in enumerate((randn(5, 8), wide[:, :8], wide[:, 8:], wide[:, ::2], randn(8, 5).T)):
        for _ in range(2):
            assert torch.equal(run(x, w)[0], definition(x, w)[0])
        assert tapes(run) == (1, 2, 2, 3, 4)[n]  # two windows of one tensor have the same strides


def test_changing_lengths_share_a_region_and_memory_stays_flat():
    x, w = randn(5, 8), randn(8, 6, seed=1)
    torch._dynamo.mark_dynamic(x, 0)
    fn = lambda x, w: torch.relu(x @ w) + 1  # noqa: E731
    run, _ = replayed(fn, x, w, dynamic="auto")
    for call in range(1000):
        n = 2 + call * 7 % 400
        x = randn(n, 8, seed=call % 3)
        (y,) = run(*in_order(run, fn, (x, w)))
        if call % 50 == 0:
            torch.testing.assert_close(y, torch.relu(x @ w) + 1)
    assert 0 < tapes(run) <= 256 and len(run._seen) == 400


def test_arguments_that_share_memory():
    x = randn(8, 8)
    run, definition = replayed(lambda x, y: torch.relu(x @ y) + y, x, randn(8, 8, seed=1))
    for _ in range(3):
        assert torch.equal(run(x, x.T)[0], definition(x, x.T)[0])


def test_arguments_that_need_gradients_are_read_as_they_are():
    x, w = randn(5, 8).requires_grad_(), torch.nn.Parameter(randn(8, 6, seed=1))
    run, definition = replayed(lambda x, w: torch.relu(x @ w), x.detach(), w.detach())
    with torch.enable_grad():
        for _ in range(3):
            got, want = run(x, w)[0], definition(x, w)[0]
            assert torch.equal(got, want) and not got.requires_grad
    assert tapes(run) == 1


def test_arguments_that_are_no_plain_tensors_run_in_python():
    run, _ = replayed(lambda x, w: torch.relu(x @ w), randn(5, 8), randn(8, 6))
    x, w = randn(5, 8), randn(8, 6, seed=2)
    run(x, w)
    seen = Counter()
    usual = run._run
    run._run = lambda args, runner: seen.update(["python"]) or usual(args, runner)
    run(x, w)
    assert not seen
    conjugate = torch.complex(x, x).conj().imag  # a negative of memory, which is not what its memory holds
    assert conjugate.is_neg()
    assert torch.equal(run(conjugate, w)[0], run(conjugate.clone(), w)[0]) and seen["python"]


def test_calls_keep_nothing_alive():
    run, _ = replayed(CASES["attention"][0], *[randn(*s) for s in CASES["attention"][1]])
    args = [randn(*s) for s in CASES["attention"][1]]
    run(*args)
    counts = [sys.getrefcount(a) for a in args]
    made = [run(*args) for _ in range(20)]
    gone = [ref(y) for (y,) in made]
    assert len({y.data_ptr() for (y,) in made}) == 20
    del made
    assert all(r() is None for r in gone) and [sys.getrefcount(a) for a in args] == counts


def test_modes_see_the_operators_of_a_call():
    run, _ = replayed(lambda x, w: torch.relu(x @ w), randn(5, 8), randn(8, 6))
    seen = []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    x, w = randn(5, 8), randn(8, 6)
    run(x, w)
    with Seeing():
        run(x, w)
    assert "aten.mm.default" in seen


def test_an_operator_that_depends_on_values_is_not_recorded(monkeypatch):
    run, definition = replayed(lambda x, w: torch.relu(x @ w), randn(5, 8), randn(8, 6))
    step = run.program.steps[0]
    usual = type(step).run
    monkeypatch.setattr(type(step), "run", lambda self, t, s: (t[self.reads[0]].sum().item(), usual(self, t, s))[1])
    x, w = randn(5, 8), randn(8, 6)
    assert torch.equal(run(x, w)[0], definition(x, w)[0])
    assert "depends on values" in run.refused and run._module is None
    assert torch.equal(run(x, w)[0], definition(x, w)[0])


def test_what_has_no_instruction_is_called_as_it_is(monkeypatch):
    run, definition = replayed(lambda x, w: torch.relu(x @ w), randn(5, 8), randn(8, 6))
    step = run.program.steps[0]

    def by_einsum(self, tensors, syms):
        x, w = (tensors[t] for t in self.reads)
        tensors[self.name] = torch.flip(torch.flip(x, [0, 1]) @ torch.flip(w, [0]), [0])

    monkeypatch.setattr(type(step), "run", by_einsum)
    for seed in range(3):
        x, w = randn(5, 8, seed=seed), randn(8, 6, seed=seed)
        assert torch.equal(run(x, w)[0], definition(x, w)[0])
    assert tapes(run) == 1


def test_an_index_out_of_range_is_eagers_error_and_names_the_users_line():
    def look_up(table, at):
        return torch.relu(table[at])  # the user's line

    table = randn(5, 4)
    run, _ = replayed(look_up, table, torch.tensor([0, 4]))
    assert torch.equal(run(table, torch.tensor([0, 1]))[0], torch.relu(table[:2]))
    run._run = None
    with pytest.raises(IndexError, match="out of range") as caught:
        run(table, torch.tensor([0, 5]))
    assert any("test_replay.py" in note for note in caught.value.__notes__)
    assert torch.equal(run(table, torch.tensor([2, 1]))[0], torch.relu(table[[2, 1]]))


def test_steps_show_under_their_names_in_a_profiler():
    run, _ = replayed(lambda x, w: torch.relu(x @ w), randn(5, 8), randn(8, 6))
    for n in range(2):
        with torch.profiler.profile() as found:
            run(randn(5, 8), randn(8, 6))
        names = [e.name for e in found.events() if e.name.startswith("tilefold::")]
        assert set(names) == set(run.program.titles), n


class OnDevice:
    """What is asked of a tensor on a GPU before anything runs."""

    is_cuda = True
    __class__ = torch.Tensor


@pytest.mark.parametrize("wanted", [False, True])
def test_regions_of_gpus_stay_in_python_unless_the_settings_say_otherwise(wanted, monkeypatch):
    monkeypatch.setenv("TILEFOLD_RUNNER", "all" if wanted else "cpu")
    run, _ = replayed(lambda x: torch.relu(x), randn(3))
    run._begin([OnDevice()])
    assert (run._module is not None) == wanted and bool(run.refused) != wanted


def test_two_threads_share_a_region():
    run, definition = replayed(CASES["attention"][0], *[randn(*s) for s in CASES["attention"][1]])
    given = [[randn(*s, seed=n) for s in CASES["attention"][1]] for n in range(4)]
    wanted = [definition(*g)[0] for g in given]
    run(*given[0])
    wrong = []

    def call(n):
        for _ in range(200):
            if not torch.equal(run(*given[n])[0], wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and tapes(run) == 1


def test_without_a_compiler_regions_run_in_python(monkeypatch):
    def nothing():
        raise BackendError("no C++ compiler found", hint="install one")

    monkeypatch.setattr(load, "toolchain", nothing)
    found = load.Native()
    assert found.wait() is None and "no C++ compiler" in found.reason


def test_products_write_into_memory_of_the_tape():
    run = check(CASES["attention"][0], *CASES["attention"][1], kinds={"LibraryStep", "KernelStep"})
    args = [randn(*s) for s in CASES["attention"][1]]
    recorder = Recorder(args, [])
    with recorder:
        made = Executable._run(run, args, lambda inputs, syms: run.program.recorded(inputs, syms, recorder))
    tape = recorder.tape(made)
    assert [i.op for i in tape.code] == [Op.BMM, Op.KERNEL, Op.BMM] and tape.arena > 0
