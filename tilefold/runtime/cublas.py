"""Where the native module finds cuBLASLt (`native/product.h`): the library that this torch has loaded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

#: Of the library, then of torch, in the order of `product.h`.
FUNCTIONS: tuple[str, ...] = (
    *("cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", "cublasLtMatmulDescSetAttribute"),
    *("cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", "cublasLtMatrixLayoutSetAttribute"),
    *("cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy", "cublasLtMatmulPreferenceSetAttribute"),
    *("cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"),
)
#: getCurrentCUDABlasLtHandle, getCUDABlasLtWorkspaceSize, getCUDABlasLtWorkspace and getChosenWorkspaceSize of
#: `at::cuda`.
OF_TORCH: tuple[str, ...] = (
    "_ZN2at4cuda26getCurrentCUDABlasLtHandleEv",
    "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv",
    "_ZN2at4cuda22getCUDABlasLtWorkspaceEv",
    "_ZN2at4cuda22getChosenWorkspaceSizeEv",
)


@cache
def functions() -> tuple[int, ...] | None:
    """Addresses of the functions; None where this torch has not all of them."""
    if torch.version.cuda is None:
        return None
    names = {f"libcublasLt.so.{torch.version.cuda.split('.')[0]}": FUNCTIONS}
    names[str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")] = OF_TORCH
    try:
        libraries = {name: ctypes.CDLL(name) for name in names}
        found = [
            ctypes.cast(getattr(libraries[name], f), ctypes.c_void_p).value for name, fs in names.items() for f in fs
        ]
    except (OSError, AttributeError):
        return None
    return tuple(n for n in found if n is not None)
