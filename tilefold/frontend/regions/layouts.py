"""Channels-last memory between the convolutions of a GPU's graph: of inference, or a joint one before it is cut.

Matrix units read images with contiguous channels; the library converts every operand and result of a convolution that
has them otherwise. It is cheaper to convert at the entrance and where the graph's results must be as they were traced,
in kernels that are there anyway (`tensor.channels_last`). One channel a group is a reason where windows are large: they
are written out (`tensor.windows`), and elements of 16 bits are read one by one across a row, but as vectors along
channels; those of float32 are the library's, which has kernels for that memory (5 x 5 on an H200: 88 us, 234 in a
kernel of ours that also sums what it makes, across rows). Not where channels are no whole vectors (11 x 11 of three
colours, forward and both gradients on an H100: 1,650 us, in planes 1,130). Convolutions of one tap are products in
either layout and alone no reason. Groups of some numbers of channels are faster in planes (`_of_groups`), and are
converted to them amid channels-last memory. A small window of one channel a group is a reason behind a product that
makes many channels of few, which alone are converted (forecast of an inverted bottleneck's kernels, bf16, 3 x 3, 32 x
64 x 28 x 28, four times as wide inside: 74 us in planes, 48).
Of one or three axes of space (sound, video) the same holds for 16 bits and
whole vectors of channels: the library converts them too (H100, bf16, 32 x 128 x 8003: 41 us an operand, beside a
convolution of 51; 3 x 3 x 3 of 16 x 16 x 16 x 32 x 32: 418 us, 77 with contiguous channels; the image's gradient 108
and 74, the weight's 105 and 70; 1 x 3 x 3 of 4 x 32 x 16 x 56 x 56: 93, 4,393 and 114 us; 48, 56 and 72). In a training
step a window of any size is a reason, for the gradient of its weight (H100, bf16, 3 x 3, 8 x 128 x 96 x 96: 139 us in
planes, 44; the image's and the convolution 65, 51), also of halves of a vector (H200, bf16, 64 x 116 x 28 x 28: 90, 20
and 58 us, 21, 21 and 14). So is there a short one over one axis, of channels that lie side by side as they come (tokens
that are turned): kernels of ours take it in both passes (`plan.gpu_windows`). Only metadata change: the strides that
each node of the graph would have if images came to convolutions in that memory. Kernels and library steps store what
the strides say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode

from tilefold.frontend.operators.convolution_gradients import covered_gradients
from tilefold.frontend.operators.images import LINE
from tilefold.frontend.operators.table import COPIES, TABLE, VIEWS
from tilefold.runtime.convolution import CHANNELS_LAST
from tilefold.tensor.windows import AT_ONCE

aten = torch.ops.aten
Node = torch.fx.Node
#: Channels a group from which a convolution runs on matrix units.
MATRIX_CHANNELS = 8
#: Channels of the largest tile that the library's kernels of groups have.
WHOLE_TILE = 32
#: Elements of a window of one channel a group from which reading vectors of channels saves more than converting costs:
#: nominal, of 4.5 instructions an element and tap against 2.3, and two passes over the image.
LARGE_WINDOW = 16
#: Times the elements that a product of channels reads from which what it makes is wide.
WIDER = 2
#: Bytes of channels that a matrix unit's kernel of the library reads at once.
VECTOR = 16
PLANE = 4
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
    training = any(n.target in _GRADIENTS for n in gm.graph.nodes)
    forms = {n: last for n in gm.graph.nodes if (last := _form(n, device, training=training)) is not None}
    wanted = [n for n, last in forms.items() if last]
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
                both = n.args[6] or not forms[n]
                whole = _GRADIENTS.get(n.target, 2 if both else 1)  # nobody else converts operands of what is left
                args = (*(_laid_out(a, forms[n]) for a in args[:whole]), *args[whole:])
            try:
                made[n] = n.target(*args, **kwargs)
            except (RuntimeError, ValueError):  # of views: what was adjacent in memory is so no longer
                if n.target not in _VIEWS:
                    return False
                made[n] = aten.reshape.default(*args)
                reshaped.append(n)
            if forms.get(n):
                made[n] = torch.utils._pytree.tree_map_only(torch.Tensor, _convolved, made[n])
            if _lies_as(made[n], n.meta["val"]):
                made[n] = n.meta["val"]
    _store_for(gm, wanted, made)
    _apply(gm, made, reshaped, {n: form for n, form in forms.items() if _left(n)})
    return True


def _laid_out(x: torch.Tensor, last: bool) -> torch.Tensor:
    """An image in planes, or with contiguous channels."""
    if not last:
        return x.contiguous()
    form = CHANNELS_LAST.get(x.dim())
    return x.contiguous(memory_format=form) if form else x.movedim(1, -1).contiguous().movedim(-1, 1)


def _lies(x: torch.Tensor, last: bool) -> bool:
    """Whether an image lies so."""
    return (x.movedim(1, -1) if last else x).is_contiguous()


def _convolved(x: torch.Tensor) -> torch.Tensor:
    """What a convolution with contiguous channels makes: of one axis of space torch says that it lies in planes, and of
    three where it was built without a GPU's library."""
    return _laid_out(x, True) if x.dim() >= LINE and x.dim() != PLANE else x


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
            if not isinstance(a, Node) or _lies(made[a], last=True):
                continue
            computed = a.target in TABLE and a.target not in _NOT_STORED
            if not every.issuperset(a.users) or not (computed or (a.op == "placeholder" and len(a.users) > 1)):
                continue
            readers = sorted(a.users, key=place.__getitem__)
            copy = _copied(gm, a, readers[0], (a if computed else readers[0]).meta, made, last=True)
            for reader in readers:
                reader.replace_input_with(a, copy)


