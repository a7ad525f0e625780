"""Random operators as functions of seeds.

While a graph is traced, each random operator becomes arithmetic on `tilefold::random` of a seed of its own
(`decompositions`); afterwards the seeds of a graph are drawn by one operator (`gather_seeds`), which no region waits
for. A forward saves the seed of a dropout and no mask, and the backward computes the mask again. The numbers are not
eager's, as Inductor's are not; with Inductor's option `fallback_random` nothing here is done, and they are.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch.utils.checkpoint import CheckpointPolicy

from tilefold.frontend.capture.few_bits import few_bits
from tilefold.frontend.operators.random import LIMIT, MARK, SEEDS, random16_op, random_op, seed_op

aten = torch.ops.aten
_BITS = {torch.float16: 11, torch.bfloat16: 8}  # of a significand: so that no number is rounded up to 1
_STEP = 1.0 / LIMIT
#: Most that `randint` chooses among: its bias is this over 2^48.
_CHOICES = 1 << 32
#: Written by torch by means of `rand_like` and `randn_like`.
_BY_OTHERS = (aten.exponential, aten.geometric, aten.log_normal, aten.cauchy, aten.normal)


def eagers_numbers(inductor: Mapping[str, object]) -> bool:
    """Whether random numbers must be eager's, by Inductor's options or its configuration where that is loaded."""
    loaded = getattr(sys.modules.get("torch._inductor.config"), "fallback_random", False)
    return bool(inductor.get("fallback_random", loaded))


def decompositions() -> Mapping[Any, Callable[..., object]]:
    """Of the random operators that reach AOTAutograd."""
    return {**get_decompositions(list(_BY_OTHERS)), **_OWN}


def gather_seeds(graph: torch.fx.Graph) -> int:
    """Draw all seeds of a device at once, and save them for a backward: never what is drawn from them. How many there
    are."""
    few_bits(graph)
    found: dict[torch.device, list[torch.fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=seed_op):
        found.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    for device, nodes in found.items():
        first = nodes[0].meta["val"]
        like = _plain(nodes[0].meta)
        with graph.inserting_before(nodes[0]):
            kind: dict[str, Any] = {"dtype": torch.int64, "device": device}
            drawn = graph.call_function(aten.randint.low, (*SEEDS, [len(nodes), 2]), kind)
            apart = graph.call_function(aten.unbind.int, (drawn,))
        drawn.meta = {**like, "val": first.new_empty((len(nodes), 2))}
        apart.meta = {**like, "val": list(drawn.meta["val"].unbind())}
        for k, node in enumerate(nodes):
            with graph.inserting_before(node):
                picked = graph.call_function(operator.getitem, (apart, k))
            picked.meta = {**_plain(node.meta), "val": apart.meta["val"][k]}
            node.replace_all_uses_with(picked)
            graph.erase_node(node)
    for node in (n for op in (random_op, random16_op) for n in graph.find_nodes(op="call_function", target=op)):
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    return sum(map(len, found.values()))


def _plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a node of the forward knows that is saved, wherever the operator that asked for the seed is."""
    kept = {k: v for k, v in meta.items() if k not in ("partitioner_tag", "ac_graph_id")}
    return kept | {"recompute": CheckpointPolicy.MUST_SAVE, MARK: True}


# -- operators --------------------------------------------------------------------------------


