"""An attention that no library has, written in plain PyTorch and fused into one kernel.

Soft-capped scores (as in Gemma 2) with ALiBi's distance penalty and a causal mask. `tilefold.fuse`
raises an error where it cannot fuse, `tilefold.verify` compares with float64, next to eager.
"""

import torch

import tilefold

CAP = 30.0


@tilefold.fuse
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """q, k, v: [B, H, S, D]; slopes: [H]; returns [B, H, S, D]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = CAP * torch.tanh(scores / CAP)
    i = torch.arange(q.shape[2]).unsqueeze(-1)
    j = torch.arange(k.shape[2])
    scores = scores - slopes.view(-1, 1, 1) * (i - j)
    scores = scores.masked_fill(j > i, float("-inf"))
    return torch.softmax(scores, -1) @ v


def attention_inputs(length: int = 200) -> tuple[torch.Tensor, ...]:
    """What `tilefold explain examples/02_attention_variant.py:attention` calls it with."""
    q, k, v = torch.randn(3, 1, 4, length, 64)
    return q, k, v, 0.5 ** torch.arange(1, 5)


if __name__ == "__main__":
    torch.manual_seed(0)
    for length in (1, 64, 200, 333):  # one compiled kernel serves every length
        print(length, tuple(attention(*attention_inputs(length)).shape))
    report = tilefold.verify(attention, *attention_inputs())
    print(report)
    assert report.ok
