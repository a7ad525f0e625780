"""`tilefold.fuse`: compile one function whole, or say why not. `trace`: its lowering alone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, overload

import torch
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch.utils._pytree import tree_flatten

from tilefold.errors import SourceLoc, TilefoldError, UnsupportedError
from tilefold.frontend.fx_to_tensor import Lowered
from tilefold.frontend.options import RUNNERS
from tilefold.frontend.regions import STRICT_HINT, CompiledGraph, Options
from tilefold.frontend.specialise import Sizes, lower_specialised
from tilefold.frontend.torch_compile import aot, compile_captured
from tilefold.pipeline import compile_program
from tilefold.plan.gpu import Given

Fn = Callable[..., object]


class Fused:
    """A function or module compiled whole by Tilefold on its first call for each combination of
    dtypes and ranks. `graphs` holds what was compiled. Raises TilefoldError (with the user's line
    and the way out) where a graph break, an operator or a fold stands in the way; the backward pass
    may leave parts to other compilers. `given`: what a study decides for the GPU's kernels.
    """

    def __init__(self, fn: Fn, *, dynamic: bool | None = None, runner: str = "pipeline", given: Given | None = None):
        if runner not in RUNNERS:
            raise TilefoldError(f"unknown runner {runner!r}", hint=f"one of {', '.join(RUNNERS)}")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.dynamic = fn, dynamic
        self.graphs: list[CompiledGraph] = []
        compile_fused = functools.partial(compile_program, goal="fused", given=given)
        compiler = compile_fused if runner == "pipeline" else RUNNERS[runner]
        self._options = Options(compiler, strict=True, on_compiled=self.graphs.append)
        self._compiled: dict[Hashable, Fn] = {}

    def __call__(self, *args: object, **kwargs: object) -> object:
        key = signature(args, kwargs)
        run = self._compiled.get(key)
        if run is None:
            run = self._compiled[key] = self._compile()
        return translated(run, *args, **kwargs)

    def _compile(self) -> Fn:
        return torch.compile(
            own_copy(self.fn),
            backend=functools.partial(_strict, options=self._options),
            fullgraph=True,
            dynamic=self.dynamic,
        )


def _strict(gm: torch.fx.GraphModule, example_inputs: Sequence[object], *, options: Options) -> Fn:
    return compile_captured(gm, example_inputs, options)


@overload
def fuse(fn: Fn, *, dynamic: bool | None = ..., runner: str = ...) -> Fused: ...
@overload
def fuse(fn: None = ..., *, dynamic: bool | None = ..., runner: str = ...) -> Callable[[Fn], Fused]: ...


def fuse(
    fn: Fn | None = None, *, dynamic: bool | None = None, runner: str = "pipeline"
) -> Fused | Callable[[Fn], Fused]:
    """Compile a function or module whole: `@fuse`, `@fuse(dynamic=False)` or `fuse(model)`.

    dynamic: sizes that were seen to change become symbolic, and one kernel serves them all (None,
    as torch.compile does); all are from the start (True); none ever is (False). runner:
    "pipeline", or "interpreter" for the slow defining semantics.
    """
    if fn is None:
        return lambda f: Fused(f, dynamic=dynamic, runner=runner)
    return Fused(fn, dynamic=dynamic, runner=runner)


def signature(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """What a compiled function may not share: dtypes, ranks and devices of tensors, types of the rest."""
    flat = args if not kwargs and all(isinstance(a, torch.Tensor) for a in args) else tree_flatten((args, kwargs))[0]
    return tuple((a.dtype, a.ndim, a.device.type) if isinstance(a, torch.Tensor) else type(a) for a in flat)


def own_copy(fn: Fn) -> Fn:
    """A copy of a plain function with its own code object: Dynamo keys its caches and limits on it."""
    if not isinstance(fn, types.FunctionType):
        return fn
    code = fn.__code__.replace(co_name=fn.__code__.co_name)
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def translated(run: Fn, *args: object, **kwargs: object) -> object:
    """Call, turning Dynamo's wrappers of our errors, and its own, into TilefoldError."""
    try:
        return run(*args, **kwargs)
    except BackendCompilerFailed as err:
        if isinstance(err.inner_exception, TilefoldError):
            raise err.inner_exception from None
        raise
    except Unsupported as err:
        raise UnsupportedError(
            f"the function cannot be captured whole: {_first_line(err)}", loc=_user_line(err), hint=STRICT_HINT
        ) from err


def _first_line(err: Exception) -> str:
    return next((ln.strip() for ln in str(err).splitlines() if ln.strip()), type(err).__name__)


def _user_line(err: Unsupported) -> SourceLoc | None:
    """The innermost frame of the user's code at a graph break."""
    frames = [f for f in err.real_stack or () if f.filename and "/torch/" not in f.filename]
    if not frames:
        return None
    last = frames[-1]
    return SourceLoc(last.filename, last.lineno or 0, last.line or "")


def trace(
    fn: Fn, *args: object, dynamic: bool | Literal["auto"] = False, name: str | None = None, **kwargs: object
) -> Lowered:
    """Capture a function whole and lower it (inference, nothing is compiled or cached).

    dynamic: keep sizes symbolic. UnsupportedError names what is not covered and the user's line.
    """
    found: list[Lowered] = []
    title = name or str(getattr(fn, "__name__", type(fn).__name__))

    def inference(graph: torch.fx.GraphModule, titles: Sequence[str] | None) -> Fn:
        fits = titles is not None and len(titles) == len(graph.graph.find_nodes(op="placeholder"))
        found.append(lower_specialised(graph, Sizes.of(graph), name=title, names=titles if fits else None))
        return graph.forward

    def capture(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Fn:
        return aot(gm, example_inputs, inference)

    target = fn.fn if isinstance(fn, Fused) else fn
    run = torch.compile(
        own_copy(target), backend=capture, fullgraph=True, dynamic=None if dynamic == "auto" else dynamic
    )
    with torch.no_grad():
        translated(run, *args, **kwargs)
    if not found:
        raise UnsupportedError(f"{title} computes nothing on tensors", hint="it must take and return tensors")
    return found[-1]
