"""Over all shipped models: what a step casts to float8 are the linears that the plan names, all of them and no others."""

from __future__ import annotations

import pytest

from benchmarks.float8_families import MODELS, Count, counts
from tests.chosen import chosen

pytest.importorskip("torchao", reason="float8 needs torchao")


WITHOUT_LINEARS = ("hf_gpt2",)
"""Models whose layers have matrices of other classes."""


@pytest.mark.parametrize("name", chosen(MODELS, ["llama_debug"]))
def test_the_named_linears_are_cast_and_no_others(name: str) -> None:
    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="the optional extra `hf`")
    halves = counts(name)
    stacked = {"hf_mixtral", "hf_qwen3_moe", "hf_deepseek_v3"}
    named = {path for count in halves for path in count.named}
    assert any(path.endswith(".experts") for path in named) == (name in stacked)
    assert len(halves) == (0 if name in WITHOUT_LINEARS else 2)
    for count in halves:
        assert count.named and (count.unnamed, count.skipped) == (frozenset(), frozenset())


def test_what_is_cast_against_the_plan_is_counted() -> None:
    count = Count("tp2", frozenset({"a", "b"}), frozenset({"b", "c"}))
    assert (count.unnamed, count.skipped) == ({"c"}, {"a"})


@pytest.mark.ranks
@pytest.mark.slow
def test_a_linear_that_a_filter_skips_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallelizer.styles.float8 import linear

    right = linear.run_in_float8

    def wrong(module: object, *args: object, **kwargs: object) -> None:
        if getattr(module, "in_features", 0) != getattr(module, "out_features", 0):
            right(module, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(linear, "run_in_float8", wrong)
    assert any(count.skipped for count in counts("llama_debug"))
