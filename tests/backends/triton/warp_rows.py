"""What Triton 3.6 compiles wrongly: reductions whose rows a warp has in turns, read off its intermediate code.

It combines a thread's element with those of as many neighbours as share the row, counted from the first bit of the
lane's number that moves along the axis: right if the bits that do are neighbours, wrong if one between them is a row's.
"""

from __future__ import annotations

import ast
import re

_LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{register = \[.*?\], lane = (\[.*?\]), warp", re.M)
_BLOCKED = re.compile(r"^(#\w+) = #ttg\.blocked<\{.*?threadsPerWarp = (\[.*?\]), .*?order = (\[.*?\])\}>", re.M)
_REDUCED = re.compile(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32.*?\}\) : \(tensor<([\dx]+)x\w+, (#\w+)>', re.S)


def mixed_up(ttgir: str) -> list[str]:
    """Shapes and lanes of the reductions that mix up rows."""
    lanes = {name: ast.literal_eval(bits) for name, bits in _LINEAR.findall(ttgir)}
    lanes |= {
        name: _bits(ast.literal_eval(threads), ast.literal_eval(order))
        for name, threads, order in _BLOCKED.findall(ttgir)
    }
    found = []
    for axis, text, layout in _REDUCED.findall(ttgir):
        extent = int(text.split("x")[int(axis)])
        along = "".join("1" if bit[int(axis)] % extent else "0" for bit in lanes[layout])
        if "0" in along.strip("0"):
            found.append(f"{text} along {axis}: {lanes[layout]}")
    return found


def _bits(threads: list[int], order: list[int]) -> list[list[int]]:
    """Where each bit of a lane's number moves to, of a blocked layout; how far does not matter but that it is not 0."""
    return [
        [2**k if d == axis else 0 for d in range(len(threads))]
        for axis in order
        for k in range(threads[axis].bit_length() - 1)
    ]
