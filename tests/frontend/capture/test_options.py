"""Keyword arguments of torch.compile: Tilefold's own, Inductor's, and unknown ones."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.frontend.check import randn
from tilefold.errors import TilefoldError
from tilefold.frontend.capture.options import read_options


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"])
def test_all_modes_of_inductor_are_accepted(mode):
    torch._dynamo.reset()
    x = randn(3, 4)
    got = torch.compile(lambda v: torch.softmax(v, -1), backend="tilefold", mode=mode)(x)
    torch.testing.assert_close(got, torch.softmax(x, -1))


def test_options_of_inductor_go_to_inductor_but_for_cuda_graphs():
    given = {"triton.cudagraphs": True, "triton.cudagraph_trees": True, "max-autotune": True, "leftover": "inductor"}
    found = read_options(None, given)
    assert found.inductor == {"max_autotune": True} and found.cuda_graphs == {"triton.cudagraph_trees": True}


@pytest.mark.parametrize(
    ("mode", "given", "graphed"),
    [
        (None, {}, False),
        (None, {"cudagraphs": True}, True),
        ("reduce-overhead", {}, True),
        ("max-autotune", {}, True),
        ("max-autotune-no-cudagraphs", {}, False),
        ("reduce-overhead", {"cudagraphs": False}, False),
        ("max-autotune", {"triton.cudagraphs": False}, False),
    ],
)
def test_cuda_graphs_are_what_the_mode_or_an_option_says(mode, given, graphed):
    assert (read_options(mode, given).cuda_graphs is not None) == graphed


@pytest.mark.parametrize(("mode", "tune"), [(None, False), ("max-autotune", True), ("reduce-overhead", False)])
def test_max_autotune_tunes(mode, tune):
    assert read_options(mode, None).tune is tune
    assert read_options(None, {"max-autotune": True}).tune


def test_leftovers_are_compiled_with_inductors_options(monkeypatch):
    seen = []
    real = importlib.import_module("torch._inductor.compile_fx").compile_fx_inner

    def looks(*args, **how):
        seen.append(torch._inductor.config.epilogue_fusion)
        return real(*args, **how)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", looks)
    torch._dynamo.reset()
    fast = torch.compile(
        lambda v: torch.cumsum(v, 0).sort(-1)[0], backend="tilefold", options={"epilogue_fusion": False}
    )
    fast(randn(5, 5))
    assert seen == [False] and torch._inductor.config.epilogue_fusion


@pytest.mark.parametrize(
    ("mode", "given", "match"),
    [
        (None, {"runners": 1}, "unknown option 'runners'(?s:.)*did you mean runner"),
        (None, {"leftover": "gpu"}, "unknown leftover 'gpu'"),
        (None, {"runner": "gpu"}, "unknown runner 'gpu'"),
        (None, {"zzzzzz": 1}, "unknown option 'zzzzzz'(?s:.)*known: runner"),
        ("fastest", {}, "unknown mode 'fastest'(?s:.)*reduce-overhead"),
    ],
)
def test_what_is_unknown_is_an_error_with_the_way_out(mode, given, match):
    with pytest.raises(TilefoldError, match=match):
        read_options(mode, given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_autotune": "x"}, "the option max_autotune is 'x'\n.*True or False"),
        ({"max-autotune": 1}, "the option max_autotune is 1\n.*True or False"),
        ({"triton.cudagraphs": "x"}, "the option triton.cudagraphs is 'x'"),
        ({"max_fusion_size": "x"}, "the option max_fusion_size is 'x'\n.*a whole number"),
        ({"max_autotune_gemm_search_space": "all"}, "is 'all'\n.*one of 'DEFAULT', 'EXHAUSTIVE'"),
        ({"cudagraphs": "no"}, "cudagraphs is 'no'\n.*True or False"),
        ({"activation_memory_budget": True}, "activation_memory_budget is True\n.*from 0 to 1"),
        ({"activation_memory_budget": "x"}, "activation_memory_budget is 'x'"),
        ({"leftover": 3}, "unknown leftover 3\n.*inductor or eager"),
        ({"runner": None}, "unknown runner None"),
        ({"partition": ["folds"]}, "unknown partition"),
        ({"max_autotun": True}, "unknown option 'max_autotun'.*\n.*did you mean max_autotune"),
        ({3: 4}, "options is .3: 4.\n.*names and values"),
        ("abc", "options is 'abc'"),
        ([1], "options is .1."),
    ],
)
def test_values_of_a_wrong_kind_are_errors(options, message):
    with pytest.raises(TilefoldError, match=message):
        read_options(None, options)


def test_options_that_inductor_takes_are_taken():
    taken = {"max_autotune": True, "max_autotune_gemm_search_space": "EXHAUSTIVE", "cudagraphs": None}
    assert read_options(None, {**taken, "profile_bandwidth_regex": "x", "split_reductions": False}).tune
    for mode in torch._inductor.list_mode_options():
        read_options(mode, None)
