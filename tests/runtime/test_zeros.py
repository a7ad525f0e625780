"""Zeros that kernels add to, of several results in one piece of memory."""

from __future__ import annotations

import torch

from tilefold.runtime.recorder import Recorder
from tilefold.runtime.zeros import ZerosStep


def test_each_result_is_zeros_of_its_own_and_all_are_one_tensor():
    step = ZerosStep([("y", torch.float32, lambda _: (3, 5)), ("z", torch.float32, lambda _: (70,))])
    x = torch.ones(2)
    recorder, tensors = Recorder((x,), ()), {"x": x}
    with recorder:
        step.run(tensors, {})
    y, z = tensors["y"], tensors["z"]
    assert y.shape == (3, 5) and z.shape == (70,) and not y.any() and not z.any()
    assert y.untyped_storage().data_ptr() == z.untyped_storage().data_ptr() and z.storage_offset() % 64 == 0
    y += 1
    assert not z.any()
    tape = recorder.tape([y, z])
    assert tape is not None and not recorder.refused and len(tape.code) == 1
