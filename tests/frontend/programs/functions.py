"""Functions that change their arguments, return views, or use dtypes, sizes and results that are easily forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.check import randn

#: A function and its arguments.
Case = tuple[Callable[..., object], Callable[[], tuple[object, ...]]]


def _x() -> tuple[object, ...]:
    return (randn(3, 4),)


def _xy() -> tuple[object, ...]:
    return randn(3, 4), randn(3, 4, seed=1)


def adds_in_place(x):
    x += 1
    x[0] = 0
    x[:, 1] *= 2
    return x.sum()


def writes_through_a_view(x):
    y = x.view(-1)[2:5]
    y.copy_(torch.arange(3.0))
    return x * 2


def fills_a_mask(x):
    x = x.clone()
    x[x > 0] = -1.0
    return x.masked_fill_(x < -1, 7.0)


def changes_an_argument_and_returns_it(x, y):
    x.mul_(2)
    return x, y + x


def returns_aliases(x):
    y = x * 2
    return x, x.t(), x[0], y, y.view(-1), y[1:]


def accumulates(x):
    total = torch.zeros(3)
    for column in x.unbind(1):
        total.add_(column.exp())
    return total


def scatters(x):
    return (
        torch.zeros(3, 4)
        .scatter_(1, torch.tensor([[0, 1], [1, 2], [3, 3]]), x[:, :2])
        .index_add_(0, torch.tensor([0, 0]), x[:2])
    )


def puts(x):
    x = x.clone()
    x[torch.tensor([0, 2])] = 5.0
    x.index_put_((torch.tensor([1]), torch.tensor([1])), torch.tensor(3.0), accumulate=True)
    return x


def python_numbers(x):
    return x.shape[0], 2.5, x * x.shape[1], None, "text", [x.numel()]


def reads_a_number(x):
    return x * x.sum().item()


def branches_on_data(x):
    return x.exp() if bool(x.sum() > 0) else x - 1


def nothing_saved(x):
    with torch.no_grad():
        y = x.exp()
    return y * x


def autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.softmax(x @ w, -1) + F.layer_norm(x @ w, (3,))


def complex_numbers(x):
    z = torch.complex(x, x * 2)
    return (z * z.conj()).real, torch.view_as_real(z.exp()), z.abs()


def fourier(x):
    return torch.fft.irfft(torch.fft.rfft(x) * 2, n=4) + 1


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda v: torch.softmax(v * 2, -1).exp(), x, use_reentrant=False)


class Counts(nn.Module):
    """Changes its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean, self.calls


