"""Inside a compilation, operators compute where a proof or a renderer asks them to."""

from __future__ import annotations

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tilefold.frontend.regions.real import on_real_tensors


def in_python() -> bool:
    """Whether operators go through torch's dispatcher in Python."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher"))


def test_operators_compute_and_skip_the_dispatcher_in_python() -> None:
    with FakeTensorMode(), enable_python_dispatcher():
        assert isinstance(torch.ones(2), FakeTensor)
        assert in_python()
        with on_real_tensors():
            assert torch.ones(2).sum().item() == 2
            assert not in_python()
        assert isinstance(torch.ones(2), FakeTensor)
        assert in_python()
