"""The cascades of the papers and of the work item, in the text that `tilefold.derive` reads."""

from __future__ import annotations

from tilefold.algebra.cascade import Cascade
from tilefold.tensor.formula import cascade_of, lines_of

SOFTMAX = """
    m = max[l] x[l]
    t = sum[l] exp(x[l] - m)
"""
LOGSUMEXP_GUARDED = """
    m = max[l] x[l]
    t = sum[l] exp(x[l] - where(abs(m) == inf, 0.0, m))
"""
CROSS_ENTROPY = """
    m[i] = max[l] x[i, l]
    t[i] = sum[l] exp(x[i, l] - m[i])
    g[i] = sum[l] where(l == label[i], x[i, l], 0.0)
"""
ATTENTION = """
    m[i] = max[l] p[i, l]
    t[i] = sum[l] exp(p[i, l] - m[i])
    o[i, e] = sum[l] exp(p[i, l] - m[i]) / t[i] * v[l, e]
"""
ATTENTION_MASKED = """
    s[i, l] = where(l <= i, p[i, l] * 0.125, -inf)
    m[i] = max[l] s[i, l]
    t[i] = sum[l] exp(s[i, l] - m[i])
    o[i, e] = sum[l] bf16(exp(s[i, l] - m[i]) / t[i]) * v[l, e]
"""
ROUTING = """
    m = max[l] x[l]
    t = sum[l] exp(x[l] - m)
    s[r], i[r] = topk[l; r] exp(x[l] - m) / t
"""
ROUTING_PAPER = """
    m = max[l] x[l]
    t = sum[l] exp(x[l] - m)
    s[r], i[r] = topk[l; r] x[l]
"""
QUANTISE_GEMM = """
    m = max[l] abs(a[l])
    c[e] = sum[l] e4m3(448.0 * a[l] / m) * w[l, e]
"""
RMSNORM_GEMM = """
    s = sum[l] x[l] * x[l]
    o[e] = sum[l] x[l] * rsqrt(s / size(l) + 1e-6) * g[l] * w[l, e]
"""
LAYERNORM_GEMM = """
    s = sum[l] x[l]
    mean = s / size(l)
    q = sum[l] (x[l] - mean) ** 2
    o[e] = sum[l] ((x[l] - mean) * rsqrt(q / size(l) + 1e-5) * g[l] + b[l]) * w[l, e]
"""
RMSNORM_MAX = """
    s = sum[l] x[l] * x[l]
    m = max[l] x[l] / sqrt(s / size(l) + 1e-6)
"""
L2_NORM = """
    m = max[l] abs(x[l])
    t = sum[l] (x[l] / m) ** 2
"""
PERFORMER = """
    r1 = max[l] c1[l]
    r2 = sum[l] 0.5 * exp(c1[l] - r1 - 0.25 * c2[l])
    o[e] = sum[l] 0.5 * exp(c1[l] - r1 - 0.25 * c2[l]) / r2 * v[l, e]
"""
SUM_SUM = """
    m = sum[l] x1[l] ** 2
    s = sum[l] x1[l] * x2[l] / sqrt(maximum(m - 10.0, 0.001))
"""
VARIANCE = """
    s = sum[l] x[l]
    q = sum[l] (x[l] - s / size(l)) ** 2
"""
COVARIANCE = """
    s[a] = sum[l] x[l, a]
    q[a, b] = sum[l] (x[l, a] - s[a] / size(l)) * (x[l, b] - s[b] / size(l))
"""
WEIGHTED_COVARIANCE = """
    W = sum[l] abs(w[l])
    s[a] = sum[l] abs(w[l]) * x[l, a]
    q[a, b] = sum[l] abs(w[l]) * (x[l, a] - s[a] / W) * (x[l, b] - s[b] / W)
"""
MOMENTS = """
    s = sum[l] x[l]
    d[l] = x[l] - s / size(l)
    q = sum[l] d[l] ** 2
    k3 = sum[l] d[l] ** 3
    k4 = sum[l] d[l] ** 4
"""
THIRD_MOMENT_AS_PRODUCTS = """
    s = sum[l] x[l]
    d[l] = x[l] - s / size(l)
    k = sum[l] d[l] * d[l] * d[l]
"""
FOURTH_MOMENT = """
    s = sum[l] x[l]
    k = sum[l] (x[l] - s / size(l)) ** 4
"""
INERTIA = """
    M = sum[l] w[l]
    c[d] = sum[l] w[l] * x[l, d]
    I[d] = sum[l] w[l] * (x[l, d] - c[d] / M) ** 2
"""
TWO_AXES_VARIANCE = """
    s = sum[k, l] x[k, l]
    q = sum[k, l] (x[k, l] - s / (size(k) * size(l))) ** 2
"""
ARGMAX_OF_SOFTMAX = """
    m = max[l] x[l]
    t = sum[l] exp(x[l] - m)
    p, i = argmax[l] exp(x[l] - m) / t
"""
ARGMIN_SCALED = """
    s = sum[l] x[l] * x[l]
    p, i = argmin[l] x[l] * rsqrt(s + 1e-6)
"""
PRODUCT_SCALED = """
    m = max[l] abs(x[l])
    P = prod[l] x[l] / m
"""
MAX_SHIFTED = """
    s = sum[l] y[l]
    m = max[l] x[l] - s
"""
MAX_DECREASING = """
    s = sum[l] x[l] * x[l]
    m = max[l] -(x[l] / (s + 1.0))
"""
MAX_OF_WEIGHTED_EXP = """
    m = max[l] x[l]
    y = max[l] exp(x[l] - m) * w[l]
"""
ENTROPY = """
    m = max[l] x[l]
    t = sum[l] exp(x[l] - m)
    h = sum[l] exp(x[l] - m) / t * (x[l] - m - log(t))
"""
PHASE = """
    s = sum[l] x[l]
    q = sum[l] sin(y[l] + s)
"""
SIGN_BY_Z3 = """
    A = sum[l] x[l]
    B = sum[l] y[l]
    m = max[l] x[l] * (A * A + B * B - 2.0 * A * B)
"""

