"""Light syntax colouring of listings, tile kernels and C++, as spans that know which name they show."""

from __future__ import annotations

import re
from collections.abc import Collection
from html import escape

_KEYWORD_LIST = """
forall for in init let accum update store over at load dim grid alloc fill kernel block program input result gemm tile
panel const int int64_t float double bool void auto if else return static template typename extern char struct using
restrict alignas thread_local maybe_unused continue break constexpr inline uint16_t uint8_t int32_t unsigned true false
"""
_FUNCTION_LIST = """
exp exp2 log log2 sqrt rsqrt tanh sigmoid erf erfinv lgamma
where maximum minimum max min sum prod argmax argmin topk any all size
tile_start tile_stop tile_min tile_max abs floor ceil round sign
"""
_KEYWORDS, _FUNCTIONS = frozenset(_KEYWORD_LIST.split()), frozenset(_FUNCTION_LIST.split())
_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*)|(?P<directive>^\#[^\n]*)|(?P<string>\"[^\"\n]*\")"
    r"|(?P<number>\b\d[\w.]*\b(?:[eE][+-]?\d+f?)?)|(?P<word>[A-Za-z_]\w*)",
    re.MULTILINE,
)


def code(text: str, names: Collection[str] = ()) -> str:
    """HTML of the text. Words in `names` (or those names with a C++ suffix) become `<i data-n=name>`."""
    out, at = [], 0
    known = frozenset(names)
    for m in _TOKEN.finditer(text):
        out.append(escape(text[at : m.start()]))
        out.append(_span(m, known))
        at = m.end()
    out.append(escape(text[at:]))
    return "".join(out)


def _span(m: re.Match[str], names: frozenset[str]) -> str:
    text = escape(m[0])
    if m.lastgroup == "comment":
        return f'<span class="c">{text}</span>'
    if m.lastgroup == "directive":
        return f'<span class="d">{text}</span>'
    if m.lastgroup in ("number", "string"):
        return f'<span class="n">{text}</span>'
    if m[0] in _KEYWORDS:
        return f'<span class="k">{text}</span>'
    name = base_name(m[0], names)
    if name is not None:
        return f'<i data-n="{escape(name)}">{text}</i>'
    return f'<span class="f">{text}</span>' if m[0] in _FUNCTIONS else text


def base_name(word: str, names: frozenset[str]) -> str | None:
    """The program's name behind a word: itself, or what precedes a suffix of generated code (`x_s0`, `j_end`)."""
    if word in names:
        return word
    m = re.fullmatch(r"(?:N_)?(\w+?)(?:_(?:s?\d+|end|i|v|acc))?", word)
    return m[1] if m and m[1] in names else None
