"""What a joint graph has twice becomes one, except where that would be another program."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.training.repeated import drop_repeated

aten = torch.ops.aten


def calls(fn, *args):
    """How often each operator is called, before and after; the results stay the same."""
    gm = make_fx(fn, tracing_mode="fake")(*args)

    def counted():
        found: dict[str, int] = {}
        for n in gm.graph.nodes:
            if n.op == "call_function":
                found[n.target.overloadpacket.__name__] = found.get(n.target.overloadpacket.__name__, 0) + 1
        return found

    before = counted()
    torch.manual_seed(0)
    want = gm(*(a.clone() for a in args))
    drop_repeated(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.manual_seed(0)
    got = gm(*(a.clone() for a in args))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    return before, counted()


def test_equal_calls_are_one_and_what_reads_them_too():
    x = torch.randn(4, 5)
    before, after = calls(lambda x: (x.exp().sum(-1) + x.exp().sum(-1).relu(),), x)
    assert before["exp"] == before["sum"] == 2 and after["exp"] == after["sum"] == 1


def test_other_arguments_are_other_calls():
    _, after = calls(lambda x: (x.sum(0) + x.sum(1) + x.sum(0, dtype=torch.float64),), torch.randn(4, 4))
    assert after["sum"] == 3
    _, after = calls(lambda x: (aten.add(x, 1) * aten.add(x, 1.0) * aten.add(x, True),), torch.arange(3))
    assert after["add"] == 3


def test_random_numbers_and_fresh_memory_stay_apart():
    before, after = calls(lambda x: (torch.rand_like(x) - torch.rand_like(x),), torch.randn(4))
    assert before == after and after["rand_like"] == 2
    before, after = calls(lambda x: (torch.empty_like(x).fill_(1) + torch.empty_like(x).fill_(2),), torch.randn(4))
    assert before == after


def test_two_results_never_share_memory():
    before, after = calls(lambda x: (x.exp(), x.exp()), torch.randn(4))
    assert before == after and after["exp"] == 2


def test_nothing_is_taken_from_before_a_change_in_place():
    def fn(x):
        a = x.sin()
        x.mul_(2)
        return a + x.sin(), x.cos() * x.cos()

    before, after = calls(fn, torch.randn(4))
    assert before["sin"] == after["sin"] == 2 and (before["cos"], after["cos"]) == (2, 1)


def test_training_does_not_import_inductor():
    code = (
        "import sys, torch, tilefold.frontend.torch_compile as t\n"
        "def step(x, w): return ((x @ w).relu() ** 2).sum()\n"
        "f = torch.compile(step, backend=t.backend, options={'leftover': 'eager'})\n"
        "x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)\n"
        "f(x, w).backward()\n"
        "assert w.grad is not None\n"
        "assert 'torch._inductor.lowering' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
