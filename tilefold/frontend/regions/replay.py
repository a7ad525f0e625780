"""Calls of regions in C++: what a first call did in Python is recorded, and done again without it.

The Python of `regions.execute` and of the steps stays the definition: it runs what has no tape (a new length, arguments
that are no plain tensors, a machine without a compiler) and gives the tapes their meaning. A region whose sizes may
change is recorded for sizes that come a second time: those that change at every call would pay for it in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from tilefold import config
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.regions.execute import Executable
from tilefold.runtime.native.load import WORTH, Built, Native, native, stream_of
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.tape import Tape
from tilefold.runtime.writing import writing

log = logging.getLogger("tilefold")

#: Sizes remembered a region that came once.
SEEN = 4096


class Recordable(Protocol):
    """A program that runs step by step, and can say what it did (`runtime.program`, `runtime.stored`)."""

    def __call__(
        self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int], /
    ) -> Mapping[str, torch.Tensor]: ...

    def recorded(
        self, inputs: Mapping[str, torch.Tensor], syms: Mapping[str, int], recorder: Recorder
    ) -> Mapping[str, torch.Tensor]: ...


#: (arguments, their tape).
Heard = Callable[[Sequence[object], Tape], None]


class Recorded:
    """What is recorded, and done again in C++. name: for people; module: what runs tapes (None: what this machine
    builds). `refused`: why it is not. `aligned`: tapes hold for alignments of addresses, as they always do on GPUs.
    `writes`: results are written over arguments. `heard`: is given the first tape, and the arguments that it is for.
    """

    aligned = writes = False
    heard: Heard | None = None
    #: Calls after which it is worth building the module.
    worth = WORTH

    def __init__(self, name: str, module: Native | Built | None = None):
        self.name = name
        self.refused = ""
        self._native = module or native()
        self._module: ModuleType | None = None
        self._region: object = None
        self._seen: set[tuple[int, ...]] = set()
        self._calls = 0

    def often(self, times: int) -> None:
        """It runs so many times in each call of what it is a part of: only these count."""
        self.worth = (WORTH - 1) * times + 1

    def in_python(self, args: Sequence[object]) -> Sequence[Any]:
        """A call without a tape."""
        raise NotImplementedError

    def written(self, args: Sequence[object]) -> tuple[Sequence[Any], Tape | None, str]:
        """The results of a call, its tape, and why there is none."""
        raise NotImplementedError

    def sizes(self, args: Sequence[object]) -> tuple[int, ...]:
        """Sizes that may be others in the next call."""
        raise NotImplementedError

    def __call__(self, *args: object) -> Sequence[Any]:
        module = self._module
        if module is not None:
            made: Sequence[Any] | None = self._run_tape(args) if self.writes else module.run(self._region, args)
            if made is not None:
                return made
        return self._recorded(args) if self._due(args) else self.in_python(args)

    def replay(self, args: list[object]) -> Sequence[Any] | None:
        """The results of the tape for such arguments, which are freed after their last use: the list is emptied. None,
        and an untouched list, where there is no tape."""
        return self._run_tape(args)

    def _run_tape(self, args: Sequence[object]) -> Sequence[Any] | None:
        module = self._module
        if module is None:
            return None
        with writing(self.writes):
            made: Sequence[Any] | None = module.run(self._region, args)
        return made

    def _due(self, args: Sequence[object]) -> bool:
        """Whether this call is to be recorded."""
        if self._module is None and not self.refused:
            self._begin(args)
        return self._module is not None and self._comes_again(args)

    def _begin(self, args: Sequence[object]) -> None:
        """Take the native module, if there is one by now."""
        self._calls += 1
        on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        runner = config.load().runner
        if runner == "python" or (on_gpu and runner != "all"):
            self.refused = f"TILEFOLD_RUNNER is {runner}"
        elif self._native.module is not None:
            self._region = self._native.module.region(on_gpu or self.aligned, stream_of if on_gpu else None)
            self._module = self._native.module
        elif self._calls == self.worth:
            self._native.start_building()

    def _comes_again(self, args: Sequence[object]) -> bool:
        """Whether the sizes of these arguments are to be recorded."""
        if self.refused or torch._C._len_torch_dispatch_stack():
            return False
        sizes = self.sizes(args)
        if not sizes or sizes in self._seen:
            return True
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen.add(sizes)
        return False

    def _recorded(self, args: Sequence[object]) -> Sequence[Any]:
        made, tape, self.refused = self.written(args)
        if tape is None:
            self.refused = self.refused or "it has no tensors"
        elif self._module is not None:
            with writing(self.writes):
                added = self._module.add(self._region, tuple(args), *tape.packed())
            self.refused = self.refused if added else "an argument is no plain tensor"
            if added and self.heard is not None:
                self.heard(args, tape)
                self.heard = None
        if self.refused:
            log.info("%s runs step by step in Python: %s", self.name, self.refused)
            self._module = None
        return made


class Replayed(Recorded, Executable):  # type: ignore[misc]
    """An `Executable` that is recorded."""

    def __init__(
        self, lowered: Lowered, runner: Recordable, module: Native | Built | None = None, *, writes: bool = False
    ):
        Executable.__init__(self, lowered, runner)
        Recorded.__init__(self, lowered.program.name, module)
        self.writes = writes
        self.program = runner
        self._constants = [
            read((), {}) for (_, read), b in zip(self.inputs, lowered.inputs, strict=True) if b.constant is not None
        ]

    def in_python(self, args: Sequence[object]) -> tuple[torch.Tensor | None, ...]:
        """See `Recorded`."""
        return self._run(args, self.runner)

    def sizes(self, args: Sequence[object]) -> tuple[int, ...]:
        """See `Recorded`."""
        return tuple(self.symbols(args).values()) if self.lowered.syms else ()

    def written(self, args: Sequence[object]) -> tuple[tuple[torch.Tensor | None, ...], Tape | None, str]:
        """See `Recorded`."""
        recorder = Recorder(args, ())
        with recorder:
            made = self.record(args, recorder)
        with writing(self.writes):
            tape = recorder.tape(made)
        return made, tape, recorder.refused

    def record(self, args: Sequence[object], recorder: Recorder) -> tuple[torch.Tensor | None, ...]:
        """The results of a call, written down by a recorder that has been entered."""
        recorder.constants(self._constants)
        return self._run(args, lambda inputs, syms: self.program.recorded(inputs, syms, recorder))


def recorded(run: Callable[..., Any], args: Sequence[object], recorder: Recorder) -> Any:
    """The results of a part of a graph, written down by a recorder that has been entered: step by step where the part
    can say what it does, operator by operator where it is a graph, else as a callable that a tape calls as it is."""
    record: Callable[..., Any] | None = getattr(run, "record", None)
    if record is not None:
        return record(args, recorder)
    return run(*args) if isinstance(run, torch.fx.GraphModule) else recorder.opaque(run, args)
