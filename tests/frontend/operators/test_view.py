"""Views are index arithmetic: nothing is computed for them, and random chains of them are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.check import check, lowered, randn
from tilefold.algebra.expr import Call, Index, loads, walk
from tilefold.errors import UnsupportedError
from tilefold.frontend.operators.view import as_strided
from tilefold.tensor.text import show

VIEWS = {
    "reshape": lambda x: x.reshape(4, 15),
    "merge": lambda x: x.flatten(1),
    "split": lambda x: x.reshape(2, 2, 3, 5),
    "across": lambda x: x.reshape(6, 10),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "expand": lambda x: x[:, None].expand(4, 7, 3, 5),
    "slice": lambda x: x[1:3, :, ::2],
    "negative slice": lambda x: x[-3:, :-1],
    "long slice": lambda x: x[:, 1:100],
    "select": lambda x: x[:, -1],
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(0),
    "split parts": lambda x: torch.split(x, [1, 2], 1),
    "chunk": lambda x: torch.chunk(x, 2, 0),
    "unbind": lambda x: torch.unbind(x, 1),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "stack": lambda x: torch.stack([x, -x], 1),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll(2, 1),
    "roll flat": lambda x: x.roll(7),
    "diagonal": lambda x: torch.diagonal(x, 1, 0, 2),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2, 0, 1), value=3.0),
    "crop": lambda x: torch.nn.functional.pad(x, (-1, 1)),
    "tril": lambda x: torch.tril(x, 1),
    "triu": lambda x: torch.triu(x, -1),
    "clone": lambda x: x.permute(1, 0, 2).contiguous().view(3, 20),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:1] * 2, 0, 2, 3),
}


@pytest.mark.parametrize("view", VIEWS)
def test_view_alone_and_followed_by_arithmetic(view):
    fn = VIEWS[view]
    check(fn, randn(4, 3, 5), modes=(False,))

    def after(x):
        y = fn(x)
        return [v * 2 + 1 for v in y] if isinstance(y, tuple | list) else y * 2 + 1

    check(after, randn(4, 3, 5), modes=(True,))


def test_heads_come_out_as_plain_indices():
    def f(x, w):
        b, s, c = x.shape
        y = (x @ w).view(b, s, 4, c // 4).transpose(1, 2)
        return (y @ y.transpose(-1, -2)).softmax(-1)

    low = lowered(f, randn(2, 6, 8), randn(8, 8))
    for c in low.program.body:
        for ld in loads(c.body):
            assert all(isinstance(i, Index) for i in ld.index), (c.name, ld)
    check(f, randn(2, 6, 8), randn(8, 8))


def test_a_view_between_operators_adds_no_statement():
    plain = lowered(lambda x, y: torch.softmax(x @ y, -1), randn(4, 6), randn(6, 5))
    viewed = lowered(
        lambda x, y: torch.softmax(x.t().contiguous().t() @ y[None].squeeze(0), -1), randn(4, 6), randn(6, 5)
    )
    assert len(viewed.program.body) == len(plain.program.body)


def test_grouped_heads_read_their_shared_head():
    def f(q, k):
        return (q @ k.repeat_interleave(2, 1).transpose(-1, -2)).sum(-1)

    low = check(f, randn(2, 4, 3, 5), randn(2, 2, 6, 5), modes=(True, False))
    assert "// 2, " in show(low.program)


def test_neighbours_that_are_alike_are_one_piece():
    """The gradient of two rows of many is those and zeros."""

    def rows(x):
        return torch.stack([x[0], x[1], *[torch.zeros_like(x[0]) for _ in range(40)]])

    def halves(x):
        return torch.cat(x.split(2)) * 2

    check(rows, torch.arange(12.0).view(4, 3))
    check(halves, torch.arange(12.0).view(4, 3))
    (c,) = lowered(rows, torch.arange(12.0).view(4, 3)).program.body
    assert sum(isinstance(e, Call) and e.op == "where" for e in walk(c.body)) == 2
    (c,) = lowered(halves, torch.arange(12.0).view(4, 3)).program.body
    assert not any(isinstance(e, Call) and e.op == "where" for e in walk(c.body))


def test_bit_reinterpretation_is_refused():
    with pytest.raises(UnsupportedError, match=r"aten.view.dtype"):
        lowered(lambda x: x.view(torch.int32), randn(4))


@st.composite
def chains(draw):
    """A random chain of shape operations, as a function and its description."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flat", "split", "permute", "slice", "unsqueeze", "expand", "flip"]),
                st.integers(0, 10**6),
            ),
            min_size=1,
            max_size=6,
        )
    )
    return tuple(shape), tuple(steps)


