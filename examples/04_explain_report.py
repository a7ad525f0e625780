"""Why a fusion is right and what it saves: on the terminal, and as a web page with the derivation and the code."""

import tempfile
from pathlib import Path

import torch

import tilefold


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v: [B, H, S, D]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v


def attention_inputs() -> tuple[torch.Tensor, ...]:
    """What `tilefold explain examples/04_explain_report.py:attention` calls it with."""
    return tuple(torch.randn(3, 2, 4, 256, 64))


if __name__ == "__main__":
    report = tilefold.explain(attention, *attention_inputs())
    print(report)
    page = Path(tempfile.gettempdir()) / "tilefold-attention.html"
    report.to_html(page)
    print(f"the same as a web page: {page}")
    assert any(k.kind == "fused" for k in report.kernels)
    assert report.traffic.after < report.traffic.before
    assert all(r.reason for r in report.rejections)
