"""Which gradients of convolutions of one channel a group kernels of ours compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilefold.plan.gpu_windows import gpu_taps, gpu_windows
from tilefold.plan.hardware import H200
from tilefold.plan.targets.gpu import GpuTarget
from tilefold.tensor.ir import Program
from tilefold.tensor.text import parse

LINE = """program f()
  input x: bf16[4, {x}]
  input dy: bf16[4, {dy}]
  input w: bf16[512, {k}]
  dim n = 4
  dim h = 2048
  dim y = {y}
  dim c = 512
  dim k = {k}
  image[n, {image}]: bf16 = sum[k] where((h + {pad} - k >= 0) & (h + {pad} - k < {y}), dy[n, {at_dy}], 0.0) * w[c, k]
  weight[c, k]: bf16 = sum[n, y] where((y + k - {pad} >= 0) & (y + k - {pad} < 2048), x[n, {at_x}], 0.0) * dy[n, {plain}]
  return image, weight
"""  # noqa: E501


def line(taps: int, last: bool) -> Program:
    y, pad = 2047 + taps, taps - 1

    def both(place: str) -> str:
        return f"{place}, c" if last else f"c, {place}"

    def extents(n: int) -> str:
        return f"{n}, 512" if last else f"512, {n}"

    p = parse(
        LINE.format(
            x=extents(2048), dy=extents(y), y=y, k=taps, pad=pad, image=both("h"), at_dy=both(f"h + {pad} - k"),
            at_x=both(f"y + k - {pad}"), plain=both("y"),
        )
    )  # fmt: skip
    return asked(p)


def asked(p: Program) -> Program:
    return replace(p, body=tuple(replace(c, origin="aten.convolution_backward.default") for c in p.body))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "taps, ours", [(2, {"image", "weight"}), (4, {"image", "weight"}), (16, {"image"}), (64, set())]
)
def test_gradients_of_short_lines_are_ours(taps, ours, last):
    """The library has a general kernel for them. Of more taps than a thread has sums of, the image's alone."""
    p = line(taps, last)
    assert {*gpu_windows(p, H200), *gpu_taps(p, H200)} == ours
    assert GpuTarget(H200).products(GpuTarget(H200).written_out(p)) == {"image", "weight"} - ours


IMAGE = """program f()
  input x: bf16[8, 56, 56, 64]
  input dy: bf16[8, {y}, {y}, 64]
  input w: bf16[64, {k}, {k}]
  dim n = 8
  dim h = 56
  dim g = 56
  dim y = {y}
  dim v = {y}
  dim c = 64
  dim k = {k}
  dim l = {k}
  image[n, h, g, c]: bf16 = sum[k, l] where(({h} >= 0) & ({h} < {y}), where(({g} >= 0) & ({g} < {y}), dy[n, {h}, {g}, c], 0.0), 0.0) * w[c, k, l]
  weight[c, k, l]: bf16 = sum[n, y, v] x[n, y + k, v + l, c] * dy[n, y, v, c]
  return image, weight
"""  # noqa: E501


@pytest.mark.parametrize("edge, ours", [(2, {"image", "weight"}), (3, set()), (4, {"image"}), (5, set())])
def test_gradients_of_odd_windows_of_images_are_the_library_s(edge, ours):
    p = asked(parse(IMAGE.format(k=edge, y=57 - edge, h="h - k", g="g - l")))
    assert {*gpu_windows(p, H200), *gpu_taps(p, H200)} == ours


def test_the_gradient_of_a_strided_line_is_the_library_s():
    """Half of its taps are of no place."""
    text = """program f()
  input dy: bf16[4, 1024, 512]
  input w: bf16[512, 4]
  dim n = 4
  dim h = 2048
  dim c = 512
  dim k = 4
  image[n, h, c]: bf16 = sum[k] where((h - k + 1) % 2 == 0, where((h - k + 1 >= 0) & ((h - k + 1) // 2 < 1024), dy[n, (h - k + 1) // 2, c], 0.0), 0.0) * w[c, k]
  return image
"""  # noqa: E501
    p = asked(parse(text))
    assert gpu_windows(p, H200) == set() and GpuTarget(H200).products(p) == {"image"}