def _of_patches(n: Node, made: Mapping[Node, Any]) -> bool:
    """Whether a convolution's windows, or those of the convolution that it is a gradient of, do not overlap."""
    taps = made[_image_and_weight(n)[1]].shape[2:]
    return all(k > 1 for k in taps) and list(taps) == n.args[_settings(n)[0]]


def _apply(gm: torch.fx.GraphModule, made: dict[Node, Any], reshaped: list[Node], left: Mapping[Node, bool]) -> None:
    """Write the metadata; results of the graph keep theirs through copies. left: convolutions left to others, and in
    which memory."""
    for n in reshaped:
        n.target = aten.reshape.default
    for n, last in left.items():
        _convert_operands(gm, n, made, last)
    output = gm.graph.output_node()
    for n in list(output.all_input_nodes):
        old, new = n.meta.get("val"), made[n]
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.stride() != new.stride():
            output.replace_input_with(n, _in_order(gm, n, output, n.meta, made, old))
    for n, val in made.items():
        if n.op == "call_function" and "val" in n.meta:
            n.meta = {**n.meta, "val": val}
    gm.recompile()


def _convert_operands(gm: torch.fx.GraphModule, n: Node, made: dict[Node, Any], last: bool) -> None:
    """Copies, in front of a convolution that is left to others, of operands that have another layout."""
    for a in n.args[: _GRADIENTS.get(n.target, 2)]:
        assert isinstance(a, Node)
        if not _lies(made[a], last):
            n.replace_input_with(a, _copied(gm, a, n, a.meta, made, last))


def _copied(
    gm: torch.fx.GraphModule, a: Node, before: Node, history: Mapping[str, Any], made: dict[Node, Any], last: bool
) -> Node:
    """A copy of a tensor in such memory, in front of a node."""
    return _in_order(gm, a, before, history, made, _laid_out(made[a], last))


def _in_order(
    gm: torch.fx.GraphModule,
    a: Node,
    before: Node,
    history: Mapping[str, Any],
    made: dict[Node, Any],
    like: torch.Tensor,
) -> Node:
    """A copy of a tensor with the strides of `like`, in front of a node."""

    def call(target: Any, val: torch.Tensor, *args: Any, **kwargs: Any) -> Node:
        with gm.graph.inserting_before(before):
            found = gm.graph.call_function(target, args, kwargs)
        made[found] = val
        found.meta = {**history, "val": val}
        return found

    formats = [torch.contiguous_format, *([CHANNELS_LAST[like.dim()]] if like.dim() in CHANNELS_LAST else [])]
    form = next((f for f in formats if like.is_contiguous(memory_format=f)), None)
    if form is not None:
        return call(aten.clone.default, like, a, memory_format=form)
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    turned = call(aten.permute.default, made[a].permute(order), a, order)
    packed = call(aten.clone.default, like.permute(order).contiguous(), turned, memory_format=torch.contiguous_format)
    back = [order.index(n) for n in range(like.dim())]
    return call(aten.permute.default, made[packed].permute(back), packed, back)


