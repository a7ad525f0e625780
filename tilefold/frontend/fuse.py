"""`tilefold.fuse`: compile one function whole, or say why not. `trace`: its lowering alone."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, get_args, overload

import torch
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch.autograd import forward_ad
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack
from torch.utils._pytree import tree_flatten

from tilefold.errors import NoRoomError, SourceLoc, TilefoldError, UnsupportedError
from tilefold.frontend.capture.options import RUNNERS
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.operators.source import FRONTEND, TORCH
from tilefold.frontend.regions.assemble import STRICT_HINT, CompiledGraph, Options
from tilefold.frontend.regions.specialise import Sizes, lower_specialised
from tilefold.frontend.registered.fused import named
from tilefold.frontend.registered.nested import alone, in_graph, simple
from tilefold.frontend.torch_compile import aot, compile_captured
from tilefold.log import warn
from tilefold.pipeline import Goal, compile_program
from tilefold.plan.gpu_forms import Given

Fn = Callable[..., Any]
#: Arguments that have no tensors in them, or are one.
_LEAVES = (torch.Tensor, torch.nn.Module, type(None), bool, int, float, str)
#: Modes under which tensors have no values, or operators are written down.
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
#: Reasons for running a function as it is that were given.
_told: set[str] = set()
#: Where Python's own modules are.
_STDLIB = sysconfig.get_path("stdlib")
P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)


class Fused(Generic[P, R]):
    """A function compiled whole by Tilefold on its first call for each combination of dtypes and ranks.

    `graphs` holds what was compiled. Raises TilefoldError (with the user's line and the way out) where a graph
    break, an operator or a fold stands in the way; the backward pass may leave parts to other compilers. Under
    `torch.func.vmap`, `grad`, `jvp` and the like, which transform operators one by one, and under `make_fx`, fake
    tensors and other dispatch modes (counters of operations), which want to see operators, the function itself runs.
    `goal`: as `fuse` has it. `given`: what a study decides for the GPU's kernels.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        dynamic: bool | None = None,
        runner: str = "pipeline",
        goal: Goal = "fused",
        given: Given | None = None,
        strict: bool = True,
    ):
        if runner not in RUNNERS:
            raise TilefoldError(f"unknown runner {runner!r}", hint=f"one of {', '.join(RUNNERS)}")
        check_goal(goal)
        check_dynamic(dynamic)
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.dynamic, self.runner, self.goal, self.given = fn, dynamic, runner, goal, given
        self.graphs: list[CompiledGraph] = []
        compile_fused = functools.partial(compile_program, goal=goal, given=given)
        compiler = compile_fused if runner == "pipeline" else RUNNERS[runner]
        self._options = Options(compiler, strict=strict, on_compiled=self.graphs.append)
        self._compiled: dict[Hashable, Callable[P, R]] = {}
        self._gradients: dict[str, Fused[..., Any]] = {}
        self._method: Fn | None = None
        self.name = named(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # in a graph of somebody else's
            whole = simple(args, kwargs) and alone(self.name)
            return in_graph(self.name, args, kwargs) if whole else self.fn(*args, **kwargs)
        return self.fn(*args, **kwargs) if transformed() else self.run(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The compiled function."""
        key = signature(args, kwargs)
        run = self._compiled.get(key)
        if run is None:
            check_arguments(self.fn, args, kwargs)
            run = self._compiled[key] = self._compile(self.dynamic)
        try:
            return cast(R, translated(run, *args, **kwargs))
        except FailOnRecompileLimitHit:  # Dynamo counts what it compiles for one code object
            run = self._compiled[key] = self._compile(True if self.dynamic is None else self.dynamic)
            return cast(R, translated(run, *args, **kwargs))
        except UnsupportedError as err:
            raise _of_shards(self.fn, err) from err.__cause__
        except NoRoomError as err:  # the disk's fault, not the function's
            if err.message not in _told:
                _told.add(err.message)
                warn("%s runs operator by operator: %s", self.name, err)
            self._compiled[key] = self.fn
            return self.fn(*args, **kwargs)

    def gradient(self, call: str, make: Callable[[], Fn]) -> Fn:
        """The compiled gradient of a call, made of the function that `make` gives if there is none."""
        if call not in self._gradients:
            self._gradients[call] = Fused(
                make(), dynamic=self.dynamic, runner=self.runner, goal=self.goal, strict=False
            )
        return self._gradients[call].run

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A method of the class that it is defined in."""
        if instance is None:
            return self
        if torch.compiler.is_compiling():  # Dynamo knows of methods of functions only
            return functools.partial(cast(Fn, self), instance)
        if self._method is None:
            self._method = _method_of(self)
        return types.MethodType(self._method, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused[P, R]:
        """Functions are their own copies, as in Python; a copied object has other values, so no code is copied."""
        fn = copy.deepcopy(self.fn, memo)
        return self if fn is self.fn else Fused(fn, **self._asked())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as functions are, by the name it was decorated under; otherwise its function is, and fused anew."""
        here = _at_name(self)
        if here is self:
            return cast(Any, self).__qualname__
        whose = here if isinstance(here, Fused) and here.fn is self.fn else self.fn
        return _fused_again, (whose, self._asked())

    def _asked(self) -> dict[str, Any]:
        """The options that it was made with."""
        return {"dynamic": self.dynamic, "runner": self.runner, "goal": self.goal, "given": self.given}

    def _compile(self, dynamic: bool | None) -> Callable[P, R]:
        return torch.compile(
            own_copy(self.fn.forward if isinstance(self.fn, torch.nn.Module) else self.fn),
            backend=functools.partial(_strict, options=self._options),
            fullgraph=True,
            dynamic=dynamic,
        )


#: Why a branch on a value of a tensor is not captured.
_UNKNOWN = "what it does depends on a value that only the run knows"


def _of_shards(fn: object, err: UnsupportedError) -> UnsupportedError:
    """The error itself, or another where parts of a module are sharded: what gathers them is what stood in the way."""
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, torch.nn.Module):
        return err
    part = next((name for name, m in module.named_modules() if name and isinstance(m, fsdp.FSDPModule)), None)
    if part is None:
        return err
    return UnsupportedError(
        f"part {part} is sharded by fully_shard, and what gathers its parameters cannot be captured: {err.message}",
        hint="fuse what is sharded, part by part, or use torch.compile(backend='tilefold')",
    )


def _method_of(fused: Fused[..., Any]) -> Fn:
    """A function that calls it: of methods, torch.compile asks in which file their function is."""

    @functools.wraps(fused.fn)
    def method(*args: Any, **kwargs: Any) -> Any:
        return fused(*args, **kwargs)

    method._fused = fused  # type: ignore[attr-defined]
    return method


def _fused_again(fn: Fn, options: dict[str, Any]) -> Fused[..., Any]:
    return Fused(plain(fn), **options)


def _at_name(fn: object) -> object:
    """What the module of a function has at its qualified name; None: nothing."""
    found: object = sys.modules.get(getattr(fn, "__module__", None) or "")
    for part in getattr(fn, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found


class FusedModule:
    """What `fuse` makes of a module, besides the module's own class: the same parameters, called through `Fused`.

    It shares everything with a plain view of itself, the module that is compiled; with the module that was given it
    shares parameters, buffers and children.
    """

    _fused: Fused[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compiled; hooks run around it, as around any module."""
        return self._fused(*args, **kwargs)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """What was compiled."""
        return self._fused.graphs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are made of the module, and fused anew."""
        f = self._fused
        plain = object.__new__(type(f.fn))
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k != "_fused"}
        return _fused_module, (plain, f.dynamic, f.runner, f.goal)


@functools.cache
def _module_class(plain: Hashable) -> type:
    assert isinstance(plain, type)
    return type(plain.__name__, (FusedModule, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__})


def _fused_module(module: M, dynamic: bool | None, runner: str, goal: Goal) -> M:
    view = object.__new__(type(module))
    view.__dict__ = dict(module.__dict__)
    made: Any = object.__new__(_module_class(cast(Hashable, type(module))))
    made.__dict__ = view.__dict__  # one dictionary: train() on one is train() on the other
    made.__dict__["_fused"] = Fused(view, dynamic=dynamic, runner=runner, goal=goal)
    return cast(M, made)


def plain(fn: Any) -> Any:
    """The function or module itself, where it is one that was fused."""
    fused = fused_in(fn)
    if fused is None:
        return fn
    return types.MethodType(fused.fn, fn.__self__) if isinstance(fn, types.MethodType) else fused.fn


def fused_in(fn: object) -> Fused[..., Any] | None:
    """What a fused function, method or module calls; None where it is not fused."""
    fn = fn.__func__ if isinstance(fn, types.MethodType) else fn
    found = fn if isinstance(fn, Fused) else getattr(fn, "_fused", None)
    return found if isinstance(found, Fused) else None


def goal_of(fn: object) -> Goal | None:
    """What a fused function or module was compiled for; None where it is not fused."""
    fused = fused_in(fn)
    return None if fused is None else fused.goal


def transformed() -> bool:
    """Whether a transformation of functions (vmap, grad, jvp ...), forward differentiation, a tracer of operators
    (`make_fx`, `torch.jit.trace`, fake tensors, which have no memory) or another mode that Dynamo does not capture
    under is under way."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    if torch._C._get_tracing_state() is not None:
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any_torch_dispatch_mode_on_stack() or any(torch._C._get_dispatch_mode(k) for k in _TRACERS)


def signature_of(fn: Fn) -> inspect.Signature | None:
    """A function's signature; None where it has none, as builtins."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return None


def check_arguments(fn: Fn, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """TilefoldError where a function cannot be called with these: said before Dynamo says it at length."""
    wanted = signature_of(fn)
    if wanted is None:
        return
    try:
        wanted.bind(*args, **kwargs)
    except TypeError as err:
        name = getattr(fn, "__name__", type(fn).__name__)
        hint = None if args or kwargs else "call it with the arguments that the function takes"
        raise TilefoldError(f"the arguments do not fit {name}{wanted}: {err}", hint=hint) from None


def check_function(fn: object, taker: str) -> None:
    """TilefoldError where `fn` is nothing that can be compiled; `taker`: the public function that was given it."""
    if isinstance(fn, type):
        raise TilefoldError(f"{taker} takes a function or a module, not the class {fn.__name__}", hint="an instance")
    if isinstance(fn, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise TilefoldError(f"{taker} takes what Python runs, not TorchScript", hint="give what was scripted")
    if not callable(fn):
        raise TilefoldError(f"{taker} takes a function or a module, not {type(fn).__name__}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        kind = "a generator" if inspect.isgeneratorfunction(fn) else "asynchronous"
        name = getattr(fn, "__name__", type(fn).__name__)
        hint = "give the function that computes"
        raise TilefoldError(f"{taker} takes a function that returns tensors, and {name} is {kind}", hint=hint)


def check_goal(goal: object) -> None:
    """TilefoldError for a goal that there is not."""
    if goal not in get_args(Goal):
        raise TilefoldError(f"unknown goal {goal!r}", hint=f"one of {', '.join(get_args(Goal))}")


def check_dynamic(dynamic: object) -> None:
    """TilefoldError where `dynamic` is something else than torch.compile takes: any object would do for True."""
    if not (dynamic is None or isinstance(dynamic, bool)):
        raise TilefoldError(
            f"dynamic is {dynamic!r}", hint="True (all sizes symbolic), False (none), None (those that change)"
        )


def _strict(gm: torch.fx.GraphModule, example_inputs: Sequence[object], *, options: Options) -> Fn:
    return compile_captured(gm, example_inputs, options)


@overload
def fuse(  # type: ignore[overload-overlap]
    fn: M, *, dynamic: bool | None = ..., runner: str = ..., goal: Goal = ...
) -> M: ...
@overload
def fuse(fn: Callable[P, R], *, dynamic: bool | None = ..., runner: str = ..., goal: Goal = ...) -> Fused[P, R]: ...
@overload
def fuse(
    fn: None = ..., *, dynamic: bool | None = ..., runner: str = ..., goal: Goal = ...
) -> Callable[[Callable[P, R]], Fused[P, R]]: ...


def fuse(fn: Any = None, *, dynamic: bool | None = None, runner: str = "pipeline", goal: Goal = "fused") -> Any:
    """Compile a function, method or module whole: `@fuse`, `@fuse(dynamic=False)` or `fuse(model)`.

    dynamic: sizes that were seen to change become symbolic, and one kernel serves them all (None,
    as torch.compile does); all are from the start (True); none ever is (False). runner:
    "pipeline", or "interpreter" for the slow defining semantics. goal: one kernel wherever that is legal ("fused"),
    or, as torch.compile has it, products left to the machine's library where they are faster alone ("fast"). A module
    comes back as one of its own class with the same parameters, a staticmethod or classmethod as one.
    """
    check_dynamic(dynamic)
    if fn is None:
        check_goal(goal)
        return functools.partial(fuse, dynamic=dynamic, runner=runner, goal=goal)
    if isinstance(fn, staticmethod | classmethod):  # `@fuse` above the decorator of a class
        return type(fn)(fuse(fn.__func__, dynamic=dynamic, runner=runner, goal=goal))
    check_function(fn, "fuse")
    fn = plain(fn)
    if isinstance(fn, torch.nn.Module):
        return _fused_module(fn, dynamic, runner, goal)
    return Fused(fn, dynamic=dynamic, runner=runner, goal=goal)


def signature(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """What a compiled function may not share: dtypes, ranks and devices of tensors, types of the rest."""
    plain = not kwargs and all(isinstance(a, _LEAVES) for a in args)  # taking apart is 13 to 20 us a call
    flat = args if plain else tree_flatten((args, kwargs))[0]
    return tuple((a.dtype, a.ndim, a.device.type) if isinstance(a, torch.Tensor) else type(a) for a in flat)


def own_copy(fn: Fn) -> Fn:
    """A function that does the same, with its own code object: Dynamo keys its caches and limits on that."""
    if not isinstance(fn, types.FunctionType):
        target = fn

        def fn(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **kwargs)

    assert isinstance(fn, types.FunctionType)
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
    except TorchRuntimeError as err:
        got = re.search(r"\bgot (\w*(?:Error|Exception)\b.*)", str(err))  # behind what Dynamo did when it happened
        what = got[1] if got else _first_line(err)
        raise TilefoldError(f"the function fails on these arguments: {what}", loc=_user_line(err)) from err
    except Unsupported as err:
        # torch 2.11 says so of a branch on `.item()`, later ones raise the UserError below
        unknown = "data-dependent expression" in str(err)
        why = _observed(err) or (_UNKNOWN if unknown else _why(err))
        builtin = re.search(r"Python builtin `([\w.]+)`|builtin operator `(\w+)`", str(err))
        taken = f"take {builtin[1] or builtin[2]} out of the function, or " if builtin else ""
        raise UnsupportedError(
            f"the function cannot be captured whole: {why}", loc=_user_line(err), hint=taken + STRICT_HINT
        ) from err
    except UserError as err:  # as for a branch on `.item()`, of whose value a graph knows nothing
        unknown = "data-dependent" in str(err)
        why = _UNKNOWN if unknown else _first_line(err)
        raise UnsupportedError(
            f"the function cannot be captured whole: {why}", loc=_user_line(err), hint=STRICT_HINT
        ) from err
    except InternalTorchDynamoError as err:  # as for a function that calls itself without an end
        raise UnsupportedError(f"PyTorch cannot capture the function: {_first_line(err)}") from err


def _observed(err: Unsupported) -> str | None:
    """The error that the function raised on its arguments, which Dynamo has as the cause of its own; None: no such."""
    name = type(err.__cause__).__name__
    if not name.startswith("Observed"):
        return None
    said = re.search(r"raised exception \w+\((.*)\)$|ConstantVariable\(str: (.*)\)$", str(err.__cause__), re.DOTALL)
    what = _unquoted(said[1] or said[2] or "") if said else ""
    error = name.removeprefix("Observed").replace("ErrorError", "Error")
    return f"it raises {error}: {what}" if what else f"it raises {error}"


def _why(err: Unsupported) -> str:
    """Dynamo's name of what breaks a graph; where only its explanation says what in the function that is, both."""
    title = _first_line(err)
    found = re.search(r"^\s*Explanation: (.*?)\.?(?: \(has_kwargs \w+\))?$", str(err), re.MULTILINE)
    return f"{title}: {found[1]}" if found and "`" in found[1] and "`" not in title else title


def _unquoted(text: str) -> str:
    """What a string's `repr` stands for; other text as it is."""
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return found if isinstance(found, str) else text


def _first_line(err: Exception) -> str:
    return next((ln.strip() for ln in str(err).splitlines() if ln.strip()), type(err).__name__)


def _user_line(err: Unsupported | TorchRuntimeError | UserError) -> SourceLoc | None:
    """The innermost frame of the user's code at a graph break: neither torch's nor Python's own, as of `logging`."""
    stack = getattr(err, "real_stack", None) or ()
    frames = [f for f in stack if f.filename and "/torch/" not in f.filename and not f.filename.startswith(FRONTEND)]
    if not frames:  # of functions that we compile: attention
        return SourceLoc.of_caller(FRONTEND, TORCH)
    users = [f for f in frames if not f.filename.startswith(_STDLIB) or "site-packages" in f.filename]
    last = (users or frames)[-1]
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

    target = plain(fn)
    check_function(target, "trace")
    check_dynamic(None if dynamic == "auto" else dynamic)
    check_arguments(target, args, kwargs)
    run = torch.compile(
        own_copy(target), backend=capture, fullgraph=True, dynamic=None if dynamic == "auto" else dynamic
    )
    with torch.no_grad():
        translated(run, *args, **kwargs)
    if not found:
        raise UnsupportedError(f"{title} computes nothing on tensors", hint="it must take and return tensors")
    return found[-1]
