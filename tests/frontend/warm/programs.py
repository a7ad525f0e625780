"""A program that compiles a model and says what was found of an earlier process, run with the caches of a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys, torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from tilefold.runtime.native.load import native
{before}
torch.manual_seed(0)
{model}
m.to("{device}")
def run(fn):
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1)).to("{device}").requires_grad_()
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
from tilefold.explanation.report import explain_graphs
from tilefold.frontend.regions.assemble import compilations
found = counters["aot_autograd"]
print(json.dumps(dict(hit=found["autograd_cache_hit"], saved=found["autograd_cache_saved"], error=max(errors),
                      compiled=[c.name for c in compilations if c.earlier is None],
                      earlier=[c.name for c in compilations if c.earlier is not None],
                      told="compiled by an earlier process" in explain_graphs(compilations, "step").text(),
                      bundled=torch._functorch.config.bundled_autograd_cache)))
"""

MLP = """
from torch.nn import GELU, LayerNorm, Linear, Sequential, SiLU
m = Sequential(Linear(16, 32), GELU(), LayerNorm(32), Linear(32, 8))
"""
#: Running statistics are written back, batches counted; a result is an argument. A bias of zeros would have a gradient
#: that is rounding and nothing else, of which each machine has another.
NORM = """
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.w = torch.nn.BatchNorm1d(16), torch.nn.Parameter(torch.randn(16, 4))
        torch.nn.init.normal_(self.norm.bias)
    def forward(self, x):
        return self.norm(x) @ self.w, x
m = M()
"""


def runs_in(folder, *, tolerance=5e-5):
    """Runs the program in a process with the caches of a folder."""

    def run(model=MLP, *, before="", options="", calls=1, retain=False, device="cpu", **env):
        text = PROGRAM.format(model=model, before=before, options=options, calls=calls, retain=retain, device=device)
        given = {**os.environ, "TILEFOLD_CACHE_DIR": str(folder / "ours"), "TILEFOLD_REUSE_GRAPHS": "1"}
        given |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"), "TILEFOLD_QUIET": "1"} | env
        done = subprocess.run([sys.executable, "-c", text], env=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["error"] < tolerance
        assert not found["bundled"]
        return found

    return run
