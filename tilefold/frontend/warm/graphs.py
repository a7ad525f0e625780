"""Graphs that an earlier process compiled: AOTAutograd is not asked again, and where their calls were kept nothing is
planned.

torch keeps what AOTAutograd found out about a graph of Dynamo's (`AOTAutogradCache`: aliases, what is differentiated,
its wrappers). What a back end compiled lies in its entries: here a `Kept`, with the text of the ATen graph. A `Kept`
from there runs the kept call (`warm.calls`); without one, or for other arguments, it compiles its graph. The key of an
entry is ours (`warm.key`).

torch's entries are pickled: as kernels in our own cache, they are read only where nobody else can have written them
(`files.private_folder`).

Considered: a second cache of AOTAutograd's wrappers beside torch's (all of them would have to be built again, for every
version of torch); Dynamo's precompilation (a file that users manage, for torch's own back end).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from tilefold import config
from tilefold.files import private_folder
from tilefold.frontend.capture.as_stored import with_stored
from tilefold.frontend.capture.cuda_graphs import Boxed, Kind
from tilefold.frontend.capture.written_back import WrittenBack
from tilefold.frontend.regions.assemble import CompiledGraph, Counts, Options, compilations, record
from tilefold.frontend.regions.outer import Outer
from tilefold.frontend.regions.summary import counted
from tilefold.frontend.warm import calls
from tilefold.frontend.warm.key import key, refused, settings
from tilefold.frontend.warm.text import read, written

try:
    from torch._functorch._aot_autograd import autograd_cache, graph_compile
    from torch._functorch._aot_autograd.aot_autograd_result import OutputCode
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler

    _ = autograd_cache.autograd_cache_key, graph_compile.collect_bw_donated_buffer_idxs
except (ImportError, AttributeError):  # a later torch that has moved its cache: nothing is kept
    autograd_cache, OutputCode = None, object  # type: ignore[assignment,misc]

log = logging.getLogger("tilefold")

#: Compiles an ATen graph of a kind, as if no earlier process had: what is called with its arguments, and the graph that
#: was compiled, which may have tapes.
Again = Callable[[Kind, torch.fx.GraphModule], tuple[Boxed, object]]


@dataclass(frozen=True, slots=True)
class Around:
    """What a compiled graph is called with: arguments that are first stored as they are read, and those that it writes
    back (`capture.as_stored`, `capture.written_back`)."""

    stored: tuple[int, ...]
    places: tuple[int, ...]

    def __call__(self, run: Boxed) -> Boxed:
        return WrittenBack(self.places).around(with_stored(run, list(self.stored)))


@dataclass
class Session:
    """One graph of Dynamo's that is kept. again: compiles one of its ATen graphs; told: is given records of those that
    an earlier process compiled; title: of the graph; settings: `warm.key.settings`."""

    again: Again
    told: Callable[[CompiledGraph], None]
    title: str
    settings: str

    @contextmanager
    def compiling(self, begun: Callable[[], None]) -> Iterator[None]:
        """AOTAutograd's run, which looks into torch's cache first; begun: called where nothing is there."""
        theirs, before = autograd_cache.autograd_cache_key, _session.set(self)

        def ours(gm: Any, args: Sequence[Any], how: Any, *others: Any) -> tuple[str, list[str]]:
            found = f"tilefold{key(gm, args, how, self.settings)}"
            where = Path(autograd_cache.AOTAutogradCache._get_tmp_dir_for_key(found))
            if not where.exists():
                begun()
            if not private_folder(where):
                raise autograd_cache.BypassAOTAutogradCache("others may have written what is there")
            return found, []

        # Buffers that are given away would make a backward that keeps its graph an error in processes that do not
        # compile it; ours frees what nobody else has.
        given_away = graph_compile.collect_bw_donated_buffer_idxs
        autograd_cache.autograd_cache_key = ours  # type: ignore[assignment]
        graph_compile.collect_bw_donated_buffer_idxs = lambda *_, **__: []
        try:
            with functorch.patch({"bundled_autograd_cache": True}):
                yield
        finally:
            autograd_cache.autograd_cache_key = theirs
            graph_compile.collect_bw_donated_buffer_idxs = given_away
            _session.reset(before)

    def aside(self) -> AbstractContextManager[object]:
        """Our part of that run: what Inductor compiles in it lies in a cache of its own."""
        return functorch.patch({"bundled_autograd_cache": False})  # type: ignore[no-any-return]

    def serializable(self, compiler: Callable[..., Any]) -> Callable[..., Any]:
        """A compiler whose results torch keeps."""
        made: Callable[..., Any] = SerializableAOTDispatchCompiler(OutputCode, compiler)
        return made

    def text(self, kind: Kind, graph: torch.fx.GraphModule) -> bytes | None:
        """An ATen graph, before it is changed; None where it has no form."""
        return calls.unless_it_fails(f"{self.title}_{kind}", lambda: zlib.compress(written(graph).encode(), 1))

    def kept(self, kind: Kind, text: bytes | None, around: Around, compiled: object, run: Boxed) -> Kept:
        """What torch keeps of a graph that has been compiled to `run`, around `compiled`."""
        name = hashlib.sha256(b"".join([self.settings.encode(), kind.encode(), text or b""])).hexdigest()[:32]
        found = next((c for c in reversed(compilations) if c.name == f"{self.title}_{kind}"), None)
        kept = Kept(kind, text, name, around, Counts() if found is None else counted([found]))
        kept.run = run
        if text is not None:
            keep_call(name, compiled)
        if kind == "backward" and not functorch.bundled_autograd_cache:  # AOTAutograd's run is over
            kept.bundling = Bundling()
        return kept


_session: ContextVar[Session | None] = ContextVar("tilefold_session", default=None)


class Kept(OutputCode):
    """A compiled ATen graph, called with a list of arguments; in torch's cache without what runs it."""

    def __init__(self, kind: Kind, text: bytes | None, name: str, around: Around, counts: Counts):
        self.kind, self.text, self.name, self.around, self.counts = kind, text, name, around, counts
        self.run: Boxed | None = None
        self._boxed_call = True  # it takes a list; torch's wrappers copy what an object has itself
        self.bundling: Bundling | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.kind, self.text, self.name, self.around, self.counts)

    def __call__(self, inputs: Any) -> Any:
        if self.bundling is not None:
            self.bundling.end()
            self.bundling = None
        assert self.run is not None
        return self.run(inputs)

    def prepare_for_serialization(self) -> None:
        """torch's: called with a copy, before that is pickled."""
        if self.text is None:
            raise autograd_cache.BypassAOTAutogradCache("its graph has no form")

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """torch's: it comes out of the cache."""
        session = _session.get()
        if session is None:
            raise autograd_cache.BypassAOTAutogradCache("a graph of Tilefold's, compiled elsewhere")
        self.run = self.around(Warm(self, session))
        name = f"{session.title}_{self.kind}"
        session.told(CompiledGraph(name, [], [], self.counts.left, earlier=self.counts))

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """torch's: it has none."""


