"""Dynamic sizes: lengths of one bin share a rendering, and compilations differ by divisibility alone; other models."""

from __future__ import annotations

import re

import pytest
import torch

from tests.backends.triton.kernels import heads
from tilefold.algebra.expr import Sym
from tilefold.backends.triton import launch
from tilefold.backends.triton.build import DIVISOR
from tilefold.backends.triton.launch import TritonKernel
from tilefold.block.canonical import canonical
from tilefold.errors import BackendError
from tilefold.frontend.fuse import trace
from tilefold.pipeline import compile_program
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.suites.gpu import operators as o
from tilefold.tile.layout import usual_units

LENGTHS = (1, 2, 3, 7, 16, 17, 31, 33, 63, 64, 65, 80, 96, 100, 127, 128, 129, 200, 256, 257, 300, 333, 384, 511, 513)
LENGTHS += (640, 777, 900, 1023, 1024, 1025, 1536, 2000, 2048, 3000, 4096)


def bin_of(n):
    return 1 << max(0, n - 1).bit_length()


class Counted:
    """The kernels of a program of lengths, and what each call would render and compile."""

    def __init__(self, fn, make, monkeypatch):
        self.rendered, self.compiled = [], set()
        render = launch.render
        monkeypatch.setattr(launch, "render", lambda *a, **k: self.rendered.append(k["bins"]) or render(*a, **k))
        example = make(100)
        for x in example:
            torch._dynamo.mark_dynamic(x, 2)
        program = trace(fn, *example, dynamic="auto").program
        self.steps = compile_program(program, goal="fused", device="interpreter").steps

    def call(self, n):
        """Plan every kernel for length n: what follows from shapes alone."""
        for s in self.steps:
            syms = dict.fromkeys(s.triton.block.syms, n)
            sizes = s.triton.sizes(syms)
            shapes = [launch.shape_function(i.shape)(syms) for i in s.triton.block.inputs]
            shapes += [tuple(sizes[d] for d in r.dims) for r in s.triton.block.results]
            kinds = [x.dtype.torch_dtype for x in (*s.triton.block.inputs, *s.triton.block.results)]
            xs = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
            v, grid, numbers = s.triton._bound(xs, syms)
            assert grid > 0
            self.compiled.add((s.name, v.rendered.source, tuple(k % DIVISOR == 0 for k in numbers)))


@pytest.fixture
def counted(monkeypatch):
    def qkv(n):
        return tuple(torch.zeros(1, 2, n, 64, dtype=torch.float16) for _ in range(3))

    return Counted(o.causal, qkv, monkeypatch)


def test_one_rendering_a_bin(counted):
    seen = {}
    for n in LENGTHS:
        before = len(counted.rendered)
        counted.call(n)
        seen.setdefault(bin_of(n), []).append(len(counted.rendered) - before)
    assert all(not any(rest) for _, *rest in seen.values()), seen
    assert len(counted.rendered) <= len(counted.steps) * len(seen)
    long = [sum(made) for at, made in seen.items() if at >= 256]
    assert not any(long), "tiles do not grow with long sequences: nothing is rendered for them"


def test_compilations_differ_by_divisibility_alone(counted):
    for n in LENGTHS:
        counted.call(n)
    by_source = {}
    for name, source, divisible in counted.compiled:
        by_source.setdefault((name, source), set()).add(divisible)
    powers = 5  # of two in a length, up to 16: strides are multiples of it
    assert all(len(kinds) <= powers for kinds in by_source.values()), by_source.values()
    longer = len(counted.compiled)
    for n in (2064, 2065, 2080, 3333, 4000):
        counted.call(n)
    assert len(counted.compiled) == longer


def test_fixed_extents_are_not_rounded():
    x = torch.zeros(3, 100)
    step = compile_program(trace(o.softmax, x).program, goal="fused", device="interpreter").steps[0]
    seen = []
    # A kernel of its own: equal programs of a process share theirs, whose configuration may be chosen already.
    kernel = launch.TritonKernel(step.triton.block, lambda block, sizes: seen.append(dict(sizes)), interpreted=True)
    kernel.variant((1, 1), kernel.sizes({}))
    assert 100 in seen[0].values() and 128 not in seen[0].values()


def rendered(program, sizes):
    """The kernels' sources. sizes: of all of the program's symbols, by argument and axis."""
    steps = compile_program(program, goal="fused", device="interpreter").steps
    out = []
    for s in steps:
        block = s.triton.block
        units = tuple(len(i.shape) - 1 for i in block.inputs) + tuple(len(r.dims) - 1 for r in block.results)
        out.append(s.triton.variant(units, s.triton.sizes({new: sizes[old] for new, old in s._syms})).rendered)
    return out


def shortened(source):
    """With constants in single precision: d ** -0.5 is not rounded by Python as by torch."""
    return re.sub(r"\d+\.\d{8,}", lambda m: f"{float(m[0]):.8g}", source)


def symbols(program, args):
    """Values of a program's symbols; its inputs are named as the arguments of attention."""
    named = dict(zip("qkv", args, strict=True))
    axes = [(n, size) for i in program.inputs for n, size in zip(i.shape, named[i.name].shape, strict=True)]
    return {n.name: size for n, size in axes if isinstance(n, Sym)}


def test_a_second_model_has_the_kernels_of_numbers():
    """The head counts and sizes that Dynamo saw change are numbers again, the length alone is symbolic."""
    torch._dynamo.reset()
    small, large = heads(2, 16, 1, 2048, 64, 4), heads(1, 64, 1, 16384, 128, 8)
    trace(o.gqa, *small, dynamic="auto")
    p = trace(o.gqa, *large, dynamic="auto").program
    syms = symbols(p, large)
    assert list(syms.values()) == [16384]
    torch._dynamo.reset()
    for x in large[1:]:
        torch._dynamo.mark_dynamic(x, 2)
    numbers = trace(o.gqa, *large, dynamic="auto").program
    got, want = (rendered(q, symbols(q, large)) for q in (p, numbers))
    assert [shortened(r.source) for r in got] == [shortened(r.source) for r in want]


def test_a_kernel_that_is_too_large_for_triton_says_the_way_out():
    torch._dynamo.reset()
    args = heads(1, 64, 1, 16384, 128, 8)
    for x in args:
        for axis in (1, 3) if x is args[0] else (1, 2, 3):
            torch._dynamo.mark_dynamic(x, axis)
    p = trace(o.gqa, *args, dynamic="auto").program
    sizes = symbols(p, args)
    whole = canonical(max(fuse_for_gpu(p).kernels, key=lambda k: len(k.plan.group.members)).block)
    kernel = TritonKernel(whole.block)
    extents = kernel.sizes({new: sizes[old] for new, old in whole.syms.items()})
    with pytest.raises(BackendError, match=r"2097152 elements(.|\n)*hint: .*dynamic=False.*\n?.*mark_static"):
        kernel.variant(usual_units(whole.block), extents)
    # asked before it is taken, it is not: the group is cut, and its kernels can be rendered
    assert len(rendered(p, sizes)) > 1
