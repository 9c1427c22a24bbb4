"""The message where a package of the extra `hf` is missing."""

from __future__ import annotations

from parallelizer.diagnostics.extras import installed_by


def not_installed(name: str) -> str:
    """That a package of the extra is missing, and the command."""
    return f"{name} is not installed: {installed_by('hf')}"
