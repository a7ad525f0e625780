"""Backward kernels of attention on a Hopper GPU, in several schedules, beside cuDNN and FlexAttention.

    python bench/attention_backward.py [row ...] [--seconds 120] [--json FILE]

Rows are scores, features and lengths, bf16. Contenders: `two` (dQ by groups of warps that own queries, dK and dV by
groups that own keys, in one kernel or, of wide heads, in two, as by default; dK is written by features, as in a
compiled backward), `two, groups` (whatever the number of features), `two, turned` (dK leaves through shared memory, not
by pointers), cuDNN's backward or, where it has none, flash's or FlexAttention's. All kernels are compiled first, side
by side. Each contender's gradients are compared with float32 for one head, by the largest error over the largest
element; then they take turns, by events around a few calls. A row is left out, and said to be, when the time is up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.backends.triton.gradients import Score, alibi, causal, of_one_program, plain, softcap
from tilefold.backends.triton.config import TritonConfig
from tilefold.backends.triton.launch import TritonKernel
from tilefold.backends.triton.row_tiles import owning_rows
from tilefold.backends.triton.tiles import default_config
from tilefold.block.ir import Block
from tilefold.suites.gpu.environment import commit_here
from tilefold.suites.timing import in_turn
from tilefold.tensor.sizes import extent

Call = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
#: Name -> score, batch, heads, length, features of queries and keys, of values.
ROWS: dict[str, tuple[Score, int, int, int, int, int]] = {
    "causal d128 4096": (causal, 4, 16, 4096, 128, 128),
    "full d128 4096": (plain, 4, 16, 4096, 128, 128),
    "causal d64 4096": (causal, 4, 16, 4096, 64, 64),
    "causal d256 4096": (causal, 4, 8, 4096, 256, 256),
    "full d256 4096": (plain, 4, 8, 4096, 256, 256),
    "causal d192/128 4096": (causal, 4, 16, 4096, 192, 128),
    "alibi d128 4096": (alibi, 4, 16, 4096, 128, 128),
    "causal d128 16384": (causal, 2, 8, 16384, 128, 128),
    "softcap d128 4096": (softcap, 4, 16, 4096, 128, 128),
    "alibi d64 4096": (alibi, 4, 16, 4096, 64, 64),
    "full d64 4096": (plain, 4, 16, 4096, 64, 64),
}
#: FlexAttention's score of each of ours.
FLEX = {
    plain: lambda s, b, h, i, j: s,
    causal: lambda s, b, h, i, j: s,
    alibi: lambda s, b, h, i, j: s + 0.05 * (j - i),
    softcap: lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
}
#: Of torch, the first that takes the heads.
LIBRARIES = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
ROUNDS, CALLS = 12, 3


def owned(**changes: object) -> Callable[[Block, dict[str, int]], TritonConfig]:
    """Groups of warps that own rows, whatever the number of columns, with some changes."""

    def choose(b: Block, sizes: dict[str, int]) -> TritonConfig:
        return replace(owning_rows(b, sizes, default_config(b, sizes), every=True), **changes)  # type: ignore[arg-type]

    return choose


@dataclass
class Row:
    """Tensors of a row and the kernels of its contenders, by name."""

    name: str
    tensors: dict[str, torch.Tensor]
    steps: dict[str, list[TritonKernel]]
    results: dict[str, tuple[str, str, str]]

    @classmethod
    def of(cls, name: str) -> Row:
        score, batch, heads, n, dim, values = ROWS[name]
        own, other, gradients = of_one_program(score, n, n, dim, heads, batch, values=values, turned=True)
        gen = torch.Generator("cuda").manual_seed(0)
        made = [
            torch.randn(batch, heads, n, columns, generator=gen, device="cuda", dtype=torch.bfloat16)
            for columns in (dim, dim, values, values)
        ]
        t = dict(zip("qkvg", made, strict=True))
        t["lse"], t["o"] = forward(score, *made[:3])
        for b in (*own, other):
            for r in b.results:
                shape = [extent(b.sizes[d], {}) for d in r.dims]
                t.setdefault(r.name, torch.empty(shape, device="cuda", dtype=r.dtype.torch_dtype))
        steps = {
            "two": [TritonKernel(other), *(TritonKernel(b) for b in own)],
            "two, groups": [TritonKernel(other, owned()), *(TritonKernel(b, owned()) for b in own)],
            "two, turned": [TritonKernel(other, owned()), *(TritonKernel(b, owned(descriptors=True)) for b in own)],
        }
        return cls(name, t, steps, {k: ("dq", *gradients) for k in steps})

    def start_building(self) -> None:
        for kernels in self.steps.values():
            for k in kernels:
                k.start_building([self.tensors[n] for n in k.tensors], {})

    def calls(self) -> dict[str, Call]:
        """Contenders; each returns dQ, dK and dV."""
        found = {name: self._ours(name) for name in self.steps}
        score, *_ = ROWS[self.name]
        q, k, v = (self.tensors[n].detach().requires_grad_() for n in "qkv")
        for name, backend in LIBRARIES.items() if score in (causal, plain) else ():
            try:
                with sdpa_kernel(backend):
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=score is causal)
            except RuntimeError:
                continue  # not of such heads
            found[name] = self._of(out, (q, k, v))
            break
        if score in FLEX and found.keys() == self.steps.keys():
            mask = None
            if score is not plain:
                mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, q.shape[2], q.shape[2])
            out = torch.compile(flex_attention)(q, k, v, score_mod=FLEX[score], block_mask=mask)
            found["Flex"] = self._of(out, (q, k, v))
        return found

    def _of(self, out: torch.Tensor, of: tuple[torch.Tensor, ...]) -> Call:
        return lambda: torch.autograd.grad(out, of, self.tensors["g"], retain_graph=True)  # type: ignore[return-value]

    def _ours(self, name: str) -> Call:
        t, kernels = self.tensors, self.steps[name]

        def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            for k in kernels:
                k(t, {})
            dq, dk, dv = (t[n] for n in self.results[name])
            return dq, dk.mT, dv

        return run


def forward(score: Score, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exps in float32, and the result in bf16, a head at a time."""
    lse, out = torch.empty(q.shape[:-1], device=q.device), torch.empty_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = scores(score, q[b, h], k[b, h])
            lse[b, h] = torch.logsumexp(s, -1)
            out[b, h] = torch.softmax(s, -1).to(v.dtype) @ v[b, h]
    return lse, out


