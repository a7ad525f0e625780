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
from collections.abc import Mapping
from typing import Literal

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


def read_options(mode: str | None, options: Mapping[str, object] | None) -> Options:
    """The options of a compilation. TilefoldError on an unknown mode or option."""
    given = dict(options or {})
    runner, leftover = str(given.pop("runner", "pipeline")), str(given.pop("leftover", "inductor"))
    if runner not in RUNNERS:
        raise TilefoldError(f"unknown runner {runner!r}", hint=f"runner: {' or '.join(RUNNERS)}")
    if leftover not in LEFTOVERS:
        raise TilefoldError(f"unknown leftover {leftover!r}", hint=f"leftover: {' or '.join(LEFTOVERS)}")
    partition = str(given.pop("partition", "folds"))
    if partition not in PARTITIONS:
        raise TilefoldError(f"unknown partition {partition!r}", hint=f"partition: {' or '.join(PARTITIONS)}")
    budget = given.pop("activation_memory_budget", None)
    if budget is not None and not (isinstance(budget, int | float) and 0 <= budget <= 1):
        raise TilefoldError(f"activation_memory_budget is {budget!r}", hint="a number from 0 to 1")
    asked = given.pop("cudagraphs", None)
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
    return wanted
