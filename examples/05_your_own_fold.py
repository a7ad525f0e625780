"""Cascades of your own: variance, the moment of inertia, and one that has no fold.

Neither needs a formula from a book. The derivation finds the correction terms (for variance those
of Chan, Golub and LeVeque), keeps the centred and therefore stable form, and says no when no
finite state can carry the result from one partial mean to another.
"""

import torch

import tilefold

variance = tilefold.derive("""
    a  = sum[l] x[l]
    mu = a / size(l)
    s  = sum[l] (x[l] - mu) ** 2
""")
print(variance)


@tilefold.fuse
def inertia(mass: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Moment of inertia about the centre of mass. mass: [B, N]; x: [B, N, 3]; returns [B]."""
    centre = (mass.unsqueeze(-1) * x).sum(1) / mass.sum(1, keepdim=True)
    return (mass * (x - centre.unsqueeze(1)).square().sum(-1)).sum(1)


torch.manual_seed(0)
mass, x = torch.rand(4, 1000), torch.randn(4, 1000, 3) + 100.0  # far from the origin: the naive formula loses digits
report = tilefold.verify(inertia, mass, x)
print(report)
assert report.ok

try:
    tilefold.derive("""
        r = sum[l] x[l] * x[l]
        t = sum[l] exp(x[l] / sqrt(r / size(l)))
    """)
except tilefold.NotFusibleError as refusal:
    print(f"refused, as it must be:\n{refusal}")
else:
    raise AssertionError("exp(x / r) has no finite closure")
