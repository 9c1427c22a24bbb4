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


@pytest.mark.parametrize(
    ("packed", "right"),
    [
        ("[1, 1, 1]", True),
        ("[1, 1]", False),
        ("[1, 2]", False),
        ("[1, 2, 1]", False),
        ("[48, 24, 48, 24]", False),
    ],
)
def test_parts_that_the_forward_does_not_cut_between_are_named(packed: str, right: bool) -> None:
    written = rule(f"blocks.*.attention.qkv: {{style: colwise, packed: {packed}}}")
    wrong = found(*GPT, "parallel=tp2", written, small=False)
    if right:
        assert not wrong
        return
    (diagnostic,) = wrong
    assert (diagnostic.code, diagnostic.severity) == ("fused-features", "error")
    assert (
        "cuts the output of blocks.{0,1}.attention.qkv into parts of 1:1:1, but `packed` splits parts of"
        in (diagnostic.message)
    )
