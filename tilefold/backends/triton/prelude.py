"""Device functions that generated kernels call: before a kernel stand those that it needs, for Triton reads the text of
every one (2 ms of the processor each)."""

from __future__ import annotations

import re
from functools import cache

HEADER = """import triton
import triton.language as tl
from triton.language import core
from triton.language.extra import libdevice
"""

FUNCTIONS = """
@triton.jit
def tf_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tf_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tf_int_max(a, b):
    return tl.maximum(a, b)


@triton.jit
def tf_int_min(a, b):
    return tl.minimum(a, b)


@triton.jit
def tf_raise(p, x, mask):  # NaN of either sign is above all: bits are compared
    tl.atomic_max(p, tl.where(x == x, x, float("nan")), mask=mask, sem="relaxed")


@triton.jit
def tf_mul(a, b):
    return a * b


@triton.jit
def tf_square(x):
    return x * x


@triton.jit
def tf_cube(x):
    return x * x * x


@triton.jit
def tf_floordiv(a, b):
    q = a // b
    r = a - q * b
    return q - ((r != 0) & ((r < 0) != (b < 0))).to(tl.int32)


@triton.jit
def tf_whole(x, m, s):  # x // n for 0 <= x < 2^31, m and s of n (`values.inverse`)
    return (tl.umulhi(x.to(tl.uint32), m) >> s).to(tl.int32)


@triton.jit
def tf_rest(x, m, s, n):  # x % n
    return x - tf_whole(x, m, s) * n


@triton.jit
def tf_mod(a, b):
    r = a - (a // b) * b
    return r + tl.where((r != 0) & ((r < 0) != (b < 0)), b, 0)  # b may be a number beyond 32 bits


@triton.jit
def tf_float_mod(a, b):
    return a - tl.floor(a / b) * b


@triton.jit
def tf_sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def tf_int_sign(x):
    return tl.where(x > 0, 1, 0) - tl.where(x < 0, 1, 0)


@triton.jit
def tf_trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def tf_round(x):
    below = tl.floor(x)
    rest = x - below
    odd = below - 2.0 * tl.floor(below * 0.5)
    return below + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), 1.0, 0.0)


@triton.jit
def tf_tanh(x):
    # near zero the odd polynomial of CUDA's library: one less two parts of one has no digit right there
    s = x * x
    p = ((0.0157296831 * s - 0.0523029624) * s + 0.133152977) * s - 0.333327681
    return tl.where(tl.abs(x) < 0.55, p * s * x + x, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))


@triton.jit
def tf_expm1(x):
    # Kahan's: what rounding takes from exp(x) - 1 it takes from the logarithm too
    u = tl.exp(x)
    near = (u - 1.0) * x / tl.log(tl.where(u == 1.0, 2.0, u))
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) < 1.0, near, u - 1.0))


@triton.jit
def tf_log1p(x):
    u = 1.0 + x
    rest = tl.where(u == 1.0, 1.0, u - 1.0)
    return tl.where(u == 1.0, x, tl.where(tl.abs(x) < 1.0, tl.log(u) * (x / rest), tl.log(u)))


@triton.jit
def tf_erfinv(given):
    # from Winitzki's approximation by Halley's method: in float64, for near 1 what is left of erf(y) has few places
    x = given.to(tl.float64)
    s = tl.log((1.0 - x) * (1.0 + x))
    t = 4.3307467508 + 0.5 * s
    y = tl.sqrt(tl.maximum(tl.sqrt(t * t - s * 6.8027210884) - t, 0.0))
    y = tl.where(x < 0.0, -y, y)
    for _ in range(3):
        u = (tl.erf(y) - x) * tl.exp(y * y) * 0.8862269255
        y = y - tl.where(tl.abs(x) < 1.0, u / (1.0 + y * u), 0.0)
    return tl.where(tl.abs(x) < 1.0, y, x / (1.0 - tl.abs(x)) / (tl.abs(x) == 1.0)).to(given.dtype)


@triton.jit
def tf_lgamma(given):
    # Stirling's series from 8 on, the recurrence below, the reflection of negative numbers: in float64, as they cancel
    x = given.to(tl.float64)
    y = tl.where(x < 0.0, 1.0 - x, x)
    z = tl.where(y < 8.0, y + 8.0, y)
    p = y
    for k in range(1, 8):
        p = p * (y + k)
    r = 1.0 / (z * z)
    q = ((-5.952380952e-4 * r + 7.936507937e-4) * r - 2.777777778e-3) * r + 0.0833333333
    v = (z - 0.5) * tl.log(z) - z + 0.9189385332 + q / z
    v = tl.where(z == float("inf"), z, v - tl.where(y < 8.0, tl.log(p), 0.0))
    t = x - tl.floor(x)
    return tl.where(x < 0.0, 1.1447298858494 - tl.log(tl.abs(tl.sin(t * 3.14159265358979))) - v, v).to(given.dtype)


@triton.jit
def tf_reciprocal(x):
    # to the last place, of what is no less than the least normal number: a division's seven other instructions scale
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tf_sqrt_of_normal(x):
    # of 2^-100 or more, and rounded as CUDA's, whose instructions these are without its branch to what is rare: no load
    # that stands behind a branch is begun before it
    r = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    q = x * r
    return tl.where(x < float("inf"), tl.fma(tl.fma(-q, q, x), 0.5 * r, q), x)


@triton.jit
def tf_sqrt(x):
    # less is taken to where a remainder has its places, by a power of 4
    low = x < 7.888609052210118e-31
    q = tf_sqrt_of_normal(tl.where(low, x * 1.2089258196146292e24, x))
    return tl.where(x == 0.0, x, tl.where(low, q * 9.094947017729282e-13, q))


@triton.jit
def tf_sigmoid(x):
    return tf_reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def tf_pow_of_positive(x, y):
    # 2^(y log2 x), log2 x in two parts (Tang's quotient: 2^k m, m from 0.7 to 1.4, log m of u = 2 (m - 1) / (m + 1)); a
    # product that is subtracted must be the rounded one, also to ptxas. Of 0, infinity and what is less than normal the
    # machine's logarithm has all that there is
    e = (x.to(tl.int32, bitcast=True) - 0x3F3504F3) & -8388608
    m = (x.to(tl.int32, bitcast=True) - e).to(tl.float32, bitcast=True)
    n = e.to(tl.float32) * 1.1920928955078125e-07
    q = m - 1.0
    r = tf_reciprocal(m + 1.0)
    u = libdevice.mul_rn(q + q, r)
    v = u * u
    w = u * v * (((v * 4.3402778e-04 + 2.2321429e-03) * v + 0.0125) * v + 0.083333336)
    hi = u + w
    lo = r * tl.fma(-u, q, (q - u) + (q - u)) + (w - (hi - u))
    a = hi * 1.44269502
    b = tl.fma(lo, 1.44269502, tl.fma(hi, 1.92596299e-08, tl.fma(hi, 1.44269502, -a)))
    s = n + a
    p = y * s
    rest = tl.fma(y, ((n - s) + a) + b, tl.fma(y, s, -p))
    z = tl.exp2(p)
    z = tl.where((z > 0.0) & (z < float("inf")), tl.fma(z, rest * 0.693147182, z), z)
    log = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.where((x >= 1.1754943508222875e-38) & (x < float("inf")), z, tl.exp2(tl.where(y == 0.0, 0.0, y * log)))


@triton.jit
def tf_pow(x, y):
    # of any sign, without branches; what depends on x alone is computed once where x is one number
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) != y * 0.5)
    z = tl.where(tl.abs(x) == 1.0, 1.0, tf_pow_of_positive(tl.abs(x), y))
    z = tl.where((x.to(tl.int32, bitcast=True) < 0) & odd, -z, z)
    return tl.where((x < 0.0) & (x > -float("inf")) & (whole == 0), float("nan"), z)


@triton.jit
def tf_tanh_by_exp(x):
    return 1.0 - 2.0 * tf_reciprocal(1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def tf_erf_by_exp(x):
    # one less 2 to a polynomial (Lawson's fit), off by 2^-21 at most; the sign is put before it
    t = tl.minimum(tl.abs(x), 3.92, propagate_nan=tl.PropagateNan.ALL)
    p = (0.00014204092440195382 * t - 0.0036642684135586023) * t + 0.03089616820216179
    p = ((p * t - 0.14969941973686218) * t - 0.9181654453277588) * t - 1.6279250383377075
    r = (1.0 - tl.exp2(p * t)).to(tl.int32, bitcast=True)
    return (r | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def tf_tanh_single(x):
    # CUDA's library branches at 0.6: elements of a thread wait for one another there, and most warps go both ways
    s = x * x
    p = ((0.0157296831 * s - 0.0523029624) * s + 0.133152977) * s - 0.333327681
    return tl.where(tl.abs(x) < 0.55, p * s * x + x, tf_tanh_by_exp(x))


@triton.jit
def tf_log1p_single(x):
    # CUDA's library without its branches for what has no logarithm: 1 + x is 2^k (1 + m), m from -1/4 to 1/2
    e = ((x + 1.0).to(tl.int32, bitcast=True) - 0x3F400000) & -8388608
    m = 0.25 * (0x40800000 - e).to(tl.float32, bitcast=True) - 1.0
    m += (x.to(tl.int32, bitcast=True) - e).to(tl.float32, bitcast=True)
    p = ((-0.0453486145 * m + 0.105468884) * m - 0.132297039) * m + 0.144914463
    p = (((p * m - 0.166415647) * m + 0.199888676) * m - 0.250001967) * m + 0.333335102
    r = tl.fma(e.to(tl.float32) * 1.1920928955078125e-07, 0.6931471824645996, tl.fma((p * m - 0.5) * m, m, m))
    return tl.where(x < float("inf"), tl.where(x < -1.0, float("nan"), r), x)


@triton.jit
def tf_log1p_unit(x):
    # of 0 to 1: no power of 2 is taken out (Lawson's fit, relatively right to 2^-27; in float32 to the last place)
    p = ((-0.00367739237844944 * x + 0.02187510021030903) * x - 0.060920897871255875) * x + 0.11025075614452362
    p = (((p * x - 0.15569506585597992) * x + 0.19774314761161804) * x - 0.24975097179412842) * x + 0.3333224952220917
    return tl.fma((p * x - 0.5) * x, x, x)


@triton.jit
def tf_log2_approx(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tf_turned(x):
    # x less its whole turns, in two parts: off by 2^-22 at most
    n = tl.fma(x, 0.15915494309189535, 12582912.0) - 12582912.0  # rounded, for it has no places left there
    return tl.fma(n, 1.7484556e-07, tl.fma(n, -6.2831855, x))


@triton.jit
def tf_cos_approx(x):
    x = tf_turned(x)
    return tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tf_sin_approx(x):
    x = tf_turned(x)
    return tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tf_tanh_approx(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tf_again(x):
    # the same narrow values, but the compiler cannot know: it converts them once more and keeps them as they are
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def tf_times(x, y):
    # LLVM takes a library's mul_rn for any product, which it may fuse with a sum
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tf_even(s):
    # a power of two that takes s to where its inverse does not overflow
    return tl.where(tl.abs(s) < 5.421010862427522e-20, 1.8446744073709552e19, 1.0)


@triton.jit
def tf_inverse(s):
    # 1 / s to the last place, without the branches of a division
    r = 1.0 / s
    better = tl.fma(tl.fma(-r, s, 1.0), r, r)
    return tl.where(tl.abs(better) < float("inf"), better, r)


@triton.jit
def tf_inverse_below(s):
    # nearly 1 / s: less by 2^-23 of it or up to three times that, so that what it lacks is not 0 and has its sign
    return tf_inverse(s) * 0.9999997615814209


@triton.jit
def tf_inverse_rest(s, below):
    # what is lacking
    rest = tl.fma(-below, s, 1.0) * below
    return tl.where(tl.abs(rest) < float("inf"), rest, below)


@triton.jit
def tf_by_parts(x, below, rest):
    # x / s, infinite where x is
    return tl.fma(x, below, x * rest)


@triton.jit
def tf_quotient(x, s, inverse):
    # x / s, correctly rounded: the quotient's remainder is exact in a fused multiply-add
    q = x * inverse
    rest = tl.fma(-q, s, x)
    return tl.where(tl.abs(rest) < float("inf"), tl.fma(rest, inverse, q), q)


@triton.jit
def tf_in_e4m3(x):
    return tl.where(tl.abs(x) <= 464.0, x, float("nan"))


@triton.jit
def tf_rank(x, index):
    # order of the key: value (NaN first, -0 = +0), then the lower index; the key of nothing is the least int64
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x != x, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def tf_ranked_value(key):
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tf_ranked_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)
"""

