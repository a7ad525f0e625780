"""What is decided up to names: equal structure gives equal keys, and nothing else does."""

from tilefold.algebra.cascade import Cascade, Reduction
from tilefold.algebra.derive import derive_fold
from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Expr, Index, Load, Size, Sym, call, dims_used, loads, tensors_read, walk
from tilefold.algebra.fold import Check
from tilefold.algebra.nameless import Names, numbered


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


def _softmax(x: str, m: str, s: str, i: str, j: str) -> Cascade:
    at, top = Load(x, (Index(i), Index(j))), Load(m, (Index(i),))
    return Cascade(
        (j,),
        (
            Reduction(m, "max", (i,), at, DType.F32),
            Reduction(s, "sum", (i,), call("exp", at - top), DType.F32),
        ),
        ((x, DType.F32), ("unread", DType.F16)),
    )


def test_cascades_and_folds_that_differ_in_names_only_are_one() -> None:
    a, b = _softmax("x", "m", "s", "i", "j"), _softmax("m", "s", "x", "j", "k")
    one, two = Names(), Names()
    assert (one.fold(derive_fold(a)), one.cascade(a)) == (two.fold(derive_fold(b)), two.cascade(b))


def test_names_that_differ_stay_different() -> None:
    names = Names()
    e = Load("x", (Index("i"),)) + Load("x@old", (Index("j"),)) + Load("y@new", (Index("i"),)) + Sym("x") * Size("j")
    t, u, s = "t0", "t1", "s0"
    want = Load(t, (Index("d0"),)) + Load(t + "@old", (Index("d1"),)) + Load(u + "@new", (Index("d0"),))
    assert names.expr(e) == want + Sym(s) * Size("d1")
    assert (names.tensor("x"), names.tensor("y"), names.tensor("z"), names.dims("ji")) == (t, u, "t2", ("d1", "d0"))
    assert names.optional(None) is None


def test_a_proof_is_told_with_the_names_of_each_cascade() -> None:
    def laws(c: Cascade) -> list[str]:
        return [k.name for k in derive_fold(c).checks if k.method != "numeric"]

    first, second = laws(_softmax("x", "m", "s", "i", "j")), laws(_softmax("x", "top", "total", "i", "j"))
    assert any(name.startswith("s: h(") for name in first)
    assert second == ["total" + name[1:] for name in first]


def test_checks_are_renamed_and_back() -> None:
    names = Names()
    names.dim("m")
    names.tensor("m")
    found = (Check("m: h(t, D, D) = t", "symbolic", True), Check("m: a: b", "facts", True, "H'/H >= 0"))
    nameless = names.checks(found)
    assert nameless is not None and [c.name for c in nameless] == ["t0: h(t, D, D) = t", "t0: a: b"]
    assert names.named(nameless) == found
    assert names.checks((Check("n: law", "symbolic", True),)) is None
