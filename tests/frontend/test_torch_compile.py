"""The Dynamo backend: whole models, training, fallbacks, dynamic lengths. Run by the interpreter here."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.check import randn
from tilefold.errors import BackendError
from tilefold.frontend import torch_compile
from tilefold.frontend.regions import assemble as regions
from tilefold.frontend.regions.assemble import Options, compilations

INTERPRETED = {"runner": "interpreter", "leftover": "eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    compilations.clear()
    yield
    torch._dynamo.reset()


def compiled(fn, dynamic=None, **options):
    return torch.compile(fn, backend="tilefold", dynamic=dynamic, options={**INTERPRETED, **options})


class Block(torch.nn.Module):
    """A small transformer block."""

    def __init__(self, c: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = torch.nn.LayerNorm(c), torch.nn.RMSNorm(c)
        self.qkv, self.out = torch.nn.Linear(c, 3 * c), torch.nn.Linear(c, c)
        self.up, self.down = torch.nn.Linear(c, 2 * c), torch.nn.Linear(2 * c, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, c = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, s, c))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(torch.nn.Module):
    """Embedding, block, head and loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = torch.nn.Embedding(11, 16), Block(), torch.nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.block(self.embed(ids))).flatten(0, 1), labels.flatten())


def test_the_entry_point_is_registered():
    assert "tilefold" in torch._dynamo.list_backends()


def test_a_training_step_equals_eagers():
    torch.manual_seed(0)
    model = Model()
    ids, labels = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))
    labels[0, 0] = -100
    want = model(ids, labels)
    want.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    got = compiled(model)(ids, labels)
    got.backward()
    torch.testing.assert_close(got, want)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[n], rtol=1e-4, atol=1e-6)
    forward, backward = compilations
    assert len(forward.regions) == 1 and not forward.fallbacks
    assert [f.node for f in backward.fallbacks] == ["aten.embedding_dense_backward.default"]


def test_fifty_lengths_do_not_recompile():
    torch.manual_seed(0)
    block = Block().eval()
    fast = compiled(block, dynamic=True)
    with torch.no_grad():
        fast(randn(2, 8, 16))
        with torch.compiler.set_stance("fail_on_recompile"):
            for n in range(2, 52):
                x = randn(2, n, 16)
                torch.testing.assert_close(fast(x), block(x), rtol=1e-4, atol=1e-5)
    assert len(compilations) == 1


def test_marked_dims_are_dynamic():
    fast = compiled(lambda x: torch.softmax(x, -1) * x.shape[0])
    x = randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    fast(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (3, 9, 17):
            y = randn(n, 8)
            torch.testing.assert_close(fast(y), torch.softmax(y, -1) * n)


@pytest.mark.parametrize("leftover", ["eager", "inductor"])
def test_uncovered_parts_run_elsewhere_and_are_logged(leftover, caplog):
    def f(x):
        y = torch.softmax(x @ x.t(), -1)
        z = torch.cumsum(y, 0).sort(-1)[0]
        return torch.tanh(z).sum(-1)

    x = randn(5, 5)
    with caplog.at_level(logging.INFO, logger="tilefold"):
        got = compiled(f, leftover=leftover)(x)
    torch.testing.assert_close(got, f(x))
    (record,) = compilations
    assert len(record.regions) == 2
    assert any("cumsum" in f.reason for f in record.fallbacks)
    assert "cumsum" in caplog.text and "test_torch_compile.py" in caplog.text


def test_a_leftover_of_the_backward_that_makes_a_tensor_of_its_own():
    """The gradient of an embedding begins with zeros, of positions that are no argument."""

    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = torch.nn.Embedding(50, 16), torch.nn.Embedding(64, 16)

        def forward(self, x):
            return torch.softmax(self.tokens(x) + self.places(torch.arange(x.shape[1])[None]), -1)

    torch.manual_seed(0)
    model, x = Positions(), torch.randint(0, 50, (4, 32))
    gradients = []
    for run in (model, compiled(model, leftover="inductor")):
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for got, want in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, want)
    assert not any("op by op" in f.reason for record in compilations for f in record.fallbacks)


