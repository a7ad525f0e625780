"""Short symbols for long names, and signatures that are equal for kernels that differ in names only."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from tilefold.algebra.expr import tensors_read
from tilefold.block.ir import Block, Init, Let, walk
from tilefold.block.text import show
from tilefold.tensor.ir import Compute
from tilefold.tensor.text import show_compute

_LETTERS = {
    "max": "mMg", "min": "lqh", "sum": "tuwz", "prod": "pP", "argmax": "mM", "argmin": "lL", "topk": "kK",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z_]\w*")


def short_symbols(named: Iterable[tuple[str, str | None]], taken: Iterable[str]) -> dict[str, str]:
    """A symbol for every (name, reducer) longer than two letters; short names and `taken` stay as they are."""
    named = list(named)
    used = set(taken) | {n for n, _ in named if len(n) <= 2}
    out: dict[str, str] = {}
    for name, reducer in named:
        if len(name) <= 2:
            continue
        letters = _LETTERS.get(reducer or "", "xyc")
        free = [a for a in letters if a not in used] or [f"{letters[0]}{k}" for k in range(1, 100)]
        symbol = next((s for s in free if s not in used), name)
        used.add(symbol)
        out[name] = symbol
    return out


def block_names(b: Block) -> tuple[str, ...]:
    """Every name that a block program introduces, in the order of its text."""
    own = {i.name for i in b.inputs} | {r.name for r in b.results} | set(b.sizes) | {b.name}
    for n in walk(b.body):
        if isinstance(n, Let | Init):
            own |= {x for x in (n.name, n.index_name) if x}
    body = show(b).partition("\n  forall")[2]
    order = [w for w in _WORD.findall(body) if w in own]
    return tuple(dict.fromkeys([*order, *sorted(own - set(order))]))


def signature(b: Block) -> tuple[str, Mapping[str, str]]:
    """Text of a block program with its names replaced by their rank, and name -> that rank.

    Dims that the kernel does not use play no part.
    """
    names = {n: f"#{k}" for k, n in enumerate(block_names(b))}
    text = show(b)
    loops = text[text.find("\n  forall") :] if "\n  forall" in text else text
    used = {w for w in _WORD.findall(loops)}
    lines = [ln for ln in text.splitlines()[1:] if not (ln.startswith("  dim ") and ln.split()[1] not in used)]
    renamed = [_WORD.sub(lambda m: names.get(m[0], m[0]), ln) for ln in lines]
    head = sorted(ln for ln in renamed if ln.startswith(("  dim ", "  input ", "  result ")))
    rest = [ln for ln in renamed if not ln.startswith(("  dim ", "  input ", "  result "))]
    return "\n".join([*head, *rest]), names


def ranked(text: str, own: Container[str]) -> str:
    """A text with the names in `own` replaced by their rank: equal for texts that differ in those only."""
    rank: dict[str, str] = {}
    return _WORD.sub(lambda m: rank.setdefault(m[0], f"#{len(rank)}") if m[0] in own else m[0], text)


def cascade_signature(cascade: Sequence[Compute]) -> str:
    """Equal for cascades that differ in the names of dims and tensors only."""
    own = {n for c in cascade for n in (*c.results, *c.dims, *c.rdims, *tensors_read(c.body))}
    return ranked("; ".join(map(show_compute, cascade)), own)


def words(text: str) -> frozenset[str]:
    """The names in a listing: every word that is defined, loaded from or looped over in it."""
    defined = re.findall(r"(?:let|init|accum|update|store|forall|for) (\w+)", text)
    return frozenset([*defined, *re.findall(r"(\w+)\[", text)])


def repeats(seq: Sequence[str]) -> list[tuple[int, int, int]]:
    """(start, period, times) of the stretches of `seq` that are one sequence over and over, those whose repetition
    covers most first."""
    found = []
    for period in range(1, len(seq) // 2 + 1):
        run = 0  # elements before `end` that are equal to those a period later
        for end in range(len(seq) - period + 1):
            if end < len(seq) - period and seq[end] == seq[end + period]:
                run += 1
                continue
            if run >= period:
                found.append((end - run, period, run // period + 1))
            run = 0
    return sorted(found, key=lambda f: f[1] * (1 - f[2]))