class Square(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


FUNCTIONS: Mapping[str, Case] = {
    "in place": (adds_in_place, _x),
    "through a view": (writes_through_a_view, _x),
    "a mask": (fills_a_mask, _x),
    "a changed argument": (changes_an_argument_and_returns_it, _xy),
    "aliases": (returns_aliases, _x),
    "accumulation": (accumulates, _x),
    "scatter": (scatters, _x),
    "index put": (puts, _x),
    "python numbers": (python_numbers, _x),
    "item": (reads_a_number, _x),
    "a branch on data": (branches_on_data, _x),
    "no grad": (nothing_saved, _x),
    "autocast": (autocast, lambda: (randn(3, 4), randn(4, 3))),
    "complex numbers": (complex_numbers, _x),
    "fourier": (fourier, _x),
    "checkpoint": (checkpointed, _x),
    "buffers": (lambda x, m: m(x), lambda: (randn(3, 4), Counts())),
    "own gradient": (lambda x: Square.apply(x).sum(), _x),
    "min with a number": (lambda x: torch.min(x, torch.tensor(0.5)), _x),
    "where with numbers": (lambda x: torch.where(x > 0, 1.0, x), _x),
    "clamp by tensors": (lambda x: x.clamp(torch.tensor(-0.5), torch.tensor(0.5)), _x),
    "integer division": (lambda x: (x // 2, x % 3, x.fmod(3), -x // 4), lambda: (torch.arange(-5, 5),)),
    "true division of integers": (
        lambda x: (x / 4, torch.div(x, 3, rounding_mode="trunc")),
        lambda: (torch.arange(-5, 5),),
    ),
    "float modulo": (lambda x: (x % 0.3, torch.remainder(x, -0.7), x // 0.5), _x),
    "bits": (lambda x: (x & 3, x | 4, x ^ 1, ~x, x << 1, x >> 1), lambda: (torch.arange(-5, 5),)),
    "bytes": (lambda x: (x + 250, x * 2, x.float().mean()), lambda: (torch.arange(10, dtype=torch.uint8),)),
    "small integers": (lambda x: (x + 1, x.sum(), x.cumsum(0)), lambda: (torch.arange(5, dtype=torch.int16),)),
    "bool results": (lambda x: (x > 0, (x > 0) & (x < 1), (x > 0).any(), (x > 9).all(), x.isnan()), _x),
    "bool sums": (lambda x: ((x > 0).sum(), (x > 0).float().mean(), (x > 0).sum(0)), _x),
    "a number": (lambda x: x * 2 + 1, lambda: (torch.tensor(3.0),)),
    "a number of integers": (lambda x: x * 2.5, lambda: (torch.tensor(3),)),
    "numbers and tensors": (lambda x, n: (x * n, n + 1), lambda: (randn(3), 2.5)),
    "nothing in a tensor": (lambda x: (x.sum(), x.exp(), x.sum(1), x.t() @ x), lambda: (torch.zeros(0, 4),)),
    "rows of nothing": (lambda x: (x.sum(-1), torch.softmax(x, -1)), lambda: (torch.zeros(3, 0),)),
    "one element": (lambda x: (x.softmax(-1), x.std(correction=0), x.var(0, correction=0)), lambda: (randn(1, 1),)),
    "double": (lambda x: torch.softmax(x @ x.t(), -1), lambda: (randn(3, 4).double(),)),
    "half": (lambda x: torch.softmax(x * 2, -1).sum(), lambda: (randn(3, 4).half(),)),
    "promotion": (lambda x, n: (x + n, x * True, n / 2, x + n.double()), lambda: (randn(3), torch.arange(3))),
    "views of views": (lambda x: x.t().reshape(2, 6)[:, ::2].unsqueeze(1).expand(2, 5, 3).contiguous(), _x),
    "flips and rolls": (lambda x: (x.flip(0), x.roll(1, 1), x.rot90(), torch.tile(x, (2, 1))), _x),
    "splits and stacks": (lambda x: (torch.cat(x.chunk(3, 1), 0), torch.stack(x.unbind(0), 1), *x.split(2, 1)), _x),
    "diagonals": (
        lambda x: (x.diag(), x.tril(-1), x.triu(1), torch.diag_embed(x[0]), x.trace()),
        lambda: (randn(4, 4),),
    ),
    "strided arguments": (lambda x: (x.t() * 2).sum(0), lambda: (randn(6, 8)[::2, 1::2],)),
    "expanded arguments": (lambda x: x * 2 + x.sum(0), lambda: (randn(3, 1).expand(3, 4),)),
    "the same argument twice": (lambda x, y: x * y + x.sum(), lambda: (randn(3, 4),) * 2),
    "sorting": (lambda x: (x.sort(-1), x.topk(2), x.argsort(0), x.median(), x.kthvalue(2, 1)), _x),
    "extremes": (lambda x: (x.max(), x.min(1), x.argmax(), x.argmin(0), x.amax((0, 1)), x.aminmax()), _x),
    "scans": (lambda x: (x.cumsum(0), x.cumprod(1), x.logcumsumexp(1), x.cummax(0)[0], x.diff()), _x),
    "moments": (lambda x: (x.var(), x.std(0), torch.var_mean(x, 1), x.norm(), x.norm(dim=1, p=1)), _x),
    "gather": (
        lambda x: (x.gather(1, torch.tensor([[0], [3], [1]])), x[torch.tensor([2, 0])], x.take(torch.tensor([5]))),
        _x,
    ),
    "a data-dependent size": (lambda x: (x[x > 0] * 2, torch.nonzero(x > 0)), _x),
    "unique and counts": (lambda x: (x.unique(), torch.bincount(x)), lambda: (torch.tensor([3, 1, 3, 0]),)),
    "linear algebra": (
        lambda x: (torch.linalg.inv(x), torch.linalg.det(x), torch.linalg.norm(x), x.matrix_exp()),
        lambda: (randn(3, 3) + 3 * torch.eye(3),),
    ),
    "einsum": (
        lambda x, y: (torch.einsum("ij,kj->ik", x, y), torch.einsum("ij,ij->", x, y), torch.outer(x[0], y[0])),
        _xy,
    ),
    "products of all ranks": (
        lambda a, b, v: (a @ b, a @ v, v @ v, torch.baddbmm(a, a, b)),
        lambda: (randn(2, 3, 3), randn(2, 3, 3), randn(3)),
    ),
    "distances": (lambda x, y: (torch.cdist(x, y), F.pdist(x)), _xy),
    "attention of torch": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3),
        lambda: (randn(1, 2, 5, 4), randn(1, 2, 5, 4)),
    ),
    "special functions": (
        lambda x: (torch.erf(x), torch.lgamma(x.abs() + 1), torch.special.i0(x), torch.digamma(x.abs() + 1), x.sinc()),
        _x,
    ),
    "rounding": (lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac(), x.round(decimals=1), x.sign()), _x),
    "angles": (
        lambda x, y: (torch.atan2(x, y), torch.hypot(x, y), x.sinh(), torch.logaddexp(x, y), torch.copysign(x, y)),
        _xy,
    ),
    "infinities": (
        lambda x: (x.softmax(-1), x.nan_to_num(), x.isinf(), x.nanmean(), x.log_softmax(-1), x.nansum(0)),
        lambda: (torch.tensor([[1.0, float("inf"), 0.0], [float("nan"), 1.0, -float("inf")], [0.0, -0.0, 1e38]]),),
    ),
    "interpolation": (lambda x: F.interpolate(x[None], scale_factor=1.5, mode="linear"), _x),
    "grid sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        lambda: (randn(1, 2, 4, 4), randn(1, 3, 3, 2)),
    ),
    "one-hot": (lambda i: F.one_hot(i, 5), lambda: (torch.tensor([0, 4, 2]),)),
    "ranges": (lambda x: (torch.arange(x.shape[0]), torch.linspace(0, 1, 5), torch.eye(3), torch.full((2, 2), 7)), _x),
    "meshgrid and searches": (
        lambda x: (
            *torch.meshgrid(x, x, indexing="ij"),
            torch.searchsorted(x, torch.tensor([0.1, 0.9])),
            torch.bucketize(x, x),
        ),
        lambda: (torch.tensor([0.0, 0.5, 1.0]),),
    ),
    "dictionaries": (
        lambda d: {"a": d["x"] * 2, "b": [d["x"], (d["y"].sum(),)]},
        lambda: ({"x": randn(3), "y": randn(2)},),
    ),
    "constants alone": (lambda x: (torch.zeros(3), torch.ones(2, 2) * 3), _x),
    "no tensors": (lambda n: n + 1, lambda: (3,)),
    "an unused argument": (lambda x, y: x * 2, _xy),
    "vmap": (lambda x: torch.vmap(lambda v: v.softmax(-1) * v.sum())(x), _x),
    "gradient inside": (lambda x: torch.func.grad(lambda v: (v**3).sum())(x), _x),
    "a closure's tensor": ((lambda w: lambda x: x @ w)(randn(4, 2)), _x),
    "a tensor subclass": (lambda p: p * 2, lambda: (nn.Parameter(randn(3)),)),
    "dropout in inference": (lambda x: F.dropout(x, 0.5, training=False), _x),
    "a long chain": (lambda x: [x := (x * 1.01).sin() for _ in range(60)][-1], _x),
    "gumbel of a seed": (lambda x: torch.rand_like(x) * 0 + x, _x),
}
