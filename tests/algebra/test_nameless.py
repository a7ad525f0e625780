"""What is decided up to names: equal structure gives equal keys, and nothing else does."""

from tilefold.algebra.expr import Expr, Index, Load, Size, call, dims_used, loads, tensors_read, walk
from tilefold.algebra.nameless import numbered


def _ratio(x: str, t: str, i: str, j: str) -> tuple[Expr, Expr]:
    a, s = Load(x, (Index(i), Index(j))), Load(t, (Index(i),))
    return a / s + Size(j), s * a


def test_expressions_that_differ_in_names_only_are_one() -> None:
    assert numbered(*_ratio("x", "t", "i", "j")) == numbered(*_ratio("t", "x", "b", "a"))


def test_what_was_equal_stays_equal_and_what_was_not_does_not() -> None:
    x, y = Load("x", (Index("i"),)), Load("y", (Index("i"),))
    assert numbered(x - x) != numbered(x - y)
    assert numbered(x - y, y - x) != numbered(x - y, x - y)
    assert numbered(x, Load("x", (Index("j"),))) != numbered(x, x)


def test_what_a_node_remembers_is_what_a_walk_finds() -> None:
    e = call("where", call("lt", Index("k"), 3), *_ratio("x", "t", "i", "j")) * Load("y", (Load("at", (Index("n"),)),))
    found = [n for n in walk(e) if isinstance(n, Load)]
    for _ in range(2):
        assert loads(e) == tuple(dict.fromkeys(found))
        assert tensors_read(e) == {"x", "t", "y", "at"}
        assert dims_used(e) == {"i", "j", "k", "n"}
