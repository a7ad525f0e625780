"""What Tilefold does not cover, compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from tilefold.frontend.operators.context import attrs
from tilefold.frontend.operators.prefix import prefixes_op
from tilefold.frontend.operators.prefix_gradient import prefix_gradient_op
from tilefold.frontend.regions.added_rows import crowded
from tilefold.frontend.regions.extract import Extracted
from tilefold.frontend.regions.guard import Guarded, Part
from tilefold.frontend.regions.partition import LIBRARY, Group, draws_numbers, is_host_number, is_own, operators
from tilefold.frontend.regions.scans import SCANS

#: Leftovers of fewer operators than this run op by op: compiling them costs more than it gives.
WORTH_INDUCTOR = 2
#: Elements of a row that a kernel of Inductor's sorts, at most. It sorts up to 512 so (torch 2.11 to 2.13,
#: `ir.Sort.create`), by a network of which Triton writes every step out: eight rows of 512 in a thread block are 48,000
#: lines of PTX and 38 s of a slow core, of 256 21,000 and 10.
MOST_SORTED = 256
_SORTS = frozenset({torch.ops.aten.sort.default, torch.ops.aten.sort.stable})


def compile_leftover(
    group: Group, extracted: Extracted, part: Part, config: Mapping[str, object]
) -> Callable[..., object] | None:
    """The group as a callable; None where op by op is better or the only way. config: Inductor's, for this alone."""
    few = operators(group) - _in_library(group) < WORTH_INDUCTOR and not _generated(group)
    if all(map(is_host_number, group.nodes)):
        return None
    if few or _draws_numbers(group) or _of_ours(group) or crowded(group) or any(map(_rounds_each, group.nodes)):
        return None
    run = part.attempt(lambda: _compiled(extracted, config))
    return None if run is None else Guarded(part, run, extracted.module)


def _compiled(extracted: Extracted, config: Mapping[str, object]) -> Callable[..., object]:
    import torch._inductor.config as inductor_config  # noqa: PLC0415 (a second to load)
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    fakes = [_as_it_is_known(n.meta["val"]) for n in extracted.inputs]
    # a tensor that the part itself makes must be fake too; no mode is on while a backward graph is compiled
    mode = detect_fake_mode([n.meta.get("val") for n in extracted.module.graph.nodes])
    with mode or nullcontext():
        module = make_fx(extracted.module, decomposition_table=select_decomp_table())(*fakes)
    module.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(extracted.results)))
    with _no_strides_reported(), inductor_config.patch(dict(config)):
        compiled = compile_fx_inner(module, fakes)
    return lambda *args: compiled(list(args))


def _as_it_is_known(fake: torch.Tensor | int | torch.SymInt) -> torch.Tensor | int | torch.SymInt:
    """A size that was found to be another's, as that one's symbol: tensors have it in their sizes, and Inductor would
    give the value to the symbol that the argument was made for."""
    if not isinstance(fake, torch.SymInt):
        return fake
    node = fake.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


@contextmanager
def _no_strides_reported() -> Iterator[None]:
    """Inductor tells AOTAutograd the strides of what it compiled, which takes them for those of the whole forward."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    reported, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = reported


def _in_library(group: Group) -> int:
    """How many operators of a group a library computes, and copies of their operands into another layout. (Inductor
    also checks the strides of their results against those of its own shape functions, which do not know every layout
    that torch gives.)"""
    copies = [n for n in group.nodes if n.target is torch.ops.aten.clone.default]
    of_library = [n for n in group.nodes if n.target in LIBRARY]
    return len(of_library) + sum(all(u in of_library for u in n.users) for n in copies)


def _generated(group: Group) -> bool:
    """Whether a single operator is not left to eager on a GPU: its scans take twice Inductor's time, its sorts of short
    rows are four kernels, and what adds up at indices sorts them first, where atomic additions do (deterministic mode
    keeps to the sort, as eager)."""
    slow = [n for n in group.nodes if n.target in SCANS or _adds_up(n) or _sorts_short_rows(n)]
    return any(n.all_input_nodes[0].meta["val"].device.type == "cuda" for n in slow)


def _adds_up(n: torch.fx.Node) -> bool:
    """Whether a node adds values to elements at indices that may repeat, in any order."""
    return _accumulates(n) and not torch.are_deterministic_algorithms_enabled()


def _accumulates(n: torch.fx.Node) -> bool:
    return n.target is torch.ops.aten.index_put.default and len(n.args) > 3 and n.args[3] is True


def _rounds_each(n: torch.fx.Node) -> bool:
    """Whether a node adds up in 16 bits. Inductor's additions are rounded one by one: those of 262,144 numbers at 32
    places had half of the sums left (H100), where eager sorts and sums in float32."""
    val = n.meta.get("val")
    return _accumulates(n) and isinstance(val, torch.Tensor) and val.dtype in (torch.bfloat16, torch.float16)


def _sorts_short_rows(n: torch.fx.Node) -> bool:
    """Whether a node sorts rows that a thread block holds whole."""
    if n.target not in _SORTS:
        return False
    a, x = attrs(n), n.all_input_nodes[0].meta["val"]
    extent = x.shape[a["dim"]] if x.dim() else 1
    return isinstance(extent, int) and 1 < extent <= MOST_SORTED


def _of_ours(group: Group) -> bool:
    """Whether an operator of Tilefold's is in the group that Inductor does not know."""
    return any(is_own(n) and n.target not in (prefixes_op, prefix_gradient_op) for n in group.nodes)


def _draws_numbers(group: Group) -> bool:
    """Whether a random operator is in the group: op by op it draws eager's numbers."""
    return any(draws_numbers(n) for n in group.nodes)
