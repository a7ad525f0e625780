"""Channels-last memory between the convolutions of a GPU's graph: of inference, or a joint one before it is cut.

Matrix units read images with contiguous channels; the library converts every operand and result of a convolution
that has them otherwise. It is cheaper to convert at the entrance and where the graph's results must be as they were
traced, in kernels that are there anyway (`tensor.channels_last`). One channel a group is a reason where windows are
large: they are written out (`tensor.windows`), and elements of 16 bits are read one by one across a row, but as vectors
along channels; those of float32 are the library's, which has kernels for that memory (5 x 5 on an H200: 88 us, 234 in
a kernel of ours that also sums what it makes, across rows). Convolutions of one tap are products in either layout and
alone no reason. Groups of some numbers of channels are faster in planes (`_of_groups`), and are converted to them amid
channels-last memory. Only metadata change: the strides that each node of the graph would have if images came to
convolutions in that memory. Kernels and library steps store what the strides say.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._guards import detect_fake_mode

from tilefold.frontend.operators.convolution_gradients import covered_gradients
from tilefold.frontend.operators.table import COPIES, TABLE, VIEWS

aten = torch.ops.aten
Node = torch.fx.Node
#: Channels a group from which a convolution runs on matrix units.
MATRIX_CHANNELS = 8
#: Channels a group from which groups of any number run on them.
WHOLE_TILE = 32
#: Elements of a window of one channel a group from which reading vectors of channels saves more than converting costs:
#: nominal, of 4.5 instructions an element and tap against 2.3, and two passes over the image.
LARGE_WINDOW = 16
_VIEWS = (aten.view.default, aten._unsafe_view.default)
#: Covered, and of the memory of what they read, or copies already.
_NOT_STORED = VIEWS | COPIES
#: Convolutions' gradients, and how many operands they have.
_GRADIENTS: Mapping[object, int] = {aten.convolution_backward.default: 3}


def channels_last(gm: torch.fx.GraphModule, device: str = "cuda") -> bool:
    """Give the nodes of a traced graph on such a device channels-last strides, in place; whether that was done.

    Not where sizes are symbolic, strides are asked for or something is changed in place, but for arguments that the
    graph writes back (`capture.written_back`): then the graph stays as it is.
    """
    forms = {n: form for n in gm.graph.nodes if (form := _form(n, device)) is not None}
    wanted = [n for n, form in forms.items() if form is torch.channels_last]
    if all(map(_pointwise, wanted)) or any(map(_fixed, gm.graph.nodes)):
        return False
    mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    if mode is None:
        return False
    made: dict[Node, Any] = {}
    reshaped: list[Node] = []
    with mode:
        for n in gm.graph.nodes:
            if n.op != "call_function" or "val" not in n.meta:
                made[n] = n.meta.get("val")
                continue
            if n not in forms and all(made[a] is a.meta.get("val") for a in n.all_input_nodes):
                made[n] = n.meta["val"]  # what it reads lies as it was traced
                continue
            args, kwargs = torch.fx.map_arg((n.args, n.kwargs), made.__getitem__)
            if n in forms:
                both = n.args[6] or forms[n] is torch.contiguous_format
                whole = _GRADIENTS.get(n.target, 2 if both else 1)  # nobody else converts operands of what is left
                args = (*(a.contiguous(memory_format=forms[n]) for a in args[:whole]), *args[whole:])
            try:
                made[n] = n.target(*args, **kwargs)
            except (RuntimeError, ValueError):  # of views: what was adjacent in memory is so no longer
                if n.target not in _VIEWS:
                    return False
                made[n] = aten.reshape.default(*args)
                reshaped.append(n)
            if _lies_as(made[n], n.meta["val"]):
                made[n] = n.meta["val"]
    _store_for(gm, wanted, made)
    _apply(gm, made, reshaped, {n: form for n, form in forms.items() if _left(n)})
    return True


def _lies_as(new: object, old: object) -> bool:
    """Whether a tensor lies in memory as another of its shape."""
    both = isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and new.dtype is old.dtype
    return both and new.shape == old.shape and new.stride() == old.stride()  # type: ignore[union-attr, attr-defined]


def _store_for(gm: torch.fx.GraphModule, convolutions: Sequence[Node], made: dict[Node, Any]) -> None:
    """Copies in channels-last memory of what these convolutions alone read: of what is computed, which is then stored
    so, and of arguments that several of them read (weights, in both passes): the cut may save them. Convolutions of
    patches that do not overlap are products, which read any memory as it is."""
    every, place = frozenset(convolutions), {n: k for k, n in enumerate(gm.graph.nodes)}
    for n in convolutions:
        if _of_patches(n, made):
            continue
        for a in n.args[: _GRADIENTS.get(n.target, 2)]:
            if not isinstance(a, Node) or made[a].is_contiguous(memory_format=torch.channels_last):
                continue
            computed = a.target in TABLE and a.target not in _NOT_STORED
            if not every.issuperset(a.users) or not (computed or (a.op == "placeholder" and len(a.users) > 1)):
                continue
            first = min(a.users, key=place.__getitem__)
            copy = _copied(gm, a, first, (a if computed else first).meta, made, torch.channels_last)
            a.replace_all_uses_with(copy, delete_user_cb=partial(operator.is_not, copy))


def _of_patches(n: Node, made: Mapping[Node, Any]) -> bool:
    """Whether a convolution's windows, or those of the convolution that it is a gradient of, do not overlap."""
    taps = made[_image_and_weight(n)[1]].shape[2:]
    return all(k > 1 for k in taps) and list(taps) == n.args[_settings(n)[0]]


