"""Bodies of loops as functions: what they take and give, and what stays."""

from __future__ import annotations

import ast
import textwrap

import pytest

from tilefold.backends.triton.outline import outlined


class _Kept:
    """Stands for `triton`: decorators that leave a function as it is."""

    @staticmethod
    def jit(f: object) -> object:
        return f


def _source(body: str) -> str:
    return "@triton.jit\ndef kernel(x, k):\n    # its listing\n" + textwrap.indent(textwrap.dedent(body), "    ")


def _run(source: str, *args: object) -> object:
    space: dict[str, object] = {"triton": _Kept}
    exec(compile(source, "kernel", "exec"), space)
    return space["kernel"](*args)  # type: ignore[operator]


NESTED = _source("""\
    s = 0
    t = x
    for i in range(k):
        a = i * x
        first = a
        for j in range(i):
            b = a + j
            s += b
            t = t + s
        # a comment
        s = s + first
    return s, t
    """)
WHILE = _source("""\
    s = 0
    while s < k:
        a = s + x
        b = a + 1
        s = b
    return s
    """)
IN_A_BRANCH = _source("""\
    s = 0
    if k > 2:
        c = 3
    else:
        c = 4
    for i in range(k):
        a = i * c
        b = a + x
        s += b
    return s
    """)
WITHIN_A_BRANCH = _source("""\
    s = 0
    if k > 2:
        c = 3
        for i in range(k):
            a = i * c
            b = a + x
            s += b
    elif k > 1:
        s = 7
    else:
        s = 1
    return s
    """)
COUNTING = _source("""\
    s = 0
    for i in range(k):
        s += i
    return s
    """)
STEPPED = _source("""\
    s = 0
    for i in range(k):
        i = i + x
        j = i * 2
        s += j
    return s
    """)


@pytest.mark.parametrize("source", [NESTED, WHILE, IN_A_BRANCH, WITHIN_A_BRANCH, COUNTING, STEPPED])
def test_means_the_same(source: str) -> None:
    assert _run(outlined(source), 3, 5) == _run(source, 3, 5)


def test_inner_bodies_first_and_each_once() -> None:
    made = outlined(NESTED)
    tree = ast.parse(made)
    names = [f.name for f in tree.body if isinstance(f, ast.FunctionDef)]
    assert names == ["kernel_turn", "kernel_turn_2", "kernel"]
    assert "s, t = kernel_turn(s, t, a, j)" in made
    assert "s, t = kernel_turn_2(s, t, i, x)" in made
    assert made.count("b = a + j") == 1
    assert "# its listing" in made
    assert "# a comment" in made


def test_while() -> None:
    assert "s = kernel_turn(s, x)" in outlined(WHILE)


def test_within_a_branch() -> None:
    made = outlined(WITHIN_A_BRANCH)
    assert "            s = kernel_turn(s, c, i, x)" in made
    assert [_run(made, 3, k) for k in range(5)] == [_run(WITHIN_A_BRANCH, 3, k) for k in range(5)]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(IN_A_BRANCH, id="a name of branches"),
        pytest.param(COUNTING, id="short"),
        pytest.param(STEPPED, id="changes its counter"),
        pytest.param(_source("return x + k"), id="no loop"),
    ],
)
def test_stays(source: str) -> None:
    assert outlined(source) == source
