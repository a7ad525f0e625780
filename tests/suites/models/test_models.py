"""Models are made small, in both modes, and what they give is near float64; training gives gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.frontend.verify import judge
from tilefold.suites.gpu.cases import select
from tilefold.suites.gpu.exact import references, training_step
from tilefold.suites.gpu.row import HOPELESS
from tilefold.suites.models.all import MODELS, MODES, rows

NEEDS = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="without transformers")


def test_every_model_has_both_modes():
    names = [c.row for c in rows()]
    assert len(set(names)) == len(names) == len(MODELS) * len(MODES) == len(rows(small=True))
    assert {c.row for c in select("models", ["train"])} == {f"{m.name} train" for m in MODELS}
    assert all(c.steps and c.train == (c.family == "train") for c in rows())


def test_other_networks_are_rows_when_they_are_named_with_a_mode():
    assert [c.row for c in select("models", ["densenet121 infer", "gpt2 train", "no mode"])] == [
        "gpt2 train",
        "densenet121 infer",
    ]
    with pytest.raises(TilefoldError, match="no row of models"):
        select("models", ["densenet121"])


@NEEDS
@pytest.mark.parametrize("row", ["llama infer", "t5 infer", "vit infer", "mixtral infer", "gpt2 train"])
def test_small_models_are_near_float64(row):
    (case,) = select("models", [row], small=True)
    case = case.placed("cpu")
    with torch.no_grad():
        (part,) = references(case, case.args())
    exact = tree_leaves(part.exact.result)
    assert len(exact) == len(part.eager) and (len(exact) > 10) == case.train
    found = [judge(row, own, own, e) for own, e in zip(part.eager, exact, strict=True)]
    right = [f for f in found if f.eager_rel_err < HOPELESS]
    assert len(right) > len(found) / 2 and all(f.ok and f.eager_rel_err < 0.1 for f in right)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="with torchvision")
def test_a_library_that_is_missing_is_said():
    (case,) = select("models", ["resnet50 infer"], small=True)
    with pytest.raises(UnsupportedError, match="torchvision cannot be imported"):
        case.placed("cpu")


def test_a_training_step_gives_the_loss_and_fresh_gradients():
    model = nn.Linear(3, 1, bias=False)

    def loss(x):
        return model(x).sum()

    x = torch.tensor([[1.0, 2.0, 3.0]])
    step = training_step(loss, model)
    for _ in range(2):  # nothing is added up
        with torch.no_grad():
            value, gradient = step(x)
        assert torch.equal(gradient, x) and torch.equal(value, model(x).sum()) and not value.requires_grad
