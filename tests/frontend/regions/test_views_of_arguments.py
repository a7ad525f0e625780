"""Results that are views of arguments are views of them, at whatever sizes."""

from __future__ import annotations

import pytest
import torch

from tests.frontend.check import randn

CASES = {
    "a chunk of a part": lambda x: (torch.chunk(x[1:], 2, 0)[0], x[1:].sum(0)),
    "both chunks": lambda x: (*torch.chunk(x[1:], 2, 0), x.sum(0)),
    "a row": lambda x: (x[2:].unbind(0)[1], x[2:].sum(0)),
    "every third": lambda x: (x[1::3][:10], x[1::3].sum(0)),
}


@pytest.mark.parametrize("name", CASES)
def test_they_lie_where_eager_has_them(name):
    torch._dynamo.reset()
    run = torch.compile(CASES[name], backend="tilefold", dynamic=name != "a row")
    for n in (40, 25, 64):
        x = randn(n, 3)
        got, want = run(x), CASES[name](x)
        torch.testing.assert_close(got, want)
        for a, b in zip(got[:-1], want[:-1], strict=True):
            assert a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
