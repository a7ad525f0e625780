"""What torch's trees of CUDA graphs are told of a model, with stand-ins for them; and why a model is not captured."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tilefold.frontend.capture import cuda_graphs
from tilefold.frontend.capture.cuda_graphs import CudaGraphs

CUDA = SimpleNamespace(device=torch.device("cuda", 1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 4)

    def forward(self, x):
        return torch.softmax(self.l(x), -1) * x.sum()


@pytest.fixture
def captured(monkeypatch):
    """What was captured, by stand-ins that run it; tensors count as those of a device."""
    found = []

    def cudagraphify(run, **how):
        assert run._boxed_call
        calls = []
        found.append((how, calls))

        def replay(args):
            calls.append([a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args])
            results = run(args)
            assert not args  # as the trees do
            return results

        return replay

    monkeypatch.setattr("torch._inductor.compile_fx.cudagraphify", cudagraphify)
    monkeypatch.setattr(cuda_graphs, "_tensors", lambda gm: [CUDA])
    torch._dynamo.reset()
    return found


def x(rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def test_inference_is_captured_with_its_parameters_static(captured):
    m = Model()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    with torch.no_grad():
        for rows in (5, 5):
            torch.testing.assert_close(run(x(rows)), m(x(rows)))
    ((how, calls),) = captured
    assert how["is_inference"] and not how["is_backward"] and how["device_index"] == 1 and len(calls) == 2
    fixed = {p.data_ptr() for p in m.parameters()}
    assert {calls[0][n] for n in how["static_input_idxs"]} == fixed
    assert len(how["placeholders"]) == len(calls[0]) == 3


def test_a_backward_is_captured_with_what_the_forward_left(captured):
    m = Model()
    run = torch.compile(m, backend="tilefold", options={"cudagraphs": True})
    run(x()).sum().backward()
    got = [p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    m(x()).sum().backward()
    for a, p in zip(got, m.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)
    (forward, _), (backward, calls) = captured
    assert not forward["is_backward"] and not forward["is_inference"] and backward["is_backward"]
    assert len(backward["static_input_idxs"]) == len(calls[0]) - 1  # all but the gradient of the result


def test_changing_lengths_are_captured_or_refused_as_inductors_setting_says(captured, caplog):
    m = Model()
    for skip in (False, True):
        torch._dynamo.reset()
        captured.clear()
        options = {"triton.cudagraphs": True, "triton.cudagraph_skip_dynamic_graphs": skip}
        run = torch.compile(m, backend="tilefold", dynamic=True, options=options)
        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="tilefold"):
            for rows in (5, 7):
                torch.testing.assert_close(run(x(rows)), m(x(rows)))
        assert bool(captured) != skip
    assert "its sizes are symbolic" in caplog.text
    assert not torch._inductor.config.triton.cudagraph_skip_dynamic_graphs


@pytest.mark.parametrize("training", [False, True])
def test_tensors_on_a_cpu_are_a_reason_that_is_said_once(training, caplog):
    m = Model()
    torch._dynamo.reset()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    with caplog.at_level(logging.WARNING, logger="tilefold"), torch.set_grad_enabled(training):
        got = run(x())
        if training:
            got.sum().backward()
    torch.testing.assert_close(got, m(x()))
    assert caplog.text.count("runs without CUDA graphs: it has tensors on cpu") == 1


def test_without_the_option_nothing_is_captured(captured):
    with torch.no_grad():
        torch.compile(Model(), backend="tilefold")(x())
    assert not captured


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ([CUDA, SimpleNamespace(device=torch.device("cpu"))], "tensors on cpu"),
        ([CUDA, SimpleNamespace(device=torch.device("cuda", 0))], "several devices"),
        ([], "no device"),
    ],
)
def test_refusals(tensors, match, monkeypatch):
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    monkeypatch.setattr(cuda_graphs, "_tensors", lambda gm: tensors)
    assert match in CudaGraphs({})._refused(gm)


def test_an_operator_that_waits_for_the_device_is_a_reason(monkeypatch):
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    monkeypatch.setattr(cuda_graphs, "_tensors", lambda gm: [CUDA])
    assert CudaGraphs({})._refused(gm) == ""
    (add,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    utils = importlib.import_module("torch._inductor.utils")
    monkeypatch.setattr(utils, "get_first_incompatible_cudagraph_node", lambda gm: add)
    assert "waits for the device" in CudaGraphs({})._refused(gm)


def test_a_backward_that_is_not_captured_tells_the_trees(monkeypatch):
    told = []
    manager = SimpleNamespace(set_to_running_backward=lambda: told.append("backward"))
    graphs = CudaGraphs({}, device=1)
    monkeypatch.setattr(
        "torch._inductor.cudagraph_trees.get_manager",
        lambda device, create_if_none_exists: told.append(device) or manager,
    )
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert graphs.wrapped("backward", gm, lambda args: args[0] + 1, "g")([1]) == 2
    assert told == [1, "backward"]
    assert CudaGraphs({}, reason="cpu").wrapped("backward", gm, len, "g") is len


@pytest.fixture
def failing(monkeypatch, captured):
    """Captures fail at the second call, with the words that are set."""
    words, calls = [""], []

    def cudagraphify(run, **how):
        def replay(args):
            calls.append(how["is_backward"])
            if len(calls) > 1:
                raise RuntimeError(words[0])
            results = run(list(args))
            args.clear()
            return results

        return replay

    monkeypatch.setattr("torch._inductor.compile_fx.cudagraphify", cudagraphify)
    return words, calls


REFUSED = "CUDA error: operation not permitted when stream is capturing"
UNTRACKED = "Detected 1 tensor(s) in the cudagraph pool not tracked as outputs. All live allocations must be tracked."


@pytest.mark.parametrize("why", [REFUSED, UNTRACKED])
def test_a_capture_that_fails_is_given_up(failing, caplog, why):
    words, calls = failing
    words[0] = f"{why}\nmore words"
    m = Model()
    run = torch.compile(m, backend="tilefold", mode="reduce-overhead")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "tilefold"):
        for rows in (5, 5, 5, 5):
            torch.testing.assert_close(run(x(rows)), m(x(rows)))
    assert len(calls) == 2  # not tried again
    (said,) = [r.message for r in caplog.records if "CUDA graphs" in r.message]
    assert f"its capture failed: {why}" in said
    assert "more words" not in said


def test_what_outlives_a_call_is_allocated_before_a_capture(monkeypatch):
    order = []
    counters = SimpleNamespace(ready=False, reserve=lambda: order.append("reserved"))
    monkeypatch.setattr(cuda_graphs, "counters_of", lambda device: counters)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call = CudaGraphs({})._or_alone(lambda args: order.append("captured"), len, "g", 1)
    call([])
    counters.ready = True
    call([])
    assert order == ["reserved", "captured", "captured"]


def test_other_errors_of_a_captured_graph_are_raised(failing):
    words, _ = failing
    words[0] = "an illegal memory access"
    run = torch.compile(Model(), backend="tilefold", mode="reduce-overhead")
    with torch.no_grad():
        run(x())
        with pytest.raises(RuntimeError, match="illegal memory access"):
            run(x())
