"""Lower a functional ATen graph to the tensor IR.

`lower` visits the nodes once, in order: each becomes lazy values (views) or statements (everything
else). What comes out is normalised (`tensor.passes`) and carries the bindings between the graph's
arguments and results and the program's: inputs may be viewed with split axes, results are stored
in the memory order that the graph's metadata asks for.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from tilefold.algebra.dtypes import DType
from tilefold.algebra.expr import Const, Expr, Index, Sym, call, walk
from tilefold.errors import SourceLoc, UnsupportedError
from tilefold.frontend.operators import sizes as fx_sizes
from tilefold.frontend.operators.bindings import InputBinding, Lowered, OutputBinding, SymBinding
from tilefold.frontend.operators.context import Context, Value, dtype_of, meta_of
from tilefold.frontend.operators.create import as_constant
from tilefold.frontend.operators.images import ranks_of_images
from tilefold.frontend.operators.likeness import likeness
from tilefold.frontend.operators.source import location
from tilefold.frontend.operators.table import TABLE, Lowerer
from tilefold.runtime.normal_forms import normal_form
from tilefold.tensor.index_simplify import const, is_one, nonnegative, poly, product, same, simplify
from tilefold.tensor.ir import Program
from tilefold.tensor.sizes import estimate

#: Nodes that can be lowered, as what they have in common with others (`likeness`) and what lowers them; and how many
#: are remembered.
_supported: set[Hashable] = set()
MOST_SUPPORTED = 1 << 14


def supports(node: torch.fx.Node) -> str | None:
    """None if the node can be lowered, else the reason. Decided by lowering it alone, or one like it before."""
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    alike = likeness(node)
    key = None if alike is None else (alike, _rule(node))
    if key is not None and key in _supported:
        return None
    reason = _reason(node)
    if key is not None and reason is None:
        if len(_supported) >= MOST_SUPPORTED:
            _supported.clear()
        _supported.add(key)
    return reason


def _rule(node: torch.fx.Node) -> Lowerer | None:
    """What lowers the node's operator."""
    return TABLE.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None


def _reason(node: torch.fx.Node) -> str | None:
    ctx = Context()
    try:
        for n in node.all_input_nodes:
            if isinstance(n.meta.get("val"), torch.Tensor):
                ctx.values[n] = ctx.input(n.name, *meta_of(n))
            elif isinstance(n.meta.get("val"), tuple | list):
                ctx.values[n] = _parts(ctx, n)
        lower_node(ctx, node)
    except UnsupportedError as err:
        return err.message
    return None


def _parts(ctx: Context, n: torch.fx.Node) -> tuple[Value, ...]:
    """Stand-ins for the results of a node with several."""
    return tuple(
        ctx.input(f"{n.name}_{k}", *meta_of(n, k)) if isinstance(v, torch.Tensor) else ctx.scalar_value(0)
        for k, v in enumerate(n.meta["val"])
    )


def lower_node(ctx: Context, node: torch.fx.Node) -> None:
    """Append one node's meaning; UnsupportedError (with the user's line) where it has none."""
    ctx.loc = location(node)
    ctx.base = node.name.lstrip("_")
    ctx.origin = _origin(node)
    ctx.order = _channels_last(node, ctx.ranks)
    try:
        ctx.values[node] = _lowered(ctx, node)
    except UnsupportedError as err:
        if err.loc is None and ctx.loc is not None:
            raise UnsupportedError(err.message, loc=ctx.loc, hint=err.hint) from None
        raise


def _origin(node: torch.fx.Node) -> str:
    """The operator that a value comes from: of one of several results, the operator that has them."""
    while getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return str(node.target)


def _channels_last(node: torch.fx.Node, ranks: frozenset[int]) -> tuple[int, ...] | None:
    """The axes of an image in memory order, where its channels (axis 1) are contiguous: what is computed stays so."""
    fake = next(iter(_tensors_of(node)), None)
    if fake is None or fake.layout is not torch.strided or fake.dim() not in ranks:
        return None
    shape = fx_sizes.shape(fake.shape)
    order, packed = _memory_order(shape, fx_sizes.shape(fake.stride()))
    if not packed or order == tuple(sorted(order)) or order[-1] != 1:
        return None
    return (0, *range(2, len(shape)), 1)


