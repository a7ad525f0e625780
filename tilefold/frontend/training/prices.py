"""What saving a value for the backward costs, and what computing it again, both in bytes moved.

A value that the forward writes in any case is only read again; another is written and read. On top comes `KEEP` for the
memory that it holds meanwhile. Computing again:

| operator | costs |
|---|---|
| view, constant, pick from a tuple, cast to a wider type or copy of one | nothing: readers can read what it is of |
| map | its arithmetic; its bytes, written and read, where a library call of the backward needs it in memory |
| fold | what it reads, once more: its state must be complete before it is used; for library calls also as a map |
| maximum over windows | what it reads, which a map writes first, and values and places, written and read |
| product that streams | its arithmetic |
| other product, an operator of torch | its arithmetic, what it reads, and its result written and read |
| drawing a seed, changes in place, operators with effects | is not done |

What streams is said by `tensor.streams`: attention's scores do; logits and hidden layers of features do not. Of
float32, which no matrix unit takes unless torch allows tf32, arithmetic costs more than memory (distances of 3,000
points and as many, of 128 columns: 46 us again on an H100, 12 read); what is many times its operands is a stream still,
and floats of 16 bits in a wider type are no float32 to a matrix unit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from tilefold.backends.triton.precision import matmul_precision
from tilefold.frontend.operators import (
    bits,
    contract,
    convolution_gradients,
    create,
    elementwise,
    index,
    norm,
    pool,
    random,
    reduce,
    view,
)
from tilefold.frontend.operators.random import draws_seeds
from tilefold.frontend.operators.table import COPIES, TABLE, VIEWS
from tilefold.frontend.regions.partition import draws_numbers, extents, nbytes
from tilefold.frontend.regions.remade import MAPS_A_BYTE
from tilefold.tensor.streams import LONG, streamed

Node = torch.fx.Node

#: Floating point operations of a matrix unit in the time of a byte from memory (H100: 990e12 / 3.35e12; A100: 156).
FLOPS_A_BYTE = 256
#: The same of a GPU's products of float32 that are not rounded (H100: 67e12).
EXACT_FLOPS_A_BYTE = 20
#: What holding a byte from the forward to the backward is worth, in bytes moved: less than writing it once.
KEEP = 0.5
#: The same of an argument that the forward changes: more than of anything that is computed of it.
_LOST = 2.0**50
#: Most maps between a state and what is computed of it alone.
GUARD = 4
_FOLDS = frozenset((*reduce.TABLE, *norm.TABLE, *pool.TABLE)) | {torch.ops.aten.nll_loss_forward.default}
_MAPS = frozenset((*elementwise.TABLE, *bits.TABLE, *index.TABLE, *create.TABLE, *view.TABLE, *random.TABLE)) - _FOLDS
_PRODUCTS = frozenset(contract.TABLE)
#: Covered, and computed by a library nevertheless.
_CALLS = frozenset(convolution_gradients.TABLE)
_VIEWS = VIEWS - COPIES
_BY_NUMBERS = frozenset(
    getattr(getattr(torch.ops.aten, name), of) for name in ("mul", "div") for of in ("Tensor", "Scalar")
)
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True, slots=True)
class Product:
    """The tensors of a product, by size: elements of the left operand, the right one and the result, the extent that
    each of them lacks, and how many independent products there are. windows: it is a convolution, which never streams,
    however few channels its windows have (an image's three)."""

    operands: tuple[Node, Node]
    elements: tuple[int, int, int]
    lacks: tuple[int, int, int]
    batch: int
    windows: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.elements[2] * self.lacks[2]

    @property
    def streamed(self) -> int | None:
        """Which of its tensors streams (0 and 1: operands, 2: the result); None: it is a library call."""
        return None if self.windows else streamed(self.elements, self.lacks, self.batch)


def product(node: Node) -> Product | None:
    """The sizes of a product; None for another operator."""
    if node.target not in _PRODUCTS:
        return None
    a, b = node.args[1:3] if node.target in _WITH_BIAS else node.args[:2]
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    sizes = (elements(a), elements(b), elements(node))
    if node.target is torch.ops.aten.convolution.default:
        window = sizes[1] // max(1, extents(b.meta["val"])[0])
        return Product((a, b), sizes, (1, 1, window), 1, windows=True)
    *lead, _, inner = (1, *extents(a.meta["val"]))
    batch = prod(lead) if node.target in _BATCHED else 1
    rows, columns = (n // max(1, batch * inner) for n in sizes[:2])
    return Product((a, b), sizes, (columns, rows, inner), batch)


_WITH_BIAS = (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)
_BATCHED = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)


def elements(node: Node) -> int:
    """Elements of a node's tensor, at the sizes that it was captured with."""
    return prod(extents(node.meta["val"]))


@dataclass(frozen=True)
class Prices:
    """The prices of the values of a joint graph. `forward`, `backward`: the operators that each pass must run;
    `results`: what the forward returns; `free`: arguments that are there in any case (parameters)."""

    forward: frozenset[Node]
    backward: frozenset[Node]
    results: frozenset[Node]
    free: frozenset[Node]

    @cached_property
    def depths(self) -> Mapping[Node, int]:
        """How many library calls stand one behind the other before each node of the forward."""
        found: dict[Node, int] = {}
        for n in next(iter(self.forward)).graph.nodes if self.forward else ():
            if n in self.forward:
                before = max((found.get(a, 0) for a in n.all_input_nodes), default=0)
                called = n.op == "call_function" and _in_library(n) and not is_view(n) and not draws_seeds(n)
                found[n] = before + called
        return found

    def keep(self, node: Node, worth: float = KEEP) -> float | None:
        """Bytes for saving a value; None: never (views, wider copies and what follows from a fold's result alone, which
        are made again where no library call needs them in memory)."""
        if _is_changed(node):
            return _LOST
        if node in self.free:
            return 0.0
        if node in self.results:
            return float(nbytes(node))
        val = node.meta.get("val")
        if (
            isinstance(val, tuple | list)
            or widens(node)
            or (state_of(node) is not None and not self._needed_whole(node))
            or (is_view(node) and nbytes(node) >= nbytes(base(node)))
        ):
            return None
        return nbytes(node) * ((1 if self._in_memory(node) else 2) + worth)

    def again(self, node: Node) -> float | None:
        """Bytes for computing a value again out of its operands; None: never."""
        if node.op != "call_function" or not repeatable(node):
            return None
        if is_view(node) or widens(node) or node.target is operator.getitem or not _tensors(node):
            return 0.0
        if node.target in _MAPS:
            return elements(node) / MAPS_A_BYTE + (2 * nbytes(node) if self._needed_whole(node) else 0)
        read = sum(nbytes(n) for n in _tensors(node))
        written = 2 * sum(nbytes(n) for n in _results(node))
        if node.target in _FOLDS:
            if node.target in pool.MAXIMA:
                return 2 * read + written
            return read + (written if self._needed_whole(node) else 0)
        sizes = product(node)
        if sizes is None:
            return 2 * read + 2 * written
        work = sizes.flops / (EXACT_FLOPS_A_BYTE if _exact(node, sizes) else FLOPS_A_BYTE)
        return work if sizes.streamed == 2 else work + read + written

    def _in_memory(self, node: Node) -> bool:
        """Whether the forward writes a value: an argument, a result, made or read by a library call."""
        if node.op != "call_function" or any(n in self.results for n in (node, *_views_of(node))):
            return True
        made = node if node.target is not operator.getitem else node.args[0]
        assert isinstance(made, Node)
        return _in_library(made) or self._library_reads(node, self.forward) or self._waits(node)

    def _waits(self, node: Node) -> bool:
        """Whether the forward reads a value again after a library call that depends on it: the residual of a layer."""
        users = [u for seen in (node, *_views_of(node)) for u in seen.users if u in self.forward]
        return any(self.depths.get(u, 0) > self.depths.get(node, 0) for u in users)

    def _needed_whole(self, node: Node) -> bool:
        return self._library_reads(node, self.backward)

    def _library_reads(self, node: Node, within: frozenset[Node]) -> bool:
        """Whether a library call among `within` reads a value or a view of it."""
        for seen in (node, *_views_of(node)):
            for user in seen.users:
                if user not in within or user.op != "call_function":
                    continue
                sizes = product(user)
                if sizes is None and _called(user) and not is_view(user):
                    return True
                if sizes is not None and sizes.streamed is None:
                    return True
        return False


def _exact(node: Node, p: Product) -> bool:
    """Whether no matrix unit computes a product on a GPU, and its result, if it streams, is not too much to keep."""
    val = node.meta["val"]
    if val.dtype is not torch.float32 or val.device.type != "cuda" or matmul_precision() == "tf32":
        return False
    if all(map(_of_16_bits, p.operands)):
        return False
    return p.streamed != 2 or p.elements[2] <= LONG * sum(p.elements[:2])


def _of_16_bits(node: Node) -> bool:
    """Whether a tensor's floats are those of one of 16 bits, but for a number that all are multiplied with: kernels
    multiply by it afterwards."""
    while node.meta["val"].dtype.itemsize > 2:
        tensors = _tensors(node)
        number = node.target in _BY_NUMBERS and len(tensors) == 1
        if not (node.target in VIEWS or widens(node) or number) or len(tensors) != 1:
            return False
        (node,) = tensors
    return node.meta["val"].dtype.is_floating_point


def _is_changed(node: Node) -> bool:
    """Whether an argument is written to in place: a backward would find the new value in it."""
    writes = (u for u in node.users if isinstance(u.target, torch._ops.OpOverload) and u.target._schema.is_mutable)
    return node.op == "placeholder" and any(u.args[:1] == (node,) for u in writes)


def _in_library(node: Node) -> bool:
    """Whether a library computes an operator: what no kernel of ours does, and products that do not stream."""
    sizes = product(node)
    return sizes.streamed != 2 if sizes else _called(node)


def _called(node: Node) -> bool:
    """Whether an operator that is no product is no kernel of ours."""
    return node.target not in TABLE or node.target in _CALLS


def is_map(node: Node) -> bool:
    """Whether each element of a node's tensor is computed of single elements of others."""
    return node.op == "call_function" and node.target in _MAPS


def is_view(node: Node) -> bool:
    """Whether a node renames elements of another tensor."""
    if draws_seeds(node):
        return False
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, Node) and source.target in _VIEWS


