"""`fuse` on methods and modules, under transformations of functions, copied, and with sizes that keep changing."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import inspect
import io
import multiprocessing
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.frontend.check import randn
from tilefold.errors import TilefoldError
from tilefold.explanation.report import explain
from tilefold.frontend.fuse import Fused, fuse
from tilefold.frontend.verify import verify
from tilefold.tensor.formula import derive

close = torch.testing.assert_close


class Scaled:
    def __init__(self, factor: float):
        self.factor = factor

    @fuse(runner="interpreter")
    def soft(self, x: torch.Tensor) -> torch.Tensor:
        """softmax(factor x)"""
        return torch.softmax(x * self.factor, -1)

    @fuse(runner="interpreter")
    @staticmethod
    def above(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    @staticmethod
    @fuse(runner="interpreter")
    def below(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    @fuse(runner="interpreter")
    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * len(cls.__name__), -1)


def test_methods_are_bound_to_their_object():
    one, two, x = Scaled(1.0), Scaled(2.0), randn(3, 5)
    for _ in range(2):
        close(one.soft(x), torch.softmax(x, -1))
        close(two.soft(x), torch.softmax(2 * x, -1))
    assert isinstance(Scaled.soft, Fused) and Scaled.soft.__doc__ == "softmax(factor x)"
    close(Scaled.soft(one, x), torch.softmax(x, -1))
    assert explain(one.soft, x).kernels and verify(two.soft, x).ok
    assert list(inspect.signature(Scaled.soft).parameters) == ["self", "x"]


def test_functions_of_classes_in_either_order_of_decorators():
    x = randn(3, 5)
    for owner in (Scaled, Scaled(2.0)):
        assert isinstance(owner.above, Fused) and isinstance(owner.below, Fused)
        close(owner.above(x), torch.softmax(x, -1))
        close(owner.below(x), torch.softmax(x, -1))
        close(owner.of_class(x), torch.softmax(x * 6, -1))
    assert Scaled.above.graphs


class Soft(nn.Module):
    """Its forward is fused where it is defined."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(5))

    @fuse(runner="interpreter")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * self.weight, -1)


@pytest.mark.parametrize(
    "options", [{"backend": "eager"}, {"backend": "tilefold", "options": {"runner": "interpreter"}}]
)
def test_modules_with_a_fused_forward_are_compiled(options):
    """Dynamo asks in which file a module's forward is: an AssertionError, where that was no function."""
    m, x = Soft(), randn(3, 5)
    f = torch.compile(m, fullgraph=True, **options)
    f(x)[:, 0].sum().backward()
    want = torch.func.grad(lambda w: torch.softmax(x * w, -1)[:, 0].sum())(m.weight.detach())
    close(m.weight.grad, want)
    assert m.forward == m.forward and m.forward.__self__ is m
    assert explain(m.forward, x).kernels and verify(m, x).ok


def test_a_fused_module_is_a_module_of_its_class():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    f = fuse(plain, runner="interpreter")
    assert isinstance(f, nn.Sequential) and type(f).__name__ == "Sequential" and len(f) == 2
    assert list(f.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(f.parameters(), plain.parameters(), strict=True))
    x = randn(3, 4)
    close(f(x), plain(x))
    assert len(f.graphs) == 1
    assert explain(f, x).kernels and verify(f, x).ok
    with torch.no_grad():
        plain[0].weight.mul_(2)
    close(f(x), plain(x))
    f.to(torch.float64)
    close(f(x.double()), plain(x.double()))


def test_train_and_eval_reach_the_compiled_module():
    class Noisy(nn.Module):
        def forward(self, x):
            return x.exp() * (2.0 if self.training else 1.0)

    f = fuse(Noisy(), runner="interpreter")
    x = randn(3)
    close(f(x), 2 * x.exp())
    close(f.eval()(x), x.exp())
    close(f.train()(x), 2 * x.exp())