def _lowered(ctx: Context, node: torch.fx.Node) -> Value | tuple[Value, ...]:
    if getattr(node.target, "__name__", "") == "getitem" and len(node.args) == 2:
        whole = ctx.values.get(node.args[0])  # type: ignore[arg-type]
        if isinstance(whole, tuple) and isinstance(node.args[1], int):
            return whole[node.args[1]]
    rule = _rule(node)
    if rule is None:
        raise UnsupportedError(f"operator {node.target} is not covered")
    for out in _tensors_of(node):
        dtype_of(out.dtype)
        if out.layout is not torch.strided:
            raise UnsupportedError(f"layout {out.layout} is not covered")
    made = rule(ctx, node)
    if isinstance(made, tuple):
        given = node.meta["val"]
        return tuple(
            _as_declared(ctx, v, meta_of(node, k)[1]) if isinstance(given[k], torch.Tensor) else v
            for k, v in enumerate(made)
        )
    return _as_declared(ctx, made, meta_of(node)[1])


def _as_declared(ctx: Context, v: Value, dtype: DType) -> Value:
    """A result in the dtype that the graph declares: statistics of a norm are stored in bf16 where eager does, although
    the norm itself keeps them in f32."""
    return v if v.dtype is dtype else Value(v.shape, dtype, lambda i: ctx.typed(v.at(i), dtype))


def _tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    vals = val if isinstance(val, tuple | list) else [val]
    return [v for v in vals if isinstance(v, torch.Tensor)]


