"""Tapes in packages: written as records and read again, they compute the same; what has no form is refused."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.drivers import Counters, scaled
from tilefold.backends.triton.launcher import Launcher, Plan
from tilefold.errors import ParseError, UnsupportedError
from tilefold.frontend.packages import taped
from tilefold.frontend.packages.form import CLASSES, StoredTape
from tilefold.frontend.packages.taped import TapedRegion, tape_of
from tilefold.frontend.packages.tapes import stored_tape
from tilefold.runtime import records
from tilefold.runtime.launches import launch_of
from tilefold.runtime.recorder import Recorder

CPU = torch.device("cpu")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class File:
    """What a package keeps."""

    def __init__(self):
        self.blobs, self.tensors = {}, []

    def keep(self, data):
        self.blobs[f"digest of {len(data)}"] = data
        return f"digest of {len(data)}"

    def constant(self, x):
        self.tensors.append(x.clone())
        return len(self.tensors) - 1


def written(fn, args, constants=()):
    """The tape of a call, as records; and what is kept beside it."""
    recorder = Recorder(args, constants)
    recorder.step("step", "in the test")
    with recorder:
        made = fn(recorder, *args)
    tape = recorder.tape(made)
    assert tape is not None, recorder.refused
    file = File()
    return records.dump(stored_tape(tape, args, file.keep, file.constant)), file


def read(text, file, module):
    stored = records.load(text, CLASSES)
    assert isinstance(stored, StoredTape)
    return TapedRegion(tape_of(stored, CPU, file.blobs.__getitem__, file.tensors, {}), stored.arguments, module)


def test_a_tape_computes_what_was_recorded(module, library, monkeypatch):
    """A kernel with a map and a counter, products, operators of torch with lists and dtypes, a view of an argument."""
    counters = Counters()
    plan = scaled(library, monkeypatch, 12, counters=counters)
    monkeypatch.setattr(taped, "counters_of", lambda device: Counted(counters))
    bias = randn(4, seed=5)

    def several(recorder, x, w):
        h = torch.addmm(bias, x, w)
        y = torch.empty_like(h)
        recorder.add(launch_of(plan, recorder.slots([h, y]), [h.data_ptr(), y.data_ptr()], *recorder.at))
        values, at = torch.sort(y, dim=-1, descending=True)
        return [values, at, torch.cat([y, h], 1).to(torch.float64), x[1:], None]

    x, w = randn(3, 5), randn(5, 4, seed=1)
    text, file = written(several, (x, w), [bias])
    assert "scale" in text and file.blobs["digest of 4"] == b"code" and len(file.tensors) == 1
    bias.zero_()  # the package has its own
    run = read(text, file, module)
    for seed in range(3):
        x, w = randn(3, 5, seed=seed), randn(5, 4, seed=seed + 9)
        values, at, both, part, none = run(x, w)
        h = torch.addmm(file.tensors[0], x, w)
        want = torch.sort(3 * h + 5, dim=-1, descending=True)
        torch.testing.assert_close(values, want.values)
        assert torch.equal(at, want.indices) and none is None and part.data_ptr() == x[1:].data_ptr()
        torch.testing.assert_close(both, torch.cat([3 * h + 5, h], 1).double())
    assert counters.memory.item() == 3


class Counted:
    """Counters that are there."""

    def __init__(self, counters):
        self.address = counters.address

    def reserve(self):
        """Nothing to do."""


def test_arguments_of_other_strides_and_addresses_are_copied(module):
    x, w = randn(3, 5), randn(5, 4)
    text, file = written(lambda _, x, w: [x @ w], (x, w))
    run = read(text, file, module)
    wide, odd = randn(3, 10), randn(21)
    for other in (x, wide[:, ::2], randn(5, 3).T, odd[1:16].view(3, 5)):
        torch.testing.assert_close(run(other, w)[0], other @ w)


def test_what_has_no_form_is_refused(module, library):
    def launched(recorder, x):
        y = torch.empty_like(x)
        recorder.add(launch_of(Plan(Launcher(print, ()), 1, ()), recorder.slots([x, y]), [0, 0], *recorder.at))
        return [y]

    with pytest.raises(UnsupportedError, match="started by Triton's own launcher"):
        written(launched, (randn(4),))
    with pytest.raises(UnsupportedError, match="step is a kernel of the CPU"):
        written(lambda recorder, x: recorder.kernel(1, 0, (), [x]) or [x + 1], (randn(4),))


def test_a_damaged_tape_is_refused(module):
    text, file = written(lambda _, x: [torch.sort(x).values], (randn(4),))
    with pytest.raises(ParseError, match=r"no operator aten\.sorted"):
        read(text.replace("sort.default", "sorted.default"), file, module)
