"""A user's own file: which of its names are rows, what their arguments and losses are, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli import invoke
from tilefold.errors import TilefoldError
from tilefold.suites import own
from tilefold.suites.gpu.worker import Job

FILE = """
import torch
from torch import nn

def scaled(x, y, n): return x * y + n, x.argmax(-1)
def scaled_inputs(): return torch.randn(4, 3), torch.randn(3), torch.arange(3)
def helper(x): return x
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 2)
    def forward(self, x): return self.map(x)
def Net_inputs(): return torch.randn(5, 3)
net = Net()
net_inputs = Net_inputs
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_what_has_inputs_is_a_row(file: Path) -> None:
    assert [r.row for r in own.rows(file, own.MODES)] == [
        "scaled", "Net", "net", "scaled train", "Net train", "net train",
    ]  # fmt: skip


def test_arguments_follow_the_seed(file: Path) -> None:
    r = own.rows(file)[0]
    assert torch.equal(r.args(seed=1)[0], r.args(seed=1)[0])
    assert not torch.equal(r.args(seed=1)[0], r.args(seed=2)[0])


def test_training_has_gradients_of_arguments_and_parameters(file: Path) -> None:
    scaled, cls, instance = (r.placed("cpu") for r in own.rows(file, ("train",)))
    (n,) = scaled.args()
    x, y = scaled.fn.parameters()  # type: ignore[attr-defined]
    loss = scaled.fn(n)
    torch.testing.assert_close(loss, (x * y + n).square().mean())  # the indices have none
    for r in (cls, instance):
        r.fn(*r.args()).backward()
        assert all(p.grad is not None for p in r.fn.parameters())  # type: ignore[attr-defined]


def test_an_instance_is_not_changed(file: Path) -> None:
    row = next(r for r in own.rows(file, ("train",)) if r.row == "net train")
    one, other = row.placed("cpu"), row.placed("cpu")
    assert next(one.fn.of.parameters()) is not next(other.fn.of.parameters())  # type: ignore[attr-defined]


def test_the_worker_gets_the_same_rows(file: Path) -> None:
    job = Job("programs", "r", "s", "cpu", rows=("net*",), file=str(file), modes=("infer", "train"))
    again = Job.from_text(job.to_text())
    assert again == job
    assert [c.row for c in again.cases()] == ["Net", "net", "Net train", "net train"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(x): return x\n", "nothing to measure"),
        ("def f(x: return x\n", "is no Python"),
        ("import nothing_of_the_kind\n", "cannot be imported"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(TilefoldError, match=said):
        own.rows(path)


def test_a_dict_of_arguments_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "named.py"
    path.write_text("def f(x): return x\ndef f_inputs(): return {'x': 1}\n")
    with pytest.raises(TilefoldError, match="gives a dict"):
        own.rows(path)[0].args()


def test_the_command_says_what_a_file_takes(file: Path) -> None:
    found = invoke(["bench", str(file), "--classes", "norms"])
    assert found.exit_code == 2
    assert "takes no --classes" in found.output
    missing = invoke(["bench", str(file.with_name("other.py")), "--device", "cpu"])
    assert missing.exit_code == 2
    assert "no such file" in missing.output


def test_the_command_measures(file: Path) -> None:
    found = invoke(["bench", str(file), "--device", "cpu", "--workers", "1", "--rows", "scaled", "--peers", "eager"])
    assert found.exit_code == 0, found.output
    assert "scaled | mine" in found.output
    assert file.with_suffix(".bench.json").is_file()
