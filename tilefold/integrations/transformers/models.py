"""`apply` and `revert`: put compiled parts into a model, or into every model of a family built from now on."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tilefold.errors import TilefoldError
from tilefold.integrations.transformers.attention import NAME, attempts, register
from tilefold.integrations.transformers.loss import Deferred, Made, deferring
from tilefold.integrations.transformers.modules import (
    ROTARY,
    compiled_forward,
    forward_of,
    parts,
    rotary_forward,
)
from tilefold.integrations.transformers.rows import Row, table
from tilefold.integrations.transformers.swap import Attempts

#: Families that the tests compare with float64, each part of them; others are found by the same structure.
FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "phi", "phi3", "gpt2", "bert", "t5", "vit",
)  # fmt: skip
PARTS = ("attention", "rotary", "norm", "block", "loss")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of PARTS are compiled, and by what runner of `fuse`."""

    parts: frozenset[str]
    runner: str


class Applied:
    """What `apply` did. `rows`: one a part, true at the time they are looked at; printing it shows them as a table."""

    def __init__(self, name: str):
        self.name, self.rows = name, list[Row]()
        self._undo: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"{self.name}\n{table(self.rows)}"

    __repr__ = __str__

    def revert(self) -> None:
        """Everything as it was before `apply`; once."""
        while self._undo:
            self._undo.pop()()
        self.rows.clear()


_models: WeakKeyDictionary[nn.Module, Applied] = WeakKeyDictionary()
_families: dict[str, Applied] = {}


def apply(
    model: nn.Module | str,
    *,
    attention: bool = True,
    rotary: bool = True,
    norm: bool = True,
    block: bool = True,
    loss: bool = True,
    runner: str = "pipeline",
) -> Applied:
    """Compile the parts of a model of transformers, in place: `print(apply(model))`.

    model: a model that is built (parts of this one are replaced), or the name of a family ("llama", or a module as
    "transformers.models.llama"): its models built from now on. The rest says which parts: attention, rotary
    embeddings, norms, blocks (feed-forward parts, projections with residual and norm), and the loss with the output
    head, whose logits are then computed only when looked at. runner: as in `fuse`. Applied twice, the model is
    reverted first.

    TilefoldError: no model of transformers, or no family of that name.
    """
    chosen = (attention, rotary, norm, block, loss)
    wanted = Wanted(frozenset(part for part, yes in zip(PARTS, chosen, strict=True) if yes), runner)
    if not isinstance(model, nn.Module | str):
        hint = 'a model that is built, or the name of a family, as "llama"'
        raise TilefoldError(f"apply takes a model of transformers, not {type(model).__name__}", hint=hint)
    revert(model)
    if isinstance(model, str):
        done = _families[model] = _apply_family(model, wanted)
    else:
        done = _models[model] = _apply_model(model, wanted)
    return done


def revert(model: nn.Module | str) -> None:
    """Undo `apply`; nothing where it was not applied."""
    found = _families.pop(model, None) if isinstance(model, str) else _models.pop(model, None)
    if found is not None:
        found.revert()


def _apply_model(model: nn.Module, wanted: Wanted) -> Applied:
    from transformers import PreTrainedModel  # noqa: PLC0415 (optional)

    if not isinstance(model, PreTrainedModel):
        hint = "tilefold.fuse(module), or torch.compile(module, backend='tilefold')"
        raise TilefoldError(f"apply takes a model of transformers, not {type(model).__name__}", hint=hint)
    done = Applied(type(model).__name__)
    head = model.get_output_embeddings()
    for path, module, kind in parts(model, frozenset([head] if head is not None else [])):
        if kind == "attention":
            _apply_attention(done, path, module, wanted)
        elif kind in wanted.parts:
            row = Row(path, type(module).__name__, kind, "ready")
            done.rows.append(row)
            _stand_in(done, module, compiled_forward(module, row, wanted.runner))
    if "attention" in wanted.parts:
        _switch(done, model)
    if "loss" in wanted.parts and head is not None:
        _apply_loss(done, model, head, wanted.runner)
    return done