def widens(node: Node) -> bool:
    """Whether a node holds floats of another tensor, or integers, in a wider type, all of them exactly; or copies such
    a one, in whatever order (what `matmul` reads of heads that are expanded, or lie apart)."""
    if node.target in COPIES and isinstance(node.args[0], Node):
        return widens(base(node.args[0]))
    if node.target not in _CASTS or not _tensors(node):
        return False
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    floats = before.is_floating_point, after.is_floating_point
    exact = floats in ((True, True), (False, False)) and torch.promote_types(before, after) is after
    return exact and before is not after


def state_of(node: Node) -> Node | None:
    """The fold whose result a map follows from, element by element, from nothing else and by a few steps (a maximum
    that is 0 where all is masked): forwards return states as they are. None: it is no such map."""
    if node.target not in _MAPS:
        return None
    maps, found, left = {node}, set[Node](), [node]
    while left:
        for n in map(base, _tensors(left.pop())):
            if n.op == "call_function" and not _tensors(n):
                continue  # a constant
            if n.target not in _MAPS:
                found.add(n)
            elif n not in maps:
                maps.add(n)
                left.append(n)
        if len(maps) > GUARD or len(found) > 1:
            return None
    one = found.pop() if found else None
    return one if one is not None and one.target in _FOLDS and elements(one) == elements(node) else None


def base(node: Node) -> Node:
    """The tensor that a view looks at."""
    while is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def repeatable(node: Node) -> bool:
    """Whether running an operator twice does what running it once does."""
    target = node.target
    if draws_seeds(node):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.HigherOrderOperator)
    known = target in TABLE or target.namespace in ("aten", "prims")
    return known and not target._schema.is_mutable and not draws_numbers(node)


def _views_of(node: Node) -> Iterator[Node]:
    for user in node.users:
        if is_view(user):
            yield user
            yield from _views_of(user)


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor | tuple | list)]


def _results(node: Node) -> list[Node]:
    """A node, or what is picked from it."""
    return [node] if isinstance(node.meta.get("val"), torch.Tensor) else list(node.users)
