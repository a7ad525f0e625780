"""The step of a library call, from the statements that it stands for."""

from __future__ import annotations

from collections.abc import Sequence

from tilefold.plan.attention import attention_call
from tilefold.plan.library import ConvolutionCall, GradientCall, library_call
from tilefold.runtime.attention import AttentionStep
from tilefold.runtime.convolution import ConvolutionStep
from tilefold.runtime.convolution_gradient import GradientStep
from tilefold.runtime.library import LibraryStep
from tilefold.runtime.step import Step
from tilefold.tensor.analysis import Graph


def library_step(g: Graph, members: Sequence[str]) -> Step | None:
    """None where the library has no such call."""
    p = g.program
    whole = attention_call(g, g.by_name[members[-1]]) if len(members) > 2 else None
    if whole is not None and whole.members == tuple(members):
        return AttentionStep(whole, p)
    call = library_call(g, g.by_name[members[0]], frozenset(members), tails=True)
    if isinstance(call, GradientCall):
        return GradientStep(call, p)
    if isinstance(call, ConvolutionCall):
        return ConvolutionStep(call, p)
    return None if call is None else LibraryStep(call, p)
