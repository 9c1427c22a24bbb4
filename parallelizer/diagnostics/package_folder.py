"""Where this package lies: the one place that knows it, so that a file may move without its paths."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder `parallelizer`."""


def config_folder() -> Path:
    """The folder of the shipped configuration: `parallelizer.configs`, in a checkout a link to the folder beside it."""
    return (ROOT / "configs").resolve()
