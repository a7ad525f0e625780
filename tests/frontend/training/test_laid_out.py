"""Gradients in the memory order of what they are gradients of."""

from __future__ import annotations

import pytest
import torch

CASES = {
    "turned": (lambda x, y: x.t().contiguous() * y.t(), (6, 8), (6, 8)),
    "stacked": (lambda x, y: torch.stack([x, y], -1), (6, 8), (6, 8)),
    "beside": (lambda x, y: torch.cat([x, y], -1) * 2, (6, 8), (6, 3)),
    "images": (lambda x, y: x.permute(0, 3, 1, 2).contiguous() + y, (2, 4, 5, 3), (2, 3, 4, 5)),
    "one number": (lambda x, y: x.sum() + (y * 0).sum(), (6, 8), (5, 8)),
    "products": (lambda x, y: torch.einsum("bi,oi->ob", x, y), (6, 8), (5, 8)),
}


def gradients(fn, *args):
    """As a compiled backward returns them."""
    torch._dynamo.reset()
    loss = torch.compile(lambda *a: fn(*a).square().mean(), backend="tilefold")(*args)
    return torch.autograd.grad(loss, args)


@pytest.mark.parametrize("case", CASES)
def test_gradients_lie_as_arguments_do(case):
    fn, *shapes = CASES[case]
    torch.manual_seed(0)
    args = [torch.randn(*s).requires_grad_() for s in shapes]
    if case == "images":
        args[1] = args[1].detach().to(memory_format=torch.channels_last).requires_grad_()
    if case == "stacked":
        args[1] = args[1].detach().t().contiguous().t().requires_grad_()
    fn(*args).square().mean().backward()
    made = gradients(fn, *args)
    for x, g in zip(args, made, strict=True):
        torch.testing.assert_close(g, x.grad)
        assert g.stride() == x.stride()
