"""A small decoder learns text for 200 steps, in eager mode and compiled: the losses are the same but for rounding.

The text is Tilefold's own source. Rounding is measured, too: float64 is what both are compared with.
`tilefold bench curve --device cuda` is the same on a GPU, of a larger decoder in bfloat16, with Inductor beside it.
"""

import torch

from tilefold.suites.models import curve
from tilefold.suites.models.curve import train
from tilefold.suites.models.decoder import SMALL, Decoder, batches, text

STEPS = 200


def main() -> None:
    torch.manual_seed(0)
    start = Decoder(SMALL)  # RMSNorm, rotary positions, causal attention, SwiGLU: plain PyTorch
    data = batches(text(), SMALL, STEPS)
    print(
        f"{len(text()) / 1e6:.1f} MB of text, {sum(p.numel() for p in start.parameters()) / 1e3:.0f} thousand weights"
    )

    def copied() -> Decoder:
        model = Decoder(SMALL)
        model.load_state_dict(start.state_dict())
        return model

    exact = train("float64", copied().double(), data)
    eager = train("eager", copied(), data, exact=exact.losses)
    model = copied()
    model.compile(backend="tilefold")
    fused = train("tilefold", model, data, exact=exact.losses)
    for c in (exact, eager, fused):
        shown = " ".join(f"{loss:.5f}" for loss in c.losses[:: STEPS // 5])
        print(f"{c.name:9} {shown} .. {c.losses[-1]:.5f}  mean distance from float64 {c.distance:.1e}")
    assert fused.losses[-1] < 0.6 * fused.losses[0]
    assert fused.distance <= curve.LIMIT * eager.distance


if __name__ == "__main__":
    main()
