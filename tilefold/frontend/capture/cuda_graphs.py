"""CUDA graphs of whole compiled graphs, by torch's own trees of them (`torch._inductor.cudagraph_trees`).

The trees keep one memory pool for forward and backward passes, copy inputs whose addresses are not static, record one
graph for each set of sizes, and have Inductor's rules for results that live on. Here stands only what they leave to a
back end: which inputs are static, on which device, and why a graph cannot be captured. It then runs as it is, and the
log says why.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._guards import TracingContext

from tilefold.backends.triton.counters import counters_of
from tilefold.log import warn

#: The passes of a captured graph.
Kind = Literal["inference", "forward", "backward"]
#: A compiled graph as AOTAutograd calls it: a list of arguments, which it may empty.
Boxed = Callable[[list[Any]], Any]
_TREES = "torch._inductor.cudagraph_trees"
#: What CUDA and torch say of a capture that failed.
_CAPTURING = ("captur", "cudaErrorStreamCapture", "cudagraph pool")


@dataclass
class CudaGraphs:
    """What the passes of one model share. settings: Inductor's for CUDA graphs. device: of the captured forward.
    reason: why the model is not captured."""

    settings: Mapping[str, object]
    device: int | None = None
    reason: str = ""
    _modules: dict[str, Any] = field(default_factory=dict)

    def wrapped(self, kind: Kind, gm: torch.fx.GraphModule, run: Boxed, name: str) -> Boxed:
        """`run`, the compiled `gm`, in CUDA graphs; itself, and a line in the log, where it cannot be captured."""
        if kind == "backward" and self.reason:  # it was said of the forward, whose tensors lie anywhere
            return run
        with self._module("torch._inductor.config").patch(dict(self.settings)):
            why = self._refused(gm)
            if why:
                warn("%s runs without CUDA graphs: %s", name, why)
                self.reason = why
                return self._alone(run) if kind == "backward" else run
            static = _saved(gm) if kind == "backward" else _static()
            device = next(v.device.index for v in _tensors(gm) if v.device.type == "cuda")
            if kind != "backward":
                self.device = device
            return self._or_alone(self._captured(kind, gm, run, static, device), run, name, device)

    def _captured(self, kind: Kind, gm: torch.fx.GraphModule, run: Boxed, static: Sequence[int], device: int) -> Boxed:
        traces = self._module("torch._dynamo.backends.cudagraphs").get_stack_traces(gm)
        placeholders = self._module("torch._inductor.cudagraph_utils").get_placeholder_info(gm.graph)
        captured: Boxed = self._module("torch._inductor.compile_fx").cudagraphify(
            _emptying(run),
            static_input_idxs=tuple(static),
            device_index=device,
            stack_traces=traces,
            is_backward=kind == "backward",
            is_inference=kind == "inference",
            placeholders=tuple(placeholders),
        )
        return captured

    def _or_alone(self, captured: Boxed, run: Boxed, name: str, device: int) -> Boxed:
        """`captured`, until a capture fails: from then on the model's passes run as they are, and the log says why."""

        def call(args: list[Any]) -> Any:
            if self.reason:
                return run(args)
            given = list(args)
            _allocate_what_stays(device)
            try:
                return captured(args)
            # Hidden: that something in the graph cannot be captured, which only the capture finds out. Nothing has run
            # then, and what the graph computes is computed without it. Other errors are the caller's.
            except RuntimeError as err:
                if not any(words in str(err) for words in _CAPTURING):
                    raise
                self.reason = str(err).splitlines()[0]
                warn("%s runs without CUDA graphs: its capture failed: %s", name, self.reason)
            return run(given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _refused(self, gm: torch.fx.GraphModule) -> str:
        """Why a graph cannot be captured. Graphs of AOTAutograd change none of their arguments."""
        devices = {v.device.type for v in _tensors(gm)} - {"meta"}
        if devices != {"cuda"}:
            return f"it has tensors on {' and '.join(sorted(devices - {'cuda'})) or 'no device'}"
        if len({v.device for v in _tensors(gm) if v.device.type == "cuda"}) > 1:
            return "its tensors are on several devices"
        if (node := self._module("torch._inductor.utils").get_first_incompatible_cudagraph_node(gm)) is not None:
            return f"{node.target} waits for the device, or has sizes that depend on data"
        symbolic = any(isinstance(n.meta.get("val"), torch.SymInt) for n in gm.graph.find_nodes(op="placeholder"))
        if symbolic and self._module("torch._inductor.config").triton.cudagraph_skip_dynamic_graphs:
            return "its sizes are symbolic, and triton.cudagraph_skip_dynamic_graphs is set"
        return ""

    def _alone(self, run: Boxed) -> Boxed:
        """A backward that is not captured, of a forward that is: the trees have to know when it runs."""
        if self.device is None:
            return run
        device, trees = self.device, self._module(_TREES)

        def told(args: list[Any]) -> Any:
            manager = trees.get_manager(device, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
            return run(args)

        return told

    def _module(self, name: str) -> Any:
        """Parts of Inductor, a second to load: only where CUDA graphs are asked for."""
        if name not in self._modules:
            self._modules[name] = importlib.import_module(name)
        return self._modules[name]


def reset() -> None:
    """Forget all captured graphs, as `torch._dynamo.reset()` does with Inductor's."""
    if _TREES in sys.modules:
        sys.modules[_TREES].reset_cudagraph_trees()


def _allocate_what_stays(device: int) -> None:
    """Memory that outlives a call must not come from the trees' pool, from which they also serve the call before a
    capture: they look for it there afterwards, and refuse."""
    counters = counters_of(device)
    if not counters.ready and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        counters.reserve()


def _emptying(run: Boxed) -> Boxed:
    """`run` as the trees want it: its list of arguments is empty when it returns."""

    def emptied(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return run(given)

    emptied._boxed_call = True  # type: ignore[attr-defined]
    return emptied


def _static() -> Sequence[int]:
    """Arguments of a forward whose addresses stay: parameters and buffers."""
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices or ())


def _saved(gm: torch.fx.GraphModule) -> Sequence[int]:
    """Arguments of a backward that the captured forward left in the pool, or that it read: all but gradients."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return [n for n, node in enumerate(nodes) if "tangents" not in node.name]


def _tensors(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    found = [n.meta.get("val") for n in gm.graph.nodes]
    return [v for v in found if isinstance(v, torch.Tensor)]
