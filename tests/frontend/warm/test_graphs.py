"""A second process takes up what the first compiled: same results and gradients, nothing traced; or compiles anew."""

from __future__ import annotations

import os

import pytest

from tests.frontend.warm.programs import MLP, NORM, runs_in

#: A product alone: its call has a tape without kernels, which processes share on CPUs too.
PRODUCT = "m = torch.nn.Linear(16, 300, bias=False)"


@pytest.fixture
def process(tmp_path):
    return runs_in(tmp_path)


@pytest.mark.parametrize("model", [MLP, NORM], ids=["mlp", "norm"])
def test_a_second_process_does_not_trace(process, model):
    first, second = process(model), process(model)
    assert (first["hit"], first["saved"]) == (0, 1)
    assert (second["hit"], second["saved"]) == (1, 0)
    assert second["earlier"] == ["graph0_forward", "graph0_backward"]
    assert (first["told"], second["told"]) == (False, True)
    assert process(model, retain=True)["hit"] == 1


def test_another_model_option_or_setting_is_compiled_anew(process):
    process()
    assert process(MLP.replace("GELU()", "SiLU()"))["hit"] == 0
    assert process(options=', options={"partition": "min_cut"}')["hit"] == 0
    assert process(TILEFOLD_INDEX_CHECKS="0")["hit"] == 0
    assert process(before="torch.set_num_threads(1); torch.use_deterministic_algorithms(True)")["hit"] == 0
    assert process()["hit"] == 1


def test_a_backward_that_is_compiled_at_once(process):
    at_once = "torch._functorch.config.force_non_lazy_backward_lowering = True"
    assert process(before=at_once)["saved"] == 1
    assert process(before=at_once)["hit"] == 1


def test_what_is_not_kept(process):
    custom = """
@torch.library.custom_op("test_warm::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
double.register_fake(lambda x: torch.empty_like(x))
double.register_autograd(lambda ctx, g: g * 2)
class M(torch.nn.Linear):
    def forward(self, x):
        return double(super().forward(x))
m = M(16, 8)
"""
    free = "torch._dynamo.config.assume_static_by_default = False"
    for how in ({"model": custom}, {"TILEFOLD_REUSE_GRAPHS": "0"}, {"before": free}):
        assert not process(**how)["saved"]
        assert not process(**how)["hit"]


def test_a_folder_that_others_may_write_is_not_read(process, tmp_path):
    process()
    os.chmod(tmp_path / "torch" / "aotautograd", 0o777)
    assert process()["hit"] == 0
    os.chmod(tmp_path / "torch" / "aotautograd", 0o755)
    (folder,) = (tmp_path / "torch" / "aotautograd").iterdir()
    os.chmod(folder, 0o755)
    (entry,) = folder.iterdir()
    os.chmod(entry, 0o666)
    assert process()["hit"] == 0
    os.chmod(entry, 0o600)
    assert process()["hit"] == 1


def test_a_call_that_was_kept_is_run_and_nothing_is_compiled(process, tmp_path):
    """And a file that was changed is of no use: the graph is compiled."""
    wait = "native().wait()"
    process(PRODUCT, before=wait, calls=3)
    files = sorted((tmp_path / "ours" / "calls").iterdir())
    assert len(files) == 2
    found = process(PRODUCT, before=wait, calls=3)
    assert found["compiled"] == []
    for f in files:
        f.write_bytes(f.read_bytes()[:-40])
    found = process(PRODUCT, before=wait, calls=2)
    assert found["hit"] == 1
    assert found["compiled"] == ["graph0_forward", "graph0_backward"]
