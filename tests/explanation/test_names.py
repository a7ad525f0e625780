"""Signatures, short symbols and repeated sequences."""

from __future__ import annotations

import re

import pytest
import torch

from tests.block.programs import SOFTMAX
from tilefold.algebra.text import Names
from tilefold.errors import SourceLoc
from tilefold.explanation.dataflow import LONG, Piece, choose
from tilefold.explanation.model import RejectionReport, same_reason
from tilefold.explanation.names import cascade_signature, repeats, short_symbols, signature
from tilefold.explanation.report import explain
from tilefold.plan.greedy import fuse
from tilefold.tensor.text import parse, parse_compute


def block(text: str):
    return fuse(parse(text)).kernels[0].block


def test_kernels_that_differ_in_names_only_have_one_signature():
    renamed = SOFTMAX.replace("m[i]", "top[i]").replace("x", "z").replace("ezp", "exp").replace("maz", "max")
    assert "top[i]" in renamed
    a, b = signature(block(SOFTMAX)), signature(block(renamed))
    assert a[0] == b[0]
    assert {v: k for k, v in b[1].items()}[a[1]["m"]] == "top"


@pytest.mark.parametrize(
    ("old", "new"), [("f32[5, n]", "bf16[5, n]"), ("dim i = 5", "dim i = 6"), ("max[j]", "min[j]")]
)
def test_kernels_that_differ_in_more_do_not(old, new):
    changed = SOFTMAX.replace(old, new)
    if old.startswith("dim"):
        changed = changed.replace("f32[5, n]", "f32[6, n]")
    assert signature(block(SOFTMAX))[0] != signature(block(changed))[0]


def test_the_repetition_that_covers_most_is_first():
    assert repeats(list("xabcabcabcy"))[0] == (1, 3, 3)
    assert repeats(list("aaaa"))[0] == (0, 1, 4)
    assert repeats(list("aabcbcbc"))[0] == (2, 2, 3)
    assert repeats(list("abcd")) == repeats([]) == []


def pieces(letters: str, reads=lambda k: {f"t{k - 1}"}) -> list[Piece]:
    """A piece a letter, by default a chain."""
    return [Piece(c, (f"t{k}",), frozenset(reads(k))) for k, c in enumerate(letters)]


def test_only_long_programs_are_shortened():
    assert choose(pieces("a" * LONG)).kept == tuple(range(LONG))
    shown = choose(pieces("pq" + "ab" * 5 + "rs"))
    assert shown.kept == (0, 1, 2, 3, 12, 13)
    assert shown.alias["t4"] == "t2" and shown.alias["t11"] == "t3" and "t2" not in shown.alias
    assert (shown.repeated, shown.rounds) == (range(2, 4), 5)


def test_two_equal_layers_are_drawn_once():
    shown = choose(pieces("p" + "abc" * 2 + "q"))
    assert (shown.kept, shown.rounds) == ((0, 1, 2, 3, 7), 2)


def test_equal_branches_beside_each_other_are_not_layers():
    aside = choose(pieces("p" + "abc" * 2 + "q", lambda k: {"t0"} if k in (1, 4) else {f"t{k - 1}"}))
    assert aside.kept == tuple(range(8)) and not aside.repeated


def test_symbols_are_short_distinct_and_leave_short_names_alone():
    found = short_symbols([("softmax_max", "max"), ("t", "sum"), ("softmax_sum", "sum"), ("o_sum", "sum")], {"m"})
    assert found == {"softmax_max": "M", "softmax_sum": "u", "o_sum": "w"}


CASCADE = ["m[i]: f32 = max[j] x[i, j]", "t[i]: f32 = sum[j] exp(x[i, j] - m[i])"]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [("m", "safe_max", True), ("x", "y", True), ("j", "m1", True), ("exp", "tanh", False), ("max", "min", False)],
)
def test_cascades_that_differ_in_names_only_have_one_signature(old, new, same):
    changed = [re.sub(rf"\b{old}\b", new, line) for line in CASCADE]
    names = Names(dims={"i", "j", "m1"}, open_tensors=True)
    found = [cascade_signature([parse_compute(line, names) for line in lines]) for lines in (CASCADE, changed)]
    assert (found[0] == found[1]) is same


def test_reasons_of_equal_layers_are_one():
    line, other = SourceLoc("model.py", 3), SourceLoc("model.py", 4)
    found = [
        RejectionReport("kernel", "a", "a block would have to keep mm_9 over all of u, x", line),
        RejectionReport("kernel", "b", "a block would have to keep mm_16 over all of j1, l1", line),
        RejectionReport("kernel", "c", "a block would have to keep mm_16 over all of j1, l1", other),
        RejectionReport("kernel", "d", "only 8 blocks would be left", line),
        RejectionReport("kernel", "e", "only 1 blocks would be left", line),
    ]
    named = ["".join(r.subject for r in rs) for rs in same_reason(found, lines=True)]
    assert named == ["ab", "c", "d", "e"]
    assert ["".join(r.subject for r in rs) for rs in same_reason(found, lines=False)] == ["abc", "d", "e"]


def test_a_layer_that_is_drawn_once_is_drawn_as_its_operators():
    """Within the frame an edge goes through memory, an operator is told by what it leaves there."""

    def layers(x, w):
        for _ in range(4):
            x = torch.tanh(torch.softmax(x @ w, -1))
        return x + 1

    x = explain(layers, torch.randn(8, 16), torch.randn(16, 16))
    drawn = x.regions[0].before
    framed = [n for n in drawn.nodes if n.group == drawn.repeated]
    assert drawn.groups == {drawn.repeated: "×4"} and [n.title for n in framed] == ["mm", "softmax", "tanh"]
    assert all(n.text.endswith(": f32 8×16") for n in framed)
    assert [e.via for e in drawn.edges].count("memory") == 3  # two within, one out of it
    assert "operators 1 to 3 are repeated ×4, drawn once" in drawn.omitted
