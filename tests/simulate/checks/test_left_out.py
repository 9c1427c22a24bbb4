"""A glob that leaves out one of several alike is named, and not the place where that module fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulate.checks.test_followed_step import CONFIGS, found, marked

LLAMA = (CONFIGS / "plans" / "llama.yaml").read_text()


@pytest.mark.parametrize(
    ("meant", "written", "left", "styled"),
    [
        ("attention.w[qkv]", "attention.w[kv]", "attention.wq", "attention.{wk,wv}"),
        ("attention.w[qkv]", "attention.w[qv]", "attention.wk", "attention.{wq,wv}"),
        ("feed_forward.w[13]", "feed_forward.w[1]", "feed_forward.w3", "feed_forward.w1"),
    ],
)
def test_a_sibling_that_is_left_out_is_told_at_the_glob(
    meant: str, written: str, left: str, styled: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(LLAMA.replace(meant, written))
    (diagnostic,) = found("parallel=tp2", f"plan={plan}")
    assert diagnostic.code == "left-out"
    assert f"matches layers.0.{styled} but not layers.0.{left}," in diagnostic.message
    assert marked(diagnostic) == f"layers.*.{written}"


def test_the_same_module_of_another_layer_comes_before_a_sibling(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        LLAMA.replace("layers.*.attention.wo,", "layers.1.attention.wo,").replace(
            "layers.*.{attention.wo,feed_forward.w2}", "layers.{1.attention.wo,*.feed_forward.w2}"
        )
    )
    (diagnostic,) = found("parallel=tp2", f"plan={plan}")
    assert diagnostic.code == "left-out"
    assert "this rule matches layers.1.attention.wo but not layers.0.attention.wo," in diagnostic.message
