"""Which dims of a state may be which dims of a reduction that it could have summed already."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tilefold.algebra.expr import Index
from tilefold.algebra.known import _assignments
from tilefold.algebra.text import Names, parse

CONTEXT = SimpleNamespace(cascade=SimpleNamespace(axes=("l",)))


@pytest.mark.parametrize(
    ("element", "phi", "found"),
    [
        ("x[a, b, l]", "x[e, c, l] * x[e, c, l]", [("e", "c")]),
        ("x[a, b, l]", "y[e, c, l]", []),
        ("x[a, b, l]", "x[e, c, l] * x[c, e, l]", [("c", "e"), ("e", "c")]),
        ("x[a, l]", "x[d, l]", [("d", "c")]),  # constant along b: any other dim
        ("1.0", "x[c, d, l]", [("c", "d")]),
        ("w[a] * x[b, l]", "x[d, l]", [("c", "d"), ("e", "d")]),  # a factor that does not vary may be another
    ],
)
def test_dims_are_those_along_which_the_same_tensors_are_read(element, phi, found):
    names = Names(dims={"a", "b", "c", "d", "e", "l"}, open_tensors=True)
    info = SimpleNamespace(var=SimpleNamespace(dims=("a", "b")), element=parse(element, names))
    at = list(_assignments(info, SimpleNamespace(dims=("c", "d", "e")), parse(phi, names), CONTEXT))  # type: ignore[arg-type]
    assert [(x["a"], x["b"]) for x in at] == [(Index(a), Index(b)) for a, b in found]


def test_many_dims_are_not_tried_in_every_order():
    dims = tuple("abcdef")
    names = Names(dims={*dims, "l"}, open_tensors=True)
    x = parse("x[a, b, c, d, e, f, l]", names)
    info = SimpleNamespace(var=SimpleNamespace(dims=dims), element=x)
    assert len(list(_assignments(info, SimpleNamespace(dims=dims), x, CONTEXT))) == 1  # type: ignore[arg-type]
