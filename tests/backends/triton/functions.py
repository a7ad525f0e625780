"""Functions that are compiled by more than one test module; no Triton is needed to import them."""

from __future__ import annotations

import torch


def top_of_products(x, w):
    """Routing of [batch, tokens, features]: two parallel dims are the rows of one operand."""
    return torch.topk(torch.softmax((x @ w).float(), -1), 2)


def top_of_groups(x, w, bias):
    """Routing among the experts of the better half of the groups, by the sum of the two largest scores of a group:
    [tokens, features], of four groups."""
    scores = torch.sigmoid(x @ w).float()
    ranked = (scores + bias).unflatten(-1, (4, -1))
    groups = ranked.topk(2, -1).values.sum(-1)
    best = torch.zeros_like(groups).scatter_(1, groups.topk(2, -1).indices[:, :1], 1.0)
    chosen = torch.where(best[..., None] > 0, ranked, 0.0).flatten(1).topk(2, -1).indices
    return chosen, scores.gather(1, chosen)


def of_logits(x, w):
    """The head of a language model: what is reduced from logits over a long vocabulary, which are never in memory."""
    logits = (x @ w.mT).float()
    return torch.logsumexp(logits, -1), torch.topk(logits, 2).values  # the values alone: bf16 logits tie


def of_bytes(to: torch.dtype):
    """Attention of 8-bit queries, keys and values, computed in `to`."""

    def attention(q, k, v):
        scores = (q.to(to) @ k.to(to).mT) * q.shape[-1] ** -0.5
        return torch.softmax(scores, -1) @ v.to(to)

    return attention


def normalised_product(x, w):
    return torch.nn.functional.layer_norm(x, x.shape[-1:]) @ w


def narrow_weights(x, w):
    """Logits whose weights alone are kept in 8 bits."""
    return torch.logsumexp((x @ w.to(x.dtype)).float(), -1)


def multiplied_bytes(x, w, scale):
    """Bytes that a program multiplies in float32."""
    return (x.float() @ w.float().mT) * scale


def neighbours(pos, vel):
    """Of each place, sums over those nearby: of their number, their velocities, and differences in two coordinates."""
    d = pos[:, None] - pos[None]
    r = d.pow(2).sum(-1)
    near = ((r < 1.0) & (r > 0)).to(pos.dtype)
    return (near @ vel + (near[..., None] * d / (r[..., None] + 0.05)).sum(1)) / near.sum(1, keepdim=True).clamp(min=1)


def quantile_loss(x, y, w):
    """Sums of what belongs to pairs of a row's elements: two of each element of the row, and one of each of another."""
    d = x[:, None, :] - y[:, :, None]
    big = d.abs() > 1.0
    e = torch.where(big, d.abs() - 0.5, d * d * 0.5) * (w[:, :, None] - (d < 0).float()).abs()
    return e.sum(-1), (e * e).sum(-1), e.sum(-2)


def warped(image, flow):
    """Of each channel, two elements a place of a flow's choosing, weighed by how near they are."""
    n, c, h, w = image.shape
    x = torch.arange(w, device=image.device) + flow
    made = 0
    for d in (0, 1):
        at = (x.floor() + d).clamp(0, w - 1).long() + torch.arange(h, device=image.device)[:, None] * w
        near = image.flatten(2).gather(2, at.view(n, 1, -1).expand(-1, c, -1)).view(n, c, h, w)
        made = made + near * (1 - (x - x.floor() - d).abs())[:, None]
    return made


def contrast(x):
    """Of each pixel, by the mean and the variance of 5 x 5 around it."""
    n, c, h, w = x.shape
    u = torch.nn.functional.unfold(x, 5, padding=2).view(n, c, 25, h, w)
    return (x - u.mean(2)) / (u.var(2) + 0.01).sqrt()


def spread(x):
    """Differences of the members of an ensemble, in pairs."""
    return (x[:, None] - x[:, :, None]).abs().sum((1, 2)) / x.shape[1]


def each_state(a, b):
    """The states of a recurrence, the last one first."""
    s, out = torch.zeros_like(a[0]), []
    for t in reversed(range(a.shape[0])):
        s = b[t] + 0.9 * a[t] * s
        out.append(s)
    return torch.stack(out)


def summed_states(x, a, c):
    """Sums of a recurrence's states, 16 a row."""
    h, out = torch.zeros_like(x[0, :, :, None] * a), []
    for t in range(x.shape[0]):
        h = torch.tanh(x[t, :, :, None] * a) * h + x[t, :, :, None]
        out.append((h * c[t, :, None]).sum(-1))
    return torch.stack(out)


def distances(a, b, c):
    """Of rows, two by two; the third is not read for the first."""
    a, b, c = a.float(), b.float(), c.float()
    return (a - b).norm(dim=-1), (a - c).square().sum(-1), (b - c).square().sum(-1)


def of_four_bits(q, code, scale):
    """Weights of four bits, two a byte, each a value of a table."""
    return torch.stack((code[(q >> 4).long()], code[(q & 15).long()]), -1).flatten(-2) * scale[:, None]
