"""A Llama-like decoder in plain PyTorch, and its programs: forward, and forward with backward in one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.nn import functional

from tilefold.frontend.capture.decompose import attention, decompositions
from tilefold.frontend.fuse import trace
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.suites.functions import rms_norm
from tilefold.tensor.ir import Program

#: Tensors of one layer: two norms, q, k, v, output, gate, up, down.
A_LAYER = 9


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes. `heads` query heads of `dim // heads` features share `kv_heads` keys and values; `length` tokens."""

    layers: int
    length: int = 512
    dim: int = 512
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 1408

    def weights(self, gen: torch.Generator) -> list[Tensor]:
        """Nine tensors a layer (see A_LAYER) and the last norm's weight."""
        d, kv = self.dim, self.dim // self.heads * self.kv_heads
        shapes = [(d,), (d, d), (kv, d), (kv, d), (d, d), (d,), (self.hidden, d), (self.hidden, d), (d, self.hidden)]
        made = [torch.randn(s, generator=gen) * s[-1] ** -0.5 for _ in range(self.layers) for s in shapes]
        return [*made, torch.randn(d, generator=gen)]

    def hidden_states(self, gen: torch.Generator) -> Tensor:
        """Input of the first layer, [1, length, dim]."""
        return torch.randn(1, self.length, self.dim, generator=gen)

    def __call__(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The last hidden states, [1, length, dim]."""
        half = self.dim // self.heads // 2
        angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        for at in range(0, self.layers * A_LAYER, A_LAYER):
            x = self.layer(x, cos, sin, *weights[at : at + A_LAYER])
        return rms_norm(x, weights[-1])

    def layer(self, x: Tensor, cos: Tensor, sin: Tensor, *w: Tensor) -> Tensor:
        """One decoder layer."""
        norm, q_w, k_w, v_w, o_w, norm_2, gate, up, down = w
        y = rms_norm(x, norm)
        q, k, v = (self.split(functional.linear(y, m), n) for m, n in ((q_w, 0), (k_w, 1), (v_w, 1)))
        o = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + functional.linear(o.transpose(1, 2).reshape(x.shape), o_w)
        y = rms_norm(x, norm_2)
        return x + functional.linear(functional.silu(functional.linear(y, gate)) * functional.linear(y, up), down)

    def split(self, x: Tensor, shared: int) -> Tensor:
        """[1, S, n * d] to heads, [1, n, S, d]; `shared`: 1 for keys and values."""
        n = self.kv_heads if shared else self.heads
        return x.view(1, x.shape[1], n, -1).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x: [1, H, S, d]; cos, sin: [S, d]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), -1) * sin


def forward_program(decoder: Decoder) -> Program:
    """Index notation of the decoder's forward pass."""
    gen = torch.Generator().manual_seed(0)
    return trace(_function(decoder), decoder.hidden_states(gen), decoder.weights(gen)).program


def training_program(decoder: Decoder) -> Program:
    """Forward and, from the gradient of its result, the gradients of every weight, in one program."""
    gen = torch.Generator().manual_seed(0)
    arguments = [decoder.hidden_states(gen), *(w.requires_grad_() for w in decoder.weights(gen))]

    def result(*args: Tensor) -> tuple[Tensor]:
        return (decoder(*args),)

    joint = aot_export_joint_simple(result, tuple(arguments), trace_joint=True, decompositions=dict(decompositions()))
    assert isinstance(joint, torch.fx.GraphModule)
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        joint.graph.erase_node(node)
    return lower(joint, name="training").program


def _function(decoder: Decoder) -> Callable[[Tensor, list[Tensor]], Tensor]:
    def llama(x: Tensor, weights: list[Tensor]) -> Tensor:
        return decoder(x, *weights)

    return llama
