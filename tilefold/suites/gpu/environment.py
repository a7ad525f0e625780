"""Where a run takes place: the device and the versions that a figure depends on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tilefold.runtime.gpu_configs import device_name
from tilefold.runtime.tuner.table import SHIPPED

_PACKAGES = ("tilefold", "triton", "quack-kernels", "nvidia-cutlass-dsl")


def device_facts(device: str) -> dict[str, Any]:
    """Name, capability, multiprocessors and memory (GiB) of the current device."""
    if device == "cpu":
        return {
            "name": cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": p.name,
        "capability": f"{p.major}.{p.minor}",
        "multiprocessors": p.multi_processor_count,
        "memory_gib": round(p.total_memory / 2**30, 1),
    }


def cpu_name() -> str:
    """The processor's name as Linux says it; the architecture elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, os.uname().machine)


def commit_here() -> str:
    """The commit that this package is checked out at, "-dirty" with changes; "unknown" outside of a checkout."""
    words = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*")
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def shipped_table(device: str) -> str:
    """Whether configurations tuned for this device come with the package."""
    if device == "cpu":
        return "none"
    return "shipped" if (SHIPPED / f"{device_name().lower().replace(' ', '-')}.json").is_file() else "none"


def versions() -> dict[str, str]:
    """Python, torch, CUDA, cuDNN and the packages that generate code; those that are missing are left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
