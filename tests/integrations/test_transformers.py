"""`apply` for each family: what is replaced, that it computes the same, and that nothing else changes.

`uncompiled` puts the functions themselves where their compiled forms would be: then every family is compared, and
quickly. Every family is captured and lowered, too, and one is run by kernels.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
from collections import Counter
from typing import ClassVar

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.families import MODELS, doubled, inputs_of, model_of, results, worst
from tilefold.errors import TilefoldError, UnsupportedError
from tilefold.integrations.transformers import apply, modules, revert, swap
from tilefold.integrations.transformers.loss import Deferred
from tilefold.integrations.transformers.models import FAMILIES

#: Parts that are compiled of each family's tiny model; the rest of the table says why it is left.
PARTS = {
    "llama": dict(attention=2, rotary=2, block=2, norm=5, loss=1),
    "qwen2": dict(attention=2, rotary=2, block=2, norm=5, loss=1),
    "qwen3": dict(attention=2, rotary=2, block=2, norm=9, loss=1),
    "gemma": dict(attention=2, rotary=2, block=2, norm=5, loss=1),
    "gemma2": dict(attention=2, rotary=2, block=2, norm=9, loss=1),
    "gemma3": dict(attention=2, rotary=2, block=2, norm=13, loss=1),
    "mistral": dict(attention=2, rotary=2, block=2, norm=5, loss=1),
    "phi": dict(attention=2, rotary=2, block=2, loss=1),
    "phi3": dict(attention=2, rotary=2, block=2, norm=5, loss=1),
    "gpt2": dict(attention=2, block=2, loss=1),
    "bert": dict(attention=2, block=7, loss=1),
    "t5": dict(attention=6, block=4, norm=8, loss=1),
    "vit": dict(attention=2, block=2),
}


class Plain:
    """Stands where a compiled function would: the function itself, and how often it was called."""

    calls: ClassVar = Counter[str]()

    def __init__(self, fn, **_):
        self.fn = fn

    def __call__(self, *args, **kwargs):
        Plain.calls[self.fn.__name__] += 1
        return self.fn(*args, **kwargs)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(swap, "Fused", Plain)
    monkeypatch.setattr(swap, "_fused", {})
    Plain.calls.clear()


def _close(found, eager, exact):
    for name, got, other in zip(("results", "gradients"), worst(found, exact), worst(eager, exact), strict=True):
        assert got <= 2 * other + 4e-7, (name, got, other)


def test_each_family_named_is_tested():
    assert set(FAMILIES) == set(MODELS) == set(PARTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same(family, uncompiled):
    model, inputs = model_of(family), inputs_of(family)
    exact = doubled(model, inputs)
    keys, eager = list(model.state_dict()), results(model, inputs)
    done = apply(model)
    assert Counter(r.kind for r in done.rows if r.state == "ready") == PARTS[family]
    found = results(model, inputs)
    _close(found, eager, exact)
    assert Counter(r.kind for r in done.rows if r.state == "fused") == PARTS[family], str(done)
    assert list(model.state_dict()) == keys
    calls = Plain.calls.total()
    revert(model)
    back = results(model, inputs)
    assert all(torch.equal(back[n], eager[n]) for n in eager) and Plain.calls.total() == calls


def test_the_table_folds_equal_layers_and_says_why(uncompiled):
    text = str(apply(model_of("gpt2")))
    assert "transformer.h.*.mlp" in text and "transformer.h.0" not in text
    assert any(line.split()[:4] == ["transformer.h.*.ln_1", "LayerNorm", "norm", "left"] for line in text.splitlines())


def test_what_somebody_else_replaced_stays(uncompiled):
    model, inputs = model_of("llama"), inputs_of("llama")
    want, calls = model(**inputs).loss, []
    for module in (model, model.model.layers[0].mlp):

        def forward(*args, inner=module.forward, **kwargs):
            calls.append(inner)
            return inner(*args, **kwargs)

        module.forward = forward
    done = apply(model)
    assert torch.allclose(model(**inputs).loss, want) and len(calls) == 2
    left = {r.path: r.why for r in done.rows if r.state == "left"}
    assert left == {"lm_head": "the model's forward is replaced already"}  # the wrapped block is no block any more
    revert(model)
    model(**inputs)
    assert len(calls) == 4


def _doubled(fn):
    @functools.wraps(fn)
    def forward(*args, scale=2, **kwargs):
        return scale * fn(*args, **kwargs)

    return forward


def _kept_elsewhere(fn):
    held = [fn]

    @functools.wraps(fn)
    def forward(*args, **kwargs):
        return held[0](*args, **kwargs)

    return forward


def test_a_decorated_forward_keeps_its_decorators():
    """transformers 5.24 renames an argument of attentions by a decorator."""
    scope = {modules.ROTARY: lambda x: x + 1}
    exec(f"def forward(x, *, off=0):\n    return {modules.ROTARY}(x) + off", scope)
    fn = scope["forward"]
    twice = _doubled(_doubled(fn))
    copied = modules._reading(twice, modules.ROTARY, lambda x: x + 10)
    assert (twice(1), copied(1), copied(1, off=5, scale=3)) == (8, 44, 3 * 2 * 16)
    assert inspect.signature(copied) == inspect.signature(fn) and inspect.unwrap(copied).__code__ is fn.__code__
    assert modules._reading(_kept_elsewhere(fn), modules.ROTARY, None) is None
    assert modules._reading(twice, "another", None) is None


def test_copies_of_the_configuration_follow(uncompiled, monkeypatch):
    """Stacks of T5 have their own; transformers 5.17 changes the model's only."""

    def only_its_own(self, name):
        self.config._attn_implementation_internal = name

    monkeypatch.setattr("transformers.PreTrainedModel.set_attn_implementation", only_its_own)
    model = model_of("t5")
    before = model.encoder.config._attn_implementation
    done = apply(model)
    results(model, inputs_of("t5"))
    assert {r.state for r in done.rows if r.kind == "attention"} == {"fused"}
    revert(model)
    assert model.encoder.config._attn_implementation == before != "tilefold"


