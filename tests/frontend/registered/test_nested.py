"""A fused function in graphs of other compilers stays one operator, with a gradient; Tilefold's own fuse it too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.frontend.check import randn
from tests.frontend.fused_functions import moments, soft
from tilefold.errors import TilefoldError
from tilefold.frontend.fuse import fuse
from tilefold.frontend.packages.operators import keep_operators
from tilefold.frontend.registered import fused

close = torch.testing.assert_close


def graph_of(fn, *args):
    """The ATen graph that another compiler gets, and what the compiled function returns."""
    found = []

    def compiler(gm, inputs):
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return torch.compile(fn, backend=backend, fullgraph=True)(*args), found


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_it_is_one_operator_in_the_graph_of_another_compiler():
    x = randn(3, 5)
    y, graphs = graph_of(lambda x: soft(x + 1, scale=2.0) * 3, x)
    close(y, torch.softmax((x + 1) * 2, -1) * 3)
    names = [str(t) for t in targets(graphs[0])]
    assert "tilefold.fused.default" in names and not any("softmax" in n for n in names)


def test_it_has_a_gradient_there_and_dynamic_sizes():
    torch._dynamo.reset()
    f = torch.compile(lambda x: (soft(x.sin(), scale=2.0) * x).sum(), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 4, 9):
        x = randn(n, 5).requires_grad_()
        f(x).backward()
        want = torch.func.grad(lambda x: (torch.softmax(x.sin() * 2.0, -1) * x).sum())(x.detach())
        close(x.grad, want, atol=1e-5, rtol=1e-5)


def test_gradients_taken_inside_of_a_graph():
    """Those of `torch.func` take no operator with a gradient of its own; vmap does."""
    torch._dynamo.reset()
    x = randn(3, 5)

    def plain(x):
        return torch.softmax(x * 2.0, -1).square().sum()

    def call(x):
        return soft(x, scale=2.0).square().sum()

    made = torch.compile(lambda x: (torch.func.grad(call)(x), torch.vmap(call)(x)), backend="aot_eager", fullgraph=True)
    close(made(x), (torch.func.grad(plain)(x), torch.vmap(plain)(x)), atol=1e-5, rtol=1e-5)


def test_results_of_any_structure():
    x, shift = randn(3, 5), randn(5, seed=1).requires_grad_()
    made, _ = graph_of(lambda x, s: moments(x, shift=s), x, shift)
    y = x - shift
    close(made, {"mean": y.mean(-1), "best": y.argmax(-1), "square": y.square().sum(-1)})
    made["square"].sum().backward()
    close(shift.grad, -2 * (x - shift.detach()).sum(0), atol=1e-5, rtol=1e-5)


def test_the_operator_keeps_torchs_rules():
    call = '[[{"tensor": null}, 2.0], {}]'
    for x in (randn(3, 5), randn(3, 5).requires_grad_(), randn(5, 3).t()):
        torch.library.opcheck(fused.fused, (soft.name, call, [x]))
    close(
        torch.vmap(lambda x: fused.fused(soft.name, call, [x])[0])(randn(4, 3, 5)),
        torch.softmax(randn(4, 3, 5) * 2, -1),
    )


LOADERS = {
    "load_pt2": "import tilefold, torch; load = tilefold.load_pt2",
    "torch after tilefold": "import tilefold, torch; load = lambda path: torch.export.load(path).module()",
    "torch before tilefold": "import torch, tilefold; load = lambda path: torch.export.load(path).module()",
    "AOTInductor": "import tilefold, torch; from torch._inductor import aoti_load_package as load",
}
CASE = """
import sys
x, want = torch.load(sys.argv[2])
run = load(sys.argv[1])
torch.testing.assert_close(run(x), want)
assert run(torch.cat([x, x])).shape == (6, 5)
print("same")
"""


def elsewhere(code, *words):
    """What another process prints."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Soft(torch.nn.Module):
    def forward(self, x):
        return soft(x, scale=2.0) + 1


def exported(model, x):
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))


@pytest.mark.parametrize("loader", LOADERS)
def test_an_exported_program_keeps_it_for_another_process(loader, tmp_path):
    x, path = randn(3, 5), tmp_path / "model.pt2"
    program = exported(Soft(), x)
    assert "tilefold.fused.default" in [str(t) for t in targets(program.graph_module)]
    if loader == "AOTInductor":
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    else:
        torch.export.save(program, path)
    torch.save((x, Soft()(x)), tmp_path / "values.pt")
    with pytest.raises(TilefoldError, match=r"no operator that tilefold.custom_op has made(.|\n)*: tilefold.load_pt2"):
        keep_operators(path)
    assert elsewhere(LOADERS[loader] + CASE, path, tmp_path / "values.pt") == "same"


