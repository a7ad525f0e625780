"""Curves of a small decoder: what rounding does is measured, what is wrong is said to be wrong."""

from dataclasses import replace

import pytest
import torch

from tests.cli import invoke
from tilefold.errors import TilefoldError
from tilefold.suites.models import curve
from tilefold.suites.models.decoder import Decoder, Sizes, batches, text

TINY = Sizes(layers=1, width=16, heads=2, batch=6, length=12)


@pytest.fixture(scope="module")
def report():
    """Of a contender that is eager mode, and of one whose gradients are a thousandth too long."""

    def longer(gm, example_inputs):
        def run(*args):
            return tuple(x if x is None else 1.001 * x for x in gm(*args))

        return run

    wrong = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda gm, args: gm.forward, bw_compiler=longer)
    torch._dynamo.register_backend(wrong, name="longer_gradients")
    return curve.run("cpu", contenders=("aot_eager", "longer_gradients"), sizes=TINY, steps=30, commit="abc1234")


def test_a_contender_that_only_rounds_passes_and_a_wrong_one_does_not(report):
    right, wrong = report.others
    assert report.passes(right)
    assert not report.passes(wrong)
    assert 0.0 < report.noise < 1e-4 and report.exact.distance == 0.0
    assert report.exact.losses[-1] < report.exact.losses[0]


def test_the_order_of_windows_changes_roundings_alone(report):
    first, second, third = (c.losses for c in report.eager)
    assert len({first, second, third}) == 3
    assert first == pytest.approx(second, rel=1e-4) and first == pytest.approx(third, rel=1e-4)


def test_a_report_is_read_as_it_was_written_and_devices_stand_beside_each_other(report, tmp_path):
    page = tmp_path / "page.md"
    curve.write(report, json_path=tmp_path / "curve" / "cpu.json", docs_path=page)
    other = replace(report, device="another device")
    curve.write(other, json_path=tmp_path / "curve" / "gpu.json", docs_path=page)
    assert curve.load(tmp_path / "curve" / "cpu.json") == report
    written = page.read_text(encoding="utf-8")
    assert "another device, torch" in written and f"{report.device}, torch" in written
    assert written.count("| longer_gradients |") == written.count("| NOT as eager |") == 2


def test_the_command_trains_where_it_is_asked_to(report, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(curve, "run", lambda device, **more: asked.append((device, more["contenders"])) or report)
    path = tmp_path / "cpu.json"
    words = ["bench", "curve", "--peers", "", "--json", str(path)]
    assert invoke(words).exit_code == 0
    assert asked == [("cpu", ("tilefold",))] and curve.load(path) == report


def test_the_page_is_made_again_of_files_from_elsewhere(report, tmp_path):
    curve.write(report, json_path=tmp_path / "curve" / "gpu.json")
    page = tmp_path / "page.md"
    assert invoke(["bench", "page", "--json", str(tmp_path / "gpu.json"), "--docs", str(page)]).exit_code == 0
    assert curve.markdown(report) in page.read_text(encoding="utf-8")


def test_batches_are_windows_of_the_text():
    joint = text()
    drawn = batches(joint, TINY, steps=3)
    assert drawn.shape == (3, TINY.batch, TINY.length + 1)
    whole = bytes(joint.tolist())
    assert all(bytes(w.tolist()) in whole for step in drawn for w in step)


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(TilefoldError, match="no text to train on"):
        text(tmp_path)


def test_each_byte_is_told_from_those_before_it_alone():
    torch.manual_seed(0)
    model = Decoder(TINY).double()
    tokens = torch.randint(256, (1, TINY.length + 1))
    seen = []
    model.head.register_forward_hook(lambda m, given, out: seen.append(out.detach()))
    model(tokens)
    tokens[0, -2] += 1 if tokens[0, -2] < 255 else -1
    model(tokens)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1]) and not torch.equal(seen[0], seen[1])