def is_scalar(node: torch.fx.Node) -> bool:
    """Whether a node computes a size or another scalar, not a tensor."""
    val = node.meta.get("val")
    return isinstance(val, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def lower(gm: torch.fx.GraphModule, *, name: str = "program", names: Sequence[str] | None = None) -> Lowered:
    """Lower a whole graph whose nodes carry fake values in `meta["val"]`.

    names: what to call the placeholders (default: their own names). UnsupportedError names the
    operator and the user's line.
    """
    ctx = Context(ranks=ranks_of_images(gm))
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    titles = list(names) if names is not None else [n.name for n in placeholders]
    # symbols are named by the shape environment: keep them free
    ctx.taken |= {str(s) for n in gm.graph.nodes for s in free_symbols(n)}
    bound: list[InputBinding] = []
    for position, (node, title) in enumerate(zip(placeholders, titles, strict=True)):
        if isinstance(node.meta.get("val"), torch.Tensor):
            shape, dtype = meta_of(node)
            order = _channels_last(node, ctx.ranks) or ()
            ctx.values[node] = ctx.input(title, shape, dtype, order)
            bound.append(InputBinding(ctx.inputs[-1].name, position, (), order=order))
    results: Sequence[object] = ()
    single = False
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            bound += _attribute(ctx, gm, node)
        elif node.op == "call_function" and not is_scalar(node):
            lower_node(ctx, node)
        elif node.op == "output":
            single = not isinstance(node.args[0], tuple | list)
            results = [node.args[0]] if single else list(node.args[0])
        elif node.op not in ("placeholder", "call_function"):
            raise UnsupportedError(f"a {node.op} node ({node.target}) is not covered")
    outputs = _outputs(ctx, placeholders, results)
    raw = _program(ctx, name, outputs)
    ctx.values.clear()  # each of them knows the context: a collector would have to find both
    program, layouts = normal_form(raw, _contiguous_axes(placeholders, bound))
    program = replace(program, syms=_symbols(program))
    bound = [replace(b, axes=layouts[b.name]) for b in bound]
    used = {t for c in program.body for t in _reads(c.body)}
    rows = _row_major(placeholders, bound)
    inputs = tuple(replace(i, row_major=i.name in rows) for i in program.inputs if i.name in used)
    program = replace(program, inputs=inputs)
    bound = [b for b in bound if b.name in used]
    return Lowered(
        program, raw, tuple(bound), _bind(program, outputs, placeholders), outputs, len(placeholders), single
    )


def _contiguous_axes(placeholders: Sequence[torch.fx.Node], bound: Sequence[InputBinding]) -> dict[str, int] | None:
    """The axes along which neighbours of a GPU's tensors lie side by side; None on a CPU, whose library takes images
    in any order."""
    found: dict[str, int] = {}
    for b in bound:
        fake = b.constant if b.position is None else placeholders[b.position].meta["val"]
        assert isinstance(fake, torch.Tensor)
        if not is_gpu(fake.device.type):
            return None
        if fake.layout is torch.strided and all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            live = [n for n, s in enumerate(fake.shape) if s != 1]
            inner = min(reversed(live), key=fake.stride, default=0)
            found[b.name] = b.order.index(inner) if b.order else inner
    return found if bound else None


def _row_major(placeholders: Sequence[torch.fx.Node], bound: Sequence[InputBinding]) -> frozenset[str]:
    """Inputs whose memory has the axes that the program gives them in their order, without gaps."""
    found: set[str] = set()
    for b in bound:
        fake = b.constant if b.position is None else placeholders[b.position].meta["val"]
        assert isinstance(fake, torch.Tensor)
        if fake.layout is torch.strided and all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            laid = fake.permute(b.order) if b.order else fake
            found |= {b.name} if laid.is_contiguous() else set()
    return frozenset(found)


def is_gpu(device: str) -> bool:
    """Whether a type of device is a GPU's."""
    return device == "cuda"


def _reads(e: Expr) -> set[str]:
    return {getattr(n, "tensor", "") for n in walk(e)}


def free_symbols(node: torch.fx.Node) -> set[object]:
    found: set[object] = set()
    for v in [*_tensors_of(node), node.meta.get("val")]:
        sizes = [*v.shape, *v.stride()] if isinstance(v, torch.Tensor) and v.layout is torch.strided else [v]
        for s in sizes:
            if isinstance(s, torch.SymInt | torch.SymFloat):
                found |= s.node.expr.free_symbols
    return found


def _attribute(ctx: Context, gm: torch.fx.GraphModule, node: torch.fx.Node) -> list[InputBinding]:
    """A tensor held by the graph module: a literal if it is a scalar, else an extra input."""
    tensor = getattr(gm, str(node.target))
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"attribute {node.target} is not a tensor")
    literal = as_constant(ctx, tensor)
    if literal is not None:
        ctx.values[node] = literal
        return []
    ctx.values[node] = ctx.input(str(node.target).strip("_"), fx_sizes.shape(tensor.shape), dtype_of(tensor.dtype))
    return [InputBinding(ctx.inputs[-1].name, None, (), tensor)]


def _program(ctx: Context, name: str, outputs: Sequence[OutputBinding]) -> Program:
    names = tuple(dict.fromkeys(o.name for o in outputs if o.name is not None))
    p = Program(re.sub(r"\W", "_", name), tuple(ctx.inputs), ctx.sizes, tuple(ctx.body), names)
    return replace(p, syms=_symbols(p))


def _symbols(p: Program) -> tuple[str, ...]:
    found: set[str] = set()
    for e in (*p.sizes.values(), *(s for i in p.inputs for s in i.shape), *(c.body for c in p.body)):
        found |= {n.name for n in walk(e) if isinstance(n, Sym)}
    return tuple(sorted(found))


# -- results ----------------------------------------------------------------------------------