def test_tilefold_waits_for_torch_and_leaves_its_import_as_it_was():
    code = """
import sys
before = list(sys.meta_path)
import tilefold
import tilefold.errors
assert "torch" not in sys.modules and len(sys.meta_path) == len(before) + 1
import torch
assert sys.meta_path == before and "torch._dynamo" not in sys.modules
print(torch.ops.tilefold.fused.default, torch.ops.tilefold.fused_gradient.default)
"""
    assert elsewhere(code) == "tilefold.fused.default tilefold.fused_gradient.default"


def test_a_torch_that_does_not_load_is_the_users_error(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import tilefold
for _ in range(2):
    try:
        import torch
    except ImportError as err:
        print(err)
(tilefold.errors, tilefold.TilefoldError)
sys.path[0] = sys.argv[2]
sys.path_importer_cache.clear()
import torch
print(torch.ops.tilefold.fused.default)
"""
    said = elsewhere(code, tmp_path, tmp_path / "none")
    assert said == "libcudart is missing\nlibcudart is missing\ntilefold.fused.default"


@pytest.mark.parametrize("strict", [False, True])
def test_what_no_other_process_finds_is_exported_in_parts_and_said_once(strict, tmp_path, caplog):
    local, x = fuse(lambda x: torch.softmax(x * 2.0, -1), runner="interpreter"), randn(3, 5)

    class Model(torch.nn.Module):
        def forward(self, x):
            return local(x) + local(x * 2)

    program = torch.export.export(Model(), (x,), strict=strict)
    assert "aten.softmax.int" in [str(t) for t in targets(program.graph_module)]
    assert caplog.text.count("other processes could not import it\n  hint: define it at the top of a module") == 1
    torch.export.save(program, path := tmp_path / "model.pt2")
    torch.save((x, Model()(x)), tmp_path / "values.pt")
    code = "import sys, torch\nx, y = torch.load(sys.argv[2])\n"
    code += "torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(x), y)"
    assert elsewhere(code, path, tmp_path / "values.pt") == ""


def test_what_is_no_module_s_is_not_found_elsewhere():
    with pytest.raises(TilefoldError, match=r"not to be found: .* has no attribute 'absent'"):
        fused.find("tests.frontend.fused_functions:absent")
    with pytest.raises(TilefoldError, match="not to be found"):
        fused.find("no_such_module:f")
    with pytest.raises(TilefoldError, match="is not fused"):
        fused.find("tests.frontend.fused_functions:fuse")


def test_tilefolds_own_graphs_fuse_what_is_in_it():
    outer = fuse(lambda x: soft(x.exp()) * 2, runner="interpreter")
    x = randn(3, 5)
    close(outer(x), torch.softmax(x.exp(), -1) * 2)
    (graph,) = outer.graphs
    assert len(graph.regions) == 1 and not graph.fallbacks
    x.requires_grad_()
    outer(x).square().sum().backward()
    close(
        x.grad,
        torch.func.grad(lambda x: (torch.softmax(x.exp(), -1) * 2).square().sum())(x.detach()),
        atol=1e-4,
        rtol=1e-4,
    )


def test_modules_and_functions_with_tensors_of_their_own_are_taken_apart():
    torch.manual_seed(0)
    plain, x, w = torch.nn.LayerNorm(5), randn(3, 5), randn(5, 5, seed=1).requires_grad_()
    norm = fuse(plain, runner="interpreter")
    product = fuse(lambda x: torch.softmax(x @ w, -1), runner="interpreter")
    y, graphs = graph_of(lambda x: product(norm(x)), x)
    assert "tilefold.fused.default" not in [str(t) for t in targets(graphs[0])]
    y[:, 0].sum().backward()
    want = torch.autograd.grad(torch.softmax(plain(x) @ w, -1)[:, 0].sum(), [w, *plain.parameters()])
    for g, p in zip(want, [w, *plain.parameters()], strict=True):
        close(p.grad, g, atol=1e-5, rtol=1e-5)


def test_calls_with_other_things_than_tensors_and_numbers_are_taken_apart():
    class Holder:
        @fuse(runner="interpreter")
        def double(self, x):
            return x.exp() * 2

    x = randn(3)
    y, graphs = graph_of(lambda x: Holder().double(x), x)
    close(y, x.exp() * 2)
    assert "aten.exp.default" in [str(t) for t in targets(graphs[0])]
