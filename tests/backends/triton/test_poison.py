"""What LLVM promises of lanes that nobody reads does not reach the lanes beside them."""

from __future__ import annotations

import re
from contextlib import nullcontext
from unittest.mock import patch

import pytest

from tilefold.backends.triton import build
from tilefold.backends.triton.build import Job, Target, built
from tilefold.backends.triton.poison import promises, without_promises

triton = pytest.importorskip("triton")

TARGET = Target("cuda", 90, 32)
#: Rows of pairs, each a channel's, of an image: the row that a program begins at and the lane that a thread is are
#: shifted side by side.
SOURCE = """import triton
import triton.language as tl


@triton.jit
def rows(p, q, s0, s1, t0, t1):
    pid = tl.program_id(0)
    row = pid % 24 * 4
    image = pid // 24
    r_k = tl.arange(0, 128)
    r_j = tl.arange(0, 4)
    both = tl.arange(0, 256)
    at = p + image * s0 + row * s1
    pair = tl.split(tl.reshape(tl.load(at + ((r_j * s1)[:, None] + both[None, :])), [4, 128, 2]))
    i_j = row + r_j
    x = r_k.to(tl.float32)
    y = i_j.to(tl.float32)
    along = tl.where(r_k < 64, -1.0 + (2.0 / 127.0) * x, 1.0 - (2.0 / 127.0) * (127 - r_k).to(tl.float32))
    down = tl.where(i_j < 48, -1.0 + (2.0 / 95.0) * y, 1.0 - (2.0 / 95.0) * (95 - i_j).to(tl.float32))
    a = along[None, :] + pair[0].to(tl.float32)
    b = down[:, None] + pair[1].to(tl.float32)
    tl.store(q + image * t0 + row * t1 + ((r_j * t1)[:, None] + both[None, :]), tl.reshape(tl.join(a, b), [4, 256]))
"""
TYPES = {"p": "*bf16", "q": "*fp32", **dict.fromkeys(("s0", "s1", "t0", "t1"), "i32")}
JOB = Job("rows", SOURCE, TYPES, tuple((n, 16) for n in range(6)), {"num_warps": 4})
#: The lane that a thread is, shifted by 31 into a register of 64 bits.
LOST = re.compile(r"mul\.wide\.u32\s+%rd\d+, %r\d+, 2147483648")


def test_promises_of_vectors_are_taken_away_and_no_others():
    text = "%1 = shl nuw nsw <2 x i32> %0, <i32 31, i32 2>\n%2 = add nsw i32 %a, 1\n%3 = mul nuw <4 x i64> %b, %c\n"
    text += "%4 = trunc nuw nsw <2 x i64> %d to <2 x i32>\n"
    assert promises(text)
    assert without_promises(text) == (
        "%1 = shl <2 x i32> %0, <i32 31, i32 2>\n%2 = add nsw i32 %a, 1\n%3 = mul <4 x i64> %b, %c\n"
        "%4 = trunc <2 x i64> %d to <2 x i32>\n"
    )
    assert not promises(without_promises(text))


def test_a_row_has_no_bits_of_the_lane_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with patch.object(build, "kept_apart", lambda: nullcontext(False)):
        as_it_was = built(JOB, TARGET)
    if not LOST.search(as_it_was.asm["ptx"]):
        pytest.skip("this version of LLVM does not compute that lane so")
    # Triton's cache has that one now
    monkeypatch.setattr(build.known, "find", lambda *_: None)
    done = built(JOB, TARGET)
    assert not LOST.search(done.asm["ptx"])
    assert not promises(done.asm["llir"])
