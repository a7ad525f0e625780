"""Rule by rule: the data, the section of the page, the drawings."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from tests.explanation.fixtures import only
from tests.explanation.test_page import read
from tilefold.blockbuster.ir import Graph, Map, walk
from tilefold.blockbuster.rules.algorithm import fuse
from tilefold.blockbuster.verify import infer
from tilefold.explanation.block_svg import draw_program
from tilefold.explanation.rules import Rules, rules_of, section
from tilefold.suites.blocks.examples import attention, examples
from tilefold.tensor.text import parse

UNKNOWN = """
program gather(n)
  input x: f32[n, 4]
  input at: i64[n]
  dim i = n
  dim j = 4
  y[i]: f32 = sum[j] x[at[i], j]
  return y
"""


def buffered_uses(g: Graph, around: tuple[str, ...] = ()) -> int:
    """Edges of a graph, and of the graphs inside, that go through memory."""
    types = infer(g, around)
    uses = [v for n in g.nodes for v in dict.fromkeys(n.uses)] + list(g.outputs)
    inner = [n for n in g.nodes if isinstance(n, Map)]
    return sum(types[v].buffered for v in uses) + sum(buffered_uses(n.body, (*around, n.dim)) for n in inner)


@pytest.mark.parametrize("ex", examples(), ids=lambda ex: ex.name)
def test_drawings_colour_buffered_edges(ex):
    """Every edge is drawn once; the red ones are the buffered ones, and fusion leaves fewer of them."""
    f = fuse(ex.program)
    red = []
    for p in (f.start, f.result):
        svg = draw_program(p, "a title")
        root = ET.fromstring(svg)
        edges = [e.get("class") for e in root.iter() if (e.get("class") or "").startswith("edge")]
        red.append(edges.count("edge memory"))
        assert red[-1] == buffered_uses(p.graph)
        maps = [e for e in root.iter() if e.get("class") == "map"]
        assert len(maps) == sum(isinstance(n, Map) for n in walk(p.graph))
    assert red[1] < red[0]


def test_drawing_names_its_inputs():
    text = "".join(ET.fromstring(draw_program(attention().program, "t")).itertext())
    assert all(name in text for name in ("Q(M,D)", "KT(N,D)", "VT(L,N)", "O(M,L)", "row_scale", "⊕", "exp(x)"))


def test_steps_of_a_users_program():
    r = only("attention").rules
    assert r.start is not None and r.snapshots[-1] == len(r.steps) and not r.reason
    assert [s.label.split(":")[0] for s in r.steps][-2:] == ["rule 6", "rule 1"]


def test_section():
    r = only("attention").rules
    page = read(section(r))
    states = [a for tag, a in page.seen if tag == "article"]
    assert [a["data-step"] for a in states] == [str(k) for k in range(len(r.steps) + 2)]
    assert ["hidden" in a for a in states] == [True] * len(r.steps) + [False, False]
    (slider,) = [a for tag, a in page.seen if tag == "input"]
    assert slider["max"] == str(len(r.steps) + 1)
    assert page.text.count("snapshot") == len(r.snapshots) and "rule 4: swap scale and dot" in page.text
    assert len(re.findall("<svg", section(r))) == len(states) and "Not what runs." in page.text


def test_programs_without_a_block_form_are_left_out():
    r = rules_of(parse(UNKNOWN))
    assert r.start is None and "computed places" in r.reason
    assert section(r) == ""
    assert section(Rules()) == ""


def test_long_programs_are_left_out():
    body = "".join(f"  y{k}[i]: f32 = y{k - 1}[i] * 2.0\n" for k in range(1, 40))
    text = "program long(n)\n  input x: f32[n]\n  dim i = n\n  y0[i]: f32 = x[i] * 2.0\n" + body + "  return y39\n"
    assert "too many" in rules_of(parse(text)).reason