#: One round of Philox-4x32: words a to d of the counters, k and m of the key.
PHILOX_ROUND = """\
        p, q = c.to(tl.uint64) * 0xCD9E8D57, a.to(tl.uint64) * 0xD2511F53
        a, c = (p >> 32).to(tl.uint32) ^ b ^ k, (q >> 32).to(tl.uint32) ^ d ^ m
        b, d = p.to(tl.uint32), q.to(tl.uint32)
        k += 0x9E3779B9
        m += 0xBB67AE85"""

#: Philox-4x32-10 of the counter (column / 4, row, 0, 0), and of its four words that of column % 4 (`algebra.philox`).
RANDOM = f"""
@triton.jit
def tf_random(seed, row, column):
    row, column = core.to_tensor(row), core.to_tensor(column)
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a = (column >> 2).to(tl.uint32)
    b = row.to(tl.uint32)
    c = a * 0
    d = c
    for _ in tl.static_range(10):  # one multiplication has both words of a product
{PHILOX_ROUND}
    even, odd = tl.where((column & 2) == 0, a, c), tl.where((column & 2) == 0, b, d)
    return (tl.where((column & 1) == 0, even, odd) >> 8).to(tl.int64)


@triton.jit
def tf_random16(seed, batch, row, column):
    # Philox-4x32-7; its eight halves are those of two columns, in rows and columns 8 apart
    batch, row, column = core.to_tensor(batch), core.to_tensor(row), core.to_tensor(column)
    k, m = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a = (column & -10).to(tl.uint32)
    b = (row & -9).to(tl.uint32)
    d = batch.to(tl.uint32)
    c = d * 0
    for _ in tl.static_range(7):
{PHILOX_ROUND}
    above, below = tl.where((column & 8) == 0, a, b), tl.where((column & 8) == 0, c, d)
    word = tl.where((row & 8) == 0, above, below)
    return tl.where((column & 1) == 0, word & 0xFFFF, word >> 16).to(tl.int32)
"""

