"""What decides how a graph of Dynamo's is compiled, as a digest: equal digests, equal results.

torch's own key of its cache of AOTAutograd holds as much and costs more than what it saves here: it reads all of
Triton and torch, and loads all of Inductor. This one has versions in their place, and is stricter about the graph: only
what says all about itself may be in it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

import torch
from torch._functorch import config as functorch

from tilefold import config
from tilefold.frontend.regions.assemble import Options
from tilefold.runtime.kept import PACKAGE, stamp
from tilefold.runtime.tuner.table import user_file

#: Types of what a node may be given beside nodes.
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, type(None), type(...), range)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Modules of Python's own functions that a graph may call.
_PYTHON = frozenset({"builtins", "_operator", "operator", "math"})
#: Types of arguments whose memory is all that they are.
_TENSORS = ("Tensor", "Parameter", "Buffer", "FakeTensor")


def refused(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> str:
    """Why a graph and its arguments do not say all about what it computes; "" if they do."""
    for x in example_inputs:
        if not isinstance(x, torch.Tensor) or type(x).__name__ not in _TENSORS or x.layout is not torch.strided:
            return f"an argument is a {type(x).__name__}"
        if x._has_symbolic_sizes_strides:
            return "sizes are free"
    if any(True for _ in gm.children()) or hasattr(gm, "saved_tensors_hooks_pack_0"):
        return "it has parts"
    return next((f"of {n.target}" for n in gm.graph.nodes if not _says_all(n)), "")


def _says_all(n: torch.fx.Node) -> bool:
    """Whether a node's name and arguments say what it computes, whoever has run what before."""
    if not all(map(_is_plain, (n.args, n.kwargs))):
        return False
    if n.op != "call_function":
        return n.op in ("placeholder", "output", "call_method")
    target: Any = n.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).startswith(("aten.", "prims."))
    if isinstance(target, torch._ops.OperatorBase):
        return False
    module = str(getattr(target, "__module__", None) or "torch")
    ours = isinstance(target, FunctionType) and module.startswith("tilefold.frontend.")
    return module.partition(".")[0] == "torch" or module in _PYTHON or ours


def _is_plain(x: object) -> bool:
    match x:
        case torch.fx.Node():
            return True
        case tuple() | list():
            return all(map(_is_plain, x))
        case dict():
            return all(map(_is_plain, (*x, *x.values())))
        case slice():
            return all(map(_is_plain, (x.start, x.stop, x.step)))
    return isinstance(x, _PLAIN)


def key(gm: torch.fx.GraphModule, args: Sequence[Any], how: Any, settings: str) -> str:
    """The digest of a graph, its (fake) arguments, and how AOTAutograd is run (its `AOTConfig`)."""
    lines = [settings, *_state(), *_graph(gm), *_arguments(args), *_run(how)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _graph(gm: torch.fx.GraphModule) -> Iterator[str]:
    for n in gm.graph.nodes:
        target = n.target if isinstance(n.target, str) else _name(n.target)
        yield f"{n.op} {n.name} {target} {n.args!r} {n.kwargs!r} {n.meta.get('stack_trace')}"


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', None)}"


def _arguments(args: Sequence[Any]) -> Iterator[str]:
    """Types, extents, strides, and which ones share memory."""
    memory: dict[int, int] = {}
    for x in args:
        if not isinstance(x, torch.Tensor):
            yield f"{type(x).__name__} {x!r}"
            continue
        place = memory.setdefault(x.untyped_storage()._cdata, len(memory))
        facts = (x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset(), x.requires_grad, x.is_leaf)
        flags = (x.is_conj(), x.is_neg(), x.is_inference(), isinstance(x, torch.nn.Parameter), place)
        yield f"{facts} {flags}"


def _run(how: Any) -> Iterator[str]:
    names = ("num_params_buffers", "keep_inference_input_mutations", "is_export", "no_tangents", "dynamic_shapes")
    for name in (*names, "static_input_indices", "pre_dispatch", "disable_functionalization"):
        yield f"{name} {getattr(how, name, None)!r}"
    for source in getattr(how, "aot_autograd_arg_pos_to_source", None) or ():
        yield source.name if isinstance(source.name, str) else source.name()


def _state() -> Iterator[str]:
    """Of this process, what tracing and kernels depend on."""
    yield f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {torch.get_default_dtype()}"
    for kind in ("cpu", "cuda"):
        yield f"{kind} {torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}"
    yield f"{torch.is_autocast_cache_enabled()} {torch.are_deterministic_algorithms_enabled()}"
    yield f"{torch.is_deterministic_algorithms_warn_only_enabled()} {torch.get_float32_matmul_precision()}"
    cuda, matmul, cudnn = torch.backends.cuda, torch.backends.cuda.matmul, torch.backends.cudnn
    yield f"{cuda.flash_sdp_enabled()} {cuda.mem_efficient_sdp_enabled()} {cuda.cudnn_sdp_enabled()}"
    yield f"{cuda.math_sdp_enabled()} {torch.backends.mkldnn.enabled}"
    yield f"{matmul.allow_fp16_reduced_precision_reduction} {matmul.allow_bf16_reduced_precision_reduction}"
    yield f"{cudnn.enabled} {cudnn.benchmark} {cudnn.deterministic} {torch.get_num_threads()}"
    yield functorch.get_hash().hex()
    yield sys.modules["torch._inductor.config"].get_hash().hex()  # loaded with AOTAutograd
    if torch.cuda.is_available():
        here = torch.cuda.current_device()
        yield f"{torch.cuda.get_device_properties(here)!r} {here} {torch.version.cuda}"


def settings(options: Options) -> str:
    """A digest of what is the same for all graphs that are compiled with these options."""
    here = config.load()
    try:
        tuned = hashlib.sha256(user_file().read_bytes()).hexdigest()
    except OSError:
        tuned = ""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    made: Any = options.compile_program
    chosen = (
        (made.__module__, made.__qualname__, options.leftover, sorted(map(repr, options.inductor.items()))),
        (options.partition, options.memory_budget),
        (here.arch, here.compilers, here.index_checks, here.dependent_launch, here.strict),
        (config.triton_settings(), tuned, stamp(PACKAGE)),
        (sys.version, torch.__version__, torch.version.git_version, triton),
    )
    return hashlib.sha256(repr(chosen).encode()).hexdigest()