def test_strides_of_a_leftover_are_not_those_of_the_forward():
    """AOTAutograd takes what Inductor reports for the strides of what is saved for the backward."""

    def f(x, y):
        z = torch.cumsum(x[None], 1).sort(-1)[0]  # a leftover of three axes; what is saved first has two
        return torch.softmax(x @ y, -1) * z.sum((0, 2))[:, None], torch.cumsum(y.exp(), 1)

    a, b = (tuple(v.requires_grad_() for v in (torch.arange(20.0).view(4, 5) / 9, torch.ones(5, 3))) for _ in "ab")
    for run, (x, y) in ((f, a), (compiled(f, leftover="inductor"), b)):
        one, two = run(x, y)
        (one.square().sum() + two.sum()).backward()
    for got, want in zip(b, a, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_a_compiler_of_leftovers_that_fails_leaves_them_to_eager(monkeypatch):
    def fails(*args, **how):
        raise AssertionError("no such thing")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    x = randn(5, 5)
    got = compiled(lambda x: torch.cumsum(x, 0).sort(-1)[0], leftover="inductor")(x)
    torch.testing.assert_close(got, torch.cumsum(x, 0).sort(-1)[0])
    assert any("Inductor failed: AssertionError: no such thing" in f.reason for f in compilations[-1].fallbacks)


def test_graph_breaks_and_python_side_effects_are_fine():
    seen = []

    def f(x):
        y = x * 2
        seen.append(1)
        print(end="")
        return y.softmax(-1)

    x = randn(3, 4)
    torch.testing.assert_close(compiled(f)(x), f(x))


def test_the_compiler_of_a_backward_is_not_compiled_itself(monkeypatch):
    """A gradient inside a compiled function is asked for while Dynamo is on."""

    def force(x, w):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((x @ w).square().sum(), x, create_graph=True)
        return -g

    traces, compile_graph = [], torch_compile.compile_graph

    def watched(graph, *args, **kwargs):
        traces.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
        made = compile_graph(graph, *args, **kwargs)

        def run(*given):
            traces.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
            return made(*given)

        return run

    monkeypatch.setattr(torch_compile, "compile_graph", watched)
    x, w = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    torch.testing.assert_close(compiled(force)(x, w), force(x, w))
    assert len(traces) > 4
    assert not any(map(callable, traces))


def test_aliases_mutations_and_repeated_results():
    def f(x):
        y = x + 1
        x.add_(2)
        return y, y.t(), x, y, x.view(-1)

    a, b = randn(3, 4), randn(3, 4)
    for g, w in zip(compiled(f)(a), f(b), strict=True):
        torch.testing.assert_close(g, w)
    torch.testing.assert_close(a, b)


def test_results_have_eagers_strides():
    def f(x):
        return x.transpose(0, 1) * 2, x.permute(2, 0, 1).exp(), (x + 1)[:, :, 1], x.sum(1, keepdim=True).expand(3, 4, 5)

    x = randn(3, 4, 5)
    for g, w in zip(compiled(f)(x), f(x), strict=True):
        torch.testing.assert_close(g, w)
        assert g.stride() == w.stride()


def test_batch_norm_in_training_updates_its_statistics():
    torch.manual_seed(0)
    a, b = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    x = randn(6, 4)
    torch.testing.assert_close(compiled(a)(x), b(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.running_var, b.running_var)


def test_a_number_that_a_region_reads_may_have_a_size():
    def f(x, y):
        n = x.shape[0]
        return y * (n / (n - 1))  # what an unbiased variance of x is divided by

    fast, y = compiled(f, dynamic=True), randn(3)
    for n in (4, 5):
        torch.testing.assert_close(fast(randn(n), y), f(randn(n), y))


def test_a_region_that_cannot_be_compiled_runs_op_by_op(lenient):
    def refuses(program, *, device):
        raise BackendError("no compiler today")

    def fails_late(program, *, device):
        def run(inputs, syms):
            raise BackendError("no compiler at all")

        return run

    x = randn(3, 4)
    for how, when in ((refuses, "today"), (fails_late, "at all")):
        torch._dynamo.reset()
        compilations.clear()
        options = Options(how, leftover="eager")

        def backend(gm, example_inputs, options=options):
            return torch_compile.compile_captured(gm, example_inputs, options)

        fast = torch.compile(lambda v: torch.softmax(v * 2, -1), backend=backend)
        for _ in range(2):
            torch.testing.assert_close(fast(x), torch.softmax(x * 2, -1))
        assert any(when in f.reason for f in compilations[-1].fallbacks)


def test_placeholders_get_readable_names():
    compiled(Block().eval(), dynamic=False)(randn(1, 3, 16))
    names = {i.name for r in compilations[-1].regions for i in r.lowered.program.inputs}
    assert "x" in names and "qkv_weight" in names


def test_records_keep_the_users_lines():
    compiled(lambda x: torch.softmax(x, -1))(randn(3, 4))
    (region,) = compilations[-1].regions
    assert all(c.loc is not None and c.loc.file.endswith("test_torch_compile.py") for c in region.lowered.program.body)
    assert regions.compilations is compilations


@pytest.mark.parametrize("runner", ["pipeline", "interpreter"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_a_result_share_its_memory_and_copies_do_not(dynamic, runner):
    def f(x):
        y = x * 2  # exact everywhere
        return y, y.t(), y.clone(), y.t().clone(), y.view(-1), y[:, None], y.mT.contiguous().view(-1)

    x = randn(6, 4)
    run = torch.compile(f, backend="tilefold", dynamic=dynamic, options={"runner": runner})
    results = run(x)
    for g, w in zip(results, f(x), strict=True):
        assert g.stride() == w.stride() and torch.equal(g, w)
    assert [y.data_ptr() == results[0].data_ptr() for y in results] == [True, True, False, False, True, True, False]
    assert results[2].data_ptr() != results[3].data_ptr()