def _apply(
    gm: torch.fx.GraphModule, made: dict[Node, Any], reshaped: list[Node], left: Mapping[Node, torch.memory_format]
) -> None:
    """Write the metadata; results of the graph keep theirs through copies. left: convolutions left to others, and in
    which memory."""
    for n in reshaped:
        n.target = aten.reshape.default
    for n, form in left.items():
        _convert_operands(gm, n, made, form)
    output = gm.graph.output_node()
    for n in list(output.all_input_nodes):
        old, new = n.meta.get("val"), made[n]
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.stride() != new.stride():
            with gm.graph.inserting_before(output):
                form = torch.contiguous_format if old.is_contiguous() else torch.channels_last
                copy = gm.graph.call_function(aten.clone.default, (n,), {"memory_format": form})
            copy.meta = dict(n.meta)
            output.replace_input_with(n, copy)
    for n, val in made.items():
        if n.op == "call_function" and "val" in n.meta:
            n.meta = {**n.meta, "val": val}
    gm.recompile()


def _convert_operands(gm: torch.fx.GraphModule, n: Node, made: dict[Node, Any], form: torch.memory_format) -> None:
    """Copies, in front of a convolution that is left to others, of operands that have another layout."""
    for a in n.args[: _GRADIENTS.get(n.target, 2)]:
        assert isinstance(a, Node)
        if made[a].is_contiguous(memory_format=form):
            continue
        n.replace_input_with(a, _copied(gm, a, n, a.meta, made, form))


def _copied(
    gm: torch.fx.GraphModule,
    a: Node,
    before: Node,
    history: Mapping[str, Any],
    made: dict[Node, Any],
    form: torch.memory_format,
) -> Node:
    """A copy of a tensor in such memory, in front of a node."""
    with gm.graph.inserting_before(before):
        copy = gm.graph.call_function(aten.clone.default, (a,), {"memory_format": form})
    made[copy] = made[a].contiguous(memory_format=form)
    copy.meta = {**history, "val": made[copy]}
    return copy


def _form(n: Node, device: str) -> torch.memory_format | None:
    """The memory in which a convolution of images, or the gradient of one, takes least time: with contiguous channels
    if it runs on matrix units. None: it is none, or takes images as they come."""
    if n.target is not aten.convolution.default and n.target not in _GRADIENTS:
        return None
    x, w = (a.meta.get("val") if isinstance(a, Node) else None for a in _image_and_weight(n))
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor) or x.dim() != 4 or x.device.type != device:
        return None
    stride, transposed, groups = (n.args[k] for k in _settings(n))
    units = x.dtype in (torch.float16, torch.bfloat16)
    units = units or (x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)
    if not units:
        return None
    if transposed:  # blocks that touch are a product
        return torch.channels_last if groups == 1 and list(w.shape[2:]) != stride else None
    if groups == 1 or (w.shape[1] == 1 and w.shape[2:].numel() >= LARGE_WINDOW):
        return torch.channels_last
    # of float32 the library turns groups around
    return _of_groups(w.shape[1], gradient=n.target in _GRADIENTS) if x.dtype.itemsize == 2 else None


def _of_groups(channels: int, *, gradient: bool) -> torch.memory_format | None:
    """The same of groups of so many channels, of 16 bits. The library's kernels for groups in channels-last memory have
    tiles of 8, 16 or 32 channels, those for planes have others too, and what sums a weight's gradient of fewer is slow.

    cuDNN 9 on an H200, 3 x 3, us in planes and channels last: 24 channels 40 and 83 (gradients 80 and 160), 16 channels
    30 and 15 (59 and 31); of 4 a convolution 97 and 48, its gradients 256 and 468. 2026-11
    """
    if 1 < channels < MATRIX_CHANNELS:
        return torch.contiguous_format if gradient else None
    if MATRIX_CHANNELS < channels < WHOLE_TILE and channels & (channels - 1):
        return torch.contiguous_format
    return torch.channels_last if channels > 1 else None


def _left(n: Node) -> bool:
    """Whether a convolution, or the gradients of one, are left to others."""
    if n.target not in _GRADIENTS:
        return bool(n.args[6])
    x, w = (a.meta["val"] for a in _image_and_weight(n))
    return not covered_gradients(x.shape[1], w.shape[0], n.args[9], transposed=bool(n.args[7]))


def _image_and_weight(n: Node) -> tuple[Any, ...]:
    """What a convolution reads, or the one whose gradient this is."""
    return n.args[1:3] if n.target in _GRADIENTS else n.args[:2]


def _settings(n: Node) -> tuple[int, int, int]:
    """Where its arguments have the stride, whether it is transposed, and the groups."""
    return (4, 7, 9) if n.target in _GRADIENTS else (3, 6, 8)


def _pointwise(n: Node) -> bool:
    """Whether it has one tap."""
    w = _image_and_weight(n)[1]
    return isinstance(w, Node) and w.meta["val"].shape[2:].numel() == 1


def _fixed(n: Node) -> bool:
    """Whether a node cannot take other strides."""
    if n.target is aten.as_strided.default or any(map(_symbolic, _tensors(n))):
        return True
    if n.op == "output":
        results = [a.meta.get("val") for a in n.all_input_nodes]
        return any(isinstance(v, torch.Tensor) and not _packed(v) for v in results)
    if n.target is aten.copy_.default:
        return not isinstance(n.args[0], Node) or n.args[0].op != "placeholder"
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _packed(v: torch.Tensor) -> bool:
    return v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last))


def _symbolic(v: torch.Tensor) -> bool:
    return any(isinstance(s, torch.SymInt) for s in (*v.shape, *v.stride()))


def _tensors(n: Node) -> Iterator[torch.Tensor]:
    val = n.meta.get("val")
    yield from (v for v in (val if isinstance(val, tuple | list) else [val]) if isinstance(v, torch.Tensor))