def test_a_fused_module_inside_another_trains():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    holder = nn.Sequential(nn.Linear(4, 4), fuse(plain, runner="interpreter"))
    assert len(list(holder.parameters())) == 6
    optimiser = torch.optim.SGD(holder.parameters(), 0.1)
    x, before = randn(5, 4), copy.deepcopy(holder.state_dict())
    want = torch.func.grad(lambda p: torch.func.functional_call(nn.Sequential(holder[0], plain), p, x).square().sum())
    expected = want(dict(nn.Sequential(holder[0], plain).named_parameters()))
    holder(x).square().sum().backward()
    for name, p in holder.named_parameters():
        close(p.grad, expected[name], atol=1e-4, rtol=1e-4)
    optimiser.step()
    assert any(not torch.equal(before[k], v) for k, v in holder.state_dict().items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_module_has_its_own_parameters(duplicate):
    f = fuse(nn.LayerNorm(8), runner="interpreter")
    x = randn(3, 8)
    close(f(x), nn.functional.layer_norm(x, (8,)))
    g = duplicate(f)
    assert isinstance(g, nn.LayerNorm) and list(g.state_dict()) == list(f.state_dict())
    with torch.no_grad():
        g.weight.fill_(3.0)
    close(g(x), 3 * f(x))
    close(f(x), nn.functional.layer_norm(x, (8,)))
    assert len(g.graphs) == len(f.graphs)


def test_a_copied_function_is_a_function():
    f = fuse(lambda x: torch.softmax(x, -1), runner="interpreter")
    g, x = copy.deepcopy(f), randn(3, 4)
    close(g(x), f(x))
    assert len(g.graphs) == len(f.graphs) == 1


@fuse(runner="interpreter", dynamic=False)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def spread(x: torch.Tensor) -> torch.Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


class Holder(nn.Module):
    """A module that contains fused functions: a global one, one of a function, of a builtin, of a module's method."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.soft, self.again = decorated, fuse(decorated, runner="interpreter")
        self.spread, self.gelu = fuse(spread, runner="interpreter"), fuse(nn.functional.gelu, runner="interpreter")
        self.normed = fuse(self.norm.forward, runner="interpreter")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.soft(x) + self.again(x) + self.spread(x) + self.gelu(x) + self.normed(x)


def saved(m: Holder) -> Holder:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
def test_modules_that_contain_fused_functions_are_copied_and_saved(duplicate):
    m, x = Holder(), randn(3, 4)
    before = m(x)
    close(before, 3 * torch.softmax(x, -1) + nn.functional.gelu(x) + nn.functional.layer_norm(x, (4,)))
    other = duplicate(duplicate(m))
    assert other.soft is decorated and other.again.dynamic is None and other.spread.runner == "interpreter"
    assert [type(f) for f in (other.again, other.spread, other.gelu, other.normed)] == [Fused] * 4
    close(other(x), before)
    with torch.no_grad():
        other.norm.weight.fill_(3.0)
    shared = duplicate is copy.copy
    close(m(x), before) if not shared else close(m(x), other(x))
    close(other(x), before + 2 * nn.functional.layer_norm(x, (4,)))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_fused_functions_are_pickled_as_functions_are(protocol):
    for f in (decorated, Scaled.soft, fuse(spread, goal="fast"), fuse(decorated, dynamic=True)):
        g = pickle.loads(pickle.dumps(f, protocol))
        assert (g is f) == (f in (decorated, Scaled.soft)) and g.fn is f.fn
        assert (g.dynamic, g.runner, g.goal) == (f.dynamic, f.runner, f.goal)
    one = pickle.loads(pickle.dumps(Scaled(2.0).soft, protocol))
    close(one(randn(3, 4)), torch.softmax(2 * randn(3, 4), -1))


def test_what_no_name_leads_to_is_not_pickled():
    """As with functions: Python says which one, and picklers that save code itself go on from there."""
    for f in (fuse(lambda x: x.exp()), fuse(functools.partial(lambda x: x.exp()))):
        with pytest.raises((AttributeError, pickle.PicklingError), match=r"local|lambda"):
            pickle.dumps(f)


def test_spawned_processes_take_fused_functions():
    x = randn(3, 4)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for f in (decorated, fuse(spread, runner="interpreter"), Scaled(1.0).soft):
            close(torch.tensor(pool.submit(values, f, x.tolist()).result()), torch.softmax(x, -1))


def values(f, rows):
    return f(torch.tensor(rows)).tolist()


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_sizes_may_change_as_often_as_they_like(dynamic):
    f = fuse(lambda x, scale: torch.softmax(x * scale, -1), dynamic=dynamic, runner="interpreter")
    for n in range(2, 13):
        x = randn(3, n)
        close(f(x, float(n)), torch.softmax(x * n, -1))


def test_transformations_of_functions_see_the_function():
    def plain(x):
        return torch.softmax(x, -1).square()

    f, x, t = fuse(plain, runner="interpreter"), randn(4, 5), randn(4, 5, seed=1)
    close(torch.vmap(f)(x), torch.vmap(plain)(x))
    close(torch.func.grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: plain(x).sum())(x))
    for got, want in zip(torch.func.jvp(f, (x,), (t,)), torch.func.jvp(plain, (x,), (t,)), strict=True):
        close(got, want)
    close(torch.func.jacrev(f)(x[0]), torch.func.jacrev(plain)(x[0]))
    with torch.autograd.forward_ad.dual_level():
        made = torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, t)))
    assert made.tangent is not None
    close(made.tangent, torch.func.jvp(plain, (x,), (t,))[1])
    assert not f.graphs
    f(x)
    assert f.graphs


def test_checkpoints_recompute_it():
    f, x = fuse(lambda x: torch.softmax(x, -1).square(), runner="interpreter"), randn(3, 5).requires_grad_()
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
    want = torch.func.grad(lambda x: torch.softmax(x, -1).square().sum())(x.detach())
    close(x.grad, want)


def test_distributed_data_parallel_wraps_it(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain, x = nn.LayerNorm(6), randn(3, 6)
        ddp = nn.parallel.DistributedDataParallel(fuse(copy.deepcopy(plain), runner="interpreter"))
        ddp(x).square().sum().backward()
        plain(x).square().sum().backward()
        for a, b in zip(ddp.parameters(), plain.parameters(), strict=True):
            close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_fully_sharded_data_parallel_wraps_it(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain, x = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), randn(3, 4)
        f = fuse(copy.deepcopy(plain), runner="interpreter")
        fully_shard(f, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        f(x).square().sum().backward()
        plain(x).square().sum().backward()
        for a, b in zip(f.parameters(), plain.parameters(), strict=True):
            close(a.grad.full_tensor(), b.grad, atol=1e-4, rtol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_hooks_run_around_a_fused_module():
    f, seen, x = fuse(nn.LayerNorm(4), runner="interpreter"), [], randn(2, 4)
    f.register_forward_pre_hook(lambda m, args: seen.append("before"))
    f.register_forward_hook(lambda m, args, out: out * 2)
    close(f(x), 2 * nn.functional.layer_norm(x, (4,)))
    close(f(x), 2 * nn.functional.layer_norm(x, (4,)))
    assert seen == ["before", "before"]


def soft(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return torch.softmax(x * scale, -1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fuse(3), "fuse takes a function or a module, not int"),
        (lambda: fuse("x"), "fuse takes a function or a module, not str"),
        (lambda: fuse(nn.LayerNorm), "not the class LayerNorm"),
        (lambda: fuse(soft, runner="x"), "unknown runner 'x'"),
        (lambda: fuse(soft)(), r"do not fit soft\(x: .*missing a required argument: 'x'"),
        (lambda: fuse(soft)(randn(3), 2.0), "do not fit soft"),
        (lambda: fuse(nn.LayerNorm(3))(), "do not fit LayerNorm"),
        (lambda: fuse(lambda x, y: x @ y)(randn(3, 4), randn(3, 4)), "fails on these arguments: .*"),
        (lambda: explain(soft), "do not fit soft"),
        (lambda: explain(3), "explain takes a function or a module, not int"),
        (lambda: explain(nn.LayerNorm), "not the class LayerNorm"),
        (lambda: derive(3), "a formula is a text, not int"),
        (lambda: derive(), "either a formula or functions"),
        (lambda: derive(t=3), "t is no function"),
    ],
)
def test_what_is_wanted_is_said(call, message):
    with pytest.raises(TilefoldError, match=message):
        call()


def test_tracers_of_operators_see_the_function_itself():
    """Fake tensors have no memory that a kernel could read: the process ended there."""

    def plain(x):
        return torch.softmax(x, -1).square()

    f = fuse(plain, runner="interpreter")
    with FakeTensorMode():
        assert f(torch.empty(3, 5)).shape == (3, 5)
    assert not f.graphs
    traced = make_fx(f)(torch.ones(3, 5))
    close(traced(torch.arange(15.0).view(3, 5)), plain(torch.arange(15.0).view(3, 5)))


def test_modes_and_traces_see_the_operators():
    """Dynamo captures nothing under a mode, and said so at length."""
    f, x = fuse(lambda x: torch.softmax(x @ x.mT, -1), runner="interpreter"), randn(4, 5)
    with FlopCounterMode(display=False) as counted:
        f(x)
    assert counted.get_total_flops() == 2 * 4 * 4 * 5
    traced = torch.jit.trace(f, (x,), check_trace=False)
    close(traced(2 * x), torch.softmax(4 * (x @ x.mT), -1))
    assert not f.graphs and "aten::softmax" in str(traced.graph)


def test_functions_that_call_fused_ones_are_verified():
    """The float64 reference is a mode, too."""
    report = verify(lambda x: decorated(x) * Scaled(2.0).soft(x), randn(3, 5))
    assert report.ok
