"""FILE:FUNCTION and the argument texts of the command line."""

from __future__ import annotations

import pytest
import torch

from tilefold.cli import target
from tilefold.errors import ParseError, TilefoldError

SOURCE = """
import torch

def scaled(x, factor=2.0):
    return x * factor

def scaled_inputs():
    return torch.ones(3), 0.5

def named(a, b):
    return a - b

def named_inputs():
    return {"b": torch.zeros(2), "a": torch.ones(2)}

def bare(x):
    return x

def keyword(x, *, mode):
    return x
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "user_module.py"
    path.write_text(SOURCE)
    return path


def test_parse_tensors_and_scalars():
    positional, named = target.parse("f32[2, 3], i64[5] < 7, bool[4], 3, m=bf16[1], s=-0.5, c=true, n=none")
    x, labels, mask, three = positional
    assert x.shape == (2, 3) and x.dtype is torch.float32
    assert labels.dtype is torch.int64 and labels.min() >= 0 and labels.max() < 7
    assert mask.dtype is torch.bool and three == 3
    assert named["m"].dtype is torch.bfloat16
    assert (named["s"], named["c"], named["n"]) == (-0.5, True, None)


def test_parse_a_0d_and_an_empty_tensor():
    (scalar, empty), _ = target.parse("f64[], e4m3[0, 4]")
    assert scalar.shape == () and empty.shape == (0, 4) and empty.dtype is torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("f31[2]", "unknown dtype"),
        ("i64[2]", "needs a positive bound"),
        ("i64[2] < 0", "needs a positive bound"),
        ("f32[2] < 3", "only integer tensors"),
        ("f32(2)", "not a tensor or a number"),
        ("x=f32[2], f32[2]", "by position after one by name"),
        ("x=1, x=2", "not a new argument name"),
        ("2x=1", "not a new argument name"),
    ],
)
def test_parse_rejects(spec, message):
    with pytest.raises(ParseError, match=message):
        target.parse(spec)


def test_arguments_by_convention_by_name_and_by_text(file):
    fn, module = target.load(f"{file}:scaled")
    x, factor = target.arguments(fn, module, None)
    assert factor == 0.5 and torch.equal(fn(x, factor), torch.full((3,), 0.5))
    (x,) = target.arguments(fn, module, "x=f32[4]")
    assert x.shape == (4,)
    fn, module = target.load(f"{file}:named")
    assert torch.equal(fn(*target.arguments(fn, module, None)), torch.ones(2))


def test_the_same_seed_gives_the_same_arguments(file):
    fn, module = target.load(f"{file}:scaled")
    (a,), (b,) = (target.arguments(fn, module, "f32[4]", seed=3) for _ in range(2))
    (c,) = target.arguments(fn, module, "f32[4]", seed=4)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_arguments_rejects(file):
    fn, module = target.load(f"{file}:bare")
    with pytest.raises(TilefoldError, match=r"no arguments for bare\n.*bare_inputs\(\)"):
        target.arguments(fn, module, None)
    with pytest.raises(TilefoldError, match="do not fit bare"):
        target.arguments(fn, module, "f32[2], f32[2]")
    fn, module = target.load(f"{file}:keyword")
    with pytest.raises(TilefoldError, match="by name only"):
        target.arguments(fn, module, "f32[2], mode=1")


def test_load_rejects(file, tmp_path):
    with pytest.raises(TilefoldError, match="not FILE:FUNCTION"):
        target.load("model.py")
    with pytest.raises(TilefoldError, match="no such file"):
        target.load(f"{tmp_path}/absent.py:f")
    with pytest.raises(TilefoldError, match=r"no function absent\n.*bare, keyword, named"):
        target.load(f"{file}:absent")
