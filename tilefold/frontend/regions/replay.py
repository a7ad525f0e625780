"""Calls of regions in C++: what a first call did in Python is recorded, and done again without it.

The Python of `regions.execute` and of the steps stays the definition: it runs what has no tape (a new length, arguments
that are no plain tensors, a machine without a compiler) and gives the tapes their meaning. A region whose sizes may
change is recorded for sizes that come a second time: those that change at every call would pay for it in vain.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

import torch

from tilefold import config
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.regions.execute import Executable
from tilefold.runtime.native.load import WORTH, Built, Native, native, stream_of
from tilefold.runtime.recorder import Recorder
from tilefold.runtime.tape import Tape

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


class Replayed(Executable):
    """An `Executable` that is recorded. `refused`: why it is not. `aligned`: tapes hold for alignments of addresses, as
    they always do on GPUs. module: what runs tapes (None: what this machine builds)."""

    aligned = False

    def __init__(self, lowered: Lowered, runner: Recordable, module: Native | Built | None = None):
        super().__init__(lowered, runner)
        self.program = runner
        self.refused = ""
        self._native = module or native()
        self._module: ModuleType | None = None
        self._region: object = None
        self._constants = [
            read((), {}) for (_, read), b in zip(self.inputs, lowered.inputs, strict=True) if b.constant is not None
        ]
        self._seen: set[tuple[int, ...]] = set()
        self._calls = 0

    def __call__(self, *args: object) -> Sequence[torch.Tensor | None]:  # type: ignore[override]
        module = self._module
        if module is not None:
            made: Sequence[torch.Tensor | None] | None = module.run(self._region, args)
            if made is not None:
                return made
        elif not self.refused:
            self._begin(args)
        if self._module is None or not self._comes_again(args):
            return self.in_python(args)
        return self._recorded(args)

    def in_python(self, args: Sequence[object]) -> tuple[torch.Tensor | None, ...]:
        """A call without a tape."""
        return self._run(args, self.runner)

    def replay(self, args: list[object]) -> Sequence[torch.Tensor | None] | None:
        """The results of the tape for such arguments, which are freed after their last use: the list is emptied. None,
        and an untouched list, where there is no tape."""
        if self._module is None:
            return None
        made: Sequence[torch.Tensor | None] | None = self._module.run(self._region, args)
        return made

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
        elif self._calls == WORTH:
            self._native.start_building()

    def _comes_again(self, args: Sequence[object]) -> bool:
        """Whether the sizes of these arguments are to be recorded."""
        if self.refused or torch._C._len_torch_dispatch_stack():
            return False
        if not self.lowered.syms:
            return True
        sizes = tuple(self.symbols(args).values())
        if sizes in self._seen:
            return True
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen.add(sizes)
        return False

    def _recorded(self, args: Sequence[object]) -> tuple[torch.Tensor | None, ...]:
        made, tape, self.refused = self.written(args)
        if tape is None:
            self.refused = self.refused or "it has no tensors"
        elif self._module is not None and not self._module.add(self._region, tuple(args), *tape.packed()):
            self.refused = "an argument is no plain tensor"
        if self.refused:
            log.info("%s runs step by step in Python: %s", self.lowered.program.name, self.refused)
            self._module = None
        return made

    def written(self, args: Sequence[object]) -> tuple[tuple[torch.Tensor | None, ...], Tape | None, str]:
        """The results of a call, its tape, and why there is none."""
        recorder = Recorder(args, self._constants)
        with recorder:
            made = self._run(args, lambda inputs, syms: self.program.recorded(inputs, syms, recorder))
        tape = recorder.tape(made)
        return made, tape, recorder.refused
