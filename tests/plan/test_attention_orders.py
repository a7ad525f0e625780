"""Results of the library's attention lie as q does; what is wanted otherwise is made so, or copied by a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as f

from tilefold.frontend.fuse import trace
from tilefold.plan.attention import attention_call, library_attentions
from tilefold.plan.attention_orders import copied_bytes, in_order
from tilefold.plan.hardware import H200
from tilefold.tensor.analysis import Graph
from tilefold.tensor.interp import run
from tilefold.tensor.ir import Program

HEADS = (8, 16, 256, 72)


def joined(q, k, v):
    return f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def turned(q, k, v):
    return joined(q * k.sum() + 1, k, v)


def projected(q, k, v, w):
    return joined(q * 2 + 1, k, v) @ w


def program(fn: Callable[..., torch.Tensor], shapes: Sequence[Sequence[int]], kind: torch.dtype) -> Program:
    torch._dynamo.reset()
    p = trace(fn, *(torch.empty(tuple(s), dtype=kind, device="meta") for s in shapes)).program
    return replace(p, inputs=tuple(replace(i, row_major=True) for i in p.inputs))


def calls(p: Program) -> list:
    g = Graph.of(p)
    return [x for c in p.body if (x := attention_call(g, c)) is not None]


@pytest.mark.parametrize(
    ("fn", "kind", "more", "copied"),
    [
        (joined, torch.bfloat16, 1, True),  # q is given with heads first
        (turned, torch.bfloat16, 0, False),  # q is made with heads behind rows
        (joined, torch.float32, 0, False),  # such results have heads behind rows whatever q is
        (f.scaled_dot_product_attention, torch.bfloat16, 0, False),
        (f.scaled_dot_product_attention, torch.float32, 1, True),
    ],
)
def test_a_result_is_made_as_the_library_writes_it(fn, kind, more, copied):
    p = program(fn, [(2, 3, 10, 8)] * 3, kind)
    (x,) = calls(p)
    assert (copied_bytes(p, x) > 0) is copied
    q, (y,), unknown = in_order(p, [x], ())
    assert len(q.body) == len(p.body) + more and not unknown
    made = next(c for c in q.body if c.name == y.out)
    lies = [made.dims.index(d) for d in (*y.batch, y.rows, y.columns)]
    if kind is torch.float32:
        assert lies == [0, 2, 1, 3]
    else:
        assert made.dims[:-1] == tuple(ix.dim for ix in y.q.index)[:-1]
    gen = torch.Generator().manual_seed(0)
    args = {i.name: torch.randn([int(e.value) for e in i.shape], generator=gen).to(kind) for i in p.inputs}  # type: ignore[attr-defined]
    found, want = (run(each, args)[p.outputs[0]] for each in (q, p))
    torch.testing.assert_close(found, want)


def test_a_product_of_the_library_reads_it_as_it_lies():
    p = program(projected, [(2, 3, 10, 8)] * 3 + [(24, 16)], torch.bfloat16)
    product = p.body[-1].name
    q, (y,), _ = in_order(p, calls(p), {product})
    made = next(c for c in q.body if c.name == y.out)
    assert made.dims == (y.batch[0], y.rows, y.batch[1], y.columns)
    stays, (z,), _ = in_order(p, calls(p), ())
    assert stays.body[0].dims == p.body[0].dims and z.dims != y.dims


def test_what_nobody_knows_stays():
    p = program(joined, [(2, 3, 10, 8)] * 3, torch.bfloat16)
    p = replace(p, inputs=tuple(replace(i, row_major=False) for i in p.inputs))
    q, found, unknown = in_order(p, calls(p), ())
    assert q is p and [x.out for x in found] == [*unknown] == [p.outputs[0]]


def test_a_copy_is_in_the_price():
    p = program(joined, [HEADS] * 3, torch.bfloat16)
    assert library_attentions(p, H200) and not library_attentions(p, H200, copied_bytes)
