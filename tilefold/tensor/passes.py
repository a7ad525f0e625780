"""The tensor-level passes, in order: what the front end builds -> what fusion works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilefold.tensor.bounded_places import bounded_places
from tilefold.tensor.channels_last import channels_last_operands
from tilefold.tensor.common_factor import common_factors
from tilefold.tensor.components import components_apart
from tilefold.tensor.constant_parts import constant_parts
from tilefold.tensor.constant_tail import shorten_softmax
from tilefold.tensor.differences import joined_sums
from tilefold.tensor.inline import absorb_copies, inline, round_where_stored
from tilefold.tensor.ir import Program
from tilefold.tensor.laws.one_hot import collapse_products, collapse_sums
from tilefold.tensor.least_masks import infinite_masks
from tilefold.tensor.masked_sums import guard_masked_sums
from tilefold.tensor.narrow import narrow
from tilefold.tensor.nested_sums import nested_sums
from tilefold.tensor.positions import plain_places, settled_positions
from tilefold.tensor.powers import powers_apart
from tilefold.tensor.read_through import read_through
from tilefold.tensor.repeated import drop_repeated
from tilefold.tensor.repeats import products_of_repeats
from tilefold.tensor.rewrite import drop_dead, read_as_results
from tilefold.tensor.row_sums import sums_by_rows
from tilefold.tensor.same_sums import same_sums
from tilefold.tensor.short_maps import short_maps
from tilefold.tensor.side_by_side import parts_of_rows
from tilefold.tensor.split_dims import Layouts, split_dims
from tilefold.tensor.unify import canonical_names, unify

#: Applied after the dims have been split.
INLINED: tuple[tuple[str, Callable[[Program], Program]], ...] = (
    ("constant parts", constant_parts),
    ("narrow conditions", narrow),
    ("read through", read_through),
    ("inline maps", inline),
    ("plain places", plain_places),
    ("components apart", components_apart),
    ("parts of rows", parts_of_rows),
    ("round where stored", round_where_stored),
    ("absorb copies", absorb_copies),
    ("same sums", same_sums),
    ("products of repeats", products_of_repeats),
    ("powers of two apart", powers_apart),
)
#: Applied when operands are in the order that their readers want.
NAMED: tuple[tuple[str, Callable[[Program], Program]], ...] = (
    ("shorten softmaxes", shorten_softmax),
    ("short maps", short_maps),
    ("collapse sums", collapse_sums),
    ("guard masked sums", guard_masked_sums),  # of sums that are left: single elements have their condition
    ("collapse products", collapse_products),
    ("join sums", joined_sums),
    ("nested sums", nested_sums),
    ("unify dims", unify),
    ("infinite masks", infinite_masks),
    ("sum by rows", sums_by_rows),
    ("drop repeated", drop_repeated),
    ("read as results", read_as_results),
    ("common factors", common_factors),
    ("drop dead", drop_dead),
    ("name dims", canonical_names),
)


def normalise(p: Program, contiguous: Mapping[str, int] | None = None) -> tuple[Program, Layouts]:
    """Views as plain indices, linked dims unified, maps inlined; and how inputs have to be viewed.

    contiguous: axes of inputs along which neighbours lie side by side in memory (default: the last), where operands of
    channels-last convolutions are converted by statements; None where the library converts them.
    """
    p = bounded_places(plain_places(settled_positions(inline(drop_dead(p), rounds=1))))
    p, layouts = split_dims(p)  # the rest where dims are what they are
    for _, run in INLINED:
        p = run(p)
    if contiguous is not None:
        whole = {n: a for n, a in contiguous.items() if n in layouts and all(len(x) == 1 for x in layouts[n])}
        p = channels_last_operands(p, whole)
    for _, run in NAMED:
        p = run(p)
    return p, layouts
