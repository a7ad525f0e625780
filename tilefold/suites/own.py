"""A user's own file as rows of `tilefold bench FILE.py`: functions, modules and classes of modules beside which
`<name>_inputs()` gives the arguments, as for the other commands.

For inference they are called as they are. For training every floating-point argument becomes a parameter, and the loss
is the mean square of each result, summed: a gradient reaches whatever is differentiable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilefold.errors import TilefoldError
from tilefold.suites.gpu.case import Args, GpuCase, Suite, whole
from tilefold.user_file import imported, made

#: Rows of a user's file are measured and told as programs are.
SUITE: Suite = "programs"
MODES = ("infer", "train")
INPUTS = "_inputs"


def rows(path: Path, modes: Sequence[str] = MODES[:1]) -> tuple[GpuCase, ...]:
    """The file's programs in the order of the file, for inference as NAME and for training as "NAME train".

    TilefoldError where the file cannot be imported, or has none.
    """
    if not path.is_file():
        raise TilefoldError(f"no such file: {path}")
    if vain := [m for m in modes if m not in MODES]:
        raise TilefoldError(f"no mode {vain[0]!r}", hint=f"there is: {', '.join(MODES)}")
    module = imported(path)
    names = [n for n in vars(module) if callable(vars(module).get(n + INPUTS)) and callable(getattr(module, n))]
    if not names:
        hint = "each function or module of it needs <name>_inputs() beside it, which returns a tuple of arguments"
        raise TilefoldError(f"{path} has nothing to measure", hint=hint)
    return tuple(row(module, path.stem, n, train=mode == MODES[1]) for mode in modes for n in names)


def row(module: ModuleType, family: str, name: str, *, train: bool) -> GpuCase:
    """The file's function, module or class of this name as a row of a class of programs."""
    thing = getattr(module, name)
    inputs = partial(_drawn, module, name)
    placed: Callable[[], nn.Module] | None = None
    if train:
        placed = partial(_training, thing, inputs)
    elif isinstance(thing, type | nn.Module):
        placed = partial(_own, thing)
    return GpuCase(
        suite=SUITE,
        row=f"{name} {MODES[1]}" if train else name,
        family=family,
        shape="",
        fn=thing,
        make=partial(_rest, inputs) if train else inputs,
        work=None,
        parts=whole,
        planned=True,
        module=placed,
        train=train,
    )


def _drawn(module: ModuleType, name: str, gen: torch.Generator) -> Args:
    """The file's arguments on the generator's device; each seed gives others."""
    device = gen.device
    here = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(here), torch.device(device):
        torch.manual_seed(gen.initial_seed())
        given = made(module, name + INPUTS)
    if isinstance(given, Mapping):
        raise TilefoldError(f"{name}{INPUTS}() gives a dict", hint="bench calls by position: return a tuple")
    given = tuple(given) if isinstance(given, tuple | list) else (given,)
    return tuple(a.detach().to(device) if isinstance(a, Tensor) else a for a in given)


def _own(thing: Any) -> nn.Module:
    """A class's new instance, or a copy of an instance, on the device that torch makes tensors on."""
    found = thing() if isinstance(thing, type) else copy.deepcopy(thing)
    if not isinstance(found, nn.Module):
        raise TilefoldError(f"{thing} is no module", hint="of classes, those of torch.nn.Module are measured")
    return found.to(torch.get_default_device())


def _trained(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


def _rest(inputs: Callable[[torch.Generator], Args], gen: torch.Generator) -> Args:
    """What is no parameter in training."""
    return tuple(a for a in inputs(gen) if not _trained(a))


def _training(thing: Any, inputs: Callable[[torch.Generator], Args]) -> nn.Module:
    device = torch.get_default_device()
    given = inputs(torch.Generator(device).manual_seed(torch.initial_seed()))
    of = _own(thing) if isinstance(thing, type | nn.Module) else thing
    return Training(of, given)


class Training(nn.Module):
    """The loss of what `of` gives for arguments of which the floating-point ones are parameters."""

    def __init__(self, of: Callable[..., Any], given: Args):
        super().__init__()
        self.of, self.places = of, tuple(_trained(a) for a in given)
        self.given = nn.ParameterList(nn.Parameter(a) for a in given if _trained(a))

    def forward(self, *rest: Any) -> Tensor:
        own, others = iter(self.given), iter(rest)
        found = tree_leaves(self.of(*(next(own) if mine else next(others) for mine in self.places)))
        return torch.stack([x.float().square().mean() for x in found if _trained(x)]).sum()
