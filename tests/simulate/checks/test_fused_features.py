"""Projections that make several things at once, split as if they made one."""

from __future__ import annotations

import pytest

from tests.simulate.checks.test_followed_step import rule
from tests.simulate.checks.test_local_positions import found
from tests.simulate.setups import GPT


@pytest.mark.parametrize("size", [2, 3])
def test_a_fused_projection_that_is_not_packed_is_named(size: int) -> None:
    heads = ("model.heads=6",)  # which 3 divides too, as it does q|k|v
    written = rule("blocks.*.attention.qkv: colwise")
    (diagnostic,) = found(*GPT, *heads, "parallel=tp2",
                          f"parallel.mesh.tp={size}", written, small=False)  # fmt: skip
    assert (diagnostic.code, diagnostic.severity) == ("fused-features", "error")
    assert (
        "blocks.{0,1}.attention cuts the output of blocks.{0,1}.attention.qkv into parts"
        in diagnostic.message
    )
    assert diagnostic.help is not None and "packed: [1, 1, 1]" in diagnostic.help