def _apply_attention(done: Applied, path: str, module: nn.Module, wanted: Wanted) -> None:
    if "attention" in wanted.parts:
        row = Row(path, type(module).__name__, "attention", "ready")
        done.rows.append(row)
        attempts[module] = Attempts(row, wanted.runner)
        done._undo.append(functools.partial(_forget, attempts, module))
    forward = inspect.unwrap(type(module).forward)
    if "rotary" in wanted.parts and ROTARY in forward.__code__.co_names:
        row = Row(path, type(module).__name__, "rotary", "ready")
        done.rows.append(row)
        _stand_in(done, module, rotary_forward(module, row, wanted.runner))


def _forget(table: MutableMapping[Any, Any], key: object) -> None:
    table.pop(key, None)


def _stand_in(done: Applied, module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Bind a function as the `forward` of one module; pickles and copies of it that lack it have the class's."""
    if forward is None:
        return
    forward.__name__ = "forward"
    module.forward = types.MethodType(forward, module)
    done._undo.append(functools.partial(_forget, module.__dict__, "forward"))


def _switch(done: Applied, model: Any) -> None:
    """Let the model, and every model inside it, ask for Tilefold's attention."""
    register()
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")]
    try:
        model.set_attn_implementation(NAME)
    except ValueError as err:
        _leave(done, str(err))
        return
    if getattr(model.config, "_attn_implementation", None) == NAME:
        for c, _ in before:  # T5's stacks have copies of it, which some versions do not reach
            if type(c) is type(model.config):
                c._attn_implementation_internal = NAME
    else:
        _leave(done, "the model does not let its attention be chosen")

    def back() -> None:
        for c, name in before:
            c._attn_implementation_internal = name

    done._undo.append(back)


def _leave(done: Applied, why: str) -> None:
    for row in done.rows:
        if row.kind == "attention":
            row.state, row.why = "left", why.splitlines()[0]


def _apply_loss(done: Applied, model: Any, head: nn.Module, runner: str) -> None:
    """Defer the logits of the head while the model is called with labels."""
    path = next((p for p, m in model.named_modules() if m is head), "")
    row = Row(path, type(head).__name__, "loss", "ready", "logits are computed when looked at")
    done.rows.append(row)
    inner, outer = forward_of(head), type(model).forward
    if type(head) is not nn.Linear or inner is None or "labels" not in inspect.signature(outer).parameters:
        row.state, row.why = "left", "the head is no plain linear layer, or the model takes no labels"
        return
    if "forward" in model.__dict__:
        row.state, row.why = "left", "the model's forward is replaced already"
        return
    tried, taken = Attempts(row, runner), inspect.signature(outer)

    def make_logits(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        under = deferring.get()
        if under is None or torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type):
            return inner(self, input)  # type: ignore[no-any-return]
        return Deferred.of(Made(input, self.weight, self.bias, under))

    @functools.wraps(outer)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = taken.bind_partial(self, *args, **kwargs).arguments
        token = deferring.set(tried if given.get("labels") is not None else None)
        try:
            return outer(self, *args, **kwargs)
        finally:
            deferring.reset(token)

    _stand_in(done, head, make_logits)
    _stand_in(done, model, forward)


def _apply_family(name: str, wanted: Wanted) -> Applied:
    """Apply to every model of a family when it has been built: its classes' last step is `post_init`."""
    from transformers import PreTrainedModel  # noqa: PLC0415 (optional)

    path = name if "." in name else f"transformers.models.{name}"
    try:
        written = import_module(f"{path}.modeling_{path.rsplit('.', 1)[-1]}")
    except ImportError:
        hint = f"a package of transformers.models, as {', '.join(FAMILIES)}"
        raise TilefoldError(f"transformers has no models named {name!r}", hint=hint) from None
    done = Applied(name)
    for found in list(vars(written).values()):
        if isinstance(found, type) and PreTrainedModel in found.__bases__ and found.__module__ == written.__name__:
            _after_building(done, found, wanted)
    return done


def _after_building(done: Applied, family: Any, wanted: Wanted) -> None:
    own = family.__dict__.get("post_init")
    before = family.post_init

    @functools.wraps(before)
    def post_init(self: Any) -> None:
        before(self)
        made = _models[self] = _apply_model(self, wanted)
        done.rows.extend(made.rows)
        done._undo.append(made.revert)

    family.post_init = post_init

    def back() -> None:
        if own is None:
            del family.post_init
        else:
            family.post_init = own

    done._undo.insert(0, back)
