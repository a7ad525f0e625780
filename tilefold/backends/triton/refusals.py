"""Kernels that this process could not launch in any configuration: a plan that is made afterwards has none of them."""

from __future__ import annotations

from dataclasses import replace

from tilefold.block.canonical import nameless
from tilefold.block.ir import Block
from tilefold.block.text import show

_found: dict[str, str] = {}


def refuse(block: Block, reason: str) -> None:
    """Remember a kernel (a canonical block program) as one that cannot be launched."""
    _found[_key(block)] = reason


def refusal(block: Block) -> str | None:
    """Why a kernel cannot be launched; None: nothing is known against it."""
    return _found.get(_key(block)) if _found else None


def refused() -> tuple[str, ...]:
    """All of them as text, in order: what plans depend on."""
    return tuple(sorted(_found))


def _key(block: Block) -> str:
    return show(nameless(replace(block, name="kernel")))
