"""The keys of a preset."""

from __future__ import annotations

PARALLEL_KEYS = ("mesh", "layouts", "rules", "styles", "redistribute", "pipeline", "routing", "max_unsharded")
"""What a preset may say."""

PIPELINE_KEYS = ("schedule", "microbatches", "stages_per_rank", "balance", "csv")
"""What its key `pipeline` may say."""
