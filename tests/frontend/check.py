"""Lower a function through AOTAutograd and compare the tensor interpreter's results with eager's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func

from tilefold.frontend.capture.decompose import decompositions
from tilefold.frontend.operators.bindings import Lowered
from tilefold.frontend.operators.fx_to_tensor import lower
from tilefold.frontend.regions.execute import Executable, interpreted
from tilefold.tensor.text import parse, show

TABLE = decompositions()


def compiled(fn: Callable[..., object], symbolic: bool, found: list[Lowered]) -> Callable[..., object]:
    """`fn` with forward and backward run by the interpreter; the lowerings are appended to `found`."""

    def compiler(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        low = lower(gm, name=getattr(fn, "__name__", "f"))
        assert parse(show(low.program)) == low.program
        found.append(low)
        return make_boxed_func(Executable(low, interpreted(low.program)))

    return aot_function(fn, fw_compiler=compiler, decompositions=dict(TABLE), dynamic=symbolic)


def lowered(fn: Callable[..., object], *args: torch.Tensor, symbolic: bool = False) -> Lowered:
    """The lowering of a function."""
    found: list[Lowered] = []
    with torch.no_grad():
        compiled(fn, symbolic, found)(*args)
    return found[0]


def check(
    fn: Callable[..., object],
    *args: torch.Tensor,
    tol: float = 1e-5,
    modes: tuple[bool, ...] = (False, True),
    wide: bool = False,
) -> Lowered:
    """Values, dtypes, shapes and strides as eager's, with static and symbolic sizes; the text form round-trips.

    wide: where eager gives NaN, what it gives in float64 (some of its vector code turns infinities into NaN).
    """
    wants = _listed(fn(*args))
    if wide:
        doubles = _listed(fn(*(x.double() for x in args)))
        wants = [torch.where(w.isnan(), y.to(w.dtype), w) for w, y in zip(wants, doubles, strict=True)]
    found: list[Lowered] = []
    for symbolic in modes:
        found = []
        with torch.no_grad():
            got = _listed(compiled(fn, symbolic, found)(*args))
        assert len(got) == len(wants)
        for g, w in zip(got, wants, strict=True):
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            if w.numel() > 1 and 0 not in w.stride():
                assert g.stride() == w.stride() or any(s == 1 for s in w.shape)
            same(g, w, tol)
    return found[0]


def check_backward(fn: Callable[..., torch.Tensor], x: torch.Tensor, *rest: torch.Tensor, tol: float = 1e-5) -> None:
    """The gradient by x of sum(fn(x, *rest) * c) for some c, against eager's."""
    grads = []
    for f in (fn, compiled(fn, False, [])):
        leaf = x.clone().requires_grad_()
        y = f(leaf, *rest)
        assert isinstance(y, torch.Tensor)
        y.backward(randn(*y.shape, dtype=y.dtype, seed=7))
        assert leaf.grad is not None
        grads.append(leaf.grad)
    same(grads[1], grads[0], tol)


def same(got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    """Equal up to tol, NaN and infinities in the same places."""
    a, b = (t.float() if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t for t in (got, want))
    torch.testing.assert_close(a, b, rtol=tol, atol=tol, equal_nan=True)


def _listed(x: object) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple | list) else [x]  # type: ignore[list-item]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Reproducible normal values."""
    g = torch.Generator().manual_seed(seed + sum((n + 1) * s for n, s in enumerate(shape)))
    return torch.randn(shape, generator=g, dtype=torch.float32).to(dtype)
