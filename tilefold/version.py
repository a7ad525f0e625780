"""The version of the installed package, which comes from git's tags when it is built."""

from __future__ import annotations

from importlib import metadata

#: Where the package runs from its source without being installed.
UNKNOWN = "0+unknown"


def version() -> str:
    """As pip knows it: "0.1.0"; between tags with the commits since the last and the commit's name."""
    try:
        return metadata.version("tilefold")
    except metadata.PackageNotFoundError:
        return UNKNOWN
