"""Attention outside of context-parallel modules."""

from __future__ import annotations

import pytest

from tests.simulate.checks.test_followed_step import rule
from tests.simulate.checks.test_local_positions import PLAN, found


@pytest.mark.parametrize("preset", ["cp2", "cp2_tp2"])
def test_attention_without_context_parallelism_is_named(preset: str) -> None:
    (diagnostic,) = found(f"parallel={preset}", rule("layers.1.attention.inner: none"))
    assert (diagnostic.code, diagnostic.severity) == ("local-attention", "error")
    assert "attention in layers.1.attention.inner sees" in diagnostic.message
    assert (
        diagnostic.span is not None
        and "context-parallel" in PLAN.read_text().splitlines()[diagnostic.span.line - 1]
    )