def apply_step(x, kind, n):
    axis = n % x.ndim
    match kind:
        case "flat":
            last = axis + 1 + (n // 7) % (x.ndim - axis)
            return x.reshape(*x.shape[:axis], -1, *x.shape[last:])
        case "split":
            size = x.shape[axis]
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            d = divisors[n % len(divisors)]
            return x.reshape(*x.shape[:axis], size // d, d, *x.shape[axis + 1 :])
        case "permute":
            order = sorted(range(x.ndim), key=lambda a: (n * (a + 3)) % 7)
            return x.permute(order)
        case "slice":
            start = n % x.shape[axis]
            return x.narrow(axis, start, x.shape[axis] - start)
        case "unsqueeze":
            return x.unsqueeze(axis)
        case "expand":
            return x.unsqueeze(axis).expand(*x.shape[:axis], 2, *x.shape[axis:])
    return x.flip(axis)


@settings(max_examples=40, deadline=None)
@given(chains())
def test_random_chains_of_views(chain):
    shape, steps = chain

    def f(x):
        y = x + 1
        for kind, n in steps:
            if y.ndim < 7:
                y = apply_step(y, kind, n)
        return y * 2, y.sum(0)

    check(f, randn(*shape), modes=(False,))


def test_images_with_contiguous_channels_are_arguments_in_memory_order():
    def centred(x, y):
        return x - x.mean((0, 2, 3), keepdim=True) * y[:, :1]

    planes = randn(2, 3, 4, 5)
    images = planes.contiguous(memory_format=torch.channels_last)
    check(centred, images, planes)
    low = lowered(centred, images, planes)
    shapes = {
        b.name: (b.order, [int(e.value) for e in i.shape]) for b, i in zip(low.inputs, low.program.inputs, strict=True)
    }
    assert list(shapes.values()) == [((0, 2, 3, 1), [2, 4, 5, 3]), ((), [2, 3, 4, 5])]


def test_symbolic_bounds_count_from_the_end():
    """The last n elements, n a length (Mamba2 takes as many as it put in)."""
    x = randn(3, 7)
    check(lambda x: x[:, -x.shape[0] :] * 2, x)
    check(lambda x: x[:, -x.shape[1] :].exp(), x)
    check(lambda x: x[-x.shape[0]] + x[:, : -x.shape[0]].sum(), x)


def strided(x: torch.Tensor, strides: tuple[int, ...], *offset: int | None) -> torch.fx.Node:
    """A call of as_strided on x, as it is traced."""
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    return graph.call_function(torch.ops.aten.as_strided.default, (given, list(x.shape), list(strides), *offset))


ONE_PLACE = torch.randn(9)[3:].view(1, 6, 1, 1)  # an image of one place, 3 elements into its memory


@pytest.mark.parametrize("offset", [(), (None,), (3,)])
def test_strides_of_axes_of_one_may_be_any(offset: tuple[int | None, ...]) -> None:
    class Values:
        def value(self, node: torch.fx.Node) -> str:
            return node.name

    assert as_strided(Values(), strided(ONE_PLACE, (6, 1, 6, 6), *offset)) == "x"  # type: ignore[arg-type]


@pytest.mark.parametrize(("strides", "offset"), [((6, 1, 6, 6), 0), ((6, 2, 1, 1), None)])  # of 9 elements
def test_other_elements_are_no_view(strides: tuple[int, ...], offset: int | None) -> None:
    with pytest.raises(UnsupportedError, match="a view by strides"):
        as_strided(None, strided(ONE_PLACE, strides, offset))  # type: ignore[arg-type]


def test_places_in_the_memory_of_a_whole_tensor() -> None:
    """Overlapping chunks, as Longformer takes them; of lengths that are known and that are not."""

    def chunks(x, w):
        x = x * 2
        n, step = x.shape[1] // 4, x.stride(1)
        return x.as_strided((x.shape[0], n - 1, 8, x.shape[2]), (x.stride(0), 4 * step, step, 1)) @ w

    check(chunks, randn(2, 16, 6), randn(6, 3))
    check(lambda x: x.as_strided((2, 2), (1, 3), 4).exp(), randn(3, 4))
    x = randn(2, 20, 6)
    torch._dynamo.mark_dynamic(x, 1)
    check(chunks, x, randn(6, 3))
