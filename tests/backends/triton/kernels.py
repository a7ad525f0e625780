"""Kernels of the suites at the sizes that they are measured at, without tensors of those sizes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import triton

from tests.backends.triton.functions import narrow_weights, of_bytes
from tilefold.backends.triton.launch import TritonKernel, Variant
from tilefold.block.canonical import canonical
from tilefold.block.ir import Block
from tilefold.frontend.fuse import trace
from tilefold.plan.gpu import fuse_for_gpu
from tilefold.plan.hardware import gpu_named
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.suites.gpu import operators as o
from tilefold.tile.layout import usual_units

H, F = torch.float16, torch.float32


def meta(*shape: int, dtype: torch.dtype = H) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(b: int, h: int, queries: int, keys: int, dim: int, kv: int | None = None) -> tuple[torch.Tensor, ...]:
    return meta(b, h, queries, dim), meta(b, kv or h, keys, dim), meta(b, kv or h, keys, dim)


def eight_bits(kept: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(kept) for x in heads(2, 32, 4096, 4096, 128))


def head(x, w):
    """logsumexp of a language model's logits."""
    return torch.logsumexp((x @ w.mT).float(), -1)


def held_scores(q, k, v):
    """No fold: the scores of a row are held whole, summed, and used."""
    s = q @ k.mT
    return torch.tanh(s / s.abs().float().sum(-1, keepdim=True)).to(v.dtype) @ v


PROGRAMS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "causal": (o.causal, heads(1, 32, 4096, 4096, 128)),
    "heads of 64": (o.attention, heads(32, 12, 512, 512, 64)),
    "attention of float32": (o.attention, tuple(x.float() for x in heads(2, 32, 1024, 1024, 128))),
    "attention of e4m3": (of_bytes(torch.bfloat16), eight_bits(torch.float8_e4m3fn)),
    "attention of e5m2": (of_bytes(torch.float16), eight_bits(torch.float8_e5m2)),
    "attention of e4m3 in float32": (of_bytes(F), eight_bits(torch.float8_e4m3fn)),
    "8-bit weights": (narrow_weights, (meta(2048, 4096), meta(4096, 512, dtype=torch.float8_e4m3fn))),
    "routing of float32": (o.moe_routing(2), (meta(2048, 4096, dtype=F), meta(4096, 64, dtype=F))),
    "head": (head, (meta(4096, 4096), meta(50_000, 4096))),
    "512 experts": (o.moe_routing(8), (meta(2048, 4096), meta(4096, 512))),
    "eight experts": (o.moe_routing(2), (meta(2048, 4096), meta(4096, 8))),
    "grouped decode": (o.gqa, heads(1, 64, 1, 32768, 128, 8)),
    "held scores": (held_scores, heads(6, 4, 400, 400, 64)),
    "latent": (o.mla(512), (meta(32, 128, 576), meta(32, 2048, 576))),
    "routing": (o.moe_routing(8), (meta(2048, 4096), meta(4096, 128))),
    "performer": (o.performer, (*(meta(8, 4096, 64) for _ in range(3)), meta(256, 64))),
    "short performer": (o.performer, (*(meta(8, 512, 64) for _ in range(3)), meta(256, 64))),
    "variance": (o.variance_by_hand, (meta(128, 32768, dtype=F),)),
    "inertia": (o.inertia, (meta(1024, 32768, dtype=F), meta(1024, 32768, 3, dtype=F))),
    "softmax": (o.softmax, (meta(8192, 32768, dtype=torch.bfloat16),)),
    "long softmax": (o.softmax, (meta(2048, 131072, dtype=torch.bfloat16),)),
    "long norms": (o.rms_norm, (meta(2048, 131072, dtype=torch.bfloat16), meta(131072, dtype=torch.bfloat16))),
}


def assembled(ptx: str, arch: str, folder: Path) -> str:
    """What the assembler reports of registers and spills."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", f"--gpu-name={arch}", str(file), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def made(fn: Callable[..., object], *args: torch.Tensor, units: int = 132) -> list[TritonKernel]:
    """The kernels of a function, as they are launched on a device of so many multiprocessors."""
    torch._dynamo.reset()  # it makes sizes dynamic that it saw change
    program = trace(fn, *args).program
    torch._dynamo.reset()
    return [
        TritonKernel(canonical(k.block).block) for k in fuse_for_gpu(program, GpuTarget(gpu_named("", units))).kernels
    ]


@cache
def kernels(name: str) -> list[TritonKernel]:
    """The kernels of a program."""
    fn, args = PROGRAMS[name]
    return made(fn, *args)


def variant(k: TritonKernel, **options: bool) -> Variant:
    """The default rendering, for tensors whose last axes are contiguous."""
    return k.variant(usual_units(k.block), k.sizes({}), tf32=False, interpreted=False, **options)


def split_product() -> Block:
    """The first kernel of routing with 2,560 features: the product in eight steps of 320."""
    torch._dynamo.reset()
    p = trace(o.moe_routing(6), meta(256, 2560, dtype=torch.bfloat16), meta(2560, 64, dtype=torch.bfloat16)).program
    torch._dynamo.reset()
    first = canonical(fuse_for_gpu(p).kernels[0].block).block
    assert TritonKernel(first).sizes({}) == {"i": 8, "j": 256, "k": 64, "l": 320}
    return first
