"""The keys of a preset."""

from __future__ import annotations

PARALLEL_KEYS = ("mesh", "layouts", "rules", "styles", "redistribute", "max_unsharded")
"""What a preset may say."""