def scores(score: Score, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Of one head, in float32."""
    i = torch.arange(q.shape[-2], device=q.device)
    return score((q @ k.mT).float() * q.shape[-1] ** -0.5, i[:, None], i)[0]


def errors(row: Row, found: tuple[torch.Tensor, ...]) -> float:
    """The largest error of the last head's gradients, over the largest element of each."""
    q, k, v = (row.tensors[n][-1, -1].float().requires_grad_() for n in "qkv")
    out = torch.softmax(scores(ROWS[row.name][0], q, k), -1) @ v
    wanted = torch.autograd.grad(out, (q, k, v), row.tensors["g"][-1, -1].float())
    return max(float((f[-1, -1].float() - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True))


def timed(calls: dict[str, Call]) -> dict[str, float]:
    """Microseconds a call, by events, contenders by turns: the median round."""
    names = tuple(calls)
    found: dict[str, list[float]] = {n: [] for n in names}
    for r in range(ROUNDS):
        for n in in_turn(names, r):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            calls[n]()
            start.record()
            for _ in range(CALLS):
                calls[n]()
            end.record()
            end.synchronize()
            found[n].append(1e3 * start.elapsed_time(end) / CALLS)
    return {n: statistics.median(x) for n, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.perf_counter()
    names = [n for n in ROWS if any(n.startswith(x) for x in options.rows)]
    made = {n: Row.of(n) for n in names}
    for row in made.values():
        row.start_building()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {commit_here()}", flush=True)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        if time.perf_counter() - begin > options.seconds:
            print(f"{name}: left out, the time is up")
            continue
        row, good = made[name], dict[str, Call]()
        wrong: dict[str, float] = {}
        for n, call in row.calls().items():
            try:
                wrong[n] = errors(row, call())
                good[n] = call
            except Exception as err:  # one contender's failure is no reason to time none
                print(f"{name}: {n}: {type(err).__name__}: {str(err)[:200]}")
        of = timed(good)
        found[name] = {n: {"us": of[n], "error": wrong[n]} for n in of}
        print(name + ": " + ", ".join(f"{n} {of[n]:.0f} us ({wrong[n]:.1e})" for n in of), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
