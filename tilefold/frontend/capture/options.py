"""What `mode=` and `options=` of `torch.compile(model, backend="tilefold")` mean.

Five options are Tilefold's own (`OWN`). All modes and options of Inductor are accepted as well, so that a user changes
the backend's name and nothing else: they hold for the parts that Inductor compiles, those for CUDA graphs (which the
modes "reduce-overhead" and "max-autotune" ask for, and `options={"cudagraphs": True}`) for the whole model.
`max_autotune`, which the modes of that name set, also has Tilefold time configurations of its GPU kernels.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Literal, get_args, get_origin

from tilefold.errors import TilefoldError
from tilefold.frontend.regions.assemble import CompileProgram, Options
from tilefold.frontend.regions.execute import interpreted
from tilefold.pipeline import compile_program

log = logging.getLogger("tilefold")

#: Ways to run a program, by the name that `options={"runner": ...}` takes.
RUNNERS: Mapping[str, CompileProgram] = {
    "pipeline": compile_program,
    "interpreter": interpreted,
}
LEFTOVERS = ("inductor", "eager")
#: Tilefold's own options.
OWN = ("runner", "leftover", "cudagraphs", "partition", "activation_memory_budget")
#: Who chooses what a forward saves for its backward: Tilefold (`training.saving`), or torch's minimal cut.
PARTITIONS = ("folds", "min_cut")
#: Begins the options of Inductor for CUDA graphs: they hold for whole models, of which it compiles parts.
_GRAPHS = "triton.cudagraph"
#: What an option wants, by its type.
_KINDS = {bool: "True or False", int: "a whole number", float: "a number with a point", str: "a text"}


def read_options(mode: str | None, options: Mapping[str, object] | None) -> Options:
    """The options of a compilation. TilefoldError on an unknown mode or option."""
    if not isinstance(options or {}, Mapping) or not all(isinstance(name, str) for name in options or {}):
        raise TilefoldError(f"options is {options!r}", hint='names and values, as {"cudagraphs": True}')
    given = dict(options or {})
    runner = _one_of("runner", tuple(RUNNERS), given.pop("runner", "pipeline"))
    leftover = _one_of("leftover", LEFTOVERS, given.pop("leftover", "inductor"))
    partition = _one_of("partition", PARTITIONS, given.pop("partition", "folds"))
    budget = given.pop("activation_memory_budget", None)
    if not (budget is None or (isinstance(budget, int | float) and not isinstance(budget, bool) and 0 <= budget <= 1)):
        raise TilefoldError(f"activation_memory_budget is {budget!r}", hint="a number from 0 to 1")
    asked = given.pop("cudagraphs", None)
    if not (asked is None or isinstance(asked, bool)):
        raise TilefoldError(f"cudagraphs is {asked!r}", hint="True or False")
    inductor = _inductors(mode, given)
    graphs = {name: v for name, v in inductor.items() if name.startswith(_GRAPHS)}
    graphed = bool(graphs.pop(f"{_GRAPHS}s", False) if asked is None else asked)
    left: Literal["inductor", "eager"] = "eager" if leftover == "eager" else "inductor"
    others = {name: v for name, v in inductor.items() if not name.startswith(_GRAPHS)}
    chosen: Literal["folds", "min_cut"] = "min_cut" if partition == "min_cut" else "folds"
    return Options(
        RUNNERS[runner],
        leftover=left,
        inductor=others,
        cuda_graphs=graphs if graphed else None,
        partition=chosen,
        tune=bool(inductor.get("max_autotune", False)),
        memory_budget=None if budget is None else float(budget),
    )


def _one_of(name: str, known: Sequence[str], value: object) -> str:
    if value not in known:
        raise TilefoldError(f"unknown {name} {value!r}", hint=f"{name}: {' or '.join(known)}")
    return str(value)


def _inductors(mode: str | None, given: Mapping[str, object]) -> Mapping[str, object]:
    """Inductor's configuration for a mode and options."""
    if mode in (None, "default") and not given:
        return {}
    inductor = importlib.import_module("torch._inductor")  # a second to load: only where it is asked for
    modes = inductor.list_mode_options()
    if mode is not None and mode not in modes:
        raise TilefoldError(f"unknown mode {mode!r}", hint=f"mode: {', '.join(modes)}")
    known = inductor.list_options()
    wanted = {**modes.get(mode or "default", {}), **{name.replace("-", "_"): v for name, v in given.items()}}
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, [*OWN, *known], 3)
            raise TilefoldError(
                f"unknown option {name!r} of the tilefold backend",
                hint=f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(OWN)}, and Inductor's",
            )
        _check_type(name, wanted[name])
    return wanted


def _check_type(name: str, value: object) -> None:
    """TilefoldError where Inductor has no use for a value. Types with parameters are not looked into, and of an option
    that is None by default nothing is known."""
    kind = importlib.import_module("torch._inductor.config").get_type(name)
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise TilefoldError(f"the option {name} is {value!r}", hint=f"one of {', '.join(map(repr, get_args(kind)))}")
    if isinstance(kind, type) and get_origin(kind) is None and kind is not type(None) and not isinstance(value, kind):
        raise TilefoldError(f"the option {name} is {value!r}", hint=_KINDS.get(kind, f"a {kind.__name__}"))