#: Indices that data chose must exist: where one does not in a lane of an element, the device stops (`ASSERTING`).
CHECKED = """
@triton.jit
def tf_exist(exists, lanes):
    tl.device_assert(exists, "index out of range", lanes)
"""
INTERPRETED_CHECKED = """
def tf_exist(exists, lanes):
    missing = exists == 0
    if (missing if lanes is True else missing & lanes).handle.data.any():
        raise IndexError("index out of range")
"""

#: The interpreter runs kernels as Python: bounds of loops are numbers there. Replaces what it computes wrongly.
INTERPRETED = """

def tf_range(start, stop, step):
    def number(x):
        return x if isinstance(x, int) else int(x.handle.data.reshape(-1)[0])

    return range(number(start), number(stop), step)


@triton.jit
def tf_in_e4m3(x):
    # to the nearest e4m3 in float32: the interpreter's own conversion loses carries into the exponent
    grid = tl.exp2(tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 1e-30))), -6.0) - 3.0)
    return tl.where(tl.abs(x) <= 464.0, tf_round(x / grid) * grid, float("nan"))
"""


#: In the code of kernels that must be compiled with assertions.
ASSERTING = "tf_exist("


def prelude(code: str, *, interpreted: bool = False) -> str:
    """Imports, and the functions that a kernel of this code needs."""
    return HEADER + functions(code, interpreted=interpreted)


def functions(code: str, *more: str, interpreted: bool = False) -> str:
    """The functions that a kernel of this code needs. more: texts in which some have another form."""
    checked = (INTERPRETED, INTERPRETED_CHECKED) if interpreted else (CHECKED,)
    return needed(FUNCTIONS, RANDOM, *checked, *more, code=code)


def needed(*texts: str, code: str) -> str:
    """Of texts of functions those that the code calls, and those that these call, in the texts' order; of two with one
    name the later one."""
    known = _by_name("\n".join(texts))
    wanted: set[str] = set()
    new = _called(code) & known.keys()
    while new:
        wanted |= new
        new = {n for f in new for n in _called(known[f])} & known.keys() - wanted
    return "".join(f"\n\n{text}\n" for name, text in known.items() if name in wanted)


@cache
def _by_name(text: str) -> dict[str, str]:
    """The functions of a text, each with its decorator."""
    parts = re.split(r"\n(?=@|def )(?<!jit\n)", "\n" + text)
    return {found[1]: part.strip("\n") for part in parts if (found := re.search(r"^def (\w+)", part, re.MULTILINE))}


def _called(code: str) -> set[str]:
    return set(re.findall(r"\btf_\w+", code))
