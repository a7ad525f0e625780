"""The digamma function, as torch has it: of small, large and negative numbers, and where it has no value."""

from __future__ import annotations

import math

import torch

from tilefold.algebra.evaluate import Env, Grid, evaluate, reader
from tilefold.algebra.expr import Index, Load
from tilefold.algebra.gamma import digamma

POINTS = (1e-3, 0.3, 0.999, 1.0, 1.5, 2.0, 3.7, 5.999, 6.0, 6.5, 20.0, 1e4, -0.25, -0.5, -1.75, -6.4, -30.3)
EDGES = (0.0, -0.0, -1.0, -7.0, math.inf, math.nan)


def evaluated(x: torch.Tensor) -> torch.Tensor:
    env = Env(reader({"x": x}), {"i": len(x)}, {}, exact=True)
    return evaluate(digamma(Load("x", (Index("i"),))), Grid({"i": (0, len(x))}), env)


def test_it_is_torchs() -> None:
    x = torch.tensor(POINTS, dtype=torch.float64)
    torch.testing.assert_close(evaluated(x), torch.special.digamma(x), rtol=2e-13, atol=2e-13)


def test_it_has_torchs_edges() -> None:
    x = torch.tensor(EDGES, dtype=torch.float64)
    torch.testing.assert_close(evaluated(x), torch.special.digamma(x), equal_nan=True)
