"""Names of an operator's several results: after the operator and the result, not after Python's `getitem`.

A report, a plan and generated code call a tensor as its node is called. Torch calls the second result of `topk`
`getitem_1`; here it is `topk_indices`, as the operator's schema has it, `native_layer_norm_2_mean` where this table has
it, and `split_part1` where neither does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

_MOMENTS = ("out", "mean", "rstd")
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
#: What a schema leaves unnamed, by its name in `aten`.
_UNNAMED: Mapping[str, tuple[str, ...]] = {
    "native_layer_norm": _MOMENTS,
    "native_group_norm": _MOMENTS,
    "native_batch_norm": _MOMENTS,
    "_native_batch_norm_legit": _MOMENTS,
    "_native_batch_norm_legit_functional": (*_MOMENTS, "running_mean", "running_var"),
    "_native_batch_norm_legit_no_training": _MOMENTS,
    "_fused_rms_norm": ("out", "rstd"),
    "var_mean": ("var", "mean"),
    "std_mean": ("std", "mean"),
    "native_dropout": ("out", "kept"),
    "native_layer_norm_backward": _GRADIENTS,
    "native_group_norm_backward": _GRADIENTS,
    "native_batch_norm_backward": _GRADIENTS,
    "_fused_rms_norm_backward": _GRADIENTS[:2],
    "convolution_backward": _GRADIENTS,
    "max_pool2d_with_indices": ("out", "indices"),
    "max_pool3d_with_indices": ("out", "indices"),
    "adaptive_max_pool2d": ("out", "indices"),
    "embedding_bag": ("out", "offset2bag", "bag_size", "max_indices"),
}


def name_results(graph: torch.fx.Graph) -> None:
    """Rename the nodes that pick one result of an operator. A node that has such a name keeps it."""
    for n in graph.find_nodes(op="call_function", target=operator.getitem):
        whole, k = n.args
        if isinstance(whole, torch.fx.Node) and whole.op == "call_function" and isinstance(k, int):
            wanted = f"{whole.name}_{result_name(whole.target, k)}"
            if not n.name.startswith(wanted):
                n._rename(wanted)


def result_name(target: object, k: int) -> str:
    """What result k of an operator is called."""
    if isinstance(target, torch._ops.OpOverload):
        returns = target._schema.returns
        named = returns[k].name if 0 <= k < len(returns) else None
        known = _UNNAMED.get(target._schema.name.removeprefix("aten::"), ())
        if named:
            return named
        if 0 <= k < len(known):
            return known[k]
    return f"part{k}"