class Bundling:
    """torch's setting that its cache keeps what a back end compiled, on until `end`: it saves a training graph when the
    backward is compiled, long after our call of AOTAutograd, and calls that backward at once."""

    def __init__(self) -> None:
        self._before: bool = functorch.bundled_autograd_cache
        functorch.bundled_autograd_cache = True

    def end(self) -> None:
        """As it was."""
        functorch.bundled_autograd_cache = self._before


class Warm:
    """A graph out of torch's cache: the kept call where it fits, else the graph compiled."""

    def __init__(self, kept: Kept, session: Session):
        self._kept, self._session = kept, session
        self._call: calls.Call | None = None
        self._looked = False
        self._compiled: Boxed | None = None
        self._lock = threading.RLock()

    def __call__(self, args: list[Any]) -> Any:
        made = None
        if self._call is not None and not torch._C._len_torch_dispatch_stack():
            made = self._call(args)
        elif self._compiled is None and _alone():
            with _disable_current_modes():
                made = self._by_call(args)
        return self._by_graph()(args) if made is None else made

    def _by_call(self, args: list[Any]) -> Any:
        if not self._looked:
            with self._lock:
                self._call = self._call if self._looked else calls.kept(self._kept.name)
                self._looked = True
        return None if self._call is None else self._call(args)

    def _by_graph(self) -> Boxed:
        with self._lock:
            if self._compiled is None:
                assert self._kept.text is not None
                graph = read(zlib.decompress(self._kept.text).decode())
                self._compiled, compiled = self._session.again(self._kept.kind, graph)
                keep_call(self._kept.name, compiled)
        return self._compiled


def keep_call(name: str, compiled: object) -> None:
    """Have the calls of a compiled graph kept, unless they are."""
    if isinstance(compiled, Outer) and not calls.path_of(name).exists():
        calls.Keeper(name, compiled)


def _alone() -> bool:
    """Whether no mode is to see the operators of a call; that of torch's which looks at the first call of a graph looks
    for operators of users, which no kept graph has."""
    modes = (torch._C._get_dispatch_stack_at(n) for n in range(torch._C._len_torch_dispatch_stack()))
    return all(type(mode).__name__ == "_AnalyzeCustomOpInputOutputMode" for mode in modes)


def session_of(
    gm: torch.fx.GraphModule, example_inputs: Sequence[object], options: Options, again: Again, title: str
) -> Session | None:
    """How a graph of Dynamo's is kept; None where it is not."""
    why = _refused(options) or refused(gm, example_inputs)
    if why:
        log.info("%s is not kept for other processes: %s", title, why)
        return None
    return Session(again, partial(record, options=options), title, settings(options))


def _refused(options: Options) -> str:
    if autograd_cache is None:
        return "this torch has no such cache"
    if not config.load().reuse_graphs:
        return "TILEFOLD_REUSE_GRAPHS is 0"
    context = TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        return "it is a bucket of DistributedDataParallel's"
    if "<" in getattr(options.compile_program, "__qualname__", "<"):
        return "its runner is no function of a module"
    if options.strict or options.tune or options.cuda_graphs is not None:
        return "it is tuned, or captured as a CUDA graph, or must be covered whole"
    where = Path(autograd_cache.AOTAutogradCache._get_tmp_dir())
    if not private_folder(where.parent) or not private_folder(where):
        return f"others may have written {where}"
    return ""
