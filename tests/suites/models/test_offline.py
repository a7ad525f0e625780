"""Models as a GPU would run them, planned without one: a region each way, and nothing left that has a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")


def planned(tmp_path, *words: str) -> dict:
    """What `bench/offline.py` found, in a process of its own: torch must be imported after its device."""
    out = tmp_path / "plan.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TILEFOLD_CACHE_DIR": str(tmp_path), "TILEFOLD_STRICT": "1"}
    command = [sys.executable, "bench/offline.py", *words, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_training_of_a_language_model(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = planned(tmp_path, "gpt2", "--mode", "train", "--small", "--assemble", "add")
    forward, backward = found["graphs"]
    assert (forward["regions"], forward["left"]) == (1, [])
    assert all("embedding_dense_backward" in why for why in backward["left"])  # a library's step between regions
    assert {s["kind"] for s in found["steps"]} == {"GpuStep", "LibraryStep"}
    assert found["kernels"] and not found["refused"]
    assert not [k for k in found["kernels"] if k["why"] or k["spilled"]]


CNN = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)
    return nn.Sequential(*layers).to(torch.bfloat16), (torch.randn(2, 3, 16, 16, dtype=torch.bfloat16),)
"""


def test_a_convolution_and_its_norm(tmp_path):
    (tmp_path / "model.py").write_text(CNN)
    found = planned(tmp_path, f"{tmp_path / 'model.py'}:make")
    (graph,) = found["graphs"]
    assert (graph["regions"], graph["left"]) == (1, [])
    # one of single taps, of images with channels last as cuDNN leaves them, is a product
    assert [s["kind"] for s in found["steps"] if s["kind"] != "GpuStep"] == ["ConvolutionStep", "LibraryStep"]
    assert not found["refused"]


PATCHES = """
import torch
from torch import nn

class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.token = nn.Conv2d(3, 256, 16, stride=16), nn.Parameter(torch.zeros(1, 1, 256))

    def forward(self, x):
        y = self.embed(x).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(y), -1, -1), y), 1).float().square().sum()

def make():
    torch.manual_seed(0)
    return Patches().to(torch.bfloat16), (torch.randn(8, 3, 224, 224, dtype=torch.bfloat16),)
"""


def test_training_of_an_embedding_of_patches(tmp_path):
    """The weight's gradient is a product of the library, of patches in order: a kernel would hold a whole image."""
    (tmp_path / "model.py").write_text(PATCHES)
    found = planned(tmp_path, f"{tmp_path / 'model.py'}:make", "--mode", "train")
    assert not found["refused"] and not any(g["left"] for g in found["graphs"])
    assert [s["kind"] for s in found["steps"] if s["written"] == 256 * 3 * 16 * 16 * 2] == ["LibraryStep"]


ATTENTION = """
import math
import torch
from torch import nn
from torch.nn import functional as f

class Attention(nn.Module):
    '''Heads with a score of their own, written out, and one of the library.'''

    def __init__(self, score, heads=8, width=512):
        super().__init__()
        self.score, self.heads = score, heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.score is None:
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = self.score((q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1]))
            later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            y = s.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))

def alibi(s):
    n = torch.arange(s.shape[-1], device=s.device)
    slopes = 2.0 ** -torch.arange(1, s.shape[1] + 1, device=s.device)
    return s + slopes[:, None, None] * (n - n[:, None])

class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).float().square().sum()

def make():
    torch.manual_seed(0)
    scores = None, lambda s: s, alibi, lambda s: 30 * torch.tanh(s / 30)
    return Net(*map(Attention, scores)).to(torch.bfloat16), (torch.randn(2, 1024, 512, dtype=torch.bfloat16),)
"""


def test_training_of_attention_stores_no_scores(tmp_path):
    """Of any score: 2 x 8 x 1,024 x 1,024 of them would be 32 MB in 16 bits; everything else is below 7."""
    (tmp_path / "model.py").write_text(ATTENTION)
    found = planned(tmp_path, f"{tmp_path / 'model.py'}:make", "--mode", "train")
    assert [g["left"] for g in found["graphs"]] == [[], []] and not found["refused"]
    assert max(s["written"] for s in found["steps"]) < 8e6