DERIVABLE = {
    "softmax": SOFTMAX,
    "logsumexp, guarded": LOGSUMEXP_GUARDED,
    "cross-entropy": CROSS_ENTROPY,
    "attention": ATTENTION,
    "attention, causal, bf16": ATTENTION_MASKED,
    "routing": ROUTING,
    "RMSNorm + GEMM": RMSNORM_GEMM,
    "LayerNorm + GEMM": LAYERNORM_GEMM,
    "RMSNorm + max": RMSNORM_MAX,
    "L2 norm": L2_NORM,
    "performer": PERFORMER,
    "sum + sum": SUM_SUM,
    "variance": VARIANCE,
    "covariance": COVARIANCE,
    "weighted covariance": WEIGHTED_COVARIANCE,
    "moments": MOMENTS,
    "third moment as products": THIRD_MOMENT_AS_PRODUCTS,
    "fourth moment": FOURTH_MOMENT,
    "inertia": INERTIA,
    "variance, two axes": TWO_AXES_VARIANCE,
    "argmax of softmax": ARGMAX_OF_SOFTMAX,
    "argmin, scaled": ARGMIN_SCALED,
    "product, scaled": PRODUCT_SCALED,
    "max, shifted": MAX_SHIFTED,
    "max, decreasing": MAX_DECREASING,
    "max of weighted exp": MAX_OF_WEIGHTED_EXP,
    "entropy": ENTROPY,
    "phase": PHASE,
    "sign by z3": SIGN_BY_Z3,
}


def cascade(text: str, **dtypes: str) -> Cascade:
    """The cascade of a formula; `label` is an integer input."""
    return cascade_of(lines_of(text), {"label": "i64", **dtypes})