def _numbers(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 numbers in [0, LIMIT) of a new seed."""
    return random_op(seed_op(device), list(size))


def _laid_out(x: torch.Tensor, make: Callable[[Sequence[int]], torch.Tensor]) -> torch.Tensor:
    """What `make` gives for a shape, with the order of x in memory."""
    order = compute_elementwise_output_logical_to_physical_perm(x)[0]
    made = make([x.shape[k] for k in order])
    return made if order == sorted(order) else made.permute([order.index(k) for k in range(x.dim())])


def _uniform(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1) with as many bits as dtype has, 48 for float64."""
    drawn = _numbers(size, device)
    if dtype is torch.float64:
        return (drawn.to(dtype) + _numbers(size, device).to(dtype) * _STEP) * _STEP
    if dtype in _BITS:
        steps = 2.0 ** _BITS[dtype]
        return (torch.floor(drawn.to(torch.float32) * (_STEP * steps)) / steps).to(dtype)
    return drawn.to(torch.float32) * _STEP


def _normal(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Box and Muller's: sqrt(-2 ln u) cos(2 pi v), u in (0, 1]."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    u = (_numbers(size, device).to(wide) + 1.0) * _STEP
    v = _numbers(size, device).to(wide) * _STEP
    return (torch.sqrt(-2.0 * torch.log(u)) * torch.cos(2 * math.pi * v)).to(dtype)


def _bernoulli(x: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> torch.Tensor:
    """1 with probability p, by steps of 2^-24."""
    if generator is not None:
        return NotImplemented
    below = round(p * LIMIT)
    return _laid_out(x, lambda size: (_numbers(size, x.device) < below).to(x.dtype))


def _bernoulli_of(x: torch.Tensor, p: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """1 with the probability that p has there."""
    if generator is not None:
        return NotImplemented
    drawn = _laid_out(x, lambda size: _uniform(size, torch.float32, x.device))
    return (drawn < p).to(x.dtype)


def _made(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An operator that is given a shape."""

    def run(size: Sequence[int], **kind: Any) -> torch.Tensor:
        if kind.get("generator") is not None or not _covered(kind):
            return NotImplemented
        device = kind.get("device") or torch.empty(()).device
        return make(size, kind.get("dtype") or torch.get_default_dtype(), torch.device(device))

    return run


def _made_like(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An operator that is given a tensor of the shape."""

    def run(x: torch.Tensor, **kind: Any) -> torch.Tensor:
        dtype, device = kind.get("dtype") or x.dtype, torch.device(kind.get("device") or x.device)
        if kind.get("generator") is not None or not _covered({**kind, "dtype": dtype}):
            return NotImplemented
        if kind.get("memory_format") in (None, torch.preserve_format):
            return _laid_out(x, lambda size: make(size, dtype, device))
        return make(x.shape, dtype, device).contiguous(memory_format=kind["memory_format"])

    return run


def _covered(kind: Mapping[str, Any]) -> bool:
    dtype: torch.dtype = kind.get("dtype") or torch.get_default_dtype()
    return kind.get("layout") in (None, torch.strided) and dtype.is_floating_point and dtype.itemsize > 1


def _normal_functional(
    x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return _laid_out(x, lambda size: _normal(size, x.dtype, x.device)) * std + mean


def _uniform_between(
    x: torch.Tensor, low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return _laid_out(x, lambda size: _uniform(size, x.dtype, x.device)) * (high - low) + low


def _randint(low: int, high: int, size: Sequence[int], **kind: Any) -> torch.Tensor:
    """low + 48 bits modulo the number of choices."""
    if not isinstance(low, int) or not isinstance(high, int) or not 0 < high - low <= _CHOICES:
        return NotImplemented
    if kind.get("layout") not in (None, torch.strided):
        return NotImplemented
    device = torch.device(kind.get("device") or torch.empty(()).device)
    upper, lower = (_numbers(size, device) for _ in range(2))
    return (torch.remainder(upper * LIMIT + lower, high - low) + low).to(kind.get("dtype") or torch.int64)


_OWN: Mapping[Any, Callable[..., object]] = {
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.default: lambda x, generator=None: _bernoulli_of(x, x, generator),
    aten.bernoulli.Tensor: _bernoulli_of,
    aten.rand.default: _made(_uniform),
    aten.rand_like.default: _made_like(_uniform),
    aten.randn.default: _made(_normal),
    aten.randn_like.default: _made_like(_normal),
    aten.normal_functional.default: _normal_functional,
    aten.uniform.default: _uniform_between,
    torch.ops.prims.normal.default: lambda shape, *, mean, std, dtype, device, requires_grad: (
        _normal(shape, dtype, device) * std + mean
    ),
    aten.randint.default: lambda high, size, **kind: _randint(0, high, size, **kind),
    aten.randint.low: _randint,
}
