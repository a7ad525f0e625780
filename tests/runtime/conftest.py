"""A driver of GPUs that needs none."""

from __future__ import annotations

from tests.runtime.drivers import library, module  # noqa: F401