def _form(n: Node, device: str, *, training: bool) -> bool | None:
    """Whether a convolution of images, or the gradient of one, takes least time with contiguous channels, as it does if
    it runs on matrix units. None: it is none, or takes images as they come."""
    if n.target is not aten.convolution.default and n.target not in _GRADIENTS:
        return None
    x, w = (a.meta.get("val") if isinstance(a, Node) else None for a in _image_and_weight(n))
    if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor) or x.device.type != device:
        return None
    stride, transposed, groups = (n.args[k] for k in _settings(n))
    if x.dim() == LINE and w.shape[1] == 1 and w.shape[0] == groups:
        short = training and w.shape[2] <= AT_ONCE and not transposed
        return True if short and x.stride(1) == 1 else None
    units = x.dtype in (torch.float16, torch.bfloat16)
    units = units or (x.dtype is torch.float32 and torch.backends.cudnn.allow_tf32)
    if not units:
        return None
    if x.dim() != PLANE:
        whole = x.dtype.itemsize == 2 and min(w.shape[:2]) * x.dtype.itemsize >= VECTOR
        return True if groups == 1 and whole and min(x.shape[2:]) > 1 and not transposed else None
    if transposed:  # blocks that touch are a product
        return True if groups == 1 and list(w.shape[2:]) != stride else None
    vectors = w.shape[0] * x.dtype.itemsize % VECTOR == 0
    if groups == 1 or (w.shape[1] == 1 and w.shape[2:].numel() >= LARGE_WINDOW and vectors):
        return True
    if training and w.shape[1] == 1 and w.shape[0] == groups and w.shape[2:].numel() > 1:
        halves = w.shape[0] * x.dtype.itemsize
        return True if x.dtype.itemsize == 2 and halves >= VECTOR and halves % (VECTOR // 2) == 0 else None
    if x.dtype.itemsize == 2 and vectors and w.shape[1] == 1 and w.shape[0] == groups and _widened(n):
        return True
    # of float32 the library turns groups around
    if x.dtype.itemsize != 2:
        return None
    outs = w.shape[0] // int(groups)  # type: ignore[arg-type]
    return _of_groups(w.shape[1], outs, gradient=n.target in _GRADIENTS)


def _widened(n: Node) -> bool:
    """Whether what a convolution reads is made, by maps, of a product of channels that reads half as much at most: that
    is what is converted then."""
    shape, todo, seen = n.args[0].meta["val"].shape, [n.args[0]], set[Node]()  # type: ignore[union-attr]
    while todo:
        a = todo.pop()
        if not isinstance(a, Node) or a in seen or not any(v.shape == shape for v in _tensors(a)):
            continue
        seen.add(a)
        if a.target is aten.convolution.default:
            own = a.args[0].meta["val"]  # type: ignore[union-attr]
            return bool(_pointwise(a) and a.args[8] == 1 and WIDER * own.numel() <= shape.numel())
        todo += a.all_input_nodes
    return False


def _of_groups(channels: int, outs: int, *, gradient: bool) -> bool | None:
    """The same of groups of so many channels and outputs, of 16 bits. The library's kernels for groups in channels-last
    memory have tiles of 8, 16 or 32 channels, and as many outputs; those for planes have others too, and what sums a
    weight's gradient of fewer is slow.

    cuDNN 9 on an H200, 3 x 3, us in planes and channels last: 24 channels 40 and 83 (gradients 80 and 160), 16 channels
    30 and 15 (59 and 31); of 4 a convolution 97 and 48, its gradients 256 and 468; of 16 with 32 outputs each, 16 x 57
    x 57, 97 and 134 (176 and 254): kernels of channels last between copies of operands and results in either memory,
    which are slower in this one. On an H100 two groups of 48: 171 and 1,019, for it turns operands and result to
    float32 group by group. 2026-11
    """
    if 1 < channels < MATRIX_CHANNELS:
        return False if gradient else None
    if channels == 1:
        return None
    odd = channels > MATRIX_CHANNELS and channels % WHOLE_TILE and channels & (channels - 1)
    return not odd and channels == outs


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
    """Whether a tensor has no gaps, in some order of its axes."""
    order = sorted(range(v.dim()), key=v.stride, reverse=True)
    return v.permute(order).is_contiguous()


def _symbolic(v: torch.Tensor) -> bool:
    return any(isinstance(s, torch.SymInt) for s in (*v.shape, *v.stride()))


def _tensors(n: Node) -> Iterator[torch.Tensor]:
    val = n.meta.get("val")
    yield from (v for v in (val if isinstance(val, tuple | list) else [val]) if isinstance(v, torch.Tensor))
