"""Models of Hugging Face's transformers from configurations, with random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilefold.errors import UnsupportedError

VOCABULARY, LENGTH, SMALL_VOCABULARY, SMALL_LENGTH = 32000, 1024, 128, 12


def _library() -> Any:
    try:
        import transformers  # noqa: PLC0415 (optional: only these rows need it)
    except ImportError as error:
        raise UnsupportedError(f"transformers cannot be imported: {error}") from None
    transformers.logging.set_verbosity_error()
    return transformers


class Given(nn.Module):
    """A model called with tensors alone, by the names that it takes; gives logits, or in training the loss."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], **flags: object):
        super().__init__()
        self.model, self.names, self.flags = model, names, flags

    def forward(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=False))
        if len(tensors) > len(self.names):
            given["labels"] = tensors[-1]
        out = self.model(**given, **self.flags)
        found: Tensor = out.loss if "labels" in given else out.logits
        return found


def _decoder(big: bool, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY if big else SMALL_VOCABULARY,
        "hidden_size": 2048 if big else 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 16 if big else 4,
        "num_key_value_heads": 4 if big else 2,
        "intermediate_size": 5632 if big else 48,
        "max_position_embeddings": 2048,
        "use_cache": False,
        "tie_word_embeddings": False,
    }


def _made(model: nn.Module, names: tuple[str, ...] = ("input_ids",), **flags: object) -> nn.Module:
    return Given(model.to(torch.bfloat16), names, **flags)


def llama(big: bool, layers: int) -> nn.Module:
    tr = _library()
    config = tr.LlamaConfig(**_decoder(big, layers), attn_implementation="sdpa")
    return _made(tr.LlamaForCausalLM(config), use_cache=False)


def qwen3(big: bool, layers: int) -> nn.Module:
    tr = _library()
    more = {"head_dim": 128, "intermediate_size": 6144} if big else {"head_dim": 8, "intermediate_size": 48}
    config = tr.Qwen3Config(**_decoder(big, layers) | more, attn_implementation="sdpa")
    return _made(tr.Qwen3ForCausalLM(config), use_cache=False)


def mixtral(big: bool, layers: int) -> nn.Module:
    """Experts by grouped products, which float64 does not have: see `looped_experts`."""
    tr = _library()
    more = {
        "hidden_size": 1024 if big else 32,
        "intermediate_size": 2048 if big else 48,
        "num_local_experts": 8 if big else 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    config = tr.MixtralConfig(**_decoder(big, layers) | more, attn_implementation="sdpa")
    model = tr.MixtralForCausalLM(config)
    model.set_experts_implementation("grouped_mm" if big else "batched_mm")
    return _made(model, use_cache=False)


def looped_experts(module: nn.Module) -> None:
    """Experts one after the other, in any dtype."""
    assert isinstance(module, Given)
    model: Any = module.model
    model.set_experts_implementation("eager")


def gpt2(big: bool, layers: int) -> nn.Module:
    tr = _library()
    config = tr.GPT2Config(
        vocab_size=VOCABULARY if big else SMALL_VOCABULARY, n_positions=1024, n_embd=768 if big else 32,
        n_layer=layers, n_head=12 if big else 4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = tr.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # without it the loss logs a warning, which cuts the graph
    return _made(model, use_cache=False)


def bert(big: bool, layers: int) -> nn.Module:
    tr = _library()
    config = tr.BertConfig(
        vocab_size=VOCABULARY if big else SMALL_VOCABULARY, hidden_size=768 if big else 32, num_hidden_layers=layers,
        num_attention_heads=12 if big else 4, intermediate_size=3072 if big else 48, max_position_embeddings=1024,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return _made(tr.BertForMaskedLM(config))


def t5(big: bool, layers: int) -> nn.Module:
    tr = _library()
    config = tr.T5Config(
        vocab_size=VOCABULARY if big else SMALL_VOCABULARY, d_model=512 if big else 32, d_kv=64 if big else 8,
        d_ff=2048 if big else 48, num_layers=layers, num_decoder_layers=layers, num_heads=8 if big else 4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _made(tr.T5ForConditionalGeneration(config), ("input_ids", "decoder_input_ids"), use_cache=False)


def vit(big: bool, layers: int) -> nn.Module:
    tr = _library()
    config = tr.ViTConfig(
        hidden_size=768 if big else 32, num_hidden_layers=layers, num_attention_heads=12 if big else 4,
        intermediate_size=3072 if big else 48, image_size=224 if big else 32, patch_size=16 if big else 8,
        num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return _made(tr.ViTForImageClassification(config), ("pixel_values",))
