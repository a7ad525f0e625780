"""Tiny models of each family, their inputs, and their results with all gradients."""

from __future__ import annotations

import copy

import torch
import transformers as t
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_HEADS = {**_SIZES, "head_dim": 8}
_SLIDING = {**_HEADS, "sliding_window": 4}
MODELS = {
    "llama": (t.LlamaConfig, t.LlamaForCausalLM, _SIZES),
    "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM, _SIZES),
    "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, _HEADS),
    "gemma": (t.GemmaConfig, t.GemmaForCausalLM, _HEADS),
    "gemma2": (t.Gemma2Config, t.Gemma2ForCausalLM, _SLIDING),
    "gemma3": (t.Gemma3TextConfig, t.Gemma3ForCausalLM, _SLIDING),
    "mistral": (t.MistralConfig, t.MistralForCausalLM, {**_SIZES, "sliding_window": 4}),
    "phi": (t.PhiConfig, t.PhiForCausalLM, _SIZES),
    "phi3": (t.Phi3Config, t.Phi3ForCausalLM, _SIZES),
    "gpt2": (
        t.GPT2Config,
        t.GPT2LMHeadModel,
        dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    ),
    "bert": (t.BertConfig, t.BertForMaskedLM, _SIZES),
    "t5": (
        t.T5Config,
        t.T5ForConditionalGeneration,
        dict(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    ),
    "vit": (
        t.ViTConfig,
        t.ViTForImageClassification,
        {**{k: _SIZES[k] for k in _VISION}, "image_size": 16, "patch_size": 4},
    ),
}  # fmt: skip


def model_of(family: str, *, spread: float = 0.1, **more: object) -> t.PreTrainedModel:
    """An untrained model of the family, the same each time; in evaluation mode.

    spread: how far weights are drawn around what the model begins with; `more`: settings of its configuration.
    """
    configuration, made, sizes = MODELS[family]
    torch.manual_seed(0)
    model = made(configuration(**{**sizes, **more}))
    with torch.no_grad():
        for p in model.parameters():  # norms start at 0 or 1, which would hide mistakes
            p.add_(torch.randn_like(p) * spread)
    return model.eval()


def inputs_of(family: str, length: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences with labels, the second with padding in front; or two images."""
    torch.manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 96, (2, length))
    labels = ids.clone()
    labels[0, :3] = -100
    seen = torch.ones_like(ids)
    seen[1, :2] = 0
    labels[1, :3] = -100  # what padding predicts is anybody's guess
    return {"input_ids": ids, "labels": labels, "attention_mask": seen}


def results(model: t.PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss, logits of what is no padding, and the gradients of all parameters, in float64."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    logits = out.logits.detach().double()
    if "attention_mask" in inputs and logits.shape[:2] == inputs["attention_mask"].shape:
        logits = logits[inputs["attention_mask"].bool()]
    found = {"loss": out.loss.detach().double(), "logits": logits}
    return found | {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


class _Double(TorchFunctionMode):
    """Models ask for float32 inside (norms, softmax); here they get float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(x):
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


def doubled(model: t.PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same results of eager attention in float64."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    with _Double():
        return results(exact, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})


def worst(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Error of the logits over the largest logit; of gradients over the largest gradient of the model."""
    assert found.keys() == exact.keys()
    outs = [n for n in exact if n in ("loss", "logits")]
    grads = [n for n in exact if n not in outs]
    return tuple(  # type: ignore[return-value]
        max((found[n] - exact[n]).abs().max().item() for n in names) / max(exact[n].abs().max().item() for n in names)
        for names in (outs, grads)
    )
