"""What the laws named in derivations mean, in a sentence each."""

from __future__ import annotations

_LAWS = {
    "independent": "A reduction that uses no earlier result needs no repair.",
    "scalar repair": "F(x, D) splits into G(x) and H(D); when D changes, the partial result moves by H(D')/H(D) "
    "(RedFuser eqs. 4-16; Neptune section 4).",
    "kept in the loop": "The factor stays in every step, because without it a partial result could overflow.",
    "delay": "A factor that is the same for all elements is applied once, at the end.",
    "linear repair": "F is a combination of finitely many functions of x; their sums move together by a matrix "
    "(Chan, Golub, LeVeque for the variance).",
    "monotone repair": "An increasing function of a maximum is the maximum of the function; a decreasing one swaps "
    "maximum and minimum.",
    "product repair": "A factor common to n elements of a product moves it by its n-th power.",
    "known sum": "A sum that another state variable already holds is not kept twice.",
    "constant body": "The sum of the same value over n elements is n times the value.",
    "sign by z3": "The side condition of a law, proved by a solver.",
    "other end": "An extra extremum tells where infinite elements become NaN, as they do in the original.",
}


def explain_law(name: str) -> str:
    """A sentence about a law; empty for one that this table does not know."""
    return _LAWS.get(name, "")
