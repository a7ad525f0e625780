"""The page and the terminal text, read back."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tests.explanation.fixtures import explained, only
from tilefold.explanation import html, terminal
from tilefold.explanation.derivation_html import derivations
from tilefold.explanation.highlight import base_name, code
from tilefold.explanation.model import Alike, Dataflow, Edge, Node, RejectionReport, alike
from tilefold.explanation.notes import explain_law
from tilefold.explanation.report import Explanation
from tilefold.explanation.svg import draw

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Collects text, ids and classes; fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text += data

    def ids(self) -> set[str]:
        return {a["id"] or "" for _, a in self.seen if "id" in a}


def read(text: str) -> Reader:
    r = Reader()
    r.feed(text)
    r.close()
    assert not r.open, r.open
    return r


@pytest.mark.parametrize(
    "name", ["softmax", "attention", "variance", "routing", "refused", "quant_gemm", "argmax", "two"]
)
def test_page_is_well_formed_and_self_contained(name):
    text = html.page(explained(name))
    r = read(text)
    assert {"dataflow", "derivation", "code", "traffic"} <= r.ids()
    for tag, attrs in r.seen:
        outside = [v for k, v in attrs.items() if k in ("src", "href") and not (v or "").startswith("#")]
        assert not outside and tag != "link", (tag, attrs)
    assert "$" not in re.sub(r"\$\{[^}]*\}", "", text.split("<script>")[0])  # no placeholder left


def test_reader_refuses_a_page_that_is_not_well_formed():
    with pytest.raises(AssertionError, match="closes"):
        read("<div><p></div>")


def test_sections_without_content_are_left_out():
    assert "rejections" not in read(html.page(explained("softmax"))).ids()
    refused = read(html.page(explained("refused")))
    assert "rejections" in refused.ids()
    assert "no finite set of sums closes" in refused.text


def test_names_from_outside_are_escaped():
    x = explained("softmax")
    evil = Explanation("<script>alert(1)</script>", x.regions, (RejectionReport("fallback", "a<b", "<img src=x>"),))
    text = html.page(evil)
    assert "<script>alert" not in text and "<img" not in text
    read(text)


def test_fragment_is_for_notebooks():
    text = explained("softmax")._repr_html_()
    assert text.startswith("<style>") and "<html" not in text
    read(text)


def edges(svg: str) -> list[str]:
    root = ET.fromstring(svg)
    return [
        p.get("class", "").removeprefix("edge ") for p in root.iter("path") if p.get("class", "").startswith("edge")
    ]


def test_drawings_have_the_edges_of_the_program():
    r = only("softmax")
    assert sorted(edges(draw(r.before, "before"))) == ["boundary"] * 3 + ["memory"] * 4
    # outside the frame x -> max, x -> exp and y; each again from the frame to its box
    assert sorted(edges(draw(r.after, "after"))) == ["boundary"] * 6 + ["chip"] * 4


def test_between_two_kernels_an_edge_goes_through_memory():
    r = only("two")
    assert [e.tensor for e in r.after.edges if e.via == "memory"] == ["t"]
    assert len(r.after.groups) == 2
    svg = draw(r.after, "after")
    assert edges(svg).count("memory") == 3  # out of one frame, between the frames, into the other
    assert svg.count('class="frame"') == 2


def test_what_goes_between_two_boxes_is_one_line():
    nodes = [Node(n, n, "y = x", "kernel") for n in "ab"]
    edges_ = [Edge("a", "b", t, "memory", size) for t, size in (("s", 1000), ("t", 2000))]
    svg = draw(Dataflow((*nodes,), (*edges_,), {}), "after")
    assert edges(svg) == ["memory"] and "<title>s, t: 3.0 kB</title>" in svg


def test_texts_of_a_drawing_are_apart_and_within_their_boxes():
    """Tensors from one kernel to four others, and to one further down, each with its size; a long bold name."""
    long = "m_model_embed_tokens_weight_gamma_mm"
    nodes = [Node(long, long, "f32 8", "input"), *(Node(c, c, "y = x", "kernel") for c in "abcdef")]
    pairs = [*("a" + c for c in "bcdef"), *(c + "f" for c in "bcde")]
    edges = [Edge(a, b, f"t{n}", "memory", 1000 * (n + 1)) for n, (a, b) in enumerate(pairs)]
    root = ET.fromstring(draw(Dataflow((*nodes,), (Edge(long, "a", long, "boundary", 32), *edges), {}), "after"))
    labels = [
        (float(t.get("x", "")), float(t.get("y", "")), t.text or "")
        for t in root.iter("text")
        if t.get("class") == "bytes"
    ]
    assert len({t for *_, t in labels}) == len(labels) == len(pairs)
    boxes = [[float(g.find("rect").get(k)) for k in ("x", "y", "width", "height")] for g in root.iter("g")]
    for n, (x, y, text) in enumerate(labels):
        assert all(abs(x - a) > 40 or abs(y - b) >= 11 for a, b, _ in labels[:n])
        for left, top, width, height in boxes:
            assert x + 7 * len(text) < left or x > left + width or y <= top or y - 9 >= top + height
    pill = next(g for g in root.iter("g") if g.get("class") == "input")
    title, text = pill.findall("text")
    assert float(pill.find("rect").get("width")) >= 8.3 * len(long)  # DejaVu Sans Bold, 12.5 px
    assert float(text.get("y")) - float(title.get("y")) >= 15  # else an underscore of the name touches it


def test_terminal_text_is_narrow_and_says_what_happened():
    for name in ("softmax", "attention", "refused", "quant_gemm", "two"):
        lines = terminal.text(explained(name)).splitlines()
        assert max(map(len, lines)) < 100
    text = str(explained("softmax"))
    assert "4 operators -> 1 kernel" in text and "scalar repair" in text and "68% less" in text
    assert "Not fused" not in text
    assert "Not fused" in str(explained("refused"))


def test_kernels_that_are_alike_are_shown_once():
    r = only("softmax")
    (both,) = alike((r, r))
    assert both == Alike(r.kernels[0], 2, r)
    twice = Explanation("twice", (r, r))
    assert "x2: fused" in str(twice)
    assert html.page(twice).count("Generated C++") == html.page(explained("softmax")).count("Generated C++")
    assert len(alike((r, only("variance")))) == 2


def test_folds_that_read_the_same_share_a_card():
    r = only("softmax")
    assert derivations((r, r)).count("The cascade") == 1 and "×2" in derivations((r, r))
    assert derivations((r, only("variance"))).count("The cascade") == 2


def test_code_marks_names_and_escapes():
    out = code("for j\n  accum m = max[j] x[i] < 3 // note", {"m", "x"})
    assert '<i data-n="m">m</i>' in out and "&lt;" in out and '<span class="c">// note</span>' in out
    assert base_name("x_s0", frozenset("x")) == "x" and base_name("N_j", frozenset("j")) == "j"
    assert base_name("xy", frozenset("x")) is None


def test_every_law_of_the_derivations_is_explained():
    laws = {
        s.law
        for name in ("softmax", "attention", "variance", "routing")
        for f in explained(name).folds
        for s in f.derivation
    }
    assert laws and all(explain_law(law) for law in laws)
    assert explain_law("no such law") == ""