def test_parts_can_be_left_out(uncompiled):
    model = model_of("llama")
    done = apply(model, attention=False, loss=False, rotary=False)
    assert {r.kind for r in done.rows} == {"norm", "block"}
    assert model.config._attn_implementation == "sdpa" and "forward" not in model.__dict__


def test_generation_goes_on_with_a_cache(uncompiled):
    model = model_of("llama")
    inputs = {k: v for k, v in inputs_of("llama").items() if k != "labels"}
    want = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    apply(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), want)
    static = model.generate(**inputs, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(static, want) and Plain.calls["attention"] > 0


def test_what_is_refused_runs_as_before_and_is_said(uncompiled, monkeypatch):
    model, inputs = model_of("llama"), inputs_of("llama")
    eager = results(model, inputs)

    def refuse(self, *args, **kwargs):
        raise UnsupportedError("not today", hint="tomorrow")

    monkeypatch.setattr(Plain, "__call__", refuse)
    done = apply(model)
    found = results(model, inputs)
    assert all(torch.allclose(found[n], eager[n], atol=1e-5) for n in eager)
    assert {(r.state, r.why) for r in done.rows} == {("left", "not today")}


def test_a_failure_of_tilefolds_own_is_raised_only_where_it_is_wanted(uncompiled, monkeypatch, lenient):
    model, inputs = model_of("llama"), inputs_of("llama")

    def fail(self, *args, **kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Plain, "__call__", fail)
    done = apply(model)
    model(**inputs)
    assert "internal error: ZeroDivisionError: a bug" in str(done)
    monkeypatch.setenv("TILEFOLD_STRICT", "1")
    apply(model)
    with pytest.raises(ZeroDivisionError):
        model(**inputs)


def test_a_mistake_of_the_callers_is_theirs(uncompiled):
    model = model_of("llama")
    done = apply(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[1000]]))
    with pytest.raises(RuntimeError):
        model.model.layers[0].mlp(torch.randn(2, 3))
    assert all(r.state == "ready" for r in done.rows)


