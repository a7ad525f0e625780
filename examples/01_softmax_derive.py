"""Derive softmax and attention as folds, from index notation alone. Nothing is compiled or run.

A cascade is a chain of reductions in which later ones use earlier ones: the sum of softmax
needs its maximum. The derivation finds the *repair* that moves a partial sum from one maximum
to another; with it one pass over the data is enough, in any order and on any number of workers.
"""

import tilefold

softmax = tilefold.derive("""
    m = max[l] x[l]
    t = sum[l] exp(x[l] - m)
""")
print(softmax)

attention = tilefold.derive("""
    m    = max[l] p[l]
    t    = sum[l] exp(p[l] - m)
    o[e] = sum[l] exp(p[l] - m) / t * v[l, e]
""")
print(attention)
print(attention.latex())

# The division by t is delayed to the end: the state holds the undivided sum.
assert {v.name for v in attention.fold.state} == {"m", "t", "o"}
assert all(check.ok for check in attention.fold.checks)
