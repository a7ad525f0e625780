"""The models as rows: what is made, what it is called with, for inference and for training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilefold.errors import UnsupportedError
from tilefold.suites.case import together
from tilefold.suites.gpu.case import GpuCase, Suite, whole
from tilefold.suites.gpu.peers import GRAPHED, OURS_GRAPHED
from tilefold.suites.models import language
from tilefold.suites.models.language import LENGTH, SMALL_LENGTH, SMALL_VOCABULARY, VOCABULARY
from tilefold.suites.programs.program import Draw, bf, ints

SUITE: Suite = "models"
Mode = Literal["infer", "train"]
MODES: tuple[Mode, ...] = ("infer", "train")
#: Layers of a transformer, for GPUs and at small sizes.
LAYERS, SMALL_LAYERS = 4, 1
CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Model:
    """`make(big, layers)` gives the module; `given(big)` its arguments, the last of which are `labels` in training."""

    name: str
    make: Callable[[bool, int], nn.Module]
    given: Callable[[bool], tuple[Draw, ...]]
    labels: Callable[[bool], Draw]
    exact: Callable[[nn.Module], None] | None = None

    def case(self, mode: Mode, *, small: bool = False, layers: int | None = None) -> GpuCase:
        """A row."""
        draws = (*self.given(not small), *((self.labels(not small),) if mode == "train" else ()))
        count = layers or (SMALL_LAYERS if small else LAYERS)
        return GpuCase(
            suite=SUITE,
            row=f"{self.name} {mode}",
            family=mode,
            shape=", ".join("x".join(map(str, d.shape)) for d in draws),
            fn=_unplaced,
            make=together(*(d.draw for d in draws)),
            work=None,
            parts=whole,
            peers=("eager", "compile", GRAPHED, OURS_GRAPHED),
            planned=True,
            module=lambda: self.make(not small, count),
            exact=self.exact,
            steps=True,
            train=mode == "train",
        )


def _unplaced(*args: object) -> Any:
    raise TypeError("a module's row is called after `GpuCase.placed`")


class Classifier(nn.Module):
    """A network of torchvision; with labels it gives the loss."""

    def __init__(self, name: str, **settings: float):
        super().__init__()
        try:
            import torchvision  # noqa: PLC0415 (optional: only these rows need it)
        except ImportError as error:
            raise UnsupportedError(f"torchvision cannot be imported: {error}") from None
        self.network = torchvision.models.get_model(name, weights=None, **settings).to(torch.bfloat16)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.network(images)
        return logits if labels is None else functional.cross_entropy(logits.float(), labels)


def _tokens(big: bool) -> Draw:
    return ints(4 if big else 2, LENGTH if big else SMALL_LENGTH, high=VOCABULARY if big else SMALL_VOCABULARY)


def _short(big: bool) -> Draw:
    return ints(4 if big else 2, (LENGTH if big else SMALL_LENGTH) // 4, high=VOCABULARY if big else SMALL_VOCABULARY)


def _images(big: bool) -> tuple[Draw, ...]:
    return (bf(32, 3, 224, 224),) if big else (bf(2, 3, 32, 32),)


def _classes(big: bool) -> Draw:
    return ints(32 if big else 2, high=CLASSES)


def _language(name: str, make: Callable[[bool, int], nn.Module], **more: Any) -> Model:
    return Model(name, make, lambda big: (_tokens(big),), _tokens, **more)


def _vision(name: str, **settings: float) -> Model:
    """`settings` turn off what is random in training."""
    return Model(name, lambda big, layers: Classifier(name, **settings), _images, _classes)


MODELS: tuple[Model, ...] = (
    _language("llama", language.llama),
    _language("gpt2", language.gpt2),
    _language("bert", language.bert),
    _language("qwen3", language.qwen3),
    Model("t5", language.t5, lambda big: (_tokens(big), _short(big)), _short),
    Model("vit", language.vit, _images, _classes),
    _language("mixtral", language.mixtral, exact=language.looped_experts),
    _vision("resnet50"),
    _vision("mobilenet_v2", dropout=0.0),
    _vision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
)


def rows(*, small: bool = False) -> tuple[GpuCase, ...]:
    """Every model in every mode."""
    return tuple(m.case(mode, small=small) for mode in MODES for m in MODELS)


def other(row: str, *, small: bool = False) -> GpuCase | None:
    """A row beside the listed ones: a network of torchvision by its name there and a mode ("densenet121 infer")."""
    name, _, mode = row.partition(" ")
    return _vision(name).case(mode, small=small) if mode in MODES else None  # type: ignore[arg-type]