def test_attention_weights_are_given_where_they_are_wanted(uncompiled):
    model, inputs = model_of("bert"), inputs_of("bert")
    done = apply(model)
    out = model(**inputs, output_attentions=True)
    assert len(out.attentions) == 2 and torch.allclose(out.attentions[0].sum(-1), torch.ones(()), atol=1e-5)
    assert "attention with output_attentions" in str(done)


def test_logits_are_there_when_somebody_looks(uncompiled):
    model, inputs = model_of("gemma2"), inputs_of("gemma2")
    want = model(**inputs)
    apply(model)
    out = model(**inputs)
    assert isinstance(out.logits, Deferred) and out.logits.shape == want.logits.shape
    assert out.logits.held is None and Plain.calls["loss"] == 1
    assert torch.allclose(out.loss, want.loss) and torch.allclose(out.logits[:, 3:], want.logits[:, 3:], atol=1e-5)
    assert out.logits.requires_grad and out.logits.argmax(-1).dtype == torch.int64
    assert type(model(input_ids=inputs["input_ids"]).logits) is torch.Tensor  # nothing to defer for


def test_dropout_drops_as_often_as_it_should(uncompiled):
    model = model_of("gpt2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    apply(model)
    inputs = inputs_of("gpt2")
    still = model(**inputs).loss
    model.train()
    torch.manual_seed(1)
    losses = torch.stack([model(**inputs).loss for _ in range(20)])
    assert losses.unique().numel() == 20 and (losses.mean() - still).abs() < 0.5


def test_copies_and_files_are_the_models(uncompiled, tmp_path):
    model, inputs = model_of("llama"), inputs_of("llama")
    want = model(**inputs).logits
    apply(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    for other in (loaded, copy.deepcopy(model), torch.load(kept, weights_only=False)):
        assert torch.allclose(other(**inputs).logits[0], want[0], atol=1e-5)


def test_a_family_by_name_until_it_is_reverted(uncompiled):
    done = apply("llama")
    assert "nothing yet" in str(done)
    model, other = model_of("llama"), model_of("mistral")
    inputs = inputs_of("llama")
    model(**inputs)
    assert any(r.state == "fused" for r in done.rows) and "forward" not in other.model.layers[0].mlp.__dict__
    revert("llama")
    calls = Plain.calls.total()
    model(**inputs), model_of("llama")(**inputs)
    assert Plain.calls.total() == calls and done.rows == []


@pytest.mark.parametrize("name", ["no_such_family", "nowhere.to.be.found"])
def test_a_family_that_is_not_there(name):
    with pytest.raises(TilefoldError, match=r"no models named .*\n.*llama"):
        apply(name)


def test_a_module_that_is_none_of_transformers():
    with pytest.raises(TilefoldError, match="not Linear"):
        apply(torch.nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_captured_and_lowered(family):
    """All that a compilation does but its kernels: nothing is refused, forward and backward are right."""
    torch._dynamo.reset()
    model, inputs = model_of(family), inputs_of(family)
    exact, eager = doubled(model, inputs), results(model, inputs)
    done = apply(model, runner="interpreter")
    _close(results(model, inputs), eager, exact)
    assert Counter(r.kind for r in done.rows if r.state == "fused") == PARTS[family], str(done)
    assert {r.why for r in done.rows if r.state == "left"} <= {"one operator of PyTorch already"}


@pytest.mark.slow
def test_compiled():
    """One family through the compiler, at two lengths with one compilation: the other tests have no kernels."""
    model = model_of("llama")
    done, counts = apply(model), []
    for length, seed in ((10, 0), (13, 1)):
        inputs = inputs_of("llama", length, seed)
        plain = model_of("llama")
        _close(results(model, inputs), results(plain, inputs), doubled(plain, inputs))
        counts.append({k: len(f.graphs) for k, f in swap._fused.items()})
    assert counts[0] == counts[1]
    assert Counter(r.kind for r in done.rows if r.state == "fused") == PARTS["llama"], str(done)


@pytest.mark.parametrize("model", [3, None, object()])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(TilefoldError, match=r"apply takes a model of transformers, not (int|NoneType|object)"):
        apply(model)