def _outputs(
    ctx: Context, placeholders: Sequence[torch.fx.Node], results: Sequence[object]
) -> tuple[OutputBinding, ...]:
    position = {n: k for k, n in enumerate(placeholders)}
    done: dict[torch.fx.Node, OutputBinding] = {}
    stored: dict[object, OutputBinding] = {}
    wholes = _wholes([r for r in results if isinstance(r, torch.fx.Node) and r not in position])
    out: list[OutputBinding] = []
    for r in results:
        if r is None:
            out.append(OutputBinding(None))
            continue
        if not isinstance(r, torch.fx.Node):
            raise UnsupportedError(f"a graph result that is a {type(r).__name__}")
        if r not in done:
            done[r] = OutputBinding(None, position[r]) if r in position else _stored(ctx, r, stored, wholes.get(r))
        out.append(done[r])
    return tuple(out)


#: Times that a result with gaps passes memory where it is stored and copied: written, read, written.
COPIED = 3


def _wholes(results: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    """What eager has in memory of which results with gaps are parts, where storing it takes less than copying them."""
    found = {r: whole for r in dict.fromkeys(results) if (whole := _whole(r)) is not None}
    parts: Counter[torch.fx.Node] = Counter()
    for r, whole in found.items():
        parts[whole] += COPIED * _elements(r)
    stored = {*results} - {*found}
    return {r: whole for r, whole in found.items() if whole in stored or _elements(whole) <= parts[whole]}


def _whole(node: torch.fx.Node) -> torch.fx.Node | None:
    """The packed tensor that a node with gaps is a view of, where the graph computes it."""
    own = node.meta["val"]
    if not isinstance(own, torch.Tensor) or own.layout is not torch.strided or _is_packed(own):
        return None
    n = node
    while n.op == "call_function" and n.all_input_nodes:
        before = n.args[0]
        val = before.meta.get("val") if isinstance(before, torch.fx.Node) else None
        values = val if isinstance(val, tuple | list) else [val]
        if not any(isinstance(v, torch.Tensor) and _in_memory_of(v, own) for v in values):
            break
        n = before  # type: ignore[assignment]
    whole = n.meta["val"]
    return n if n.op == "call_function" and isinstance(whole, torch.Tensor) and _is_packed(whole) else None


def _in_memory_of(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.layout is torch.strided and x.untyped_storage()._cdata == y.untyped_storage()._cdata and x.dtype is y.dtype


def _is_packed(x: torch.Tensor) -> bool:
    return _memory_order(fx_sizes.shape(x.shape), fx_sizes.shape(x.stride()))[1]


def _elements(n: torch.fx.Node) -> int:
    return math.prod(estimate(e) for e in fx_sizes.shape(n.meta["val"].shape))


def _stored(
    ctx: Context, node: torch.fx.Node, stored: dict[object, OutputBinding], whole: torch.fx.Node | None = None
) -> OutputBinding:
    """A statement that stores the node's value in the memory order of its metadata.

    `stored` has the results so far by their memory: views of a result are that memory in other strides. whole: what is
    stored of which the value is a part.
    """
    if whole is not None:
        part, of = node.meta["val"], whole.meta["val"]
        (offset,) = fx_sizes.shape((part.storage_offset() - of.storage_offset(),))
        shape, strides = fx_sizes.shape(part.shape), fx_sizes.shape(part.stride())
        return replace(_stored(ctx, whole, stored), shape=shape, strides=strides, offset=offset)
    value = ctx.values.get(node)
    if not isinstance(value, Value):
        raise UnsupportedError(f"result {node.name} is not a tensor")
    fake = node.meta["val"]
    shape, dtype = value.shape, value.dtype
    strides = fx_sizes.shape(fake.stride())
    order, packed = _memory_order(shape, strides)
    key = _memory(ctx, value, strides, order if packed else None, fake)
    if key in stored:
        return replace(stored[key], shape=shape, strides=strides)
    ctx.loc, ctx.base, ctx.origin = location(node), node.name.lstrip("_"), _origin(node)
    ctx.order = None
    dims: list[str] = []
    at: list[Expr] = [const(0)] * len(shape)
    for axis in order:
        names, index = ctx.indices((shape[axis],))
        dims += names
        at[axis] = index[0]
    e = ctx.typed(value.at(tuple(at)), dtype)
    name = ctx.emit_output(tuple(dims), dtype, e)
    stored[key] = OutputBinding(name, None, shape, strides, gaps=not packed)
    return stored[key]


def _memory(
    ctx: Context, value: Value, strides: tuple[Expr, ...], order: Sequence[int] | None, fake: torch.Tensor
) -> tuple[object, ...]:
    """What results that share memory have in common: where eager has them, and which element lies where. (Two copies
    of one value are apart: a caller may write to either.) order: None where memory is not packed."""
    own = fake.untyped_storage()._cdata
    if order is None:
        each = value.at(tuple(Index(f"@{n}") for n in range(len(strides))))
        return own, value.dtype, value.shape, strides, each
    at: list[Expr] = [const(0)] * len(strides)
    for n in order:
        outer = call("floordiv", Index("@"), strides[n])
        at[n] = ctx.simplify(outer if n == order[0] else call("mod", outer, value.shape[n]))
    return own, value.dtype, product([value.shape[n] for n in order]), value.at(tuple(at))


@functools.lru_cache(maxsize=1 << 12)
def _memory_order(shape: tuple[Expr, ...], strides: tuple[Expr, ...]) -> tuple[tuple[int, ...], bool]:
    """Axes from the largest stride to the smallest, and whether memory is packed in that order. Most tensors of a model
    are of few shapes.

    Axes of stride 0 (expanded) are left out: their elements are one.
    """
    live = [n for n, s in enumerate(shape) if not is_one(s)]
    moving = [n for n in live if not (isinstance(strides[n], Const) and strides[n] == const(0))]

    numbers = [int(s.value) for s in strides if isinstance(s, Const)]

    def larger(a: int, b: int) -> int:
        if len(numbers) == len(strides):
            return numbers[b] - numbers[a] or a - b
        if same(strides[a], strides[b]):
            return a - b
        return -1 if nonnegative(poly(strides[a] - strides[b], {})) else 1

    if any(isinstance(shape[n], Const) and shape[n] == const(0) for n in live):
        return tuple(live), True
    order = sorted(moving, key=functools.cmp_to_key(larger))
    if _packed(order, shape, strides):
        return tuple(order), True
    return tuple(live), _packed(live, shape, strides)


def _packed(order: Sequence[int], shape: tuple[Expr, ...], strides: tuple[Expr, ...]) -> bool:
    expected: Expr = const(1)
    for n in reversed(order):
        if not same(strides[n], expected):
            return False
        expected = simplify(expected * shape[n], {})
    return True


# -- symbols ----------------------------------------------------------------------------------


def _bind(
    p: Program, outputs: Sequence[OutputBinding], placeholders: Sequence[torch.fx.Node]
) -> tuple[SymBinding, ...]:
    """Where the value of every symbol is read; UnsupportedError where it is not an argument."""
    needed = set(p.syms)
    for o in outputs:
        needed |= {n.name for e in (*o.shape, *o.strides) for n in walk(e) if isinstance(n, Sym)}
    sources: dict[str, SymBinding] = {}
    for position, node in enumerate(placeholders):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            _offer(sources, val, SymBinding("", position))
    for position, node in enumerate(placeholders):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            for axis, s in enumerate(val.shape):
                if isinstance(s, torch.SymInt):
                    _offer(sources, s, SymBinding("", position, axis))
    missing = sorted(needed - set(sources))
    if missing:
        raise UnsupportedError(f"the size {missing[0]} is not an argument or an extent of one")
    return tuple(sources[s] for s in sorted(needed))


def _offer(sources: dict[str, SymBinding], s: torch.SymInt, binding: SymBinding) -> None:
    if s.node.expr.is_Symbol:
        name = str(s.node.expr)
        sources.setdefault(name, replace(binding, name=name))


def loc_of(lowered: Lowered, tensor: str) -> SourceLoc | None:
    """The user's line that a program result came from."""
    return next((c.loc for c in lowered.program.body if tensor in c.results), None)
