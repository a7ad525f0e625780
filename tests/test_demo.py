"""The demonstration's parts: which lines are embedded, neighbours, batches."""

from __future__ import annotations

import math

import pytest
import torch

from tilefold.demo import encoder, lines
from tilefold.demo.embed import embed, neighbours
from tilefold.errors import TilefoldError

MARKDOWN = """
# A title of several words here

Some prose about [kernels](http://example.invalid/page) and their folds.
too short
```python
code_in_a_fence = "is not prose at all, whatever it says"
```
* an item of a list with words
| a table row | with `four_words` _left_ |
|---|---|---|---|
* an item of a list with words
"""


def test_sentences_drop_marks_fences_and_repeats():
    assert lines.sentences(MARKDOWN) == (
        "A title of several words here",
        "Some prose about kernels and their folds.",
        "an item of a list with words",
        "a table row with four_words left",
    )


def test_read_rejects_a_file_without_sentences(tmp_path):
    (tmp_path / "short.txt").write_text("one two\nthree\n")
    with pytest.raises(TilefoldError, match="holds 0 usable line"):
        lines.read(tmp_path / "short.txt")


def test_read_rejects_missing_and_binary_files(tmp_path):
    with pytest.raises(TilefoldError, match=r"cannot read .*No such file"):
        lines.read(tmp_path / "absent.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TilefoldError, match="not UTF-8"):
        lines.read(tmp_path / "binary")


def test_neighbours_never_pick_the_row_itself():
    vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), dim=-1)
    found = neighbours(vectors)
    assert [n.other for n in found] == [1, 0, 1]
    assert found[0].cosine == pytest.approx(0.9 / math.hypot(0.9, 0.1))


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    pytest.importorskip(encoder.PACKAGE)
    return encoder.load()


def test_batches_cover_every_line_once_and_embed_restores_the_order(model):
    text = [f"line {i} " + "word " * (i * 7 % 11) for i in range(10)]
    batches = model.batches(text, 4)
    assert sorted(r for b in batches for r in b.rows) == list(range(10))
    assert all(2 <= len(b.rows) <= 4 for b in batches)
    together = embed(model.encoder, batches)
    alone = embed(model.encoder, model.batches(text, 1))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(10))


def test_float64_encoder_is_the_same_model(model):
    batches = model.batches(["the cat sat on the mat", "a dog lay on the rug"], 2)
    exact = embed(model.exact, batches)
    assert exact.dtype is torch.float64
    assert 0 < (embed(model.encoder, batches) - exact).abs().max() < 1e-5


def test_missing_model_package_is_a_friendly_error(monkeypatch):
    monkeypatch.setattr(encoder, "PACKAGE", "no_such_package_here")
    with pytest.raises(TilefoldError, match=r"tilefold\[demo\]"):
        encoder.model_path()
