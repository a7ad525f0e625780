"""Streams on a GPU: the gradient of attention is planned without a tensor of queries times keys (no device needed)."""

from __future__ import annotations

from tests.tensor.test_streams import program
from tilefold.pipeline import compile_program
from tilefold.runtime.steps import GpuStep


def test_no_kernel_of_a_gradient_stores_a_stream():
    made = compile_program(program(1024), device="cuda")
    assert all(isinstance(s, GpuStep) for s in made.steps)
    by_name = {c.name: c for c in made.fused.program.body}
    stored = {o.removesuffix("_part") for s in made.steps for o in s.fused.block.outputs}
    assert {"dq", "dk", "dv", "slope"} <= stored
    assert not any({"i", "j"} <= {*by_name[n].dims} for n in stored & by_name.keys())
