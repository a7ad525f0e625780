"""A second process takes up what the first compiled: same results and gradients, nothing traced; or compiles anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from tilefold.runtime.native.load import native
{before}
torch.manual_seed(0)
{model}
def run(fn):
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for p in m.parameters(): p.grad = None
    y = fn(x)
    loss = (y if isinstance(y, torch.Tensor) else y[0]).square().sum()
    loss.backward(retain_graph={retain})
    if {retain}:
        loss.backward()
    return [y if isinstance(y, torch.Tensor) else y[0], x.grad, *[p.grad for p in m.parameters()]]
state = {{k: v.clone() for k, v in m.state_dict().items()}}
def fresh(fn):
    m.load_state_dict(state)
    found = [t.detach().clone() for t in run(fn)]
    return found + [b.clone() for b in m.buffers()]
compiled = torch.compile(m, backend="tilefold"{options})
wanted = fresh(m)
errors = []
for _ in range({calls}):
    found = fresh(compiled)
    errors += [((a - b).double().abs().max() / (b.double().abs().max() + 1)).item() for a, b in zip(found, wanted)]
from tilefold.frontend.regions.assemble import compilations
found = counters["aot_autograd"]
print(json.dumps(dict(hit=found["autograd_cache_hit"], saved=found["autograd_cache_saved"], error=max(errors),
                      compiled=[c.name for c in compilations if c.earlier is None],
                      earlier=[c.name for c in compilations if c.earlier is not None],
                      bundled=torch._functorch.config.bundled_autograd_cache)))
"""

MLP = """
from torch.nn import GELU, LayerNorm, Linear, Sequential, SiLU
m = Sequential(Linear(16, 32), GELU(), LayerNorm(32), Linear(32, 8))
"""
#: Running statistics are written back, batches counted; a result is an argument.
NORM = """
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.w = torch.nn.BatchNorm1d(16), torch.nn.Parameter(torch.randn(16, 4))
    def forward(self, x):
        return self.norm(x) @ self.w, x
m = M()
"""
#: A product alone: its call has a tape without kernels, which processes share on CPUs too.
PRODUCT = "m = torch.nn.Linear(16, 300, bias=False)"


@pytest.fixture
def process(tmp_path):
    """Runs a program in a process with the caches of the others of a test."""

    def run(model=MLP, *, before="", options="", calls=1, retain=False, **env):
        text = PROGRAM.format(model=model, before=before, options=options, calls=calls, retain=retain)
        given = {**os.environ, "TILEFOLD_CACHE_DIR": str(tmp_path / "ours"), "TILEFOLD_REUSE_GRAPHS": "1"}
        given |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), "TILEFOLD_QUIET": "1"} | env
        done = subprocess.run([sys.executable, "-c", text], env=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["error"] < 5e-5
        assert not found["bundled"]
        return found

    return run


@pytest.mark.parametrize("model", [MLP, NORM], ids=["mlp", "norm"])
def test_a_second_process_does_not_trace(process, model):
    first, second = process(model), process(model)
    assert (first["hit"], first["saved"]) == (0, 1)
    assert (second["hit"], second["saved"]) == (1, 0)
    assert second["earlier"] == ["graph0_forward", "graph0_backward"]
    assert process(model, retain=True)["hit"] == 1


def test_another_model_option_or_setting_is_compiled_anew(process):
    process()
    assert process(MLP.replace("GELU()", "SiLU()"))["hit"] == 0
    assert process(options=', options={"partition": "min_cut"}')["hit"] == 0
    assert process(TILEFOLD_INDEX_CHECKS="0")["hit"] == 0
    assert process(before="torch.set_num_threads(1); torch.use_deterministic_algorithms(True)")["hit"] == 0
    assert process()["hit"] == 1


def test_a_backward_that_is_compiled_at_once(process):
    at_once = "torch._functorch.config.force_non_lazy_backward_lowering = True"
    assert process(before=at_once)["saved"] == 1
    assert process(before=at_once)["hit"] == 1


def test_what_is_not_kept(process):
    custom = """
@torch.library.custom_op("test_warm::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, g: g * 2)
class M(torch.nn.Linear):
    def forward(self, x):
        return double(super().forward(x))
m = M(16, 8)
"""
    free = "torch._dynamo.config.assume_static_by_default = False"
    for how in ({"model": custom}, {"TILEFOLD_REUSE_GRAPHS": "0"}, {"before": free}):
        assert not process(**how)["saved"]
        assert not process(**how)["hit"]


def test_a_folder_that_others_may_write_is_not_read(process, tmp_path):
    process()
    os.chmod(tmp_path / "torch" / "aotautograd", 0o777)
    assert process()["hit"] == 0
    os.chmod(tmp_path / "torch" / "aotautograd", 0o755)
    (folder,) = (tmp_path / "torch" / "aotautograd").iterdir()
    os.chmod(folder, 0o755)
    (entry,) = folder.iterdir()
    os.chmod(entry, 0o666)
    assert process()["hit"] == 0
    os.chmod(entry, 0o600)
    assert process()["hit"] == 1


def test_a_call_that_was_kept_is_run_and_nothing_is_compiled(process, tmp_path):
    """And a file that was changed is of no use: the graph is compiled."""
    wait = "native().wait()"
    process(PRODUCT, before=wait, calls=3)
    files = sorted((tmp_path / "ours" / "calls").iterdir())
    assert len(files) == 2
    found = process(PRODUCT, before=wait, calls=3)
    assert found["compiled"] == []
    for f in files:
        f.write_bytes(f.read_bytes()[:-40])
    found = process(PRODUCT, before=wait, calls=2)
    assert found["hit"] == 1
    assert found["compiled"] == ["graph0_forward", "graph0_backward"]
