"""Expressions as MathML: well formed, and with the structure of the expression."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.explanation.fixtures import only
from tilefold.algebra.expr import Call, Expr
from tilefold.algebra.ops import OPS
from tilefold.algebra.text import Names, parse
from tilefold.explanation import mathml
from tilefold.explanation.mathml import Notation

NAMES = Names(dims={"i", "j"}, open_tensors=True)


def tree(text: str, n: Notation | None = None) -> ET.Element:
    return ET.fromstring(mathml.math_element(mathml.expr(parse(text, NAMES), n or Notation())))


def words(e: ET.Element) -> str:
    return "".join(t.strip() for t in e.itertext())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("(a + b) * c", "(a+b)⁢c"),
        ("a + b * c", "a+b⁢c"),
        ("a - (b - c)", "a−(b−c)"),
        ("a * 2.0", "a·2"),
        ("-inf", "−∞"),
        ("1e-05 + x", "10−5+x"),
        ("bf16(x)", "x"),
        ("e4m3(x)", "e4m3(x)"),
        ("size(j)", "|j|"),
    ],
)
def test_text_of_expressions(text, shown):
    assert words(tree(text)) == shown


def test_division_is_a_fraction_and_exp_a_power():
    found = tree("exp(x[i] - m) / t")
    assert found.find(".//mfrac") is not None
    assert found.find(".//msup/mi").text == "e"  # type: ignore[union-attr]
    assert tree("x * x").find(".//msup/mn").text == "2"  # type: ignore[union-attr]


def test_indices_of_hidden_dims_are_left_out():
    assert words(tree("x[i, j]")) == "xi,j"
    assert words(tree("x[i, j]", Notation(hidden=frozenset("i")))) == "xj"


def test_names_are_escaped():
    assert "&lt;" in mathml.identifier("a<b") and "<b" not in mathml.identifier("a<b")[3:-5].replace("&lt;b", "")


def test_every_operation_prints_well_formed():
    x = parse("x[i]", NAMES)
    for name, spec in OPS.items():
        args: tuple[Expr, ...] = (x,) * spec.arity
        ET.fromstring(mathml.math_element(mathml.expr(Call(name, args), Notation())))


def test_an_unknown_node_is_not_printed_silently():
    with pytest.raises(AssertionError):
        mathml.expr("x", Notation())  # type: ignore[arg-type]


def test_attention_update_and_merge():
    (f,) = only("attention").folds
    n = Notation(hidden=frozenset(f.parallel))
    m, t, o = f.delayed.state
    show = [words(ET.fromstring(mathml.update(v, f.fold.axes, n))) for v in (m, t, o)]
    assert show[0] == "m′=max(m,maxjcj)"
    assert show[1] == "t′=t⁢em−m′+∑jecj−m′"
    assert show[2].startswith("oe′=oe⁢em−m′+∑j")
    merged = words(ET.fromstring(mathml.merge(t, f.delayed, n)))
    assert merged == "t=ta⁢ema−m+tb⁢emb−m"


def test_the_paper_form_repairs_with_both_sums_and_the_delayed_does_not():
    (f,) = only("attention").folds
    n = Notation(hidden=frozenset(f.parallel))
    paper, delayed = (ET.fromstring(mathml.update(form.state[2], f.fold.axes, n)) for form in (f.paper, f.delayed))
    assert "t" in words(paper) and paper.find(".//mfrac") is not None
    assert "t" not in words(delayed) and delayed.find(".//mfrac") is None


def test_a_guard_is_a_bar_and_other_conditions_are_cases():
    guard = parse("exp(x[i] - where(m == -inf, 0.0, m))", NAMES)
    found = ET.fromstring(mathml.math_element(mathml.expr(guard, Notation())))
    assert found.find(".//mover") is not None and found.find(".//mtable") is None
    (note,) = mathml.guards(guard, Notation())
    assert words(ET.fromstring(f"<p>{note}</p>")) == "m¯ism, but0wherem=−∞"
    other = parse("where(m == -inf, 0.0, t)", NAMES)
    assert tree("where(m == -inf, 0.0, t)").find(".//mtable") is not None
    assert mathml.guards(other, Notation()) == ()
