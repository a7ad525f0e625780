"""All programs, and their classes."""

from __future__ import annotations

from tilefold.suites.programs import (
    attentions,
    convolutions,
    images,
    losses,
    networks,
    norms,
    pointwise,
    products,
    reductions,
    routing,
    transformers,
    variants,
)
from tilefold.suites.programs.program import Program

PROGRAMS: tuple[Program, ...] = (
    *pointwise.PROGRAMS,
    *reductions.PROGRAMS,
    *norms.PROGRAMS,
    *losses.PROGRAMS,
    *products.PROGRAMS,
    *convolutions.CONVOLUTIONS,
    *images.CHAINS,
    *convolutions.POOLING,
    *attentions.ATTENTION,
    *attentions.DECODING,
    *variants.VARIANTS,
    *routing.ROUTING,
    *routing.SCANS,
    *networks.RECURRENT,
    *networks.PERCEPTRONS,
    *networks.CONVOLUTIONAL,
    *images.NETWORKS,
    *transformers.PROGRAMS,
)
CLASSES = tuple(dict.fromkeys(p.family for p in PROGRAMS))
