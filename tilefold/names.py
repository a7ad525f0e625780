"""One place for names: of tensors, dims, block values and variables of generated code.

The law: a name is made against *all* names that are visible where it will stand, and is taken from
then on. A suffix alone (`x_b` because it belongs to x) keeps neither promise: another tensor may be
called so, and the same value may be needed once more in an outer scope.
"""

from __future__ import annotations

from collections.abc import Container, MutableSet


def free(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or the first of `wanted_2`, `wanted_3` ... that is not taken; nothing is noted."""
    name, n = wanted, 1
    while name in taken:
        n += 1
        name = f"{wanted}_{n}"
    return name


def fresh(wanted: str, taken: MutableSet[str]) -> str:
    """A name like `wanted` that is not taken; it is taken afterwards."""
    name = free(wanted, taken)
    taken.add(name)
    return name
